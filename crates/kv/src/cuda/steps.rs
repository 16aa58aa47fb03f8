//! Decode steps and prompts on the GPU's cache, launch by launch. In: f16 rows on the device; out: attention's results there.
//! A decode step: `begin_decode` (host), then launches that a graph may hold: `pack_due`, and for each layer `append_decode` and
//! `attend`; `end_decode` (host). A prompt: `begin_prefill`, for each layer `append_prefill` and attention, `end_prefill`.
//! NOT here: memory (cache.rs, kind.rs), kernels.

use super::cache::{GpuCache, INVARIANT_CHUNK, Now, PAGE_LEN};
use super::kind::{Kind, address};
use crate::append::cuda::{MoveParams, PackParams, RowsParams, Tiles};
use crate::attend::cuda::{Params, prefill};
use crate::cache::cuda::layout::TILE_LEN;
use crate::{Arm, Error, RowFormat};
use cudarc::driver::{CudaSlice, CudaView, DevicePtrMut};
use half::f16;

/// The first value of a key or value that f16 cannot hold, as kernels found it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// `"K"` or `"V"`.
    pub tensor: &'static str,
    /// Layer of the cache.
    pub layer: usize,
    /// kv head.
    pub head: usize,
    /// Position of its token.
    pub position: usize,
    /// Whose token.
    pub slot: usize,
    /// The value as f16: infinite or NaN.
    pub value: f32,
}

impl Fault {
    /// Numbers of a fault on the device.
    pub const WORDS: usize = 7;

    /// From what kernels wrote; None when all was well.
    pub fn read(words: &[u32]) -> Option<Self> {
        let &[1, tensor, layer, head, position, slot, bits] = words else { return None };
        Some(Self {
            tensor: if tensor == 0 { "K" } else { "V" },
            layer: layer as usize,
            head: head as usize,
            position: position as usize,
            slot: slot as usize,
            value: f16::from_bits(bits as u16).to_f32(),
        })
    }
}

impl From<Fault> for Error {
    fn from(f: Fault) -> Self {
        let Fault { tensor, layer, head, position: token, value, .. } = f;
        Error::NotFinite { tensor, format: RowFormat::F16, layer, head, token, value, seq: None }
    }
}

impl GpuCache {
    /// Begins a step in which each of these slots gets one token. `bucket`: rows that launches are for; those beyond the batch
    /// belong to nobody. Lengths go to the device now.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`], [`Error::DuplicateSequence`]; [`Error::Shape`] for a full sequence or a bucket that does not hold
    /// the batch.
    pub fn begin_decode(&mut self, batch: &[usize], bucket: usize) -> Result<(), Error> {
        if batch.is_empty() || batch.len() > bucket || bucket > self.options.slots {
            let what = "sequences of a step (1 or more, at most those of its bucket and of the cache)";
            return Err(Error::Shape { what, expected: bucket.min(self.options.slots), got: batch.len() });
        }
        let mut rows = vec![[0u32, 0, u32::MAX]; bucket];
        for (i, &slot) in batch.iter().enumerate() {
            if batch[..i].contains(&slot) {
                return Err(Error::DuplicateSequence { id: slot });
            }
            let sequence = self.sequence(slot)?;
            let most = sequence.pages.len() * PAGE_LEN;
            if sequence.len >= most {
                return Err(Error::Shape {
                    what: "tokens of a sequence, at most those of its pages",
                    expected: most,
                    got: most + 1,
                });
            }
            rows[i] = [sequence.len as u32 + 1, slot as u32, sequence.len as u32];
        }
        let stream = self.gpu.stream();
        for (i, buffer) in [&mut self.lens, &mut self.slot_of, &mut self.positions].into_iter().enumerate() {
            let column: Vec<u32> = rows.iter().map(|row| row[i]).collect();
            stream.memcpy_htod(&column, &mut buffer.slice_mut(..bucket))?;
        }
        self.bucket = bucket;
        self.now = Now::Decode { batch: batch.to_vec() };
        Ok(())
    }

    /// Positions of the step's new tokens, `[bucket]`; `u32::MAX` where nobody is.
    pub fn positions(&self) -> CudaView<'_, u32> {
        self.positions.slice(..self.bucket.max(1))
    }

    /// Where kernels report a value that f16 cannot hold: [`Fault::WORDS`] numbers, zeros when all is well.
    pub fn fault_words(&mut self) -> &mut CudaSlice<u32> {
        &mut self.fault
    }

    /// The fault of the work given so far, if there was one: the first, others of the same step are not named, and what is not finite is
    /// stored as 0 wherever it is. It waits for that work, and forgets the fault.
    ///
    /// # Errors
    /// [`Error::Gpu`] for work that failed.
    pub fn take_fault(&mut self) -> Result<Option<Fault>, Error> {
        let words = self.gpu.stream().clone_dtoh(&self.fault)?;
        self.gpu.synchronize()?;
        let fault = Fault::read(&words);
        if fault.is_some() {
            self.gpu.stream().memset_zeros(&mut self.fault)?;
        }
        Ok(fault)
    }

    /// Once a step, before its layers: plans attention's work, and packs the groups that the new tokens are the first to see
    /// packed, of all layers at once. Groups that hold a new token themselves (schemes without a window) are packed by
    /// [`GpuCache::append_decode`].
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub fn pack_due(&self) -> Result<(), Error> {
        for kind in &self.kinds {
            kind.launch_plan(&self.gpu, address(&self.gpu, &self.lens), 0, self.bucket, self.chunk())?;
            if kind.sizes.packs() && kind.sizes.rule.window_len > 0 {
                let params = self.pack_params(kind, 0, kind.window(&self.gpu, self.options.slots), true);
                kind.append.pack(&self.gpu, &params, self.bucket, kind.sizes.layers)?;
            }
        }
        Ok(())
    }

    fn chunk(&self) -> u32 {
        if self.options.invariant { INVARIANT_CHUNK } else { 0 }
    }

    fn pack_params(&self, kind: &Kind, index: usize, tiles: Tiles, decode: bool) -> PackParams {
        let gpu = &self.gpu;
        // The dequant-once arm copies groups as they are packed.
        let copies = if self.arm == Arm::DequantOnce { kind.tiles(gpu) } else { Default::default() };
        PackParams {
            rule: kind.sizes.rule,
            lens: if decode { address(gpu, &self.lens) } else { 0 },
            slots: address(gpu, &self.slot_of),
            table: address(gpu, &self.table),
            table_len: self.table_len as u32,
            kv_heads: kind.sizes.shape.kv_heads as u32,
            layer: index as u32,
            first_group: 0,
            slot: 0,
            tiles,
            records: kind.records(gpu),
            copies,
            first_layer: index as u32,
        }
    }

    fn rows_params(&self, kind: &Kind, layer: usize, index: usize, (k, v): (u64, u64)) -> RowsParams {
        let (gpu, slots) = (&self.gpu, self.options.slots);
        RowsParams {
            k,
            v,
            lens: address(gpu, &self.lens),
            slots: address(gpu, &self.slot_of),
            table: address(gpu, &self.table),
            table_len: self.table_len as u32,
            kv_heads: kind.sizes.shape.kv_heads as u32,
            layer: index as u32,
            first: 0,
            slot: 0,
            named: layer as u32,
            sinks: kind.sizes.rule.sinks,
            paged: u32::from(!kind.sizes.packs()),
            tiles: kind.window(gpu, slots),
            sink_tiles: kind.sinks(gpu, slots),
            pages: kind.tiles(gpu),
            fault: address(gpu, &self.fault),
        }
    }

    /// Stores one token's keys and values of each row of the step: f16 `[bucket][kv_heads][head_dim]`.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoSuchLayer`], [`Error::Gpu`].
    pub fn append_decode(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        let (kind, index) = self.kind(layer)?;
        let rows = self.rows_of(kind, self.bucket, k, v)?;
        let params = self.rows_params(kind, layer, index, rows);
        kind.append.write_rows(&self.gpu, &params, self.bucket)?;
        if kind.sizes.packs() && kind.sizes.rule.window_len == 0 {
            let params = self.pack_params(kind, index, kind.window(&self.gpu, self.options.slots), true);
            kind.append.pack(&self.gpu, &params, self.bucket, 1)?;
        }
        Ok(())
    }

    /// Addresses of keys and values of so many rows.
    fn rows_of(&self, kind: &Kind, rows: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(u64, u64), Error> {
        let expected = rows * kind.sizes.shape.row_len();
        for (what, x) in [("length of K", k), ("length of V", v)] {
            if x.len() < expected {
                return Err(Error::Shape { what, expected, got: x.len() });
            }
        }
        Ok((address(&self.gpu, k), address(&self.gpu, v)))
    }

    /// Attends the step's new tokens over everything they see.
    ///
    /// Shapes: `q` f16, `out` as the cache's [`crate::cuda::GpuOptions::out`]: `[bucket][q_heads][head_dim]`; rows of nobody are
    /// not written. `scale`: of scores.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoSuchLayer`], [`Error::Gpu`].
    pub fn attend<T>(&self, layer: usize, q: &CudaSlice<f16>, out: &mut CudaSlice<T>, scale: f32) -> Result<(), Error> {
        let (kind, index) = self.kind(layer)?;
        if self.arm == Arm::DequantStep && kind.sizes.packs() {
            let mut params = self.pack_params(kind, index, kind.window(&self.gpu, self.options.slots), true);
            params.copies = kind.tiles(&self.gpu);
            kind.append.dequantize(&self.gpu, &params, self.bucket)?;
        }
        self.attend_layers(layer, 1, q, out, scale, 0, 0)
    }

    /// The same of `layers` layers of one kind that follow each other, in one launch; q and out have a leading axis of layers.
    /// Bit-identical to a loop of [`GpuCache::attend`]. Device addresses of `sink_logits` f32 `[q_heads]` and `first_visible`
    /// u32 `[bucket]` may be given, 0 for none.
    ///
    /// # Errors
    /// As [`GpuCache::attend`].
    #[doc(hidden)]
    #[expect(clippy::too_many_arguments, reason = "one more than a launch has")]
    pub fn attend_layers<T>(
        &self,
        layer: usize,
        layers: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<T>,
        scale: f32,
        sink_logits: u64,
        first_visible: u64,
    ) -> Result<(), Error> {
        let (kind, index) = self.kind(layer)?;
        let (gpu, sizes, slots) = (&self.gpu, &kind.sizes, self.options.slots);
        if index + layers > sizes.layers || (layers > 1 && sizes.one_layer_of_tiles) {
            let what = "layers of one launch (of one kind, and not dequantized for each)";
            let expected = if sizes.one_layer_of_tiles { 1 } else { sizes.layers - index };
            return Err(Error::Shape { what, expected, got: layers });
        }
        let expected = layers * self.bucket * sizes.shape.q_heads * sizes.shape.head_dim;
        for (what, got) in [("length of q", q.len()), ("length of out", out.len())] {
            if got < expected {
                return Err(Error::Shape { what, expected, got });
            }
        }
        let (records, tiles, window, sinks) =
            (kind.records(gpu), kind.tiles(gpu), kind.window(gpu, slots), kind.sinks(gpu, slots));
        let layer_stride = [records.layer_stride, tiles.layer_stride, window.layer_stride, sinks.layer_stride];
        let bases = [records.base, tiles.base, window.base, sinks.base];
        let log2e = std::f32::consts::LOG2_E;
        let params = Params {
            layer: std::array::from_fn(|i| bases[i] + index as u64 * layer_stride[i]),
            layer_stride,
            q: address(gpu, q),
            out: out.device_ptr_mut(gpu.stream()).0,
            sink_logits,
            lens: address(gpu, &self.lens),
            slots: address(gpu, &self.slot_of),
            first_visible,
            table: address(gpu, &self.table),
            plan: address(gpu, &kind.plan),
            partials: address(gpu, &kind.partials),
            counters: address(gpu, &kind.counters),
            rule: sizes.rule,
            batch: self.bucket as u32,
            kv_heads: sizes.shape.kv_heads as u32,
            ratio: sizes.shape.gqa_ratio() as u32,
            head_blocks: sizes.head_blocks() as u32,
            table_len: self.table_len as u32,
            groups_log2: records.log2,
            tiles_log2: tiles.log2,
            window_tiles: window.ring,
            all_paged: u32::from(!sizes.packs()),
            chunk: self.chunk(),
            scale: scale * log2e,
            softcap: self.options.softcap.unwrap_or(0.0) * log2e,
            partial_stride: kind.partial_slots as u32,
            pass: sizes.pass as u32,
        };
        let blocks = kind.blocks(gpu, self.bucket, self.chunk());
        kind.attend_for(gpu, self.bucket, self.chunk()).launch(gpu, &params, layers, blocks)
    }

    /// Plans anew with the first visible positions of each row (device address, u32 `[bucket]`).
    #[doc(hidden)]
    pub fn plan_from(&self, first_visible: u64) -> Result<(), Error> {
        let lens = address(&self.gpu, &self.lens);
        self.kinds.iter().try_for_each(|k| k.launch_plan(&self.gpu, lens, first_visible, self.bucket, self.chunk()))
    }

    /// Ends the step: every sequence of it has one more token.
    pub fn end_decode(&mut self) {
        if let Now::Decode { batch } = std::mem::replace(&mut self.now, Now::Nothing) {
            for slot in batch {
                if let Some(sequence) = &mut self.sequences[slot] {
                    sequence.len += 1;
                }
            }
        }
    }

    /// Begins the next `rows` tokens of one sequence's prompt.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`]; [`Error::Shape`] for more tokens than the sequence was added for; [`Error::GpuOutOfMemory`].
    pub fn begin_prefill(&mut self, slot: usize, rows: usize) -> Result<(), Error> {
        let (first, most) = (self.sequence(slot)?.len, self.sequence(slot)?.pages.len() * PAGE_LEN);
        let end = first + rows;
        if rows == 0 || end > most {
            return Err(Error::Shape {
                what: "tokens of a sequence, at most those of its pages",
                expected: most,
                got: end,
            });
        }
        for kind in &mut self.kinds {
            let rule = kind.sizes.rule;
            if kind.sizes.packs() {
                kind.reserve_scratch(&self.gpu, rule.edge(first) / TILE_LEN, end.div_ceil(TILE_LEN))?;
            }
            kind.cut_prompt(&self.gpu, |position| rule.edge(position + 1), (first, end), !self.options.invariant)?;
        }
        self.now = Now::Prefill { slot, rows };
        Ok(())
    }

    /// Stores a prompt's keys and values of one layer, f16 `[rows][kv_heads][head_dim]`: packs what its last token sees packed, and
    /// keeps what later ones see plain. The rows and what came before them stay as plain tiles until the next layer's call.
    ///
    /// # Errors
    /// [`Error::Shape`] (also without [`GpuCache::begin_prefill`]), [`Error::NoSuchLayer`], [`Error::Gpu`].
    pub fn append_prefill(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        let Now::Prefill { slot, rows } = self.now else {
            return Err(Error::Shape { what: "prompts that were begun", expected: 1, got: 0 });
        };
        let (kind, index) = self.kind(layer)?;
        let first = self.sequence(slot)?.len;
        let addresses = self.rows_of(kind, rows, k, v)?;
        let (gpu, slots) = (&self.gpu, self.options.slots);
        let mut write = self.rows_params(kind, layer, index, addresses);
        write.lens = 0;
        (write.first, write.slot) = (first as u32, slot as u32);
        let rule = &kind.sizes.rule;
        let (window, scratch) = (kind.window(gpu, slots), kind.scratch(gpu));
        let end = first + rows;
        if kind.sizes.packs() {
            write.tiles = scratch;
            let held = kind.scratch_tiles.0;
            let moved = MoveParams {
                from: window,
                to: scratch,
                kv_heads: kind.sizes.shape.kv_heads as u32,
                layer: index as u32,
                from_slot: slot as u32,
                to_slot: 0,
                first: held as u32,
                count: (first.div_ceil(TILE_LEN) - held) as u32,
            };
            kind.append.move_tiles(gpu, &moved)?;
            kind.append.write_rows(gpu, &write, rows)?;
            let group_len = kind.sizes.record.group_len;
            let groups = rule.edge(first) / group_len..rule.edge(end) / group_len;
            let mut pack = self.pack_params(kind, index, scratch, false);
            (pack.first_group, pack.slot) = (groups.start as u32, slot as u32);
            kind.append.pack(gpu, &pack, groups.len(), 1)?;
            let kept = rule.edge(end) / TILE_LEN;
            let back = MoveParams {
                from: scratch,
                to: window,
                from_slot: 0,
                to_slot: slot as u32,
                first: kept as u32,
                count: (end.div_ceil(TILE_LEN) - kept) as u32,
                ..moved
            };
            kind.append.move_tiles(gpu, &back)
        } else {
            kind.append.write_rows(gpu, &write, rows)
        }
    }

    /// Attends the rows of a prompt's part, which [`GpuCache::append_prefill`] has just stored, over everything they see.
    ///
    /// Shapes: `q` f16, `out` as the cache's options say: `[rows][q_heads][head_dim]`. `scale`: of scores.
    /// Accuracy: relative L2 error 2e-3 against the f64 reference, as decode attention.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::NoSuchLayer`], [`Error::Gpu`].
    pub fn attend_prefill<T>(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<T>,
        scale: f32,
    ) -> Result<(), Error> {
        self.attend_prompt(layer, q, out, scale, 0, 0)
    }

    /// The same with the device address of sink logits (0: none) and the first visible position.
    #[doc(hidden)]
    pub fn attend_prompt<T>(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<T>,
        scale: f32,
        sink_logits: u64,
        first_visible: usize,
    ) -> Result<(), Error> {
        let Now::Prefill { slot, rows } = self.now else {
            return Err(Error::Shape { what: "prompts that were begun", expected: 1, got: 0 });
        };
        let (kind, index) = self.kind(layer)?;
        let begin = self.sequence(slot)?.len;
        if first_visible > begin {
            let what = "first visible position of a prompt's rows, at most the first row's";
            return Err(Error::Shape { what, expected: begin, got: first_visible });
        }
        let (gpu, sizes) = (&self.gpu, &kind.sizes);
        let expected = rows * sizes.shape.q_heads * sizes.shape.head_dim;
        for (what, got) in [("length of q", q.len()), ("length of out", out.len())] {
            if got < expected {
                return Err(Error::Shape { what, expected, got });
            }
        }
        let (records, tiles, sinks) = (kind.records(gpu), kind.tiles(gpu), kind.sinks(gpu, self.options.slots));
        let scratch = kind.scratch(gpu);
        let log2e = std::f32::consts::LOG2_E;
        let params = prefill::Params {
            records: records.base + index as u64 * records.layer_stride,
            pages: tiles.base + index as u64 * tiles.layer_stride,
            scratch: scratch.base,
            sinks: sinks.base + index as u64 * sinks.layer_stride,
            q: address(gpu, q),
            out: out.device_ptr_mut(gpu.stream()).0,
            sink_logits,
            tiles: address(gpu, &kind.row_tiles),
            table: address(gpu, &self.table),
            partials: address(gpu, &kind.prefill_partials),
            counters: address(gpu, &kind.prefill_counters),
            rule: sizes.rule,
            row_tiles: kind.cut.tiles.len() as u32,
            kv_heads: sizes.shape.kv_heads as u32,
            ratio: sizes.shape.gqa_ratio() as u32,
            splits: kind.cut.splits as u32,
            begin: begin as u32,
            first_visible: first_visible as u32,
            slot: slot as u32,
            table_len: self.table_len as u32,
            groups_of_page: 1 << records.log2,
            tiles_of_page: 1 << tiles.log2,
            scratch_first: (kind.scratch_tiles.0 * TILE_LEN) as u32,
            scratch_tiles: scratch.ring,
            scale: scale * log2e,
            softcap: self.options.softcap.unwrap_or(0.0) * log2e,
        };
        kind.prefill.launch(gpu, &params)
    }

    /// Ends a prompt's part: the sequence has its tokens.
    pub fn end_prefill(&mut self) {
        if let Now::Prefill { slot, rows, .. } = std::mem::replace(&mut self.now, Now::Nothing)
            && let Some(sequence) = &mut self.sequences[slot]
        {
            sequence.len += rows;
        }
    }

    fn kind(&self, layer: usize) -> Result<(&Kind, usize), Error> {
        let none = Error::NoSuchLayer { layer, layers: self.layers.len() };
        self.place.get(layer).map(|&(kind, index)| (&self.kinds[kind], index)).ok_or(none)
    }
}
