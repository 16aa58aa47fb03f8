//! `/metrics`, `/status`, `/` and one log line per request.

use crate::site::{Setup, Site};
use crate::tiny_model::Tiny;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The value of a series.
fn series(text: &str, name: &str) -> f64 {
    let line = text.lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
    let line = line.unwrap_or_else(|| panic!("no series {name} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn metrics_count_what_happened() {
    let site = Site::start(Setup::default());
    for _ in 0..2 {
        site.complete(json!({ "prompt": "hello", "max_tokens": 7, "temperature": 0, "ignore_eos": true }));
    }
    site.complete(json!({ "prompt": "hello", "max_tokens": -7 }));
    site.get("/nowhere");
    let answer = site.get("/metrics");
    assert!(answer.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    let text = answer.text();
    for (name, value) in [
        ("kvant_http_requests_total{route=\"/v1/completions\",status=\"200\"}", 2.0),
        ("kvant_http_requests_total{route=\"/v1/completions\",status=\"400\"}", 1.0),
        ("kvant_http_requests_total{route=\"other\",status=\"404\"}", 1.0),
        ("kvant_requests_finished_total{reason=\"length\"}", 2.0),
        ("kvant_requests_finished_total{reason=\"cancelled\"}", 0.0),
        ("kvant_requests_finished_total{reason=\"failed\"}", 0.0),
        ("kvant_prompt_tokens_total", 10.0),
        ("kvant_completion_tokens_total", 14.0),
        ("kvant_queue_seconds_count", 2.0),
        ("kvant_first_token_seconds_count", 2.0),
        ("kvant_inter_token_seconds_count", 12.0),
        ("kvant_requests{state=\"running\"}", 0.0),
        ("kvant_requests{state=\"waiting\"}", 0.0),
        ("kvant_requests{state=\"swapped\"}", 0.0),
        ("kvant_preemptions_total", 0.0),
    ] {
        assert_eq!(series(&text, name), value, "{name}");
    }
    for name in [
        "kvant_kv_blocks{state=\"used\"}",
        "kvant_kv_blocks{state=\"shared\"}",
        "kvant_kv_bytes{kind=\"packed\"}",
        "kvant_kv_bytes{kind=\"window\"}",
        "kvant_prefix_hit_rate",
        "kvant_tokens_per_second",
    ] {
        assert!(series(&text, name) >= 0.0, "{name}");
    }
    assert!(text.contains("kvant_attention_calls_total{route=") && text.contains("# HELP kvant_steps_total"), "{text}");
    assert!(text.contains("kvant_first_token_seconds_bucket{le=\"0.05\"}"), "{text}");
}

#[test]
fn the_status_shows_each_request() {
    let site = Site::start(Setup { tiny: crate::site::slow(), ..Setup::default() });
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 5000, "ignore_eos": true, "stream": true });
    let stream = site.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
    let status =
        site.until("a request that runs", |s| s["running"] == 1 && s["requests"][0]["tokens"].as_u64() > Some(5));
    assert_eq!((&status["model"], &status["requests"][0]["state"]), (&json!("tiny"), &json!("running")));
    assert!(status["requests"][0]["bytes"].as_u64() > Some(0) && status["held_bytes"].as_u64() > Some(0), "{status}");
    site.until("a rate", |s| s["tok_s"].as_f64() > Some(0.0));
    drop(stream);
}

#[test]
fn figures_are_not_made_for_every_step() {
    let site = Site::start(Setup { tiny: Tiny { context: 50_000, ..Tiny::default() }, ..Setup::default() });
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 50_000, "ignore_eos": true, "stream": true });
    let stream = site.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
    site.until("a request that runs", |s| s["steps"].as_u64() > Some(1));
    let (began, mut seen) = (Instant::now(), BTreeSet::new());
    while began.elapsed() < Duration::from_secs(1) {
        seen.insert(site.status()["steps"].as_u64().unwrap());
    }
    assert!((2..=12).contains(&seen.len()), "{seen:?}");
    drop(stream);
}

#[test]
fn the_page_has_no_outside_assets() {
    let site = Site::start(Setup::default());
    let answer = site.get("/");
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert!(answer.header("content-security-policy").is_some_and(|p| p.contains("default-src 'none'")));
    let text = answer.text();
    assert!(!text.contains("http://") && !text.contains("https://") && !text.contains("src="), "nothing is loaded");
}
