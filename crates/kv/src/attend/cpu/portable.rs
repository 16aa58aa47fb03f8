//! Portable kernel: plain f32 arithmetic on arrays, which compilers turn into whatever vectors the target has.
//! Accuracy: f32 sums in a fixed order; relative error about 1e-6 over records, limited by f32.
//! NOT here: instruction sets; the loop (generic.rs).

use super::kernel::{Kernel, Lanes, MAX_FOLD, Panels, Sums, Vectors};
use crate::element::Element;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Needs nothing.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Kernel for Portable {
    type Vectors = Self;
    const VECTORS: usize = 4;

    fn vectors(self) -> Self {
        self
    }

    fn panels<const H: usize>(
        self,
        panels: Panels<'_>,
        _ready: &[u8],
        folded: &[[f32; MAX_FOLD]; H],
        out: &mut [f32],
        stride: usize,
        _sums: &mut Sums,
    ) {
        panels.check::<H>(out, stride);
        for (codes, first, lanes, _) in panels.each() {
            panel(panels.bits, codes, lanes, folded, &mut out[first..], stride);
        }
    }
}

impl Vectors for Portable {
    type Folded<const H: usize> = [[f32; MAX_FOLD]; H];

    fn folded<const H: usize>(self) -> Self::Folded<H> {
        [[0.0; MAX_FOLD]; H]
    }

    fn fold<const H: usize>(
        self,
        x: &[f32],
        stride: usize,
        scales: &[f16],
        _bound: &[f32; H],
        folded: &mut Self::Folded<H>,
        at: usize,
    ) {
        let n = scales.len();
        let mut s = [0.0; MAX_FOLD];
        scales.convert_to_f32_slice(&mut s[..n]);
        for (h, folded) in folded.iter_mut().enumerate() {
            let x = &x[h * stride..][..n];
            (0..n).for_each(|i| folded[at + i] = x[i] * s[i]);
        }
    }

    // f32 multipliers need no bounds.
    fn largest(self, _y: &[f16]) -> f32 {
        0.0
    }

    fn raise(self, _top: &mut [f32], _y: &[f16]) {}

    fn bound<const H: usize>(self, _x: &[f32], _stride: usize, _top: &[f32]) -> [f32; H] {
        [0.0; H]
    }

    fn dot<const H: usize>(self, x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
        let n = y.len();
        let mut numbers = [0.0; MAX_FOLD];
        y.convert_to_f32_slice(&mut numbers[..n]);
        for (h, sums) in sums.iter_mut().enumerate() {
            for (x, y) in x[h * stride..][..n].chunks_exact(SLOT_LANES).zip(numbers.chunks_exact(SLOT_LANES)) {
                (0..SLOT_LANES).for_each(|t| sums.0[t] += x[t] * y[t]);
            }
        }
    }

    fn plain_scores<E: Element, const H: usize>(
        self,
        q: &[f32],
        head_dim: usize,
        k: &[E],
        out: &mut [f32],
        stride: usize,
        _prefetch: *const u8,
    ) {
        let mut acc = [[0.0f32; PANEL_LANES]; H];
        let mut row = [0.0; PANEL_LANES];
        for (channel, k) in k.chunks_exact(PANEL_LANES).enumerate() {
            E::widen_row(k, &mut row);
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = q[h * head_dim + channel];
                (0..PANEL_LANES).for_each(|t| acc[t] += x * row[t]);
            }
        }
        (0..H).for_each(|h| out[h * stride..][..PANEL_LANES].copy_from_slice(&acc[h]));
    }

    fn plain_values<E: Element, const H: usize>(
        self,
        p: &[f32],
        stride: usize,
        v: &[E],
        head_dim: usize,
        out: &mut [f32],
        _prefetch: *const u8,
    ) {
        let mut row = [0.0; MAX_FOLD];
        for (token, v) in v.chunks_exact(head_dim).enumerate() {
            E::widen_row(v, &mut row[..head_dim]);
            for h in 0..H {
                let x = p[h * stride + token];
                let out = &mut out[h * MAX_FOLD..][..head_dim];
                out.iter_mut().zip(&row).for_each(|(out, v)| *out += x * v);
            }
        }
    }

    fn widen(self, y: &[f16], out: &mut [f32]) {
        out.iter_mut().zip(y).for_each(|(out, y)| *out = y.to_f32());
    }

    fn prefetch(self, _from: *const u8, _bytes: usize) {}

    fn max(self, scores: &[f32]) -> f32 {
        let mut top = [f32::NEG_INFINITY; SLOT_LANES];
        for s in scores.chunks_exact(SLOT_LANES) {
            (0..SLOT_LANES).for_each(|t| top[t] = if s[t] > top[t] { s[t] } else { top[t] });
        }
        top.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    fn exp(self, scores: &mut [f32], max: f32, sum: &mut Lanes) {
        for s in scores.chunks_exact_mut(SLOT_LANES) {
            for t in 0..SLOT_LANES {
                s[t] = exp(s[t] - max);
                sum.0[t] += s[t];
            }
        }
    }
}

/// `out[h][lane] += sum over rows of folded[h][row] * code[row][lane]` for one panel.
fn panel<const H: usize>(
    bits: u32,
    codes: &[u8],
    lanes: usize,
    folded: &[[f32; MAX_FOLD]; H],
    out: &mut [f32],
    stride: usize,
) {
    let sets = lanes / SLOT_LANES;
    let mut acc = [[[0.0f32; SLOT_LANES]; PANEL_LANES / SLOT_LANES]; H];
    for_each_slot(bits, codes, |slot, words| {
        let (quad, set) = (slot / sets, slot % sets);
        for j in 0..QUAD {
            let code: [f32; SLOT_LANES] = std::array::from_fn(|t| (words[t] >> (8 * j) & 0xff) as i32 as f32);
            for (acc, folded) in acc.iter_mut().zip(folded) {
                let x = folded[quad * QUAD + j];
                (0..SLOT_LANES).for_each(|t| acc[set][t] += x * code[t]);
            }
        }
    });
    for (h, acc) in acc.iter().enumerate() {
        let out = &mut out[h * stride..][..lanes];
        out.iter_mut().zip(acc.as_flattened()).for_each(|(out, a)| *out += a);
    }
}

/// Below this argument f32 has no normal exp; there the result is 0.
pub(super) const MIN_EXP: f32 = -87.0;
/// Coefficients of 2^f on [-0.5, 0.5], highest power first: a minimax fit of degree 5 that is exact at 0 (relative error
/// 2e-7 with f32 coefficients, by iteratively reweighted least squares).
#[allow(clippy::approx_constant)] // fitted: ln 2 itself is a worse coefficient here
pub(super) const EXP2: [f32; 6] = [0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1.0];

/// exp(x) for x <= 0: `2^n * 2^f` with `n = rint(x*log2(e))`.
fn exp(x: f32) -> f32 {
    // Adding 1.5*2^23 rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let y = (if x > MIN_EXP { x } else { MIN_EXP }) * std::f32::consts::LOG2_E;
    let rounded = y + ROUND;
    let f = y - (rounded - ROUND);
    let p = EXP2.into_iter().fold(0.0, |p, c| p * f + c);
    let power = f32::from_bits(rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x >= MIN_EXP {
        p * power
    } else if x.is_nan() {
        x
    } else {
        0.0
    }
}

/// Calls `f(slot, words)` for every slot of a panel; byte j of word t is the code of lane t in row j of the quad.
fn for_each_slot(bits: u32, codes: &[u8], mut f: impl FnMut(usize, &[u32; SLOT_LANES])) {
    let words = |line: &[u8]| -> [u32; SLOT_LANES] {
        std::array::from_fn(|t| u32::from_le_bytes([line[4 * t], line[4 * t + 1], line[4 * t + 2], line[4 * t + 3]]))
    };
    let each = |bytes: u32| bytes * 0x0101_0101;
    match bits {
        8 => codes.chunks_exact(LINE).enumerate().for_each(|(i, line)| f(i, &words(line))),
        4 | 2 => {
            let fields = 8 / bits as usize;
            let mask = each((1 << bits) - 1);
            for (i, line) in codes.chunks_exact(LINE).enumerate() {
                let w = words(line);
                (0..fields).for_each(|j| f(i * fields + j, &w.map(|w| w >> (bits as usize * j) & mask)));
            }
        }
        _ => {
            for (i, lines) in codes.chunks_exact(3 * LINE).enumerate() {
                let w: [_; 3] = std::array::from_fn(|l| words(&lines[l * LINE..][..LINE]));
                let top: [u32; SLOT_LANES] = std::array::from_fn(|t| {
                    w[0][t] >> 6 & each(0x03) | w[1][t] >> 4 & each(0x0c) | w[2][t] >> 2 & each(0x30)
                });
                for (pair, w) in [w[0], w[1], w[2], top].iter().enumerate() {
                    f(8 * i + 2 * pair, &w.map(|w| w & each(7)));
                    f(8 * i + 2 * pair + 1, &w.map(|w| w >> 3 & each(7)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_zero_far_down() {
        for i in 0..8700 {
            let x = -(i as f32) / 100.0;
            let want = (x as f64).exp();
            // The fit's own error, and the rounding of x*log2(e), which grows with x.
            assert!((exp(x) as f64 - want).abs() <= (4e-7 + 1.2e-7 * -x as f64) * want, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!((exp(f32::NEG_INFINITY), exp(-88.0)), (0.0, 0.0));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn slots_are_what_pack_says() {
        for bits in [2u32, 3, 4, 8] {
            let codes: Vec<u8> = (0..192 * 8).map(|i: usize| (i * 37 % 251) as u8).collect();
            let codes = &codes[..1536];
            for_each_slot(bits, codes, |slot, words| {
                let want = crate::quant::pack::unpack_slot(bits, codes, slot);
                let got: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                assert_eq!(got, want, "bits {bits} slot {slot}");
            });
        }
    }
}
