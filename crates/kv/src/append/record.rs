//! A whole group of tokens into a record, and back. In: f16 blocks; out: the record's bytes, or numbers again.
//! Formula: quant/affine.rs. Keys: one group per channel over the tokens; values: one group per token and channel group.
//! Errors: none (checked before).
//! NOT here: when a group is due (cache/).

use crate::cache::layout::{F16_BLOCK_LEN, Panel, RecordLayout};
use crate::quant::affine::{Affine, quantize};
use crate::quant::pack::{pack_panel, unpack_panel};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Buffers of [`write_record`], kept between calls.
#[derive(Default)]
pub(crate) struct Scratch {
    values: Vec<f32>,
    codes: Vec<u8>,
}

/// Quantizes one group and writes its record.
///
/// Shapes: `blocks`: `group_len/32` pairs of K `[D][32]` and V `[32][D]`, oldest first. The first `sinks` tokens of the
/// group are left out of the key fit and of the values (they are read from the sink block): their value scale is 0.
pub(crate) fn write_record(
    layout: &RecordLayout,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
    scratch: &mut Scratch,
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    debug_assert_eq!(blocks.len() * F16_BLOCK_LEN, g);
    scratch.values.resize(g.max(d), 0.0);
    scratch.codes.resize(g * d, 0);
    let codes = &mut scratch.codes[..];
    for (channel, codes) in codes.chunks_exact_mut(g).enumerate() {
        let values = &mut scratch.values[..g];
        for (block, values) in blocks.iter().zip(values.chunks_exact_mut(F16_BLOCK_LEN)) {
            block.0[channel * F16_BLOCK_LEN..][..F16_BLOCK_LEN].convert_to_f32_slice(values);
        }
        let affine = quantize(values, sinks, layout.k_bits, codes);
        layout.set_k_params(record, channel, affine);
    }
    write_panels(layout.k_bits, layout.k_panels(), d, codes, g, record);
    for (token, codes) in codes.chunks_exact_mut(d).enumerate() {
        let row = &blocks[token / F16_BLOCK_LEN].1[token % F16_BLOCK_LEN * d..][..d];
        let values = &mut scratch.values[..d];
        row.convert_to_f32_slice(values);
        for group in 0..layout.v_groups() {
            let channels = layout.v_channels(group);
            let affine = if token < sinks {
                codes[channels].fill(0);
                Affine::default()
            } else {
                quantize(&values[channels.clone()], 0, layout.v_bits, &mut codes[channels])
            };
            layout.set_v_params(record, group, token, affine);
        }
    }
    write_panels(layout.v_bits, layout.v_panels(), g, codes, d, record);
}

fn write_panels(
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
    let mut codes = vec![0; g * d];
    for channel in 0..d {
        layout.set_k_params(record, channel, k_params(channel));
        (0..n).for_each(|token| codes[channel * g + token] = k_codes[token * d + channel]);
    }
    write_panels(layout.k_bits, layout.k_panels(), d, &codes, g, record);
    codes.fill(0);
    codes[..n * d].copy_from_slice(v_codes);
    for token in 0..n {
        (0..layout.v_groups()).for_each(|group| layout.set_v_params(record, group, token, v_params(token, group)));
    }
    write_panels(layout.v_bits, layout.v_panels(), g, &codes, d, record);
}

/// A record as numbers. Out: `k_hat` f32 `[D][G]` (transposed, as f16 blocks hold keys), `v_hat` f32 `[G][D]`.
pub(crate) fn read_record(layout: &RecordLayout, record: &[u8]) -> (Vec<f32>, Vec<f32>) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let read = |bits, panels: &mut dyn Iterator<Item = Panel>, rows, stride| {
        let mut codes = vec![0u8; g * d];
        for p in panels {
            unpack_panel(bits, p.lanes, rows, &record[p.bytes], &mut codes[p.first_lane..], stride);
        }
        codes
    };
    let k_codes = read(layout.k_bits, &mut layout.k_panels(), d, g);
    let v_codes = read(layout.v_bits, &mut layout.v_panels(), g, d);
    let (scales, zeros) = layout.k_params(record);
    let k = (0..g * d).map(|i| Affine { scale: scales[i / g], zero: zeros[i / g] }.dequantize(k_codes[i])).collect();
    let mut v = vec![0.0; g * d];
    for group in 0..layout.v_groups() {
        let (scales, zeros) = layout.v_params(record, group);
        for token in 0..g {
            let affine = Affine { scale: scales[token], zero: zeros[token] };
            for channel in layout.v_channels(group) {
                v[token * d + channel] = affine.dequantize(v_codes[token * d + channel]);
            }
        }
    }
    (k, v)
}

/// A record as f16 blocks: rounds x_hat to f16, at most the largest finite one (a group that spans all of f16 can
/// dequantize to just above it). Shapes: `blocks` as in [`write_record`].
pub(crate) fn dequantize_record(layout: &RecordLayout, record: &[u8], blocks: &mut [(&mut [f16], &mut [f16])]) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let (mut k, mut v) = read_record(layout, record);
    let largest = f16::MAX.to_f32();
    k.iter_mut().chain(&mut v).for_each(|x| *x = x.clamp(-largest, largest));
    for (i, (k_out, v_out)) in blocks.iter_mut().enumerate() {
        for channel in 0..d {
            let from = &k[channel * g + i * F16_BLOCK_LEN..][..F16_BLOCK_LEN];
            k_out[channel * F16_BLOCK_LEN..][..F16_BLOCK_LEN].convert_from_f32_slice(from);
        }
        v_out.convert_from_f32_slice(&v[i * F16_BLOCK_LEN * d..][..F16_BLOCK_LEN * d]);
    }
}
