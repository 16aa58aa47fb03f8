//! Append with AVX-512: one vector is 16 lanes.
//! NOT here: the algorithm (generic.rs).

use super::coded;
use super::dequantize;
use super::generic::{self, Kernel, LANES, LARGEST, RowFit, Tile};
use crate::RowFormat;
use crate::cache::layout::{PlainLayout, RecordLayout};
use crate::element::Element;
use crate::quant::pack::{LINE, QUAD};
use half::f16;
use std::arch::x86_64::*;

/// What [`Avx512::new`] looks for.
pub(super) const NEEDS: &str = "avx512f, avx512bw, avx512vl, avx512dq";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        all.then_some(Self(()))
    }
}

entry_points!(Avx512, "avx512f,avx512bw,avx512vl,avx512dq");

/// Lane i of the result: `$op` over the lanes of vector i of `$x`. Each step halves the vectors and doubles what one holds.
macro_rules! each {
    ($op:ident, $x:expr) => {{
        let x = $x;
        // Halves of 256 bits: low x[i], high x[i+8].
        let a: [__m512; 8] = std::array::from_fn(|i| {
            let (x, y) = (x[i], x[i + 8]);
            $op(_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xee>(x, y))
        });
        // Quarters: i, i+8, i+4, i+12.
        let b: [__m512; 4] = std::array::from_fn(|i| {
            let (x, y) = (a[i], a[i + 4]);
            $op(_mm512_shuffle_f32x4::<0x88>(x, y), _mm512_shuffle_f32x4::<0xdd>(x, y))
        });
        // Pairs in each quarter: i, i+2.
        let c: [__m512; 2] = std::array::from_fn(|i| {
            let (x, y) = (b[i], b[i + 2]);
            $op(_mm512_shuffle_ps::<0x44>(x, y), _mm512_shuffle_ps::<0xee>(x, y))
        });
        let d = $op(_mm512_shuffle_ps::<0x88>(c[0], c[1]), _mm512_shuffle_ps::<0xdd>(c[0], c[1]));
        // Lanes of a quarter are now 0, 2, 1, 3 of it.
        let order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
        _mm512_permutexvar_ps(order, d)
    }};
}

/// Rounds finite numbers. Of bf16 not with `vcvtneps2bf16`, which takes subnormals for 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn narrow<E: Element>(x: __m512) -> __m256i {
    match E::FORMAT {
        RowFormat::F16 => _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x),
        RowFormat::Bf16 => {
            // Half a step less one, and one more where the last bit that stays is odd: ties go to even.
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(sum))
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn min_of_each(x: &[__m512; LANES]) -> __m512 {
    each!(_mm512_min_ps, x)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn max_of_each(x: &[__m512; LANES]) -> __m512 {
    each!(_mm512_max_ps, x)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn sum_of_each(x: &[__m512; LANES]) -> __m512 {
    each!(_mm512_add_ps, x)
}

impl Kernel for Avx512 {
    type Lanes = __m512;
    type Slot = __m512i;

    #[inline(always)]
    fn load(self, x: &[f16; LANES]) -> __m512 {
        // SAFETY: self proves the features; x has the 32 bytes that are read.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store(self, x: __m512) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: self proves the features; out has the 64 bytes that are written.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) };
        out
    }

    #[inline(always)]
    fn lanes(self, x: &[f32; LANES]) -> __m512 {
        // SAFETY: self proves the features; x has the 64 bytes that are read.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn count(self, rows: &[__m512; QUAD], borders: &[f32]) -> __m512i {
        // SAFETY: self proves the features.
        unsafe {
            let mut slot = _mm512_setzero_si512();
            for &border in borders {
                let border = _mm512_set1_ps(border);
                for (row, x) in rows.iter().enumerate() {
                    let above = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(*x, border);
                    slot = _mm512_mask_add_epi32(slot, above, slot, _mm512_set1_epi32(1 << (8 * row)));
                }
            }
            slot
        }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn select(self, n: usize, a: __m512, b: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_mask_blend_ps(((1u32 << n) - 1) as u16, b, a) }
    }

    #[inline(always)]
    fn min_of_each(self, x: &[__m512; LANES]) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { min_of_each(x) }
    }

    #[inline(always)]
    fn max_of_each(self, x: &[__m512; LANES]) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { max_of_each(x) }
    }

    #[inline(always)]
    fn sum_of_each(self, x: &[__m512; LANES]) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { sum_of_each(x) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn integer(self, x: __m512) -> __m512 {
        // SAFETY: self proves the features.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }

    #[inline(always)]
    fn peak(self, peak: __m512i, x: &[f32; LANES]) -> __m512i {
        // SAFETY: self proves the features; x has the 64 bytes that are read.
        unsafe {
            let x = _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps(x.as_ptr())));
            _mm512_max_epi32(peak, x)
        }
    }

    #[inline(always)]
    fn round<E: Element>(self, x: &[f32; LANES]) -> [E; LANES] {
        let mut out = [E::ZERO; LANES];
        // SAFETY: self proves the features; x has the 64 bytes that are read, out the 32 that are written.
        unsafe {
            let x = narrow::<E>(_mm512_loadu_ps(x.as_ptr()));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x);
        }
        out
    }

    #[inline(always)]
    fn blank(self) -> __m512i {
        // SAFETY: self proves the features.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn slot(self, rows: [&[f16; LANES]; QUAD], fit: &[RowFit; QUAD], top: f32) -> __m512i {
        // SAFETY: self proves the features.
        unsafe { slot(rows, fit, top) }
    }

    #[inline(always)]
    fn shl(self, x: __m512i, n: u32) -> __m512i {
        // SAFETY: self proves the features.
        unsafe { _mm512_sll_epi32(x, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: self proves the features.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn mask(self, x: __m512i, byte: u8) -> __m512i {
        // SAFETY: self proves the features.
        unsafe { _mm512_and_si512(x, _mm512_set1_epi8(byte as i8)) }
    }

    #[inline(always)]
    fn store_line(self, x: __m512i, line: &mut [u8; LINE]) {
        // SAFETY: self proves the features; the line has the 64 bytes that are written.
        unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), x) }
    }

    #[inline(always)]
    fn load_line(self, line: &[u8; LINE]) -> __m512i {
        // SAFETY: self proves the features; the line has the 64 bytes that are read.
        unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
    }

    #[inline(always)]
    fn shr(self, x: __m512i, n: u32) -> __m512i {
        // SAFETY: self proves the features.
        unsafe { _mm512_srl_epi32(x, _mm_cvtsi32_si128(n as i32)) }
    }

    #[inline(always)]
    fn values(self, slot: __m512i, row: usize, step: f32, zero: f32) -> [f16; LANES] {
        let mut out = [f16::ZERO; LANES];
        // SAFETY: self proves the features; out has the 32 bytes that are written.
        unsafe {
            let code = _mm512_and_si512(self.shr(slot, 8 * row as u32), _mm512_set1_epi32(0xff));
            let x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(step), _mm512_set1_ps(zero));
            let largest = _mm512_set1_ps(LARGEST);
            let x = _mm512_max_ps(_mm512_min_ps(x, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest));
            let x = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x);
        }
        out
    }

    #[inline(always)]
    fn transpose<E: Element>(self, rows: &[f32], stride: usize, n: usize, tile: &mut Tile<E>) {
        // SAFETY: self proves the features.
        unsafe { transpose(rows, stride, n, tile) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn slot(rows: [&[f16; LANES]; QUAD], fit: &[RowFit; QUAD], top: f32) -> __m512i {
    let mut codes = [_mm512_setzero_si512(); QUAD];
    for j in 0..QUAD {
        // SAFETY: the row has the 32 bytes that are read.
        let x = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(rows[j].as_ptr().cast()) });
        let (step, inverse) = (_mm512_set1_ps(fit[j].step), _mm512_set1_ps(fit[j].inverse));
        let y = _mm512_sub_ps(x, _mm512_set1_ps(fit[j].zero));
        let q = _mm512_mul_ps(y, inverse);
        let q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, step, y), inverse, q);
        // Negative ones saturate to 0 below; those beyond i32 must not get that far.
        codes[j] = _mm512_cvtps_epi32(_mm512_min_ps(q, _mm512_set1_ps(top)));
    }
    // Packing leaves in each quarter 4 bytes of row 0, then of rows 1, 2, 3.
    let words = (_mm512_packus_epi32(codes[0], codes[1]), _mm512_packus_epi32(codes[2], codes[3]));
    let bytes = _mm512_packus_epi16(words.0, words.1);
    let by_lane = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(by_lane))
}

/// Tokens `first..first+8` and the eight 16 later: out[c] has in its quarters channel c and channel c+8 of the former, then
/// of the latter. Row t is at `rows + t.min(last)*stride`.
///
/// # Safety
/// 16 numbers can be read at each of the rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn eight<E: Element>(rows: *const f32, stride: usize, last: usize, first: usize) -> [__m512i; 8] {
    let mut x = [_mm512_setzero_si512(); 8];
    for t in 0..8 {
        // SAFETY: the caller's promise.
        let [low, high] =
            [first + t, first + t + 16].map(|t| unsafe { _mm512_loadu_ps(rows.add(t.min(last) * stride)) });
        x[t] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow::<E>(low)), narrow::<E>(high));
    }
    let pairs = [0, 2, 4, 6].map(|i| [_mm512_unpacklo_epi16(x[i], x[i + 1]), _mm512_unpackhi_epi16(x[i], x[i + 1])]);
    let [x, y] = [0, 2].map(|i| {
        let (x, y) = (pairs[i], pairs[i + 1]);
        [
            _mm512_unpacklo_epi32(x[0], y[0]),
            _mm512_unpackhi_epi32(x[0], y[0]),
            _mm512_unpacklo_epi32(x[1], y[1]),
            _mm512_unpackhi_epi32(x[1], y[1]),
        ]
    });
    let mut out = [_mm512_setzero_si512(); 8];
    for i in 0..4 {
        out[2 * i] = _mm512_unpacklo_epi64(x[i], y[i]);
        out[2 * i + 1] = _mm512_unpackhi_epi64(x[i], y[i]);
    }
    out
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn transpose<E: Element>(rows: &[f32], stride: usize, n: usize, tile: &mut Tile<E>) {
    assert!(n > 0 && rows.len() >= (n - 1) * stride + LANES);
    // SAFETY: 16 numbers of row n-1 and of those before it were just checked.
    let (a, b) = unsafe { (eight::<E>(rows.as_ptr(), stride, n - 1, 0), eight::<E>(rows.as_ptr(), stride, n - 1, 8)) };
    let low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    let high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for c in 0..8 {
        // SAFETY: a row of the tile has the 64 bytes that are written.
        unsafe {
            _mm512_storeu_si512(tile[c].as_mut_ptr().cast(), _mm512_permutex2var_epi64(a[c], low, b[c]));
            _mm512_storeu_si512(tile[c + 8].as_mut_ptr().cast(), _mm512_permutex2var_epi64(a[c], high, b[c]));
        }
    }
}
