//! One sequence in one layer. In: rows and positions; out: blocks that hold them, packed up to `edge` of the newest.
//! How many blocks that are, and when they come and go, says extent.rs.
//! NOT here: several sequences, checks of a call (cache/mod.rs), the formula (quant/), sharing (pages.rs).

use super::extent::{Blocks, Extent};
use super::layout::{BLOCK_LEN, PlainLayout, RecordLayout};
use super::pools::{BlockUse, Pools};
use crate::append::cpu::Variant;
use crate::append::record::dequantize_record;
use crate::append::rows::write_sink;
use crate::device::cpu::{Block, BlockPool};
use crate::element::Element;
use crate::{Error, LayerConfig, LayerShape, PackedScheme, RowCodec, Scheme};
use half::f16;
use std::ops::Range;
use std::sync::Arc;

/// What a layer needs to store tokens.
pub(crate) struct LayerSpec {
    pub shape: LayerShape,
    pub scheme: Scheme,
    /// See [`crate::LayerConfig::visible`].
    pub visible: Option<usize>,
    pub record: Option<RecordLayout>,
    pub plain: PlainLayout,
    pub sinks: PlainLayout,
    /// What fills the dequant-once arm's copy in place of the records ([`crate::Cache::imitate`]).
    pub imitated: Option<Arc<dyn RowCodec>>,
    /// Indices into [`Pools`].
    pub record_pool: usize,
    pub plain_pool: usize,
    pub sink_pool: usize,
}

impl LayerSpec {
    pub(crate) fn new(config: &LayerConfig, pools: &mut Pools) -> Self {
        let LayerConfig { shape, scheme, visible } = *config;
        let record = scheme.packed().map(|p| RecordLayout::new(shape.head_dim, p));
        let plain = PlainLayout::block(&shape, scheme.row_format());
        let sinks = PlainLayout { tokens: scheme.packed().map_or(0, PackedScheme::sinks), ..plain };
        let block = plain.block_bytes(shape.kv_heads);
        let record_bytes = record.as_ref().map_or(block, |r| r.block_bytes(shape.kv_heads));
        let sink_bytes = if sinks.tokens > 0 { sinks.block_bytes(shape.kv_heads) } else { block };
        Self {
            shape,
            scheme,
            visible,
            record,
            plain,
            sinks,
            imitated: None,
            record_pool: pools.index_of(BlockUse::Records, record_bytes),
            plain_pool: pools.index_of(BlockUse::Window, block),
            sink_pool: pools.index_of(BlockUse::Window, sink_bytes),
        }
    }

    /// The pool of the dequant-once arm's f16 copy.
    pub(crate) fn copy_pool(&self, pools: &mut Pools) -> usize {
        pools.index_of(BlockUse::Copy, self.plain.block_bytes(self.shape.kv_heads))
    }
}

/// Most f16 blocks of one group.
const MAX_BLOCKS: usize = crate::scheme::GROUP_LENS[crate::scheme::GROUP_LENS.len() - 1] / BLOCK_LEN;

/// The blocks of one sequence in one layer.
#[derive(Default)]
pub(crate) struct Store {
    pub extent: Extent,
    pub sink_block: Option<Block>,
    /// Records from group `extent.first_group` on.
    pub groups: Vec<Block>,
    /// f16 copy of `groups` (dequant-once arm), 32 tokens each.
    pub copy: Vec<Block>,
    /// Plain rows from `extent.tail_start` on.
    pub tail: Vec<Block>,
}

impl Store {
    /// Appends rows, rounded to the format of the layer's plain rows. Shapes: `k`, `v`: f32 `[rows][kv_heads][head_dim]`, all
    /// finite in it.
    /// On [`Error::OutOfMemory`] and [`Error::OutOfBlocks`] no token has changed: every block is taken before the first byte
    /// is written.
    pub(crate) fn append(
        &mut self,
        spec: &LayerSpec,
        copy_pool: Option<usize>,
        pools: &mut Pools,
        kernel: &Variant,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), Error> {
        let row_len = spec.shape.row_len();
        let mut extent = self.extent;
        let new = extent.append(spec, k.len() / row_len);
        let (len, new_len) = (self.extent.len, extent.len);
        let group_len = spec.group_len();

        // Blocks that others own too are written by nobody: this sequence goes on in copies of its own.
        if len < spec.sinks.tokens
            && let Some(block) = &mut self.sink_block
        {
            pools.make_own(spec.sink_pool, block)?;
        }
        let into = self.tail.get_mut((len - self.extent.tail_start) / BLOCK_LEN);
        if let Some(block) = into.filter(|_| !len.is_multiple_of(BLOCK_LEN)) {
            pools.make_own(spec.plain_pool, block)?;
        }
        let new_copy = copy_pool.map_or(0, |_| new.groups * (group_len / BLOCK_LEN));
        let wanted = [
            (spec.plain_pool, new.tail),
            (spec.record_pool, new.groups),
            (copy_pool.unwrap_or(0), new_copy),
            (spec.sink_pool, new.sinks),
        ];
        let wanted = wanted.into_iter().flat_map(|(pool, n)| std::iter::repeat_n(pool, n));
        let mut taken = pools.alloc_all(wanted)?.into_iter();
        self.tail.extend(taken.by_ref().take(new.tail));
        let records: Vec<_> = taken.by_ref().take(new.groups).collect();
        self.copy.extend(taken.by_ref().take(new_copy));
        if new.sinks > 0 {
            self.sink_block = taken.next();
        }

        for (i, (k, v)) in k.chunks_exact(row_len).zip(v.chunks_exact(row_len)).enumerate() {
            let position = len + i;
            if position >= spec.sinks.tokens {
                break;
            }
            let block = self.sink_block.as_ref().expect("taken with the first row");
            write_sink(&spec.sinks, pools.get_mut(spec.sink_pool).bytes_mut(block), position, k, v);
        }
        // Block by block, and a group as soon as its last block is written: its rows are still in the nearest cache.
        let mut records = records.into_iter();
        let mut position = len;
        while position < new_len {
            let (block, slot) = self.tail_slot(position);
            let rows = (BLOCK_LEN - slot).min(new_len - position);
            let part = (position - len) * row_len..(position - len + rows) * row_len;
            let bytes = pools.get_mut(spec.plain_pool).bytes_mut(block);
            (kernel.write_rows)(&spec.plain, bytes, slot, row_len, &k[part.clone()], &v[part]);
            position += rows;
            while records.len() > 0 && (self.extent.groups + 1) * group_len <= position {
                self.pack_group(spec, pools, kernel, records.next().expect("just counted"));
                if let Some(copy_pool) = copy_pool {
                    self.copy_group(spec, copy_pool, pools);
                }
            }
        }
        self.extent = extent;
        Ok(())
    }

    /// The tail block and the slot in it of a position.
    fn tail_slot(&self, position: usize) -> (&Block, usize) {
        let at = position - self.extent.tail_start;
        (&self.tail[at / BLOCK_LEN], at % BLOCK_LEN)
    }

    /// Packs the next group into `block`.
    fn pack_group(&mut self, spec: &LayerSpec, pools: &mut Pools, kernel: &Variant, block: Block) {
        let layout = spec.record.as_ref().expect("only packed schemes have groups");
        let start = self.extent.groups * layout.group_len;
        let sinks = spec.sinks.tokens.saturating_sub(start);
        let first = (start - self.extent.tail_start) / BLOCK_LEN;
        let (records, rows) = pools.records_and_rows(spec);
        let n = layout.group_len / BLOCK_LEN;
        let mut blocks: [(&[f16], &[f16]); MAX_BLOCKS] = Default::default();
        for (head, record) in records.bytes_mut(&block).chunks_exact_mut(layout.record_bytes).enumerate() {
            for (out, block) in blocks.iter_mut().zip(&self.tail[first..first + n]) {
                *out = spec.plain.head(rows.bytes(block), head);
            }
            (kernel.write_record)(layout, head, &blocks[..n], sinks, record);
        }
        self.groups.push(block);
        self.extent.groups += 1;
    }

    /// Fills the f16 copy of the newest group.
    fn copy_group(&mut self, spec: &LayerSpec, copy_pool: usize, pools: &mut Pools) {
        let layout = spec.record.as_ref().expect("only packed schemes have groups");
        let per_group = layout.group_len / BLOCK_LEN;
        let newest = self.groups.len() - 1;
        let start = (self.extent.groups - 1) * layout.group_len;
        let mut rows = vec![f16::ZERO; 2 * layout.group_len * layout.head_dim];
        let (k, v) = rows.split_at_mut(layout.group_len * layout.head_dim);
        let n = BLOCK_LEN * layout.head_dim;
        for head in 0..spec.shape.kv_heads {
            let records = pools.get(spec.record_pool).bytes(&self.groups[newest]);
            let record = layout.head(records, head);
            let mut blocks: Vec<_> = k.chunks_exact_mut(n).zip(v.chunks_exact_mut(n)).collect();
            match &spec.imitated {
                None => dequantize_record(layout, head, record, &mut blocks),
                Some(codec) => {
                    let first = (start - self.extent.tail_start) / BLOCK_LEN;
                    let rows = pools.get(spec.plain_pool);
                    let plain = self.tail[first..first + per_group].iter();
                    let plain: Vec<_> = plain.map(|block| spec.plain.head(rows.bytes(block), head)).collect();
                    imitate(codec.as_ref(), layout.head_dim, &plain, &mut blocks);
                }
            }
            for (i, (k, v)) in blocks.iter().enumerate() {
                let out = pools.get_mut(copy_pool).bytes_mut(&self.copy[newest * per_group + i]);
                let (k_out, v_out) = spec.plain.head_mut(out, head);
                k_out.copy_from_slice(k);
                v_out.copy_from_slice(v);
            }
        }
    }

    /// Bytes that [`Store::append`] takes for copies of blocks that others own too.
    pub(crate) fn bytes_to_own(&self, spec: &LayerSpec, pools: &Pools) -> usize {
        let Extent { len, tail_start, .. } = self.extent;
        let shared = |pool: usize, block: Option<&Block>| {
            let pool = pools.get(pool);
            block.filter(|b| pool.is_shared(b)).map_or(0, |_| pool.block_bytes())
        };
        let into = self.tail.get((len - tail_start) / BLOCK_LEN).filter(|_| !len.is_multiple_of(BLOCK_LEN));
        let sinks = self.sink_block.as_ref().filter(|_| len < spec.sinks.tokens);
        shared(spec.plain_pool, into) + shared(spec.sink_pool, sinks)
    }

    /// Bytes of the blocks that a commit after so many more rows gives back: those that others own too stay.
    pub(crate) fn bytes_given_back(&self, spec: &LayerSpec, pools: &Pools, gone: Blocks, copies: bool) -> usize {
        let shared = |pool: usize, blocks: &[Block], gone: usize| {
            let pool = pools.get(pool);
            blocks.iter().take(gone).filter(|b| pool.is_shared(b)).count()
        };
        let tail = shared(spec.plain_pool, &self.tail, gone.tail);
        let groups = shared(spec.record_pool, &self.groups, gone.groups);
        gone.bytes(spec, copies) - Blocks { tail, groups, sinks: 0 }.bytes(spec, false)
    }

    /// Keeps every row for good and frees what no later query sees.
    pub(crate) fn commit(&mut self, spec: &LayerSpec, copy_pool: Option<usize>, pools: &mut Pools) {
        let gone = self.extent.commit(spec);
        if gone.tail > 0 {
            // The rows that stay move to the oldest blocks: after a long prompt the newest ones would each keep a chunk
            // of free blocks from going back to the operating system. Blocks that others own too stay as they are.
            let pool = pools.get_mut(spec.plain_pool);
            let mut stay = self.tail.split_off(gone.tail);
            for (old, young) in self.tail.iter_mut().zip(&mut stay) {
                if !pool.is_shared(old) && !pool.is_shared(young) {
                    pool.copy(young, old);
                    std::mem::swap(young, old);
                }
            }
            self.tail.drain(..).for_each(|b| pool.free(b));
            self.tail = stay.into_iter().map(|b| pool.settle(b)).collect();
        }
        self.groups.drain(..gone.groups).for_each(|b| pools.get_mut(spec.record_pool).free(b));
        if let Some(pool) = copy_pool {
            let blocks = gone.groups * (spec.group_len() / BLOCK_LEN);
            self.copy.drain(..blocks).for_each(|b| pools.get_mut(pool).free(b));
        }
    }

    /// Whether [`Store::trim`] to `len` tokens would find what its newest token needs.
    pub(crate) fn check_trim(&self, spec: &LayerSpec, len: usize) -> Result<(), Error> {
        let Extent { len: held, committed, tail_start, .. } = self.extent;
        if len > held {
            return Err(Error::Shape { what: "tokens to trim to (at most those held)", expected: held, got: len });
        }
        if len < committed && !self.extent.serves(spec, len.saturating_sub(1)) {
            return Err(Error::TrimPacked { to: len, len: held, packed: tail_start });
        }
        Ok(())
    }

    /// Drops the tokens from `len` on. Call [`Store::check_trim`] first.
    pub(crate) fn trim(&mut self, spec: &LayerSpec, copy_pool: Option<usize>, pools: &mut Pools, len: usize) {
        if len == self.extent.len {
            return;
        }
        self.extent.trim(spec, len);
        let Extent { first_group, groups, tail, sinks, .. } = self.extent;
        let groups = groups - first_group;
        self.groups.drain(groups..).for_each(|b| pools.get_mut(spec.record_pool).free(b));
        if let Some(pool) = copy_pool {
            let blocks = if groups > 0 { groups * (spec.group_len() / BLOCK_LEN) } else { 0 };
            self.copy.drain(blocks..).for_each(|b| pools.get_mut(pool).free(b));
        }
        self.tail.drain(tail..).for_each(|b| pools.get_mut(spec.plain_pool).free(b));
        if let Some(b) = self.sink_block.take_if(|_| !sinks) {
            pools.get_mut(spec.sink_pool).free(b);
        }
    }

    /// Packs every whole group, when the next query sees all of them packed ([`Extent::seal`]).
    ///
    /// # Errors
    /// As [`Pools::alloc`]; then nothing has changed.
    pub(crate) fn seal(&mut self, spec: &LayerSpec, pools: &mut Pools, kernel: &Variant) -> Result<(), Error> {
        let new = { self.extent }.seal(spec);
        let records = pools.alloc_all(std::iter::repeat_n(spec.record_pool, new))?;
        records.into_iter().for_each(|block| self.pack_group(spec, pools, kernel, block));
        Ok(())
    }

    /// Frees everything.
    pub(crate) fn clear(&mut self, spec: &LayerSpec, copy_pool: Option<usize>, pools: &mut Pools) {
        self.groups.drain(..).for_each(|b| pools.get_mut(spec.record_pool).free(b));
        self.tail.drain(..).for_each(|b| pools.get_mut(spec.plain_pool).free(b));
        if let Some(pool) = copy_pool {
            self.copy.drain(..).for_each(|b| pools.get_mut(pool).free(b));
        }
        if let Some(b) = self.sink_block.take() {
            pools.get_mut(spec.sink_pool).free(b);
        }
        *self = Self::default();
    }

    /// What attention reads.
    pub(crate) fn view<'a>(&'a self, spec: &'a LayerSpec, copy_pool: Option<usize>, pools: &'a Pools) -> SeqView<'a> {
        SeqView {
            spec,
            len: self.extent.len,
            extent: self.extent,
            records: pools.get(spec.record_pool),
            groups: &self.groups,
            plain_blocks: pools.get(spec.plain_pool),
            tail: &self.tail,
            sinks: self.sink_block.as_ref().map(|b| pools.get(spec.sink_pool).bytes(b)),
            copy: copy_pool.map(|p| (pools.get(p), &self.copy[..])),
        }
    }
}

/// Fills blocks with what a codec gives back for the rows of plain ones. Shapes: pairs of K `[D][32]` and V `[32][D]`.
fn imitate(codec: &dyn RowCodec, d: usize, plain: &[(&[f16], &[f16])], out: &mut [(&mut [f16], &mut [f16])]) {
    let of = |token: usize, channel: usize| channel * BLOCK_LEN + token;
    let mut rows = [vec![0.0f32; plain.len() * BLOCK_LEN * d], vec![0.0f32; plain.len() * BLOCK_LEN * d]];
    for (b, (k, v)) in plain.iter().enumerate() {
        for token in 0..BLOCK_LEN {
            let at = (b * BLOCK_LEN + token) * d;
            for channel in 0..d {
                rows[0][at + channel] = k[of(token, channel)].to_f32();
                rows[1][at + channel] = v[token * d + channel].to_f32();
            }
        }
    }
    let [k_rows, v_rows] = &mut rows;
    codec.round_trip(d, k_rows, v_rows);
    for (b, (k, v)) in out.iter_mut().enumerate() {
        for token in 0..BLOCK_LEN {
            let at = (b * BLOCK_LEN + token) * d;
            for channel in 0..d {
                k[of(token, channel)] = f16::from_f32(k_rows[at + channel]);
                v[token * d + channel] = f16::from_f32(v_rows[at + channel]);
            }
        }
    }
}

/// One sequence in one layer, read only.
#[derive(Clone, Copy)]
pub(crate) struct SeqView<'a> {
    pub spec: &'a LayerSpec,
    pub len: usize,
    extent: Extent,
    records: &'a BlockPool,
    groups: &'a [Block],
    plain_blocks: &'a BlockPool,
    tail: &'a [Block],
    sinks: Option<&'a [u8]>,
    copy: Option<(&'a BlockPool, &'a [Block])>,
}

impl<'a> SeqView<'a> {
    /// The record of one head and group.
    pub(crate) fn record(&self, head: usize, group: usize) -> &'a [u8] {
        let layout = self.spec.record.as_ref().expect("only packed schemes have groups");
        layout.head(self.records.bytes(&self.groups[group - self.extent.first_group]), head)
    }

    /// Whether everything is held that the newest `rows` tokens see: commit frees plain rows that only older ones saw.
    pub(crate) fn holds_all_of(&self, rows: usize) -> bool {
        self.extent.serves(self.spec, self.len - rows)
    }

    /// Groups whose records are held.
    pub(crate) fn groups(&self) -> Range<usize> {
        self.extent.first_group..self.extent.groups
    }

    /// K `[D][32]` and V `[32][D]` of one head for the 32 tokens from `position` (a multiple of 32, >= tail_start). E is of
    /// the scheme's format.
    pub(crate) fn block<E: Element>(&self, head: usize, position: usize) -> (&'a [E], &'a [E]) {
        let block = &self.tail[(position - self.extent.tail_start) / BLOCK_LEN];
        self.spec.plain.head(self.plain_blocks.bytes(block), head)
    }

    /// The same from the dequant-once arm's copy, for packed positions.
    pub(crate) fn copy_block(&self, head: usize, position: usize) -> Option<(&'a [f16], &'a [f16])> {
        let (pool, blocks) = self.copy?;
        let first = self.extent.first_group.saturating_mul(self.spec.group_len());
        Some(self.spec.plain.head(pool.bytes(&blocks[(position - first) / BLOCK_LEN]), head))
    }

    /// K and V `[sinks][D]` of one head, when the scheme has sinks.
    pub(crate) fn sinks(&self, head: usize) -> Option<(&'a [f16], &'a [f16])> {
        self.sinks.map(|bytes| self.spec.sinks.head(bytes, head))
    }
}
