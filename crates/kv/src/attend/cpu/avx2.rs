//! AVX2 with FMA and F16C: f32 arithmetic, codes widened to f32 in registers.
//! Accuracy: f32 sums in a fixed order; relative error about 1e-6.
//! NOT here: the loop (generic.rs), the bit format (quant/pack.rs).

use super::generic::{Kernel, Lanes, MAX_FOLD, Scratch, Task, attend_range};
use super::portable::{EXP2, MIN_EXP};
use crate::attend::softmax::States;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use half::f16;
use std::arch::x86_64::*;

/// What [`Avx2::new`] looks for.
pub(crate) const NEEDS: &str = "avx2, fma, f16c";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn new() -> Option<Self> {
        let all =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }

    /// The loop, compiled for these instructions.
    pub(crate) fn attend_range(self, task: &Task<'_>, scratch: &mut Scratch, states: &mut States) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn entry(kernel: Avx2, task: &Task<'_>, scratch: &mut Scratch, states: &mut States) {
            attend_range(kernel, task, scratch, states);
        }
        // SAFETY: self proves the features.
        unsafe { entry(self, task, scratch, states) }
    }
}

impl Kernel for Avx2 {
    type Folded<const H: usize> = [[f32; MAX_FOLD]; H];

    fn folded<const H: usize>(self) -> Self::Folded<H> {
        [[0.0; MAX_FOLD]; H]
    }

    #[inline(always)]
    fn fold<const H: usize>(
        self,
        x: &[f32],
        stride: usize,
        scales: &[f16],
        _bound: &[f32; H],
        folded: &mut Self::Folded<H>,
    ) {
        assert!(scales.len() <= MAX_FOLD && scales.len().is_multiple_of(16));
        assert!(x.len() >= (H - 1) * stride + scales.len());
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { fold(x, stride, scales, folded) }
    }

    fn largest(self, _y: &[f16]) -> f32 {
        0.0
    }

    fn raise(self, _top: &mut [f32], _y: &[f16]) {}

    fn bound<const H: usize>(self, _x: &[f32], _stride: usize, _top: &[f32]) -> [f32; H] {
        [0.0; H]
    }

    #[inline(always)]
    fn panel<const H: usize>(
        self,
        bits: u32,
        codes: &[u8],
        lanes: usize,
        folded: &Self::Folded<H>,
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    ) {
        assert!(out.len() >= (H - 1) * stride + lanes && codes.len() * 8 <= MAX_FOLD * lanes * bits as usize);
        // SAFETY: self proves the features; out holds H rows of `lanes`, and the codes have at most MAX_FOLD rows.
        unsafe {
            match (bits, lanes) {
                (8, PANEL_LANES) => panel::<8, 2, H>(codes, folded, out, stride, prefetch),
                (4, PANEL_LANES) => panel::<4, 2, H>(codes, folded, out, stride, prefetch),
                (3, PANEL_LANES) => panel::<3, 2, H>(codes, folded, out, stride, prefetch),
                (_, PANEL_LANES) => panel::<2, 2, H>(codes, folded, out, stride, prefetch),
                (8, _) => panel::<8, 1, H>(codes, folded, out, stride, prefetch),
                (4, _) => panel::<4, 1, H>(codes, folded, out, stride, prefetch),
                (3, _) => panel::<3, 1, H>(codes, folded, out, stride, prefetch),
                (_, _) => panel::<2, 1, H>(codes, folded, out, stride, prefetch),
            }
        }
    }

    #[inline(always)]
    fn dot<const H: usize>(self, x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
        assert!(x.len() >= (H - 1) * stride + y.len() && y.len().is_multiple_of(16));
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { dot(x, stride, y, sums) }
    }

    #[inline(always)]
    fn f16_scores<const H: usize>(
        self,
        q: &[f32],
        head_dim: usize,
        k: &[f16],
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    ) {
        assert!(q.len() >= H * head_dim && k.len() == head_dim * PANEL_LANES);
        assert!(out.len() >= (H - 1) * stride + PANEL_LANES);
        // SAFETY: self proves the features; lengths were just checked.
        unsafe {
            f16_scores::<H>(q, head_dim, k, 0, out, stride, prefetch);
            f16_scores::<H>(q, head_dim, k, 16, out, stride, prefetch);
        }
    }

    #[inline(always)]
    fn f16_values<const H: usize>(
        self,
        p: &[f32],
        stride: usize,
        v: &[f16],
        head_dim: usize,
        out: &mut [f32],
        prefetch: *const u8,
    ) {
        assert!(p.len() >= (H - 1) * stride + v.len() / head_dim && head_dim.is_multiple_of(16));
        assert!(out.len() >= (H - 1) * MAX_FOLD + head_dim);
        // SAFETY: self proves the features; lengths were just checked.
        unsafe {
            for channel in (0..head_dim).step_by(16) {
                f16_values::<H>(p, stride, v, head_dim, channel, out, prefetch);
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8, bytes: usize) {
        for at in (0..bytes).step_by(LINE) {
            // SAFETY: a prefetch may name any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at).cast()) }
        }
    }

    #[inline(always)]
    fn max(self, scores: &[f32]) -> f32 {
        // SAFETY: self proves the features; whole chunks of 8 are read.
        unsafe { max(scores) }
    }

    #[inline(always)]
    fn exp(self, scores: &mut [f32], max: f32, sum: &mut Lanes) {
        // SAFETY: self proves the features; whole chunks of 16 are read and written.
        unsafe { exp(scores, max, sum) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_f16(p: *const f16) -> __m256 {
    // SAFETY: the caller gives 8 readable numbers.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold<const H: usize>(x: &[f32], stride: usize, scales: &[f16], folded: &mut [[f32; MAX_FOLD]; H]) {
    for i in (0..scales.len()).step_by(8) {
        // SAFETY: the caller checked the lengths.
        unsafe {
            let s = load_f16(scales.as_ptr().add(i));
            for (h, folded) in folded.iter_mut().enumerate() {
                let y = _mm256_mul_ps(_mm256_loadu_ps(x.as_ptr().add(h * stride + i)), s);
                _mm256_storeu_ps(folded.as_mut_ptr().add(i), y);
            }
        }
    }
}

/// One panel of `16*SETS` lanes, in two passes of 8 lanes per set (12 accumulators would not fit with all 16).
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn panel<const BITS: u32, const SETS: usize, const H: usize>(
    codes: &[u8],
    folded: &[[f32; MAX_FOLD]; H],
    out: &mut [f32],
    stride: usize,
    prefetch: *const u8,
) {
    let byte_mask = _mm256_set1_epi32(((1u32 << BITS) - 1) as i32);
    for half in 0..2 {
        let mut acc = [[_mm256_setzero_ps(); SETS]; H];
        // Field `field` of `line` is slot `slot`.
        macro_rules! add_slot {
            ($line:expr, $field:expr, $slot:expr) => {{
                let (quad, set) = ($slot / SETS, $slot % SETS);
                for j in 0..QUAD {
                    let shift = _mm_cvtsi32_si128((8 * j + BITS as usize * $field) as i32);
                    let code = _mm256_and_si256(_mm256_srl_epi32($line, shift), byte_mask);
                    let code = _mm256_cvtepi32_ps(code);
                    for h in 0..H {
                        // SAFETY: quad is below rows/4, and rows are at most MAX_FOLD.
                        let x = unsafe { _mm256_set1_ps(*folded[h].get_unchecked(QUAD * quad + j)) };
                        acc[h][set] = _mm256_fmadd_ps(x, code, acc[h][set]);
                    }
                }
            }};
        }
        let lines = codes.len() / LINE;
        let line = |i: usize| {
            // SAFETY: i < lines; a prefetch may name any address.
            unsafe {
                if half == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(i * LINE).cast());
                }
                _mm256_loadu_si256(codes.as_ptr().add(i * LINE + half * 32).cast())
            }
        };
        match BITS {
            8 => {
                for i in 0..lines {
                    let a = line(i);
                    add_slot!(a, 0, i);
                }
            }
            4 => {
                for i in 0..lines {
                    let a = line(i);
                    add_slot!(a, 0, 2 * i);
                    add_slot!(a, 1, 2 * i + 1);
                }
            }
            2 => {
                for i in 0..lines {
                    let a = line(i);
                    add_slot!(a, 0, 4 * i);
                    add_slot!(a, 1, 4 * i + 1);
                    add_slot!(a, 2, 4 * i + 2);
                    add_slot!(a, 3, 4 * i + 3);
                }
            }
            _ => {
                let each = |byte: u8| _mm256_set1_epi8(byte as i8);
                for i in 0..lines / 3 {
                    let (a, b, c) = (line(3 * i), line(3 * i + 1), line(3 * i + 2));
                    let d = _mm256_or_si256(
                        _mm256_and_si256(_mm256_srli_epi16::<6>(a), each(0x03)),
                        _mm256_or_si256(
                            _mm256_and_si256(_mm256_srli_epi16::<4>(b), each(0x0c)),
                            _mm256_and_si256(_mm256_srli_epi16::<2>(c), each(0x30)),
                        ),
                    );
                    for (pair, line) in [a, b, c, d].into_iter().enumerate() {
                        add_slot!(line, 0, 8 * i + 2 * pair);
                        add_slot!(line, 1, 8 * i + 2 * pair + 1);
                    }
                }
            }
        }
        for (h, acc) in acc.iter().enumerate() {
            for (set, acc) in acc.iter().enumerate() {
                // SAFETY: the caller checked that out has H rows of 16*SETS.
                unsafe {
                    let out = out.as_mut_ptr().add(h * stride + set * SLOT_LANES + half * 8);
                    _mm256_storeu_ps(out, _mm256_add_ps(*acc, _mm256_loadu_ps(out)));
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<const H: usize>(x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
    // SAFETY: the caller checked the lengths; Lanes are 16 numbers.
    unsafe {
        for i in (0..y.len()).step_by(16) {
            let y = [load_f16(y.as_ptr().add(i)), load_f16(y.as_ptr().add(i + 8))];
            for (h, sums) in sums.iter_mut().enumerate() {
                for (half, y) in y.iter().enumerate() {
                    let sum = sums.0.as_mut_ptr().add(8 * half);
                    let x = _mm256_loadu_ps(x.as_ptr().add(h * stride + i + 8 * half));
                    _mm256_storeu_ps(sum, _mm256_fmadd_ps(x, *y, _mm256_loadu_ps(sum)));
                }
            }
        }
    }
}

/// Scores of 16 of the 32 tokens, from `token` on.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f16_scores<const H: usize>(
    q: &[f32],
    head_dim: usize,
    k: &[f16],
    token: usize,
    out: &mut [f32],
    stride: usize,
    prefetch: *const u8,
) {
    let mut acc = [[_mm256_setzero_ps(); 2]; H];
    for channel in 0..head_dim {
        // SAFETY: the caller checked the lengths; a prefetch may name any address.
        unsafe {
            if token == 0 {
                _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(channel * LINE).cast());
            }
            let row = k.as_ptr().add(channel * PANEL_LANES + token);
            let k = [load_f16(row), load_f16(row.add(8))];
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*q.get_unchecked(h * head_dim + channel));
                acc[0] = _mm256_fmadd_ps(x, k[0], acc[0]);
                acc[1] = _mm256_fmadd_ps(x, k[1], acc[1]);
            }
        }
    }
    for (h, acc) in acc.iter().enumerate() {
        // SAFETY: the caller checked that out has H rows of 32.
        unsafe {
            let out = out.as_mut_ptr().add(h * stride + token);
            _mm256_storeu_ps(out, acc[0]);
            _mm256_storeu_ps(out.add(8), acc[1]);
        }
    }
}

/// 16 channels from `channel` on.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn f16_values<const H: usize>(
    p: &[f32],
    stride: usize,
    v: &[f16],
    head_dim: usize,
    channel: usize,
    out: &mut [f32],
    prefetch: *const u8,
) {
    let out = out.as_mut_ptr();
    let mut acc = [[_mm256_setzero_ps(); 2]; H];
    // SAFETY: the caller checked that out has H rows of head_dim, v whole rows of head_dim, and p a weight for each.
    unsafe {
        for (h, acc) in acc.iter_mut().enumerate() {
            (0..2).for_each(|i| acc[i] = _mm256_loadu_ps(out.add(h * MAX_FOLD + channel + 8 * i)));
        }
        for token in 0..v.len() / head_dim {
            let at = token * head_dim + channel;
            if channel.is_multiple_of(32) {
                _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(2 * at).cast());
            }
            let row = v.as_ptr().add(at);
            let v = [load_f16(row), load_f16(row.add(8))];
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*p.get_unchecked(h * stride + token));
                acc[0] = _mm256_fmadd_ps(x, v[0], acc[0]);
                acc[1] = _mm256_fmadd_ps(x, v[1], acc[1]);
            }
        }
        for (h, acc) in acc.iter().enumerate() {
            (0..2).for_each(|i| _mm256_storeu_ps(out.add(h * MAX_FOLD + channel + 8 * i), acc[i]));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn max(scores: &[f32]) -> f32 {
    let mut top = _mm256_set1_ps(f32::NEG_INFINITY);
    for s in scores.chunks_exact(8) {
        // SAFETY: a chunk has 8 elements.
        top = _mm256_max_ps(top, unsafe { _mm256_loadu_ps(s.as_ptr()) });
    }
    let top = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps::<1>(top));
    let top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)))
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn exp(scores: &mut [f32], max: f32, sum: &mut Lanes) {
    let max = _mm256_set1_ps(max);
    let least = _mm256_set1_ps(MIN_EXP);
    for s in scores.chunks_exact_mut(16) {
        for half in [0, 8] {
            // SAFETY: a chunk and Lanes have 16 elements.
            unsafe {
                let (s, sum) = (s.as_mut_ptr().add(half), sum.0.as_mut_ptr().add(half));
                let x = _mm256_sub_ps(_mm256_loadu_ps(s), max);
                let seen = _mm256_cmp_ps::<_CMP_GE_OQ>(x, least);
                let y = _mm256_mul_ps(_mm256_max_ps(x, least), _mm256_set1_ps(std::f32::consts::LOG2_E));
                let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(y);
                let f = _mm256_sub_ps(y, n);
                let mut p = _mm256_set1_ps(EXP2[0]);
                for c in &EXP2[1..] {
                    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(*c));
                }
                let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
                let e = _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), seen);
                _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), e));
                _mm256_storeu_ps(s, e);
            }
        }
    }
}
