//! Requests that are wrong: each is answered in the API's form with the field's name, and the server goes on.

use crate::site::{Answer, Setup, Site, chunk, head};
use kvant_server::Options;
use serde_json::{Value, json};
use std::io::{BufReader, Write};
use std::time::Duration;

#[test]
fn fields_of_completions_are_checked_by_name() {
    let site = Site::start(Setup::default());
    let with = |field: &str, value: Value| {
        let mut body = json!({ "prompt": "x", "max_tokens": 2 });
        body[field] = value;
        site.complete(body)
    };
    for (field, value, words) in [
        ("max_tokens", json!(-1), "1 or more"),
        ("max_tokens", json!(0), "1 or more"),
        ("max_tokens", json!("five"), "invalid type"),
        ("max_tokens", json!(1.5), "invalid type"),
        ("temperature", json!(-0.1), "from 0 to 2"),
        ("temperature", json!(2.1), "from 0 to 2"),
        ("temperature", json!("hot"), "invalid type"),
        ("temperature", json!([1]), "invalid type"),
        ("top_p", json!(1.1), "from 0 to 1"),
        ("min_p", json!(-1), "from 0 to 1"),
        ("top_k", json!(-2), "-1 or more"),
        ("seed", json!(1.5), "whole number"),
        ("seed", json!("x"), "whole number"),
        ("n", json!(0), "1 or more"),
        ("n", json!(129), "at most 128"),
        ("n", json!(17), "16 at most"),
        ("stream", json!("yes"), "invalid type"),
        ("stop", json!(5), "list of texts"),
        ("stop", json!([1]), "list of texts"),
        ("stop", json!(vec!["x"; 17]), "at most 16"),
        ("logprobs", json!(-1), "0 or more"),
        ("logprobs", json!(21), "at most 20"),
        ("logprobs", json!(true), "invalid type"),
        ("prompt", json!(null), "missing"),
        ("prompt", json!([]), "empty"),
        ("prompt", json!(""), "empty"),
        ("prompt", json!({}), "must be a text"),
        ("prompt", json!([1, "a"]), "must be a text"),
        ("prompt", json!([1, -1]), "must be a text"),
        ("prompt", json!([999_999]), "does not exist"),
        ("prompt", json!("x".repeat(701)), "700"),
        ("prompt", json!(vec![1; 701]), "700"),
        ("stream_options", json!({ "include_usage": true }), "stream: true"),
        ("logit_bias", json!({ "5": 1 }), "does not support"),
        ("frequency_penalty", json!(0.5), "does not support"),
        ("presence_penalty", json!(-0.5), "does not support"),
        ("repetition_penalty", json!(1.1), "does not support"),
        ("best_of", json!(3), "does not support"),
        ("echo", json!(true), "does not support"),
        ("suffix", json!("end"), "does not support"),
        ("max_token", json!(3), "no such field"),
        ("model", json!(5), "invalid type"),
    ] {
        with(field, value.clone()).is_refused(400, Some(field), words);
    }
    for (field, value, param) in [
        ("prompt", json!(["a", 5]), "prompt[1]"),
        ("prompt", json!([[1, 2], ["a"]]), "prompt[1]"),
        ("stop", json!(["a", ""]), "stop[1]"),
    ] {
        with(field, value).is_refused(400, Some(param), "must");
    }
    with("model", json!("gpt-17")).is_refused(404, Some("model"), "`gpt-17`");
    let none = site.post("/v1/completions", &json!({ "prompt": "x" }));
    none.is_refused(400, Some("model"), "missing");
    let code = with("prompt", json!("x".repeat(701))).json()["error"]["code"].clone();
    assert_eq!(code, "context_length_exceeded");
    assert_eq!(with("max_tokens", json!(3)).status, 200, "it goes on");
}

#[test]
fn fields_of_chats_are_checked_by_name() {
    let site = Site::start(Setup::default());
    let message = |m: Value| site.chat(json!({ "messages": [{ "role": "user", "content": "a" }, m], "max_tokens": 2 }));
    for (bad, param, words) in [
        (json!("hello"), "messages[1]", "must be an object"),
        (json!({ "content": "x" }), "messages[1].role", "missing"),
        (json!({ "role": 5, "content": "x" }), "messages[1].role", "must be a text"),
        (json!({ "role": "tool", "content": "x" }), "messages[1].role", "`tool`"),
        (json!({ "role": "user" }), "messages[1].content", "missing"),
        (json!({ "role": "user", "content": 5 }), "messages[1].content", "must be a text"),
        (json!({ "role": "user", "content": [5] }), "messages[1].content[0].type", "missing"),
        (json!({ "role": "user", "content": [{ "type": "text" }] }), "messages[1].content[0].text", "must be a text"),
        (
            json!({ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }),
            "messages[1].content[0]",
            "`image_url`",
        ),
        (
            json!({ "role": "assistant", "content": "", "tool_calls": [{}] }),
            "messages[1].tool_calls",
            "does not support",
        ),
        (json!({ "role": "user", "content": "x", "name": 5 }), "messages[1].name", "must be a text"),
    ] {
        message(bad).is_refused(400, Some(param), words);
    }
    assert_eq!(message(json!({ "role": "user", "content": "x", "name": "me" })).status, 200);
    let with = |field: &str, value: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_completion_tokens": 2 });
        body[field] = value;
        site.chat(body)
    };
    for (field, value, words) in [
        ("messages", json!([]), "empty"),
        ("messages", json!("x"), "list of messages"),
        ("messages", json!(null), "missing"),
        ("tools", json!([{ "type": "function" }]), "does not support"),
        ("tool_choice", json!("required"), "does not support"),
        ("functions", json!([{}]), "does not support"),
        ("response_format", json!({ "type": "json_object" }), "does not support"),
        ("response_format", json!({ "type": "json_schema", "json_schema": {} }), "does not support"),
        ("modalities", json!(["audio"]), "does not support"),
        ("reasoning_effort", json!("high"), "does not support"),
        ("top_logprobs", json!(2), "logprobs: true"),
        ("logprobs", json!(2), "invalid type"),
        ("max_tokens", json!(3), "contradicts"),
        ("prompt", json!("x"), "no such field"),
    ] {
        with(field, value).is_refused(400, Some(field), words);
    }
    let long = json!([{ "role": "user", "content": "x".repeat(2000) }]);
    with("messages", long).is_refused(400, Some("messages"), "700");
    assert_eq!(with("max_tokens", json!(2)).status, 200, "it goes on");
}

#[test]
fn bodies_that_are_no_json_object_or_too_large_are_refused() {
    let options = Options { max_body_bytes: 10_000, max_running: 8, ..Options::new("tiny") };
    let site = Site::start(Setup { options, ..Setup::default() });
    let post = |body: &[u8]| site.ask("POST", "/v1/completions", &[], body);
    for (body, words) in [
        (&b"{\"prompt\": \"x\""[..], "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"{\"prompt\": \"\xff\xfe\"}", "not UTF-8"),
        (b"\x00\x01\x02", "not JSON"),
    ] {
        post(body).is_refused(400, None, words);
    }
    post(&b"[".repeat(9_000)).is_refused(400, None, "not JSON");
    post(&vec![b' '; 10_001]).is_refused(413, None, "10000 bytes");
    // The same without a length that says so.
    let mut stream = site.connect();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n",
        site.address
    );
    stream.write_all(head.as_bytes()).unwrap();
    for _ in 0..20 {
        let _ = stream.write_all(format!("400\r\n{}\r\n", " ".repeat(1024)).as_bytes());
    }
    let mut reader = BufReader::new(stream);
    assert_eq!(head_status(&mut reader), 413);
    assert_eq!(site.get("/health").status, 200, "it goes on");
}

fn head_status(reader: &mut BufReader<std::net::TcpStream>) -> u16 {
    head(reader).0
}

#[test]
fn a_body_that_does_not_come_is_not_waited_for() {
    let options = Options { body_timeout: Duration::from_millis(100), max_running: 8, ..Options::new("tiny") };
    let site = Site::start(Setup { options, ..Setup::default() });
    let mut stream = site.connect();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: 500\r\n\r\n{{", site.address);
    stream.write_all(head.as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    assert_eq!(head_status(&mut reader), 408);
}

#[test]
fn unknown_addresses_and_methods_have_errors_of_the_same_form() {
    let site = Site::start(Setup::default());
    site.get("/v2/models").is_refused(404, None, "/v2/models");
    site.get("/v1/completions").is_refused(405, None, "GET");
    site.ask("DELETE", "/v1/models/tiny", &[], b"").is_refused(405, None, "DELETE");
    // What is no HTTP at all closes its connection and no other.
    let mut stream = site.connect();
    stream.write_all(b"\x16\x03\x01 this is not HTTP\r\n\r\n").unwrap();
    let answer = Answer::read(stream);
    assert_eq!(answer.status, 400);
    assert_eq!(site.get("/health").json(), json!({ "status": "ok" }));
}

#[test]
fn without_the_key_nothing_is_told() {
    let options = Options { api_key: Some("secret".into()), max_running: 8, ..Options::new("tiny") };
    let mut site = Site::start(Setup { options, ..Setup::default() });
    let body = json!({ "model": "tiny", "prompt": "x", "max_tokens": 1 });
    assert_eq!(site.post("/v1/completions", &body).status, 200);
    for key in [Some("secre"), Some("secrets"), Some("Secret"), None] {
        site.key = key.map(String::from);
        for path in ["/v1/models", "/metrics", "/status", "/nothing"] {
            let answer = site.get(path);
            answer.is_refused(401, None, "API key");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
        site.post("/v1/chat/completions", &body).is_refused(401, None, "API key");
        assert_eq!((site.get("/health").status, site.get("/").status), (200, 200), "they tell nothing");
    }
    let basic = site.ask("GET", "/v1/models", &[("Authorization", "Basic secret")], b"");
    basic.is_refused(401, None, "API key");
}

#[test]
fn pages_of_other_sites_are_not_answered() {
    let site = Site::start(Setup::default());
    let own = format!("http://{}", site.address);
    assert_eq!(site.ask("GET", "/status", &[("Origin", &own)], b"").status, 200);
    for other in ["http://evil.example", "null", "http://127.0.0.1:1"] {
        site.ask("GET", "/status", &[("Origin", other)], b"").is_refused(403, None, "another site");
    }
}

#[test]
fn only_names_that_are_the_servers_are_answered() {
    let with = |hosts: Option<Vec<String>>| {
        let options = Options { hosts, max_running: 8, ..Options::new("tiny") };
        Site::start(Setup { options, ..Setup::default() })
    };
    let site = with(Some(vec!["kvant.lan".into()]));
    for ours in ["localhost", "localhost:80", "127.0.0.1:1", "[::1]:8080", "kvant.lan", "KVANT.lan:8080"] {
        assert_eq!(site.get_as(ours, "/status").status, 200, "{ours}");
    }
    for other in ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"] {
        let answer = site.get_as(other, "/status");
        answer.is_refused(403, None, other);
        assert_eq!(answer.json()["error"]["code"], "host_not_allowed");
    }
    assert_eq!(with(None).get_as("evil.example", "/status").status, 200);
}

#[test]
fn what_a_client_wrote_comes_back_shortened() {
    let site = Site::start(Setup::default());
    let long = "k".repeat(1 << 20);
    for (answer, status) in [
        (site.complete(json!({ "prompt": "x", &long: 1 })), 400),
        (site.complete(json!({ "prompt": "x", "seed": &long })), 400),
        (site.complete(json!({ "prompt": "x", "temperature": &long })), 400),
        (site.complete(json!({ "prompt": "x", "stream": true, "stream_options": { &long: 1 } })), 400),
        (site.chat(json!({ "messages": [{ "role": "user", "content": "x", &long: 1 }] })), 400),
        (site.chat(json!({ "messages": [{ "role": &long, "content": "x" }] })), 400),
        (site.complete(json!({ "prompt": "x", "model": &long })), 404),
    ] {
        assert_eq!(answer.status, status);
        assert!(answer.body.len() < 1000, "{} bytes", answer.body.len());
    }
}

#[test]
fn bad_requests_leave_a_stream_beside_them_alone() {
    let site = Site::start(Setup::default());
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 300, "temperature": 0, "ignore_eos": true, "stream": true });
    let alone = site.post("/v1/completions", &body).events();
    let mut stream = BufReader::new(site.send("POST", "/v1/completions", &[], body.to_string().as_bytes()));
    assert_eq!(head(&mut stream).0, 200);
    for bad in [&b"{"[..], b"\xff", b"{\"model\":\"tiny\",\"prompt\":\"x\",\"max_tokens\":-5}"] {
        assert_eq!(site.ask("POST", "/v1/completions", &[], bad).status, 400);
    }
    let mut body = Vec::new();
    while let Some(part) = chunk(&mut stream) {
        body.extend(part);
    }
    let beside = Answer { status: 200, headers: vec![], body }.events();
    let text = |(events, done): &(Vec<Value>, bool)| {
        assert!(done);
        events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap().to_string()).collect::<String>()
    };
    assert_eq!(text(&alone), text(&beside));
}
