//! AVX2: f32 multiply-adds, 8-bit dot products by `vpmaddubsw`, and by AVX-VNNI where the processor has it. In:
//! iterations; out: a number that depends on each. NOT here: timing (mod.rs).

use std::arch::x86_64::*;
use std::hint::black_box;

/// Independent chains: two units times a latency of up to 5 cycles, and some more, within 16 registers.
const CHAINS: usize = 12;
/// Operations of one iteration: 8 lanes of one multiplication and one addition.
pub(super) const FMA_OPS: u64 = (CHAINS * 8 * 2) as u64;
/// The same for dot products: 32 products per step.
pub(super) const DOT_OPS: u64 = (CHAINS * 32 * 2) as u64;

/// Proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(super) struct Avx2Fma(());

impl Avx2Fma {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }

    pub(super) fn fma(self, iterations: u64) -> f32 {
        // SAFETY: self proves the features; the function touches registers only.
        unsafe { fma(iterations) }
    }

    pub(super) fn dot(self, iterations: u64) -> f32 {
        // SAFETY: self proves the features; the function touches registers only.
        unsafe { dot_by_maddubs(iterations) }
    }
}

/// Proof that the processor has AVX-VNNI.
#[derive(Clone, Copy)]
pub(super) struct AvxVnni(());

impl AvxVnni {
    pub(super) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("avxvnni")).then_some(Self(()))
    }

    pub(super) fn dot(self, iterations: u64) -> f32 {
        // SAFETY: self proves the features; the function touches registers only.
        unsafe { dot_by_vnni(iterations) }
    }
}

#[target_feature(enable = "avx2,fma")]
fn fma(iterations: u64) -> f32 {
    let mut sums = [_mm256_set1_ps(1.0); CHAINS];
    let (factor, term) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.01)));
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, factor, term);
        }
    }
    let all = sums.iter().fold(_mm256_setzero_ps(), |all, &s| _mm256_add_ps(all, s));
    let half = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
    let half = _mm_hadd_ps(half, half);
    _mm_cvtss_f32(_mm_hadd_ps(half, half))
}

#[target_feature(enable = "avx2")]
fn dot_by_maddubs(iterations: u64) -> f32 {
    let mut sums = [_mm256_set1_epi32(1); CHAINS];
    let (a, ones) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi16(1));
    for _ in 0..iterations {
        for sum in &mut sums {
            // One factor is the sum itself, so that the products cannot be computed once and for all.
            let pairs = _mm256_maddubs_epi16(a, *sum);
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    reduce(sums)
}

#[target_feature(enable = "avx2,avxvnni")]
fn dot_by_vnni(iterations: u64) -> f32 {
    let mut sums = [_mm256_set1_epi32(1); CHAINS];
    let (a, b) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(2)));
    for _ in 0..iterations {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
        }
    }
    reduce(sums)
}

#[target_feature(enable = "avx2")]
fn reduce(sums: [__m256i; CHAINS]) -> f32 {
    let all = sums.iter().fold(_mm256_setzero_si256(), |all, &s| _mm256_add_epi32(all, s));
    let half = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all));
    let half = _mm_hadd_epi32(half, half);
    _mm_cvtsi128_si32(_mm_hadd_epi32(half, half)) as f32
}
