//! Commands that decode with the real model: what JSON they print, and that what they say is what they did.

use crate::run::{command, finish, kvant};
use kvant_kv::{LayerShape, Scheme};
use kvant_roofline::cost::{Cost, resident_bytes};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

/// Runs with `--json` and parses stdout, which must be one object and nothing else.
#[track_caller]
fn json(args: &[&str]) -> Value {
    let run = kvant(args.iter().chain(&["--json"]));
    assert_eq!(run.code, Some(0), "{run:?}");
    let value: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"));
    assert!(value.is_object());
    value
}

/// Names of an object's fields and the kind of each, nested; arrays by their first entry.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(map.iter().map(|(k, v)| (k.clone(), shape(v))).collect()),
        Value::Array(list) => Value::Array(list.first().map(shape).into_iter().collect()),
        Value::Number(_) => "number".into(),
        Value::String(_) => "text".into(),
        Value::Bool(_) => "bool".into(),
        Value::Null => "null".into(),
    }
}

#[test]
fn generate_prints_one_object_of_the_contract() {
    let out = json(&["generate", "--prompt", "The capital of France is", "--max-tokens", "8", "--kv", "f16"]);
    let mut described = shape(&out);
    // Routes are named by kernel, which depends on the machine.
    assert!(described["routes"].as_object().is_some_and(|r| !r.is_empty()));
    described["routes"] = "names and counts".into();
    insta::assert_json_snapshot!(described);
    assert_eq!(out["cache"]["scheme"], "f16");
    assert_eq!(out["requests"][0]["tokens"].as_array().unwrap().len(), 8);
    assert!(out["requests"][0]["text"].as_str().unwrap().contains("Paris"), "{out}");
    assert_eq!(&out["products"], best_of(&json(&["info"])["products"]));
}

/// The first kernel of a table of `kvant info` that runs here.
fn best_of(table: &Value) -> &Value {
    &table.as_array().unwrap().iter().find(|k| k["available"] == true).unwrap()["name"]
}

#[test]
fn one_token_takes_no_decode_step_and_claims_no_speed() {
    let out = json(&["generate", "--prompt", "The capital of France is", "--max-tokens", "1"]);
    assert_eq!(out["requests"][0]["tokens"].as_array().unwrap().len(), 1);
    assert!(out["decode_tok_s"].is_null(), "{out}");
}

/// Five prompts of about {3, 37, 66, 300, 1500} tokens, from the demo's texts.
fn prompts_of_all_lengths() -> [String; 5] {
    let short = include_str!("../../../../demo/1-short.txt");
    let (letter, recipe) =
        (include_str!("../../../../demo/2-letter.txt"), include_str!("../../../../demo/3-recipe.txt"));
    let log = include_str!("../../../../demo/4-log.txt");
    let words = |text: &str, n: usize| text.split_whitespace().take(n).collect::<Vec<_>>().join(" ");
    [
        words(short, 3),
        words(letter, 30),
        words(recipe, 60),
        words(&format!("{letter} {recipe}"), 265),
        words(&format!("{recipe} {log}"), 1150),
    ]
}

#[test]
fn prompts_of_all_lengths_together_decode_like_each_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.txt");
    let prompts = prompts_of_all_lengths();
    fs::write(&file, prompts.join("\n")).unwrap();
    for kv in ["f16", "k4v4g64w128s4p512"] {
        let made = |what: [&str; 2], threads| {
            json(&[&["generate", "--max-tokens", "8", "--kv", kv, "--threads", threads], &what[..]].concat())
        };
        let alone = prompts.each_ref().map(|p| made(["--prompt", p], "2")["requests"][0].clone());
        for (request, about) in alone.iter().zip([3.0, 37.0, 66.0, 300.0, 1500.0]) {
            let tokens = request["prompt_tokens"].as_f64().unwrap();
            assert!((tokens / about - 1.0).abs() <= 0.1, "{tokens} tokens instead of about {about}");
        }
        for threads in ["1", "2"] {
            let together = made(["--prompts", file.to_str().unwrap()], threads);
            assert_eq!(together["requests"].as_array().unwrap().len(), alone.len());
            for (i, alone) in alone.iter().enumerate() {
                for field in ["prompt_tokens", "tokens", "text", "finish_reason"] {
                    let got = &together["requests"][i][field];
                    assert_eq!(got, &alone[field], "{kv}, {threads} threads: {field} of prompt {i}");
                }
            }
        }
    }
}

/// The scheme of each layer of the model, from the text that a report has.
fn layers_of(text: &str) -> Vec<Scheme> {
    const LAYERS: usize = 30;
    if !text.contains(':') {
        return vec![text.parse().unwrap(); LAYERS];
    }
    let mut layers = Vec::new();
    for run in text.split(',') {
        let (range, scheme) = run.split_once(':').unwrap();
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        assert_eq!(first.parse::<usize>().unwrap(), layers.len(), "{text}: runs follow one another");
        let scheme: Scheme = scheme.parse().unwrap();
        layers.resize(last.parse::<usize>().unwrap() + 1, scheme);
    }
    assert_eq!(layers.len(), LAYERS, "{text}");
    layers
}

#[test]
fn the_scheme_reported_is_what_the_live_cache_holds() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let mixed =
        write("mixed.toml", "default = \"k4v4g32w32s4p0\"\n[layers]\n0 = \"k8v8g64w0\"\n28 = \"f16\"\n29 = \"bf16\"\n");
    let same = write("same.toml", "default = \"k3v2g32\"\n[layers]\n7 = \"k3v2g32w0\"\n");
    let shape = LayerShape::new(9, 3, 64).unwrap();
    let prompt = "The sea was calm and the lamp burned well that night. ".repeat(30);
    for (kv, arm, reported) in [
        (mixed.as_str(), "fused", "0:k8v8g64,1-27:k4v4g32w32s4,28:f16,29:bf16"),
        (&same, "dequant-step", "k3v2g32"),
        ("k2v2g32w0s0p0", "fused", "k2v2g32"),
        ("f16", "f16", "f16"),
        ("bf16", "bf16", "bf16"),
    ] {
        let out = json(&["generate", "--prompt", &prompt, "--max-tokens", "6", "--kv", kv, "--arm", arm]);
        let cache = &out["cache"];
        assert_eq!(cache["scheme"], reported, "{kv}");
        assert!(!Path::new(cache["scheme"].as_str().unwrap()).exists());
        // The bytes that the allocator gave are those of the layers reported, at the length that was decoded: the newest
        // token is not stored.
        assert_eq!(out["requests"][0]["finish_reason"], "length");
        let len = out["requests"][0]["prompt_tokens"].as_u64().unwrap() as usize + 6 - 1;
        let layers = layers_of(reported);
        let packed: usize = layers.iter().map(|&s| Cost::of(shape, s, len).packed_bytes).sum();
        let all: usize = layers.iter().map(|&s| resident_bytes(shape, s, len)).sum();
        assert_eq!(cache["packed_bytes"], packed, "{kv}: {cache}");
        assert_eq!(cache["window_bytes"], all - packed, "{kv}: {cache}");
    }
}

#[test]
fn the_live_cache_is_packed_and_attention_reads_it_so() {
    let long = "The sea was calm and the lamp burned well that night. ".repeat(30);
    for kv in ["f16", "bf16", "k4v4g64w128s4p512", "k2v2g32"] {
        let packs = kv.starts_with('k');
        let out = json(&["generate", "--prompt", long.trim_end(), "--max-tokens", "12", "--kv", kv]);
        let cache = &out["cache"];
        assert_eq!(cache["packed_bytes"].as_u64().unwrap() > 0, packs, "{kv}: {cache}");
        let held = cache["packed_bytes"].as_u64().unwrap() + cache["window_bytes"].as_u64().unwrap();
        assert!(kv != "k2v2g32" || held * 2 < cache["f16_bytes_equivalent"].as_u64().unwrap(), "{cache}");
        let routes = out["routes"].as_object().unwrap();
        assert_eq!(routes.keys().any(|r| r.ends_with(":packed")), packs, "{routes:?}");
        if !packs {
            assert!(routes.keys().all(|r| r.ends_with(&format!(":{kv}"))), "{routes:?}");
            assert_eq!((&out["arm"], &cache["scheme"]), (&kv.into(), &kv.into()));
            assert_eq!(cache["window_bytes"], cache["f16_resident_bytes"], "bf16 is as large as f16");
        }
    }
}

#[test]
fn a_seed_decides_what_is_sampled() {
    let sample = |seed| {
        let sampling = ["--temperature", "1.2", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01"];
        let args = ["generate", "--prompt", "Once upon a time", "--max-tokens", "16", "--seed", seed];
        json(&[&args[..], &sampling].concat())["requests"][0]["tokens"].clone()
    };
    assert_eq!(sample("7"), sample("7"));
    assert_ne!(sample("7"), sample("8"));
}

#[test]
fn text_goes_to_stdout_and_everything_else_to_stderr() {
    let run = finish(
        command().args(["generate", "--prompt", "-", "--chat", "--max-tokens", "12"]),
        "What is the capital of France?\n",
    );
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("Paris"), "{run:?}");
    assert!(!run.stdout.contains("tokens/s") && run.stderr.contains("tokens/s"), "{run:?}");
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let mut child = command()
        .args(["generate", "--prompt", "Count: 1 2 3", "--max-tokens", "64"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn info_says_what_fits() {
    let out = json(&["info", "--memory", "1GiB", "--len", "2000", "--kv", "f16,bf16,k4v4g64w128,k2v2g32w128"]);
    insta::assert_json_snapshot!(out["fits"]);
    assert!(out["kernels"].as_array().unwrap().iter().any(|k| k["name"] == "portable" && k["available"] == true));
    for table in ["kernels", "products"] {
        for kernel in out[table].as_array().unwrap() {
            assert_eq!(kernel["available"] == true, kernel["why"].is_null(), "{kernel}");
        }
    }
    let text = kvant(["info"]).stdout;
    let best = best_of(&out["products"]).as_str().unwrap();
    let mut rows = text.lines().filter(|l| l.starts_with("products with weights")).map(|l| l.split_whitespace());
    assert!(rows.any(|mut cells| cells.nth(3) == Some(best) && cells.next() == Some("yes")), "{text}");
    // The file itself says the same as the table that answers before it is pulled.
    let model = crate::run::model();
    let from_file = json(&["info", "--memory", "1GiB", "--len", "2000", "--model", model.to_str().unwrap()]);
    for key in ["layers", "q_heads", "kv_heads", "head_dim", "context"] {
        assert_eq!(from_file["fits"][key], out["fits"][key]);
    }
}

#[test]
fn bench_attend_prints_rows_of_the_contract() {
    let out = json(&[
        "bench",
        "attend",
        "--shape",
        "b=2,q=4,kv=2,d=64,s=300",
        "--kv",
        "f16,bf16,k4v4g64w0,k2v3g32w64s4",
        "--hot",
        "--rounds",
        "3",
    ]);
    insta::assert_json_snapshot!(shape(&out));
    let rows = out["rows"].as_array().unwrap();
    let schemes: Vec<_> = rows.iter().map(|r| r["scheme"].as_str().unwrap()).collect();
    assert_eq!(schemes, ["f16", "bf16", "k4v4g64", "k2v3g32w64s4"], "canonical text, in the order asked for");
    for row in rows {
        assert!(row["rel_err"].as_f64().unwrap() <= 3e-3, "{row}");
        assert!(row["min_ns"].as_u64().unwrap() <= row["median_ns"].as_u64().unwrap());
    }
    assert_eq!(rows[0]["bytes"], 2 * 300 * 2 * 64 * 2 * 2);
    assert_eq!(rows[1]["bytes"], rows[0]["bytes"]);
    assert!(rows[1]["rel_err"].as_f64().unwrap() <= 1e-4, "bf16 is attended in f32: {}", rows[1]);
    assert_eq!(rows[0]["vs_f16"], 1.0);
    let ratio = rows[0]["median_ns"].as_f64().unwrap() / rows[1]["median_ns"].as_f64().unwrap();
    assert!((rows[1]["vs_f16"].as_f64().unwrap() - ratio).abs() < 1e-9, "{}", rows[1]);
}

#[test]
fn bench_decode_proves_and_measures_every_arm() {
    let out = json(&["bench", "decode", "--batch", "1", "--prompt-len", "64", "--steps", "64", "--kv", "k4v4g32w32s4"]);
    let mut described = shape(&out);
    for row in described["rows"].as_array_mut().unwrap() {
        row["routes"] = "names and counts".into();
    }
    described["proof"]["arms"] = "one per arm".into();
    insta::assert_json_snapshot!(described);
    let rows = out["rows"].as_array().unwrap();
    let arms: Vec<_> = rows.iter().map(|r| r["arm"].as_str().unwrap()).collect();
    assert_eq!(arms, ["f16", "fused", "dequant-once", "dequant-step"]);
    let bytes = |arm: usize| rows[arm]["cache_bytes"].as_u64().unwrap();
    assert!(bytes(1) < bytes(0) && bytes(0) < bytes(2), "fused < f16 < dequant-once, which keeps both");
    assert_eq!(bytes(1), bytes(3));
    assert_eq!(rows[3]["kld_to_dequant_step"], 0.0);
    proves_agreement(&out, 1, 64);
    for (arm, path) in [":f16", ":packed", ":dequant-once", ":dequant-step"].iter().enumerate() {
        let routes = rows[arm]["routes"].as_object().unwrap();
        assert!(routes.keys().any(|r| r.ends_with(path)), "{arm}: {routes:?}");
    }
}

/// The proof's figures are within the contract's bounds, and are those of the rows.
#[track_caller]
fn proves_agreement(out: &Value, requests: u64, steps: u64) {
    let proof = &out["proof"];
    assert_eq!((proof["requests"].as_u64(), proof["steps"].as_u64()), (Some(requests), Some(steps)));
    let pairs = proof["pairs"].as_array().unwrap();
    let names: Vec<_> =
        pairs.iter().map(|p| (p["arms"][0].as_str().unwrap(), p["arms"][1].as_str().unwrap())).collect();
    assert_eq!(names, [("fused", "dequant-once"), ("fused", "dequant-step"), ("dequant-once", "dequant-step")]);
    for pair in pairs {
        // Divergence is no less than 0, but for rounding of its f64 sums.
        assert!((-1e-12..=1e-4).contains(&pair["kld_mean"].as_f64().unwrap()), "{pair}");
    }
    let arms = proof["arms"].as_array().unwrap();
    assert_eq!(arms.len(), 4);
    for (arm, row) in arms.iter().zip(out["rows"].as_array().unwrap()) {
        assert_eq!(arm["arm"], row["arm"]);
        assert_eq!(arm["kld_to_dequant_step"], row["kld_to_dequant_step"]);
        let (equal, differences) = (arm["requests_equal"].as_u64().unwrap(), arm["differences"].as_array().unwrap());
        assert_eq!(equal + differences.len() as u64, requests, "{arm}");
        if arm["arm"] == "f16" {
            // Another cache: what it holds differs, and so does what it says.
            assert!(arm["kld_to_dequant_step"].as_f64().unwrap() > 1e-4, "{arm}");
            continue;
        }
        assert!(equal as f64 >= 0.95 * requests as f64, "{arm}");
        for difference in differences {
            assert!((0.0..=1.0).contains(&difference["top_two_gap"].as_f64().unwrap()), "{difference}");
        }
        assert!(arm["kld_to_dequant_step"].as_f64().unwrap() <= 1e-4, "{arm}");
    }
}
