//! AVX2 with FMA and F16C: 16-bit dot products on packed codes (`vpmaddwd`), f32 FMA on f16 or bf16 rows.
//!
//! Folded multipliers are 16-bit integers, scaled per query vector by a bound on their magnitudes (keys: one per range,
//! from its scales; values: one per group, from its largest weight and scale). Codes become 16-bit words, the even bytes
//! of a line and then the odd ones, masked in place, never shifted where lanes differ (a field's power of two goes into
//! the descale). Sums stay exact in i32: `256 rows * 255 * 32767 < 2^31`, as no field in its place exceeds 255; with 2 bits none
//! exceeds 12, and there may be 384 rows.
//! Accuracy: each multiplier is off by at most max/65534, below 5e-4 relative in the output of every parity case.
//! NOT here: the loop (generic.rs), the bit format (quant/pack.rs), AVX-VNNI (avxvnni.rs).

use super::expand256;
use super::generic::{Scratch, Task, attend_range};
use super::kernel::{Expand, Kernel, Lanes, MAX_FOLD, Panels, Sums, Vectors};
use super::portable::{EXP2, MIN_EXP};
use crate::RowFormat;
use crate::attend::softmax::States;
use crate::element::Element;
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
}

entry_point!(Avx2, "avx2,fma,f16c");

/// Largest magnitude of a multiplier.
const TOP: f32 = 32767.0;

/// Multipliers of one fold: `value[h][i] = words[h][place(i)] * descale[h]`. The four of a quad stand in the order
/// 0, 2, 1, 3: the even and the odd bytes of a line, widened, are the other operand.
#[repr(align(32))]
pub(crate) struct Words<const H: usize> {
    pub(super) words: [[i16; MAX_FOLD]; H],
    pub(super) descale: [f32; H],
}

impl<const H: usize> Words<H> {
    const ZERO: Self = Self { words: [[0; MAX_FOLD]; H], descale: [0.0; H] };
}

impl Kernel for Avx2 {
    type Vectors = Self;
    const VECTORS: usize = 4;

    #[inline(always)]
    fn vectors(self) -> Self {
        self
    }

    #[inline(always)]
    fn panels<const H: usize>(
        self,
        panels: Panels<'_>,
        _ready: &[u8],
        folded: &Words<H>,
        out: &mut [f32],
        stride: usize,
        _sums: &mut Sums,
    ) {
        panels.check::<H>(out, stride);
        for (codes, first, lanes, prefetch) in panels.each() {
            // SAFETY: self proves the features; out holds H rows of all lanes, and the codes have at most MAX_FOLD rows.
            unsafe { panel(panels.bits, codes, lanes, folded, &mut out[first..], stride, prefetch) }
        }
    }
}

impl Vectors for Avx2 {
    type Folded<const H: usize> = Words<H>;

    fn folded<const H: usize>(self) -> Words<H> {
        Words::ZERO
    }

    #[inline(always)]
    fn fold<const H: usize>(
        self,
        x: &[f32],
        stride: usize,
        scales: &[f16],
        bound: &[f32; H],
        folded: &mut Words<H>,
        at: usize,
    ) {
        assert!(at <= MAX_FOLD && scales.len() <= MAX_FOLD - at && (at | scales.len()).is_multiple_of(16));
        assert!(x.len() >= (H - 1) * stride + scales.len());
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { fold(x, stride, scales, bound, folded, at) }
    }

    #[inline(always)]
    fn largest(self, y: &[f16]) -> f32 {
        // SAFETY: self proves the features; whole chunks of 16 are read.
        unsafe { largest(y) }
    }

    #[inline(always)]
    fn raise(self, top: &mut [f32], y: &[f16]) {
        assert!(top.len() >= y.len() && y.len().is_multiple_of(16));
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { raise(top, y) }
    }

    #[inline(always)]
    fn bound<const H: usize>(self, x: &[f32], stride: usize, top: &[f32]) -> [f32; H] {
        assert!(x.len() >= (H - 1) * stride + top.len() && top.len().is_multiple_of(16));
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { bound(x, stride, top) }
    }

    #[inline(always)]
    fn dot<const H: usize>(self, x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
        assert!(x.len() >= (H - 1) * stride + y.len() && y.len().is_multiple_of(16));
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { dot(x, stride, y, sums) }
    }

    #[inline(always)]
    fn plain_scores<E: Element, const H: usize>(
        self,
        q: &[f32],
        head_dim: usize,
        k: &[E],
        out: &mut [f32],
        stride: usize,
        prefetch: *const u8,
    ) {
        assert!(q.len() >= H * head_dim && k.len() == head_dim * PANEL_LANES);
        assert!(out.len() >= (H - 1) * stride + PANEL_LANES);
        // SAFETY: self proves the features; lengths were just checked.
        unsafe {
            if H <= 2 {
                plain_scores::<E, H, 4>(q, head_dim, k, 0, out, stride, prefetch);
            } else {
                plain_scores::<E, H, 2>(q, head_dim, k, 0, out, stride, prefetch);
                plain_scores::<E, H, 2>(q, head_dim, k, 16, out, stride, prefetch);
            }
        }
    }

    #[inline(always)]
    fn plain_values<E: Element, const H: usize>(
        self,
        p: &[f32],
        stride: usize,
        v: &[E],
        head_dim: usize,
        out: &mut [f32],
        prefetch: *const u8,
    ) {
        assert!(p.len() >= (H - 1) * stride + v.len() / head_dim && head_dim.is_multiple_of(16));
        assert!(out.len() >= (H - 1) * MAX_FOLD + head_dim);
        // SAFETY: self proves the features; lengths were just checked.
        unsafe {
            let mut channel = 0;
            while channel < head_dim {
                channel += match head_dim - channel {
                    64.. if H == 1 => plain_values::<E, H, 8>(p, stride, v, head_dim, channel, out, prefetch),
                    32.. if H <= 2 => plain_values::<E, H, 4>(p, stride, v, head_dim, channel, out, prefetch),
                    _ => plain_values::<E, H, 2>(p, stride, v, head_dim, channel, out, prefetch),
                };
            }
        }
    }

    #[inline(always)]
    fn expand(self, from: &Expand<'_>, out: &mut [u8], prefetch: *const u8) {
        // SAFETY: self proves the features.
        unsafe { expand256::expand(from, out, prefetch) }
    }

    #[inline(always)]
    fn widen(self, y: &[f16], out: &mut [f32]) {
        assert!(out.len() >= y.len() && y.len().is_multiple_of(16));
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { widen(y, out) }
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
        // SAFETY: self proves the features; whole chunks of 16 are read.
        unsafe { max(scores) }
    }

    #[inline(always)]
    fn exp(self, scores: &mut [f32], max: f32, sum: &mut Lanes) {
        // SAFETY: self proves the features; whole chunks of 16 are read and written.
        unsafe { exp(scores, max, sum) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load<E: Element>(p: *const E) -> __m256 {
    // SAFETY: the caller gives 8 readable numbers.
    let words = unsafe { _mm_loadu_si128(p.cast()) };
    match E::FORMAT {
        RowFormat::F16 => _mm256_cvtph_ps(words),
        RowFormat::Bf16 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words))),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn largest_lane(x: __m256) -> f32 {
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn fold<const H: usize>(
    x: &[f32],
    stride: usize,
    scales: &[f16],
    bound: &[f32; H],
    folded: &mut Words<H>,
    at: usize,
) {
    let mut factor = [_mm256_setzero_ps(); H];
    for h in 0..H {
        // A bound of (almost) nothing leaves the factor 0: such products vanish in the sum.
        factor[h] = _mm256_set1_ps(if bound[h] > 1e-30 { TOP / bound[h] } else { 0.0 });
        folded.descale[h] = bound[h] / TOP;
    }
    // Words of the two quads in each 128-bit lane: 0, 2, 1, 3.
    let order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for i in (0..scales.len()).step_by(16) {
        // SAFETY: the caller checked that every row of x has as many elements as scales, a multiple of 16 as `at` is, and
        // together at most MAX_FOLD.
        unsafe {
            let scales = [load(scales.as_ptr().add(i)), load(scales.as_ptr().add(i + 8))];
            for h in 0..H {
                let integers = |j: usize| {
                    let y = _mm256_mul_ps(_mm256_loadu_ps(x.as_ptr().add(h * stride + i + 8 * j)), factor[h]);
                    _mm256_cvtps_epi32(_mm256_mul_ps(y, scales[j]))
                };
                let words = _mm256_packs_epi32(integers(0), integers(1));
                let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(words, order));
                _mm256_store_si256(folded.words[h].as_mut_ptr().add(at + i).cast(), words);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn largest(y: &[f16]) -> f32 {
    let mut top = [_mm256_setzero_ps(); 2];
    for y in y.chunks_exact(16) {
        // SAFETY: a chunk has 16 elements.
        unsafe {
            top[0] = _mm256_max_ps(top[0], load(y.as_ptr()));
            top[1] = _mm256_max_ps(top[1], load(y.as_ptr().add(8)));
        }
    }
    largest_lane(_mm256_max_ps(top[0], top[1]))
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(y: &[f16], out: &mut [f32]) {
    for i in (0..y.len()).step_by(8) {
        // SAFETY: the caller checked the lengths.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(i), load(y.as_ptr().add(i))) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn raise(top: &mut [f32], y: &[f16]) {
    for i in (0..y.len()).step_by(8) {
        // SAFETY: the caller checked the lengths.
        unsafe {
            let top = top.as_mut_ptr().add(i);
            _mm256_storeu_ps(top, _mm256_max_ps(_mm256_loadu_ps(top), load(y.as_ptr().add(i))));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bound<const H: usize>(x: &[f32], stride: usize, top: &[f32]) -> [f32; H] {
    let sign = _mm256_set1_ps(-0.0);
    let mut bounds = [0.0; H];
    for (h, bound) in bounds.iter_mut().enumerate() {
        let mut largest = _mm256_setzero_ps();
        for i in (0..top.len()).step_by(8) {
            // SAFETY: the caller checked the lengths.
            let y = unsafe {
                _mm256_mul_ps(_mm256_loadu_ps(x.as_ptr().add(h * stride + i)), _mm256_loadu_ps(top.as_ptr().add(i)))
            };
            largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, y));
        }
        *bound = largest_lane(largest);
    }
    bounds
}

/// Defines `panel` for an instruction set. `$dot(sums, words, x)` adds the dot products of pairs of 16-bit words; up to
/// `$two_chains` query vectors it does so on two chains of sums, where one would wait for its own results.
macro_rules! panel_with {
    ($features:literal, $two_chains:literal, $dot:expr) => {
        /// One panel of any kind. The processor must have the features, `out` H rows of `lanes`, and the panel at most
        /// MAX_FOLD rows.
        #[inline(always)]
        unsafe fn panel<const H: usize>(
            bits: u32,
            codes: &[u8],
            lanes: usize,
            folded: &Words<H>,
            out: &mut [f32],
            stride: usize,
            prefetch: *const u8,
        ) {
            // SAFETY: the caller promises what panel_of asks.
            unsafe {
                match (bits, lanes) {
                    (8, PANEL_LANES) => panel_of::<8, 2, H>(codes, folded, out, stride, prefetch),
                    (4, PANEL_LANES) => panel_of::<4, 2, H>(codes, folded, out, stride, prefetch),
                    (3, PANEL_LANES) => panel_of::<3, 2, H>(codes, folded, out, stride, prefetch),
                    (_, PANEL_LANES) => panel_of::<2, 2, H>(codes, folded, out, stride, prefetch),
                    (8, _) => panel_of::<8, 1, H>(codes, folded, out, stride, prefetch),
                    (4, _) => panel_of::<4, 1, H>(codes, folded, out, stride, prefetch),
                    (3, _) => panel_of::<3, 1, H>(codes, folded, out, stride, prefetch),
                    (_, _) => panel_of::<2, 1, H>(codes, folded, out, stride, prefetch),
                }
            }
        }

        /// One panel of `16*SETS` lanes, in two passes of 8 lanes per set: 4 vectors x 2 sets are half of 16 registers.
        /// The field of set s is left at bit `BITS*s`.
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn panel_of<const BITS: u32, const SETS: usize, const H: usize>(
            codes: &[u8],
            folded: &Words<H>,
            out: &mut [f32],
            stride: usize,
            prefetch: *const u8,
        ) {
            let bit = |set: usize| if BITS < 8 { BITS * set as u32 } else { 0 };
            // Opaque, or the compiler rebuilds the masks from constants for every line, which costs a shuffle each.
            let mask = [0, 1].map(|set| {
                let field = ((1u32 << BITS) - 1) << if SETS == 2 { bit(set) } else { 0 };
                _mm256_set1_epi16(std::hint::black_box(field as i16))
            });
            for half in 0..2 {
                let chains = if H <= $two_chains { 2 } else { 1 };
                let mut acc = [[[_mm256_setzero_si256(); SETS]; H]; 2];
                // The codes of set s of `quad` are the fields `shift` bits up in `$lines[s]`.
                macro_rules! add_quad {
                    ($lines:expr, $shift:expr, $quad:expr) => {
                        for pair in 0..2 {
                            let mut words: [__m256i; 2] = $lines;
                            for set in 0..SETS {
                                let shift = 8 * pair + $shift;
                                if shift > 0 {
                                    words[set] = _mm256_srl_epi16(words[set], _mm_cvtsi32_si128(shift as i32));
                                }
                                if BITS < 8 || pair == 0 {
                                    words[set] = _mm256_and_si256(words[set], mask[set]);
                                }
                            }
                            for h in 0..H {
                                let at = QUAD * $quad + 2 * pair;
                                // SAFETY: quad is below rows/4, and rows are at most MAX_FOLD.
                                let x = unsafe { folded.words[h].as_ptr().add(at).cast::<i32>().read_unaligned() };
                                let x = _mm256_set1_epi32(x);
                                for set in 0..SETS {
                                    let acc = &mut acc[pair % chains][h][set];
                                    *acc = $dot(*acc, words[set], x);
                                }
                            }
                        }
                    };
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
                        for i in 0..lines / SETS {
                            let a = line(SETS * i);
                            let b = if SETS == 2 { line(SETS * i + 1) } else { a };
                            add_quad!([a, b], 0, i);
                        }
                    }
                    4 | 2 => {
                        let quads = 8 / BITS as usize / SETS;
                        for i in 0..lines {
                            let a = line(i);
                            for j in 0..quads {
                                add_quad!([a, a], BITS as usize * SETS * j, quads * i + j);
                            }
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
                            for (k, line) in [a, b, c, d].into_iter().enumerate() {
                                for j in 0..2 / SETS {
                                    add_quad!([line, line], 3 * j, (4 * i + k) * (2 / SETS) + j);
                                }
                            }
                        }
                    }
                }
                for h in 0..H {
                    for set in 0..SETS {
                        let descale = _mm256_set1_ps(folded.descale[h] / (1u32 << bit(set)) as f32);
                        let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(acc[0][h][set], acc[1][h][set]));
                        // SAFETY: the caller checked that out has H rows of 16*SETS.
                        unsafe {
                            let out = out.as_mut_ptr().add(h * stride + set * SLOT_LANES + half * 8);
                            _mm256_storeu_ps(out, _mm256_fmadd_ps(sum, descale, _mm256_loadu_ps(out)));
                        }
                    }
                }
            }
        }
    };
}
pub(super) use panel_with;

panel_with!("avx2,fma,f16c", 0, |sums, words, x| _mm256_add_epi32(sums, _mm256_madd_epi16(words, x)));

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<const H: usize>(x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
    // SAFETY: the caller checked the lengths; Lanes are 16 aligned numbers.
    unsafe {
        let mut acc = [[_mm256_setzero_ps(); 2]; H];
        for h in 0..H {
            (0..2).for_each(|i| acc[h][i] = _mm256_load_ps(sums[h].0.as_ptr().add(8 * i)));
        }
        for i in (0..y.len()).step_by(16) {
            let y = [load(y.as_ptr().add(i)), load(y.as_ptr().add(i + 8))];
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = x.as_ptr().add(h * stride + i);
                (0..2).for_each(|j| acc[j] = _mm256_fmadd_ps(_mm256_loadu_ps(x.add(8 * j)), y[j], acc[j]));
            }
        }
        for h in 0..H {
            (0..2).for_each(|i| _mm256_store_ps(sums[h].0.as_mut_ptr().add(8 * i), acc[h][i]));
        }
    }
}

/// Scores of `8*N` of the 32 tokens, from `token` on.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_scores<E: Element, const H: usize, const N: usize>(
    q: &[f32],
    head_dim: usize,
    k: &[E],
    token: usize,
    out: &mut [f32],
    stride: usize,
    prefetch: *const u8,
) {
    let mut acc = [[_mm256_setzero_ps(); N]; H];
    for channel in 0..head_dim {
        // SAFETY: the caller checked the lengths; a prefetch may name any address.
        unsafe {
            if token == 0 {
                _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(channel * LINE).cast());
            }
            let row = k.as_ptr().add(channel * PANEL_LANES + token);
            let mut k = [_mm256_setzero_ps(); N];
            (0..N).for_each(|i| k[i] = load(row.add(8 * i)));
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*q.get_unchecked(h * head_dim + channel));
                (0..N).for_each(|i| acc[i] = _mm256_fmadd_ps(x, k[i], acc[i]));
            }
        }
    }
    for (h, acc) in acc.iter().enumerate() {
        // SAFETY: the caller checked that out has H rows of 32.
        unsafe {
            let out = out.as_mut_ptr().add(h * stride + token);
            (0..N).for_each(|i| _mm256_storeu_ps(out.add(8 * i), acc[i]));
        }
    }
}

/// `8*N` channels from `channel` on; returns how many that is.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_values<E: Element, const H: usize, const N: usize>(
    p: &[f32],
    stride: usize,
    v: &[E],
    head_dim: usize,
    channel: usize,
    out: &mut [f32],
    prefetch: *const u8,
) -> usize {
    let out = out.as_mut_ptr();
    let out = |h: usize, i: usize| out.wrapping_add(h * MAX_FOLD + channel + 8 * i);
    let mut acc = [[_mm256_setzero_ps(); N]; H];
    // SAFETY: the caller checked that out has H rows of head_dim, v whole rows of head_dim, and p a weight for each.
    unsafe {
        for h in 0..H {
            (0..N).for_each(|i| acc[h][i] = _mm256_loadu_ps(out(h, i)));
        }
        for token in 0..v.len() / head_dim {
            let at = token * head_dim + channel;
            if channel.is_multiple_of(32) {
                for i in 0..N.div_ceil(4) {
                    _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(2 * at + i * LINE).cast());
                }
            }
            let row = v.as_ptr().add(at);
            let mut values = [_mm256_setzero_ps(); N];
            (0..N).for_each(|i| values[i] = load(row.add(8 * i)));
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*p.get_unchecked(h * stride + token));
                (0..N).for_each(|i| acc[i] = _mm256_fmadd_ps(x, values[i], acc[i]));
            }
        }
        for h in 0..H {
            (0..N).for_each(|i| _mm256_storeu_ps(out(h, i), acc[h][i]));
        }
    }
    8 * N
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn max(scores: &[f32]) -> f32 {
    let mut top = [_mm256_set1_ps(f32::NEG_INFINITY); 2];
    for s in scores.chunks_exact(16) {
        // SAFETY: a chunk has 16 elements.
        (0..2).for_each(|i| top[i] = _mm256_max_ps(top[i], unsafe { _mm256_loadu_ps(s.as_ptr().add(8 * i)) }));
    }
    largest_lane(_mm256_max_ps(top[0], top[1]))
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn exp(scores: &mut [f32], max: f32, sum: &mut Lanes) {
    let max = _mm256_set1_ps(max);
    let least = _mm256_set1_ps(MIN_EXP);
    // SAFETY: Lanes are 16 aligned numbers.
    let mut total = unsafe { [_mm256_load_ps(sum.0.as_ptr()), _mm256_load_ps(sum.0.as_ptr().add(8))] };
    for s in scores.chunks_exact_mut(16) {
        for (half, total) in total.iter_mut().enumerate() {
            // SAFETY: a chunk has 16 elements.
            unsafe {
                let s = s.as_mut_ptr().add(8 * half);
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
                *total = _mm256_add_ps(*total, e);
                _mm256_storeu_ps(s, e);
            }
        }
    }
    // SAFETY: as above.
    unsafe {
        _mm256_store_ps(sum.0.as_mut_ptr(), total[0]);
        _mm256_store_ps(sum.0.as_mut_ptr().add(8), total[1]);
    }
}
