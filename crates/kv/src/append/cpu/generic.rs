//! Append, written once for every instruction set. In: f32 rows, f16 blocks; out: f16 or bf16 blocks, records.
//!
//! Formula: that of quant/affine.rs, to the bit: every instruction set does the same f32 roundings. Exact ties are common
//! (x, zero and scale have 11 bits each), so the quotient must be the rounded one, but need not be divided for:
//! with `r = f32(1/s)`, `q0 = f32(y*r)` is within 1.5 ulp of y/s, the remainder `e = y - q0*s` is exact in one fused step
//! (at most `1.5 * 2^11` units), and `fma(e, r, q0)` is rounded from a number within `1.5 * 2^-24` ulp of y/s. As s has 11 bits,
//! y/s is never that close to the middle between two f32 (at least `2^-12` ulp away), so the result is f32(y/s) always.
//! Tried and lost: `y*r` alone: two operations fewer, but an exact tie falls to either side (golden cases saw it).
//! NOT here: which tokens are packed when (cache/), bits inside a line for reading (quant/pack.rs), checks.

use super::coded;
use super::fitting::{MAX_GROUP, fit, search};
use crate::RowFormat;
use crate::cache::layout::{BLOCK_LEN, PlainLayout, RecordLayout};
use crate::element::Element;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use crate::scheme::{Fit, LOUD_STEP};
use half::{bf16, f16};

/// Rows of a block or record that are handled at once: the lanes of a vector, so that their scales are one vector.
pub(super) const LANES: usize = SLOT_LANES;
/// Slots after which every number of bits has filled whole lines.
pub(super) const PERIOD: usize = 8;

/// The largest finite f16.
pub(super) const LARGEST: f32 = f16::MAX.to_f32_const();

/// 16 channels of 32 tokens, as a K block holds them.
pub(super) type Tile<E> = [[E; BLOCK_LEN]; LANES];

/// What an instruction set does with 16 lanes.
pub(super) trait Kernel: Copy {
    /// 16 f32.
    type Lanes: Copy;
    /// 64 codes of one byte: 4 rows of 16 lanes, byte `4*lane + row`.
    type Slot: Copy;

    fn load(self, x: &[f16; LANES]) -> Self::Lanes;
    fn store(self, x: Self::Lanes) -> [f32; LANES];
    fn lanes(self, x: &[f32; LANES]) -> Self::Lanes;
    fn min(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn max(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// The first `n` lanes of `a`, the others of `b`; n is at most 16.
    fn select(self, n: usize, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Lane i: the smallest lane of vector i.
    fn min_of_each(self, x: &[Self::Lanes; LANES]) -> Self::Lanes;
    /// Lane i: the largest lane of vector i.
    fn max_of_each(self, x: &[Self::Lanes; LANES]) -> Self::Lanes;
    /// Lane i: the sum of the lanes of vector i, added by halves: l and l+8, then l and l+4, l+2, l+1.
    fn sum_of_each(self, x: &[Self::Lanes; LANES]) -> Self::Lanes;
    fn splat(self, x: f32) -> Self::Lanes;
    fn add(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    fn sub(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// Rounded: never fused with a sum.
    fn mul(self, a: Self::Lanes, b: Self::Lanes) -> Self::Lanes;
    /// To the nearest integer, ties to even; of 0..=255.
    fn integer(self, x: Self::Lanes) -> Self::Lanes;
    /// The larger of each dword of `peak` (below 2^31) and the bits of the number's magnitude.
    fn peak(self, peak: Self::Slot, x: &[f32; LANES]) -> Self::Slot;
    /// To E, ties to even; the numbers are finite in it.
    fn round<E: Element>(self, x: &[f32; LANES]) -> [E; LANES];
    /// All zero.
    fn blank(self) -> Self::Slot;
    /// Codes `rint(clamp((x - zero) / step, 0, top))`, ties to even, of four rows; 0 where the step is 0.
    fn slot(self, rows: [&[f16; LANES]; QUAD], fit: &[RowFit; QUAD], top: f32) -> Self::Slot;
    /// How many borders lie below each number of four rows.
    fn count(self, rows: &[Self::Lanes; QUAD], borders: &[f32]) -> Self::Slot;
    /// Every dword shifted left by `n` bits.
    fn shl(self, x: Self::Slot, n: u32) -> Self::Slot;
    fn or(self, a: Self::Slot, b: Self::Slot) -> Self::Slot;
    /// Every byte masked.
    fn mask(self, x: Self::Slot, byte: u8) -> Self::Slot;
    fn store_line(self, x: Self::Slot, line: &mut [u8; LINE]);
    fn load_line(self, line: &[u8; LINE]) -> Self::Slot;
    /// Every dword shifted right by `n` bits.
    fn shr(self, x: Self::Slot, n: u32) -> Self::Slot;
    /// `code * step + zero` of one row of a slot, clamped to the finite f16 and rounded.
    fn values(self, slot: Self::Slot, row: usize, step: f32, zero: f32) -> [f16; LANES];
    /// Rounds 32 rows of 16 and transposes them. Row t is at `rows[t.min(n-1)*stride..]`: with fewer than 32 rows the last
    /// one fills the tile.
    fn transpose<E: Element>(self, rows: &[f32], stride: usize, n: usize, tile: &mut Tile<E>);
}

/// What the codes of one row or channel are made with.
#[derive(Clone, Copy, Default)]
pub(super) struct RowFit {
    pub zero: f32,
    /// The scale, in f32.
    pub step: f32,
    /// f32(1/step), 0 when the step is 0.
    pub inverse: f32,
}

/// Whether all numbers round to finite ones of the format.
#[inline(always)]
pub(super) fn finite<T: Kernel>(kernel: T, x: &[f32], format: RowFormat) -> bool {
    /// Vectors at once: enough to run at the speed of memory.
    const CHAINS: usize = 4;
    let (whole, rest) = x.as_chunks::<{ CHAINS * LANES }>();
    let mut peaks = [kernel.blank(); CHAINS];
    for x in whole {
        for (peak, x) in peaks.iter_mut().zip(x.as_chunks::<LANES>().0) {
            *peak = kernel.peak(*peak, x);
        }
    }
    // Bits of magnitudes are ordered as the numbers are, infinity and NaN above.
    let mut top = rest.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
    for peak in peaks {
        let mut line = [0; LINE];
        kernel.store_line(peak, &mut line);
        top = line.as_chunks().0.iter().map(|&x| u32::from_le_bytes(x)).fold(top, u32::max);
    }
    top < format.refused_from().to_bits()
}

/// Below this many rows a transposed store costs less than a tile. It is bound by the lines of K it touches, one for each
/// number; asking for them ahead gained nothing.
const FEW_ROWS: usize = 4;

/// Writes rows from `slot` of a block on, rounded to the block's format.
///
/// Shapes: `k`, `v`: f32 `[rows][row_len]`, finite in the format; `slot + rows <= 32`.
#[inline(always)]
pub(super) fn write_rows<T: Kernel>(
    kernel: T,
    layout: &PlainLayout,
    block: &mut [u8],
    slot: usize,
    row_len: usize,
    k: &[f32],
    v: &[f32],
) {
    match layout.format {
        RowFormat::F16 => write_rows_of::<T, f16>(kernel, layout, block, slot, row_len, k, v),
        RowFormat::Bf16 => write_rows_of::<T, bf16>(kernel, layout, block, slot, row_len, k, v),
    }
}

#[inline(always)]
fn write_rows_of<T: Kernel, E: Element>(
    kernel: T,
    layout: &PlainLayout,
    block: &mut [u8],
    slot: usize,
    row_len: usize,
    k: &[f32],
    v: &[f32],
) {
    let d = layout.head_dim;
    let rows = k.len() / row_len;
    assert!(k.len() == v.len() && slot + rows <= BLOCK_LEN && layout.tokens == BLOCK_LEN);
    let mut tile: Tile<E> = [[E::ZERO; BLOCK_LEN]; LANES];
    for head in 0..row_len / d {
        let (k_out, v_out) = layout.head_mut::<E>(block, head);
        for (row, out) in v.chunks_exact(row_len).zip(v_out[slot * d..].chunks_exact_mut(d)) {
            round_row(kernel, &row[head * d..][..d], out);
        }
        for channel in (0..d).step_by(LANES) {
            let out = k_out[channel * BLOCK_LEN..][..LANES * BLOCK_LEN].as_chunks_mut::<BLOCK_LEN>().0;
            let from = &k[head * d + channel..];
            if rows < FEW_ROWS {
                for row in 0..rows {
                    let x = kernel.round(lanes(&from[row * row_len..]));
                    for (out, x) in out.iter_mut().zip(x) {
                        out[slot + row] = x;
                    }
                }
                continue;
            }
            kernel.transpose(from, row_len, rows, &mut tile);
            if rows == BLOCK_LEN {
                out.copy_from_slice(&tile);
            } else {
                for (out, x) in out.iter_mut().zip(&tile) {
                    out[slot..slot + rows].copy_from_slice(&x[..rows]);
                }
            }
        }
    }
}

/// Rounds one row; its length is a multiple of 16.
#[inline(always)]
pub(super) fn round_row<T: Kernel, E: Element>(kernel: T, row: &[f32], out: &mut [E]) {
    for (x, out) in row.as_chunks::<LANES>().0.iter().zip(out.as_chunks_mut::<LANES>().0) {
        *out = kernel.round(x);
    }
}

/// Quantizes one group of a kv head and writes its record.
///
/// Shapes: `blocks`: `group_len/32` pairs of K `[D][32]` and V `[32][D]`, oldest first, finite. The first `sinks` (at most
/// 16) tokens of the group are left out of the key fit, and their value scale, zero and codes are 0: attention reads them
/// from the sink block.
#[inline(always)]
pub(super) fn write_record<T: Kernel>(
    kernel: T,
    layout: &RecordLayout,
    head: usize,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    assert!(blocks.len() * BLOCK_LEN == layout.group_len && sinks <= LANES);
    match layout.k_bits {
        _ if !layout.k.is_groups() => coded::keys(kernel, layout, head, blocks, sinks, record),
        2 => keys::<T, 2>(kernel, layout, blocks, sinks, record),
        3 => keys::<T, 3>(kernel, layout, blocks, sinks, record),
        4 => keys::<T, 4>(kernel, layout, blocks, sinks, record),
        _ => keys::<T, 8>(kernel, layout, blocks, sinks, record),
    }
    match layout.v_bits {
        _ if !layout.v.is_groups() => coded::values(kernel, layout, head, blocks, sinks, record),
        2 => values::<T, 2>(kernel, layout, blocks, sinks, record),
        3 => values::<T, 3>(kernel, layout, blocks, sinks, record),
        4 => values::<T, 4>(kernel, layout, blocks, sinks, record),
        _ => values::<T, 8>(kernel, layout, blocks, sinks, record),
    }
}

/// Sets of 16 lanes in a key panel.
pub(super) const SETS: usize = PANEL_LANES / LANES;

/// Keys: a group per channel over all tokens of the record, 16 channels at once.
#[inline(always)]
fn keys<T: Kernel, const BITS: usize>(
    kernel: T,
    layout: &RecordLayout,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    for channel in (0..layout.head_dim).step_by(LANES) {
        let rows = channels(blocks[0].0, channel);
        let mut low = [kernel.load(&rows[0]); LANES];
        let mut high = low;
        for i in 0..LANES {
            // Sinks are among the first 16 tokens; the second 16 take their place in the fit.
            let second = kernel.load(&rows[2 * i + 1]);
            let first = kernel.load(&rows[2 * i]);
            let first = if sinks > 0 { kernel.select(sinks, second, first) } else { first };
            (low[i], high[i]) = (kernel.min(first, second), kernel.max(first, second));
        }
        for block in &blocks[1..] {
            let rows = channels(block.0, channel);
            for i in 0..LANES {
                let (a, b) = (kernel.load(&rows[2 * i]), kernel.load(&rows[2 * i + 1]));
                low[i] = kernel.min(low[i], kernel.min(a, b));
                high[i] = kernel.max(high[i], kernel.max(a, b));
            }
        }
        let loud = layout.loud.saturating_sub(channel).min(LANES);
        let bits: [u32; LANES] = std::array::from_fn(|i| layout.k_bits_of(channel + i));
        let mut fit = fit(kernel, &bits, &low, &high);
        if layout.fit != Fit::MinMax && BITS < 8 {
            let mut values = [[kernel.splat(0.0); MAX_GROUP]; LANES];
            for (b, block) in blocks.iter().enumerate() {
                for (values, rows) in values.iter_mut().zip(channels(block.0, channel).as_chunks::<SETS>().0) {
                    (0..SETS).for_each(|set| values[b * SETS + set] = kernel.load(&rows[set]));
                }
            }
            search(kernel, layout.fit, &bits, &values, blocks.len() * SETS, sinks, &mut fit);
        }
        let (scales, zeros) = layout.k_params_mut(record);
        scales[channel..channel + LANES].copy_from_slice(&fit.scale);
        zeros[channel..channel + LANES].copy_from_slice(&fit.zero);
        let fits = fit.rows.as_chunks::<QUAD>().0;
        for (block, panel) in blocks.iter().zip(layout.k_panels()) {
            let rows = channels(block.0, channel);
            let mut slots = [kernel.blank(); PERIOD];
            let mut lower = slots;
            for quad in 0..LANES / QUAD {
                for set in 0..SETS {
                    let first = SETS * QUAD * quad + set;
                    let rows = [&rows[first], &rows[first + SETS], &rows[first + 2 * SETS], &rows[first + 3 * SETS]];
                    let slot = &mut slots[quad * SETS + set];
                    if BITS == 2 && quad * QUAD < loud {
                        let codes = kernel.slot(rows, &fits[quad], top(2 * BITS));
                        lower[quad * SETS + set] = kernel.mask(codes, 0x03);
                        *slot = kernel.mask(kernel.shr(codes, 2), 0x03);
                    } else {
                        *slot = kernel.slot(rows, &fits[quad], top(BITS));
                    }
                }
            }
            let from = panel.bytes.start + channel / LANES * BITS * LINE;
            write_lines::<T, BITS>(kernel, &slots, &mut record[from..][..BITS * LINE]);
            if BITS == 2 && loud > 0 {
                // Loud channels come in eights: a line each.
                let from = panel.bytes.start + (layout.head_dim + channel) / LOUD_STEP * LINE;
                for (slots, line) in
                    lower.chunks_exact(4).zip(record[from..].chunks_exact_mut(LINE)).take(loud / LOUD_STEP)
                {
                    let line = line.first_chunk_mut().expect("a line");
                    kernel.store_line(two_bits(kernel, slots.first_chunk().expect("4 slots")), line);
                }
            }
        }
    }
}

/// 16 channels of a K block: two vectors of 16 tokens each.
#[inline(always)]
fn channels(k: &[f16], first: usize) -> &[[f16; LANES]; SETS * LANES] {
    k.as_chunks::<LANES>().0[SETS * first..][..SETS * LANES].try_into().expect("16 channels")
}

/// Values: a group per token and channel group, 32 tokens at once.
#[inline(always)]
fn values<T: Kernel, const BITS: usize>(
    kernel: T,
    layout: &RecordLayout,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    let stride = layout.head_dim / LANES;
    for (block, (_, v)) in blocks.iter().enumerate() {
        let rows = v.as_chunks::<LANES>().0;
        assert_eq!(rows.len(), BLOCK_LEN * stride);
        let first_token = block * BLOCK_LEN;
        for group in 0..layout.v_groups() {
            let channels = layout.v_channels(group);
            let (first, n) = (channels.start / LANES, channels.len() / LANES);
            let mut fits = [RowFit::default(); BLOCK_LEN];
            for half in (0..BLOCK_LEN).step_by(LANES) {
                let mut low = [kernel.load(&rows[0]); LANES];
                let mut high = low;
                for i in 0..LANES {
                    let row = &rows[(half + i) * stride + first..][..n];
                    let mut lowest = kernel.load(&row[0]);
                    let mut highest = lowest;
                    for x in &row[1..] {
                        let x = kernel.load(x);
                        (lowest, highest) = (kernel.min(lowest, x), kernel.max(highest, x));
                    }
                    (low[i], high[i]) = (lowest, highest);
                }
                let mut fit = fit(kernel, &[BITS as u32; LANES], &low, &high);
                if layout.fit != Fit::MinMax && BITS < 8 {
                    let mut values = [[kernel.splat(0.0); MAX_GROUP]; LANES];
                    for (i, values) in values.iter_mut().enumerate() {
                        let row = &rows[(half + i) * stride + first..][..n];
                        values.iter_mut().zip(row).for_each(|(value, x)| *value = kernel.load(x));
                    }
                    search(kernel, layout.fit, &[BITS as u32; LANES], &values, n, 0, &mut fit);
                }
                let sinks = sinks.saturating_sub(first_token + half).min(LANES);
                fit.scale[..sinks].fill(f16::ZERO);
                fit.zero[..sinks].fill(f16::ZERO);
                fit.rows[..sinks].fill(RowFit::default());
                let (scales, zeros) = layout.v_params_mut(record, group);
                scales[first_token + half..][..LANES].copy_from_slice(&fit.scale);
                zeros[first_token + half..][..LANES].copy_from_slice(&fit.zero);
                fits[half..half + LANES].copy_from_slice(&fit.rows);
            }
            // Channel groups begin at multiples of 32, so a panel has one group only.
            let panels = channels.start / PANEL_LANES..channels.end.div_ceil(PANEL_LANES);
            for panel in layout.v_panels().skip(panels.start).take(panels.len()) {
                let first = panel.first_lane / LANES;
                let sets = panel.lanes / LANES;
                let lines = &mut record[panel.bytes][block * BITS * LINE * sets..][..BITS * LINE * sets];
                if sets == SETS {
                    value_lines::<T, BITS, SETS>(kernel, &rows[first..], stride, &fits, lines);
                } else {
                    value_lines::<T, BITS, 1>(kernel, &rows[first..], stride, &fits, lines);
                }
            }
        }
    }
}

/// Lines of 32 tokens of one value panel of `S` sets. Token t, set s is `rows[t*stride + s]`.
#[inline(always)]
fn value_lines<T: Kernel, const BITS: usize, const S: usize>(
    kernel: T,
    rows: &[[f16; LANES]],
    stride: usize,
    fits: &[RowFit; BLOCK_LEN],
    lines: &mut [u8],
) {
    let fits = fits.as_chunks::<QUAD>().0;
    panel_lines::<T, BITS, S>(kernel, lines, |quad, set| {
        let rows = &rows[quad * QUAD * stride + set..][..3 * stride + 1];
        let rows = [&rows[0], &rows[stride], &rows[2 * stride], &rows[3 * stride]];
        kernel.slot(rows, &fits[quad], top(BITS))
    });
}

/// Lines of a panel of `S` sets from the slots of `(quad, set)`.
#[inline(always)]
pub(super) fn panel_lines<T: Kernel, const BITS: usize, const S: usize>(
    kernel: T,
    lines: &mut [u8],
    slot_of: impl Fn(usize, usize) -> T::Slot,
) {
    for (part, lines) in lines.chunks_exact_mut(BITS * LINE).enumerate() {
        let mut slots = [kernel.blank(); PERIOD];
        for (slot, out) in slots.iter_mut().enumerate() {
            *out = slot_of(part * (PERIOD / S) + slot / S, slot % S);
        }
        write_lines::<T, BITS>(kernel, &slots, lines);
    }
}

/// The largest code.
#[inline(always)]
pub(super) fn top(bits: usize) -> f32 {
    ((1u32 << bits) - 1) as f32
}

/// Lines of eight consecutive slots (quant/pack.rs has the format).
#[inline(always)]
fn write_lines<T: Kernel, const BITS: usize>(kernel: T, slots: &[T::Slot; PERIOD], lines: &mut [u8]) {
    let lines: &mut [[u8; LINE]; BITS] = lines.as_chunks_mut::<LINE>().0.try_into().expect("BITS lines");
    for (i, line) in lines.iter_mut().enumerate() {
        let slot = match BITS {
            8 => slots[i],
            4 => above(kernel, slots[2 * i], slots[2 * i + 1], 4),
            2 => two_bits(kernel, slots[4 * i..].first_chunk().expect("4 slots")),
            1 => (1..PERIOD).fold(slots[0], |line, slot| above(kernel, line, slots[slot], slot as u32)),
            _ => {
                // Bits 2i and 2i+1 of every byte of the pair go on top; what a dword's shift takes from other bytes is masked.
                let pair = above(kernel, slots[6], slots[7], 3);
                let top = kernel.mask(kernel.shl(pair, 6 - 2 * i as u32), 0xc0);
                kernel.or(above(kernel, slots[2 * i], slots[2 * i + 1], 3), top)
            }
        };
        kernel.store_line(slot, line);
    }
}

/// A line of four slots of 2 bits.
#[inline(always)]
fn two_bits<T: Kernel>(kernel: T, slots: &[T::Slot; 4]) -> T::Slot {
    let low = above(kernel, slots[0], slots[1], 2);
    above(kernel, low, above(kernel, slots[2], slots[3], 2), 4)
}

/// `high` shifted left by `n` bits, above `low`.
#[inline(always)]
fn above<T: Kernel>(kernel: T, low: T::Slot, high: T::Slot, n: u32) -> T::Slot {
    kernel.or(low, kernel.shl(high, n))
}

#[inline(always)]
fn lanes(x: &[f32]) -> &[f32; LANES] {
    x.first_chunk().expect("16 numbers")
}
