//! The cache on a GPU: sequences in slots, packed groups and plain tiles in device memory. In: layers, an arm, f16 rows on the
//! device; out: launches that append and attend, and bytes held.
//!
//! The same rules as the CPU's cache (`PackedScheme::edge`); the same codes, in the GPU's order (layout.rs). Lengths and block
//! tables lie on the device, so that a step that was captured as a graph stays valid while sequences grow.
//!
//! A sequence owns pages of [`PAGE_LEN`] tokens for as many tokens as it was added for. A page has a number, and each layer a
//! place for every page: records, or the plain tiles of a plain cache or of a dequantizing arm. The f16 window is a ring of
//! tiles per slot and layer.
//! NOT here: kernels and their launches (append/cuda, attend/cuda), models.

use super::kind::{Kind, Sizes};
use super::{Fault, OutFormat};
use crate::device::cuda::Gpu;
use crate::{Arm, CacheBytes, Error, LayerConfig, Scheme};
use cudarc::driver::CudaSlice;
use std::sync::Arc;

/// Tokens of a page: a multiple of every group_len.
pub const PAGE_LEN: usize = 256;

/// What a [`GpuCache`] is made for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuOptions {
    /// Sequences at once.
    pub slots: usize,
    /// Most tokens of a sequence.
    pub max_tokens: usize,
    /// Bytes of device memory for pages and windows together; partial results, and a prompt's scratch while one is computed, come on top.
    pub bytes: usize,
    /// How attention's results are written.
    pub out: OutFormat,
    /// Softcap of scores.
    pub softcap: Option<f32>,
    /// Batch-invariant attention: a request's result does not depend on what else is in the batch. Slower for few requests.
    pub invariant: bool,
}

/// Units of a piece of work in the invariant mode: 2,048 tokens in groups of 64.
pub(super) const INVARIANT_CHUNK: u32 = 32;

/// Requests of a launch are one axis of a grid.
const MOST_SLOTS: usize = 65_535;

/// A sequence in its slot.
pub(super) struct Sequence {
    pub len: usize,
    pub pages: Vec<u32>,
}

/// Decode steps and prompts, one at a time.
pub(super) enum Now {
    Nothing,
    Decode { batch: Vec<usize> },
    Prefill { slot: usize, rows: usize },
}

/// Layers as an arm stores them.
fn as_stored(layers: &[LayerConfig], arm: Arm) -> Vec<LayerConfig> {
    let scheme = |l: &LayerConfig| if arm == Arm::F16 { Scheme::F16 } else { l.scheme };
    layers.iter().map(|l| LayerConfig { scheme: scheme(l), ..*l }).collect()
}

/// For each layer its kind, and its place among the kind's layers.
type Places = Vec<(usize, usize)>;

/// Sizes of the kinds of layers, and where each layer is among them.
fn sizes_of(layers: &[LayerConfig], arm: Arm) -> Result<(Vec<Sizes>, Places), Error> {
    let mut kinds: Vec<(LayerConfig, usize)> = Vec::new();
    let mut place = Vec::new();
    for layer in layers {
        let kind = kinds.iter().position(|(config, _)| config == layer).unwrap_or_else(|| {
            kinds.push((*layer, 0));
            kinds.len() - 1
        });
        place.push((kind, kinds[kind].1));
        kinds[kind].1 += 1;
    }
    let sizes = kinds.iter().map(|(config, layers)| Sizes::of(config, arm, *layers)).collect::<Result<_, _>>()?;
    Ok((sizes, place))
}

/// A cache of up to `slots` sequences over all layers of a model, on a GPU.
pub struct GpuCache {
    pub(super) gpu: Arc<Gpu>,
    pub(super) arm: Arm,
    pub(super) options: GpuOptions,
    pub(super) layers: Vec<LayerConfig>,
    /// Layers of one shape and scheme share a kind.
    pub(super) kinds: Vec<Kind>,
    pub(super) place: Places,
    pub(super) sequences: Vec<Option<Sequence>>,
    pub(super) free_pages: Vec<u32>,
    pub(super) pages: usize,
    pub(super) table: CudaSlice<u32>,
    pub(super) table_len: usize,
    /// `[slots]` each: lengths with the new token, slots, positions of the new tokens.
    pub(super) lens: CudaSlice<u32>,
    pub(super) slot_of: CudaSlice<u32>,
    pub(super) positions: CudaSlice<u32>,
    /// What [`Fault`] is read from.
    pub(super) fault: CudaSlice<u32>,
    pub(super) bucket: usize,
    pub(super) now: Now,
}

impl GpuCache {
    /// Bytes that so many sequences of `tokens` tokens take, windows and whole pages: what [`GpuOptions::bytes`] has to be for them to be in
    /// the cache at once.
    ///
    /// # Errors
    /// As [`GpuCache::new`] for schemes that the GPU does not read.
    pub fn bytes_of(layers: &[LayerConfig], arm: Arm, sequences: usize, tokens: usize) -> Result<usize, Error> {
        let of = |sizes: &Sizes| sizes.slot_bytes() + Self::pages_of(tokens) * sizes.page_bytes();
        Ok(sequences * sizes_of(&as_stored(layers, arm), arm)?.0.iter().map(of).sum::<usize>())
    }

    /// An empty cache. Memory for all pages is taken now.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for schemes that the GPU's kernels do not read (codecs that are not affine, loud channels, fits other
    /// than minmax, bf16 rows); [`Error::OutOfBlocks`] when `bytes` is too little for one page; [`Error::GpuOutOfMemory`].
    pub fn new(gpu: &Arc<Gpu>, layers: &[LayerConfig], arm: Arm, options: GpuOptions) -> Result<Self, Error> {
        if layers.is_empty() || options.slots == 0 || options.max_tokens == 0 {
            let what = "layers, slots and tokens of a cache (each 1 or more)";
            return Err(Error::Shape { what, expected: 1, got: 0 });
        }
        if options.slots > MOST_SLOTS {
            let what = "sequences of a cache on a GPU, at most";
            return Err(Error::Shape { what, expected: MOST_SLOTS, got: options.slots });
        }
        if let Some(value) = options.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(Error::Number { what: "softcap", value, allowed: "a positive number" });
        }
        let layers = as_stored(layers, arm);
        let (sizes, place) = sizes_of(&layers, arm)?;
        let table_len = options.max_tokens.div_ceil(PAGE_LEN);
        let per_slot: usize = sizes.iter().map(Sizes::slot_bytes).sum();
        let per_page: usize = sizes.iter().map(Sizes::page_bytes).sum();
        let free = options.bytes.saturating_sub(per_slot * options.slots);
        let pages = (free / per_page).min(options.slots * table_len);
        if pages == 0 {
            return Err(Error::OutOfBlocks { need: per_page + per_slot * options.slots, free: options.bytes });
        }
        let kinds = sizes.into_iter().map(|s| Kind::new(gpu, s, &options, pages)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            arm,
            options,
            layers,
            kinds,
            place,
            sequences: (0..options.slots).map(|_| None).collect(),
            free_pages: (0..pages as u32).rev().collect(),
            pages,
            table: gpu.zeros(options.slots * table_len)?,
            table_len,
            lens: gpu.zeros(options.slots)?,
            slot_of: gpu.zeros(options.slots)?,
            positions: gpu.zeros(options.slots)?,
            fault: gpu.zeros(Fault::WORDS)?,
            bucket: 0,
            now: Now::Nothing,
            gpu: gpu.clone(),
        })
    }

    /// The card.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The arm.
    pub fn arm(&self) -> Arm {
        self.arm
    }

    /// Its layers, as they are stored.
    pub fn layers(&self) -> &[LayerConfig] {
        &self.layers
    }

    /// Sequences that it can hold at once.
    pub fn slots(&self) -> usize {
        self.options.slots
    }

    /// Most tokens of a sequence.
    pub fn max_tokens(&self) -> usize {
        self.options.max_tokens
    }

    /// Pages that no sequence owns.
    pub fn free_pages(&self) -> usize {
        self.free_pages.len()
    }

    /// Pages in all.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes of a page in all layers.
    pub fn page_bytes(&self) -> usize {
        self.kinds.iter().map(|kind| kind.sizes.page_bytes()).sum()
    }

    /// Bytes of all pages and windows: what is taken of [`GpuOptions::bytes`].
    pub fn capacity_bytes(&self) -> usize {
        self.pages * self.page_bytes() + self.options.slots * self.window_bytes()
    }

    /// Bytes of a sequence's windows in all layers.
    pub fn window_bytes(&self) -> usize {
        self.kinds.iter().map(|kind| kind.sizes.slot_bytes()).sum()
    }

    /// Bytes of a sequence: its pages and its windows.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn sequence_bytes(&self, slot: usize) -> Result<usize, Error> {
        Ok(self.sequence(slot)?.pages.len() * self.page_bytes() + self.window_bytes())
    }

    /// Slots that no sequence has.
    pub fn free_slots(&self) -> usize {
        self.sequences.iter().filter(|s| s.is_none()).count()
    }

    /// Pages that a sequence of so many tokens owns.
    pub fn pages_of(tokens: usize) -> usize {
        tokens.div_ceil(PAGE_LEN)
    }

    /// A new sequence that can grow to `tokens` tokens; its slot.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] without a slot or enough pages; [`Error::Shape`] for more tokens than the cache was made for.
    pub fn add(&mut self, tokens: usize) -> Result<usize, Error> {
        if tokens > self.options.max_tokens {
            let what = "tokens of a sequence, at most those the cache was made for";
            return Err(Error::Shape { what, expected: self.options.max_tokens, got: tokens });
        }
        let need = Self::pages_of(tokens.max(1));
        let slot = self.sequences.iter().position(Option::is_none);
        let Some(slot) = slot.filter(|_| need <= self.free_pages.len()) else {
            let page: usize = self.kinds.iter().map(|k| k.sizes.page_bytes()).sum();
            return Err(Error::OutOfBlocks { need: need * page, free: self.free_pages.len() * page });
        };
        let pages = self.free_pages.split_off(self.free_pages.len() - need);
        let row = slot * self.table_len;
        if let Err(e) = self.gpu.stream().memcpy_htod(&pages, &mut self.table.slice_mut(row..row + need)) {
            self.free_pages.extend(pages);
            return Err(e.into());
        }
        self.sequences[slot] = Some(Sequence { len: 0, pages });
        Ok(slot)
    }

    /// Frees a sequence's slot and pages.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn remove(&mut self, slot: usize) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(slot).and_then(Option::take);
        let sequence = sequence.ok_or(Error::NoSuchSequence { id: slot })?;
        self.free_pages.extend(sequence.pages);
        Ok(())
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn len(&self, slot: usize) -> Result<usize, Error> {
        Ok(self.sequence(slot)?.len)
    }

    /// Whether it holds no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.iter().all(Option::is_none)
    }

    /// Sets a sequence's length without touching its bytes: for timing attention over contents that were written otherwise.
    #[doc(hidden)]
    pub fn set_len(&mut self, slot: usize, len: usize) -> Result<(), Error> {
        let most = self.sequence(slot)?.pages.len() * PAGE_LEN;
        if len > most {
            return Err(Error::Shape {
                what: "tokens of a sequence, at most those of its pages",
                expected: most,
                got: len,
            });
        }
        if let Some(sequence) = &mut self.sequences[slot] {
            sequence.len = len;
        }
        Ok(())
    }

    /// Fills every other page and slot with what slot `from` has, in each layer its own, or (`first_layer`) everywhere what it has in
    /// the first layer of each kind: for timing, where contents need to be real but not different.
    #[doc(hidden)]
    pub fn spread(&mut self, from: usize, first_layer: bool) -> Result<(), Error> {
        let pages = self.sequence(from)?.pages.clone();
        for kind in &mut self.kinds {
            kind.spread(&self.gpu, from, &pages, self.options.slots, first_layer)?;
        }
        Ok(())
    }

    /// For experiments: query heads that share an unpack (1 to 8), and blocks of attention's grid, at most as many as run at once;
    /// None: the kernel's own choice. Begin a step anew afterwards.
    #[doc(hidden)]
    pub fn vary(&mut self, pass: usize, blocks: Option<usize>) {
        for kind in &mut self.kinds {
            let most = kind.attend.iter().map(|k| k.blocks(&self.gpu)).min().unwrap_or(1);
            if self.options.invariant {
                // Its room for partial results is that of the usual passes.
                continue;
            }
            kind.sizes.pass = pass.clamp(1, crate::attend::cuda::HEADS);
            kind.sizes.blocks = blocks.map(|b| b.clamp(1, most));
        }
    }

    /// Bytes held: pages that sequences own, and the windows of all slots, which are taken once for all.
    pub fn bytes(&self) -> CacheBytes {
        let owned = self.pages - self.free_pages.len();
        let tokens: usize = self.sequences.iter().flatten().map(|s| s.len).sum();
        let mut bytes = CacheBytes::default();
        for kind in &self.kinds {
            let sizes = &kind.sizes;
            bytes.packed_bytes += owned * sizes.record_page_bytes();
            match self.arm {
                _ if !sizes.packs() => bytes.window_bytes += owned * sizes.tile_page_bytes(),
                Arm::DequantOnce => bytes.copy_bytes += owned * sizes.tile_page_bytes(),
                Arm::DequantStep => bytes.copy_bytes += self.pages * sizes.tile_page_bytes(),
                _ => bytes.window_bytes += owned * sizes.tile_page_bytes(),
            }
            bytes.window_bytes += self.options.slots * sizes.slot_bytes();
            bytes.f16_bytes_equivalent += tokens * sizes.f16_token_bytes();
        }
        bytes
    }

    pub(super) fn sequence(&self, slot: usize) -> Result<&Sequence, Error> {
        self.sequences.get(slot).and_then(Option::as_ref).ok_or(Error::NoSuchSequence { id: slot })
    }
}

#[cfg(test)]
impl GpuCache {
    /// Every record of a layer's kind.
    pub(crate) fn record_bytes_of(&self, gpu: &Gpu, layer: usize) -> Vec<u8> {
        self.kinds[self.place[layer].0].record_bytes(gpu)
    }

    /// Where the record of a head and group of a slot begins among those.
    pub(crate) fn record_at(&self, layer: usize, slot: usize, head: usize, group: usize) -> usize {
        let (kind, index) = self.place[layer];
        let sizes = &self.kinds[kind].sizes;
        let groups = PAGE_LEN / sizes.record.group_len;
        let page = self.sequences[slot].as_ref().expect("a sequence").pages[group / groups] as usize;
        let place = (index * self.pages + page) * sizes.shape.kv_heads + head;
        (place * groups + group % groups) * sizes.record.record_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayerShape;

    /// 36 layers of 8 kv heads of 128 channels: 4,000 tokens take 16 pages.
    #[test]
    fn bytes_of_requests() {
        let of = |scheme: &str, arm| {
            let shape = LayerShape::new(32, 8, 128).unwrap();
            let layer = LayerConfig { shape, scheme: scheme.parse().unwrap(), visible: None };
            GpuCache::bytes_of(&vec![layer; 36], arm, 1, 4000).unwrap()
        };
        let f16 = of("f16", Arm::F16);
        assert_eq!(f16, 16 * 256 * 36 * 8 * 2 * 128 * 2);
        assert_eq!(40_000_000_000 / f16, 66, "as many as were counted on a card");
        let packed = of("k4v4g64w128", Arm::Fused);
        // Codes and parameters of 4,096 tokens, and a ring of 13 tiles of 16 tokens.
        assert_eq!(packed, 36 * 8 * (4096 / 64 * 9216 + 13 * 16 * 2 * 128 * 2));
        assert_eq!(40_000_000_000 / packed, 199);
        // Every step dequantizes into the plain tiles of one layer.
        assert_eq!(of("k4v4g64w128", Arm::DequantStep) - packed, 16 * 256 * 8 * 2 * 128 * 2);
        assert!(GpuCache::bytes_of(&[], Arm::F16, 1, 1).is_ok_and(|bytes| bytes == 0));
    }

    #[test]
    fn what_the_card_does_not_read_is_refused() {
        for scheme in ["bf16", "ktq4v4g64", "k2l4v2g64", "k4v4g64.mse"] {
            let shape = LayerShape::new(32, 8, 128).unwrap();
            let layer = LayerConfig { shape, scheme: scheme.parse().unwrap(), visible: None };
            let why = GpuCache::bytes_of(&[layer], Arm::Fused, 1, 1).unwrap_err().to_string();
            assert!(why.contains("CPU only"), "{scheme}: {why}");
        }
    }
}
