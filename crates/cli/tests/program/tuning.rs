//! `kvant tune` with the real model: files that every command reads, a state that is taken up again, what it refuses. The
//! quick way over very few tokens, so that it is fast in a test build; how good its choices are is for the engine's tests.

use crate::run::{Run, kvant};
use serde_json::Value;
use std::fs;
use std::path::Path;

const TEXT: &str =
    concat!(include_str!("../../../../demo/3-recipe.txt"), include_str!("../../../../demo/2-letter.txt"));

fn tune(folder: &Path, more: &[&str]) -> Run {
    let (text, out) = (folder.join("text.txt"), folder.join("tuned.toml"));
    fs::write(&text, TEXT).unwrap();
    let words = ["tune", "--text", text.to_str().unwrap(), "--out", out.to_str().unwrap()];
    kvant(words.iter().chain(more))
}

#[test]
fn a_budget_becomes_a_file_that_commands_read_and_another_budget_costs_nothing_more() {
    let folder = tempfile::tempdir().unwrap();
    let quick = ["--quick", "--ctx", "64", "--kv", "k2v2g32.mse.rotv", "--json"];
    let run = tune(folder.path(), &[&quick[..], &["--budget-bits", "3.25,3.75"]].concat());
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((out["measured"].as_u64(), out["taken_from_state"].as_u64()), (Some(4 * 30), Some(0)));
    let files = out["files"].as_array().unwrap();
    let number = |file: &Value, name: &str| file[name].as_f64().unwrap();
    for (file, budget) in files.iter().zip([3.25, 3.75]) {
        assert!(number(file, "bits") <= budget + 1e-9 && number(file, "bits") > budget - 0.05, "{file}");
    }
    assert!(number(&files[1], "expected_kld") < number(&files[0], "expected_kld"), "{files:?}");
    let path = files[0]["path"].as_str().unwrap();
    assert!(path.ends_with("tuned-3.25.toml"));
    let file = fs::read_to_string(path).unwrap();
    assert!(
        file.starts_with("# Written by `kvant tune --quick --ctx 64")
            && file.contains("[layers]\n0 = \"k")
            && file.contains(".mse.rotv")
    );

    let run = kvant(["generate", "--prompt", "The capital of France is", "--max-tokens", "2", "--kv", path, "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    assert!(out["cache"]["scheme"].as_str().unwrap().contains("k2"), "{out}");

    let run = tune(folder.path(), &[&quick[..], &["--budget-bits", "4"]].concat());
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((out["measured"].as_u64(), out["taken_from_state"].as_u64()), (Some(0), Some(4 * 30)));
    assert!(folder.path().join("tuned.toml").is_file());

    // Costs of another question are not taken for these.
    let run = tune(folder.path(), &["--quick", "--ctx", "64", "--kv", "k2v2g32.mse", "--budget-bits", "4"]);
    run.is_refused("was measured with another model, text, ctx, chunk or --kv");
    fs::write(folder.path().join("tuned.state.json"), "{").unwrap();
    let run = tune(folder.path(), &[&quick[..], &["--budget-bits", "4"]].concat());
    run.is_refused("is no state of `kvant tune`");
}

#[test]
fn bad_input_to_tune_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let check = |more: &[&str], error: &str| tune(folder.path(), more).is_refused(error);
    check(&["--budget-bits", "2.4"], "--budget-bits 2.4 is below 2.5");
    check(&["--budget-bits", "x"], "must be a number from 1 to 16");
    check(&["--budget-bits", "NaN"], "must be a number from 1 to 16");
    check(&["--budget-bits", "3", "--kv", "f16"], "--kv f16 packs nothing");
    check(&["--budget-bits", "3", "--kv", "k9v2g64"], "key bits");
    check(&["--budget-bits", "3", "--ctx", "3"], "--ctx 3 is under 4");
    check(&["--budget-bits", "3", "--ctx", "9000"], "over the context of this model");
    check(&["--budget-bits", "3", "--skip-chunks", "50"], "chunks of 1024");
    check(&["--budget-bits", "3,3.0"], "tuned-3.toml would be written twice");
    check(&["--budget-bits", "3", "--ctx", "128", "--quick"], "packs next to nothing in 128 tokens");
    check(&[], "--budget-bits");
    let text = folder.path().join("text.txt");
    let same = folder.path().join("tuned.toml");
    check(&["--budget-bits", "3", "--state", text.to_str().unwrap()], "is read, and would be overwritten");
    check(&["--budget-bits", "3", "--state", same.to_str().unwrap()], "would be written twice");
    check(&["--budget-bits", "3", "--state", "/no/such/state.json"], "its folder is not there");
    kvant(["tune", "--text", text.to_str().unwrap(), "--budget-bits", "3", "--out", "tuned.txt"])
        .is_refused("does not end in .toml");
    let words = ["tune", "--text", "/nowhere.txt", "--budget-bits", "3"];
    kvant(words).is_refused("cannot read the text /nowhere.txt");
    let out = folder.path().join("no/such.toml");
    kvant([&words[..], &["--out", out.to_str().unwrap()]].concat()).is_refused("its folder is not there");
}

/// Codebooks are learned, read again from another folder than the one they were written from, and missed where they are not.
#[test]
fn codebooks_become_two_files_that_commands_read() {
    let folder = tempfile::tempdir().unwrap();
    let kv = "kvq16x8vvq16x8g32w32s4";
    let learn = ["--codebooks", "--tokens", "300", "--ctx", "160"];
    let run = tune(folder.path(), &[&learn[..], &["--kv", kv, "--json"]].concat());
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((out["heads"].as_u64(), out["rows_per_head"].as_u64()), (Some(30 * 3 * 2), Some(300 - 2 * 4)));
    let file = folder.path().join("tuned.toml");
    let text = fs::read_to_string(&file).unwrap();
    assert!(
        text.contains("codebooks = \"tuned.safetensors\"\n[layers]\n\"0-29\" = \"kvq16x8vvq16x8g32w32s4\"\n"),
        "{text}"
    );
    let bytes = fs::metadata(folder.path().join("tuned.safetensors")).unwrap().len();
    assert_eq!(out["codebook_bytes"].as_u64(), Some(bytes));

    let prompt = ["generate", "--prompt", "The capital of France is", "--max-tokens", "2", "--json", "--kv"];
    let run = kvant(prompt.iter().copied().chain([file.to_str().unwrap()]));
    assert_eq!(run.code, Some(0), "{run:?}");
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(out["cache"]["scheme"], kv);
    let run = kvant(["bench", "attend", "--shape", "b=1,q=9,kv=3,d=64,s=256", "--kv", kv, "--rounds", "1", "--json"]);
    assert_eq!(run.code, Some(0), "random numbers need no codebooks: {run:?}");

    // Without them, and with the file of another scheme, nothing is decoded.
    let text = folder.path().join("text.txt");
    let text = text.to_str().unwrap();
    for words in [
        &prompt[..],
        &["serve", "--port", "0", "--kv"],
        &["eval", "--text", text, "--ctx", "64", "--chunks", "1", "--kv"],
        &["bench", "decode", "--batch", "1", "--prompt-len", "64", "--steps", "128", "--kv"],
    ] {
        let run = kvant(words.iter().copied().chain([kv]));
        run.is_refused(
            "layer 0 has scheme kvq16x8vvq16x8g32w32s4: nothing says what the centroids of its sub-vectors are",
        );
        assert!(run.stderr.contains("kvant tune --codebooks --kv kvq16x8vvq16x8g32w32s4"), "{run:?}");
    }
    fs::write(&file, "codebooks = \"tuned.safetensors\"\ndefault = \"kvq256x8v4g32\"\n").unwrap();
    let run = kvant(prompt.iter().copied().chain([file.to_str().unwrap()]));
    run.is_refused("tensor `layer.0.k.levels` has shape [3, 8, 16, 8], expected [3, 8, 256, 8]");
    assert!(run.stderr.contains("tuned.safetensors"), "{run:?}");

    let check = |more: &[&str], error: &str| tune(folder.path(), &[&["--codebooks"], more].concat()).is_refused(error);
    let loud = ["--kv", "k2l8vvq16x8g64"];
    check(&loud, "has loud channels, and --codebooks does not find out");
    check(&[], "has no sub-vectors, and --codebooks learns their centroids");
    check(&["--kv", kv, "--tokens", "9000"], "and --tokens asks for 9000");
    check(&["--kv", kv, "--tokens", "20", "--ctx", "10"], "make 12 rows, and 16 centroids want as many at least");
    check(&["--kv", kv, "--budget-bits", "3"], "cannot be used with");
    tune(folder.path(), &["--uniform", "--kv", "k2l4v2g64", "--tokens", "100"]).is_refused("cannot be used with");
    let words = ["tune", "--codebooks", "--text", text, "--kv", kv, "--out"];
    kvant(words.iter().copied().chain(["tuned.txt"])).is_refused("does not end in .toml");
}

/// A scheme whose loud channels nobody chose is no scheme to decode with, and one that warns says so.
/// Files that are read are not written over, and neither is what nobody named.
#[test]
fn what_is_read_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (toml, books) = (at("own.toml"), at("own.safetensors"));
    fs::write(&toml, "codebooks = \"own.safetensors\"\ndefault = \"kvq16x8v4g64\"\n").unwrap();
    fs::write(&books, "precious").unwrap();
    let text = at("text.txt");
    fs::write(&text, "some words").unwrap();
    for path in [&toml, &books] {
        kvant(["generate", "--prompt", "a", "--kv", &toml, "--save-cache", path]).is_refused("would be overwritten");
        kvant(["eval", "--text", &text, "--kv", &toml, "--csv", path]).is_refused("would be overwritten");
    }
    let words = ["tune", "--codebooks", "--text", &text, "--kv", "kvq16x8v4g64", "--out"];
    fs::remove_file(&toml).unwrap();
    kvant(words.into_iter().chain([&toml[..]])).is_refused("is there already");
    assert_eq!(fs::read(&books).unwrap(), b"precious");
    let huge = at("huge.toml");
    fs::File::create(&huge).unwrap().set_len(1 << 30).unwrap();
    kvant(["generate", "--prompt", "a", "--kv", &huge]).is_refused("no scheme file is");
    kvant(["generate", "--prompt", "a", "--kv", &at("x.toml/")]).is_refused("x.toml");
}

#[test]
fn loud_channels_need_a_file_and_the_small_preset_warns() {
    let run = kvant(["generate", "--prompt", "x", "--kv", "k2l4v2g64"]);
    run.is_refused("layer 0 has scheme k2l4v2g64: nothing says which 16 channels of each head are loud");
    assert!(run.stderr.contains("kvant tune"), "{run:?}");
    let run = kvant(["generate", "--prompt", "x", "--max-tokens", "1", "--kv", "small", "--json"]);
    assert!(run.code == Some(0) && run.stderr.contains("warning: the preset small"), "{run:?}");
    let run = kvant(["generate", "--prompt", "x", "--max-tokens", "1", "--json"]);
    let out: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(out["cache"]["scheme"], "k4v4g64w128s4p512.rotv");
    assert!(!run.stderr.contains("warning"), "{run:?}");
}
