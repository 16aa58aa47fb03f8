//! A model in memory. In: a path; out: weights, tokenizer and chat template, which engines share.
//! NOT here: what they are made of (model/, tokenizer.rs, chat.rs), containers (source.rs).

use crate::chat::{ChatTemplate, Message};
use crate::model::{Config, Model, Products};
use crate::source::Source;
use crate::tokenizer::Tokenizer;
use crate::{Error, Pool};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A model in memory: weights, tokenizer, chat template. Engines share it.
pub struct LoadedModel {
    path: PathBuf,
    config: Config,
    /// None: its weights are elsewhere, on a GPU.
    model: Option<Model>,
    tokenizer: Option<Tokenizer>,
    chat: Option<ChatTemplate>,
}

impl LoadedModel {
    /// Loads a GGUF file or a folder of safetensors, with weights laid out for `threads` threads (results do not
    /// depend on that number).
    /// `progress(done, all)` counts weights converted.
    ///
    /// # Errors
    /// [`Error`] says what is wrong with the file, or that there are no threads.
    pub fn load(
        path: &Path,
        threads: usize,
        products: Products,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let pool = Pool::new(threads)?;
        let source = Source::open(path)?;
        // Cheap checks first: a model that cannot be decoded fails before its tokenizer is built.
        source.config()?;
        let (tokenizer, chat) = (source.tokenizer()?, source.chat_template()?);
        let model = pool.run(|| Model::load(&source, threads, products, progress))?;
        Ok(Self { path: path.into(), config: model.config().clone(), model: Some(model), tokenizer, chat })
    }

    /// The same without weights: for an engine that has them on a GPU ([`crate::Engine::on_card`]).
    ///
    /// # Errors
    /// As [`LoadedModel::load`].
    pub fn without_weights(source: &Source, path: &Path) -> Result<Self, Error> {
        let (tokenizer, chat) = (source.tokenizer()?, source.chat_template()?);
        Ok(Self { path: path.into(), config: source.config()?, model: None, tokenizer, chat })
    }

    /// A model of these numbers with nothing else: no file, no weights, no tokenizer.
    pub fn of_config(config: Config) -> Self {
        Self { path: PathBuf::new(), config, model: None, tokenizer: None, chat: None }
    }

    /// Its weights in the machine's memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when they are on a GPU.
    pub(crate) fn model(&self) -> Result<&Model, Error> {
        let none = || Error::Kv(kvant_kv::Error::Gpu { why: "this needs weights in the machine's memory".into() });
        self.model.as_ref().ok_or_else(none)
    }

    /// SHA-256 of everything that says what the model computes: of its file, or of a folder's config and weights, by name.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn sha256(&self) -> Result<[u8; 32], Error> {
        let unreadable = |path: &Path, e: std::io::Error| Error::Read { path: path.into(), why: e.to_string() };
        let mut hash = Sha256::new();
        let mut files = vec![self.path.clone()];
        if self.path.is_dir() {
            let entries = std::fs::read_dir(&self.path).map_err(|e| unreadable(&self.path, e))?;
            files = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
            files.retain(|file| file.extension().is_some_and(|e| e == "safetensors") || file.ends_with("config.json"));
            files.sort();
        }
        let mut bytes = vec![0; 1 << 20];
        for path in files {
            hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
            let mut file = File::open(&path).map_err(|e| unreadable(&path, e))?;
            loop {
                let n = file.read(&mut bytes).map_err(|e| unreadable(&path, e))?;
                if n == 0 {
                    break;
                }
                hash.update(&bytes[..n]);
            }
        }
        Ok(hash.finalize().into())
    }

    /// The numbers of the model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Name of the kernel that multiplies with the weights ([`Model::products`]).
    pub fn products(&self) -> &'static str {
        self.model.as_ref().map_or("bf16", Model::products)
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the model brings none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.tokenizer.as_ref().ok_or_else(|| Error::Tokenizer { why: "the model brings none".into() })
    }

    /// Tokens of a raw prompt.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], also when the model brings none.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.tokenizer()?.encode(text)
    }

    /// Tokens of a chat, ending where the answer begins. Special tokens come from the template alone, never from what a
    /// message says.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when the file has no template or it fails, and those of [`LoadedModel::encode`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        let chat = self.chat.as_ref().ok_or_else(|| Error::ChatTemplate { why: "the model file has none".into() })?;
        let tokenizer = self.tokenizer()?;
        tokenizer.encode_chat(&chat.render(messages, tokenizer.specials())?)
    }
}
