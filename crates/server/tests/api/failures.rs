//! An engine that breaks: whoever it was working for is told, and the next ones are served. Requests that cost more than
//! they may. NOT here: fields that are wrong (errors.rs).

use crate::site::{Answer, Setup, Site};
use kvant_engine::Limits;
use kvant_kv::RowCodec;
use kvant_server::Options;
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Panics once, when it is told to.
struct Breaks(AtomicBool);

impl RowCodec for Breaks {
    fn round_trip(&self, _: usize, _: &mut [f32], _: &mut [f32]) {
        std::thread::sleep(Duration::from_millis(2));
        if self.0.swap(false, Ordering::Relaxed) {
            panic!("words of a prompt");
        }
    }
}

fn endless(stream: bool) -> Value {
    json!({ "model": "tiny", "prompt": "hello", "max_tokens": 600, "temperature": 0, "ignore_eos": true, "stream": stream })
}

#[test]
fn a_panic_of_the_engine_ends_its_requests_and_not_the_server() {
    let breaks = Arc::new(Breaks(AtomicBool::new(false)));
    let site = Site::start(Setup { codec: Some(breaks.clone()), ..Setup::default() });
    let good = json!({ "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": true });
    let before = site.complete(good.clone()).json();
    let asked =
        [true, false].map(|stream| site.send("POST", "/v1/completions", &[], endless(stream).to_string().as_bytes()));
    site.until("two requests", |s| s["running"] == 2);
    breaks.0.store(true, Ordering::Relaxed);
    let [streamed, whole] = asked.map(Answer::read);
    let (events, done) = streamed.events();
    assert!(!done && events.last().unwrap()["error"]["code"] == "internal_error", "{:?}", events.last());
    whole.is_refused(500, None, "the engine failed");
    assert!(!streamed.text().contains("words of") && !whole.text().contains("words of"), "{}", whole.text());
    let status = site.status();
    assert_eq!((&status["requests"], &status["held_bytes"]), (&json!([]), &json!(0)), "{status}");
    let metrics = site.get("/metrics").text();
    assert!(metrics.contains("kvant_requests_finished_total{reason=\"failed\"} 2"), "{metrics}");
    assert_eq!(site.get("/health").status, 200);
    assert_eq!(site.complete(good).json()["choices"], before["choices"], "it goes on as before");
}

/// Most resident memory that this process ever had.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

#[test]
fn a_prompt_over_the_context_is_not_copied_for_each_choice() {
    let site = Site::start(Setup {
        limits: Limits { max_running: 128, ..Limits::default() },
        options: Options { max_running: 128, ..Options::new("tiny") },
        ..Setup::default()
    });
    let tokens = "1,".repeat((4 << 20) / 2 - 200) + "1";
    let before = peak_bytes();
    let body = format!("{{\"model\":\"tiny\",\"n\":128,\"prompt\":[{tokens}]}}");
    site.ask("POST", "/v1/completions", &[], body.as_bytes()).is_refused(400, Some("prompt"), "700");
    let grown = peak_bytes() - before;
    assert!(grown < 700 << 20, "{grown} bytes for a body of {}", body.len());
}

#[test]
fn texts_that_cannot_fit_are_refused_before_they_are_split() {
    let site = Site::start(Setup::default());
    // Tokens of this model are bytes. A text that was split is said to have so many tokens.
    let text = "x".repeat(701);
    let said = site.complete(json!({ "prompt": text }));
    said.is_refused(400, Some("prompt"), "701 bytes");
    assert_eq!(said.json()["error"]["code"], "context_length_exceeded");
    let said = site.chat(json!({ "messages": [{ "role": "user", "content": text }] }));
    said.is_refused(400, Some("messages"), "701 bytes");
}

#[test]
fn bodies_that_are_being_read_hold_a_bounded_memory_together() {
    let options =
        Options { max_body_bytes: 64 << 10, max_bodies_bytes: 64 << 10, max_running: 8, ..Options::new("tiny") };
    let site = Site::start(Setup { options, ..Setup::default() });
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: 60000\r\n\r\n", site.address);
    let large = || site.complete(json!({ "prompt": "x".repeat(30_000) }));
    let slow = || {
        let mut slow = site.connect();
        slow.write_all(head.as_bytes()).unwrap();
        slow.write_all(&[b' '; 50_000]).unwrap();
        // It is not seen when it has come: whoever comes second is turned away.
        std::thread::sleep(Duration::from_millis(50));
        slow
    };
    let began = Instant::now();
    let (slow, refused) = loop {
        let (slow, answer) = (slow(), large());
        if answer.status == 429 {
            break (slow, answer);
        }
        assert!(began.elapsed() < Duration::from_secs(30), "nobody is turned away");
    };
    refused.is_refused(429, None, "busy");
    assert_eq!(site.complete(json!({ "prompt": "x", "max_tokens": 1 })).status, 200, "a small one has room");
    drop(slow);
    while large().status != 400 {
        assert!(began.elapsed() < Duration::from_secs(60), "what it held does not come back");
    }
}
