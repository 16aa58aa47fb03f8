//! The cache: sequences of tokens, packed by position. In: f16-rounded K and V rows; out: views that attention reads.
//! NOT here: the formula of the quantizer (quant/), attention (attend/).

use crate::{Error, LayerShape, Scheme};

/// Which way to decode: how attention reads the packed part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arm {
    /// Plain f16 cache.
    F16,
    /// Attention reads the packed codes.
    Fused,
    /// Packed on append, dequantized once into an f16 copy, attended as f16 (what most public code does).
    DequantOnce,
    /// The whole packed part dequantized to f16 on every call.
    DequantStep,
}

/// One layer of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Heads and head_dim.
    pub shape: LayerShape,
    /// How its tokens are stored.
    pub scheme: Scheme,
}

/// Handle of a sequence in a [`Cache`]. Not reused while the cache lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub(crate) usize);

/// `rows` tokens of one sequence in a variable-length batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Whose tokens.
    pub seq: SeqId,
    /// How many (1 or more).
    pub rows: usize,
}

/// What a cache holds, in bytes the allocator gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheBytes {
    /// Whole records held.
    pub packed_bytes: usize,
    /// Every f16 byte held for window, sinks and unpacked tails (allocated capacity counts).
    pub window_bytes: usize,
    /// The f16 copy that only the dequant-once arm keeps.
    pub copy_bytes: usize,
    /// What the same tokens take as plain f16: `tokens * row_len * 2 tensors * 2 bytes` over all layers.
    pub f16_bytes_equivalent: usize,
}

/// A cache of many sequences over all layers of a model.
pub struct Cache {}

impl Cache {
    /// An empty cache.
    pub fn new(_layers: &[LayerConfig], _arm: Arm) -> Result<Self, Error> {
        todo!()
    }
    /// A new empty sequence.
    pub fn add_sequence(&mut self) -> SeqId {
        todo!()
    }
    /// Frees a sequence and all it holds.
    pub fn remove_sequence(&mut self, _seq: SeqId) -> Result<(), Error> {
        todo!()
    }
    /// Appends rows to one layer: rounds to f16, checks that every value is finite, stores all or (on error) nothing,
    /// and packs the groups that the newest row sees packed. The f16 rows that older rows of the call still see
    /// stay until [`Cache::commit`].
    ///
    /// Shapes: `k`, `v`: f32 `[sum of rows][kv_heads][head_dim]`, batch entries one after another.
    pub fn append(&mut self, _layer: usize, _batch: &[Rows], _k: &[f32], _v: &[f32]) -> Result<(), Error> {
        todo!()
    }
    /// Ends a step of one layer: every token of these sequences is kept for good, f16 rows that only older rows saw are freed.
    /// Call it after the layer's `attend`.
    pub fn commit(&mut self, _layer: usize, _batch: &[Rows]) -> Result<(), Error> {
        todo!()
    }
    /// Shortens a sequence to `len` tokens in every layer. Uncommitted tokens go freely, committed ones only while
    /// the f16 rows needed are still there.
    pub fn trim(&mut self, _seq: SeqId, _len: usize) -> Result<(), Error> {
        todo!()
    }
    /// Tokens of a sequence in one layer.
    pub fn len(&self, _layer: usize, _seq: SeqId) -> Result<usize, Error> {
        todo!()
    }
    /// Bytes held.
    pub fn bytes(&self) -> CacheBytes {
        todo!()
    }
    /// The arm this cache serves.
    pub fn arm(&self) -> Arm {
        todo!()
    }
}
