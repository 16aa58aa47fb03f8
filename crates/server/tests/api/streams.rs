//! Streams: their events, and that they say what whole answers say.

use crate::site::{Setup, Site};
use serde_json::{Value, json};

#[test]
fn a_chat_as_a_stream_says_what_it_says_whole() {
    let site = Site::start(Setup::default());
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 30, "temperature": 1.5, "seed": 3,
        "n": 2, "ignore_eos": true });
    let whole = site.chat(body.clone()).json();
    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({ "include_usage": true });
    let answer = site.chat(streamed);
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let (events, done) = answer.events();
    assert!(done, "{}", answer.text());
    let mut texts = [String::new(), String::new()];
    let mut reasons = [Value::Null, Value::Null];
    let (last, parts) = events.split_last().unwrap();
    for event in parts {
        assert_eq!((&event["object"], &event["id"]), (&json!("chat.completion.chunk"), &events[0]["id"]));
        assert!(event["usage"].is_null() && event.get("usage").is_some(), "parts say that usage comes: {event}");
        let choice = &event["choices"][0];
        let i = choice["index"].as_u64().unwrap() as usize;
        assert!(reasons[i].is_null(), "nothing comes behind the reason");
        texts[i] += choice["delta"]["content"].as_str().unwrap_or("");
        reasons[i] = choice["finish_reason"].clone();
    }
    for (i, part) in events[..2].iter().enumerate() {
        assert_eq!(
            (&part["choices"][0]["index"], &part["choices"][0]["delta"]["role"]),
            (&json!(i), &json!("assistant"))
        );
    }
    for i in 0..2 {
        assert_eq!(whole["choices"][i]["message"]["content"], texts[i]);
        assert_eq!(whole["choices"][i]["finish_reason"], reasons[i]);
    }
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(60)));
    assert_eq!(last["usage"]["prompt_tokens"], whole["usage"]["prompt_tokens"]);
}

#[test]
fn a_completion_as_a_stream_says_what_it_says_whole() {
    let site = Site::start(Setup::default());
    let body = json!({ "prompt": "hello", "max_tokens": 30, "temperature": 0, "ignore_eos": true, "logprobs": 2 });
    let whole = site.complete(body.clone()).json();
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let (events, done) = site.complete(streamed).events();
    assert!(done);
    let text: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(whole["choices"][0]["text"], text);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(events.iter().all(|e| e.get("usage").is_none()), "nobody asked for usage");
    let of = |name: &str| -> Vec<Value> {
        let lists = events.iter().filter_map(|e| e["choices"][0]["logprobs"][name].as_array());
        lists.flatten().cloned().collect()
    };
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(whole["choices"][0]["logprobs"][name], json!(of(name)), "{name}");
    }
}

#[test]
fn a_stream_that_is_refused_has_a_status_of_its_own() {
    let site = Site::start(Setup::default());
    let refused = site.complete(json!({ "prompt": "x".repeat(701), "stream": true }));
    refused.is_refused(400, Some("prompt"), "700");
}
