//! Gemma 3 of 270M, the real model, against what transformers made of the same file (tests/golden/gemma3.py, which also fetches
//! it): `models/` of the workspace or the file that `KVANT_GEMMA3` names. Skipped, and said so, where it is not: 238 MB and terms
//! of their own are not for every run.

use kvant_engine::{
    Arm, Engine, EngineOptions, Error, Feed, Forced, Limits, LoadedModel, Products, Request, load_schemes,
};
use serde_json::Value;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn load(products: Products) -> Option<Arc<LoadedModel>> {
    let path = std::env::var_os("KVANT_GEMMA3").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/gemma-3-270m-q4_k_m.gguf"),
        PathBuf::from,
    );
    if !path.is_file() {
        println!("skipped: no model at {}; `python3 tests/golden/gemma3.py fetch` brings it", path.display());
        return None;
    }
    Some(Arc::new(LoadedModel::load(&path, 2, products, &|_, _| {}).unwrap()))
}

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gemma3.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn engine(loaded: &Arc<LoadedModel>, scheme: &str, arm: Arm) -> Engine {
    let schemes = load_schemes(scheme, loaded.config().layers).unwrap();
    Engine::new(loaded.clone(), EngineOptions { threads: 2, kernel: None, arm, schemes, limits: Limits::default() })
        .unwrap()
}

/// Log-probability of each next token, and the likeliest token, from position `from` on.
fn follow(engine: &mut Engine, tokens: &[u32], from: usize, feed: Feed) -> Vec<(f64, u32)> {
    let mut rows = Vec::new();
    let mut keep = |_: usize, position: usize, logits: &[f32]| -> Result<(), Error> {
        let top = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - top).exp()).sum();
        if let Some(&next) = tokens.get(position + 1) {
            let first = logits.iter().position(|&x| x == top).unwrap();
            rows.push((f64::from(logits[next as usize] - top) - sum.ln(), first as u32));
        }
        Ok(())
    };
    engine.follow(&[Forced { tokens, prompt: from + 1 }], feed, &mut keep).unwrap();
    rows
}

/// Mean and largest difference of log-probabilities, and how often the likeliest token is the same.
fn compare(got: &[(f64, u32)], want: &[(f64, u32)]) -> (f64, f64, f64) {
    assert_eq!(got.len(), want.len());
    let n = got.len() as f64;
    let off = || got.iter().zip(want).map(|(g, w)| (g.0 - w.0).abs());
    let same = got.iter().zip(want).filter(|(g, w)| g.1 == w.1).count() as f64;
    (off().sum::<f64>() / n, off().fold(0.0, f64::max), same / n)
}

#[test]
fn texts_become_the_tokens_of_transformers_and_text_again() {
    let Some(loaded) = load(Products::Quantized) else { return };
    for entry in golden()["texts"].as_array().unwrap() {
        let text = entry["text"].as_str().unwrap();
        let tokens = loaded.encode(text).unwrap();
        assert_eq!(tokens, ids(&entry["ids"]), "{text:?}");
        // U+2581 is how the vocabulary spells a space: it comes back as one.
        assert_eq!(loaded.tokenizer().unwrap().decode(&tokens), text.replace('\u{2581}', " "));
    }
}

/// The text is longer than the window of 512 keys.
#[test]
fn log_probabilities_are_those_of_transformers_beyond_the_window() {
    let golden = golden();
    let tokens = ids(&golden["ids"]);
    let logprobs = golden["logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap());
    let want: Vec<_> = logprobs.zip(ids(&golden["top"])).collect();
    for (products, mean_bound, worst_bound, least_same) in
        [(Products::Exact, 5e-3, 0.1, 0.99), (Products::Quantized, 5e-2, 1.0, 0.95)]
    {
        let Some(loaded) = load(products) else { return };
        assert_eq!(loaded.config().attention(0).visible, Some(512));
        assert_eq!(loaded.config().attention(5).visible, None);
        let got = follow(&mut engine(&loaded, "f16", Arm::F16), &tokens, 0, Feed::Prefill);
        let (mean, worst, same) = compare(&got, &want);
        println!(
            "{products:?}: log-probabilities off by {mean:.1e} on average, {worst:.1e} at most; first choice {same:.3}"
        );
        assert!(
            mean <= mean_bound && worst <= worst_bound && same >= least_same,
            "{products:?}: {mean} {worst} {same}"
        );
    }
}

#[test]
fn decoding_beyond_the_window_agrees_with_prefill_and_over_a_packed_cache() {
    let Some(loaded) = load(Products::Quantized) else { return };
    let tokens = ids(&golden()["ids"]);
    let want = follow(&mut engine(&loaded, "f16", Arm::F16), &tokens, 700, Feed::Prefill);
    for (scheme, arm, bound) in
        [("f16", Arm::F16, 1e-2), ("k8v8g64w128s4p512", Arm::Fused, 5e-2), ("k4v4g64w128s4p512", Arm::Fused, 0.5)]
    {
        let got = follow(&mut engine(&loaded, scheme, arm), &tokens, 700, Feed::Decode);
        let (mean, worst, same) = compare(&got, &want);
        println!(
            "{scheme}: log-probabilities off by {mean:.1e} on average, {worst:.1e} at most; first choice {same:.3}"
        );
        assert!(mean <= bound, "{scheme}: {mean}");
    }
}

#[test]
fn a_continuation_is_that_of_transformers() {
    let Some(loaded) = load(Products::Exact) else { return };
    let prompt = loaded.encode("The capital of France is").unwrap();
    let request = Request { ignore_end: true, ..Request::greedy(prompt, 24) };
    let made = engine(&loaded, "f16", Arm::F16).generate(vec![request], &mut |_| Continue(())).unwrap();
    assert_eq!(made.outcomes[0].tokens, ids(&golden()["greedy"]));
}
