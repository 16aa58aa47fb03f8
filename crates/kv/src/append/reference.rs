//! The oracle of append: rows and records as the formula says, one number after another. In and out as in cpu/generic.rs.
//! NOT here: anything fast.

use super::record::{part_planes, read_record, write_panels};
use crate::RowFormat;
use crate::cache::layout::{BLOCK_LEN, PlainLayout, RecordLayout};
use crate::element::Element;
use crate::quant::affine::{Affine, quantize};
use half::{bf16, f16};

/// See cpu/generic.rs: rows from `slot` of a block on.
pub(crate) fn write_rows_plain(
    layout: &PlainLayout,
    block: &mut [u8],
    slot: usize,
    row_len: usize,
    k: &[f32],
    v: &[f32],
) {
    match layout.format {
        RowFormat::F16 => write_rows_of::<f16>(layout, block, slot, row_len, k, v),
        RowFormat::Bf16 => write_rows_of::<bf16>(layout, block, slot, row_len, k, v),
    }
}

fn write_rows_of<E: Element>(
    layout: &PlainLayout,
    block: &mut [u8],
    slot: usize,
    row_len: usize,
    k: &[f32],
    v: &[f32],
) {
    let d = layout.head_dim;
    for (at, (&k, &v)) in k.iter().zip(v).enumerate() {
        let (slot, head, channel) = (slot + at / row_len, at % row_len / d, at % d);
        let (k_out, v_out) = layout.head_mut::<E>(block, head);
        k_out[channel * BLOCK_LEN + slot] = E::round(k);
        v_out[slot * d + channel] = E::round(v);
    }
}

/// See cpu/generic.rs: one group into its record.
pub(crate) fn write_record_plain(layout: &RecordLayout, blocks: &[(&[f16], &[f16])], sinks: usize, record: &mut [u8]) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let mut codes = vec![0; g * layout.k_rows()];
    for (channel, codes) in codes[..g * d].chunks_exact_mut(g).enumerate() {
        let row = |block: &(&[f16], _)| block.0[channel * BLOCK_LEN..][..BLOCK_LEN].to_vec();
        let values: Vec<f32> = blocks.iter().flat_map(row).map(f16::to_f32).collect();
        layout.set_k_params(record, channel, quantize(&values, sinks, layout.k_bits_of(channel), layout.fit, codes));
    }
    part_planes(layout, &mut codes);
    write_panels(layout.k_bits, layout.k_panels(), layout.k_rows(), &codes, g, record);
    codes.truncate(g * d);
    for (token, codes) in codes.chunks_exact_mut(d).enumerate() {
        let row = &blocks[token / BLOCK_LEN].1[token % BLOCK_LEN * d..][..d];
        let values: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
        for group in 0..layout.v_groups() {
            let channels = layout.v_channels(group);
            let affine = if token < sinks {
                codes[channels].fill(0);
                Affine::default()
            } else {
                quantize(&values[channels.clone()], 0, layout.v_bits, layout.fit, &mut codes[channels])
            };
            layout.set_v_params(record, group, token, affine);
        }
    }
    write_panels(layout.v_bits, layout.v_panels(), g, &codes, d, record);
}

/// See cpu/dequantize.rs: a record as f16 rows.
pub(crate) fn dequantize_plain(layout: &RecordLayout, record: &[u8], blocks: &mut [(&mut [f16], &mut [f16])]) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let largest = f16::MAX.to_f32();
    let round = |x: f32| f16::from_f32(x.clamp(-largest, largest));
    let (k, v) = read_record(layout, record);
    for (block, (k_out, v_out)) in blocks.iter_mut().enumerate() {
        for i in 0..BLOCK_LEN * d {
            k_out[i] = round(k[i / BLOCK_LEN * g + block * BLOCK_LEN + i % BLOCK_LEN]);
            v_out[i] = round(v[block * BLOCK_LEN * d + i]);
        }
    }
}
