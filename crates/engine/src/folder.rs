//! Model folders as Hugging Face keeps them. In: a path; out: checked JSON files, and tensors of safetensors files as f32 rows.
//! NOT here: what a model needs of them (model/config/json.rs), tokenizers (tokenizer/json.rs).
//!
//! Files are not trusted: a header is read and checked against its file's length before anything of a tensor's size is
//! allocated, and an index names files of its own folder only.

use crate::Error;
use crate::model::Architecture;
use crate::model::linear::WeightRows;
use candle_core::Device;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Bytes of a JSON file: above any tokenizer, small enough that reading one cannot exhaust memory.
const MAX_JSON: u64 = 1 << 28;
/// Bytes of a safetensors header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// An open, checked model folder.
pub struct Folder {
    path: PathBuf,
    config: Map<String, Value>,
    architecture: Architecture,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Place>,
    /// Tensors asked for so far: the rest would be silently ignored.
    taken: Mutex<BTreeSet<String>>,
}

/// Where a tensor lies.
struct Place {
    file: usize,
    start: u64,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Folder {
    /// Opens a folder and checks the header of every file of weights.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Damaged`], [`Error::Architecture`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let config = read_json(&path.join(CONFIG))?.ok_or_else(|| absent(&path.join(CONFIG)))?;
        let architecture = architecture_of(&config)?;
        let mut folder = Self {
            path: path.into(),
            config,
            architecture,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            taken: Mutex::default(),
        };
        // As transformers does: one file wins over an index.
        if path.join(SINGLE).exists() {
            folder.add(SINGLE)?;
            return Ok(folder);
        }
        let index_path = path.join(INDEX);
        let index = read_json(&index_path)?.ok_or_else(|| absent(&path.join(SINGLE)))?;
        let damaged = |why: String| Error::Damaged { path: index_path.clone(), why };
        let Some(Value::Object(map)) = index.get("weight_map") else {
            return Err(damaged("it has no `weight_map`".into()));
        };
        let mut files = BTreeSet::new();
        for (name, file) in map {
            match file.as_str() {
                Some(file) if Path::new(file).file_name().is_some_and(|own| own == file) => files.insert(file),
                _ => return Err(damaged(format!("tensor `{name}` is in {file}, which is no file of this folder"))),
            };
        }
        for file in files {
            folder.add(file)?;
        }
        for (name, place) in &folder.tensors {
            let file = folder.files[place.file].0.file_name().and_then(|n| n.to_str());
            if map.get(name).and_then(Value::as_str) != file {
                return Err(damaged(format!(
                    "it does not say that tensor `{name}` is in {}",
                    file.unwrap_or_default()
                )));
            }
        }
        match map.keys().find(|name| !folder.tensors.contains_key(*name)) {
            Some(name) => Err(damaged(format!("the file that it names for tensor `{name}` has none of this name"))),
            None => Ok(folder),
        }
    }

    /// Reads the header of one file of weights.
    fn add(&mut self, name: &str) -> Result<(), Error> {
        let path = self.path.join(name);
        let unreadable = |e: std::io::Error| Error::Read { path: path.clone(), why: e.to_string() };
        let damaged = |why: String| Error::Damaged { path: path.clone(), why };
        let mut file = File::open(&path).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if !meta.is_file() {
            return Err(Error::Read { path, why: "it is not a regular file".into() });
        }
        let mut length = [0; LENGTH_BYTES as usize];
        let Some(rest) = meta.len().checked_sub(LENGTH_BYTES) else {
            return Err(damaged(format!("it has {} bytes, fewer than a header", meta.len())));
        };
        file.read_exact(&mut length).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > rest.min(MAX_HEADER) {
            return Err(damaged(format!("it announces a header of {length} bytes, and has {}", meta.len())));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| damaged(format!("its header: {e}")))?;
        let tensors = header.tensors();
        // The library has checked that the tensors fill what lies between the first and the last without a gap.
        let end = tensors.values().map(|t| t.data_offsets.1 as u64).max().unwrap_or(0);
        if end != rest - length {
            return Err(damaged(format!("its tensors take {end} bytes, and {} are there", rest - length)));
        }
        for (name, info) in tensors {
            let start = LENGTH_BYTES + length + info.data_offsets.0 as u64;
            let place = Place { file: self.files.len(), start, dtype: info.dtype, shape: info.shape.clone() };
            if self.tensors.insert(name.clone(), place).is_some() {
                return Err(damaged(format!("another file has a tensor `{name}` too")));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// config.json.
    pub fn config(&self) -> &Map<String, Value> {
        &self.config
    }

    /// What config.json says that the model is.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Another JSON file of the folder, if it is there.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Damaged`].
    pub fn json(&self, name: &str) -> Result<Option<Map<String, Value>>, Error> {
        read_json(&self.path.join(name))
    }

    /// Another file of the folder, if it is there.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        read(&self.path.join(name))
    }

    /// Whether the head is the embedding.
    pub fn is_tied(&self) -> bool {
        let by_default = self.architecture == Architecture::Gemma3;
        self.config.get("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(by_default)
    }

    /// A matrix of `rows` x `columns` (as the product uses it: one row per output), by its GGUF name.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::Unsupported`] for numbers of another type.
    pub fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'_>, Error> {
        let (place, dtype) = self.locate(name, &[rows, columns])?;
        Ok(Matrix { folder: self, place, dtype, rows, columns })
    }

    /// A vector of `len` values, by its GGUF name. Norms of gemma3 are given as GGUF files have them: the folder has what is
    /// added to 1.
    ///
    /// # Errors
    /// As [`Folder::matrix`]; [`Error::Read`].
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let (place, dtype) = self.locate(name, &[len])?;
        let mut out = vec![0.0; len];
        Matrix { folder: self, place, dtype, rows: 1, columns: len }.read(0..1, &mut out)?;
        if self.architecture == Architecture::Gemma3 && name.ends_with("norm.weight") {
            out.iter_mut().for_each(|x| *x += 1.0);
        }
        Ok(out)
    }

    /// A matrix kept in the type it has in the file, for looking up single rows.
    ///
    /// # Errors
    /// As [`Folder::vector`].
    pub fn table(&self, name: &str, rows: usize, columns: usize) -> Result<QTensor, Error> {
        let matrix = self.matrix(name, rows, columns)?;
        let storage = QStorage::from_data(Cow::Owned(matrix.bytes(0..rows)?), &Device::Cpu, matrix.dtype)?;
        Ok(QTensor::new(storage, (rows, columns))?)
    }

    /// The first tensor that nobody asked for.
    pub fn untaken(&self) -> Option<&str> {
        let taken = self.taken.lock().unwrap_or_else(|e| e.into_inner());
        self.tensors.keys().find(|k| !taken.contains(*k)).map(String::as_str)
    }

    fn locate(&self, gguf_name: &str, shape: &[usize]) -> Result<(&Place, GgmlDType), Error> {
        let name = own_name(gguf_name, self.architecture);
        let place = self.tensors.get(&name).ok_or_else(|| Error::MissingTensor { name: name.clone() })?;
        if place.shape != shape {
            return Err(Error::TensorShape { name, expected: shape.to_vec(), got: place.shape.clone() });
        }
        let dtype = match place.dtype {
            Dtype::F32 => GgmlDType::F32,
            Dtype::F16 => GgmlDType::F16,
            Dtype::BF16 => GgmlDType::BF16,
            other => {
                let what = format!("tensor `{name}` of type {other:?} (f32, f16 and bf16 are known)");
                return Err(Error::Unsupported { what });
            }
        };
        self.taken.lock().unwrap_or_else(|e| e.into_inner()).insert(name);
        Ok((place, dtype))
    }
}

/// What config.json says that the model is.
///
/// # Errors
/// [`Error::Metadata`], and [`Error::Architecture`] for one that is not decoded.
pub fn architecture_of(config: &Map<String, Value>) -> Result<Architecture, Error> {
    const KEY: &str = "architectures";
    let no = |why: &str| Error::Metadata { key: KEY.into(), why: why.into() };
    let names = config.get(KEY).and_then(Value::as_array).ok_or_else(|| no("it is no list"))?;
    let [Value::String(name)] = names.as_slice() else { return Err(no("it does not name one architecture")) };
    Architecture::of_class(name).ok_or_else(|| Error::Architecture {
        architecture: name.clone(),
        supported: "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM",
    })
}

/// What these folders call a tensor that GGUF files call so.
fn own_name(gguf_name: &str, architecture: Architecture) -> String {
    let of_layer = |rest: &str| {
        let (layer, part) = rest.split_once('.')?;
        let (part, kind) = part.rsplit_once('.')?;
        let own = match part {
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "attn_q_norm" => "self_attn.q_norm",
            "attn_k_norm" => "self_attn.k_norm",
            "attn_norm" => "input_layernorm",
            "ffn_norm" if architecture.has_post_norms() => "pre_feedforward_layernorm",
            "ffn_norm" | "post_attention_norm" => "post_attention_layernorm",
            "post_ffw_norm" => "post_feedforward_layernorm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            _ => return None,
        };
        Some(format!("model.layers.{layer}.{own}.{kind}"))
    };
    match gguf_name {
        "token_embd.weight" => "model.embed_tokens.weight".into(),
        "output_norm.weight" => "model.norm.weight".into(),
        "output.weight" => "lm_head.weight".into(),
        name => name.strip_prefix("blk.").and_then(of_layer).unwrap_or_else(|| name.to_owned()),
    }
}

fn absent(path: &Path) -> Error {
    Error::Read { path: path.into(), why: "there is no such file".into() }
}

/// Bytes of a file that is not too large; None where there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let unreadable = |why: String| Error::Read { path: path.into(), why };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(unreadable(e.to_string())),
    };
    let mut bytes = Vec::new();
    file.take(MAX_JSON + 1).read_to_end(&mut bytes).map_err(|e| unreadable(e.to_string()))?;
    if bytes.len() as u64 > MAX_JSON {
        return Err(unreadable(format!("it has more than {MAX_JSON} bytes")));
    }
    Ok(Some(bytes))
}

fn read_json(path: &Path) -> Result<Option<Map<String, Value>>, Error> {
    let Some(bytes) = read(path)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|e| Error::Damaged { path: path.into(), why: e.to_string() })
}

/// Rows of one tensor, read from its file when asked for.
pub struct Matrix<'a> {
    folder: &'a Folder,
    place: &'a Place,
    dtype: GgmlDType,
    rows: usize,
    columns: usize,
}

impl Matrix<'_> {
    fn bytes(&self, rows: Range<usize>) -> Result<Vec<u8>, Error> {
        let row_bytes = self.columns * self.dtype.type_size();
        let (path, file) = &self.folder.files[self.place.file];
        let mut bytes = vec![0; rows.len() * row_bytes];
        let at = self.place.start + (rows.start * row_bytes) as u64;
        let read = file.read_exact_at(&mut bytes, at);
        read.map_err(|e| Error::Read { path: path.clone(), why: e.to_string() })?;
        Ok(bytes)
    }
}

impl WeightRows for Matrix<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        let bytes = self.bytes(rows)?;
        let (pairs, _) = bytes.as_chunks::<2>();
        match self.dtype {
            GgmlDType::F16 => out.iter_mut().zip(pairs).for_each(|(x, b)| *x = f16::from_le_bytes(*b).to_f32()),
            GgmlDType::BF16 => out.iter_mut().zip(pairs).for_each(|(x, b)| *x = bf16::from_le_bytes(*b).to_f32()),
            _ => out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b)),
        }
        Ok(())
    }
}
