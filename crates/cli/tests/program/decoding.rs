//! Commands that decode with the real model: what JSON they print, and that what they say is what they did.

use crate::run::{command, finish, kvant};
use serde_json::Value;
use std::fs;
use std::io::Read;
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
}

#[test]
fn prompts_together_decode_like_each_alone_and_the_live_cache_is_packed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.txt");
    let long = "The sea was calm and the lamp burned well that night. ".repeat(30);
    let prompts = ["Hello", "Copper is used for", long.trim_end()];
    fs::write(&file, prompts.join("\n")).unwrap();
    for kv in ["f16", "k4v4g64w128s4p512", "k2v2g32"] {
        let together = json(&[
            "generate",
            "--prompts",
            file.to_str().unwrap(),
            "--max-tokens",
            "12",
            "--kv",
            kv,
            "--threads",
            "2",
        ]);
        for (i, prompt) in prompts.iter().enumerate() {
            let alone = json(&["generate", "--prompt", prompt, "--max-tokens", "12", "--kv", kv, "--threads", "1"]);
            assert_eq!(together["requests"][i]["tokens"], alone["requests"][0]["tokens"], "{kv}: {prompt}");
            assert_eq!(together["requests"][i]["text"], alone["requests"][0]["text"]);
        }
        let cache = &together["cache"];
        assert_eq!(cache["scheme"], kv);
        assert_eq!(cache["packed_bytes"].as_u64().unwrap() > 0, kv != "f16", "{kv}: {cache}");
        let held = cache["packed_bytes"].as_u64().unwrap() + cache["window_bytes"].as_u64().unwrap();
        assert!(kv != "k2v2g32" || held * 2 < cache["f16_bytes_equivalent"].as_u64().unwrap(), "{cache}");
        let routes = together["routes"].as_object().unwrap();
        assert_eq!(routes.keys().any(|r| r.ends_with(":packed")), kv != "f16", "{routes:?}");
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
    let out = json(&["info", "--memory", "1GiB", "--len", "2000", "--kv", "f16,k4v4g64w128,k2v2g32w128"]);
    insta::assert_json_snapshot!(out["fits"]);
    assert!(out["kernels"].as_array().unwrap().iter().any(|k| k["name"] == "portable" && k["available"] == true));
    for kernel in out["kernels"].as_array().unwrap() {
        assert_eq!(kernel["available"] == true, kernel["why"].is_null(), "{kernel}");
    }
    // The file itself says the same as the table that answers before it is pulled.
    let model = crate::run::model();
    let from_file = json(&["info", "--memory", "1GiB", "--len", "2000", "--model", model.to_str().unwrap()]);
    for key in ["layers", "q_heads", "kv_heads", "head_dim"] {
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
        "f16,k4v4g64w0,k2v3g32w64s4",
        "--hot",
        "--rounds",
        "3",
    ]);
    insta::assert_json_snapshot!(shape(&out));
    let rows = out["rows"].as_array().unwrap();
    let schemes: Vec<_> = rows.iter().map(|r| r["scheme"].as_str().unwrap()).collect();
    assert_eq!(schemes, ["f16", "k4v4g64", "k2v3g32w64s4"], "canonical text, in the order asked for");
    for row in rows {
        assert!(row["rel_err"].as_f64().unwrap() <= 3e-3, "{row}");
        assert!(row["min_ns"].as_u64().unwrap() <= row["median_ns"].as_u64().unwrap());
    }
    assert_eq!(rows[0]["bytes"], 2 * 300 * 2 * 64 * 2 * 2);
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
    for (arm, path) in [":f16", ":packed", ":dequant-once", ":dequant-step"].iter().enumerate() {
        let routes = rows[arm]["routes"].as_object().unwrap();
        assert!(routes.keys().any(|r| r.ends_with(path)), "{arm}: {routes:?}");
    }
}
