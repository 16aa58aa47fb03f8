//! AVX-VNNI (256-bit VNNI without AVX-512): 16-bit dot products that add to their sums (`vpdpwssd`) on packed codes.
//! Everything else, and all of the arithmetic's reasoning, is that of avx2.rs: the results are the same to the bit.
//! NOT here: the loop (generic.rs), the bit format (quant/pack.rs), folds and f16 rows (avx2.rs).

use super::avx2::{Avx2, Words, panel_with};
use super::generic::{Kernel, Lanes, MAX_FOLD, Scratch, Task, attend_range};
use crate::attend::softmax::States;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use half::f16;
use std::arch::x86_64::*;

/// What [`AvxVnni::new`] looks for.
pub(crate) const NEEDS: &str = "avx2, fma, f16c, avxvnni";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct AvxVnni(Avx2);

impl AvxVnni {
    pub(crate) fn new() -> Option<Self> {
        Avx2::new().filter(|_| is_x86_feature_detected!("avxvnni")).map(Self)
    }
}

entry_point!(AvxVnni, "avx2,fma,f16c,avxvnni");

impl Kernel for AvxVnni {
    type Folded<const H: usize> = Words<H>;

    fn folded<const H: usize>(self) -> Words<H> {
        self.0.folded()
    }

    #[inline(always)]
    fn fold<const H: usize>(self, x: &[f32], stride: usize, scales: &[f16], bound: &[f32; H], folded: &mut Words<H>) {
        self.0.fold(x, stride, scales, bound, folded);
    }

    #[inline(always)]
    fn largest(self, y: &[f16]) -> f32 {
        self.0.largest(y)
    }

    #[inline(always)]
    fn raise(self, top: &mut [f32], y: &[f16]) {
        self.0.raise(top, y);
    }

    #[inline(always)]
    fn bound<const H: usize>(self, x: &[f32], stride: usize, top: &[f32]) -> [f32; H] {
        self.0.bound(x, stride, top)
    }

    #[inline(always)]
    fn panel<const H: usize>(
        self,
        bits: u32,
        codes: &[u8],
        lanes: usize,
        folded: &Words<H>,
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    ) {
        assert!(out.len() >= (H - 1) * stride + lanes && codes.len() * 8 <= MAX_FOLD * lanes * bits as usize);
        // SAFETY: self proves the features; out holds H rows of `lanes`, and the codes have at most MAX_FOLD rows.
        unsafe { panel(bits, codes, lanes, folded, out, stride, prefetch) }
    }

    #[inline(always)]
    fn dot<const H: usize>(self, x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
        self.0.dot(x, stride, y, sums);
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
        self.0.f16_scores::<H>(q, head_dim, k, out, stride, prefetch);
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
        self.0.f16_values::<H>(p, stride, v, head_dim, out, prefetch);
    }

    #[inline(always)]
    fn prefetch(self, from: *const u8, bytes: usize) {
        self.0.prefetch(from, bytes);
    }

    #[inline(always)]
    fn max(self, scores: &[f32]) -> f32 {
        self.0.max(scores)
    }

    #[inline(always)]
    fn exp(self, scores: &mut [f32], max: f32, sum: &mut Lanes) {
        self.0.exp(scores, max, sum);
    }
}

// `vpdpwssd` takes 5 cycles and two start in one: 8 sums keep it nearly busy.
panel_with!("avx2,fma,f16c,avxvnni", 2, |sums, words, x| _mm256_dpwssd_avx_epi32(sums, words, x));
