//! Append with AVX2, FMA and F16C: 16 lanes are two vectors.
//! NOT here: the algorithm (generic.rs).

use super::coded;
use super::dequantize;
use super::generic::{self, Kernel, LANES, LARGEST, RowFit, Tile};
use crate::RowFormat;
use crate::cache::layout::{BLOCK_LEN, PlainLayout, RecordLayout};
use crate::element::Element;
use crate::quant::pack::{LINE, QUAD};
use half::f16;
use std::arch::x86_64::*;

/// What [`Avx2::new`] looks for.
pub(super) const NEEDS: &str = "avx2, fma, f16c";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn new() -> Option<Self> {
        let all =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }
}

entry_points!(Avx2, "avx2,fma,f16c");

/// Lane i of the result: `$op` over the lanes of vector i of `$x`. Each step halves the vectors and doubles what one holds.
macro_rules! each {
    ($op:ident, $x:expr) => {{
        let x = $x;
        let eight = |first: usize| {
            // Halves of 128 bits: x[i], x[i+4].
            let a: [__m256; 4] = std::array::from_fn(|i| {
                let x = [first + i, first + i + 4].map(|i| $op(x[i][0], x[i][1]));
                $op(_mm256_permute2f128_ps::<0x20>(x[0], x[1]), _mm256_permute2f128_ps::<0x31>(x[0], x[1]))
            });
            // Pairs in each half: i, i+1.
            let b: [__m256; 2] = std::array::from_fn(|i| {
                let (x, y) = (a[2 * i], a[2 * i + 1]);
                $op(_mm256_shuffle_ps::<0x44>(x, y), _mm256_shuffle_ps::<0xee>(x, y))
            });
            $op(_mm256_shuffle_ps::<0x88>(b[0], b[1]), _mm256_shuffle_ps::<0xdd>(b[0], b[1]))
        };
        [eight(0), eight(8)]
    }};
}

/// Rounds finite numbers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn narrow<E: Element>(x: __m256) -> __m128i {
    match E::FORMAT {
        RowFormat::F16 => _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x),
        RowFormat::Bf16 => {
            // Half a step less one, and one more where the last bit that stays is odd: ties go to even.
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let words = _mm256_srli_epi32::<16>(sum);
            _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words))
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn min_of_each(x: &[[__m256; 2]; LANES]) -> [__m256; 2] {
    each!(_mm256_min_ps, x)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn max_of_each(x: &[[__m256; 2]; LANES]) -> [__m256; 2] {
    each!(_mm256_max_ps, x)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_of_each(x: &[[__m256; 2]; LANES]) -> [__m256; 2] {
    each!(_mm256_add_ps, x)
}

impl Kernel for Avx2 {
    type Lanes = [__m256; 2];
    type Slot = [__m256i; 2];

    #[inline(always)]
    fn load(self, x: &[f16; LANES]) -> [__m256; 2] {
        let (low, high) = (x.as_ptr().cast::<__m128i>(), x[8..].as_ptr().cast());
        // SAFETY: self proves the features; x has the 32 bytes that are read.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(low)), _mm256_cvtph_ps(_mm_loadu_si128(high))] }
    }

    #[inline(always)]
    fn store(self, x: [__m256; 2]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: self proves the features; out has the 64 bytes that are written.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        }
        out
    }

    #[inline(always)]
    fn lanes(self, x: &[f32; LANES]) -> [__m256; 2] {
        // SAFETY: self proves the features; x has the 64 bytes that are read.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())] }
    }

    #[inline(always)]
    fn count(self, rows: &[[__m256; 2]; QUAD], borders: &[f32]) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe {
            let mut slot = [_mm256_setzero_si256(); 2];
            for &border in borders {
                let border = _mm256_set1_ps(border);
                for (row, x) in rows.iter().enumerate() {
                    let one = _mm256_set1_epi32(1 << (8 * row));
                    for (slot, x) in slot.iter_mut().zip(x) {
                        let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(*x, border));
                        *slot = _mm256_add_epi32(*slot, _mm256_and_si256(above, one));
                    }
                }
            }
            slot
        }
    }

    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn select(self, n: usize, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe {
            let n = _mm256_set1_epi32(n as i32);
            let first = _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
            let second = _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)));
            [_mm256_blendv_ps(b[0], a[0], first), _mm256_blendv_ps(b[1], a[1], second)]
        }
    }

    #[inline(always)]
    fn min_of_each(self, x: &[[__m256; 2]; LANES]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { min_of_each(x) }
    }

    #[inline(always)]
    fn max_of_each(self, x: &[[__m256; 2]; LANES]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { max_of_each(x) }
    }

    #[inline(always)]
    fn sum_of_each(self, x: &[[__m256; 2]; LANES]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { sum_of_each(x) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn integer(self, x: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: self proves the features.
        unsafe { x.map(|x| _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)) }
    }

    #[inline(always)]
    fn peak(self, peak: [__m256i; 2], x: &[f32; LANES]) -> [__m256i; 2] {
        let mut out = peak;
        for (i, peak) in out.iter_mut().enumerate() {
            // SAFETY: self proves the features; x has the 64 bytes that are read.
            unsafe {
                let x = _mm256_loadu_si256(x.as_ptr().add(8 * i).cast());
                *peak = _mm256_max_epi32(*peak, _mm256_and_si256(x, _mm256_set1_epi32(0x7fff_ffff)));
            }
        }
        out
    }

    #[inline(always)]
    fn round<E: Element>(self, x: &[f32; LANES]) -> [E; LANES] {
        let mut out = [E::ZERO; LANES];
        for half in [0, 8] {
            // SAFETY: self proves the features; x has the 64 bytes that are read, out the 32 that are written.
            unsafe {
                let x = narrow::<E>(_mm256_loadu_ps(x.as_ptr().add(half)));
                _mm_storeu_si128(out.as_mut_ptr().add(half).cast(), x);
            }
        }
        out
    }

    #[inline(always)]
    fn blank(self) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn slot(self, rows: [&[f16; LANES]; QUAD], fit: &[RowFit; QUAD], top: f32) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe { slot(rows, fit, top) }
    }

    #[inline(always)]
    fn shl(self, x: [__m256i; 2], n: u32) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            [_mm256_sll_epi32(x[0], n), _mm256_sll_epi32(x[1], n)]
        }
    }

    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn mask(self, x: [__m256i; 2], byte: u8) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe {
            let mask = _mm256_set1_epi8(byte as i8);
            [_mm256_and_si256(x[0], mask), _mm256_and_si256(x[1], mask)]
        }
    }

    #[inline(always)]
    fn store_line(self, x: [__m256i; 2], line: &mut [u8; LINE]) {
        // SAFETY: self proves the features; the line has the 64 bytes that are written.
        unsafe {
            _mm256_storeu_si256(line.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(line.as_mut_ptr().add(32).cast(), x[1]);
        }
    }

    #[inline(always)]
    fn load_line(self, line: &[u8; LINE]) -> [__m256i; 2] {
        let (low, high) = (line.as_ptr().cast(), line[32..].as_ptr().cast());
        // SAFETY: self proves the features; the line has the 64 bytes that are read.
        unsafe { [_mm256_loadu_si256(low), _mm256_loadu_si256(high)] }
    }

    #[inline(always)]
    fn shr(self, x: [__m256i; 2], n: u32) -> [__m256i; 2] {
        // SAFETY: self proves the features.
        unsafe {
            let n = _mm_cvtsi32_si128(n as i32);
            [_mm256_srl_epi32(x[0], n), _mm256_srl_epi32(x[1], n)]
        }
    }

    #[inline(always)]
    fn values(self, slot: [__m256i; 2], row: usize, step: f32, zero: f32) -> [f16; LANES] {
        let mut out = [f16::ZERO; LANES];
        let slot = self.shr(slot, 8 * row as u32);
        for (half, slot) in slot.into_iter().enumerate() {
            // SAFETY: self proves the features; out has the 32 bytes that are written.
            unsafe {
                let code = _mm256_and_si256(slot, _mm256_set1_epi32(0xff));
                let x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(step), _mm256_set1_ps(zero));
                let largest = _mm256_set1_ps(LARGEST);
                let x = _mm256_max_ps(_mm256_min_ps(x, largest), _mm256_sub_ps(_mm256_setzero_ps(), largest));
                let x = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
                _mm_storeu_si128(out.as_mut_ptr().add(8 * half).cast(), x);
            }
        }
        out
    }

    #[inline(always)]
    fn transpose<E: Element>(self, rows: &[f32], stride: usize, n: usize, tile: &mut Tile<E>) {
        // SAFETY: self proves the features.
        unsafe { transpose(rows, stride, n, tile) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn slot(rows: [&[f16; LANES]; QUAD], fit: &[RowFit; QUAD], top: f32) -> [__m256i; 2] {
    let mut slot = [_mm256_setzero_si256(); 2];
    for (half, slot) in slot.iter_mut().enumerate() {
        let mut codes = [_mm256_setzero_si256(); QUAD];
        for j in 0..QUAD {
            // SAFETY: lanes 0..8 or 8..16 of the row are read.
            let x = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(rows[j].as_ptr().add(8 * half).cast()) });
            let (step, inverse) = (_mm256_set1_ps(fit[j].step), _mm256_set1_ps(fit[j].inverse));
            let y = _mm256_sub_ps(x, _mm256_set1_ps(fit[j].zero));
            let q = _mm256_mul_ps(y, inverse);
            let q = _mm256_fmadd_ps(_mm256_fnmadd_ps(q, step, y), inverse, q);
            // Negative ones saturate to 0 below; those beyond i32 must not get that far.
            codes[j] = _mm256_cvtps_epi32(_mm256_min_ps(q, _mm256_set1_ps(top)));
        }
        // Packing leaves in each half 4 bytes of row 0, then of rows 1, 2, 3.
        let words = (_mm256_packus_epi32(codes[0], codes[1]), _mm256_packus_epi32(codes[2], codes[3]));
        let bytes = _mm256_packus_epi16(words.0, words.1);
        let by_lane = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        *slot = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(by_lane));
    }
    slot
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose<E: Element>(rows: &[f32], stride: usize, n: usize, tile: &mut Tile<E>) {
    assert!(n > 0 && rows.len() >= (n - 1) * stride + LANES);
    for first in (0..BLOCK_LEN).step_by(8) {
        // Halves: channels 0-7 and 8-15.
        let mut x = [_mm256_setzero_si256(); 8];
        for t in 0..8 {
            // SAFETY: 16 numbers of row n-1 and of those before it were just checked.
            let [low, high] = unsafe {
                let row = rows.as_ptr().add((first + t).min(n - 1) * stride);
                [_mm256_loadu_ps(row), _mm256_loadu_ps(row.add(8))]
            };
            x[t] = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(narrow::<E>(low)), narrow::<E>(high));
        }
        let pairs =
            [0, 2, 4, 6].map(|i| [_mm256_unpacklo_epi16(x[i], x[i + 1]), _mm256_unpackhi_epi16(x[i], x[i + 1])]);
        let [x, y] = [0, 2].map(|i| {
            let (x, y) = (pairs[i], pairs[i + 1]);
            [
                _mm256_unpacklo_epi32(x[0], y[0]),
                _mm256_unpackhi_epi32(x[0], y[0]),
                _mm256_unpacklo_epi32(x[1], y[1]),
                _mm256_unpackhi_epi32(x[1], y[1]),
            ]
        });
        for i in 0..4 {
            let pair = [_mm256_unpacklo_epi64(x[i], y[i]), _mm256_unpackhi_epi64(x[i], y[i])];
            for (c, both) in pair.into_iter().enumerate() {
                // Channel 2i+c, and the one 8 above it.
                let (low, high) = (_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
                // SAFETY: tokens first to first+7 of a row of the tile are written.
                unsafe {
                    _mm_storeu_si128(tile[2 * i + c].as_mut_ptr().add(first).cast(), low);
                    _mm_storeu_si128(tile[2 * i + c + 8].as_mut_ptr().add(first).cast(), high);
                }
            }
        }
    }
}
