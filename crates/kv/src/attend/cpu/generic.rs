//! The attention loop over one range of keys, written once. In: a [`Task`] (query vectors, keys by position);
//! out: one partial softmax state per query vector.
//!
//! Algebra: the key scale is folded into q once per group (`q' = q*scale`, plus one dot `q.zero`), the value scale into
//! the softmax weights (`w' = p*scale`, plus `p.zero`), so that the inner loops see raw codes: one panel operation
//! serves keys and values. A range is one softmax block: all its scores first, then its values.
//! NOT here: instructions (one file per instruction set), ranges and threads (attend/plan.rs).

use crate::attend::softmax::States;
use crate::cache::layout::{F16_BLOCK_LEN, RecordLayout};
use crate::quant::pack::SLOT_LANES;
use half::f16;
use std::ops::Range;

/// Keys of one range: fixed by position, so that a result depends on neither threads nor batch. A multiple of every
/// group_len; the scores of 4 vectors then take 8 KiB, which stays in the first-level cache.
pub(crate) const RANGE_LEN: usize = 512;
/// Query vectors that share one pass over the codes: 4 vectors x 2 limbs x 2 sets of lanes fill half of 32 registers.
pub(crate) const MAX_VECTORS: usize = 4;
/// Longest fold: channels of a head, or tokens of a group.
pub(crate) const MAX_FOLD: usize = 256;

/// Keys and values of all kv heads of one sequence, by position.
pub(crate) trait Source: Sync {
    /// Record of a group.
    fn record(&self, head: usize, group: usize) -> &[u8];
    /// K `[D][32]` and V `[32][D]` of the 32 tokens from `position`, which no query of the task sees packed.
    fn f16_block(&self, head: usize, position: usize) -> (&[f16], &[f16]);
    /// The same for 32 packed tokens, dequantized to f16.
    fn dequantized_block(&self, head: usize, position: usize) -> (&[f16], &[f16]);
    /// K and V `[sinks][D]` of the sink tokens.
    fn sinks(&self, head: usize) -> (&[f16], &[f16]);
}

/// One range of keys for some query vectors of one kv head.
pub(crate) struct Task<'a> {
    pub source: &'a dyn Source,
    pub head: usize,
    pub head_dim: usize,
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
    /// Positions before this one are not seen.
    pub first_visible: usize,
    /// At most [`MAX_VECTORS`]; fewer only in experiments.
    pub vectors_per_unpack: usize,
    pub softcap: Option<f32>,
    /// Query vectors times sm_scale, `[vectors][head_dim]`.
    pub q: &'a [f32],
    /// Last visible position of each query vector.
    pub last_visible: &'a [usize],
}

/// 16 partial sums: adding them up waits until the total is needed.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Lanes(pub [f32; SLOT_LANES]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0.0; SLOT_LANES]);

    /// The total, by halves: a tree is faster than a chain and rounds better.
    pub(crate) fn total(&self) -> f32 {
        let a: [f32; 8] = std::array::from_fn(|i| self.0[i] + self.0[i + 8]);
        let b: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (b[0] + b[2]) + (b[1] + b[3])
    }
}

/// The vector operations of one instruction set. A value of an implementing type proves that the processor has it.
///
/// Matrices are f32 with a row `stride`; row h belongs to query vector h of H.
pub(crate) trait Kernel: Copy {
    /// Multipliers made by [`Kernel::fold`].
    type Folded<const H: usize>;
    fn folded<const H: usize>(self) -> Self::Folded<H>;
    /// Folds `x[h][i] * scales[i]` for the panels that follow. `scales.len()` is a multiple of 16, at most [`MAX_FOLD`].
    /// `bound[h]` is at least every magnitude in row h: what integer multipliers are scaled by.
    fn fold<const H: usize>(
        self,
        x: &[f32],
        stride: usize,
        scales: &[f16],
        bound: &[f32; H],
        folded: &mut Self::Folded<H>,
    );
    /// Largest of `y`; its length is a multiple of 32. Kernels that fold without bounds may say 0.
    fn largest(self, y: &[f16]) -> f32;
    /// `top[i] = max(top[i], y[i])`; the length of `y` is a multiple of 16.
    fn raise(self, top: &mut [f32], y: &[f16]);
    /// Largest of `|x[h][i]| * top[i]`; the length of `top` is a multiple of 16.
    fn bound<const H: usize>(self, x: &[f32], stride: usize, top: &[f32]) -> [f32; H];
    /// `out[h][lane] += sum over rows of folded[h][row] * code[row][lane]`. `lanes` is 16 or 32. While it runs it asks
    /// for the memory from `prefetch` on, as many bytes as `codes` has.
    #[allow(clippy::too_many_arguments)]
    fn panel<const H: usize>(
        self,
        bits: u32,
        codes: &[u8],
        lanes: usize,
        folded: &Self::Folded<H>,
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    );
    /// `sum over i of x[h][i] * y[i]`, added lane by lane (i mod 16) to `sums`; the length of `y` is a multiple of 16.
    fn dot<const H: usize>(self, x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]);
    /// `out[h][token] = sum over channels of q[h][channel] * k[channel][token]` for 32 tokens.
    fn f16_scores<const H: usize>(
        self,
        q: &[f32],
        head_dim: usize,
        k: &[f16],
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    );
    /// `out[h][channel] += sum over tokens of p[h][token] * v[token][channel]`; v has rows of `head_dim`.
    #[allow(clippy::too_many_arguments)]
    fn f16_values<const H: usize>(
        self,
        p: &[f32],
        stride: usize,
        v: &[f16],
        head_dim: usize,
        out: &mut [f32],
        prefetch: *const u8,
    );
    /// Asks for memory that will be read soon.
    fn prefetch(self, from: *const u8, bytes: usize);
    /// Largest score; the length is a multiple of 16.
    fn max(self, scores: &[f32]) -> f32;
    /// `scores[i] = exp(scores[i] - max)`, exactly 0 for -inf; adds the results to `sum`. The length is a multiple of 16.
    fn exp(self, scores: &mut [f32], max: f32, sum: &mut Lanes);
}

/// Working memory of one range, kept from range to range: what is read of it was written for the same range before.
#[repr(align(64))]
pub(crate) struct Scratch {
    /// `[vectors][RANGE_LEN]`
    scores: [[f32; RANGE_LEN]; MAX_VECTORS],
    /// `[vectors][MAX_FOLD]`
    out: [[f32; MAX_FOLD]; MAX_VECTORS],
}

impl Scratch {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self { scores: [[0.0; RANGE_LEN]; MAX_VECTORS], out: [[0.0; MAX_FOLD]; MAX_VECTORS] })
    }
}

/// Groups or blocks of a range, at most.
const MAX_STEPS: usize = RANGE_LEN / F16_BLOCK_LEN;
/// Largest weight of each group of a range, per query vector.
type Tops<const H: usize> = [[f32; MAX_STEPS]; H];

/// Attends the range for all query vectors, [`MAX_VECTORS`] at a time, and merges each vector's partial state into
/// `states`. A vector's state does not depend on its neighbours.
#[inline(always)]
pub(crate) fn attend_range<K: Kernel>(kernel: K, task: &Task<'_>, scratch: &mut Scratch, states: &mut States) {
    let vectors = task.last_visible.len();
    let mut first = 0;
    while first < vectors {
        let n = task.vectors_per_unpack.min(vectors - first);
        match n {
            1 => attend_vectors::<K, 1>(kernel, task, first, scratch, states),
            2 => attend_vectors::<K, 2>(kernel, task, first, scratch, states),
            3 => attend_vectors::<K, 3>(kernel, task, first, scratch, states),
            _ => attend_vectors::<K, 4>(kernel, task, first, scratch, states),
        }
        first += n;
    }
}

#[inline(always)]
fn attend_vectors<K: Kernel, const H: usize>(
    kernel: K,
    task: &Task<'_>,
    first: usize,
    scratch: &mut Scratch,
    states: &mut States,
) {
    let (d, base) = (task.head_dim, task.range.start);
    let q = &task.q[first * d..][..H * d];
    let last_visible = &task.last_visible[first..][..H];
    // Positions nobody of these vectors sees are not even read.
    let end = task.range.end.min(last_visible.iter().max().expect("H >= 1") + 1);
    if end <= base || end <= task.first_visible {
        return;
    }
    let keys = Keys::new(task, end);
    let sinks = if base == 0 { task.sinks.min(end) } else { 0 };
    let sink_rows = (sinks > 0).then(|| task.source.sinks(task.head));

    let mut folded = kernel.folded::<H>();
    keys.scores(kernel, q, scratch.scores.as_flattened_mut(), &mut folded);
    for j in 0..sinks {
        let mut dots = [Lanes::ZERO; H];
        let k = sink_rows.expect("there are sinks").0;
        kernel.dot(q, d, &k[j * d..][..d], &mut dots);
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
        row[..task.first_visible.saturating_sub(base).min(padded)].fill(f32::NEG_INFINITY);
        row[(last_visible[h] + 1).clamp(base, end) - base..].fill(f32::NEG_INFINITY);
        // The packed codes of a sink token are not its values: its weight is spent apart.
        let mut sink_scores = [f32::NEG_INFINITY; SLOT_LANES];
        sink_scores[..sinks].copy_from_slice(&row[..sinks]);
        row[..sinks].fill(f32::NEG_INFINITY);
        for (top, group) in tops[h].iter_mut().zip(row.chunks(step)) {
            *top = kernel.max(group);
        }
        m[h] = kernel.max(&tops[h]).max(kernel.max(&sink_scores));
        if m[h] == f32::NEG_INFINITY {
            row.fill(0.0);
            continue;
        }
        let mut sum = Lanes::ZERO;
        if sinks > 0 {
            kernel.exp(&mut sink_scores, m[h], &mut sum);
            let v = sink_rows.expect("there are sinks").1;
            for (p, v) in sink_scores[..sinks].iter().zip(v.chunks_exact(d)) {
                out.iter_mut().zip(v).for_each(|(o, v)| *o += p * v.to_f32());
            }
        }
        kernel.exp(row, m[h], &mut sum);
        // The bounds' own sum is nobody's.
        kernel.exp(&mut tops[h], m[h], &mut { Lanes::ZERO });
        l[h] = sum.total();
    }

    keys.values(kernel, scratch.scores.as_flattened(), &tops, scratch.out.as_flattened_mut(), &mut folded);
    for h in 0..H {
        states.merge(first + h, m[h], l[h], &scratch.out[h][..d]);
    }
}

/// The keys of a range: packed positions, then f16 positions.
struct Keys<'a> {
    task: &'a Task<'a>,
    packed: Range<usize>,
    f16: Range<usize>,
    /// Records of the packed part, the first `groups` of the array.
    records: [&'a [u8]; MAX_STEPS],
    groups: usize,
}

impl<'a> Keys<'a> {
    /// The task's keys before `end`.
    #[inline(always)]
    fn new(task: &'a Task<'a>, end: usize) -> Self {
        let base = task.range.start;
        let packed = base..task.edge.min(end).max(base);
        let mut records: [&[u8]; MAX_STEPS] = [&[]; MAX_STEPS];
        let mut groups = 0;
        if let Some(layout) = task.records {
            groups = packed.len().div_ceil(layout.group_len);
            let first = base / layout.group_len;
            (0..groups).for_each(|i| records[i] = task.source.record(task.head, first + i));
        }
        Self { task, packed, f16: task.edge.clamp(base, end)..end, records, groups }
    }

    fn records(&self) -> &[&'a [u8]] {
        &self.records[..self.groups]
    }

    fn base(&self) -> usize {
        self.task.range.start
    }

    /// Tokens whose weights share a bound: a group, or a block where nothing is read packed.
    fn step(&self) -> usize {
        self.task.records.map_or(F16_BLOCK_LEN, |layout| layout.group_len)
    }

    /// Length of the scores that the kernels write: whole groups and blocks.
    fn padded_len(&self) -> usize {
        let step = if self.f16.is_empty() { self.step() } else { F16_BLOCK_LEN };
        (self.f16.end - self.base()).next_multiple_of(step)
    }

    /// `(position, K, V)` of the f16 blocks: the dequantized packed part (when records are not read), then the f16 part.
    fn f16_blocks(&self) -> impl Iterator<Item = (usize, (&[f16], &[f16]))> {
        let (source, head) = (self.task.source, self.task.head);
        let packed = if self.task.records.is_none() { self.packed.clone() } else { 0..0 };
        let packed = packed.step_by(F16_BLOCK_LEN).map(move |p| (p, source.dequantized_block(head, p)));
        let plain = self.f16.clone().step_by(F16_BLOCK_LEN).map(move |p| (p, source.f16_block(head, p)));
        packed.chain(plain)
    }

    /// Scores of every key; `out`: `[H][RANGE_LEN]`.
    #[inline(always)]
    fn scores<K: Kernel, const H: usize>(&self, kernel: K, q: &[f32], out: &mut [f32], folded: &mut K::Folded<H>) {
        let d = self.task.head_dim;
        if let Some(layout) = self.task.records.filter(|_| self.groups > 0) {
            let keys = layout.k_bytes();
            // One bound per range costs a look at every scale, but no look at the products of every group and vector.
            let mut top = [0.0; MAX_FOLD];
            self.records().iter().for_each(|record| kernel.raise(&mut top[..d], layout.k_params(record).0));
            let bound = kernel.bound::<H>(q, d, &top[..d]);
            for (i, record) in self.records().iter().enumerate() {
                // While these keys are read, the next ones are fetched, and after the last keys the first values.
                let next = match self.records().get(i + 1) {
                    Some(next) => &next[keys.clone()],
                    None => &self.records[0][layout.v_bytes()],
                };
                let ahead = Ahead::of(kernel, next, keys.start);
                let (scales, zeros) = layout.k_params(record);
                kernel.fold::<H>(q, d, scales, &bound, folded);
                let mut zero = [Lanes::ZERO; H];
                kernel.dot(q, d, zeros, &mut zero);
                let at = i * layout.group_len;
                (0..H).for_each(|h| out[h * RANGE_LEN + at..][..layout.group_len].fill(zero[h].total()));
                for p in layout.k_panels() {
                    let out = &mut out[at + p.first_lane..];
                    let ahead = ahead.at(p.bytes.start);
                    kernel.panel::<H>(layout.k_bits, &record[p.bytes], p.lanes, folded, out, RANGE_LEN, ahead);
                }
            }
        }
        let mut blocks = self.f16_blocks().peekable();
        while let Some((position, (k, _))) = blocks.next() {
            let next = blocks.peek().map_or(k.as_ptr(), |b| b.1.0.as_ptr()).cast();
            kernel.f16_scores::<H>(q, d, k, &mut out[position - self.base()..], RANGE_LEN, next);
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
        folded: &mut K::Folded<H>,
    ) {
        let d = self.task.head_dim;
        if let Some(layout) = self.task.records.filter(|_| self.groups > 0) {
            // At most head_dim / 32 channel groups.
            let mut zero_sums = [[Lanes::ZERO; H]; MAX_FOLD / 32];
            let values = layout.v_bytes();
            for (i, record) in self.records().iter().enumerate() {
                let next = match (self.records().get(i + 1), self.task.next_group) {
                    (Some(next), _) => &next[values.clone()],
                    (None, Some(group)) => &self.task.source.record(self.task.head, group)[layout.k_bytes()],
                    (None, None) => &record[values.clone()],
                };
                let ahead = Ahead::of(kernel, next, values.start);
                let p = &p[i * layout.group_len..];
                let mut panels = layout.v_panels().peekable();
                for group in 0..layout.v_groups() {
                    let (scales, zeros) = layout.v_params(record, group);
                    let top = kernel.largest(scales);
                    kernel.fold::<H>(p, RANGE_LEN, scales, &tops.map(|tops| tops[i] * top), folded);
                    kernel.dot(p, RANGE_LEN, zeros, &mut zero_sums[group]);
                    let channels = layout.v_channels(group);
                    while let Some(p) = panels.next_if(|p| channels.contains(&p.first_lane)) {
                        let ahead = ahead.at(p.bytes.start);
                        let out = &mut out[p.first_lane..];
                        kernel.panel::<H>(layout.v_bits, &record[p.bytes], p.lanes, folded, out, MAX_FOLD, ahead);
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
        let mut blocks = self.f16_blocks().peekable();
        while let Some((position, (_, v))) = blocks.next() {
            let next = blocks.peek().map_or(v.as_ptr(), |b| b.1.1.as_ptr()).cast();
            // Tokens past the end have weight 0, but nobody promises that their bytes are numbers worth reading.
            let tokens = F16_BLOCK_LEN.min(self.f16.end - position);
            kernel.f16_values::<H>(&p[position - self.base()..], RANGE_LEN, &v[..tokens * d], d, out, next);
        }
    }
}

/// Memory to be fetched while panels are read: as far into it as the panel is into its own half of the record.
struct Ahead {
    from: *const u8,
    half_start: usize,
}

/// Bytes asked for at once: the parameters of most shapes, which are needed whole before the first panel is.
const HEADER_BYTES: usize = 512;

impl Ahead {
    fn of<K: Kernel>(kernel: K, next: &[u8], half_start: usize) -> Self {
        kernel.prefetch(next.as_ptr(), HEADER_BYTES.min(next.len()));
        Self { from: next.as_ptr(), half_start }
    }

    fn at(&self, panel_start: usize) -> *const u8 {
        self.from.wrapping_add(panel_start - self.half_start)
    }
}
