//! The cache: sequences of tokens, packed by position. In: K and V rows; out: views that attention reads.
//! NOT here: the formula of the quantizer (quant/), attention (attend/).

pub(crate) mod cuda;
mod extent;
pub(crate) mod layout;
mod pages;
mod pools;
mod saved;
pub(crate) mod store;
#[cfg(test)]
mod tests;

use crate::append::cpu::{Variant, best};
use crate::{Codebook, Error, LayerShape, Scheme};
use extent::{Blocks, Extent};
use half::f16;
use layout::Half;
pub use pages::PageId;
use pages::Pages;
use pools::{BlockUse, Pools};
use std::collections::BTreeMap;
use std::sync::Arc;
use store::{LayerSpec, SeqView, Store};

impl std::fmt::Display for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Arm::F16 => "f16",
            Arm::Bf16 => "bf16",
            Arm::Fused => "fused",
            Arm::DequantOnce => "dequant-once",
            Arm::DequantStep => "dequant-step",
        })
    }
}

/// Which way to decode: how attention reads the packed part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arm {
    /// Plain f16 cache.
    F16,
    /// Plain bf16 cache.
    Bf16,
    /// Attention reads the packed codes.
    Fused,
    /// Packed on append, dequantized once into an f16 copy, attended as f16 (what most public code does).
    DequantOnce,
    /// The whole packed part dequantized to f16 on every call.
    DequantStep,
}

impl Arm {
    /// The arm that reads a cache of this scheme as it is stored: f16 and bf16 for the plain ones, fused for packed ones.
    pub fn of(scheme: Scheme) -> Self {
        match scheme {
            Scheme::F16 => Arm::F16,
            Scheme::Bf16 => Arm::Bf16,
            Scheme::Packed(_) => Arm::Fused,
        }
    }

    /// The scheme that this arm stores every layer in, whatever the layer's own says; None for arms that follow it.
    fn plain_scheme(self) -> Option<Scheme> {
        match self {
            Arm::F16 => Some(Scheme::F16),
            Arm::Bf16 => Some(Scheme::Bf16),
            Arm::Fused | Arm::DequantOnce | Arm::DequantStep => None,
        }
    }
}

/// One layer of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Heads and head_dim.
    pub shape: LayerShape,
    /// How its tokens are stored.
    pub scheme: Scheme,
    /// Keys that a query sees: at position i those at positions above `i - visible`, itself included; None: all.
    pub visible: Option<usize>,
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
    /// Whole records held; between append and commit also those packed ahead of a commit (decision 0003).
    pub packed_bytes: usize,
    /// Every byte held for rows that are not packed: window, sinks and tails in f16, and all of an f16 or bf16 layer
    /// (allocated capacity counts).
    pub window_bytes: usize,
    /// The f16 copy that only the dequant-once arm keeps.
    pub copy_bytes: usize,
    /// What the same tokens take as plain f16: `tokens * row_len * 2 tensors * 2 bytes` over all layers.
    pub f16_bytes_equivalent: usize,
}

impl CacheBytes {
    /// Each count with its counterpart in `other`.
    fn with(self, other: Self, f: impl Fn(usize, usize) -> usize) -> Self {
        Self {
            packed_bytes: f(self.packed_bytes, other.packed_bytes),
            window_bytes: f(self.window_bytes, other.window_bytes),
            copy_bytes: f(self.copy_bytes, other.copy_bytes),
            f16_bytes_equivalent: f(self.f16_bytes_equivalent, other.f16_bytes_equivalent),
        }
    }
}

impl std::ops::Add for CacheBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, |a, b| a + b)
    }
}

impl std::ops::Sub for CacheBytes {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, |a, b| a - b)
    }
}

/// A codec of another program, as what it gives back: for comparing its accuracy with that of the schemes.
pub trait RowCodec: Send + Sync {
    /// Replaces rows of one kv head by what the codec would give back for them.
    ///
    /// Shapes: `k`, `v`: f32 `[rows][head_dim]`, values that f16 holds; the results are rounded to f16.
    fn round_trip(&self, head_dim: usize, k: &mut [f32], v: &mut [f32]);
}

/// A cache of many sequences over all layers of a model.
pub struct Cache {
    layers: Vec<LayerSpec>,
    copy_pools: Vec<Option<usize>>,
    pools: Pools,
    arm: Arm,
    sequences: BTreeMap<SeqId, Vec<Store>>,
    next_id: usize,
    pages: Pages,
    kernel: &'static Variant,
}

impl Cache {
    /// An empty cache. With [`Arm::F16`] every layer is stored as f16, with [`Arm::Bf16`] as bf16, whatever its scheme says.
    ///
    /// # Errors
    /// [`Error::Shape`] when there are no layers, or one whose queries would see nothing.
    pub fn new(layers: &[LayerConfig], arm: Arm) -> Result<Self, Error> {
        if layers.is_empty() {
            return Err(Error::Shape { what: "layers of a cache (1 or more)", expected: 1, got: 0 });
        }
        if layers.iter().any(|l| l.visible == Some(0)) {
            return Err(Error::Shape { what: "keys that a query of a layer sees (1 or more)", expected: 1, got: 0 });
        }
        let mut pools = Pools::default();
        let scheme = |c: &LayerConfig| arm.plain_scheme().unwrap_or(c.scheme);
        let stored = |c: &LayerConfig| LayerConfig { scheme: scheme(c), ..*c };
        let layers: Vec<_> = layers.iter().map(|c| LayerSpec::new(&stored(c), &mut pools)).collect();
        let copies = |l: &LayerSpec| arm == Arm::DequantOnce && l.record.is_some();
        let copy_pools = layers.iter().map(|l| copies(l).then(|| l.copy_pool(&mut pools))).collect();
        let (sequences, pages) = (BTreeMap::new(), Pages::default());
        Ok(Self { layers, copy_pools, pools, arm, sequences, next_id: 0, pages, kernel: best() })
    }

    /// From now on the copy that the dequant-once arm attends is what `codec` gives back for each group's f16 rows, not
    /// what the records do: positions, window, sinks and pages stay those of the scheme. Without effect on other arms.
    pub fn imitate(&mut self, codec: &Arc<dyn RowCodec>) {
        self.layers.iter_mut().for_each(|layer| layer.imitated = Some(codec.clone()));
    }

    /// Gives a layer's sub-vectors their codebooks: `keys`, `values`: empty to leave them as they are, or one per kv head, or one
    /// for all. Until then they are those of independent standard normal channels.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`]; [`Error::Codebook`] when the layer's scheme has no such sub-vectors, their number or size is another,
    /// or the cache holds sequences or pages, whose records are of the old ones. Nothing has changed then.
    pub fn set_codebooks(&mut self, layer: usize, keys: Vec<Codebook>, values: Vec<Codebook>) -> Result<(), Error> {
        self.layer(layer)?;
        let no = |why: String| Err(Error::Codebook { layer, why });
        if !self.sequences.is_empty() || !self.pages.is_empty() {
            return no("the cache already holds sequences or pages".into());
        }
        let spec = &mut self.layers[layer];
        let shape = spec.shape;
        let Some(record) = &mut spec.record else {
            return no(format!("the scheme {} has no sub-vectors", spec.scheme));
        };
        for (name, books, half) in [("keys", &keys, &record.k), ("values", &values, &record.v)] {
            if books.is_empty() {
                continue;
            }
            let Half::Vectors(old) = half else {
                return no(format!("the scheme {} has no sub-vectors of {name}", spec.scheme));
            };
            if books.len() != 1 && books.len() != shape.kv_heads {
                return no(format!("{} codebooks of {name} for {} kv heads", books.len(), shape.kv_heads));
            }
            let size = |book: &Codebook| (book.head_dim(), book.centroids(), book.sub_len());
            if let Some(bad) = books.iter().find(|book| size(book) != size(&old[0])) {
                let what = |(d, n, len): (usize, usize, usize)| format!("{n}x{len} for {d} channels");
                let (got, want) = (what(size(bad)), what(size(&old[0])));
                return no(format!("a codebook of {name} is {got}, the scheme {} has {want}", spec.scheme));
            }
        }
        for (books, half) in [(keys, &mut record.k), (values, &mut record.v)] {
            if !books.is_empty() {
                *half = Half::Vectors(books.into());
            }
        }
        Ok(())
    }

    /// A new empty sequence.
    pub fn add_sequence(&mut self) -> SeqId {
        let id = SeqId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, self.layers.iter().map(|_| Store::default()).collect());
        id
    }

    /// Frees a sequence and all it holds.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn remove_sequence(&mut self, seq: SeqId) -> Result<(), Error> {
        let stores = self.sequences.remove(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        for (layer, mut store) in stores.into_iter().enumerate() {
            store.clear(&self.layers[layer], self.copy_pools[layer], &mut self.pools);
        }
        Ok(())
    }

    /// Appends rows to one layer: rounds to f16 (of a bf16 layer to bf16, straight from f32), checks that every value is
    /// finite then, stores the whole call or (on error) nothing of it, and packs the groups that the newest row sees
    /// packed. The f16 rows that older rows of the call still see stay until [`Cache::commit`].
    ///
    /// Shapes: `k`, `v`: f32 `[sum of rows][kv_heads][head_dim]`, batch entries one after another.
    ///
    /// # Errors
    /// [`Error::NotFinite`], [`Error::Shape`], [`Error::NoSuchLayer`], [`Error::NoSuchSequence`],
    /// [`Error::DuplicateSequence`], [`Error::OutOfMemory`].
    pub fn append(&mut self, layer: usize, batch: &[Rows], k: &[f32], v: &[f32]) -> Result<(), Error> {
        self.check_batch(layer, batch)?;
        let spec = &self.layers[layer];
        let row_len = spec.shape.row_len();
        let expected = batch.iter().map(|b| b.rows).sum::<usize>() * row_len;
        for (what, x) in [("length of K", k), ("length of V", v)] {
            if x.len() != expected {
                return Err(Error::Shape { what, expected, got: x.len() });
            }
        }
        for (tensor, x) in [("K", k), ("V", v)] {
            if !(self.kernel.finite)(x, spec.plain.format) {
                return Err(self.not_finite(tensor, layer, batch, x));
            }
        }
        let mut at = 0;
        for (done, entry) in batch.iter().enumerate() {
            let range = at..at + entry.rows * row_len;
            at = range.end;
            let store = &mut self.sequences.get_mut(&entry.seq).expect("checked")[layer];
            let (k, v) = (&k[range.clone()], &v[range]);
            let copy_pool = self.copy_pools[layer];
            if let Err(e) = store.append(spec, copy_pool, &mut self.pools, self.kernel, k, v) {
                // Earlier entries of the call are not committed yet, so their rows can always go again.
                for entry in &batch[..done] {
                    let store = &mut self.sequences.get_mut(&entry.seq).expect("checked")[layer];
                    let len = store.extent.len - entry.rows;
                    store.trim(spec, copy_pool, &mut self.pools, len);
                }
                return Err(e);
            }
        }
        Ok(())
    }

    /// The error that names the first number of a call that the layer's format does not hold.
    fn not_finite(&self, tensor: &'static str, layer: usize, batch: &[Rows], x: &[f32]) -> Error {
        let LayerSpec { shape, plain, .. } = &self.layers[layer];
        let limit = plain.format.refused_from();
        let at = x.iter().position(|x| x.is_nan() || x.abs() >= limit).expect("the kernel saw one");
        let mut row = at / shape.row_len();
        let mut entries = batch.iter();
        let mut entry = entries.next().expect("a number has a row");
        while row >= entry.rows {
            row -= entry.rows;
            entry = entries.next().expect("a number has a row");
        }
        let held = self.sequences[&entry.seq][layer].extent.len;
        let head = at % shape.row_len() / shape.head_dim;
        let (token, seq) = (held + row, Some(entry.seq));
        Error::NotFinite { tensor, format: plain.format, layer, head, token, value: x[at], seq }
    }

    /// Ends a step of one layer: every token of these sequences is kept for good, and rows that only older rows
    /// saw are freed. Call it after the layer's `attend`; leave it out for draft tokens, which [`Cache::trim`] can
    /// then drop without loss.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchSequence`], [`Error::DuplicateSequence`].
    pub fn commit(&mut self, layer: usize, batch: &[Rows]) -> Result<(), Error> {
        self.check_batch(layer, batch)?;
        for entry in batch {
            let store = &mut self.sequences.get_mut(&entry.seq).expect("checked")[layer];
            store.commit(&self.layers[layer], self.copy_pools[layer], &mut self.pools);
        }
        Ok(())
    }

    /// Shortens a sequence to `len` tokens in every layer. Uncommitted tokens go freely, committed ones only while the
    /// f16 rows that the remaining ones need are still there.
    ///
    /// # Errors
    /// [`Error::TrimPacked`] or [`Error::Shape`] (more tokens than held), and then no layer has changed.
    pub fn trim(&mut self, seq: SeqId, len: usize) -> Result<(), Error> {
        let stores = self.sequences.get_mut(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        for (store, spec) in stores.iter().zip(&self.layers) {
            store.check_trim(spec, len)?;
        }
        for (layer, store) in stores.iter_mut().enumerate() {
            store.trim(&self.layers[layer], self.copy_pools[layer], &mut self.pools, len);
        }
        Ok(())
    }

    /// Tokens of a sequence in one layer.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`], [`Error::NoSuchSequence`].
    pub fn len(&self, layer: usize, seq: SeqId) -> Result<usize, Error> {
        self.layer(layer)?;
        let stores = self.sequences.get(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        Ok(stores[layer].extent.len)
    }

    /// Every record of a cache's first sequence in a layer: layout, head, group, bytes.
    #[cfg(test)]
    pub(crate) fn each_record(&self, layer: usize, mut f: impl FnMut(&layout::RecordLayout, usize, usize, &[u8])) {
        let stores = self.sequences.values().next().expect("a sequence");
        let spec = &self.layers[layer];
        let view = stores[layer].view(spec, self.copy_pools[layer], &self.pools);
        let Some(record) = &spec.record else { return };
        for group in view.groups() {
            (0..spec.shape.kv_heads).for_each(|head| f(record, head, group, view.record(head, group)));
        }
    }

    /// Whether the cache holds no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Bytes held.
    pub fn bytes(&self) -> CacheBytes {
        let row_bytes = |l: &LayerSpec| 2 * l.shape.row_len() * size_of::<f16>();
        let plain = |stores: &Vec<Store>| {
            stores.iter().zip(&self.layers).map(|(s, l)| s.extent.len * row_bytes(l)).sum::<usize>()
        };
        CacheBytes {
            packed_bytes: self.pools.in_use_bytes(BlockUse::Records),
            window_bytes: self.pools.in_use_bytes(BlockUse::Window),
            copy_bytes: self.pools.in_use_bytes(BlockUse::Copy),
            f16_bytes_equivalent: self.sequences.values().map(plain).sum(),
        }
    }

    /// From now on blocks in use never take more bytes than this, all layers and uses together; None: no limit.
    pub fn set_budget(&mut self, bytes: Option<usize>) {
        self.pools.budget = bytes;
    }

    /// Bytes that the next step of these sequences takes at its largest, beyond those held now: each layer appends, then
    /// commits, one layer after another.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn bytes_needed(&self, batch: &[Rows]) -> Result<usize, Error> {
        let (mut now, mut most) = (0isize, 0);
        for (layer, spec) in self.layers.iter().enumerate() {
            let copies = self.copy_pools[layer].is_some();
            let mut freed = 0;
            for entry in batch {
                let stores = self.sequences.get(&entry.seq).ok_or(Error::NoSuchSequence { id: entry.seq.0 })?;
                let mut extent = stores[layer].extent;
                now += extent.append(spec, entry.rows).bytes(spec, copies) as isize;
                now += stores[layer].bytes_to_own(spec, &self.pools) as isize;
                let gone = extent.commit(spec);
                freed += stores[layer].bytes_given_back(spec, &self.pools, gone, copies) as isize;
            }
            most = most.max(now);
            now -= freed;
        }
        Ok(most as usize)
    }

    /// Bytes that [`Cache::hold_page`] takes for what it packs ahead of time.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn bytes_to_hold(&self, seq: SeqId) -> Result<usize, Error> {
        let stores = self.sequences.get(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        let of = |(store, spec): (&Store, &LayerSpec)| {
            let groups = { store.extent }.seal(spec);
            Blocks { groups, ..Blocks::default() }.bytes(spec, false)
        };
        Ok(stores.iter().zip(&self.layers).map(of).sum())
    }

    /// Most bytes that a sequence takes on its way to `len` tokens when its first `prompt` come in steps of at most `rows`
    /// and the others one by one: what a budget must hold for it alone.
    pub fn bytes_to_reach(&self, len: usize, prompt: usize, rows: usize) -> usize {
        let mut extents = vec![Extent::default(); self.layers.len()];
        let (mut at, mut now, mut most) = (0, 0, 0);
        while at < len {
            let step = if at < prompt { rows.max(1).min(prompt - at) } else { 1 };
            for ((spec, extent), copy) in self.layers.iter().zip(&mut extents).zip(&self.copy_pools) {
                now += extent.append(spec, step).bytes(spec, copy.is_some());
                most = most.max(now);
                now -= extent.commit(spec).bytes(spec, copy.is_some());
            }
            at += step;
        }
        // Steps that begin inside a block reach into one more.
        most + self.layers.iter().map(|spec| spec.plain.block_bytes(spec.shape.kv_heads)).max().unwrap_or(0)
    }

    /// Bytes that a sequence of `len` tokens takes between steps.
    pub fn bytes_at(&self, len: usize) -> usize {
        let of =
            |(spec, copy): (&LayerSpec, &Option<usize>)| Extent::of_len(spec, len).blocks().bytes(spec, copy.is_some());
        self.layers.iter().zip(&self.copy_pools).map(of).sum()
    }

    /// Bytes of the blocks of one sequence, those that it shares included.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn sequence_bytes(&self, seq: SeqId) -> Result<usize, Error> {
        let stores = self.sequences.get(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        let of = |(layer, store): (usize, &Store)| {
            store.extent.blocks().bytes(&self.layers[layer], self.copy_pools[layer].is_some())
        };
        Ok(stores.iter().enumerate().map(of).sum())
    }

    /// Bytes of all blocks in use; what a budget bounds.
    pub fn held_bytes(&self) -> usize {
        self.pools.held_bytes()
    }

    /// Bytes of the largest block.
    pub fn largest_block_bytes(&self) -> usize {
        self.pools.largest_block_bytes()
    }

    /// Blocks in use, and how many of them belong to several sequences or pages.
    pub fn blocks(&self) -> (usize, usize) {
        self.pools.blocks()
    }

    /// Name of the kernel that rounds, transposes, quantizes and packs: the best one this processor can run. All write
    /// the same bytes.
    pub fn append_kernel(&self) -> &'static str {
        self.kernel.name
    }

    /// The arm this cache serves.
    pub fn arm(&self) -> Arm {
        self.arm
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Shape and scheme of a layer, as it is really stored.
    ///
    /// # Errors
    /// [`Error::NoSuchLayer`].
    pub fn layer_config(&self, layer: usize) -> Result<LayerConfig, Error> {
        self.layer(layer).map(|l| LayerConfig { shape: l.shape, scheme: l.scheme, visible: l.visible })
    }

    pub(crate) fn layer(&self, layer: usize) -> Result<&LayerSpec, Error> {
        self.layers.get(layer).ok_or(Error::NoSuchLayer { layer, layers: self.layers.len() })
    }

    /// What attention reads of a sequence in a layer.
    pub(crate) fn view(&self, layer: usize, seq: SeqId) -> Result<SeqView<'_>, Error> {
        let spec = self.layer(layer)?;
        let stores = self.sequences.get(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        Ok(stores[layer].view(spec, self.copy_pools[layer], &self.pools))
    }

    fn check_batch(&self, layer: usize, batch: &[Rows]) -> Result<(), Error> {
        self.layer(layer)?;
        let mut seen = std::collections::BTreeSet::new();
        for entry in batch {
            if !self.sequences.contains_key(&entry.seq) {
                return Err(Error::NoSuchSequence { id: entry.seq.0 });
            }
            if !seen.insert(entry.seq) {
                return Err(Error::DuplicateSequence { id: entry.seq.0 });
            }
            if entry.rows == 0 {
                return Err(Error::Shape { what: "rows of a batch entry (1 or more)", expected: 1, got: 0 });
            }
        }
        Ok(())
    }
}
