//! A record as f16 rows again, written once for every instruction set. In: a record; out: f16 blocks.
//!
//! Formula: `code*scale + zero` in f32 (the product is exact, the sum rounds once), clamped to the finite f16 (a group that
//! spans all of f16 can end just above them), rounded to f16. The same bits on every instruction set.
//! NOT here: reading codes for attention (attend/cpu), bits inside a line (quant/pack.rs).

use super::coded;
use super::generic::{Kernel, LANES, PERIOD, SETS};
use crate::cache::layout::{BLOCK_LEN, RecordLayout};
use crate::quant::pack::{LINE, QUAD};
use crate::scheme::LOUD_STEP;
use half::f16;

/// Writes a record's rows. Shapes: `blocks`: `group_len/32` pairs of K `[D][32]` and V `[32][D]`, oldest first.
#[inline(always)]
pub(super) fn dequantize<T: Kernel>(
    kernel: T,
    layout: &RecordLayout,
    head: usize,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    assert_eq!(blocks.len() * BLOCK_LEN, layout.group_len);
    match layout.k_bits {
        _ if !layout.k.is_groups() => coded::dequantize_keys(kernel, layout, head, record, blocks),
        2 => keys::<T, 2>(kernel, layout, record, blocks),
        3 => keys::<T, 3>(kernel, layout, record, blocks),
        4 => keys::<T, 4>(kernel, layout, record, blocks),
        _ => keys::<T, 8>(kernel, layout, record, blocks),
    }
    match layout.v_bits {
        _ if !layout.v.is_groups() => coded::dequantize_values(kernel, layout, head, record, blocks),
        2 => values::<T, 2>(kernel, layout, record, blocks),
        3 => values::<T, 3>(kernel, layout, record, blocks),
        4 => values::<T, 4>(kernel, layout, record, blocks),
        _ => values::<T, 8>(kernel, layout, record, blocks),
    }
}

#[inline(always)]
fn keys<T: Kernel, const BITS: usize>(
    kernel: T,
    layout: &RecordLayout,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    let (scales, zeros) = layout.k_params(record);
    for ((k, _), panel) in blocks.iter_mut().zip(layout.k_panels()) {
        // Two vectors of 16 tokens for each channel.
        let rows = k.as_chunks_mut::<LANES>().0;
        let panel = &record[panel.bytes];
        let parts = panel.chunks_exact(BITS * LINE).zip(rows.chunks_exact_mut(SETS * LANES));
        for (part, (lines, rows)) in parts.enumerate() {
            let steps = numbers(kernel, scales, part * LANES);
            let zeros = numbers(kernel, zeros, part * LANES);
            let mut slots = slots::<T, BITS>(kernel, lines);
            if BITS == 2 {
                // Of a loud channel these are the upper bits; the lower ones are lines of their own, one for 8 channels.
                let loud = layout.loud.saturating_sub(part * LANES).min(LANES) / LOUD_STEP;
                let from = (layout.head_dim + part * LANES) / LOUD_STEP * LINE;
                for (slots, line) in
                    slots.chunks_exact_mut(4).zip(panel[from.min(panel.len())..].as_chunks().0).take(loud)
                {
                    let line = kernel.load_line(line);
                    for (at, slot) in slots.iter_mut().enumerate() {
                        let lower = kernel.mask(kernel.shr(line, 2 * at as u32), 0x03);
                        *slot = kernel.or(kernel.shl(*slot, 2), lower);
                    }
                }
            }
            for i in 0..SETS * LANES {
                let (channel, set) = (i / SETS, i % SETS);
                let slot = slots[channel / QUAD * SETS + set];
                rows[i] = kernel.values(slot, channel % QUAD, steps[channel], zeros[channel]);
            }
        }
    }
}

#[inline(always)]
fn values<T: Kernel, const BITS: usize>(
    kernel: T,
    layout: &RecordLayout,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    let stride = layout.head_dim / LANES;
    for (panel, first) in layout.v_panels().zip((0..).step_by(SETS)) {
        let (scales, zeros) = layout.v_params(record, panel.first_lane / layout.v_group_len);
        let sets = panel.lanes / LANES;
        let quads = PERIOD / sets;
        for (part, lines) in record[panel.bytes].chunks_exact(BITS * LINE).enumerate() {
            let first_token = part * quads * QUAD;
            let rows = blocks[first_token / BLOCK_LEN].1.as_chunks_mut::<LANES>().0;
            let rows = &mut rows[first_token % BLOCK_LEN * stride..][..quads * QUAD * stride];
            let slots = slots::<T, BITS>(kernel, lines);
            for half in (0..quads * QUAD).step_by(LANES) {
                let steps = numbers(kernel, scales, first_token + half);
                let zeros = numbers(kernel, zeros, first_token + half);
                for token in 0..LANES {
                    for set in 0..sets {
                        let slot = slots[(half + token) / QUAD * sets + set];
                        let row = kernel.values(slot, token % QUAD, steps[token], zeros[token]);
                        rows[(half + token) * stride + first + set] = row;
                    }
                }
            }
        }
    }
}

/// 16 parameters from `first` on.
#[inline(always)]
fn numbers<T: Kernel>(kernel: T, x: &[f16], first: usize) -> [f32; LANES] {
    kernel.store(kernel.load(x[first..].first_chunk().expect("parameters come in 16s")))
}

/// Eight consecutive slots from their lines (quant/pack.rs has the format).
#[inline(always)]
fn slots<T: Kernel, const BITS: usize>(kernel: T, lines: &[u8]) -> [T::Slot; PERIOD] {
    let lines: &[[u8; LINE]; BITS] = lines.as_chunks::<LINE>().0.try_into().expect("BITS lines");
    let field = |line: T::Slot, bit: u32, mask: u8| kernel.mask(kernel.shr(line, bit), mask);
    let mut slots = [kernel.blank(); PERIOD];
    for (i, slot) in slots.iter_mut().enumerate() {
        let at = i as u32;
        *slot = match BITS {
            8 => kernel.load_line(&lines[i]),
            4 => field(kernel.load_line(&lines[i / 2]), at % 2 * 4, 0x0f),
            2 => field(kernel.load_line(&lines[i / 4]), at % 4 * 2, 0x03),
            _ if i < 6 => field(kernel.load_line(&lines[i / 2]), at % 2 * 3, 0x07),
            _ => {
                let low = field(kernel.load_line(&lines[0]), 6, 0x03);
                let middle = field(kernel.load_line(&lines[1]), 4, 0x0c);
                let high = field(kernel.load_line(&lines[2]), 2, 0x30);
                field(kernel.or(kernel.or(low, middle), high), at % 2 * 3, 0x07)
            }
        };
    }
    slots
}
