//! Codes into bits: the panel format. In: a matrix of codes, rows x lanes; out: 64-byte lines, and back.
//!
//! A **panel** covers 16 or 32 lanes and all rows. Its codes are cut into **slots** of 64: 4 consecutive rows (a quad)
//! by 16 lanes, byte `4*lane + row_in_quad`, so that a slot of unpacked codes is one operand of an 8-bit dot product
//! (`vpdpbusd`: 16 dwords of 4 bytes). Slots are numbered quad by quad, inside a quad by set of 16 lanes.
//! Lines hold `8/bits` slots each, the first in the lowest bits; with 3 bits, 8 slots share 3 lines: line i has slots
//! 2i and 2i+1 in its low six bits and bits 2i, 2i+1 of the pair (slot 6 | slot 7 << 3) on top. docs/layout.md has an example.
//!
//! **Sub-vectors** have no panels: for each of them the codes of all tokens of a group, a byte each; with 16 centroids token t in
//! the low half of byte t and token `G/2 + t` in the high one. Zeros fill the last line.
//! NOT here: offsets of panels in a record (cache/layout.rs); vector code (attend/cpu).

/// Lanes of a slot.
pub(crate) const SLOT_LANES: usize = 16;
/// Rows of a slot.
pub(crate) const QUAD: usize = 4;
/// Codes of a slot, and bytes of a line.
pub(crate) const LINE: usize = 64;
/// Most lanes of a panel.
pub(crate) const PANEL_LANES: usize = 32;

/// Bytes of a panel.
pub(crate) const fn panel_bytes(bits: u32, lanes: usize, rows: usize) -> usize {
    lanes * rows * bits as usize / 8
}

/// Slots that share lines, and the lines they share: the period of the format.
const fn period(bits: u32) -> (usize, usize) {
    match bits {
        3 => (8, 3),
        b => (8 / b as usize, 1),
    }
}

/// Packs one panel. `codes` is the row-major matrix starting at the panel's first lane: code (row, lane) at `row*stride + lane`.
pub(crate) fn pack_panel(bits: u32, lanes: usize, rows: usize, codes: &[u8], stride: usize, out: &mut [u8]) {
    let sets = lanes / SLOT_LANES;
    let (slots, lines) = period(bits);
    debug_assert_eq!(out.len(), panel_bytes(bits, lanes, rows));
    let mut slot = [[0u8; LINE]; 8];
    for (p, out) in out.chunks_exact_mut(lines * LINE).enumerate() {
        for (i, slot) in slot[..slots].iter_mut().enumerate() {
            let (quad, set) = ((p * slots + i) / sets, (p * slots + i) % sets);
            let row = |j: usize| &codes[(quad * QUAD + j) * stride + set * SLOT_LANES..][..SLOT_LANES];
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            for t in 0..SLOT_LANES {
                slot[4 * t..4 * t + 4].copy_from_slice(&[a[t], b[t], c[t], d[t]]);
            }
        }
        match bits {
            8 => out.copy_from_slice(&slot[0]),
            4 => (0..LINE).for_each(|b| out[b] = slot[0][b] | slot[1][b] << 4),
            1 => (0..LINE).for_each(|b| out[b] = (0..8).fold(0, |byte, i| byte | slot[i][b] << i)),
            2 => (0..LINE).for_each(|b| out[b] = slot[0][b] | slot[1][b] << 2 | slot[2][b] << 4 | slot[3][b] << 6),
            _ => {
                for (i, line) in out.chunks_exact_mut(LINE).enumerate() {
                    for b in 0..LINE {
                        let top = slot[6][b] | slot[7][b] << 3;
                        line[b] = slot[2 * i][b] | slot[2 * i + 1][b] << 3 | (top >> (2 * i) & 3) << 6;
                    }
                }
            }
        }
    }
}

/// Reads one slot of a panel as 64 codes.
#[inline(always)]
pub(crate) fn unpack_slot(bits: u32, panel: &[u8], slot: usize) -> [u8; LINE] {
    let (slots, lines) = period(bits);
    let group = &panel[slot / slots * lines * LINE..][..lines * LINE];
    let field = slot % slots;
    std::array::from_fn(|b| match bits {
        8 => group[b],
        4 => group[b] >> (4 * field) & 15,
        2 => group[b] >> (2 * field) & 3,
        1 => group[b] >> field & 1,
        _ if field < 6 => group[field / 2 * LINE + b] >> (3 * (field % 2)) & 7,
        _ => {
            let pair = group[b] >> 6 | group[LINE + b] >> 6 << 2 | group[2 * LINE + b] >> 6 << 4;
            pair >> (3 * (field - 6)) & 7
        }
    })
}

/// Unpacks one panel into the row-major matrix `codes` (see [`pack_panel`]).
pub(crate) fn unpack_panel(bits: u32, lanes: usize, rows: usize, panel: &[u8], codes: &mut [u8], stride: usize) {
    let sets = lanes / SLOT_LANES;
    for slot in 0..rows / QUAD * sets {
        let bytes = unpack_slot(bits, panel, slot);
        let (quad, set) = (slot / sets, slot % sets);
        for t in 0..SLOT_LANES {
            for j in 0..QUAD {
                codes[(quad * QUAD + j) * stride + set * SLOT_LANES + t] = bytes[4 * t + j];
            }
        }
    }
}

/// Codes of sub-vectors by sub-vector and token (see above).
pub(crate) fn sub_codes(bytes: &[u8], centroids: usize, group_len: usize) -> impl Fn(usize, usize) -> u8 {
    let half = group_len / 2;
    move |sub, token| match centroids {
        16 => bytes[sub * half + token % half] >> (4 * (token / half)) & 15,
        _ => bytes[sub * group_len + token],
    }
}

/// Writes the codes `[subs][G]` of sub-vectors where [`sub_codes`] reads them.
pub(crate) fn write_sub_codes(codes: &[u8], centroids: usize, group_len: usize, bytes: &mut [u8]) {
    let half = group_len / 2;
    let used = match centroids {
        16 => {
            for (codes, bytes) in codes.chunks_exact(group_len).zip(bytes.chunks_exact_mut(half)) {
                let (low, high) = codes.split_at(half);
                bytes.iter_mut().zip(low.iter().zip(high)).for_each(|(byte, (low, high))| *byte = low | high << 4);
            }
            codes.len() / 2
        }
        _ => {
            bytes[..codes.len()].copy_from_slice(codes);
            codes.len()
        }
    };
    bytes[used..].fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pack_round_trips(
            seed in any::<u64>(), bits in prop::sample::select(vec![1u32, 2, 3, 4, 8]),
            lanes in prop::sample::select(vec![16usize, 32]), rows in prop::sample::select(vec![32usize, 64, 80, 96, 128, 256])
        ) {
            // A panel of 16 lanes has rows in multiples of 32: only value panels have it, and their rows are tokens.
            prop_assume!(lanes == 32 || rows % 32 == 0);
            let stride = lanes + 3;
            let mut x = seed | 1;
            let codes: Vec<u8> = (0..rows * stride).map(|_| {
                x ^= x << 13; x ^= x >> 7; x ^= x << 17;
                (x >> 40) as u8 & ((1u32 << bits) - 1) as u8
            }).collect();
            let mut panel = vec![0xAA; panel_bytes(bits, lanes, rows)];
            pack_panel(bits, lanes, rows, &codes, stride, &mut panel);
            let mut back = vec![0; rows * stride];
            unpack_panel(bits, lanes, rows, &panel, &mut back, stride);
            for r in 0..rows {
                prop_assert_eq!(&back[r * stride..][..lanes], &codes[r * stride..][..lanes]);
            }
        }
    }
}
