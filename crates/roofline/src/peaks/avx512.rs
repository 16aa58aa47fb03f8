//! AVX-512: f32 multiply-adds, and 8-bit dot products with VNNI. In: iterations; out: a number that depends on each.
//! NOT here: timing (mod.rs).

use std::arch::x86_64::*;
use std::hint::black_box;

/// Independent chains: two units times a latency of up to 5 cycles, and some more, within 32 registers.
const CHAINS: usize = 16;
/// Operations of one iteration: 16 lanes of one multiplication and one addition.
pub(super) const FMA_OPS: u64 = (CHAINS * 16 * 2) as u64;
/// The same for dot products: 64 products per instruction.
pub(super) const DOT_OPS: u64 = (CHAINS * 64 * 2) as u64;

/// Proof that the processor has AVX-512.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        is_x86_feature_detected!("avx512f").then_some(Self(()))
    }

    pub(super) fn fma(self, iterations: u64) -> f32 {
        // SAFETY: self proves the feature; the function touches registers only.
        unsafe { fma(iterations) }
    }
}

/// Proof that the processor has AVX-512 with VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512Vnni(());

impl Avx512Vnni {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")).then_some(Self(()))
    }

    pub(super) fn dot(self, iterations: u64) -> f32 {
        // SAFETY: self proves the features; the function touches registers only.
        unsafe { dot(iterations) }
    }
}

#[target_feature(enable = "avx512f")]
fn fma(iterations: u64) -> f32 {
    let mut sums = [_mm512_set1_ps(1.0); CHAINS];
    let (factor, term) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.01)));
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, factor, term);
        }
    }
    sums.iter().map(|&s| _mm512_reduce_add_ps(s)).sum()
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn dot(iterations: u64) -> f32 {
    let mut sums = [_mm512_set1_epi32(1); CHAINS];
    let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(2)));
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    sums.iter().fold(0i32, |all, &s| all.wrapping_add(_mm512_reduce_add_epi32(s))) as f32
}
