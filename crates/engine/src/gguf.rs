//! Model files. In: a path; out: checked metadata and tensors as f32 rows.
//! NOT here: what a model needs of them (model/config.rs), tokenizers (tokenizer.rs).
//!
//! A file is not trusted: its header is walked before candle-core parses it, and every tensor is checked against the
//! file's length before anything of its size is allocated.

use crate::Error;
use crate::error::said;
use crate::model::linear::{BlockKind, WeightRows};
use candle_core::CpuStorage;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Entries of one metadata array: above any vocabulary, small enough that parsing one cannot exhaust memory.
const MAX_ARRAY: u64 = 1 << 24;
/// Arrays within arrays.
const MAX_DEPTH: usize = 8;

/// An open, checked model file.
pub struct Gguf {
    path: PathBuf,
    file: File,
    content: Content,
    /// Tensors asked for so far: the rest would be silently ignored.
    taken: Mutex<BTreeSet<String>>,
}

impl Gguf {
    /// Opens a file and checks its header and that every tensor lies within it.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::NotGguf`], [`Error::DamagedGguf`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let unreadable = |e: std::io::Error| Error::Read { path: path.into(), why: e.to_string() };
        let damaged = |why: String| Error::DamagedGguf { path: path.into(), why };
        let file = File::open(path).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if !meta.is_file() {
            return Err(Error::Read { path: path.into(), why: "it is not a regular file".into() });
        }
        let mut reader = BufReader::new(file.try_clone().map_err(unreadable)?);
        let mut magic = Vec::new();
        reader.by_ref().take(4).read_to_end(&mut magic).map_err(unreadable)?;
        if magic != b"GGUF" {
            let why = format!("it starts with {:?}", String::from_utf8_lossy(&magic));
            return Err(Error::NotGguf { path: path.into(), why });
        }
        let mut walk = Walk { reader: &mut reader, left: meta.len() - 4, short_lengths: false };
        walk.header().map_err(&damaged)?;
        reader.seek(SeekFrom::Start(0)).map_err(unreadable)?;
        let content = Content::read(&mut reader).map_err(|e| damaged(said(e)))?;
        for (name, info) in &content.tensor_infos {
            let size = tensor_bytes(info.shape.dims(), info.ggml_dtype)
                .map_err(|why| damaged(format!("tensor `{name}` {why}")))?;
            let end = content.tensor_data_offset.checked_add(info.offset).and_then(|start| start.checked_add(size));
            if end.is_none_or(|end| end > meta.len()) {
                return Err(damaged(format!(
                    "tensor `{name}` needs {size} bytes at {} + {}, the file has {}",
                    content.tensor_data_offset,
                    info.offset,
                    meta.len()
                )));
            }
        }
        Ok(Self { path: path.into(), file, content, taken: Mutex::default() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A metadata entry, when the file has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// A text entry, when there is one.
    ///
    /// # Errors
    /// [`Error::Metadata`] for another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(wrong_type(key, "text", v)),
        }
    }

    /// A whole number, when there is one.
    ///
    /// # Errors
    /// [`Error::Metadata`] for another type, a negative number or one above 2^31.
    pub fn count(&self, key: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let n = match value {
            Value::U8(_) | Value::U16(_) | Value::U32(_) | Value::U64(_) => value.to_u64().ok(),
            Value::I8(v) => u64::try_from(*v).ok(),
            Value::I16(v) => u64::try_from(*v).ok(),
            Value::I32(v) => u64::try_from(*v).ok(),
            Value::I64(v) => u64::try_from(*v).ok(),
            _ => None,
        };
        match n {
            Some(n) if n <= 1 << 31 => Ok(Some(n as usize)),
            _ => Err(wrong_type(key, "a whole number up to 2^31", value)),
        }
    }

    /// A number with a fraction, when there is one.
    ///
    /// # Errors
    /// [`Error::Metadata`] for another type, NaN or infinity.
    pub fn real(&self, key: &str) -> Result<Option<f64>, Error> {
        let n = match self.get(key) {
            None => return Ok(None),
            Some(Value::F32(v)) => f64::from(*v),
            Some(Value::F64(v)) => *v,
            Some(v) => return Err(wrong_type(key, "a number", v)),
        };
        if n.is_finite() { Ok(Some(n)) } else { Err(wrong_type(key, "a finite number", &Value::F64(n))) }
    }

    /// A yes or no, when there is one.
    ///
    /// # Errors
    /// [`Error::Metadata`] for another type.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(wrong_type(key, "true or false", v)),
        }
    }

    /// Whether the file has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// A matrix of `rows` x `columns` (as the product uses it: one row per output).
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`].
    pub fn matrix(&self, name: &str, rows: usize, columns: usize) -> Result<Matrix<'_>, Error> {
        let (dtype, start) = self.locate(name, &[rows, columns])?;
        let row_bytes = columns / dtype.block_size() * dtype.type_size();
        Ok(Matrix { gguf: self, dtype, start, rows, columns, row_bytes })
    }

    /// A vector of `len` values.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::Read`].
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let (dtype, start) = self.locate(name, &[len])?;
        let row_bytes = len / dtype.block_size() * dtype.type_size();
        let mut out = vec![0.0; len];
        Matrix { gguf: self, dtype, start, rows: 1, columns: len, row_bytes }.read(0..1, &mut out)?;
        Ok(out)
    }

    /// A matrix kept in the type it has in the file, for looking up single rows.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::Read`].
    pub fn table(&self, name: &str, rows: usize, columns: usize) -> Result<QTensor, Error> {
        self.locate(name, &[rows, columns])?;
        let mut reader = BufReader::new(self.file.try_clone().map_err(|e| self.unreadable(e))?);
        Ok(self.content.tensor(&mut reader, name, &candle_core::Device::Cpu)?)
    }

    /// The first tensor that nobody asked for: a model with more parts than the engine computes would be decoded wrong.
    pub fn untaken(&self) -> Option<&str> {
        let taken = self.taken.lock().unwrap_or_else(|e| e.into_inner());
        self.content.tensor_infos.keys().filter(|k| !taken.contains(*k)).min().map(String::as_str)
    }

    fn locate(&self, name: &str, shape: &[usize]) -> Result<(GgmlDType, u64), Error> {
        let info = self.content.tensor_infos.get(name).ok_or_else(|| Error::MissingTensor { name: name.into() })?;
        if info.shape.dims() != shape {
            let got = info.shape.dims().to_vec();
            return Err(Error::TensorShape { name: name.into(), expected: shape.to_vec(), got });
        }
        self.taken.lock().unwrap_or_else(|e| e.into_inner()).insert(name.into());
        Ok((info.ggml_dtype, self.content.tensor_data_offset + info.offset))
    }

    fn unreadable(&self, e: std::io::Error) -> Error {
        Error::Read { path: self.path.clone(), why: e.to_string() }
    }
}

fn wrong_type(key: &str, wanted: &str, got: &Value) -> Error {
    let got = match got {
        Value::Array(v) => format!("an array of {}", v.len()),
        Value::String(s) if s.len() > 60 => format!("a text of {} bytes", s.len()),
        v => format!("{v:?}"),
    };
    Error::Metadata { key: key.into(), why: format!("expected {wanted}, got {got}") }
}

/// Bytes of a tensor; Err says why no tensor can have this shape.
fn tensor_bytes(dims: &[usize], dtype: GgmlDType) -> Result<u64, String> {
    let Some(&last) = dims.last() else { return Err("has no dimensions".into()) };
    if !last.is_multiple_of(dtype.block_size()) {
        return Err(format!("has rows of {last} values, no multiple of {} ({dtype:?})", dtype.block_size()));
    }
    dims[..dims.len() - 1]
        .iter()
        .try_fold(last / dtype.block_size(), |n, &d| n.checked_mul(d))
        .and_then(|blocks| blocks.checked_mul(dtype.type_size()))
        .map(|bytes| bytes as u64)
        .ok_or_else(|| format!("has an impossible shape {dims:?}"))
}

/// Rows of one tensor, read from the file when asked for.
pub struct Matrix<'a> {
    gguf: &'a Gguf,
    dtype: GgmlDType,
    start: u64,
    rows: usize,
    columns: usize,
    row_bytes: usize,
}

impl WeightRows for Matrix<'_> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn kind(&self) -> BlockKind {
        match self.dtype {
            GgmlDType::Q4_0 => BlockKind::Q4_0,
            GgmlDType::Q4_1 => BlockKind::Q4_1,
            GgmlDType::Q8_0 => BlockKind::Q8_0,
            _ => BlockKind::Other,
        }
    }

    fn read_blocks(&self, rows: Range<usize>) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0u8; rows.len() * self.row_bytes];
        let at = self.start + (rows.start * self.row_bytes) as u64;
        self.gguf.file.read_exact_at(&mut bytes, at).map_err(|e| self.gguf.unreadable(e))?;
        Ok(bytes)
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), Error> {
        let bytes = self.read_blocks(rows.clone())?;
        let values = rows.len() * self.columns;
        let CpuStorage::F32(values) = self.dtype.from_data(bytes.into()).dequantize(values)? else {
            unreachable!("dequantized values are f32")
        };
        out.copy_from_slice(&values);
        Ok(())
    }
}

/// Walks a header without keeping anything: what candle's parser takes on trust is checked here.
struct Walk<'a> {
    reader: &'a mut BufReader<File>,
    left: u64,
    /// Version 1 writes lengths in 4 bytes.
    short_lengths: bool,
}

impl Walk<'_> {
    fn header(&mut self) -> Result<(), String> {
        let version = self.int(4)?;
        if !(1..=3).contains(&version) {
            return Err(format!("version {version} is unknown (1 to 3 are known)"));
        }
        self.short_lengths = version == 1;
        let (tensors, entries) = (self.length()?, self.length()?);
        // A tensor takes 20 bytes of header or more, a metadata entry 9.
        let least = tensors.saturating_mul(20).saturating_add(entries.saturating_mul(9));
        if least > self.left {
            return Err(format!(
                "it announces {tensors} tensors and {entries} metadata entries, too many for its length"
            ));
        }
        for _ in 0..entries {
            let key = self.key()?;
            let kind = self.int(4)?;
            if key == b"general.alignment" {
                let width = scalar_width(kind).filter(|_| kind < 6).ok_or("general.alignment is no whole number")?;
                let alignment = self.int(width)?;
                if alignment == 0 || alignment > 1 << 20 {
                    return Err(format!("general.alignment is {alignment}"));
                }
            } else {
                self.value(kind, 0)?;
            }
        }
        Ok(())
    }

    fn value(&mut self, kind: u64, depth: usize) -> Result<(), String> {
        match (kind, scalar_width(kind)) {
            (_, Some(width)) => self.skip(width),
            (8, _) => {
                let length = self.length()?;
                self.skip(length)
            }
            (9, _) if depth < MAX_DEPTH => {
                let (kind, length) = (self.int(4)?, self.length()?);
                if length > MAX_ARRAY {
                    return Err(format!("a metadata array of {length} entries"));
                }
                if let Some(width) = scalar_width(kind) {
                    return self.skip(length * width);
                }
                (0..length).try_for_each(|_| self.value(kind, depth + 1))
            }
            (9, _) => Err("metadata arrays nested too deep".into()),
            _ => Err(format!("metadata of unknown type {kind}")),
        }
    }

    fn key(&mut self) -> Result<Vec<u8>, String> {
        let length = self.length()?;
        if length > 65_535 {
            return Err(format!("a metadata name of {length} bytes"));
        }
        let mut key = vec![0; length as usize];
        self.fill(&mut key)?;
        Ok(key)
    }

    fn length(&mut self) -> Result<u64, String> {
        self.int(if self.short_lengths { 4 } else { 8 })
    }

    fn int(&mut self, width: u64) -> Result<u64, String> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes[..width as usize])?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<(), String> {
        self.left = self.left.checked_sub(out.len() as u64).ok_or("its header ends early")?;
        self.reader.read_exact(out).map_err(|e| e.to_string())
    }

    fn skip(&mut self, bytes: u64) -> Result<(), String> {
        self.left = self.left.checked_sub(bytes).ok_or("its header ends early")?;
        let bytes = i64::try_from(bytes).map_err(|e| e.to_string())?;
        self.reader.seek_relative(bytes).map_err(|e| e.to_string())
    }
}

/// Bytes of one metadata value of a type of fixed width.
fn scalar_width(kind: u64) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
