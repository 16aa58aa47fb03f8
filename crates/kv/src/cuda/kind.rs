//! Layers of one shape and scheme: their device memory, and the kernels that know their records. In: a layer's configuration;
//! out: sizes, buffers, and parameters of launches.
//! NOT here: sequences (mod.rs), when what is launched (steps.rs).

use super::cache::{GpuOptions, INVARIANT_CHUNK, PAGE_LEN};
use crate::append::cuda::{Kernels, Paged, Tiles};
use crate::attend::cuda::{HEADS, Kernel, plan_program, prefill};
use crate::cache::cuda::Rule;
use crate::cache::cuda::layout::{RecordShape, TILE_LEN};
use crate::codec::Codec;
use crate::device::cuda::Gpu;
use crate::scheme::Fit;
use crate::{Arm, Error, LayerConfig, LayerShape, Scheme};
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, LaunchConfig, PushKernelArg};

/// Sizes of a kind, without memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sizes {
    pub shape: LayerShape,
    pub record: RecordShape,
    pub rule: Rule,
    pub layers: usize,
    /// Plain tiles are in pages: all of a plain cache, or copies of packed groups.
    pub paged_tiles: bool,
    /// The pages of tiles are one layer's, used again by the next one.
    pub one_layer_of_tiles: bool,
    /// How attention reads packed groups: as records.
    pub fused: bool,
    /// Query heads that share an unpack.
    pub pass: usize,
    /// Blocks of attention's grid; None: as many as run at once.
    pub blocks: Option<usize>,
}

impl Sizes {
    pub(crate) fn of(config: &LayerConfig, arm: Arm, layers: usize) -> Result<Self, Error> {
        let LayerConfig { shape, scheme, visible } = *config;
        let no = |why: String| Err(Error::Unsupported { kernel: "cuda".into(), why });
        let (record, rule) = match scheme {
            Scheme::F16 => (RecordShape::plain(shape.head_dim), Rule::default()),
            Scheme::Bf16 => return no("bf16 caches are read on the CPU only; f16 is".into()),
            Scheme::Packed(p) => {
                let bits = |codec: Codec| codec.as_affine().filter(|(_, loud)| *loud == 0).map(|(bits, _)| bits);
                let (Some(k_bits), Some(v_bits)) = (bits(p.k()), bits(p.v())) else {
                    return no(format!(
                        "{scheme} is read on the CPU only: GPU kernels know groups with scale and zero"
                    ));
                };
                if p.fit() != Fit::MinMax {
                    return no(format!(
                        "{scheme} is packed on the CPU only: the GPU's quantizer takes the range (minmax)"
                    ));
                }
                let rule = Rule {
                    group_len: p.group_len() as u32,
                    window_len: p.window_len() as u32,
                    page_len: p.page_len() as u32,
                    sinks: p.sinks() as u32,
                    visible: 0,
                };
                (RecordShape { head_dim: shape.head_dim, group_len: p.group_len(), k_bits, v_bits }, rule)
            }
        };
        if arm == Arm::Bf16 {
            return no("the arm bf16 runs on the CPU only".into());
        }
        let packed = !record.is_plain();
        let dequantizes = packed && matches!(arm, Arm::DequantOnce | Arm::DequantStep);
        let rule = Rule { visible: visible.unwrap_or(0) as u32, ..rule };
        Ok(Self {
            shape,
            record,
            rule,
            layers,
            paged_tiles: !packed || dequantizes,
            one_layer_of_tiles: packed && arm == Arm::DequantStep,
            fused: packed && !dequantizes,
            pass: HEADS,
            blocks: None,
        })
    }

    /// Whether groups are packed at all.
    pub(crate) fn packs(&self) -> bool {
        !self.record.is_plain()
    }

    /// Bytes of the records of one page in all layers.
    pub(crate) fn record_page_bytes(&self) -> usize {
        let groups = PAGE_LEN / self.record.group_len;
        self.layers * self.shape.kv_heads * groups * self.record.record_bytes()
    }

    /// Bytes of the plain tiles of one page.
    pub(crate) fn tile_page_bytes(&self) -> usize {
        let layers = if self.one_layer_of_tiles { 1 } else { self.layers };
        let tiles = PAGE_LEN / TILE_LEN * self.record.tile_bytes();
        if self.paged_tiles { layers * self.shape.kv_heads * tiles } else { 0 }
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.record_page_bytes() + self.tile_page_bytes()
    }

    /// Tiles of a slot's ring: what lies between the edge and the newest token, one more group while it is packed, and the tile
    /// that is being written.
    pub(crate) fn window_tiles(&self) -> usize {
        let tokens = (self.rule.window_len + self.rule.group_len) as usize;
        if self.packs() { tokens.div_ceil(TILE_LEN) + 1 } else { 0 }
    }

    fn sink_tiles(&self) -> usize {
        usize::from(self.rule.sinks > 0)
    }

    /// Bytes of window and sinks of one slot.
    pub(crate) fn slot_bytes(&self) -> usize {
        let tiles = self.window_tiles() + self.sink_tiles();
        self.layers * self.shape.kv_heads * tiles * self.record.tile_bytes()
    }

    /// Bytes of one token as plain f16 in all layers.
    pub(crate) fn f16_token_bytes(&self) -> usize {
        self.layers * 2 * self.shape.row_len() * 2
    }

    /// Rows of a request: kv heads, times passes over more than eight query heads.
    pub(crate) fn heads(&self) -> usize {
        self.shape.kv_heads * self.head_blocks()
    }

    pub(crate) fn head_blocks(&self) -> usize {
        self.shape.gqa_ratio().div_ceil(self.pass)
    }
}

/// A kind with its memory and kernels.
pub(crate) struct Kind {
    pub sizes: Sizes,
    records: Option<CudaSlice<u8>>,
    tiles: Option<CudaSlice<u8>>,
    window: Option<CudaSlice<u8>>,
    sinks: Option<CudaSlice<u8>>,
    /// Tiles of the prompt that is being appended.
    pub scratch: Option<CudaSlice<u8>>,
    /// First tile and number of tiles per head of `scratch` now.
    pub scratch_tiles: (usize, usize),
    pub plan: CudaSlice<u32>,
    pub partials: CudaSlice<f32>,
    /// Partial results of one layer.
    pub partial_slots: usize,
    pub counters: CudaSlice<u32>,
    pub append: Kernels,
    plan_function: CudaFunction,
    /// Attention of prompts: its kernel, how the prompt's rows are cut, the tiles of that on the device, partial results and counters.
    pub prefill: prefill::Kernel,
    pub cut: prefill::Cut,
    pub row_tiles: CudaSlice<prefill::RowTile>,
    pub prefill_partials: CudaSlice<f32>,
    pub prefill_counters: CudaSlice<u32>,
    /// For few rows, and for more rows than multiprocessors.
    pub attend: [Kernel; 2],
    pages: usize,
}

/// The device address of a buffer; 0 for none.
pub(crate) fn address<T>(gpu: &Gpu, slice: &CudaSlice<T>) -> u64 {
    // The guard orders streams among each other; there is one.
    slice.device_ptr(gpu.stream()).0
}

fn address_of<T>(gpu: &Gpu, slice: &Option<CudaSlice<T>>) -> u64 {
    slice.as_ref().map_or(0, |s| address(gpu, s))
}

impl Kind {
    pub(crate) fn new(gpu: &Gpu, sizes: Sizes, options: &GpuOptions, pages: usize) -> Result<Self, Error> {
        let Sizes { record, rule, layers, .. } = sizes;
        let some = |bytes: usize| if bytes > 0 { gpu.zeros::<u8>(bytes).map(Some) } else { Ok(None) };
        let heads_bytes = options.slots * layers * sizes.shape.kv_heads * record.tile_bytes();
        // Attention of the dequantizing arms knows plain tiles only.
        let read = if sizes.fused { record } else { RecordShape::plain(record.head_dim) };
        let kernel = |crowded| Kernel::load(gpu, &read, crowded, options.softcap.is_some(), options.out);
        let attend = [kernel(false)?, kernel(true)?];
        let blocks = attend.iter().map(|k| k.blocks(gpu)).max().unwrap_or(1);
        let units = options.max_tokens.div_ceil(if sizes.fused { record.group_len } else { TILE_LEN })
            + sizes.window_tiles()
            + 2;
        let chunks = options.slots * sizes.heads() * units.div_ceil(INVARIANT_CHUNK as usize);
        let partial_slots = if options.invariant { chunks } else { 2 * blocks };
        let partial = HEADS * record.head_dim + 2 * HEADS;
        debug_assert!(rule.group_len as usize == record.group_len || record.is_plain());
        Ok(Self {
            records: some(pages * sizes.record_page_bytes())?,
            tiles: some(pages * sizes.tile_page_bytes())?,
            window: some(heads_bytes * sizes.window_tiles())?,
            sinks: some(heads_bytes * sizes.sink_tiles())?,
            scratch: None,
            scratch_tiles: (0, 0),
            plan: gpu.zeros(options.slots + 2)?,
            partials: gpu.zeros(partial_slots * partial * layers)?,
            partial_slots,
            // For rows of any number of query heads.
            counters: gpu.zeros(layers * options.slots * sizes.shape.q_heads)?,
            append: Kernels::load(gpu, &record)?,
            plan_function: gpu.function(&plan_program(), "plan_steps")?,
            prefill: prefill::Kernel::load(gpu, &record, options.softcap.is_some(), options.out)?,
            cut: prefill::Cut { tiles: Vec::new(), splits: 1 },
            row_tiles: gpu.zeros(1)?,
            prefill_partials: gpu.zeros(1)?,
            prefill_counters: gpu.zeros(1)?,
            attend,
            pages,
            sizes,
        })
    }

    /// Rings of the window, layer 0's first.
    pub(crate) fn window(&self, gpu: &Gpu, slots: usize) -> Tiles {
        let ring = self.sizes.window_tiles();
        let slot = self.sizes.shape.kv_heads * ring * self.sizes.record.tile_bytes();
        Tiles {
            base: address_of(gpu, &self.window),
            slot_stride: slot as u64,
            layer_stride: (slot * slots) as u64,
            ring: ring.max(1) as u32,
            first: 0,
        }
    }

    pub(crate) fn sinks(&self, gpu: &Gpu, slots: usize) -> Tiles {
        let slot = self.sizes.shape.kv_heads * self.sizes.record.tile_bytes();
        Tiles {
            base: address_of(gpu, &self.sinks),
            slot_stride: slot as u64,
            layer_stride: (slot * slots) as u64,
            ring: 1,
            first: 0,
        }
    }

    pub(crate) fn records(&self, gpu: &Gpu) -> Paged {
        let groups = PAGE_LEN / self.sizes.record.group_len;
        Paged {
            base: address_of(gpu, &self.records),
            layer_stride: (self.pages * self.sizes.record_page_bytes() / self.sizes.layers) as u64,
            log2: groups.trailing_zeros(),
        }
    }

    /// Pages of plain tiles.
    pub(crate) fn tiles(&self, gpu: &Gpu) -> Paged {
        let one = self.sizes.one_layer_of_tiles;
        let stride = if one { 0 } else { self.pages * self.sizes.tile_page_bytes() / self.sizes.layers };
        Paged {
            base: address_of(gpu, &self.tiles),
            layer_stride: stride as u64,
            log2: (PAGE_LEN / TILE_LEN).trailing_zeros(),
        }
    }

    /// The prompt's tiles.
    pub(crate) fn scratch(&self, gpu: &Gpu) -> Tiles {
        let (first, count) = self.scratch_tiles;
        Tiles {
            base: address_of(gpu, &self.scratch),
            slot_stride: 0,
            layer_stride: 0,
            ring: count.max(1) as u32,
            first: first as u32,
        }
    }

    /// Cuts a prompt's rows at positions `first..end`, and makes room for their partial results.
    pub(crate) fn cut_prompt(
        &mut self,
        gpu: &Gpu,
        edge: impl Fn(usize) -> usize,
        (first, end): (usize, usize),
        split: bool,
    ) -> Result<(), Error> {
        let Sizes { shape, record, .. } = self.sizes;
        self.cut = self.prefill.cut(gpu, edge, (first, end), (shape.kv_heads, shape.gqa_ratio()));
        if !split {
            // How many parts keys are cut into depends on how many rows there are.
            self.cut.splits = 1;
        }
        if self.row_tiles.len() < self.cut.tiles.len() {
            self.row_tiles = gpu.zeros(self.cut.tiles.len())?;
        }
        gpu.stream().memcpy_htod(&self.cut.tiles, &mut self.row_tiles)?;
        let (partials, counters) = self.prefill.workspace(&record, &self.cut, shape.kv_heads);
        if self.prefill_partials.len() < partials {
            self.prefill_partials = gpu.zeros(partials)?;
        }
        if self.prefill_counters.len() < counters {
            self.prefill_counters = gpu.zeros(counters)?;
        }
        Ok(())
    }

    /// Makes room for tiles `first..end` of a prompt.
    pub(crate) fn reserve_scratch(&mut self, gpu: &Gpu, first: usize, end: usize) -> Result<(), Error> {
        let bytes = (end - first) * self.sizes.shape.kv_heads * self.sizes.record.tile_bytes();
        if self.scratch.as_ref().is_none_or(|s| s.len() < bytes) {
            // The old one is given back first, so that both are never held.
            self.scratch = None;
            self.scratch = Some(gpu.zeros(bytes)?);
        }
        self.scratch_tiles = (first, end - first);
        Ok(())
    }

    /// See [`super::GpuCache::spread`].
    pub(crate) fn spread(
        &mut self,
        gpu: &Gpu,
        from: usize,
        pages: &[u32],
        slots: usize,
        first_layer: bool,
    ) -> Result<(), Error> {
        let (sizes, all, stream) = (self.sizes, self.pages, gpu.stream());
        let held: Vec<usize> = pages.iter().map(|&p| p as usize).collect();
        // Of `per_layer` units in each layer, unit i is filled from source(i) of the same layer, or of the first one.
        let copy = |buffer: &mut Option<CudaSlice<u8>>,
                    unit: usize,
                    layers: usize,
                    per_layer: usize,
                    source: &dyn Fn(usize) -> usize| {
            let Some(buffer) = buffer.as_mut().filter(|_| unit > 0) else { return Ok(()) };
            for layer in 0..layers {
                for i in 0..per_layer {
                    let start = (if first_layer { 0 } else { layer * per_layer }) + source(i);
                    let to = layer * per_layer + i;
                    if start == to {
                        continue;
                    }
                    let taken = stream.clone_dtod(&buffer.slice(start * unit..(start + 1) * unit))?;
                    stream.memcpy_dtod(&taken, &mut buffer.slice_mut(to * unit..(to + 1) * unit))?;
                }
            }
            Ok::<(), Error>(())
        };
        // Pages of the source stay as they are.
        let of_page = |i: usize| if held.contains(&i) { i } else { held[i % held.len()] };
        let layers_of_tiles = if sizes.one_layer_of_tiles { 1 } else { sizes.layers };
        copy(&mut self.records, sizes.record_page_bytes() / sizes.layers, sizes.layers, all, &of_page)?;
        copy(&mut self.tiles, sizes.tile_page_bytes() / layers_of_tiles, layers_of_tiles, all, &of_page)?;
        let tile = sizes.shape.kv_heads * sizes.record.tile_bytes();
        copy(&mut self.window, sizes.window_tiles() * tile, sizes.layers, slots, &|_| from)?;
        copy(&mut self.sinks, sizes.sink_tiles() * tile, sizes.layers, slots, &|_| from)
    }

    /// Every record, as bytes.
    #[cfg(test)]
    pub(crate) fn record_bytes(&self, gpu: &Gpu) -> Vec<u8> {
        self.records.as_ref().map_or(Vec::new(), |r| gpu.stream().clone_dtoh(r).expect("memory of the card"))
    }

    /// The kernel of a step of so many rows of requests.
    pub(crate) fn attend_for(&self, gpu: &Gpu, batch: usize, chunk: u32) -> &Kernel {
        let crowded = chunk > 0 || batch * self.sizes.heads() > gpu.multiprocessors();
        &self.attend[usize::from(crowded)]
    }

    /// Blocks that they are cut for.
    pub(crate) fn blocks(&self, gpu: &Gpu, batch: usize, chunk: u32) -> usize {
        self.sizes.blocks.unwrap_or_else(|| self.attend_for(gpu, batch, chunk).blocks(gpu))
    }

    /// Counts pieces of work of a step (plan.cu).
    pub(crate) fn launch_plan(
        &self,
        gpu: &Gpu,
        lens: u64,
        first_visible: u64,
        batch: usize,
        chunk: u32,
    ) -> Result<(), Error> {
        let blocks = self.blocks(gpu, batch, chunk) as u32;
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1024, 1, 1), shared_mem_bytes: 0 };
        let (plan, packed) = (address(gpu, &self.plan), u32::from(self.sizes.fused));
        let (batch, heads) = (batch as u32, self.sizes.heads() as u32);
        // SAFETY: the arguments are those that the kernel declares, in order; the plan has an element more than a batch can have.
        unsafe {
            let mut launch = gpu.stream().launch_builder(&self.plan_function);
            launch.arg(&self.sizes.rule).arg(&lens).arg(&first_visible).arg(&plan);
            launch.arg(&batch).arg(&heads).arg(&packed).arg(&chunk).arg(&blocks).launch(config)
        }?;
        Ok(())
    }
}
