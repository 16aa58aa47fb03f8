//! Compiled kernels on a disk. In: a program and an architecture; out: its machine code, from a file that an earlier
//! process wrote or compiled now. A folder that cannot be written and a file that was damaged cost time, never an error.
//! NOT here: compiling (compile.rs), loading (mod.rs).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::compile::{Program, compile, compiler_version};
use crate::Error;

/// Bytes of a digest.
const DIGEST: usize = 32;

/// What machine code depends on, as one digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; DIGEST]);

impl Key {
    /// Of source, headers, defines, architecture and NVRTC's version.
    pub(super) fn of(program: &Program, architecture: &str) -> Result<Self, Error> {
        let (major, minor) = compiler_version()?;
        Ok(Self::from_parts(program, architecture, &format!("{major}.{minor}")))
    }

    fn from_parts(program: &Program, architecture: &str, compiler: &str) -> Self {
        let mut digest = Sha256::new();
        // Lengths keep neighbours apart: ("ab", "c") is not ("a", "bc").
        let mut add = |part: &str| {
            digest.update(part.len().to_le_bytes());
            digest.update(part);
        };
        add(program.source);
        program.headers.iter().for_each(|(name, text)| [name, text].into_iter().for_each(|part| add(part)));
        program.defines.iter().for_each(|define| add(define));
        add(architecture);
        add(compiler);
        Self(digest.finalize().into())
    }

    fn hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// Machine code of `program`: kept, or compiled now and then kept.
pub(super) fn cubin(program: &Program, architecture: &str, key: &Key) -> Result<Vec<u8>, Error> {
    let folder = folder(|name| env::var_os(name).map(PathBuf::from).filter(|p| !p.as_os_str().is_empty()));
    let path = folder.map(|f| f.join(format!("{}-{architecture}-{}.cubin", program.name, key.hex())));
    if let Some(kept) = path.as_deref().and_then(read) {
        return Ok(kept);
    }
    let cubin = compile(program, architecture)?.cubin;
    if let Some(path) = &path {
        write(path, &cubin);
    }
    Ok(cubin)
}

fn folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("KVANT_KERNEL_CACHE")
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("kvant/kernels")))
        .or_else(|| Some(variable("HOME")?.join(".cache/kvant/kernels")))
}

/// The kept code, if the file is whole: its first bytes are the digest of the rest.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (digest, cubin) = bytes.split_at_checked(DIGEST)?;
    (Sha256::digest(cubin).as_slice() == digest).then(|| cubin.to_vec())
}

/// Whole or not at all: readers see the file only after its last byte. Failure only means compiling again.
fn write(path: &Path, cubin: &[u8]) {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let bytes = [Sha256::digest(cubin).as_slice(), cubin].concat();
    let serial = WRITES.fetch_add(1, Ordering::Relaxed);
    let unfinished = path.with_extension(format!("{}-{serial}.part", std::process::id()));
    let kept = path.parent().is_some_and(|folder| fs::create_dir_all(folder).is_ok())
        && fs::write(&unfinished, bytes).is_ok()
        && fs::rename(&unfinished, path).is_ok();
    if !kept {
        let _ = fs::remove_file(&unfinished);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(source: &'static str, defines: &[&str]) -> Program {
        let defines = defines.iter().map(ToString::to_string).collect();
        Program { name: "p", source, headers: &[], defines, registers: 32, spills: 0 }
    }

    #[test]
    fn each_part_changes_the_key() {
        let key = |p: &Program, a: &str, c: &str| Key::from_parts(p, a, c).hex();
        let keys = [
            key(&program("a", &[]), "sm_80", "13.0"),
            key(&program("b", &[]), "sm_80", "13.0"),
            key(&program("a", &["B"]), "sm_80", "13.0"),
            key(&program("a", &["B", "C"]), "sm_80", "13.0"),
            key(&program("a", &["BC"]), "sm_80", "13.0"),
            key(&program("a", &[]), "sm_86", "13.0"),
            key(&program("a", &[]), "sm_80", "13.1"),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b), "{i}");
            assert_eq!(a.len(), 2 * DIGEST);
        }
    }

    #[test]
    fn damaged_missing_and_short_files_are_not_read() {
        let folder = env::temp_dir().join(format!("kvant-kernels-{}", std::process::id()));
        let path = folder.join("deeper/p.cubin");
        assert_eq!(read(&path), None);
        write(&path, b"machine code");
        assert_eq!(read(&path).as_deref(), Some(b"machine code".as_slice()));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no unfinished file stays");
        let whole = fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole[..DIGEST - 1], &[]] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), None);
        }
        let mut flipped = whole;
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&path, flipped).unwrap();
        assert_eq!(read(&path), None);
        fs::remove_dir_all(&folder).unwrap();
        write(Path::new("/proc/nowhere/p.cubin"), b"x");
    }

    #[test]
    fn the_folder_follows_the_environment() {
        let of = |set: &'static [(&'static str, &'static str)]| {
            folder(move |name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| PathBuf::from(v)))
        };
        assert_eq!(of(&[("KVANT_KERNEL_CACHE", "/k"), ("HOME", "/h")]), Some("/k".into()));
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), Some("/x/kvant/kernels".into()));
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.cache/kvant/kernels".into()));
        assert_eq!(of(&[]), None);
    }
}
