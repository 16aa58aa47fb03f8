//! Halves of records whose codec is a grid or sub-vectors, written once for every instruction set. In: f16 blocks; out: scales
//! and codes, as quant/grid.rs and quant/codebook.rs say them, to the bit; and back.
//!
//! 16 tokens at once, one per lane; of values 16 channels where rows are summed. Plain loops over 16 numbers: inside an
//! entry point they become vectors of its instruction set, in the same order of additions everywhere.
//! NOT here: groups with scale and zero (generic.rs, fitting.rs, dequantize.rs).

use super::generic::{Kernel, LANES, SETS};
use crate::append::record::{read_panels, sub_codes, write_panels, write_sub_codes};
use crate::cache::layout::{BLOCK_LEN, Half, RecordLayout, book};
use crate::quant::codebook::Codebook;
use crate::quant::grid::{BEST_STEP, Grid, MAX_LEVELS, STEPS, inverse, tree};
use half::f16;

/// 16 numbers.
type Lanes = [f32; LANES];
/// Most channels of a head.
const MAX_DIM: usize = 256;
/// Most codes of half a record.
const MAX_CODES: usize = 128 * MAX_DIM;

/// Writes the keys of a record, which are not affine. Shapes as in generic.rs.
#[inline(always)]
pub(super) fn keys<T: Kernel>(
    kernel: T,
    layout: &RecordLayout,
    head: usize,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let mut codes = [0u8; MAX_CODES];
    let codes = &mut codes[..d * g];
    for (token, at) in (0..g).step_by(LANES).zip(0..) {
        let rows = blocks[at / SETS].0.as_chunks::<LANES>().0;
        let x = |channel: usize| kernel.store(kernel.load(&rows[channel * SETS + at % SETS]));
        let sinks = sinks.saturating_sub(token).min(LANES);
        match &layout.k {
            Half::Affine => unreachable!("the caller asks for others"),
            Half::Grid(grid) => {
                let scales = tokens_by_grid(grid, d, x, |channel, row| {
                    codes[channel * g + token..][..LANES].copy_from_slice(&row);
                });
                let out = &mut layout.k_scales_mut(record)[token..][..LANES];
                out.copy_from_slice(&scales);
                out[..sinks].fill(f16::ZERO);
                codes.chunks_exact_mut(g).for_each(|row| row[token..token + sinks].fill(0));
            }
            Half::Vectors(books) => {
                let book = book(books, head);
                sub_vectors(book, x, |sub, row| codes[sub * g + token..][..LANES].copy_from_slice(&row));
                codes.chunks_exact_mut(g).take(book.subs()).for_each(|row| row[token..token + sinks].fill(0));
            }
        }
    }
    match &layout.k {
        Half::Vectors(books) => {
            let book = book(books, head);
            write_sub_codes(&codes[..book.subs() * g], book.centroids(), g, &mut record[layout.k_codes()]);
        }
        _ => write_panels(layout.k_bits, layout.k_panels(), d, codes, g, record),
    }
}

/// Writes the values of a record, which are not affine.
#[inline(always)]
pub(super) fn values<T: Kernel>(
    kernel: T,
    layout: &RecordLayout,
    head: usize,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let mut codes = [0u8; MAX_CODES];
    let codes = &mut codes[..d * g];
    let mut tile = [[0f32; LANES]; MAX_DIM];
    for token in (0..g).step_by(LANES) {
        // 16 tokens as columns.
        for i in 0..LANES {
            let row = &blocks[token / BLOCK_LEN].1[(token % BLOCK_LEN + i) * d..][..d];
            for (part, x) in row.as_chunks::<LANES>().0.iter().enumerate() {
                let x = kernel.store(kernel.load(x));
                (0..LANES).for_each(|c| tile[part * LANES + c][i] = x[c]);
            }
        }
        let x = |channel: usize| tile[channel];
        let sinks = sinks.saturating_sub(token).min(LANES);
        match &layout.v {
            Half::Affine => unreachable!("the caller asks for others"),
            Half::Grid(grid) => {
                let scales = tokens_by_grid(grid, d, x, |channel, row| {
                    (0..LANES).for_each(|i| codes[(token + i) * d + channel] = row[i]);
                });
                let out = &mut layout.v_scales_mut(record)[token..][..LANES];
                out.copy_from_slice(&scales);
                out[..sinks].fill(f16::ZERO);
                codes[token * d..(token + sinks) * d].fill(0);
            }
            Half::Vectors(books) => {
                let book = book(books, head);
                sub_vectors(book, x, |sub, row| codes[sub * g + token..][..LANES].copy_from_slice(&row));
                codes.chunks_exact_mut(g).take(book.subs()).for_each(|row| row[token..token + sinks].fill(0));
            }
        }
    }
    match &layout.v {
        Half::Vectors(books) => {
            let book = book(books, head);
            write_sub_codes(&codes[..book.subs() * g], book.centroids(), g, &mut record[layout.all_v_codes()]);
        }
        _ => write_panels(layout.v_bits, layout.v_panels(), g, codes, d, record),
    }
}

/// Codes 16 tokens whose channel c is `x(c)`, lane by lane as [`Grid::quantize`] does; their scales.
#[inline(always)]
fn tokens_by_grid(
    grid: &Grid,
    d: usize,
    x: impl Fn(usize) -> Lanes + Copy,
    out: impl FnMut(usize, [u8; LANES]),
) -> [f16; LANES] {
    match (grid.is_signs(), grid.bits) {
        (true, _) => signs(grid, d, x, out),
        (_, 1) => centroids::<1>(grid, d, x, out),
        (_, 2) => centroids::<3>(grid, d, x, out),
        (_, 3) => centroids::<7>(grid, d, x, out),
        _ => centroids::<15>(grid, d, x, out),
    }
}

/// The sum over the channels, lane by lane.
#[inline(always)]
fn sum(d: usize, x: impl Fn(usize) -> Lanes) -> Lanes {
    let mut parts = [[0f32; LANES]; LANES];
    for first in (0..d).step_by(LANES) {
        for (i, part) in parts.iter_mut().enumerate() {
            let x = x(first + i);
            (0..LANES).for_each(|lane| part[lane] += x[lane]);
        }
    }
    std::array::from_fn(|lane| tree(parts.map(|part| part[lane])))
}

#[inline(always)]
fn centroids<const BORDERS: usize>(
    grid: &Grid,
    d: usize,
    x: impl Fn(usize) -> Lanes + Copy,
    mut out: impl FnMut(usize, [u8; LANES]),
) -> [f16; LANES] {
    let squares = sum(d, |channel| x(channel).map(|x| x * x));
    let scales = squares.map(|square| f16::from_f32((square / d as f32).sqrt()));
    let inverses = scales.map(|scale| inverse(scale.to_f32()));
    let borders: &[f32; BORDERS] = grid.borders.first_chunk().expect("2^bits - 1 borders");
    for channel in 0..d {
        let x = x(channel);
        let mut codes = [0i32; LANES];
        let y: Lanes = std::array::from_fn(|lane| x[lane] * inverses[lane]);
        for border in borders {
            (0..LANES).for_each(|lane| codes[lane] += i32::from(y[lane] > *border));
        }
        out(channel, codes.map(|code| code as u8));
    }
    scales
}

#[inline(always)]
fn signs(
    grid: &Grid,
    d: usize,
    x: impl Fn(usize) -> Lanes + Copy,
    mut out: impl FnMut(usize, [u8; LANES]),
) -> [f16; LANES] {
    let squares = sum(d, |channel| x(channel).map(|x| x * x));
    let (middle, top) = (grid.middle, (grid.codes() - 1) as f32);
    let one_bit = grid.bits == 1;
    let step = |x: f32, inverse: f32| {
        if one_bit {
            if x > 0.0 { 1.0 } else { 0.0 }
        } else {
            // As floor and clamp, of numbers that fit an integer.
            (x * inverse + (middle + 0.5)).floor().clamp(0.0, top)
        }
    };
    let (mut best, mut product, mut chosen) = ([0f32; LANES], [0f32; LANES], [0f32; LANES]);
    let steps: &[f32] = if one_bit { &[1.0] } else { &STEPS };
    for part in steps {
        let inverses = squares.map(|square| inverse((square / d as f32).sqrt() * BEST_STEP[grid.bits as usize] * part));
        let u = |channel: usize| -> Lanes {
            let x = x(channel);
            std::array::from_fn(|lane| (step(x[lane], inverses[lane]) - middle) * grid.unit)
        };
        let along = sum(d, |channel| {
            let (u, x) = (u(channel), x(channel));
            std::array::from_fn(|lane| u[lane] * x[lane])
        });
        let length = sum(d, |channel| u(channel).map(|u| u * u));
        for lane in 0..LANES {
            let cosine = along[lane] * along[lane] / length[lane];
            if cosine > best[lane] {
                (best[lane], product[lane], chosen[lane]) = (cosine, along[lane], inverses[lane]);
            }
        }
    }
    for channel in 0..d {
        let x = x(channel);
        let code = |lane: usize| if product[lane] > 0.0 { step(x[lane], chosen[lane]) as u8 } else { 0 };
        out(channel, std::array::from_fn(code));
    }
    std::array::from_fn(|lane| {
        if product[lane] > 0.0 {
            f16::from_f32((squares[lane] / product[lane]).min(f16::MAX.to_f32()))
        } else {
            f16::ZERO
        }
    })
}

/// Codes of 16 tokens whose channel c is `x(c)`: [`Codebook::nearest`] of every sub-vector.
#[inline(always)]
fn sub_vectors(book: &Codebook, x: impl Fn(usize) -> Lanes, mut out: impl FnMut(usize, [u8; LANES])) {
    for sub in 0..book.subs() {
        let (values, half_squares) = book.values_of(sub);
        let first = sub * book.sub_len();
        let codes = match book.sub_len() {
            4 => nearest::<4>(&std::array::from_fn(|c| x(first + c)), values, half_squares),
            _ => nearest::<8>(&std::array::from_fn(|c| x(first + c)), values, half_squares),
        };
        out(sub, codes);
    }
}

/// Nearest centroids of 16 sub-vectors `[N][16]`. The best so far stays in registers; no distance is kept.
#[inline(always)]
fn nearest<const N: usize>(x: &[Lanes; N], values: &[f32], half_squares: &[f32]) -> [u8; LANES] {
    let (mut best, mut codes) = ([f32::NEG_INFINITY; LANES], [0i32; LANES]);
    for (code, (m, half)) in values.as_chunks::<N>().0.iter().zip(half_squares).enumerate() {
        let mut score = [-half; LANES];
        for (x, m) in x.iter().zip(m) {
            (0..LANES).for_each(|lane| score[lane] += x[lane] * m);
        }
        for lane in 0..LANES {
            let better = score[lane] > best[lane];
            best[lane] = if better { score[lane] } else { best[lane] };
            codes[lane] = if better { code as i32 } else { codes[lane] };
        }
    }
    codes.map(|code| code as u8)
}

/// Nearest centroids of rows `[n][len]`, for training.
#[inline(always)]
pub(super) fn assign<T: Kernel>(
    _kernel: T,
    rows: &[f32],
    len: usize,
    values: &[f32],
    half_squares: &[f32],
    codes: &mut [u8],
) {
    for (rows, codes) in rows.chunks(LANES * len).zip(codes.chunks_mut(LANES)) {
        let n = codes.len();
        let x = |c: usize| -> Lanes { std::array::from_fn(|lane| rows[lane.min(n - 1) * len + c]) };
        let found = match len {
            4 => nearest::<4>(&std::array::from_fn(x), values, half_squares),
            _ => nearest::<8>(&std::array::from_fn(x), values, half_squares),
        };
        codes.copy_from_slice(&found[..n]);
    }
}

/// Writes the keys of a record, which are not affine, as rows `[D][32]` of each block.
#[inline(always)]
pub(super) fn dequantize_keys<T: Kernel>(
    kernel: T,
    layout: &RecordLayout,
    head: usize,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    match &layout.k {
        Half::Affine => unreachable!("the caller asks for others"),
        Half::Grid(grid) => {
            let codes = read_panels(layout.k_bits, layout.k_panels(), d, record, g);
            let (levels, scales) = (numbers(grid), layout.k_scales(record));
            let scales: [f32; 128] = std::array::from_fn(|token| scales.get(token).map_or(0.0, |s| s.to_f32()));
            for (block, (k, _)) in blocks.iter_mut().enumerate() {
                for (at, out) in k.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let token = block * BLOCK_LEN + at % SETS * LANES;
                    let codes = &codes[at / SETS * g + token..][..LANES];
                    let x = std::array::from_fn(|lane| levels[codes[lane] as usize & 15] * scales[token + lane]);
                    *out = kernel.round(&clamped(x));
                }
            }
        }
        Half::Vectors(books) => {
            let book = book(books, head);
            let (code, n) = (sub_codes(&record[layout.k_codes()], book.centroids(), g), book.sub_len());
            for (block, (k, _)) in blocks.iter_mut().enumerate() {
                for (at, out) in k.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let (channel, token) = (at / SETS, block * BLOCK_LEN + at % SETS * LANES);
                    let values = book.values_of(channel / n).0;
                    let value = |lane| values[code(channel / n, token + lane) as usize * n + channel % n];
                    *out = kernel.round(&clamped(std::array::from_fn(value)));
                }
            }
        }
    }
}

/// Writes the values of a record, which are not affine, as rows `[32][D]` of each block.
#[inline(always)]
pub(super) fn dequantize_values<T: Kernel>(
    kernel: T,
    layout: &RecordLayout,
    head: usize,
    record: &[u8],
    blocks: &mut [(&mut [f16], &mut [f16])],
) {
    let (d, g) = (layout.head_dim, layout.group_len);
    let parts = d / LANES;
    match &layout.v {
        Half::Affine => unreachable!("the caller asks for others"),
        Half::Grid(grid) => {
            let codes = read_panels(layout.v_bits, layout.v_panels(), g, record, d);
            let (levels, scales) = (numbers(grid), layout.v_scales(record));
            for (block, (_, v)) in blocks.iter_mut().enumerate() {
                for (at, out) in v.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let token = block * BLOCK_LEN + at / parts;
                    let codes = &codes[token * d + at % parts * LANES..][..LANES];
                    let scale = scales[token].to_f32();
                    let x = std::array::from_fn(|lane| levels[codes[lane] as usize & 15] * scale);
                    *out = kernel.round(&clamped(x));
                }
            }
        }
        Half::Vectors(books) => {
            let book = book(books, head);
            let (code, n) = (sub_codes(&record[layout.all_v_codes()], book.centroids(), g), book.sub_len());
            for (block, (_, v)) in blocks.iter_mut().enumerate() {
                for (at, out) in v.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    let (token, first) = (block * BLOCK_LEN + at / parts, at % parts * LANES);
                    let mut x = [0.0; LANES];
                    for (i, x) in x.chunks_exact_mut(n).enumerate() {
                        let sub = first / n + i;
                        x.copy_from_slice(&book.values_of(sub).0[code(sub, token) as usize * n..][..n]);
                    }
                    *out = kernel.round(&clamped(x));
                }
            }
        }
    }
}

/// What a grid's codes stand for, but for the scale.
fn numbers(grid: &Grid) -> [f32; MAX_LEVELS] {
    std::array::from_fn(|code| (f32::from(grid.level(code as u8)) - grid.middle) * grid.unit)
}

/// The largest rows can come back a little larger than f16 goes.
#[inline(always)]
fn clamped(x: Lanes) -> Lanes {
    let largest = f16::MAX.to_f32();
    x.map(|x| x.clamp(-largest, largest))
}
