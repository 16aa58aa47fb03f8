//! Multipliers with AVX-512: query vectors or weights times scales, as limbs; and the bounds that these are scaled by.
//! NOT here: products with them (avx512.rs, which says what limbs are).

use super::avx512::{Limbs, TOP, load};
use half::f16;
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn fold<const H: usize>(
    x: &[f32],
    stride: usize,
    scales: &[f16],
    bound: &[f32; H],
    folded: &mut Limbs<H>,
    at: usize,
) {
    let n = scales.len();
    let mut factor = [_mm512_setzero_ps(); H];
    for h in 0..H {
        // A bound of (almost) nothing leaves the factor 0: such products vanish in the sum.
        let scale = if bound[h] > 1e-30 { TOP / bound[h] } else { 0.0 };
        factor[h] = _mm512_set1_ps(scale);
        folded.descale[h] = bound[h] / TOP;
    }
    let x = |h: usize, i: usize| x.as_ptr().wrapping_add(h * stride + i);
    let scale = |i: usize| scales.as_ptr().wrapping_add(i);
    // Whole 64s: 16-bit arithmetic, then the packs' interleaving of 128-bit lanes is undone once per limb.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let round = _mm512_set1_epi16(64);
    let whole = n / 64 * 64;
    // SAFETY: the caller checked that every row of x has n elements; at and n are multiples of 16, together at most MAX_FOLD.
    unsafe {
        for i in (0..whole).step_by(64) {
            let scales = [load(scale(i)), load(scale(i + 16)), load(scale(i + 32)), load(scale(i + 48))];
            for h in 0..H {
                let integers = |j: usize| {
                    let y = _mm512_mul_ps(_mm512_loadu_ps(x(h, i + 16 * j)), factor[h]);
                    _mm512_cvtps_epi32(_mm512_mul_ps(y, scales[j]))
                };
                let a = _mm512_packs_epi32(integers(0), integers(1));
                let b = _mm512_packs_epi32(integers(2), integers(3));
                let high_a = _mm512_srai_epi16::<7>(_mm512_add_epi16(a, round));
                let high_b = _mm512_srai_epi16::<7>(_mm512_add_epi16(b, round));
                let low_a = _mm512_sub_epi16(a, _mm512_slli_epi16::<7>(high_a));
                let low_b = _mm512_sub_epi16(b, _mm512_slli_epi16::<7>(high_b));
                let high = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(high_a, high_b));
                let low = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low_a, low_b));
                _mm512_storeu_si512(folded.limbs[0][h].as_mut_ptr().add(at + i).cast(), high);
                _mm512_storeu_si512(folded.limbs[1][h].as_mut_ptr().add(at + i).cast(), low);
            }
        }
        if !(at + n).is_multiple_of(64) {
            for row in folded.limbs.iter_mut().flatten() {
                row[at + whole..(at + n).next_multiple_of(64)].fill(0);
            }
        }
        for i in (whole..n).step_by(16) {
            let scales = load(scale(i));
            for h in 0..H {
                let y = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x(h, i)), factor[h]), scales);
                let y = _mm512_cvtps_epi32(y);
                let high = _mm512_srai_epi32::<7>(_mm512_add_epi32(y, _mm512_set1_epi32(64)));
                let low = _mm512_sub_epi32(y, _mm512_slli_epi32::<7>(high));
                _mm_storeu_si128(folded.limbs[0][h].as_mut_ptr().add(at + i).cast(), _mm512_cvtepi32_epi8(high));
                _mm_storeu_si128(folded.limbs[1][h].as_mut_ptr().add(at + i).cast(), _mm512_cvtepi32_epi8(low));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn widen(y: &[f16], out: &mut [f32]) {
    for i in (0..y.len()).step_by(16) {
        // SAFETY: the caller checked the lengths.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(i), load(y.as_ptr().add(i))) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn raise(top: &mut [f32], y: &[f16]) {
    for i in (0..y.len()).step_by(16) {
        // SAFETY: the caller checked the lengths.
        unsafe {
            let top = top.as_mut_ptr().add(i);
            _mm512_storeu_ps(top, _mm512_max_ps(_mm512_loadu_ps(top), load(y.as_ptr().add(i))));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn bound<const H: usize>(x: &[f32], stride: usize, top: &[f32]) -> [f32; H] {
    let mut bounds = [0.0; H];
    for (h, bound) in bounds.iter_mut().enumerate() {
        let mut largest = _mm512_setzero_ps();
        for i in (0..top.len()).step_by(16) {
            // SAFETY: the caller checked the lengths.
            let y = unsafe {
                _mm512_mul_ps(_mm512_loadu_ps(x.as_ptr().add(h * stride + i)), _mm512_loadu_ps(top.as_ptr().add(i)))
            };
            largest = _mm512_max_ps(largest, _mm512_abs_ps(y));
        }
        *bound = _mm512_reduce_max_ps(largest);
    }
    bounds
}
