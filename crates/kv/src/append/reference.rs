//! The oracle of append: rows and records as the formula says, one number after another. In and out as in cpu/generic.rs.
//! NOT here: anything fast.

use super::record::{part_planes, read_record, write_panels};
use crate::cache::layout::{BLOCK_LEN, Half, PlainLayout, RecordLayout, book};
use crate::element::Element;
use crate::quant::affine::{Affine, quantize};
use crate::quant::grid::Grid;
use crate::quant::pack::write_sub_codes;
use crate::{Codebook, RowFormat};
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

/// See cpu/generic.rs: one group of a kv head into its record.
pub(crate) fn write_record_plain(
    layout: &RecordLayout,
    head: usize,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let k =
        |token: usize, channel: usize| blocks[token / BLOCK_LEN].0[channel * BLOCK_LEN + token % BLOCK_LEN].to_f32();
    let v = |token: usize, channel: usize| blocks[token / BLOCK_LEN].1[token % BLOCK_LEN * d + channel].to_f32();
    match &layout.k {
        Half::Groups => affine_keys(layout, &k, sinks, record),
        Half::Grid(grid) => {
            let mut codes = vec![0; g * d];
            for token in 0..g {
                let (scale, row) = grid_row(grid, d, token < sinks, |channel| k(token, channel));
                layout.k_scales_mut(record)[token] = scale;
                (0..d).for_each(|channel| codes[channel * g + token] = row[channel]);
            }
            write_panels(layout.k_bits, layout.k_panels(), d, &codes, g, record);
        }
        Half::Vectors(books) => {
            let book = book(books, head);
            write_sub_codes(&sub_vectors(book, g, sinks, k), book.centroids(), g, &mut record[layout.k_codes()]);
        }
    }
    match &layout.v {
        Half::Groups => affine_values(layout, &v, sinks, record),
        Half::Grid(grid) => {
            let mut codes = vec![0; g * d];
            for (token, codes) in codes.chunks_exact_mut(d).enumerate() {
                let (scale, row) = grid_row(grid, d, token < sinks, |channel| v(token, channel));
                layout.v_scales_mut(record)[token] = scale;
                codes.copy_from_slice(&row);
            }
            write_panels(layout.v_bits, layout.v_panels(), g, &codes, d, record);
        }
        Half::Vectors(books) => {
            let book = book(books, head);
            write_sub_codes(&sub_vectors(book, g, sinks, v), book.centroids(), g, &mut record[layout.all_v_codes()]);
        }
    }
}

/// One token's row under a grid: scale and codes, 0 for a sink.
fn grid_row(grid: &Grid, d: usize, sink: bool, x: impl Fn(usize) -> f32) -> (f16, Vec<u8>) {
    let mut codes = vec![0; d];
    if sink {
        return (f16::ZERO, codes);
    }
    let row: Vec<f32> = (0..d).map(x).collect();
    (grid.quantize(&row, &mut codes), codes)
}

/// Codes `[subs][G]`, 0 for sinks.
fn sub_vectors(book: &Codebook, g: usize, sinks: usize, x: impl Fn(usize, usize) -> f32) -> Vec<u8> {
    let n = book.sub_len();
    let code = |sub: usize, token: usize| {
        let part: Vec<f32> = (0..n).map(|c| x(token, sub * n + c)).collect();
        if token < sinks { 0 } else { book.nearest(sub, &part) }
    };
    (0..book.subs() * g).map(|i| code(i / g, i % g)).collect()
}

fn affine_keys(layout: &RecordLayout, k: &impl Fn(usize, usize) -> f32, sinks: usize, record: &mut [u8]) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let mut codes = vec![0; g * layout.k_rows()];
    for (channel, codes) in codes[..g * d].chunks_exact_mut(g).enumerate() {
        let values: Vec<f32> = (0..g).map(|token| k(token, channel)).collect();
        layout.set_k_params(record, channel, quantize(&values, sinks, layout.k_bits_of(channel), layout.fit, codes));
    }
    part_planes(layout, &mut codes);
    write_panels(layout.k_bits, layout.k_panels(), layout.k_rows(), &codes, g, record);
}

fn affine_values(layout: &RecordLayout, v: &impl Fn(usize, usize) -> f32, sinks: usize, record: &mut [u8]) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let mut codes = vec![0; g * d];
    for (token, codes) in codes.chunks_exact_mut(d).enumerate() {
        let values: Vec<f32> = (0..d).map(|channel| v(token, channel)).collect();
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
pub(crate) fn dequantize_plain(
    layout: &RecordLayout,
    head: usize,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let largest = f16::MAX.to_f32();
    let round = |x: f32| f16::from_f32(x.clamp(-largest, largest));
    let (k, v) = read_record(layout, head, record);
    for (block, (k_out, v_out)) in blocks.iter_mut().enumerate() {
        for i in 0..BLOCK_LEN * d {
            k_out[i] = round(k[i / BLOCK_LEN * g + block * BLOCK_LEN + i % BLOCK_LEN]);
            v_out[i] = round(v[block * BLOCK_LEN * d + i]);
        }
    }
}
