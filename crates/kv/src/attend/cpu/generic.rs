//! The attention loop over one range of keys, written once. In: a [`Task`] (query vectors, keys by position);
//! out: one partial softmax state per query vector.
//!
//! Algebra: the key scale is folded into q once per group (`q' = q*scale`, plus one dot `q.zero`), the value scale into
//! the softmax weights (`w' = p*scale`, plus `p.zero`), so that the inner loops see raw codes: one panel operation
//! serves keys and values. A range is one softmax block: all its scores first, then its values.
//! NOT here: codecs without groups of scale and zero (coded.rs), what an instruction set provides (kernel.rs; one file per instruction set), ranges and threads (attend/plan.rs).

use super::coded;
use super::kernel::{Kernel, Lanes, MAX_FOLD, MAX_VECTORS, Panels, Sums, Vectors};
use crate::RowFormat;
use crate::attend::softmax::States;
use crate::cache::layout::{BLOCK_LEN, RecordLayout};
use crate::element::Element;
use crate::quant::pack::{LINE, SLOT_LANES};
use half::{bf16, f16};
use std::ops::Range;

/// Keys of one range: fixed by position, so that a result depends on neither threads nor batch. A multiple of every
/// group_len; the scores of 8 vectors then take 16 KiB, which stays in the first-level cache.
pub(crate) const RANGE_LEN: usize = 512;
/// Keys and values of all kv heads of one sequence, by position.
pub(crate) trait Source: Sync {
    /// Record of a group.
    fn record(&self, head: usize, group: usize) -> &[u8];
    /// K `[D][32]` and V `[32][D]` of the 32 tokens from `position`, which no query of the task sees packed.
    fn f16_block(&self, head: usize, position: usize) -> (&[f16], &[f16]);
    /// The same of a source whose rows are bf16.
    fn bf16_block(&self, head: usize, position: usize) -> (&[bf16], &[bf16]);
    /// The same as [`Source::f16_block`] for 32 packed tokens, dequantized to f16.
    fn dequantized_block(&self, head: usize, position: usize) -> (&[f16], &[f16]);
    /// K and V `[sinks][D]` of the sink tokens.
    fn sinks(&self, head: usize) -> (&[f16], &[f16]);
}

/// Numbers that sources have blocks of.
trait Stored: Element {
    /// See [`Source::f16_block`], and [`Source::dequantized_block`] for `packed` positions.
    fn block(source: &dyn Source, head: usize, position: usize, packed: bool) -> (&[Self], &[Self]);
}

impl Stored for f16 {
    #[inline(always)]
    fn block(source: &dyn Source, head: usize, position: usize, packed: bool) -> (&[f16], &[f16]) {
        if packed { source.dequantized_block(head, position) } else { source.f16_block(head, position) }
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn block(source: &dyn Source, head: usize, position: usize, _packed: bool) -> (&[bf16], &[bf16]) {
        source.bf16_block(head, position)
    }
}

/// One range of keys for some query vectors of one kv head.
pub(crate) struct Task<'a> {
    pub source: &'a dyn Source,
    pub head: usize,
    pub head_dim: usize,
    /// Of rows that are not packed.
    pub format: RowFormat,
    /// Layout of records; None: packed positions are read with [`Source::dequantized_block`].
    pub records: Option<&'a RecordLayout>,
    /// Positions; starts at a multiple of [`RANGE_LEN`] and is at most that long.
    pub range: Range<usize>,
    /// The group that is attended after this range, if known: its keys are asked for ahead of time.
    pub next_group: Option<usize>,
    /// Positions before this one are packed, sinks excepted.
    pub edge: usize,
    /// Sink tokens (0 when nothing is packed).
    pub sinks: usize,
    /// First visible position of each query vector; all of them see the same records, if any.
    pub first_visible: &'a [usize],
    /// Most query vectors that share one pass over the codes; less than the kernel's own number only in experiments.
    pub vectors_per_unpack: usize,
    pub softcap: Option<f32>,
    /// Query vectors times sm_scale, `[vectors][head_dim]`.
    pub q: &'a [f32],
    /// Last visible position of each query vector.
    pub last_visible: &'a [usize],
}

/// Codes of one half of a record, made ready.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Ready(pub(super) [u8; READY_BYTES]);

/// Most tokens of a group times most channels.
const READY_BYTES: usize = 128 * MAX_FOLD;

impl Ready {
    const EMPTY: Self = Self([0; READY_BYTES]);

    /// Bytes of one prepared lane: its codes, in whole lines.
    fn lane_bytes(rows: usize) -> usize {
        rows.next_multiple_of(LINE)
    }
}

/// Working memory of one range, kept from range to range: what is read of it was written for the same range before.
#[repr(align(64))]
pub(crate) struct Scratch {
    /// `[vectors][RANGE_LEN]`
    scores: [[f32; RANGE_LEN]; MAX_VECTORS],
    /// `[vectors][MAX_FOLD]`
    out: [[f32; MAX_FOLD]; MAX_VECTORS],
    work: Work,
}

/// What [`Kernel::prepare`] and [`Kernel::panels`] read and write.
pub(super) struct Work {
    /// Two half records: one is prepared while the other is used.
    pub(super) ready: [Ready; 2],
    pub(super) sums: Sums,
    /// Query vectors as the rows of a key panel with loud channels, or of a codec, want them; sums of a codec's values.
    pub(super) planes: [[f32; MAX_FOLD]; MAX_VECTORS],
}

impl Scratch {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self {
            scores: [[0.0; RANGE_LEN]; MAX_VECTORS],
            out: [[0.0; MAX_FOLD]; MAX_VECTORS],
            work: Work { ready: [Ready::EMPTY; 2], sums: Sums::ZERO, planes: [[0.0; MAX_FOLD]; MAX_VECTORS] },
        })
    }
}

/// Groups or blocks of a range, at most.
pub(super) const MAX_STEPS: usize = RANGE_LEN / BLOCK_LEN;
/// Largest weight of each group of a range, per query vector.
pub(super) type Tops<const H: usize> = [[f32; MAX_STEPS]; H];

/// Attends the range for all query vectors, [`Kernel::VECTORS`] at a time, and merges each vector's partial state into
/// `states`. A vector's state does not depend on its neighbours.
#[inline(always)]
pub(crate) fn attend_range<K: Kernel>(kernel: K, task: &Task<'_>, scratch: &mut Scratch, states: &mut States) {
    let vectors = task.last_visible.len();
    let mut first = 0;
    while first < vectors {
        first += match task.vectors_per_unpack.min(vectors - first) {
            1 => attend_vectors::<K, 1>(kernel, task, first, scratch, states),
            2 => attend_vectors::<K, 2>(kernel, task, first, scratch, states),
            3 => attend_vectors::<K, 3>(kernel, task, first, scratch, states),
            8.. if K::VECTORS >= 8 => attend_vectors::<K, 8>(kernel, task, first, scratch, states),
            _ => attend_vectors::<K, 4>(kernel, task, first, scratch, states),
        };
    }
}

/// H vectors from `first` on; returns H.
#[inline(always)]
fn attend_vectors<K: Kernel, const H: usize>(
    kernel: K,
    task: &Task<'_>,
    first: usize,
    scratch: &mut Scratch,
    states: &mut States,
) -> usize {
    let vectors = kernel.vectors();
    let (d, base) = (task.head_dim, task.range.start);
    let q = &task.q[first * d..][..H * d];
    let first_visible = &task.first_visible[first..][..H];
    let last_visible = &task.last_visible[first..][..H];
    // Positions nobody of these vectors sees are not even read.
    let end = task.range.end.min(last_visible.iter().max().expect("H >= 1") + 1);
    let start = base.max(*first_visible.iter().min().expect("H >= 1"));
    if end <= start {
        return H;
    }
    let keys = Keys::new(task, start, end);
    let sinks = if start < task.sinks { task.sinks.min(end) } else { 0 };
    let sink_rows = (sinks > 0).then(|| task.source.sinks(task.head));

    let mut folded = [vectors.folded::<H>(), vectors.folded::<H>()];
    kernel.begin::<H>();
    keys.scores(kernel, q, scratch.scores.as_flattened_mut(), &mut folded, &mut scratch.work);
    for j in 0..sinks {
        let mut dots = [Lanes::ZERO; H];
        let k = sink_rows.expect("there are sinks").0;
        vectors.dot(q, d, &k[j * d..][..d], &mut dots);
        (0..H).for_each(|h| scratch.scores[h][j] = dots[h].total());
    }

    let padded = keys.padded_len();
    let step = keys.step();
    let (mut m, mut l) = ([f32::NEG_INFINITY; H], [0.0; H]);
    let mut tops: Tops<H> = [[f32::NEG_INFINITY; MAX_STEPS]; H];
    for h in 0..H {
        let row = &mut scratch.scores[h][..padded];
        let out = &mut scratch.out[h][..d];
        out.fill(0.0);
        if let Some(cap) = task.softcap {
            row.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
        }
        row[..first_visible[h].saturating_sub(base).min(padded)].fill(f32::NEG_INFINITY);
        row[(last_visible[h] + 1).clamp(base, end) - base..].fill(f32::NEG_INFINITY);
        // The packed codes of a sink token are not its values: its weight is spent apart.
        let mut sink_scores = [f32::NEG_INFINITY; SLOT_LANES];
        sink_scores[..sinks].copy_from_slice(&row[..sinks]);
        row[..sinks].fill(f32::NEG_INFINITY);
        for (top, group) in tops[h].iter_mut().zip(row.chunks(step)) {
            *top = vectors.max(group);
        }
        m[h] = vectors.max(&tops[h]).max(vectors.max(&sink_scores));
        if m[h] == f32::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        let mut sum = Lanes::ZERO;
        if sinks > 0 {
            vectors.exp(&mut sink_scores, m[h], &mut sum);
            let v = sink_rows.expect("there are sinks").1;
            for (p, v) in sink_scores[..sinks].iter().zip(v.chunks_exact(d)) {
                out.iter_mut().zip(v).for_each(|(o, v)| *o += p * v.to_f32());
            }
        }
        vectors.exp(row, m[h], &mut sum);
        // The bounds' own sum is nobody's.
        vectors.exp(&mut tops[h], m[h], &mut { Lanes::ZERO });
        l[h] = sum.total();
    }

    let (p, out) = (scratch.scores.as_flattened(), scratch.out.as_flattened_mut());
    keys.values(kernel, p, &tops, out, &mut folded, &mut scratch.work);
    kernel.end::<H>();
    for h in 0..H {
        states.merge(first + h, m[h], l[h], &scratch.out[h][..d]);
    }
    H
}

/// The keys of a range: packed positions, then plain positions.
pub(super) struct Keys<'a> {
    pub(super) task: &'a Task<'a>,
    packed: Range<usize>,
    plain: Range<usize>,
    /// Records of the packed part, the first `groups` of the array.
    records: [&'a [u8]; MAX_STEPS],
    groups: usize,
}

impl<'a> Keys<'a> {
    /// The task's keys from the group or block of `start` on, before `end`.
    #[inline(always)]
    fn new(task: &'a Task<'a>, start: usize, end: usize) -> Self {
        let base = task.range.start;
        let step = task.records.map_or(BLOCK_LEN, |layout| layout.group_len);
        // What lies before `start` may not even be held any more.
        let edge = task.edge.clamp(base, end);
        let packed = (start / step * step).min(edge)..edge;
        let mut records: [&[u8]; MAX_STEPS] = [&[]; MAX_STEPS];
        let mut groups = 0;
        if let Some(layout) = task.records {
            groups = packed.len().div_ceil(layout.group_len);
            let first = packed.start / layout.group_len;
            (0..groups).for_each(|i| records[i] = task.source.record(task.head, first + i));
        }
        Self { task, packed, plain: edge.max(start / BLOCK_LEN * BLOCK_LEN)..end, records, groups }
    }

    pub(super) fn records(&self) -> &[&'a [u8]] {
        &self.records[..self.groups]
    }

    fn base(&self) -> usize {
        self.task.range.start
    }

    /// Tokens of the range before the first record.
    pub(super) fn skipped(&self) -> usize {
        self.packed.start - self.base()
    }

    /// Tokens whose weights share a bound: a group, or a block where nothing is read packed.
    fn step(&self) -> usize {
        self.task.records.map_or(BLOCK_LEN, |layout| layout.group_len)
    }

    /// Length of the scores that the kernels write: whole groups and blocks.
    fn padded_len(&self) -> usize {
        let step = if self.plain.is_empty() { self.step() } else { BLOCK_LEN };
        (self.plain.end - self.base()).next_multiple_of(step)
    }

    /// `(position, K, V)` of the blocks: the dequantized packed part (when records are not read), then the plain part.
    #[inline(always)]
    fn blocks<E: Stored>(&self) -> impl Iterator<Item = (usize, (&[E], &[E]))> {
        let (source, head) = (self.task.source, self.task.head);
        let packed = if self.task.records.is_none() { self.packed.clone() } else { 0..0 };
        let packed = packed.step_by(BLOCK_LEN).map(move |p| (p, E::block(source, head, p, true)));
        let plain = self.plain.clone().step_by(BLOCK_LEN).map(move |p| (p, E::block(source, head, p, false)));
        packed.chain(plain)
    }

    /// Scores of every key; `out`: `[H][RANGE_LEN]`.
    #[inline(always)]
    fn scores<K: Kernel, const H: usize>(
        &self,
        kernel: K,
        q: &[f32],
        out: &mut [f32],
        folded: &mut [<K::Vectors as Vectors>::Folded<H>; 2],
        work: &mut Work,
    ) {
        let d = self.task.head_dim;
        let vectors = kernel.vectors();
        let records = self.task.records.filter(|_| self.groups > 0);
        if let Some(layout) = records.filter(|layout| !layout.k.is_groups()) {
            coded::scores::<K, H>(kernel, self, layout, q, out, &mut folded[0], work);
        } else if let Some(layout) = records {
            let Work { ready, sums, planes } = work;
            // One bound per range costs a look at every scale, but no look at the products of every group and vector.
            let mut top = [0.0; MAX_FOLD];
            self.records().iter().for_each(|record| vectors.raise(&mut top[..d], layout.k_params(record).0));
            let loud = layout.loud;
            // The upper plane of a loud channel counts four times its lower one, which is then the smaller of the two.
            let lower = loud.next_multiple_of(SLOT_LANES);
            let (upper, stride): (&[f32], usize) = if loud == 0 {
                (q, d)
            } else {
                for (planes, q) in planes[..H].iter_mut().zip(q.chunks_exact(d)) {
                    planes[..d].copy_from_slice(q);
                    planes[..loud].iter_mut().for_each(|x| *x *= 4.0);
                    planes[d..d + loud].copy_from_slice(&q[..loud]);
                    planes[d + loud..d + lower].fill(0.0);
                }
                (planes.as_flattened(), MAX_FOLD)
            };
            let bound = vectors.bound::<H>(upper, stride, &top[..d]);
            let codes = |i: usize| {
                // While these keys are read, the next ones are fetched, and after the last keys the first values.
                let next = match self.records().get(i + 1) {
                    Some(next) => &next[layout.k_bytes()],
                    None => &self.records[0][layout.v_bytes()],
                };
                let at = layout.k_codes();
                let prefetch = Ahead::of(vectors, next, layout.k_bytes().start).at(at.start);
                let (bits, codes, rows) = (layout.k_bits, &self.records[i][at], layout.k_rows());
                Panels { bits, codes, lanes: layout.group_len, rows, prefetch }
            };
            let mut panels = codes(0);
            kernel.prepare::<H>(panels, &mut ready[0].0);
            for (i, record) in self.records().iter().enumerate() {
                let (scales, zeros) = layout.k_params(record);
                vectors.fold::<H>(upper, stride, scales, &bound, &mut folded[0], 0);
                if loud > 0 {
                    vectors.fold::<H>(&upper[d..], stride, &scales[..lower], &bound, &mut folded[0], d);
                }
                let mut zero = [Lanes::ZERO; H];
                vectors.dot(q, d, zeros, &mut zero);
                let at = self.skipped() + i * layout.group_len;
                (0..H).for_each(|h| out[h * RANGE_LEN + at..][..layout.group_len].fill(zero[h].total()));
                let these = panels;
                if i + 1 < self.groups {
                    panels = codes(i + 1);
                    kernel.prepare::<H>(panels, &mut ready[(i + 1) % 2].0);
                }
                kernel.panels::<H>(these, &ready[i % 2].0, &folded[0], &mut out[at..], RANGE_LEN, sums);
            }
        }
        match self.task.format {
            RowFormat::F16 => self.plain_scores::<_, f16, H>(vectors, q, out),
            RowFormat::Bf16 => self.plain_scores::<_, bf16, H>(vectors, q, out),
        }
    }

    #[inline(always)]
    fn plain_scores<V: Vectors, E: Stored, const H: usize>(&self, vectors: V, q: &[f32], out: &mut [f32]) {
        let mut blocks = self.blocks::<E>().peekable();
        while let Some((position, (k, _))) = blocks.next() {
            let next = blocks.peek().map_or(k.as_ptr(), |b| b.1.0.as_ptr()).cast();
            let out = &mut out[position - self.base()..];
            vectors.plain_scores::<E, H>(q, self.task.head_dim, k, out, RANGE_LEN, next);
        }
    }

    /// Adds every key's value; `p`: `[H][RANGE_LEN]` weights, `tops` their largest per group, `out`: `[H][MAX_FOLD]`.
    #[inline(always)]
    fn values<K: Kernel, const H: usize>(
        &self,
        kernel: K,
        p: &[f32],
        tops: &Tops<H>,
        out: &mut [f32],
        folded: &mut [<K::Vectors as Vectors>::Folded<H>; 2],
        work: &mut Work,
    ) {
        let vectors = kernel.vectors();
        let records = self.task.records.filter(|_| self.groups > 0);
        if let Some(layout) = records.filter(|layout| !layout.v.is_groups()) {
            coded::values::<K, H>(kernel, self, layout, p, tops, out, &mut folded[0], work);
        } else if let Some(layout) = records {
            let Work { ready, sums, .. } = work;
            let tops_from = self.skipped() / layout.group_len;
            // At most head_dim / 32 channel groups.
            let mut zero_sums = [[Lanes::ZERO; H]; MAX_FOLD / 32];
            let lane_bytes = Ready::lane_bytes(layout.group_len);
            let ahead = |i: usize| {
                let next = match (self.records().get(i + 1), self.task.next_group) {
                    (Some(next), _) => &next[layout.v_bytes()],
                    (None, Some(group)) => &self.task.source.record(self.task.head, group)[layout.k_bytes()],
                    (None, None) => &self.records[i][layout.v_bytes()],
                };
                Ahead::of(vectors, next, layout.v_bytes().start)
            };
            let codes = |i: usize, group: usize, ahead: &Ahead| {
                let (at, lanes) = (layout.v_codes(group), layout.v_channels(group).len());
                let prefetch = ahead.at(at.start);
                Panels { bits: layout.v_bits, codes: &self.records[i][at], lanes, rows: layout.group_len, prefetch }
            };
            let prepare = |i: usize, ahead: &Ahead, ready: &mut Ready| {
                for group in 0..layout.v_groups() {
                    let at = layout.v_channels(group).start * lane_bytes;
                    kernel.prepare::<H>(codes(i, group, ahead), &mut ready.0[at..]);
                }
            };
            let mut next = ahead(0);
            prepare(0, &next, &mut ready[0]);
            for (i, record) in self.records().iter().enumerate() {
                let p = &p[self.skipped() + i * layout.group_len..];
                let these = next;
                for pair in (0..layout.v_groups()).step_by(2) {
                    let pair = pair..(pair + 2).min(layout.v_groups());
                    for (group, folded) in pair.clone().zip(folded.iter_mut()) {
                        let (scales, zeros) = layout.v_params(record, group);
                        let top = vectors.largest(scales);
                        vectors.fold::<H>(p, RANGE_LEN, scales, &tops.map(|tops| tops[tops_from + i] * top), folded, 0);
                        vectors.dot(p, RANGE_LEN, zeros, &mut zero_sums[group]);
                    }
                    if pair.start == 0 && i + 1 < self.groups {
                        next = ahead(i + 1);
                        prepare(i + 1, &next, &mut ready[(i + 1) % 2]);
                    }
                    for (group, folded) in pair.zip(folded.iter()) {
                        let first = layout.v_channels(group).start;
                        let ready = &ready[i % 2].0[first * lane_bytes..];
                        kernel.panels::<H>(codes(i, group, &these), ready, folded, &mut out[first..], MAX_FOLD, sums);
                    }
                }
            }
            for group in 0..layout.v_groups() {
                for h in 0..H {
                    let channels = &mut out[h * MAX_FOLD..][layout.v_channels(group)];
                    let zero = zero_sums[group][h].total();
                    channels.iter_mut().for_each(|x| *x += zero);
                }
            }
        }
        match self.task.format {
            RowFormat::F16 => self.plain_values::<_, f16, H>(vectors, p, out),
            RowFormat::Bf16 => self.plain_values::<_, bf16, H>(vectors, p, out),
        }
    }

    #[inline(always)]
    fn plain_values<V: Vectors, E: Stored, const H: usize>(&self, vectors: V, p: &[f32], out: &mut [f32]) {
        let d = self.task.head_dim;
        let mut blocks = self.blocks::<E>().peekable();
        while let Some((position, (_, v))) = blocks.next() {
            let next = blocks.peek().map_or(v.as_ptr(), |b| b.1.1.as_ptr()).cast();
            // Tokens past the end have weight 0, but nobody promises that their bytes are numbers worth reading.
            let tokens = BLOCK_LEN.min(self.plain.end - position);
            vectors.plain_values::<E, H>(&p[position - self.base()..], RANGE_LEN, &v[..tokens * d], d, out, next);
        }
    }
}

/// Memory to be fetched while panels are read: as far into it as the panel is into its own half of the record.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    from: *const u8,
    half_start: usize,
}

/// Bytes asked for at once: the parameters of most shapes, which are needed whole before the first panel is.
const HEADER_BYTES: usize = 512;

impl Ahead {
    pub(super) fn of<V: Vectors>(vectors: V, next: &[u8], half_start: usize) -> Self {
        vectors.prefetch(next.as_ptr(), HEADER_BYTES.min(next.len()));
        Self { from: next.as_ptr(), half_start }
    }

    pub(super) fn at(&self, panel_start: usize) -> *const u8 {
        self.from.wrapping_add(panel_start - self.half_start)
    }
}
