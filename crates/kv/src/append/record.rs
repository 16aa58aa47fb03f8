//! Records from codes that exist already, and records as numbers again. In: codes and parameters, or a record; out: the
//! record's bytes, or numbers.
//! Formulas: quant/affine.rs (keys: one group per channel over the tokens; values: one group per token and channel group),
//! quant/grid.rs, quant/codebook.rs.
//! Errors: none (checked before).
//! NOT here: quantizing (cpu/), when a group is due (cache/).

use super::cpu::best;
use crate::cache::layout::{Half, Panel, RecordLayout, book};
use crate::quant::affine::Affine;
use crate::quant::pack::{pack_panel, sub_codes, unpack_panel};
use half::f16;

pub(super) fn write_panels(
    bits: u32,
    panels: impl Iterator<Item = Panel>,
    rows: usize,
    codes: &[u8],
    stride: usize,
    record: &mut [u8],
) {
    for p in panels {
        pack_panel(bits, p.lanes, rows, &codes[p.first_lane..], stride, &mut record[p.bytes]);
    }
}

/// Writes a record from codes and parameters that exist already (a dense cache quantized elsewhere).
///
/// Shapes: `k_codes`, `v_codes`: u8 `[n][D]`, n <= group_len tokens; `k_params(channel)`, `v_params(token, group)`.
/// Tokens n.. have code and scale 0; attention never looks at them.
pub(crate) fn write_record_from_codes(
    layout: &RecordLayout,
    k_codes: &[u8],
    v_codes: &[u8],
    k_params: impl Fn(usize) -> Affine,
    v_params: impl Fn(usize, usize) -> Affine,
    record: &mut [u8],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let n = k_codes.len() / d;
    let mut codes = vec![0; g * layout.k_rows()];
    for channel in 0..d {
        layout.set_k_params(record, channel, k_params(channel));
        (0..n).for_each(|token| codes[channel * g + token] = k_codes[token * d + channel]);
    }
    part_planes(layout, &mut codes);
    write_panels(layout.k_bits, layout.k_panels(), layout.k_rows(), &codes, g, record);
    codes.truncate(g * d);
    codes.fill(0);
    codes[..n * d].copy_from_slice(v_codes);
    for token in 0..n {
        (0..layout.v_groups()).for_each(|group| layout.set_v_params(record, group, token, v_params(token, group)));
    }
    write_panels(layout.v_bits, layout.v_panels(), g, &codes, d, record);
}

/// Codes `[D][G]` of keys, in `[D+L][G]`, into their rows: of loud channels the upper bits stay, the lower ones go behind.
pub(super) fn part_planes(layout: &RecordLayout, codes: &mut [u8]) {
    let (codes, lower) = codes.split_at_mut(layout.head_dim * layout.group_len);
    for (code, lower) in codes.iter_mut().zip(lower) {
        (*code, *lower) = (*code >> 2, *code & 3);
    }
}

/// A kv head's record as numbers. Out: `k_hat` f32 `[D][G]` (transposed, as f16 blocks hold keys), `v_hat` f32 `[G][D]`.
pub(crate) fn read_record(layout: &RecordLayout, head: usize, record: &[u8]) -> (Vec<f32>, Vec<f32>) {
    (read_keys(layout, head, record), read_values(layout, head, record))
}

fn read_keys(layout: &RecordLayout, head: usize, record: &[u8]) -> Vec<f32> {
    let (d, g) = (layout.head_dim, layout.group_len);
    let mut codes = match &layout.k {
        Half::Vectors(books) => {
            let book = book(books, head);
            let code = sub_codes(&record[layout.k_codes()], book.centroids(), g);
            let value = |channel: usize, token: usize| {
                let (sub, c) = (channel / book.sub_len(), channel % book.sub_len());
                book.values_of(sub).0[code(sub, token) as usize * book.sub_len() + c]
            };
            return (0..d * g).map(|i| value(i / g, i % g)).collect();
        }
        _ => read_panels(layout.k_bits, layout.k_panels(), layout.k_rows(), record, g),
    };
    if let Half::Grid(grid) = &layout.k {
        let scales = layout.k_scales(record);
        return codes.iter().enumerate().map(|(i, &code)| grid.dequantize(scales[i % g], code)).collect();
    }
    let (codes, lower) = codes.split_at_mut(g * d);
    codes.iter_mut().zip(lower).for_each(|(code, lower)| *code = *code << 2 | *lower);
    let (scales, zeros) = layout.k_params(record);
    (0..g * d).map(|i| Affine { scale: scales[i / g], zero: zeros[i / g] }.dequantize(codes[i])).collect()
}

fn read_values(layout: &RecordLayout, head: usize, record: &[u8]) -> Vec<f32> {
    let (d, g) = (layout.head_dim, layout.group_len);
    if let Half::Vectors(books) = &layout.v {
        let book = book(books, head);
        let code = sub_codes(&record[layout.all_v_codes()], book.centroids(), g);
        let value = |token: usize, channel: usize| {
            let (sub, c) = (channel / book.sub_len(), channel % book.sub_len());
            book.values_of(sub).0[code(sub, token) as usize * book.sub_len() + c]
        };
        return (0..d * g).map(|i| value(i / d, i % d)).collect();
    }
    let codes = read_panels(layout.v_bits, layout.v_panels(), g, record, d);
    if let Half::Grid(grid) = &layout.v {
        let scales = layout.v_scales(record);
        return codes.iter().enumerate().map(|(i, &code)| grid.dequantize(scales[i / d], code)).collect();
    }
    let mut v = vec![0.0; g * d];
    for group in 0..layout.v_groups() {
        let (scales, zeros) = layout.v_params(record, group);
        for token in 0..g {
            let affine = Affine { scale: scales[token], zero: zeros[token] };
            for channel in layout.v_channels(group) {
                v[token * d + channel] = affine.dequantize(codes[token * d + channel]);
            }
        }
    }
    v
}

/// All codes of some panels: `[rows][stride]`.
pub(crate) fn read_panels(
    bits: u32,
    panels: impl Iterator<Item = Panel>,
    rows: usize,
    record: &[u8],
    stride: usize,
) -> Vec<u8> {
    let mut codes = vec![0u8; rows * stride];
    for p in panels {
        unpack_panel(bits, p.lanes, rows, &record[p.bytes], &mut codes[p.first_lane..], stride);
    }
    codes
}

/// A record as f16 blocks, by the best kernel (see cpu/dequantize.rs). Shapes: `blocks`: `group_len/32` pairs of K
/// `[D][32]` and V `[32][D]`, oldest first.
pub(crate) fn dequantize_record(
    layout: &RecordLayout,
    head: usize,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    (best().dequantize)(layout, head, record, blocks);
}
