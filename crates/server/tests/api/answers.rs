//! Whole answers: their fields, usage, choices, log probabilities.

use crate::site::{Setup, Site};
use kvant_server::Options;
use serde_json::{Value, json};

fn greedy(prompt: &str, max_tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true })
}

/// Greedy, this model repeats itself; with a seed its texts differ and are the same each time.
fn drawn(prompt: &str, max_tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 1.5, "seed": 11, "ignore_eos": true })
}

#[test]
fn a_completion_has_the_fields_of_the_api() {
    let site = Site::start(Setup::default());
    let answer = site.complete(greedy("hello there", 5));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert!(answer.header("x-request-id").is_some_and(|id| id.starts_with("req-")));
    let a = answer.json();
    assert_eq!((&a["object"], &a["model"]), (&json!("text_completion"), &json!("tiny")));
    assert!(a["id"].as_str().unwrap().starts_with("cmpl-") && a["created"].as_u64().unwrap() > 1_700_000_000);
    let choice = &a["choices"][0];
    assert_eq!(
        (&choice["index"], &choice["finish_reason"], &choice["logprobs"]),
        (&json!(0), &json!("length"), &json!(null))
    );
    assert!(!choice["text"].as_str().unwrap().is_empty());
    let usage = &a["usage"];
    // A byte is a token of this model.
    assert_eq!(
        (&usage["prompt_tokens"], &usage["completion_tokens"], &usage["total_tokens"]),
        (&json!(11), &json!(5), &json!(16))
    );
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let default = site.complete(json!({ "prompt": "x", "ignore_eos": true })).json();
    assert_eq!(default["usage"]["completion_tokens"], 16, "the API's default");
}

#[test]
fn a_chat_has_the_fields_of_the_api_and_content_may_come_in_parts() {
    let site = Site::start(Setup::default());
    let ask = |content: Value| {
        let body = json!({ "messages": [{ "role": "system", "content": "s" }, { "role": "user", "content": content, "name": null }],
            "max_completion_tokens": 4, "temperature": 0, "ignore_eos": true, "user": "me", "metadata": { "a": "b" }, "store": true,
            "tools": [], "tool_choice": "none", "response_format": { "type": "text" }, "frequency_penalty": 0.0, "logit_bias": {} });
        let answer = site.chat(body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    };
    let a = ask(json!("hello"));
    assert_eq!(a["object"], "chat.completion");
    let message = &a["choices"][0]["message"];
    assert_eq!((&message["role"], &message["refusal"]), (&json!("assistant"), &json!(null)));
    let parts = ask(json!([{ "type": "text", "text": "hel" }, { "type": "text", "text": "lo" }]));
    assert_eq!(parts["choices"], a["choices"]);
    assert_eq!(parts["usage"], a["usage"]);
}

#[test]
fn n_answers_have_the_seeds_that_follow_each_other() {
    let site = Site::start(Setup::default());
    let with = |seed: i64, n: usize| {
        let body =
            json!({ "prompt": "abc", "max_tokens": 12, "temperature": 2.0, "seed": seed, "n": n, "ignore_eos": true });
        let a = site.complete(body).json();
        let texts: Vec<String> =
            a["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap().to_string()).collect();
        assert_eq!(a["usage"]["completion_tokens"], 12 * n);
        assert_eq!(a["usage"]["prompt_tokens"], 3, "a prompt counts once");
        texts
    };
    let three = with(5, 3);
    assert_eq!(three, [with(5, 1), with(6, 1), with(7, 1)].concat());
    assert!(three[0] != three[1] && three[1] != three[2]);
    assert_eq!(with(-1, 2)[1], with(0, 1)[0], "seeds wrap");
}

#[test]
fn several_prompts_are_answered_in_order_as_text_or_tokens() {
    let site = Site::start(Setup::default());
    let texts = |prompt: Value| -> Vec<Value> {
        let body = json!({ "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true });
        let a = site.complete(body).json();
        let choices = a["choices"].as_array().unwrap_or_else(|| panic!("{a}"));
        choices.iter().enumerate().for_each(|(i, c)| assert_eq!(c["index"], i));
        choices.iter().map(|c| c["text"].clone()).collect()
    };
    let both = texts(json!(["abc", "xyz"]));
    assert_eq!(both, [texts(json!("abc")), texts(json!("xyz"))].concat());
    assert_ne!(both[0], both[1]);
    let tokens = |_: &str| -> Value { json!([1, 2, 3]) };
    assert_eq!(texts(json!([tokens("abc"), tokens("abc")])), [texts(tokens("abc")), texts(tokens("abc"))].concat());
}

#[test]
fn a_request_beside_others_has_the_text_it_has_alone() {
    let site = Site::start(Setup::default());
    let prompts =
        ["a", "bb bb", "the quick brown fox jumps", "0123456789 0123456789 0123456789 0123456789 0123456789 01234567"];
    let alone: Vec<Value> = prompts.iter().map(|p| site.complete(drawn(p, 40)).json()["choices"].clone()).collect();
    let together: Vec<Value> = std::thread::scope(|s| {
        let asked: Vec<_> =
            prompts.iter().map(|p| s.spawn(|| site.complete(drawn(p, 40)).json()["choices"].clone())).collect();
        asked.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn stop_texts_end_an_answer_before_them() {
    let site = Site::start(Setup::default());
    let whole = site.complete(drawn("hello", 60)).json()["choices"][0]["text"].as_str().unwrap().to_string();
    let middle: String = whole.chars().skip(20).take(2).collect();
    let expected = whole.split(&middle).next().unwrap();
    for stop in [json!(middle), json!(["no such text", middle])] {
        let mut body = drawn("hello", 60);
        body["stop"] = stop;
        let a = site.complete(body).json();
        assert_eq!(
            (&a["choices"][0]["text"], &a["choices"][0]["finish_reason"]),
            (&json!(expected), &json!("stop")),
            "{a}"
        );
    }
}

#[test]
fn log_probabilities_come_in_both_forms() {
    let site = Site::start(Setup::default());
    let mut body = greedy("hello", 5);
    body["logprobs"] = json!(3);
    let a = site.complete(body).json();
    let lists = &a["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[name].as_array().map(Vec::len), Some(5), "{name}: {a}");
    }
    for (i, token) in lists["tokens"].as_array().unwrap().iter().enumerate() {
        let chosen = lists["token_logprobs"][i].as_f64().unwrap();
        let top = lists["top_logprobs"][i].as_object().unwrap();
        let best = top.values().map(|v| v.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert!(chosen <= 0.0 && chosen == best, "greedy takes the likeliest: {token} {top:?}");
    }
    let body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 3, "temperature": 0, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 2 });
    let a = site.chat(body).json();
    let content = a["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    for entry in content {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["logprob"], entry["top_logprobs"][0]["logprob"]);
        assert_eq!(entry["bytes"].as_array().unwrap().len(), 1, "tokens of this model are bytes: {entry}");
    }
}

#[test]
fn the_models_are_one() {
    let site = Site::start(Setup::default());
    let list = site.get("/v1/models").json();
    assert_eq!(
        (&list["object"], &list["data"][0]["id"], &list["data"][0]["object"]),
        (&json!("list"), &json!("tiny"), &json!("model"))
    );
    assert_eq!(site.get("/v1/models/tiny").json(), list["data"][0]);
    site.get("/v1/models/other").is_refused(404, Some("model"), "`other`");
    // Names of the hub have an owner.
    let options = Options { max_running: 8, ..Options::new("Qwen/Qwen3-0.6B") };
    let site = Site::start(Setup { options, ..Setup::default() });
    for path in ["/v1/models/Qwen/Qwen3-0.6B", "/v1/models/Qwen%2FQwen3-0.6B"] {
        assert_eq!(site.get(path).json()["id"], "Qwen/Qwen3-0.6B", "{path}");
    }
}
