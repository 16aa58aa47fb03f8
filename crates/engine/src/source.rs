//! Where a model comes from. In: a path to a GGUF file or to a folder as Hugging Face keeps models; out: the same questions
//! about either: numbers, tensors, tokenizer, chat template.
//! Tensors are asked for by the names that GGUF files give them.
//! NOT here: how a container is read (gguf.rs, folder.rs), what a model does with the answers (model/).

use crate::Error;
use crate::chat::ChatTemplate;
use crate::folder::Folder;
use crate::gguf::Gguf;
use crate::model::Config;
use crate::model::linear::WeightRows;
use crate::tokenizer::Tokenizer;
use candle_core::quantized::QTensor;
use std::path::Path;

/// An open, checked model.
pub enum Source {
    /// One file with everything.
    Gguf(Gguf),
    /// config.json, safetensors, tokenizer.json.
    Folder(Folder),
}

impl Source {
    /// Opens a model: a folder is read as one of Hugging Face, anything else as a GGUF file.
    ///
    /// # Errors
    /// Those of [`Gguf::open`] and [`Folder::open`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        if path.is_dir() { Folder::open(path).map(Self::Folder) } else { Gguf::open(path).map(Self::Gguf) }
    }

    /// The model's numbers.
    ///
    /// # Errors
    /// Those of [`Config::of_gguf`] and [`Config::of_folder`].
    pub fn config(&self) -> Result<Config, Error> {
        match self {
            Self::Gguf(file) => Config::of_gguf(file),
            Self::Folder(folder) => Config::of_folder(folder),
        }
    }

    /// The model's tokenizer, if it brings one.
    ///
    /// # Errors
    /// Those of [`Tokenizer::of_gguf`] and [`Tokenizer::of_folder`].
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, Error> {
        match self {
            Self::Gguf(file) => file.get("tokenizer.ggml.model").map(|_| Tokenizer::of_gguf(file)).transpose(),
            Self::Folder(folder) => Tokenizer::of_folder(folder),
        }
    }

    /// The model's chat template, if it brings one.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for one that does not parse.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, Error> {
        match self {
            Self::Gguf(file) => ChatTemplate::of_gguf(file),
            Self::Folder(folder) => ChatTemplate::of_folder(folder),
        }
    }

    /// Whether the head has weights of its own; otherwise it is the embedding.
    pub(crate) fn has_head(&self) -> bool {
        match self {
            Self::Gguf(file) => file.has("output.weight"),
            Self::Folder(folder) => !folder.is_tied(),
        }
    }

    /// A matrix of `rows` x `columns` (as the product uses it: one row per output).
    pub(crate) fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Box<dyn WeightRows + '_>, Error> {
        Ok(match self {
            Self::Gguf(file) => Box::new(file.matrix(name, rows, columns)?),
            Self::Folder(folder) => Box::new(folder.matrix(name, rows, columns)?),
        })
    }

    /// A vector of `len` values.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        match self {
            Self::Gguf(file) => file.vector(name, len),
            Self::Folder(folder) => folder.vector(name, len),
        }
    }

    /// A matrix kept in the type that it is stored in, for looking up single rows.
    pub(crate) fn table(&self, name: &str, rows: usize, columns: usize) -> Result<QTensor, Error> {
        match self {
            Self::Gguf(file) => file.table(name, rows, columns),
            Self::Folder(folder) => folder.table(name, rows, columns),
        }
    }

    /// Fails when there is a tensor that nobody asked for: a model with more parts than the engine computes would be decoded
    /// wrong.
    pub(crate) fn check_all_taken(&self, config: &Config) -> Result<(), Error> {
        let (untaken, prefix, layers) = match self {
            Self::Gguf(file) => (file.untaken(), "blk.", format!("{}.block_count", config.architecture.name())),
            Self::Folder(folder) => (folder.untaken(), "model.layers.", "num_hidden_layers".into()),
        };
        let Some(name) = untaken else { return Ok(()) };
        let layer = name.strip_prefix(prefix).and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        Err(match layer.filter(|&layer| layer >= config.layers) {
            Some(_) => {
                let why = format!("it is {}, and there is a tensor `{name}`", config.layers);
                Error::Metadata { key: layers, why }
            }
            None => Error::Unsupported { what: format!("tensor `{name}`") },
        })
    }
}
