//! Streams that take nothing, or begin with a byte order mark.
#![cfg(target_os = "linux")] // for /dev/full, a file that is always full

use crate::run::{Run, command, finish_with, kvant};
use serde_json::Value;
use std::fs::{self, File};
use std::process::Stdio;

fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Runs with a stdout that is full.
fn without_room(args: &[&str]) -> Run {
    finish_with(command().args(args).stdout(full()).stderr(Stdio::piped()), "")
}

#[test]
fn a_full_stdout_ends_the_command_and_says_what_was_lost() {
    // As many tokens as the context holds: a minute of decoding for nobody, if it went on.
    let long = ["generate", "--prompt", "Count: 1 2 3", "--max-tokens", "8000"];
    for (args, what) in [
        (&long[..], "cannot write the text to stdout"),
        (&["pull"], "cannot write the model's path to stdout"),
        (&["info"], "cannot write the report to stdout"),
        (&["info", "--json"], "cannot write the JSON object to stdout"),
        (&["--help"], "cannot write the help to stdout"),
    ] {
        let run = without_room(args);
        run.is_refused(what);
        assert!(run.stderr.contains("hint: make room where stdout goes"), "{run:?}");
    }
}

#[test]
fn a_stderr_that_takes_nothing_changes_neither_text_nor_exit_code() {
    let run =
        |args: &[&str], stderr: Stdio| finish_with(command().args(args).stdout(Stdio::piped()).stderr(stderr), "");
    let short = ["generate", "--prompt", "The capital of France is", "--max-tokens", "4"];
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    for stderr in [full(), closed()] {
        let run = run(&short, stderr);
        assert!(run.code == Some(0) && run.stdout.contains("Paris"), "{run:?}");
    }
    for stderr in [full(), closed()] {
        assert_eq!(run(&["generate", "--prompt", "a", "--kv", "x"], stderr).code, Some(2));
    }
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_prompt_and_f16_is_as_large_as_f16() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.txt");
    fs::write(&file, "\u{feff}The capital of France is\r\nThe capital of France is\r\n").unwrap();
    let file = file.to_str().unwrap();
    let run = kvant(["generate", "--prompts", file, "--max-tokens", "3", "--kv", "f16", "--json"]);
    let out: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"));
    assert_eq!(out["requests"][0]["prompt_tokens"], out["requests"][1]["prompt_tokens"]);
    assert_eq!(out["requests"][0]["tokens"], out["requests"][1]["tokens"]);
    assert_eq!(out["cache"]["window_bytes"], out["cache"]["f16_resident_bytes"], "{out}");
}
