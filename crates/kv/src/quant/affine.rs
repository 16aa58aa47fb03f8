//! The affine quantizer. In: the values of one group; out: f16 scale and zero, one code per value.
//!
//! Formula: `zero = f16(min)`, `scale = f16((max-min)/(2^bits-1))`, `code = scale==0 ? 0 : clamp(rint((x-zero)/scale), 0, 2^bits-1)`
//! with ties to even, against the rounded zero and scale; `x_hat = code*scale + zero`.
//! Source: the asymmetric per-group quantizer of KIVI (arXiv 2402.02750), with f16 parameters.
//! NOT here: bit packing (pack.rs), which values form a group (append/).

#[cfg(test)]
use super::fit::search;
#[cfg(test)]
use crate::scheme::Fit;
use half::f16;

/// Scale and zero of one group.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Affine {
    pub scale: f16,
    pub zero: f16,
}

impl Affine {
    /// `code*scale + zero` in f32. The product is exact (8 + 11 significant bits), the sum rounds once.
    pub(crate) fn dequantize(&self, code: u8) -> f32 {
        code as f32 * self.scale.to_f32() + self.zero.to_f32()
    }
}

/// Quantizes one group: the formula as it stands, which the kernels (append/cpu) are tested against. `codes` has the length
/// of `values`, which are finite f16 numbers. The range is that of `values[fit_from..]`: values before it are clamped into
/// it (sink tokens, whose codes nobody reads).
///
/// Accuracy: scale and zero are exact; a code can differ from the exact one only within 1e-4 of a tie, because the
/// quotient is f32 (at most 255 * 2^-23 off).
#[cfg(test)]
pub(crate) fn quantize(values: &[f32], fit_from: usize, bits: u32, fit: Fit, codes: &mut [u8]) -> Affine {
    debug_assert!(values.len() == codes.len() && fit_from < values.len());
    let top = ((1u32 << bits) - 1) as f32;
    let min = values[fit_from..].iter().copied().fold(f32::INFINITY, f32::min);
    let max = values[fit_from..].iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // A zero is never -0.
    let zero = f16::from_f32(min + 0.0);
    let scale = round_to_f16((max as f64 - min as f64) / top as f64);
    let affine = search(values, fit_from, bits, fit, (min + 0.0, max), Affine { scale, zero });
    let (z, s) = (affine.zero.to_f32(), affine.scale.to_f32());
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = if s == 0.0 { 0 } else { ((x - z) / s).clamp(0.0, top).round_ties_even() as u8 };
    }
    affine
}

/// Rounds f64 to f16 once, ties to even. Going through f32 directly would round twice, so the f32 step rounds to odd
/// (truncates and sets the last bit when anything was lost), which keeps ties apart from near-ties.
#[cfg(test)]
fn round_to_f16(x: f64) -> f16 {
    let near = x as f32;
    if near as f64 == x {
        return f16::from_f32(near);
    }
    let toward_zero = if (near as f64).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f16::from_f32(f32::from_bits(toward_zero | 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn f64_is_rounded_once() {
        let one_ulp = 2f64.powi(-10);
        let tie = 1.0 + one_ulp / 2.0;
        assert_eq!(round_to_f16(tie).to_f64(), 1.0);
        assert_eq!(round_to_f16(tie + 1e-12).to_f64(), 1.0 + one_ulp, "through f32 this would be 1");
        assert_eq!(round_to_f16(tie - 1e-12).to_f64(), 1.0);
        assert_eq!(round_to_f16(0.0).to_f64(), 0.0);
        assert_eq!(round_to_f16(3.1e-8).to_bits(), 1, "smallest subnormal");
    }

    #[test]
    fn constant_groups_have_scale_zero() {
        let mut codes = [9u8; 5];
        let a = quantize(&[1.5; 5], 0, 4, Fit::Ls, &mut codes);
        assert_eq!((a.scale.to_f32(), a.zero.to_f32(), codes), (0.0, 1.5, [0; 5]));
        assert_eq!(a.dequantize(0), 1.5);
    }

    #[test]
    fn ties_go_to_even_and_sinks_are_clamped() {
        let mut codes = [0u8; 4];
        let a = quantize(&[0.0, 0.5, 1.5, 3.0], 0, 2, Fit::MinMax, &mut codes);
        assert_eq!((a.scale.to_f32(), codes), (1.0, [0, 0, 2, 3]));
        let a = quantize(&[100.0, 0.0, 1.0, 3.0], 1, 2, Fit::MinMax, &mut codes);
        assert_eq!((a.scale.to_f32(), codes), (1.0, [3, 0, 1, 3]));
    }

    /// An outlier's group: 2-bit steps over the whole range leave the others no room.
    #[test]
    fn a_fit_by_error_clips_what_costs_less_than_it_saves() {
        let mut xs: Vec<f32> = (0..64).map(|i| f16::from_f32((i as f32 * 0.7).sin()).to_f32()).collect();
        xs[5] = 3.0;
        let error = |fit| {
            let mut codes = [0; 64];
            let a = quantize(&xs, 0, 2, fit, &mut codes);
            codes.iter().zip(&xs).map(|(&c, x)| (a.dequantize(c) - x).powi(2)).sum::<f32>()
        };
        let [range, mse, ls] = [Fit::MinMax, Fit::Mse, Fit::Ls].map(error);
        assert!(mse < 0.8 * range && ls < 0.97 * mse, "{range} {mse} {ls}");
        // A group that the range holds exactly stays as it is.
        let mut codes = [0; 4];
        let a = quantize(&[0.0, 1.0, 2.0, 3.0], 0, 2, Fit::Ls, &mut codes);
        assert_eq!((a.scale.to_f32(), a.zero.to_f32(), codes), (1.0, 0.0, [0, 1, 2, 3]));
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(
            xs in prop::collection::vec(-1000f32..1000.0, 1..130), bits in prop::sample::select(vec![2u32, 3, 4, 8])
        ) {
            let xs: Vec<f32> = xs.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            let mut codes = vec![0; xs.len()];
            let a = quantize(&xs, 0, bits, Fit::MinMax, &mut codes);
            for (&c, &x) in codes.iter().zip(&xs) {
                prop_assert!(u32::from(c) < 1 << bits);
                // The rounded scale can fall short of the range by half an f16 ulp per step.
                let slack = a.scale.to_f32() * ((1 << bits) as f32) * 2f32.powi(-11);
                prop_assert!((a.dequantize(c) - x).abs() <= a.scale.to_f32() * 0.5001 + slack + x.abs() * 1e-6);
            }
        }
    }
}
