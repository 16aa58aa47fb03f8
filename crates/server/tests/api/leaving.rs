//! Clients that leave, servers that are full, servers that are told to stop.

use crate::site::{Answer, Setup, Site, Waits, chunk, head, slow};
use kvant_engine::Limits;
use kvant_kv::RowCodec;
use kvant_server::Options;
use serde_json::{Value, json};
use std::io::BufReader;
use std::sync::Arc;
use std::time::Duration;

/// Longer than any test waits.
fn endless(stream: bool) -> Value {
    json!({ "model": "tiny", "prompt": "hello", "max_tokens": 7000, "temperature": 0, "ignore_eos": true, "stream": stream })
}

fn setup(running: usize, waiting: usize, drain: Duration) -> Setup {
    Setup {
        tiny: slow(),
        limits: Limits { max_running: running, prompts_first: false, ..Limits::default() },
        options: Options { max_running: running, max_waiting: waiting, drain, ..Options::new("tiny") },
        ..Setup::default()
    }
}

const LONG: Duration = Duration::from_secs(60);

fn leaves(limits: Limits) {
    // Each of them is in the figures: those are newer than a step is long.
    let step = Duration::from_millis(150);
    let site = Site::start(Setup { limits, codec: Some(Arc::new(Waits(step))), ..Setup::default() });
    for stream in [true, false] {
        let mut body = endless(stream);
        body["max_tokens"] = json!(600);
        let socket = site.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
        site.until("a request that runs", |s| s["running"] == 1 && s["requests"][0]["tokens"].as_u64() > Some(7));
        drop(socket);
        let steps = site.status()["steps"].as_u64().unwrap();
        let gone = site.until("an empty server", |s| s["requests"] == json!([]));
        // The one under way, and one for the way of the news.
        let further = gone["steps"].as_u64().unwrap() - steps;
        assert!(further <= 2, "stream: {stream}: {further} further steps");
        assert_eq!(
            (&gone["held_bytes"], &gone["kept_bytes"], &gone["blocks"]["used"]),
            (&json!(0), &json!(0), &json!(0)),
            "stream: {stream}"
        );
    }
    let text = site.get("/metrics").text();
    assert!(text.contains("kvant_requests_finished_total{reason=\"cancelled\"} 2"), "{text}");
    assert!(text.contains("route=\"/v1/completions\",status=\"499\"} 2"), "{text}");
}

#[test]
fn a_client_that_leaves_frees_what_it_held() {
    leaves(Limits { max_running: 4, prompts_first: false, ..Limits::default() });
}

#[test]
fn so_it_does_under_a_budget_with_shared_prefixes() {
    let kv_memory = Some(4 << 20);
    leaves(Limits { max_running: 4, prompts_first: false, kv_memory, share_prefixes: true, ..Limits::default() });
}

#[test]
fn a_group_that_leaves_frees_all_its_requests() {
    let site = Site::start(setup(4, 4, LONG));
    let mut body = endless(true);
    body["n"] = json!(3);
    let socket = site.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
    site.until("three requests", |s| s["running"] == 3);
    drop(socket);
    site.until("an empty server", |s| s["requests"] == json!([]));
}

#[test]
fn overload_is_answered_429_and_places_come_back() {
    // Steps so long that the three outlast a storm on any machine.
    let codec: Option<Arc<dyn RowCodec>> = Some(Arc::new(Waits(Duration::from_millis(100))));
    let site = Site::start(Setup { codec, ..setup(2, 1, LONG) });
    let sockets: Vec<_> =
        (0..3).map(|_| site.send("POST", "/v1/completions", &[], endless(true).to_string().as_bytes())).collect();
    site.until("two running, one waiting", |s| s["requests"].as_array().is_some_and(|r| r.len() == 3));
    for _ in 0..20 {
        let answer = site.complete(json!({ "prompt": "x", "max_tokens": 1 }));
        answer.is_refused(429, None, "busy");
        assert!(answer.header("retry-after").is_some_and(|s| s.parse::<u64>().is_ok_and(|s| s >= 1)));
        assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    }
    // More clients at once than there are connections: each is told.
    let told = std::thread::scope(|s| {
        let one = || {
            let answer = site.complete(json!({ "prompt": "x", "max_tokens": 1 }));
            (answer.status != 429).then(|| answer.text())
        };
        let asked: Vec<_> = (0..400).map(|_| s.spawn(one)).collect();
        asked.into_iter().filter_map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(told, [""; 0]);
    site.chat(json!({ "messages": [{ "role": "user", "content": "x" }], "n": 4 })).is_refused(
        400,
        Some("n"),
        "3 at most",
    );
    drop(sockets);
    site.until("an empty server", |s| s["requests"] == json!([]));
    assert_eq!(site.complete(json!({ "prompt": "x", "max_tokens": 1 })).status, 200);
}

#[test]
fn told_to_stop_it_lets_running_requests_end() {
    let mut site = Site::start(setup(4, 4, LONG));
    let mut body = endless(true);
    body["max_tokens"] = json!(400);
    let socket = site.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
    site.until("a request that runs", |s| s["running"] == 1);
    site.stop();
    let (events, done) = Answer::read(socket).events();
    assert!(done && events.last().unwrap()["choices"][0]["finish_reason"] == "length");
    site.ended().unwrap();
    assert!(std::net::TcpStream::connect(site.address).is_err(), "nobody listens");
}

#[test]
fn what_runs_too_long_after_that_is_ended_with_an_error() {
    let mut site = Site::start(setup(4, 4, Duration::from_millis(200)));
    let stream = site.send("POST", "/v1/completions", &[], endless(true).to_string().as_bytes());
    let whole = site.send("POST", "/v1/completions", &[], endless(false).to_string().as_bytes());
    site.until("two requests", |s| s["running"] == 2);
    site.stop();
    let mut reader = BufReader::new(stream);
    assert_eq!(head(&mut reader).0, 200);
    let mut body = Vec::new();
    while let Some(part) = chunk(&mut reader) {
        body.extend(part);
    }
    let (events, done) = Answer { status: 200, headers: vec![], body }.events();
    assert!(!done && events.last().unwrap()["error"]["code"] == "shutting_down", "{:?}", events.last());
    let answer = Answer::read(whole);
    answer.is_refused(503, None, "shutting down");
    assert!(answer.header("retry-after").is_some());
    site.ended().unwrap();
}
