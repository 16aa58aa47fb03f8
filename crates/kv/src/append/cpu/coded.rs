//! Halves of records whose codec is a grid or sub-vectors, written once for every instruction set. In: f16 blocks; out: scales
//! and codes, as quant/grid.rs and quant/codebook.rs say them, to the bit; and back.
//!
//! 16 numbers at once: of keys those of 16 tokens, of values 16 channels. Sums are added in the same order everywhere.
//! NOT here: groups with scale and zero (generic.rs, fitting.rs, dequantize.rs).

use super::generic::{Kernel, LANES, SETS, panel_lines};
use crate::append::record::read_panels;
use crate::cache::layout::{BLOCK_LEN, Half, RecordLayout, book};
use crate::quant::codebook::Codebook;
use crate::quant::grid::{BEST_STEP, Grid, MAX_LEVELS, STEPS, inverse};
use crate::quant::pack::{LINE, QUAD, sub_codes, write_sub_codes};
use half::f16;

/// 16 numbers.
type Lanes = [f32; LANES];
/// Most channels of a head.
const MAX_DIM: usize = 256;
/// Most codes of sub-vectors of half a record.
const MAX_SUBS: usize = 128 * MAX_DIM / 4;
/// Below every border: code 0.
const NOWHERE: f32 = -1e30;

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
    match &layout.k {
        Half::Groups => unreachable!("the caller asks for others"),
        Half::Grid(grid) => match grid.bits {
            1 => grid_keys::<T, 1>(kernel, grid, layout, blocks, sinks, record),
            2 => grid_keys::<T, 2>(kernel, grid, layout, blocks, sinks, record),
            3 => grid_keys::<T, 3>(kernel, grid, layout, blocks, sinks, record),
            _ => grid_keys::<T, 4>(kernel, grid, layout, blocks, sinks, record),
        },
        Half::Vectors(books) => {
            let (book, g) = (book(books, head), layout.group_len);
            let mut codes = [0u8; MAX_SUBS];
            let codes = &mut codes[..book.subs() * g];
            for token in (0..g).step_by(LANES) {
                let rows = blocks[token / BLOCK_LEN].0.as_chunks::<LANES>().0;
                let set = token % BLOCK_LEN / LANES;
                let x = |channel: usize| kernel.store(kernel.load(&rows[channel * SETS + set]));
                sub_vectors(book, x, |sub, row| codes[sub * g + token..][..LANES].copy_from_slice(&row));
            }
            forget(codes, g, sinks);
            write_sub_codes(codes, book.centroids(), g, &mut record[layout.k_codes()]);
        }
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
    match &layout.v {
        Half::Groups => unreachable!("the caller asks for others"),
        Half::Grid(grid) => match grid.bits {
            1 => grid_values::<T, 1>(kernel, grid, layout, blocks, sinks, record),
            2 => grid_values::<T, 2>(kernel, grid, layout, blocks, sinks, record),
            3 => grid_values::<T, 3>(kernel, grid, layout, blocks, sinks, record),
            _ => grid_values::<T, 4>(kernel, grid, layout, blocks, sinks, record),
        },
        Half::Vectors(books) => {
            let (book, d, g) = (book(books, head), layout.head_dim, layout.group_len);
            let mut codes = [0u8; MAX_SUBS];
            let codes = &mut codes[..book.subs() * g];
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
                sub_vectors(
                    book,
                    |channel| tile[channel],
                    |sub, row| {
                        codes[sub * g + token..][..LANES].copy_from_slice(&row);
                    },
                );
            }
            forget(codes, g, sinks);
            write_sub_codes(codes, book.centroids(), g, &mut record[layout.all_v_codes()]);
        }
    }
}

/// Codes `[subs][G]` of sinks are 0.
fn forget(codes: &mut [u8], group_len: usize, sinks: usize) {
    codes.chunks_exact_mut(group_len).for_each(|row| row[..sinks].fill(0));
}

/// How 16 rows are coded: numbers become `x * factor + offset`, and codes are how many borders lie below.
struct Fits {
    scales: [f16; LANES],
    factors: Lanes,
    offsets: Lanes,
}

impl Fits {
    /// Of rows of these sums of squares, where codes are the nearest centroids.
    #[inline(always)]
    fn of_centroids(squares: &Lanes, d: usize) -> Self {
        let scales = squares.map(|square| f16::from_f32((square / d as f32).sqrt()));
        let factors = scales.map(|scale| inverse(scale.to_f32()));
        Self { scales, factors, offsets: [0.0; LANES] }
    }

    /// Rows of nothing and sinks: scale and codes 0.
    #[inline(always)]
    fn forget(&mut self, row: usize) {
        (self.scales[row], self.factors[row], self.offsets[row]) = (f16::ZERO, 0.0, NOWHERE);
    }
}

/// The largest cosines of 16 rows so far, by step.
struct Cosines {
    best: Lanes,
    product: Lanes,
    factors: Lanes,
}

impl Cosines {
    const NONE: Self = Self { best: [0.0; LANES], product: [0.0; LANES], factors: [0.0; LANES] };

    #[inline(always)]
    fn steps(grid: &Grid) -> &'static [f32] {
        if grid.bits == 1 { &[1.0] } else { &STEPS }
    }

    /// What numbers are multiplied with to be counted in steps.
    #[inline(always)]
    fn factors(grid: &Grid, squares: &Lanes, d: usize, step: f32) -> Lanes {
        squares.map(|square| inverse((square / d as f32).sqrt() * BEST_STEP[grid.bits as usize] * step))
    }

    #[inline(always)]
    fn offer(&mut self, factors: &Lanes, along: &Lanes, length: &Lanes) {
        for row in 0..LANES {
            let cosine = along[row] * along[row] / length[row];
            if cosine > self.best[row] {
                (self.best[row], self.product[row], self.factors[row]) = (cosine, along[row], factors[row]);
            }
        }
    }

    #[inline(always)]
    fn fits(&self, grid: &Grid, squares: &Lanes) -> Fits {
        let largest = f16::MAX.to_f32();
        let scales = std::array::from_fn(|i| f16::from_f32((squares[i] / self.product[i]).min(largest)));
        let (factors, offset) = if grid.bits == 1 { ([1.0; LANES], 0.0) } else { (self.factors, grid.middle) };
        let mut fits = Fits { scales, factors, offsets: [offset; LANES] };
        (0..LANES).filter(|&i| self.product[i] <= 0.0).for_each(|i| fits.forget(i));
        fits
    }
}

/// Where the codes of a grid begin, in numbers as [`Fits`] make them.
#[inline(always)]
fn borders<const BITS: usize>(grid: &Grid) -> [f32; MAX_LEVELS - 1] {
    match (grid.is_signs(), BITS) {
        (false, _) => grid.borders,
        (true, 1) => [0.0; MAX_LEVELS - 1],
        // Of whole steps, which [`steps`] makes.
        _ => std::array::from_fn(|i| i as f32 + 0.5),
    }
}

/// Numbers, ready to be compared with [`borders`]: whole steps where those of sign bits are.
#[inline(always)]
fn places<T: Kernel, const BITS: usize>(
    kernel: T,
    grid: &Grid,
    x: T::Lanes,
    factor: T::Lanes,
    offset: T::Lanes,
) -> T::Lanes {
    let y = kernel.add(kernel.mul(x, factor), offset);
    if grid.is_signs() && BITS > 1 { steps::<T, BITS>(kernel, y) } else { y }
}

#[inline(always)]
fn steps<T: Kernel, const BITS: usize>(kernel: T, y: T::Lanes) -> T::Lanes {
    let top = kernel.splat(((1u32 << BITS) - 1) as f32);
    kernel.integer(kernel.min(kernel.max(y, kernel.splat(0.0)), top))
}

/// What a number counts as under sign bits.
#[inline(always)]
fn unit<T: Kernel, const BITS: usize>(kernel: T, grid: &Grid, x: T::Lanes, factor: T::Lanes) -> T::Lanes {
    let middle = kernel.splat(grid.middle);
    if BITS == 1 {
        // -1 or 1: a number above 0 is as far above as the largest step.
        let far = kernel.mul(kernel.mul(x, kernel.splat(1e38)), kernel.splat(1e38));
        let zero_or_one = kernel.min(kernel.max(far, kernel.splat(0.0)), kernel.splat(1.0));
        return kernel.mul(kernel.sub(zero_or_one, middle), kernel.splat(grid.unit));
    }
    kernel.sub(steps::<T, BITS>(kernel, kernel.add(kernel.mul(x, factor), middle)), middle)
}

/// Keys under a grid: 16 tokens at once, one per lane.
#[inline(always)]
fn grid_keys<T: Kernel, const BITS: usize>(
    kernel: T,
    grid: &Grid,
    layout: &RecordLayout,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    let d = layout.head_dim;
    let borders = &borders::<BITS>(grid)[..(1 << BITS) - 1];
    for ((block, panel), first) in blocks.iter().zip(layout.k_panels()).zip((0..).step_by(BLOCK_LEN)) {
        let rows = block.0.as_chunks::<LANES>().0;
        assert_eq!(rows.len(), d * SETS);
        let mut fits = [const { None }; SETS];
        for (set, out) in fits.iter_mut().enumerate() {
            let squares = kernel.store(sum_of_channels(kernel, d, |channel| {
                let x = kernel.load(&rows[channel * SETS + set]);
                kernel.mul(x, x)
            }));
            let mut fit = if grid.is_signs() {
                let mut cosines = Cosines::NONE;
                for step in Cosines::steps(grid) {
                    let factors = Cosines::factors(grid, &squares, d, *step);
                    let factor = kernel.lanes(&factors);
                    let along = sum_of_channels(kernel, d, |channel| {
                        let x = kernel.load(&rows[channel * SETS + set]);
                        kernel.mul(unit::<T, BITS>(kernel, grid, x, factor), x)
                    });
                    let length = sum_of_channels(kernel, d, |channel| {
                        let x = kernel.load(&rows[channel * SETS + set]);
                        let u = unit::<T, BITS>(kernel, grid, x, factor);
                        kernel.mul(u, u)
                    });
                    cosines.offer(&factors, &kernel.store(along), &kernel.store(length));
                }
                cosines.fits(grid, &squares)
            } else {
                Fits::of_centroids(&squares, d)
            };
            let token = first + set * LANES;
            (0..sinks.saturating_sub(token).min(LANES)).for_each(|i| fit.forget(i));
            layout.k_scales_mut(record)[token..][..LANES].copy_from_slice(&fit.scales);
            *out = Some((kernel.lanes(&fit.factors), kernel.lanes(&fit.offsets)));
        }
        let fits = fits.map(|fit| fit.expect("every set was fitted"));
        panel_lines::<T, BITS, SETS>(kernel, &mut record[panel.bytes], |quad, set| {
            let rows = &rows[quad * QUAD * SETS + set..][..3 * SETS + 1];
            let (factor, offset) = fits[set];
            let rows = [
                places::<T, BITS>(kernel, grid, kernel.load(&rows[0]), factor, offset),
                places::<T, BITS>(kernel, grid, kernel.load(&rows[SETS]), factor, offset),
                places::<T, BITS>(kernel, grid, kernel.load(&rows[2 * SETS]), factor, offset),
                places::<T, BITS>(kernel, grid, kernel.load(&rows[3 * SETS]), factor, offset),
            ];
            kernel.count(&rows, borders)
        });
    }
}

/// The sum over the channels, lane by lane, in the order that quant/grid.rs says.
#[inline(always)]
fn sum_of_channels<T: Kernel>(kernel: T, d: usize, x: impl Fn(usize) -> T::Lanes) -> T::Lanes {
    let mut parts = [kernel.splat(0.0); LANES];
    for first in (0..d).step_by(LANES) {
        for (i, part) in parts.iter_mut().enumerate() {
            *part = kernel.add(*part, x(first + i));
        }
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            parts[i] = kernel.add(parts[i], parts[i + half]);
        }
    }
    parts[0]
}

/// Values under a grid: 16 channels of a token at once.
#[inline(always)]
fn grid_values<T: Kernel, const BITS: usize>(
    kernel: T,
    grid: &Grid,
    layout: &RecordLayout,
    blocks: &[(&[f16], &[f16])],
    sinks: usize,
    record: &mut [u8],
) {
    let (d, stride) = (layout.head_dim, layout.head_dim / LANES);
    let borders = &borders::<BITS>(grid)[..(1 << BITS) - 1];
    for ((_, v), first) in blocks.iter().zip((0..).step_by(BLOCK_LEN)) {
        let rows = v.as_chunks::<LANES>().0;
        assert_eq!(rows.len(), BLOCK_LEN * stride);
        let (mut factors, mut offsets) = ([0f32; BLOCK_LEN], [0f32; BLOCK_LEN]);
        for half in (0..BLOCK_LEN).step_by(LANES) {
            let squares = {
                let mut sums = [kernel.splat(0.0); LANES];
                for (i, sum) in sums.iter_mut().enumerate() {
                    for x in &rows[(half + i) * stride..][..stride] {
                        let x = kernel.load(x);
                        *sum = kernel.add(*sum, kernel.mul(x, x));
                    }
                }
                kernel.store(kernel.sum_of_each(&sums))
            };
            let mut fit = if grid.is_signs() {
                let mut cosines = Cosines::NONE;
                for step in Cosines::steps(grid) {
                    let factors = Cosines::factors(grid, &squares, d, *step);
                    let (mut along, mut length) = ([kernel.splat(0.0); LANES], [kernel.splat(0.0); LANES]);
                    for i in 0..LANES {
                        let factor = kernel.splat(factors[i]);
                        for x in &rows[(half + i) * stride..][..stride] {
                            let x = kernel.load(x);
                            let u = unit::<T, BITS>(kernel, grid, x, factor);
                            along[i] = kernel.add(along[i], kernel.mul(u, x));
                            length[i] = kernel.add(length[i], kernel.mul(u, u));
                        }
                    }
                    let along = kernel.store(kernel.sum_of_each(&along));
                    cosines.offer(&factors, &along, &kernel.store(kernel.sum_of_each(&length)));
                }
                cosines.fits(grid, &squares)
            } else {
                Fits::of_centroids(&squares, d)
            };
            let token = first + half;
            (0..sinks.saturating_sub(token).min(LANES)).for_each(|i| fit.forget(i));
            layout.v_scales_mut(record)[token..][..LANES].copy_from_slice(&fit.scales);
            factors[half..][..LANES].copy_from_slice(&fit.factors);
            offsets[half..][..LANES].copy_from_slice(&fit.offsets);
        }
        for panel in layout.v_panels() {
            let (from, sets) = (panel.first_lane / LANES, panel.lanes / LANES);
            let block = first / BLOCK_LEN;
            let lines = &mut record[panel.bytes][block * BITS * LINE * sets..][..BITS * LINE * sets];
            // One closure for each call: what is called twice is not inlined, and only inlined code has the instructions.
            if sets == SETS {
                panel_lines::<T, BITS, SETS>(kernel, lines, |quad, set| {
                    let rows = &rows[quad * QUAD * stride + from + set..];
                    value_slot::<T, BITS>(kernel, grid, rows, stride, &factors, &offsets, quad, borders)
                });
            } else {
                panel_lines::<T, BITS, 1>(kernel, lines, |quad, set| {
                    let rows = &rows[quad * QUAD * stride + from + set..];
                    value_slot::<T, BITS>(kernel, grid, rows, stride, &factors, &offsets, quad, borders)
                });
            }
        }
    }
}

/// Codes of 16 channels of the four tokens of a quad; token t begins at `rows[t * stride]`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn value_slot<T: Kernel, const BITS: usize>(
    kernel: T,
    grid: &Grid,
    rows: &[[f16; LANES]],
    stride: usize,
    factors: &[f32; BLOCK_LEN],
    offsets: &[f32; BLOCK_LEN],
    quad: usize,
    borders: &[f32],
) -> T::Slot {
    let factors: &[f32; QUAD] = factors[quad * QUAD..].first_chunk().expect("whole quads");
    let offsets: &[f32; QUAD] = offsets[quad * QUAD..].first_chunk().expect("whole quads");
    let mut places = [kernel.splat(0.0); QUAD];
    for (i, out) in places.iter_mut().enumerate() {
        let (factor, offset) = (kernel.splat(factors[i]), kernel.splat(offsets[i]));
        *out = self::places::<T, BITS>(kernel, grid, kernel.load(&rows[i * stride]), factor, offset);
    }
    kernel.count(&places, borders)
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
        Half::Groups => unreachable!("the caller asks for others"),
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
        Half::Groups => unreachable!("the caller asks for others"),
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
