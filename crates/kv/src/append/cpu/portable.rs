//! Portable append: arrays of 16 lanes that a compiler turns into whatever vectors it has.
//! NOT here: the algorithm (generic.rs).

use super::generic::{Kernel, LANES, LARGEST, RowFit, Tile};
use crate::element::Element;
use crate::quant::pack::{LINE, QUAD};
use half::f16;

/// Needs nothing.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Kernel for Portable {
    type Lanes = [f32; LANES];
    type Slot = [u32; LANES];

    #[inline(always)]
    fn load(self, x: &[f16; LANES]) -> [f32; LANES] {
        x.map(widen)
    }

    #[inline(always)]
    fn store(self, x: [f32; LANES]) -> [f32; LANES] {
        x
    }

    #[inline(always)]
    fn lanes(self, x: &[f32; LANES]) -> [f32; LANES] {
        *x
    }

    #[inline(always)]
    fn count(self, rows: &[[f32; LANES]; QUAD], borders: &[f32]) -> [u32; LANES] {
        std::array::from_fn(|lane| {
            let below = |row: usize| borders.iter().filter(|&&border| rows[row][lane] > border).count() as u32;
            (0..QUAD).fold(0, |slot, row| slot | below(row) << (8 * row))
        })
    }

    #[inline(always)]
    fn min(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn max(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn select(self, n: usize, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if i < n { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min_of_each(self, x: &[[f32; LANES]; LANES]) -> [f32; LANES] {
        x.map(|x| x.into_iter().fold(f32::INFINITY, |a, b| if a < b { a } else { b }))
    }

    #[inline(always)]
    fn max_of_each(self, x: &[[f32; LANES]; LANES]) -> [f32; LANES] {
        x.map(|x| x.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b }))
    }

    #[inline(always)]
    fn sum_of_each(self, x: &[[f32; LANES]; LANES]) -> [f32; LANES] {
        x.map(|x| {
            let a: [f32; 8] = std::array::from_fn(|i| x[i] + x[i + 8]);
            let b: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
            (b[0] + b[2]) + (b[1] + b[3])
        })
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn integer(self, x: [f32; LANES]) -> [f32; LANES] {
        // Adding 2^23 leaves no fraction bits.
        x.map(|x| (x + 8_388_608.0) - 8_388_608.0)
    }

    #[inline(always)]
    fn peak(self, peak: [u32; LANES], x: &[f32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| (x[i].to_bits() & 0x7fff_ffff).cast_signed().max(peak[i].cast_signed()).cast_unsigned())
    }

    #[inline(always)]
    fn round<E: Element>(self, x: &[f32; LANES]) -> [E; LANES] {
        let mut out = [E::ZERO; LANES];
        E::round_row(x, &mut out);
        out
    }

    #[inline(always)]
    fn blank(self) -> [u32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn slot(self, rows: [&[f16; LANES]; QUAD], fit: &[RowFit; QUAD], top: f32) -> [u32; LANES] {
        let mut slot = [0; LANES];
        for (j, fit) in fit.iter().enumerate() {
            // A step of 0 makes every code 0.
            let step = if fit.step == 0.0 { f32::INFINITY } else { fit.step };
            for (slot, &x) in slot.iter_mut().zip(rows[j]) {
                let q = (widen(x) - fit.zero) / step;
                let q = if q > 0.0 { q } else { 0.0 };
                let q = if q < top { q } else { top };
                // Adding 2^23 leaves no fraction bits: rounds to the nearest integer, ties to even.
                *slot |= ((q + 8_388_608.0).to_bits() & 0xff) << (8 * j);
            }
        }
        slot
    }

    #[inline(always)]
    fn shl(self, x: [u32; LANES], n: u32) -> [u32; LANES] {
        x.map(|x| x << n)
    }

    #[inline(always)]
    fn or(self, a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn mask(self, x: [u32; LANES], byte: u8) -> [u32; LANES] {
        x.map(|x| x & u32::from_ne_bytes([byte; 4]))
    }

    #[inline(always)]
    fn store_line(self, x: [u32; LANES], line: &mut [u8; LINE]) {
        line.as_chunks_mut().0.iter_mut().zip(x).for_each(|(out, x)| *out = x.to_le_bytes());
    }

    #[inline(always)]
    fn load_line(self, line: &[u8; LINE]) -> [u32; LANES] {
        let mut out = [0; LANES];
        out.iter_mut().zip(line.as_chunks().0).for_each(|(out, &x)| *out = u32::from_le_bytes(x));
        out
    }

    #[inline(always)]
    fn shr(self, x: [u32; LANES], n: u32) -> [u32; LANES] {
        x.map(|x| x >> n)
    }

    #[inline(always)]
    fn values(self, slot: [u32; LANES], row: usize, step: f32, zero: f32) -> [f16; LANES] {
        let x = slot.map(|x| (((x >> (8 * row)) & 0xff) as f32 * step + zero).clamp(-LARGEST, LARGEST));
        self.round(&x)
    }

    #[inline(always)]
    fn transpose<E: Element>(self, rows: &[f32], stride: usize, n: usize, tile: &mut Tile<E>) {
        for t in 0..tile[0].len() {
            let row = rows[t.min(n - 1) * stride..].first_chunk().expect("16 numbers");
            tile.iter_mut().zip(self.round(row)).for_each(|(out, x)| out[t] = x);
        }
    }
}

/// A finite f16 as f32, subnormals included, without a branch: the shifted bits are an f32 whose exponent is 112 too small.
#[inline(always)]
fn widen(x: f16) -> f32 {
    /// 2^112
    const RAISE: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(x.to_bits());
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * RAISE;
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            if x.is_finite() {
                assert_eq!(widen(x).to_bits(), x.to_f32().to_bits(), "{bits:#x}");
            }
        }
    }
}
