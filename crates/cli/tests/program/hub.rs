//! `kvant pull hf:OWNER/NAME` without the hub: a thread of the test's own answers on 127.0.0.1 as the hub does.

use crate::run::{Run, command, finish};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files by name.
type Served = BTreeMap<String, Vec<u8>>;

/// What the stand-in serves, and how.
#[derive(Clone, Default)]
struct Files {
    files: Served,
    /// Answered to everything.
    status: Option<u16>,
    /// This file's body ends at half its length.
    cut: Option<&'static str>,
    /// Only who brings this token is answered.
    token: Option<&'static str>,
    /// What it calls the content and the commit of every file.
    labels: Option<&'static str>,
}

/// A stand-in for the hub with one repository, `owner/tiny` (branch `main` and tag `v1`).
struct Hub {
    address: String,
    /// Request lines.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Hub {
    fn serve(files: Files) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = asked.clone();
        // It ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &files, &log);
            }
        });
        Self { address, asked }
    }

    /// `kvant pull NAME` from here into `models`.
    fn pull(&self, name: &str, models: &Path) -> Run {
        self.pull_with(name, models, &[])
    }

    fn pull_with(&self, name: &str, models: &Path, environment: &[(&str, &str)]) -> Run {
        let mut command = command();
        // No token of whoever runs the test.
        command.env("HF_ENDPOINT", &self.address).env("KVANT_MODELS", models).env("HF_HOME", models.join("none"));
        command.env_remove("HF_TOKEN").envs(environment.iter().copied());
        finish(command.args(["pull", name]), "")
    }
}

fn answer(mut stream: TcpStream, files: &Files, log: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let headers: Vec<String> =
        lines.map_while(Result::ok).take_while(|l| !l.is_empty()).map(|l| l.to_lowercase()).collect();
    log.lock().unwrap().push(request.clone());
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut plain = |status: u16, body: &[u8]| {
        write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len())?;
        stream.write_all(body)
    };
    if let Some(token) = files.token
        && !headers.contains(&format!("authorization: bearer {token}"))
    {
        return plain(401, b"{}");
    }
    if let Some(status) = files.status {
        return plain(status, b"{}");
    }
    if let Some(revision) = path.strip_prefix("/api/models/owner/tiny/revision/") {
        if !["main", "v1"].contains(&revision) {
            return plain(404, b"{}");
        }
        let names: Vec<_> = files.files.keys().map(|name| format!("{{\"rfilename\":{name:?}}}")).collect();
        return plain(200, format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{}]}}", names.join(",")).as_bytes());
    }
    let Some((name, bytes)) =
        path.strip_prefix(&format!("/owner/tiny/resolve/{COMMIT}/")).and_then(|name| files.files.get_key_value(name))
    else {
        return plain(404, b"{}");
    };
    let probe = headers.iter().any(|h| h == "range: bytes=0-0");
    let (body, last) = if probe { (&bytes[..1.min(bytes.len())], 0) } else { (&bytes[..], bytes.len().max(1) - 1) };
    let etag = name.bytes().fold(7u64, |hash, b| hash.wrapping_mul(31).wrapping_add(b.into()));
    let etag = files.labels.map_or(format!("{etag:x}"), str::to_owned);
    let commit = files.labels.unwrap_or(COMMIT);
    write!(
        stream,
        "HTTP/1.1 206 Partial Content\r\nETag: \"{etag}\"\r\nx-repo-commit: {commit}\r\n\
         Content-Range: bytes 0-{last}/{}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        bytes.len(),
        body.len()
    )?;
    let body = if !probe && files.cut == Some(name) { &body[..body.len() / 2] } else { body };
    stream.write_all(body)
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models").join(name)
}

/// The files of a golden model, and one that nobody needs.
fn files(name: &str) -> Files {
    let mut files: BTreeMap<_, _> = fs::read_dir(golden(name))
        .unwrap()
        .flatten()
        .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
        .collect();
    files.insert("README.md".into(), b"# tiny".to_vec());
    Files { files, ..Files::default() }
}

#[track_caller]
fn nothing_left(models: &Path) {
    let left = || fs::read_dir(models).into_iter().flatten().flatten().map(|e| e.file_name()).collect::<Vec<_>>();
    assert!(left().is_empty(), "left behind: {:?}", left());
}

#[test]
fn a_repository_comes_whole_and_decodes_under_its_name() {
    let temp = tempfile::tempdir().unwrap();
    let models = temp.path().join("models");
    let hub = Hub::serve(files("qwen3"));
    let run = hub.pull("hf:owner/tiny", &models);
    assert_eq!(run.code, Some(0), "{run:?}");
    let folder = models.join("owner--tiny");
    assert_eq!(run.stdout.trim_end(), folder.to_str().unwrap());
    let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    let expected: Vec<_> = fs::read_dir(golden("qwen3")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), expected.len(), "{names:?}");
    for name in &expected {
        assert!(fs::read(folder.join(name)).unwrap() == fs::read(golden("qwen3").join(name)).unwrap(), "{name:?}");
    }
    assert_eq!(fs::read_dir(&models).unwrap().count(), 1, "only the model stays");
    // What is there is not asked for again.
    let asked = hub.asked.lock().unwrap().len();
    assert_eq!(hub.pull("hf:owner/tiny", &models).code, Some(0));
    assert_eq!(hub.asked.lock().unwrap().len(), asked);
    for name in ["hf:owner/tiny", "owner/tiny", folder.to_str().unwrap()] {
        let mut command = command();
        command.env("KVANT_MODELS", &models);
        let run = finish(
            command.args(["generate", "--model", name, "--chat", "--prompt", "boats", "--max-tokens", "3", "--json"]),
            "",
        );
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(run.stdout.contains("\"prompt_tokens\""), "{run:?}");
    }
}

#[test]
fn shards_revisions_and_single_gguf_files() {
    let temp = tempfile::tempdir().unwrap();
    let mut served = files("qwen2");
    served.files.insert("tiny-Q4_1.gguf".into(), fs::read(crate::run::model()).unwrap());
    let hub = Hub::serve(served);
    let run = hub.pull("hf:owner/tiny@v1", temp.path());
    assert_eq!(run.code, Some(0), "{run:?}");
    let folder = temp.path().join("owner--tiny@v1");
    assert_eq!(run.stdout.trim_end(), folder.to_str().unwrap());
    assert!(folder.join("model-00007-of-00007.safetensors").exists() && !folder.join("tiny-Q4_1.gguf").exists());
    let run = hub.pull("hf:owner/tiny/tiny-Q4_1.gguf", temp.path());
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.stdout.trim_end(), temp.path().join("owner--tiny/tiny-Q4_1.gguf").to_str().unwrap());
    // The folder that the file made is not taken for the model's; what is missing joins it.
    let run = hub.pull("hf:owner/tiny", temp.path());
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(
        fs::read_dir(temp.path().join("owner--tiny")).unwrap().count(),
        fs::read_dir(&folder).unwrap().count() + 1
    );
    hub.pull("hf:owner/tiny@v2", temp.path()).is_refused("(status 404)");
    hub.pull("hf:owner/tiny/other.gguf", temp.path()).is_refused("has no other.gguf");
}

#[test]
fn what_cannot_be_fetched_is_refused_and_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let models = temp.path();
    let hub = Hub::serve(files("qwen3"));
    hub.pull("hf:owner/other", models).is_refused("(status 404)");
    hub.pull("hf:owner", models).is_refused("no name of a model on the hub");
    nothing_left(models);
    for (status, error) in [(401, "does not let"), (403, "does not let"), (500, "answered with status 500")] {
        let hub = Hub::serve(Files { status: Some(status), ..files("qwen3") });
        let run = hub.pull("hf:owner/tiny", models);
        run.is_refused(error);
        assert!(status == 500 || run.stderr.contains("HF_TOKEN"), "{run:?}");
        nothing_left(models);
    }
    // Nobody listens there: the port was this test's own, and is free again.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let hub = Hub { address: format!("http://{port}"), asked: Arc::default() };
    hub.pull("hf:owner/tiny", models).is_refused("cannot fetch its list of files");
    nothing_left(models);
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let hub = Hub::serve(Files { cut: Some(file), ..files("qwen3") });
        hub.pull("hf:owner/tiny", models).is_refused(file);
        nothing_left(models);
    }
}

#[test]
fn what_was_fetched_and_cannot_be_decoded_is_not_kept() {
    let temp = tempfile::tempdir().unwrap();
    let refuse = |change: &dyn Fn(&mut Served), error: &str| {
        let mut served = files("qwen3");
        change(&mut served.files);
        let hub = Hub::serve(served);
        let run = hub.pull("hf:owner/tiny", temp.path());
        run.is_refused(error);
        nothing_left(temp.path());
        let asked = hub.asked.lock().unwrap().join("\n");
        (run, asked)
    };
    let other = br#"{"architectures": ["MambaForCausalLM"]}"#;
    let (_, asked) = refuse(&|f| drop(f.insert("config.json".into(), other.to_vec())), "`MambaForCausalLM`");
    assert!(!asked.contains("safetensors"), "weights came for nothing: {asked}");
    refuse(&|f| drop(f.insert("config.json".into(), b"{".to_vec())), "config.json of hf:owner/tiny is damaged");
    refuse(&|f| f.get_mut("model.safetensors").unwrap().truncate(5000), "cannot be decoded");
    refuse(&|f| drop(f.insert("tokenizer.json".into(), b"{}".to_vec())), "cannot be decoded");
    let (run, _) = refuse(
        &|f| {
            f.remove("model.safetensors");
            f.insert("tiny.gguf".into(), b"GGUF".to_vec());
        },
        "has no model.safetensors.index.json",
    );
    assert!(run.stderr.contains("`kvant pull hf:owner/tiny/tiny.gguf`"), "{run:?}");
    let upwards = br#"{"weight_map": {"a": "../../x.safetensors"}}"#;
    let index = |f: &mut Served| {
        f.remove("model.safetensors");
        f.insert("model.safetensors.index.json".into(), upwards.to_vec());
    };
    refuse(&index, "which is no file of it");
}

#[test]
fn a_token_opens_what_is_gated() {
    let temp = tempfile::tempdir().unwrap();
    let hub = Hub::serve(Files { token: Some("hf_secret"), ..files("qwen3") });
    let run = hub.pull("hf:owner/tiny", temp.path());
    run.is_refused("does not let hf:owner/tiny be read (status 401)");
    let run = hub.pull_with("hf:owner/tiny", temp.path(), &[("HF_TOKEN", "hf_secret")]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(!run.stderr.contains("hf_secret"), "{run:?}");
}

#[test]
fn what_a_hub_calls_its_files_names_nothing_on_the_disk() {
    for labels in ["../../../../escaped", "/", "..", "a/../../../escaped", "\u{e9}", ""] {
        let temp = tempfile::tempdir().unwrap();
        let models = temp.path().join("in/the/models");
        let hub = Hub::serve(Files { labels: Some(labels), ..files("qwen3") });
        let run = hub.pull("hf:owner/tiny", &models);
        assert_eq!(run.code, Some(0), "{labels:?}: {run:?}");
        for (folder, only) in [(temp.path(), "in"), (&models, "owner--tiny")] {
            let names: Vec<_> = fs::read_dir(folder).unwrap().flatten().map(|e| e.file_name()).collect();
            assert_eq!(names, [only], "{labels:?}");
        }
    }
}
