//! What the program writes. In: text or one JSON object for stdout, lines for stderr; out: bytes, flushed. A reader of stdout
//! that has gone (`kvant ... | head`) ends the program quietly; a stderr that takes nothing is no reason to fail, so lines
//! for it go through [`note`] and never through `eprintln!`, which panics. NOT here: bars (progress.rs).

use crate::failure::Failure;
use serde::Serialize;
use std::fmt::Display;
use std::io::{self, Write};

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
