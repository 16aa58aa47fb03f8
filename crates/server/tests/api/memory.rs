//! A cache with a budget: what fits, what shares, what is moved out and comes back.

use crate::site::{Setup, Site};
use kvant_engine::Limits;
use serde_json::{Value, json};

fn site(kv_memory: usize, share_prefixes: bool) -> Site {
    let limits = Limits {
        kv_memory: Some(kv_memory),
        max_running: 8,
        step_tokens: Some(64),
        share_prefixes,
        prompts_first: false,
        ..Limits::default()
    };
    Site::start(Setup { limits, ..Setup::default() })
}

fn drawn(prompt: &str, max_tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.5, "seed": 11, "ignore_eos": true })
}

const BUDGET: usize = 640 << 10;

#[test]
fn a_request_that_can_never_fit_is_refused_and_an_open_one_is_made_to_fit() {
    let site = site(160 << 10, false);
    let refused = site.complete(drawn("hello", 690));
    refused.is_refused(400, Some("prompt"), "this server has 163840");
    assert_eq!(refused.json()["error"]["code"], "memory_exceeded");
    let open = site
        .chat(json!({ "messages": [{ "role": "user", "content": "x" }], "temperature": 0, "ignore_eos": true }))
        .json();
    assert_eq!(open["choices"][0]["finish_reason"], "length", "{open}");
    let tokens = open["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((8..690).contains(&tokens), "as many as there is room for: {tokens}");
}

#[test]
fn requests_that_do_not_fit_together_have_the_texts_they_have_alone() {
    let site = site(BUDGET, false);
    let prompts: Vec<String> = (0..6).map(|i| format!("{i} {}", "some words ".repeat(15 + i))).collect();
    let ask = |p: &String| {
        let answer = site.complete(drawn(p, 300)).json();
        answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_string()
    };
    let alone: Vec<String> = prompts.iter().map(ask).collect();
    let empty = site.status();
    assert_eq!(empty["held_bytes"], 0, "{empty}");
    let together: Vec<String> = std::thread::scope(|s| {
        let asked: Vec<_> = prompts.iter().map(|p| s.spawn(|| ask(p))).collect();
        asked.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
    let after = site.until("an empty server", |s| s["requests"] == json!([]));
    assert!(after["preemptions"].as_u64() > Some(0), "memory was short: {after}");
    assert_eq!(
        (&after["held_bytes"], &after["blocks"]["used"], &after["swapped_bytes"]),
        (&json!(0), &json!(0), &json!(0))
    );
}

#[test]
fn prompts_that_begin_alike_share_and_say_so() {
    let prefix = "The same beginning of many prompts. ".repeat(8);
    let texts = |share: bool| -> Vec<(String, u64)> {
        let site = site(4 * BUDGET, share);
        let ask = |i: usize| {
            let answer = site.complete(drawn(&format!("{prefix}{i}"), 20)).json();
            let usage = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
            (answer["choices"][0]["text"].to_string(), usage.as_u64().unwrap())
        };
        let said = (0..4).map(ask).collect();
        let status = site.status();
        assert_eq!(status["prefix_hit_rate"].as_f64() > Some(0.4), share, "{status}");
        let metrics = site.get("/metrics").text();
        assert_eq!(metrics.contains("kvant_prompt_tokens_cached_total 0"), !share, "{metrics}");
        said
    };
    let (shared, apart) = (texts(true), texts(false));
    // 288 bytes of prefix are 288 tokens: four pages of 64 at least, in all but the first.
    assert!(shared[0].1 == 0 && shared[1..].iter().all(|t| (256..=288).contains(&t.1)), "{shared:?}");
    assert!(apart.iter().all(|t| t.1 == 0));
    assert_eq!(shared.iter().map(|t| &t.0).collect::<Vec<_>>(), apart.iter().map(|t| &t.0).collect::<Vec<_>>());
}
