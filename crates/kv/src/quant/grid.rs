//! Grids: codes of one number each, with one scale per row. In: a row; out: its scale and codes, and back.
//!
//! A grid has levels 0..=255 (a code's own number where there is no table), a middle and a unit:
//! `x_hat = scale * unit * (level[code] - middle)`. Levels are integers because kernels multiply bytes.
//!
//! - Rotated codebooks (TurboQuant, arXiv 2504.19874, and RVQ): scale = f16(root mean square of the row), code = the nearest
//!   centroid of `x / scale`. The paper normalizes by the length and takes centroids of N(0, 1/head_dim): the same numbers, in a
//!   range where f16 is precise. What a rotation does stands outside: rows are rotated by whoever writes them.
//! - Sign bits (RaBitQ, SIGMOD 2024, and its extension, arXiv 2409.09913): codes are `u = unit * (code - middle)` with equal
//!   steps, scale = f16(|x|^2 / <u, x>), which makes `<q, x_hat>` unbiased over rotations. With 1 bit u is the sign; with more the step is
//!   searched among eight for the largest cosine of u and x, where the paper looks at every step that changes a code.
//!
//! Sums over a row are 16 partial sums by channel mod 16, added up as a tree by halves, in f32: the same on every machine.
//! NOT here: where codes lie (cache/layout.rs, pack.rs), vector code that writes the same bytes (append/cpu/coded.rs).

use super::levels::{self, Levels};
use crate::codec::Codec;
use half::f16;

/// Most codes of a grid.
pub(crate) const MAX_LEVELS: usize = 16;
/// Steps tried for codes of 2, 3 and 4 bits, as parts of [`BEST_STEP`].
pub(crate) const STEPS: [f32; 8] = [0.72, 0.81, 0.88, 0.94, 1.0, 1.07, 1.16, 1.28];
/// The best step for a normal distribution, in standard deviations, by bits (1 bit has none).
pub(crate) const BEST_STEP: [f32; 5] = [0.0, 0.0, 0.9957, 0.586, 0.3352];

/// How one number of a row becomes a code.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Grid {
    pub bits: u32,
    /// Levels of the codes; None: the codes themselves.
    pub table: Option<[u8; MAX_LEVELS]>,
    pub middle: f32,
    pub unit: f32,
    /// Between the centroids of neighbouring codes, in scales; the first `2^bits - 1`. Empty for sign bits.
    pub borders: [f32; MAX_LEVELS - 1],
}

impl Grid {
    /// The grid of a codec, if it has one.
    pub(crate) fn of(codec: Codec) -> Option<Self> {
        let book = match codec {
            Codec::Affine { .. } | Codec::Vector { .. } => return None,
            Codec::Sign { bits } => {
                let middle = ((1 << bits) - 1) as f32 / 2.0;
                // Signs are -1 and 1, so that the scale of the largest rows is still an f16.
                let unit = if bits == 1 { 2.0 } else { 1.0 };
                return Some(Self { bits, table: None, middle, unit, borders: [0.0; MAX_LEVELS - 1] });
            }
            Codec::Turbo { bits: 1 } => levels::LLOYD_1,
            Codec::Turbo { bits: 2 } => levels::LLOYD_2,
            Codec::Turbo { bits: 3 } => levels::LLOYD_3,
            Codec::Turbo { .. } => levels::LLOYD_4,
            Codec::Residual { first: 1, .. } => levels::RESIDUAL_1_1,
            Codec::Residual { second: 1, .. } => levels::RESIDUAL_2_1,
            Codec::Residual { .. } => levels::RESIDUAL_2_2,
        };
        Some(Self::of_levels(&book))
    }

    fn of_levels(book: &Levels) -> Self {
        const MIDDLE: f32 = 127.5;
        let n = book.levels.len();
        let mut table = [0; MAX_LEVELS];
        table[..n].copy_from_slice(book.levels);
        let mut borders = [0.0; MAX_LEVELS - 1];
        for (border, pair) in borders.iter_mut().zip(book.levels.windows(2)) {
            *border = ((f32::from(pair[0]) + f32::from(pair[1])) / 2.0 - MIDDLE) * book.unit;
        }
        Self { bits: n.ilog2(), table: Some(table), middle: MIDDLE, unit: book.unit, borders }
    }

    /// Codes there are.
    #[cfg(test)]
    pub(crate) fn codes(&self) -> usize {
        1 << self.bits
    }

    /// Whether codes are steps of sign bits.
    pub(crate) fn is_signs(&self) -> bool {
        self.table.is_none()
    }

    /// The level of a code.
    pub(crate) fn level(&self, code: u8) -> u8 {
        self.table.map_or(code, |table| table[code as usize])
    }

    /// What a code stands for.
    pub(crate) fn dequantize(&self, scale: f16, code: u8) -> f32 {
        (f32::from(self.level(code)) - self.middle) * self.unit * scale.to_f32()
    }

    /// Codes a row of finite f16 numbers: writes them, gives the scale. Its length is a multiple of 16.
    #[cfg(test)]
    pub(crate) fn quantize(&self, row: &[f32], codes: &mut [u8]) -> f16 {
        if self.is_signs() { self.signs(row, codes) } else { self.centroids(row, codes) }
    }

    #[cfg(test)]
    fn centroids(&self, row: &[f32], codes: &mut [u8]) -> f16 {
        let scale = f16::from_f32((sum(row.iter().map(|x| x * x)) / row.len() as f32).sqrt());
        let inverse = inverse(scale.to_f32());
        let borders = &self.borders[..self.codes() - 1];
        for (x, code) in row.iter().zip(codes) {
            let y = x * inverse;
            *code = borders.iter().map(|&border| u8::from(y > border)).sum();
        }
        scale
    }

    #[cfg(test)]
    fn signs(&self, row: &[f32], codes: &mut [u8]) -> f16 {
        let square = sum(row.iter().map(|x| x * x));
        let deviation = (square / row.len() as f32).sqrt();
        let (mut best, mut product) = (0.0, 0.0);
        let steps: &[f32] = if self.bits == 1 { &[1.0] } else { &STEPS };
        for step in steps {
            let inverse = inverse(deviation * BEST_STEP[self.bits as usize] * step);
            let u = |x: f32| (self.step_of(x, inverse) - self.middle) * self.unit;
            let along = sum(row.iter().map(|&x| u(x) * x));
            let length = sum(row.iter().map(|&x| u(x) * u(x)));
            // The squared cosine, but for the row's own length.
            let cosine = along * along / length;
            if cosine > best {
                (best, product) = (cosine, along);
                codes.iter_mut().zip(row).for_each(|(code, &x)| *code = self.step_of(x, inverse) as u8);
            }
        }
        if product > 0.0 {
            f16::from_f32((square / product).min(f16::MAX.to_f32()))
        } else {
            codes.fill(0);
            f16::ZERO
        }
    }

    /// The code of a number under sign bits, as a number.
    #[cfg(test)]
    fn step_of(&self, x: f32, inverse: f32) -> f32 {
        if self.bits == 1 {
            return if x > 0.0 { 1.0 } else { 0.0 };
        }
        let top = (self.codes() - 1) as f32;
        (x * inverse + self.middle).clamp(0.0, top).round_ties_even()
    }
}

/// `1/x`, 0 for 0.
pub(crate) fn inverse(x: f32) -> f32 {
    if x > 0.0 { 1.0 / x } else { 0.0 }
}

/// The sum of numbers whose count is a multiple of 16: see above.
#[cfg(test)]
fn sum(x: impl Iterator<Item = f32>) -> f32 {
    let mut parts = [0.0f32; 16];
    x.enumerate().for_each(|(i, x)| parts[i % 16] += x);
    tree(parts)
}

/// 16 partial sums, added up by halves.
#[cfg(test)]
fn tree(mut parts: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            parts[i] += parts[i + half];
        }
    }
    parts[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Normal numbers as f16 holds them: sums of 12 even ones would lack the tails, so Box and Muller.
    fn normals(n: usize) -> Vec<f32> {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        let mut even = || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            ((state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        let mut normal = || ((-2.0 * even().ln()).sqrt() * (std::f64::consts::TAU * even()).cos()) as f32;
        (0..n).map(|_| f16::from_f32(normal()).to_f32()).collect()
    }

    fn distortion(grid: &Grid, d: usize, rows: usize) -> f64 {
        let mut codes = vec![0; d];
        let (mut error, mut size) = (0.0, 0.0);
        for row in normals(d * rows).chunks_exact(d) {
            let scale = grid.quantize(row, &mut codes);
            for (&x, &code) in row.iter().zip(&codes) {
                error += f64::from(grid.dequantize(scale, code) - x).powi(2);
                size += f64::from(x).powi(2);
            }
        }
        error / size
    }

    #[test]
    fn distortions_are_those_of_lloyd_and_max() {
        for (bits, published) in [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)] {
            let grid = Grid::of(Codec::Turbo { bits }).unwrap();
            let got = distortion(&grid, 128, 20_000);
            assert!((got / published - 1.0).abs() < 0.02, "{bits} bits: {got}, published {published}");
        }
    }

    #[test]
    fn a_second_stage_gains_less_than_a_finer_grid() {
        let of = |codec| distortion(&Grid::of(codec).unwrap(), 128, 4000);
        let turbo = |bits| of(Codec::Turbo { bits });
        for (first, second) in crate::codec::STAGES {
            let both = of(Codec::Residual { first, second });
            assert!(both < turbo(first) * 0.5 && both > turbo(first + second), "{first}+{second}: {both}");
        }
    }

    /// Products of a fixed query with rows turned at random: their mean error is none, their spread what the paper says.
    #[test]
    fn products_with_sign_bits_are_unbiased_and_bounded() {
        let d = 128;
        let mut worst: f64 = 0.0;
        for bits in crate::codec::GRID_BITS {
            let grid = Grid::of(Codec::Sign { bits }).unwrap();
            let mut codes = vec![0; d];
            // Rows of independent normal numbers are directions at random; so is a query beside them.
            let numbers = normals(2 * d * 100_000);
            let (mut total, mut squares, mut bound, pairs) = (0.0, 0.0, 0.0, 100_000.0);
            for pair in numbers.chunks_exact(2 * d) {
                let (x, q) = pair.split_at(d);
                let scale = grid.quantize(x, &mut codes);
                let dot = |f: &dyn Fn(usize) -> f32| (0..d).map(|i| f64::from(f(i)) * f64::from(q[i])).sum::<f64>();
                let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let error = (dot(&|i| grid.dequantize(scale, codes[i])) - dot(&|i| x[i])) / (norm(x) * norm(q));
                let hat: Vec<f32> = codes.iter().map(|&c| grid.dequantize(scale, c)).collect();
                let cosine = hat.iter().zip(x).map(|(a, b)| f64::from(a * b)).sum::<f64>() / (norm(&hat) * norm(x));
                total += error;
                squares += error * error;
                // Theorem 3.2: within sqrt((1 - c^2) / c^2) * e0 / sqrt(D - 1) but for 2 exp(-c0 e0^2); e0 = 1 is one deviation.
                bound += (1.0 - cosine * cosine) / (cosine * cosine) / (d as f64 - 1.0);
            }
            let deviation = (squares / pairs).sqrt();
            let off = (total / pairs).abs() / (deviation / pairs.sqrt());
            println!("{bits} bits: off by {off:.2} standard errors, deviation {deviation:.5}");
            assert!(off < 3.0, "{bits} bits: {off} standard errors");
            worst = worst.max(squares / bound);
        }
        assert!(worst < 1.05, "{worst} times the paper's variance");
    }

    #[test]
    fn rows_of_nothing_and_of_extremes_come_back_finite() {
        for codec in [Codec::Turbo { bits: 3 }, Codec::Sign { bits: 1 }, Codec::Sign { bits: 4 }] {
            let grid = Grid::of(codec).unwrap();
            let mut codes = vec![7; 64];
            let scale = grid.quantize(&[0.0; 64], &mut codes);
            assert!(codes.iter().all(|&c| grid.dequantize(scale, c) == 0.0), "{codec}");
            for size in [65504.0, 6e-8, 1.0] {
                let row: Vec<f32> = (0..64).map(|i| if i % 3 == 0 { size } else { -size }).collect();
                let scale = grid.quantize(&row, &mut codes);
                for (&c, &x) in codes.iter().zip(&row) {
                    let hat = grid.dequantize(scale, c);
                    assert!(hat.is_finite() && (hat == 0.0 || hat.signum() == x.signum()), "{codec} {size}: {hat}");
                }
            }
        }
    }
}
