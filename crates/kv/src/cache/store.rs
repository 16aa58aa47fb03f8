//! One sequence in one layer. In: rows and positions; out: blocks that hold them, packed up to `edge` of the newest.
//! Invariants: `groups` covers `[0, packed_len(len))`; `tail` covers `[tail_start, len)` with
//! `tail_start = packed_len(committed)`, so that every row since the last commit finds the plain keys it sees.
//! NOT here: several sequences, checks of a call (cache/mod.rs), the formula (quant/).

use super::layout::{BLOCK_LEN, PlainLayout, RecordLayout};
use crate::append::cpu::Variant;
use crate::append::record::dequantize_record;
use crate::append::rows::write_sink;
use crate::device::cpu::{Block, BlockPool};
use crate::element::Element;
use crate::{Error, LayerShape, PackedScheme, RowCodec, Scheme};
use half::f16;
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
    record_pool: usize,
    plain_pool: usize,
    sink_pool: usize,
}

/// One pool per block size and use.
#[derive(Default)]
pub(crate) struct Pools {
    pools: Vec<(BlockUse, BlockPool)>,
}

/// What blocks are used for: each use is counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockUse {
    Records,
    Window,
    Copy,
}

impl Pools {
    fn index_of(&mut self, block_use: BlockUse, block_bytes: usize) -> usize {
        let found = self.pools.iter().position(|(u, p)| *u == block_use && p.block_bytes() == block_bytes);
        found.unwrap_or_else(|| {
            self.pools.push((block_use, BlockPool::new(block_bytes)));
            self.pools.len() - 1
        })
    }

    pub(crate) fn in_use_bytes(&self, block_use: BlockUse) -> usize {
        self.pools.iter().filter(|(u, _)| *u == block_use).map(|(_, p)| p.in_use_bytes()).sum()
    }

    pub(crate) fn get(&self, index: usize) -> &BlockPool {
        &self.pools[index].1
    }

    fn get_mut(&mut self, index: usize) -> &mut BlockPool {
        &mut self.pools[index].1
    }

    /// Records to write and the rows to read for them: pools of different uses, so of different indices.
    fn records_and_rows(&mut self, spec: &LayerSpec) -> (&mut BlockPool, &BlockPool) {
        let [records, rows] = self.pools.get_disjoint_mut([spec.record_pool, spec.plain_pool]).expect("two pools");
        (&mut records.1, &rows.1)
    }
}

impl LayerSpec {
    pub(crate) fn new(shape: LayerShape, scheme: Scheme, visible: Option<usize>, pools: &mut Pools) -> Self {
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
    pub len: usize,
    pub committed: usize,
    sink_block: Option<Block>,
    groups: Vec<Block>,
    /// f16 copy of `groups` (dequant-once arm), 32 tokens each.
    copy: Vec<Block>,
    tail: Vec<Block>,
    tail_start: usize,
}

impl Store {
    /// Appends rows, rounded to the format of the layer's plain rows. Shapes: `k`, `v`: f32 `[rows][kv_heads][head_dim]`, all
    /// finite in it.
    /// On [`Error::OutOfMemory`] nothing has changed: every block is taken before the first byte is written.
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
        let new_len = self.len + k.len() / row_len;
        let group_len = spec.scheme.packed().map_or(usize::MAX, PackedScheme::group_len);
        let new_groups = spec.scheme.packed_len(new_len) / group_len - self.groups.len();
        let new_tail = (new_len - self.tail_start).div_ceil(BLOCK_LEN) - self.tail.len();
        let new_copy = copy_pool.map_or(0, |_| new_groups * (group_len / BLOCK_LEN));
        let need_sinks = self.sink_block.is_none() && spec.sinks.tokens > 0;

        let mut taken = Vec::new();
        let wanted = [
            (spec.plain_pool, new_tail),
            (spec.record_pool, new_groups),
            (copy_pool.unwrap_or(0), new_copy),
            (spec.sink_pool, usize::from(need_sinks)),
        ];
        for pool in wanted.into_iter().flat_map(|(pool, n)| std::iter::repeat_n(pool, n)) {
            match pools.get_mut(pool).alloc() {
                Ok(block) => taken.push((pool, block)),
                Err(e) => {
                    taken.into_iter().for_each(|(pool, block)| pools.get_mut(pool).free(block));
                    return Err(e);
                }
            }
        }
        let mut taken = taken.into_iter().map(|(_, block)| block);
        self.tail.extend(taken.by_ref().take(new_tail));
        let records: Vec<_> = taken.by_ref().take(new_groups).collect();
        self.copy.extend(taken.by_ref().take(new_copy));
        if need_sinks {
            self.sink_block = taken.next();
        }

        for (i, (k, v)) in k.chunks_exact(row_len).zip(v.chunks_exact(row_len)).enumerate() {
            let position = self.len + i;
            if position >= spec.sinks.tokens {
                break;
            }
            let block = self.sink_block.as_ref().expect("taken with the first row");
            write_sink(&spec.sinks, pools.get_mut(spec.sink_pool).bytes_mut(block), position, k, v);
        }
        // Block by block, and a group as soon as its last block is written: its rows are still in the nearest cache.
        let mut records = records.into_iter();
        let mut position = self.len;
        while position < new_len {
            let (block, slot) = self.tail_slot(position);
            let rows = (BLOCK_LEN - slot).min(new_len - position);
            let part = (position - self.len) * row_len..(position - self.len + rows) * row_len;
            let bytes = pools.get_mut(spec.plain_pool).bytes_mut(block);
            (kernel.write_rows)(&spec.plain, bytes, slot, row_len, &k[part.clone()], &v[part]);
            position += rows;
            while records.len() > 0 && (self.groups.len() + 1) * group_len <= position {
                self.pack_group(spec, pools, kernel, records.next().expect("just counted"));
                if let Some(copy_pool) = copy_pool {
                    self.copy_group(spec, copy_pool, pools);
                }
            }
        }
        self.len = new_len;
        Ok(())
    }

    /// The tail block and the slot in it of a position.
    fn tail_slot(&self, position: usize) -> (&Block, usize) {
        let at = position - self.tail_start;
        (&self.tail[at / BLOCK_LEN], at % BLOCK_LEN)
    }

    /// Packs the next group into `block`.
    fn pack_group(&mut self, spec: &LayerSpec, pools: &mut Pools, kernel: &Variant, block: Block) {
        let layout = spec.record.as_ref().expect("only packed schemes have groups");
        let start = self.groups.len() * layout.group_len;
        let sinks = spec.sinks.tokens.saturating_sub(start);
        let first = (start - self.tail_start) / BLOCK_LEN;
        let (records, rows) = pools.records_and_rows(spec);
        let n = layout.group_len / BLOCK_LEN;
        let mut blocks: [(&[f16], &[f16]); MAX_BLOCKS] = Default::default();
        for (head, record) in records.bytes_mut(&block).chunks_exact_mut(layout.record_bytes).enumerate() {
            for (out, block) in blocks.iter_mut().zip(&self.tail[first..first + n]) {
                *out = spec.plain.head(rows.bytes(block), head);
            }
            (kernel.write_record)(layout, &blocks[..n], sinks, record);
        }
        self.groups.push(block);
    }

    /// Fills the f16 copy of the newest group.
    fn copy_group(&mut self, spec: &LayerSpec, copy_pool: usize, pools: &mut Pools) {
        let layout = spec.record.as_ref().expect("only packed schemes have groups");
        let per_group = layout.group_len / BLOCK_LEN;
        let newest = self.groups.len() - 1;
        let mut rows = vec![f16::ZERO; 2 * layout.group_len * layout.head_dim];
        let (k, v) = rows.split_at_mut(layout.group_len * layout.head_dim);
        let n = BLOCK_LEN * layout.head_dim;
        for head in 0..spec.shape.kv_heads {
            let records = pools.get(spec.record_pool).bytes(&self.groups[newest]);
            let record = layout.head(records, head);
            let mut blocks: Vec<_> = k.chunks_exact_mut(n).zip(v.chunks_exact_mut(n)).collect();
            match &spec.imitated {
                None => dequantize_record(layout, record, &mut blocks),
                Some(codec) => {
                    let first = (newest * layout.group_len - self.tail_start) / BLOCK_LEN;
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

    /// Keeps every row for good and frees the f16 rows that no later query sees.
    pub(crate) fn commit(&mut self, spec: &LayerSpec, pools: &mut Pools) {
        self.committed = self.len;
        let start = spec.scheme.packed_len(self.len);
        let gone = (start - self.tail_start) / BLOCK_LEN;
        self.tail_start = start;
        if gone > 0 {
            // The rows that stay move to the oldest blocks: after a long prompt the newest ones would each keep a chunk
            // of free blocks from going back to the operating system.
            let pool = pools.get_mut(spec.plain_pool);
            let mut stay = self.tail.split_off(gone);
            for (old, young) in self.tail.iter_mut().zip(&mut stay) {
                pool.copy(young, old);
                std::mem::swap(young, old);
            }
            self.tail.drain(..).for_each(|b| pool.free(b));
            self.tail = stay.into_iter().map(|b| pool.settle(b)).collect();
        }
    }

    /// Whether [`Store::trim`] to `len` tokens would find the f16 rows it needs.
    pub(crate) fn check_trim(&self, spec: &LayerSpec, len: usize) -> Result<(), Error> {
        if len > self.len {
            return Err(Error::Shape { what: "tokens to trim to (at most those held)", expected: self.len, got: len });
        }
        if spec.scheme.packed_len(len) < self.tail_start {
            return Err(Error::TrimPacked { to: len, len: self.len, packed: self.tail_start });
        }
        Ok(())
    }

    /// Drops the tokens from `len` on. Call [`Store::check_trim`] first.
    pub(crate) fn trim(&mut self, spec: &LayerSpec, copy_pool: Option<usize>, pools: &mut Pools, len: usize) {
        let group_len = spec.scheme.packed().map_or(usize::MAX, PackedScheme::group_len);
        let groups = spec.scheme.packed_len(len) / group_len;
        self.groups.drain(groups..).for_each(|b| pools.get_mut(spec.record_pool).free(b));
        if let Some(pool) = copy_pool {
            self.copy.drain(groups * (group_len / BLOCK_LEN)..).for_each(|b| pools.get_mut(pool).free(b));
        }
        let tail = len.saturating_sub(self.tail_start).div_ceil(BLOCK_LEN);
        self.tail.drain(tail..).for_each(|b| pools.get_mut(spec.plain_pool).free(b));
        if len == 0
            && let Some(b) = self.sink_block.take()
        {
            pools.get_mut(spec.sink_pool).free(b);
        }
        self.len = len;
        self.committed = self.committed.min(len);
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
            len: self.len,
            records: pools.get(spec.record_pool),
            groups: &self.groups,
            plain_blocks: pools.get(spec.plain_pool),
            tail: &self.tail,
            tail_start: self.tail_start,
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
    records: &'a BlockPool,
    groups: &'a [Block],
    plain_blocks: &'a BlockPool,
    tail: &'a [Block],
    tail_start: usize,
    sinks: Option<&'a [u8]>,
    copy: Option<(&'a BlockPool, &'a [Block])>,
}

impl<'a> SeqView<'a> {
    /// The record of one head and group.
    pub(crate) fn record(&self, head: usize, group: usize) -> &'a [u8] {
        let layout = self.spec.record.as_ref().expect("only packed schemes have groups");
        layout.head(self.records.bytes(&self.groups[group]), head)
    }

    /// Whether everything is held that the newest `rows` tokens see: commit frees plain rows that only older ones saw.
    pub(crate) fn holds_all_of(&self, rows: usize) -> bool {
        self.spec.scheme.edge(self.len - rows) >= self.tail_start
    }

    /// Records held.
    pub(crate) fn groups(&self) -> usize {
        self.groups.len()
    }

    /// K `[D][32]` and V `[32][D]` of one head for the 32 tokens from `position` (a multiple of 32, >= tail_start). E is of
    /// the scheme's format.
    pub(crate) fn block<E: Element>(&self, head: usize, position: usize) -> (&'a [E], &'a [E]) {
        let block = &self.tail[(position - self.tail_start) / BLOCK_LEN];
        self.spec.plain.head(self.plain_blocks.bytes(block), head)
    }

    /// The same from the dequant-once arm's copy, for packed positions.
    pub(crate) fn copy_block(&self, head: usize, position: usize) -> Option<(&'a [f16], &'a [f16])> {
        let (pool, blocks) = self.copy?;
        Some(self.spec.plain.head(pool.bytes(&blocks[position / BLOCK_LEN]), head))
    }

    /// K and V `[sinks][D]` of one head, when the scheme has sinks.
    pub(crate) fn sinks(&self, head: usize) -> Option<(&'a [f16], &'a [f16])> {
        self.sinks.map(|bytes| self.spec.sinks.head(bytes, head))
    }
}
