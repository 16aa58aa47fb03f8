//! Starting the program. In: arguments, environment, stdin; out: exit code, stdout, stderr.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a run left.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Folder of the pulled model: `models/` at the workspace's root, or `KVANT_MODELS`.
pub fn models() -> PathBuf {
    std::env::var_os("KVANT_MODELS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models"), PathBuf::from)
}

/// Path of the default model. A missing one fails the test: nothing is skipped silently.
pub fn model() -> PathBuf {
    let path = models().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is not there: run `make pull` (or `make test`)", path.display());
    path
}

/// The program with the workspace's models.
pub fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvant"));
    command.env("KVANT_MODELS", models());
    command
}

/// Runs it to its end.
pub fn kvant<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Run {
    finish(command().args(args), "")
}

/// Runs a prepared command with this text on stdin.
pub fn finish(command: &mut Command, stdin: &str) -> Run {
    finish_with(command.stdout(Stdio::piped()).stderr(Stdio::piped()), stdin)
}

/// The same with the command's own stdout and stderr; what is no pipe leaves nothing.
pub fn finish_with(command: &mut Command, stdin: &str) -> Run {
    let mut child = command.stdin(Stdio::piped()).spawn().expect("it starts");
    let mut pipe = child.stdin.take().expect("stdin is a pipe");
    // A program that does not read its stdin closes it: no failure of the test.
    let _ = pipe.write_all(stdin.as_bytes());
    drop(pipe);
    let out = child.wait_with_output().expect("it ends");
    Run {
        code: out.status.code(),
        stdout: String::from_utf8(out.stdout).expect("stdout is UTF-8"),
        stderr: String::from_utf8(out.stderr).expect("stderr is UTF-8"),
    }
}

impl Run {
    /// The contract of every bad input: exit code 2, nothing on stdout, one `error:` line with this text, one `hint:` line,
    /// no panic. Progress lines may stand before.
    #[track_caller]
    pub fn is_refused(&self, error: &str) {
        let lines: Vec<&str> = self.stderr.lines().collect();
        assert_eq!(self.code, Some(2), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        let [.., first, second] = lines.as_slice() else { panic!("two lines expected: {self:?}") };
        assert!(first.starts_with("error: ") && second.starts_with("hint: "), "{self:?}");
        assert_eq!(lines.iter().filter(|l| l.starts_with("error: ")).count(), 1, "{self:?}");
        assert!(first.contains(error), "{error:?} is not in {self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
    }
}
