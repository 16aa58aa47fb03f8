//! Standard output. In: text or one JSON object; out: bytes on stdout, flushed. A reader that has gone (`kvant ... | head`)
//! ends the program quietly instead of with a panic. NOT here: progress and errors, which go to stderr.

use serde::Serialize;
use std::io::{self, Write};

/// Writes and flushes; a closed pipe ends the program with exit code 0, as the reader has all it wanted.
///
/// # Errors
/// Any other failure of stdout, such as a full disk.
pub fn text(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}

/// Writes one JSON object and a line break.
///
/// # Errors
/// As [`text`].
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&format!("{}\n", serde_json::to_string_pretty(value)?))
}
