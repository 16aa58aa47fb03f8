//! `kvant eval` with the real model: what it prints and writes, its bounds, what it refuses. Short texts and the product's own
//! products, so that it is fast in a test build.

use crate::run::{Run, kvant};
use serde_json::Value;
use std::fs;
use std::path::Path;

const TEXT: &str = concat!(
    include_str!("../../../../demo/3-recipe.txt"),
    include_str!("../../../../demo/2-letter.txt"),
    include_str!("../../../../demo/4-log.txt")
);

fn eval(folder: &Path, more: &[&str]) -> Run {
    let text = folder.join("text.txt");
    fs::write(&text, TEXT).unwrap();
    kvant(["eval", "--text", text.to_str().unwrap(), "--ctx", "512", "--activations", "product"].iter().chain(more))
}

/// Files of this repository, tuned and of loud channels: within bounds about twice of what they have on this text, and better
/// than two bits without.
#[test]
fn scheme_files_keep_their_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| format!("{}/../../schemes/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    let kv = [file("smollm2-135m-2.75"), file("levers/k2l4v2"), "k2v2g64w128s4.mse.rotv".into()].join(",");
    let run = eval(folder.path(), &["--chunks", "2", "--kv", &kv, "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    let kld: Vec<f64> = out["rows"].as_array().unwrap().iter().map(|r| r["kld_mean"].as_f64().unwrap()).collect();
    assert!(kld[0] <= 0.04 && kld[1] <= 0.04 && kld[2] >= 2.0 * kld[1], "{kld:?}");
}

#[test]
fn a_cache_that_packs_nothing_and_files_that_would_be_lost_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    eval(folder.path(), &["--chunks", "1", "--kv", "k4v4g64w512"])
        .is_refused("k4v4g64w512 packs nothing in 512 tokens");
    let text = folder.path().join("text.txt");
    eval(folder.path(), &["--csv", text.to_str().unwrap()]).is_refused("is read, and would be overwritten");
    eval(folder.path(), &["--csv", "x.out", "--html", "./x.out"]).is_refused("would be written twice");
    eval(folder.path(), &["--kv", "k2l4v2g64"]).is_refused("nothing says which 16 channels of each head are loud");
}

/// Two chunks, three schemes, within bounds about twice of what they have on this text.
#[test]
fn a_short_evaluation_keeps_its_bounds_and_writes_what_it_prints() {
    let folder = tempfile::tempdir().unwrap();
    let (csv, html) = (folder.path().join("a.csv"), folder.path().join("a.html"));
    let run = eval(
        folder.path(),
        &[
            "--chunks",
            "2",
            "--kv",
            "k8v8g64w64s4,k4v4g64w64s4,llama.cpp:q4_0r",
            "--max-kld",
            "0.01",
            "--max-ppl-ratio",
            "1.02",
            "--json",
            "--csv",
            csv.to_str().unwrap(),
            "--html",
            html.to_str().unwrap(),
        ],
    );
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    let rows = out["rows"].as_array().unwrap();
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
    let names: Vec<_> = rows.iter().map(|r| r["scheme"].as_str().unwrap()).collect();
    assert_eq!(names, ["k8v8g64w64s4", "k4v4g64w64s4", "llama.cpp:q4_0r"]);
    assert_eq!(out["base"]["scheme"], "f16");
    assert_eq!((number(&out["base"], "kld_mean"), number(&out["base"], "whole_bits")), (0.0, 16.0));
    assert_eq!((number(&rows[1], "bits"), number(&rows[1], "positions")), (4.5, 2.0 * 255.0));
    // edge(511) = 448: 448 tokens in records, 4 sinks and the 64 newest in f16.
    assert_eq!(number(&rows[1], "whole_bits"), (448.0 * 4.5 + 68.0 * 16.0) / 512.0);
    assert!(number(&rows[1], "whole_bits_32k") < number(&rows[1], "whole_bits_8k"));
    // 8 bits lose next to nothing, our 4 bits little, the other format with no window more than ours.
    let kld: Vec<f64> = rows.iter().map(|r| number(r, "kld_mean")).collect();
    assert!(kld[0] <= 0.0005 && kld[0] < kld[1] && kld[1] <= 0.01 && kld[1] < kld[2] && kld[2] <= 0.2, "{kld:?}");
    assert!(rows.iter().all(|r| number(r, "top1_same") > 0.8 && number(r, "kld_p99") >= number(r, "kld_mean")));
    assert_eq!(rows[0]["buckets"][0]["from"], 256);
    assert_eq!(out["text"]["sha256"].as_str().unwrap().len(), 64);
    let csv = fs::read_to_string(csv).unwrap();
    assert_eq!(csv.lines().count(), 1 + 1 + 3, "{csv}");
    assert!(csv.lines().all(|l| l.split(',').count() == 16), "{csv}");
    let html = fs::read_to_string(html).unwrap();
    assert!(names.iter().all(|name| html.contains(name)) && html.contains("<svg") && !html.contains("NaN"), "{html}");
    assert!(!html.contains("http") && !html.contains("<script"), "self-contained");
}

#[test]
fn a_bound_that_is_not_kept_ends_with_one_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let run = eval(folder.path(), &["--chunks", "1", "--kv", "k2v2g64w64", "--max-kld", "0.0001"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let errors: Vec<_> = run.stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    let [error] = errors[..] else { panic!("one error expected: {run:?}") };
    assert!(error.starts_with("error: k2v2g64w64 has a mean KL divergence of ") && error.ends_with("bound is 0.0001"));
    assert!(run.stdout.contains("k2v2g64w64"), "the table is printed all the same: {run:?}");
}

#[test]
fn hidden_facts_are_ranked() {
    let folder = tempfile::tempdir().unwrap();
    let run = eval(
        folder.path(),
        &["--retrieval", "--lengths", "256", "--depths", "20,80", "--per-cell", "1", "--kv", "k8v8g64w64s4", "--json"],
    );
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    let rows = out["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 * 2, "f16 and one scheme, two depths");
    assert!(rows.iter().all(|r| (1.0..=20.0).contains(&r["mean_rank"].as_f64().unwrap())), "{out}");
}

#[test]
fn what_cannot_be_evaluated_is_refused_before_the_model_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let latin1 = folder.path().join("latin1.txt");
    fs::write(&latin1, b"caf\xe9\n").unwrap();
    for (more, error) in [
        (&["--chunks", "99"][..], "chunks of 512 fit, and --chunks asks for 99"),
        (&["--ctx", "8193"], "--ctx 8193 is over the context of this model, which holds 8192 tokens"),
        (&["--ctx", "3"], "--ctx 3 is under 4 tokens"),
        (&["--kv", "k4v4g64,k4v4g64"], "k4v4g64 appears twice"),
        (&["--kv", "k4v4g64,"], "unknown scheme ``"),
        (&["--kv", "llama.cpp:q5_1"], "unknown scheme `llama.cpp:q5_1`: formats that can be imitated"),
        (&["--kv", "no-such-file.toml"], "cannot read no-such-file.toml"),
        (&["--max-kld", "NaN"], "must be a number of at least 0"),
        (&["--html", "no/such/folder/a.html"], "its folder is not there"),
        (&["--retrieval", "--lengths", "9000"], "--lengths has 9000"),
        (&["--retrieval", "--lengths", "20"], "a question of 20 tokens takes"),
        (&["--retrieval", "--max-kld", "1"], "cannot be used with"),
        (&["--kernel", "warp9"], "unknown kernel `warp9`"),
    ] {
        // The last of a flag given twice would be clap's error: give --ctx only once.
        let text = folder.path().join("text.txt");
        fs::write(&text, TEXT).unwrap();
        let ctx: &[&str] = if more.contains(&"--ctx") { &[] } else { &["--ctx", "512"] };
        let run = kvant(["eval", "--text", text.to_str().unwrap()].iter().chain(ctx).chain(more));
        run.is_refused(error);
        assert_eq!(run.stderr.lines().count(), 2, "before the model is loaded: {run:?}");
    }
    kvant(["eval", "--text", latin1.to_str().unwrap()]).is_refused("byte 3 is not UTF-8");
    kvant(["eval", "--text", "no-such-file.txt"]).is_refused("cannot read the text no-such-file.txt");
    kvant(["eval"]).is_refused("--text <FILE>");
}
