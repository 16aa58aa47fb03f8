//! What plain rows are made of: numbers of 16 bits, f16 or bf16, which kernels widen to f32 as they load them. In: f32;
//! out: stored numbers and back.
//!
//! Formula: f32 is rounded once, to the nearest number of the format, ties to even; a magnitude that would become infinity is
//! refused before ([`RowFormat::refused_from`]). Widening is exact.
//! NOT here: which scheme stores what (scheme.rs), where rows lie (cache/layout.rs), vectors (append/cpu, attend/cpu).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;

/// Formats of plain rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// IEEE half precision: 11 bits of precision, magnitudes up to 65504.
    F16,
    /// The upper half of an f32: 8 bits of precision, magnitudes up to 3.39e38.
    Bf16,
}

impl RowFormat {
    /// The smallest magnitude that rounds to infinity: half a step above the largest finite number (a tie, and that
    /// number's last bit is odd).
    pub fn refused_from(self) -> f32 {
        match self {
            RowFormat::F16 => 65520.0,
            // 0x7f7f is the largest bf16, 0x7f80 infinity.
            RowFormat::Bf16 => f32::from_bits(0x7f7f_8000),
        }
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RowFormat::F16 => "f16",
            RowFormat::Bf16 => "bf16",
        })
    }
}

/// A stored number. Vector code asks [`Element::FORMAT`], a constant: each instance has the instructions of one format.
pub(crate) trait Element: bytemuck::Pod {
    const FORMAT: RowFormat;
    const ZERO: Self;
    /// One number, NaN and infinity included: what oracles use.
    #[cfg(test)]
    fn round(x: f32) -> Self;
    /// Rounds a row of numbers below [`RowFormat::refused_from`]; the lengths are equal.
    fn round_row(from: &[f32], to: &mut [Self]);
    /// Widens a row; the lengths are equal.
    fn widen_row(from: &[Self], to: &mut [f32]);
    fn to_f64(self) -> f64;
}

impl Element for f16 {
    const FORMAT: RowFormat = RowFormat::F16;
    const ZERO: Self = f16::ZERO;

    #[cfg(test)]
    fn round(x: f32) -> Self {
        f16::from_f32(x)
    }

    #[inline(always)]
    fn round_row(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    #[inline(always)]
    fn widen_row(from: &[Self], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
}

impl Element for bf16 {
    const FORMAT: RowFormat = RowFormat::Bf16;
    const ZERO: Self = bf16::ZERO;

    #[cfg(test)]
    fn round(x: f32) -> Self {
        bf16::from_f32(x)
    }

    #[inline(always)]
    fn round_row(from: &[f32], to: &mut [Self]) {
        assert_eq!(from.len(), to.len());
        // A carry of the rounding may reach the exponent, which is right. Simple enough for a compiler to make vectors of,
        // where bf16::from_f32 asks for NaN each time.
        for (&x, to) in from.iter().zip(to) {
            let bits = x.to_bits();
            *to = bf16::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16);
        }
    }

    #[inline(always)]
    fn widen_row(from: &[Self], to: &mut [f32]) {
        assert_eq!(from.len(), to.len());
        from.iter().zip(to).for_each(|(x, to)| *to = f32::from_bits(u32::from(x.to_bits()) << 16));
    }

    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_are_exactly_the_magnitudes_that_round_to_infinity() {
        fn check<E: Element>(finite: impl Fn(E) -> bool) {
            let limit = E::FORMAT.refused_from();
            assert!(finite(E::round(limit.next_down())) && finite(E::round(-limit.next_down())));
            assert!(!finite(E::round(limit)) && !finite(E::round(-limit)) && !finite(E::round(f32::MAX)));
        }
        check::<f16>(f16::is_finite);
        check::<bf16>(bf16::is_finite);
    }

    /// Every bf16 and what lies around the middle to the next one: ties, subnormals, both zeros.
    #[test]
    fn bf16_is_rounded_to_nearest_even_and_widened_exactly() {
        for bits in 0..=u16::MAX {
            let x = bf16::from_bits(bits);
            if !x.is_finite() {
                continue;
            }
            let mut wide = [0.0];
            bf16::widen_row(&[x], &mut wide);
            assert_eq!(wide[0].to_bits(), u32::from(bits) << 16);
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let from = f32::from_bits(u32::from(bits) << 16 | low);
                if from.abs() >= RowFormat::Bf16.refused_from() {
                    continue;
                }
                let mut rounded = [bf16::ZERO];
                bf16::round_row(&[from], &mut rounded);
                // Up above the middle, and in the middle when the number below is odd.
                let up = low > 0x8000 || low == 0x8000 && bits & 1 == 1;
                assert_eq!(rounded[0].to_bits(), bits + u16::from(up), "{from:e}");
                assert_eq!(rounded[0].to_bits(), bf16::round(from).to_bits(), "{from:e}");
            }
        }
    }
}
