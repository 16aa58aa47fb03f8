//! Models of the Hugging Face hub, through the hf-hub library. In: a name; out: its folder (or GGUF file) in the models folder.
//! Everything is of one commit, lies in a temporary folder until the engine could read it, and moves into place then: a folder
//! in one piece, or config.json last where the folder is there. `HF_ENDPOINT` names another hub, `HF_TOKEN` opens gated models.
//! NOT here: names (models.rs), locks and sweeping (pull.rs).

use super::{CopyError, copy, failed, temporary};
use crate::failure::Failure;
use crate::models::HubName;
use crate::progress;
use anyhow::Result;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use kvant_engine::{Source, architecture_of};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use ureq::Agent;
use ureq::config::RedirectAuthHeaders;

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Files that a folder has where its model needs them.
const OPTIONAL: [&str; 4] =
    ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// A repository at one commit.
struct Hub<'a> {
    name: &'a HubName,
    endpoint: String,
    agent: Agent,
    token: Option<String>,
    repo: ApiRepo,
    /// Where files go.
    to: PathBuf,
}

/// Fetches a model into the models folder.
///
/// # Errors
/// [`Failure`] for a repository or file that is not there or not to be read, a network that fails, a body that ends early, a
/// model that this engine cannot decode.
pub(super) fn fetch(name: &HubName, folder: &Path, path: &Path) -> Result<()> {
    let temp = temporary(folder)?;
    let to = temp.path().join("model");
    fs::create_dir(&to).map_err(failed(&to))?;
    let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty());
    let endpoint = endpoint.unwrap_or_else(|| "https://huggingface.co".into()).trim_end_matches('/').to_owned();
    let token = std::env::var("HF_TOKEN").ok().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty());
    // The library looks for the token of a login below the home folder, and panics where there is none.
    let home = std::env::var_os("HF_HOME").is_some() || std::env::home_dir().is_some();
    let token = token.or_else(|| home.then(Cache::from_env)?.token());
    // A file may lie on another host, which is no business of the token's.
    let agent = Agent::config_builder().redirect_auth_headers(RedirectAuthHeaders::SameHost).build().into();
    let api = ApiBuilder::from_cache(Cache::new(temp.path().join("cache")))
        .with_endpoint(endpoint.clone())
        .with_token(token.clone())
        .with_progress(false)
        .build()
        .map_err(|e| failure(name, &endpoint, "it", e))?;
    let at = |revision: &str| Repo::with_revision(name.repository.clone(), RepoType::Model, revision.to_owned());
    let info = api.repo(at(name.revision.as_deref().unwrap_or("main"))).info();
    let info = info.map_err(|e| failure(name, &endpoint, "its list of files", e))?;
    let there: BTreeSet<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    // A branch may move meanwhile: what belongs together is of one commit.
    let hub = Hub { name, endpoint, agent, token, repo: api.repo(at(&info.sha)), to };
    match &name.file {
        Some(file) => {
            hub.needs(&there, file, "`kvant pull` takes files as the repository names them")?;
            let file = hub.get(file)?;
            check(name, &file)?;
            let parent = path.parent().unwrap_or(folder);
            fs::create_dir_all(parent).map_err(failed(parent))?;
            Ok(fs::rename(&file, path).map_err(failed(path))?)
        }
        None => {
            hub.folder(&there)?;
            check(name, &hub.to)?;
            place(&hub.to, path)
        }
    }
}

/// What was fetched must be what the engine reads.
fn check(name: &HubName, path: &Path) -> Result<(), Failure> {
    let read = Source::open(path).and_then(|source| source.config().and_then(|_| source.tokenizer()));
    read.map(drop).map_err(|e| {
        let Failure { what, .. } = e.into();
        // The temporary folder is gone when this is read.
        let what = what.replace(&format!("{}", path.display()), &name.to_string());
        Failure::input(
            format!("{name} was fetched and cannot be decoded: {what}"),
            "nothing was kept; pull another model",
        )
    })
}

/// Moves a folder into place. Whoever looks sees no config.json until all else is there.
fn place(from: &Path, to: &Path) -> Result<()> {
    if !to.exists() {
        return Ok(fs::rename(from, to).map_err(failed(to))?);
    }
    let mut names: Vec<_> = fs::read_dir(from).map_err(failed(from))?.flatten().map(|e| e.file_name()).collect();
    names.sort_by_key(|name| name == CONFIG);
    for name in names {
        fs::rename(from.join(&name), to.join(&name)).map_err(failed(to))?;
    }
    Ok(())
}

impl Hub<'_> {
    fn needs(&self, there: &BTreeSet<&str>, file: &str, hint: &str) -> Result<(), Failure> {
        match there.contains(file) {
            true => Ok(()),
            false => Err(Failure::input(format!("{} has no {file}", self.name), hint)),
        }
    }

    /// Fetches config.json, weights and what the tokenizer needs.
    fn folder(&self, there: &BTreeSet<&str>) -> Result<()> {
        let gguf = there.iter().find(|file| file.ends_with(".gguf") && !file.contains('/'));
        let hint = gguf.map_or("pull a model that has config.json and safetensors files".to_owned(), |file| {
            format!("it has GGUF files: `kvant pull {}/{file}`", self.name)
        });
        self.needs(there, CONFIG, &hint)?;
        let config = self.json(CONFIG)?;
        // Before gigabytes come for nothing.
        architecture_of(&config).map_err(|e| Failure::input(format!("{}: {e}", self.name), &hint))?;
        if there.contains(SINGLE) {
            self.get(SINGLE)?;
        } else {
            self.needs(there, INDEX, &format!("its weights are no safetensors files; {hint}"))?;
            let index = self.json(INDEX)?;
            let named = index.get("weight_map").and_then(Value::as_object).into_iter().flat_map(Map::values);
            for file in named.filter_map(Value::as_str).collect::<BTreeSet<_>>() {
                let own = Path::new(file).file_name().is_some_and(|own| own == file);
                if !own || !there.contains(file) {
                    let what = format!("{INDEX} of {} names {file:?}, which is no file of it", self.name);
                    return Err(Failure::input(what, "nothing was kept; pull another model").into());
                }
                self.get(file)?;
            }
        }
        OPTIONAL.into_iter().filter(|file| there.contains(file)).try_for_each(|file| self.get(file).map(drop))
    }

    /// Fetches a file of JSON and reads it.
    fn json(&self, file: &str) -> Result<Map<String, Value>> {
        let path = self.get(file)?;
        let bytes = fs::read(&path).map_err(failed(&path))?;
        let damaged = |e| Failure::input(format!("{file} of {} is damaged: {e}", self.name), "pull another model");
        Ok(serde_json::from_slice(&bytes).map_err(damaged)?)
    }

    /// Fetches one file; its path in the temporary folder. The library's own cache would name files by what the hub's
    /// headers say; here only checked names get to the disk.
    fn get(&self, file: &str) -> Result<PathBuf> {
        let refused = |e: ApiError| failure(self.name, &self.endpoint, file, e);
        let request = self.agent.get(self.repo.url(file));
        let response = match &self.token {
            Some(token) => request.header("Authorization", format!("Bearer {token}")).call(),
            None => request.call(),
        };
        let body = response.map_err(|e| refused(Box::new(e).into()))?.into_body();
        let size = body.content_length();
        let bar = progress::bytes(&format!("download {file}"), size.unwrap_or(0));
        let path = self.to.join(file);
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed(folder))?;
        }
        let mut out = File::create(&path).map_err(failed(&path))?;
        let mut bytes = 0;
        let copied = copy(&mut body.into_reader(), &mut out, |chunk| {
            bytes += chunk.len() as u64;
            bar.set_position(bytes);
        });
        copied.map_err(|e| match e {
            CopyError::Write(e) => failed(&path)(e),
            CopyError::Read(e) => {
                Failure::input(format!("{file} of {} ended after {bytes} bytes: {e}", self.name), RETRY_HINT)
            }
        })?;
        bar.finish_and_clear();
        if let Some(size) = size.filter(|&size| size != bytes) {
            let what = format!("{file} of {} ended after {bytes} of {size} bytes", self.name);
            return Err(Failure::input(what, RETRY_HINT).into());
        }
        Ok(path)
    }
}

const RETRY_HINT: &str = "nothing was kept; check the network and run `kvant pull` again";

fn failure(name: &HubName, endpoint: &str, what: &str, e: ApiError) -> Failure {
    let status = match &e {
        ApiError::RequestError(e) => match **e {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    };
    match status {
        Some(404) => Failure::input(
            format!("{endpoint} has no {name}, or not {what} (status 404)"),
            "check owner, name, revision and file",
        ),
        // The hub says so of repositories that do not exist, too.
        Some(status @ (401 | 403)) => Failure::input(
            format!(
                "{endpoint} does not let {name} be read (status {status}): there is none, or it is private or gated"
            ),
            "check owner and name; for a gated model accept its terms on the hub and set HF_TOKEN",
        ),
        Some(status) => Failure::input(
            format!("{endpoint} answered with status {status} when asked for {what} of {name}"),
            RETRY_HINT,
        ),
        None => Failure::input(
            format!("cannot fetch {what} of {name} from {endpoint}: {e}"),
            "nothing was kept; check the network, or set HF_ENDPOINT to a mirror, and run `kvant pull` again",
        ),
    }
}
