//! What the program writes. In: text or one JSON object for stdout, lines for stderr; out: bytes, flushed. A reader of stdout
//! that has gone (`kvant ... | head`) ends the program quietly; a stderr that takes nothing is no reason to fail, so lines
//! for it go through [`note`] and never through `eprintln!`, which panics. Pages that a flag names. NOT here: bars (progress.rs).

use crate::failure::Failure;
use serde::Serialize;
use std::fmt::Display;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const PAGE_HINT: &str = "give a file in a folder that exists and that you may write to";

/// Writes and flushes; `what` names it in case that fails. A closed pipe ends the program with exit code 0, as the reader
/// has all it wanted.
///
/// # Errors
/// Any other failure of stdout, such as a full disk.
pub fn text(what: &str, text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(e) => Err(Failure::input(
            format!("cannot write {what} to stdout: {e}"),
            "make room where stdout goes, or send it somewhere else",
        )
        .into()),
        Ok(()) => Ok(()),
    }
}

/// Writes one JSON object and a line break.
///
/// # Errors
/// As [`text`].
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text("the JSON object", &format!("{}\n", serde_json::to_string_pretty(value)?))
}

/// A line for stderr, lost when stderr takes nothing.
pub fn note(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Whether a page could be written, as far as can be told without touching what is there.
///
/// # Errors
/// [`Failure`] when a folder is in its place, or when its own folder is not there.
pub fn check_page(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() || !folder.is_dir() {
        let why = if path.is_dir() { "it is a folder" } else { "its folder is not there" };
        return Err(Failure::input(format!("cannot write {}: {why}", path.display()), PAGE_HINT));
    }
    Ok(())
}

/// Whether files to be written are others than each other and than those that are read.
///
/// # Errors
/// [`Failure`] names the first that is not.
pub fn check_apart(written: &[&Path], read: &[&Path]) -> Result<(), Failure> {
    // A file that is not there yet has no canonical path; its folder has.
    let place = |path: &Path| {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let folder = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf());
        std::fs::canonicalize(path).unwrap_or_else(|_| folder.join(path.file_name().unwrap_or_default()))
    };
    for (i, path) in written.iter().enumerate() {
        if read.iter().any(|other| place(other) == place(path)) {
            return Err(Failure::input(format!("{} is read, and would be overwritten", path.display()), PAGE_HINT));
        }
        if written[..i].iter().any(|other| place(other) == place(path)) {
            return Err(Failure::input(format!("{} would be written twice", path.display()), PAGE_HINT));
        }
    }
    Ok(())
}

/// Writes a file that others read: beside it and renamed when whole, so that a run stopped while it writes leaves the old one.
///
/// # Errors
/// [`Failure`] when the system refuses.
pub fn file(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> io::Result<()> {
        // As any file: whoever may read what this user writes may read it (the system takes off what its umask says).
        let readable = Permissions::from_mode(0o666);
        let mut beside = tempfile::Builder::new().permissions(readable).tempfile_in(folder)?;
        beside.write_all(bytes)?;
        beside.persist(path)?;
        Ok(())
    };
    write().map_err(|e| Failure::input(format!("cannot write {}: {e}", path.display()), PAGE_HINT))
}

/// Writes a page.
///
/// # Errors
/// [`Failure`] when the system refuses.
pub fn page(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|e| Failure::input(format!("cannot write {}: {e}", path.display()), PAGE_HINT))
}
