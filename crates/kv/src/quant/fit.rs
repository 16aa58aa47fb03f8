//! Scale and zero by error instead of by range. In: the values of one group, its range; out: the scale and zero whose
//! dequantized values are nearest.
//!
//! Formula, all in f32: with `mid = (min+max)/2`, `half = (max-min)/2`, the candidates are the range itself and, for each
//! ratio `r` of [`shrinks`], `width = half*r`, `zero = f16(mid-width)`, `scale = f16((width+width)/top)`. A candidate's error is the
//! sum of `(code*scale - (x-zero))^2` with `code = rint(clamp((x-zero)*f32(1/scale), 0, top))`, summed in 16 lanes (value i in lane
//! i mod 16) that are added by halves; the first of the smallest wins. [`Fit::Ls`](crate::scheme::Fit) then moves `zero` and `scale`
//! to those of least squares for the codes, [`REFITS`] times at most, each time if they are finite f16 and the error falls.
//! The order of every sum is part of the formula: all kernels of append make the same records, to the bit.
//! Source: the shrink search is that of AWQ's and OmniQuant's clipping (arXiv 2306.00978, 2308.13137), for one group alone.
//! NOT here: vectors (append/cpu/fitting.rs).

/// Times that [`crate::scheme::Fit::Ls`] refits.
pub(crate) const REFITS: usize = 3;
/// Candidates besides the range.
pub(crate) const SHRINKS: usize = 9;

/// Ratios of a shrunk range to the whole, best known set per number of bits; as many for each. Codes of 8 bits lose more by
/// clipping than they win: no search.
pub(crate) fn shrinks(bits: u32) -> Option<&'static [f32; SHRINKS]> {
    match bits {
        2 | 3 => Some(&[0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.65, 0.6]),
        4 => Some(&[0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.8]),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) use plain::search;

/// The formula, one number after another: what kernels are tested against.
#[cfg(test)]
mod plain {
    use super::*;
    use crate::quant::affine::Affine;
    use crate::scheme::Fit;
    use half::f16;

    /// 16 partial sums, added by halves.
    #[derive(Default)]
    struct Sum([f32; 16]);

    impl Sum {
        fn total(&self) -> f32 {
            let mut lanes = self.0.to_vec();
            while lanes.len() > 1 {
                let half = lanes.len() / 2;
                lanes = (0..half).map(|i| lanes[i] + lanes[i + half]).collect();
            }
            lanes[0]
        }
    }

    /// Sums of one candidate over a group.
    struct Sums {
        error: f32,
        code: f32,
        code_code: f32,
        y: f32,
        code_y: f32,
    }

    fn sums(values: &[f32], from: usize, top: f32, at: Affine) -> Sums {
        let (zero, step) = (at.zero.to_f32(), at.scale.to_f32());
        let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
        let mut all: [Sum; 5] = Default::default();
        for (i, x) in values.iter().enumerate().skip(from) {
            let y = x - zero;
            let code = (y * inverse).clamp(0.0, top).round_ties_even();
            let d = code * step - y;
            for (sum, x) in all.iter_mut().zip([d * d, code, code * code, y, code * y]) {
                sum.0[i % 16] += x;
            }
        }
        let [error, code, code_code, y, code_y] = all.map(|sum| sum.total());
        Sums { error, code, code_code, y, code_y }
    }

    /// The best of the range, which `best` is, and the candidates; over `values[from..]`.
    pub(crate) fn search(values: &[f32], from: usize, bits: u32, fit: Fit, range: (f32, f32), best: Affine) -> Affine {
        let Some(shrinks) = shrinks(bits).filter(|_| fit != Fit::MinMax) else { return best };
        let top = ((1u32 << bits) - 1) as f32;
        // A zero is never -0.
        let at = |zero: f32, scale: f32| Affine {
            zero: f16::from_f32(f16::from_f32(zero).to_f32() + 0.0),
            scale: f16::from_f32(scale),
        };
        let (mid, half) = ((range.0 + range.1) * 0.5, (range.1 - range.0) * 0.5);
        let mut best = (sums(values, from, top, best).error, best);
        let offer = |best: &mut (f32, Affine), candidate: Affine| {
            let error = sums(values, from, top, candidate).error;
            if error < best.0 {
                *best = (error, candidate);
            }
        };
        for r in shrinks {
            let width = half * r;
            offer(&mut best, at(mid - width, (width + width) / top));
        }
        for _ in 0..if fit == Fit::Ls { REFITS } else { 0 } {
            let s = sums(values, from, top, best.1);
            let n = (values.len() - from) as f32;
            let spread = n * s.code_code - s.code * s.code;
            let scale = (n * s.code_y - s.code * s.y) / spread;
            let zero = best.1.zero.to_f32() + (s.y - scale * s.code) / n;
            let largest = f16::MAX.to_f32();
            if spread > 0.0 && scale > 0.0 && scale <= largest && zero.abs() <= largest {
                offer(&mut best, at(zero, scale));
            }
        }
        best.1
    }
}
