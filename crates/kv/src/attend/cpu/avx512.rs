//! AVX-512 with VNNI: 8-bit dot products on packed codes (`vpdpbusd`), f32 FMA on f16 or bf16 rows.
//!
//! Folded multipliers are 15-bit integers in two signed 8-bit limbs, `y = 128*hi + lo`, scaled per query vector by a bound
//! on their magnitudes (keys: one per range, from its scales; values: one per group, from its largest weight and scale);
//! codes are masked in place, never shifted where lanes differ (a field's power of two goes into the descale). Sums stay
//! exact in i32: `384 rows * 255 * 127 * 128 < 2^31`.
//! Accuracy: each multiplier is off by at most max/32512, about 6e-4 relative in the output of real shapes.
//! Tried and lost: one limb per multiplier (error 0.15 unless the codes are centred).
//! NOT here: the loop (generic.rs), the bit format (quant/pack.rs).

use super::expand512;
use super::fold512::{bound, fold, raise, widen};
use super::generic::{Scratch, Task, attend_range};
use super::kernel::{Expand, Kernel, Lanes, MAX_FOLD, Panels, Sums, Vectors};
use super::portable::{EXP2, MIN_EXP};
use crate::RowFormat;
use crate::attend::softmax::States;
use crate::element::Element;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use half::f16;
use std::arch::x86_64::*;

/// What [`Avx512Vnni::new`] looks for.
pub(crate) const NEEDS: &str = "avx512f, avx512bw, avx512vl, avx512dq, avx512vnni";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(());

impl Avx512Vnni {
    pub(crate) fn new() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni");
        all.then_some(Self(()))
    }
}

entry_point!(Avx512Vnni, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");

/// Bits of the lower limb.
pub(super) const LOW_BITS: u32 = 7;
/// Largest magnitude of a multiplier: hi reaches 127, lo stays in -64..=63.
pub(super) const TOP: f32 = 16256.0;

/// Multipliers of one fold: `value[h][i] = (128*limbs[0][h][i] + limbs[1][h][i]) * descale[h]`.
#[repr(align(64))]
pub(crate) struct Limbs<const H: usize> {
    pub(super) limbs: [[[i8; MAX_FOLD]; H]; 2],
    pub(super) descale: [f32; H],
}

impl Kernel for Avx512Vnni {
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
        folded: &Limbs<H>,
        out: &mut [f32],
        stride: usize,
        _sums: &mut Sums,
    ) {
        panels.check::<H>(out, stride);
        for (codes, first, lanes, prefetch) in panels.each() {
            // SAFETY: self proves the features; out holds H rows of all lanes, and the codes have at most MAX_FOLD rows.
            unsafe { panel_of(panels.bits, codes, lanes, folded, &mut out[first..], stride, prefetch) }
        }
    }
}

impl Vectors for Avx512Vnni {
    type Folded<const H: usize> = Limbs<H>;

    fn folded<const H: usize>(self) -> Limbs<H> {
        Limbs { limbs: [[[0; MAX_FOLD]; H]; 2], descale: [0.0; H] }
    }

    #[inline(always)]
    fn fold<const H: usize>(
        self,
        x: &[f32],
        stride: usize,
        scales: &[f16],
        bound: &[f32; H],
        folded: &mut Limbs<H>,
        at: usize,
    ) {
        assert!(at <= MAX_FOLD && scales.len() <= MAX_FOLD - at && (at | scales.len()).is_multiple_of(16));
        assert!(x.len() >= (H - 1) * stride + scales.len());
        // SAFETY: self proves the features; lengths were just checked.
        unsafe { fold(x, stride, scales, bound, folded, at) }
    }

    #[inline(always)]
    fn largest(self, y: &[f16]) -> f32 {
        // SAFETY: self proves the features; whole chunks of 32 are read.
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
        unsafe { plain_scores::<E, H>(q, head_dim, k, out, stride, prefetch) }
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
                    64.. if H <= 4 => plain_values::<E, H, 4>(p, stride, v, head_dim, channel, out, prefetch),
                    32.. => plain_values::<E, H, 2>(p, stride, v, head_dim, channel, out, prefetch),
                    _ => plain_values::<E, H, 1>(p, stride, v, head_dim, channel, out, prefetch),
                };
            }
        }
    }

    #[inline(always)]
    fn expand(self, from: &Expand<'_>, out: &mut [u8], prefetch: *const u8) {
        // SAFETY: self proves the features.
        unsafe { expand512::expand(from, out, prefetch) }
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn load<E: Element>(p: *const E) -> __m512 {
    // SAFETY: the caller gives 16 readable numbers.
    let words = unsafe { _mm256_loadu_si256(p.cast()) };
    match E::FORMAT {
        RowFormat::F16 => _mm512_cvtph_ps(words),
        RowFormat::Bf16 => _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words))),
    }
}

/// One panel of any kind.
#[inline(always)]
unsafe fn panel_of<const H: usize>(
    bits: u32,
    codes: &[u8],
    lanes: usize,
    folded: &Limbs<H>,
    out: &mut [f32],
    stride: usize,
    prefetch: *const u8,
) {
    // SAFETY: the caller promises what panel asks.
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

/// One panel of `16*SETS` lanes. Slots go to the accumulator of their set.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn panel<const BITS: u32, const SETS: usize, const H: usize>(
    codes: &[u8],
    folded: &Limbs<H>,
    out: &mut [f32],
    stride: usize,
    prefetch: *const u8,
) {
    let mut acc = [[[_mm512_setzero_si512(); SETS]; H]; 2];
    for_each_slot::<BITS, SETS>(codes, prefetch, |quad, set, codes| {
        for limb in 0..2 {
            for h in 0..H {
                // SAFETY: quad is below rows/4, and rows are at most MAX_FOLD.
                let x = unsafe { folded.limbs[limb][h].as_ptr().add(QUAD * quad).cast::<i32>().read_unaligned() };
                acc[limb][h][set] = _mm512_dpbusd_epi32(acc[limb][h][set], codes, _mm512_set1_epi32(x));
            }
        }
    });
    for h in 0..H {
        for set in 0..SETS {
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<LOW_BITS>(acc[0][h][set]), acc[1][h][set]);
            let descale = descale::<BITS, H>(folded, h, set);
            // SAFETY: the caller checked that out has H rows of 16*SETS.
            unsafe {
                let out = out.as_mut_ptr().add(h * stride + set * SLOT_LANES);
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), descale, _mm512_loadu_ps(out)));
            }
        }
    }
}

/// What sums of set `set` are multiplied with: their field was left at bit `BITS*set`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn descale<const BITS: u32, const H: usize>(folded: &Limbs<H>, h: usize, set: usize) -> __m512 {
    let bit = if BITS < 8 { BITS * set as u32 } else { 0 };
    _mm512_set1_ps(folded.descale[h] / (1u32 << bit) as f32)
}

/// Calls `each(quad, set, codes)` for every slot of a panel of `16*SETS` lanes, line by line; the field of set s is left at
/// bit `BITS*s`. Asks for as much memory from `prefetch` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn for_each_slot<const BITS: u32, const SETS: usize>(
    codes: &[u8],
    prefetch: *const u8,
    mut each: impl FnMut(usize, usize, __m512i),
) {
    let mask = [0, 1].map(|set: u32| {
        let set = if SETS == 2 && BITS < 8 { set } else { 0 };
        _mm512_set1_epi8((((1u32 << BITS) - 1) << (BITS * set)) as u8 as i8)
    });
    // `field` of `line` is slot `slot`; fields of one set stand at the same bit after the shift.
    macro_rules! slot {
        ($line:expr, $field:expr, $slot:expr) => {{
            let (quad, set) = ($slot / SETS, $slot % SETS);
            let line = if $field / SETS == 0 {
                $line
            } else {
                _mm512_srl_epi16($line, _mm_cvtsi32_si128((BITS as usize * SETS * ($field / SETS)) as i32))
            };
            each(quad, set, if BITS == 8 { line } else { _mm512_and_si512(line, mask[set]) });
        }};
    }
    let lines = codes.len() / LINE;
    let line = |i: usize| {
        // SAFETY: i < lines; a prefetch may name any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(i * LINE).cast());
            _mm512_loadu_si512(codes.as_ptr().add(i * LINE).cast())
        }
    };
    match BITS {
        8 if SETS == 2 => {
            for i in 0..lines / 2 {
                let (a, b) = (line(2 * i), line(2 * i + 1));
                slot!(a, 0, 2 * i);
                slot!(b, 0, 2 * i + 1);
            }
        }
        8 => {
            for i in 0..lines {
                let a = line(i);
                slot!(a, 0, i);
            }
        }
        4 => {
            for i in 0..lines {
                let a = line(i);
                slot!(a, 0, 2 * i);
                slot!(a, 1, 2 * i + 1);
            }
        }
        2 => {
            for i in 0..lines {
                let a = line(i);
                slot!(a, 0, 4 * i);
                slot!(a, 1, 4 * i + 1);
                slot!(a, 2, 4 * i + 2);
                slot!(a, 3, 4 * i + 3);
            }
        }
        _ => {
            for i in 0..lines / 3 {
                let (a, b, c) = (line(3 * i), line(3 * i + 1), line(3 * i + 2));
                // Bit-select (0xD8: third operand chooses) of the top bits of the three lines.
                let d = _mm512_ternarylogic_epi32::<0xD8>(
                    _mm512_srli_epi16::<6>(a),
                    _mm512_srli_epi16::<4>(b),
                    _mm512_set1_epi8(0x0c),
                );
                let d = _mm512_ternarylogic_epi32::<0xD8>(d, _mm512_srli_epi16::<2>(c), _mm512_set1_epi8(0x30));
                slot!(a, 0, 8 * i);
                slot!(a, 1, 8 * i + 1);
                slot!(b, 0, 8 * i + 2);
                slot!(b, 1, 8 * i + 3);
                slot!(c, 0, 8 * i + 4);
                slot!(c, 1, 8 * i + 5);
                slot!(d, 0, 8 * i + 6);
                slot!(d, 1, 8 * i + 7);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot<const H: usize>(x: &[f32], stride: usize, y: &[f16], sums: &mut [Lanes; H]) {
    // SAFETY: the caller checked the lengths; Lanes are 16 aligned numbers.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); H];
        (0..H).for_each(|h| acc[h] = _mm512_load_ps(sums[h].0.as_ptr()));
        for i in (0..y.len()).step_by(16) {
            let y = load(y.as_ptr().add(i));
            for (h, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_fmadd_ps(_mm512_loadu_ps(x.as_ptr().add(h * stride + i)), y, *acc);
            }
        }
        (0..H).for_each(|h| _mm512_store_ps(sums[h].0.as_mut_ptr(), acc[h]));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn plain_scores<E: Element, const H: usize>(
    q: &[f32],
    head_dim: usize,
    k: &[E],
    out: &mut [f32],
    stride: usize,
    prefetch: *const u8,
) {
    let mut acc = [[_mm512_setzero_ps(); 2]; H];
    for channel in 0..head_dim {
        // SAFETY: the caller checked the lengths; a prefetch may name any address.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(channel * LINE).cast());
            let row = k.as_ptr().add(channel * PANEL_LANES);
            let k = [load(row), load(row.add(16))];
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*q.get_unchecked(h * head_dim + channel));
                acc[0] = _mm512_fmadd_ps(x, k[0], acc[0]);
                acc[1] = _mm512_fmadd_ps(x, k[1], acc[1]);
            }
        }
    }
    for (h, acc) in acc.iter().enumerate() {
        // SAFETY: the caller checked that out has H rows of 32.
        unsafe {
            let out = out.as_mut_ptr().add(h * stride);
            _mm512_storeu_ps(out, acc[0]);
            _mm512_storeu_ps(out.add(16), acc[1]);
        }
    }
}

/// `16*N` channels from `channel` on; returns how many that is.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
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
    let out = |h: usize, i: usize| out.wrapping_add(h * MAX_FOLD + channel + 16 * i);
    let mut acc = [[_mm512_setzero_ps(); N]; H];
    // SAFETY: the caller checked that out has H rows of head_dim, v whole rows of head_dim, and p a weight for each.
    unsafe {
        for h in 0..H {
            (0..N).for_each(|i| acc[h][i] = _mm512_loadu_ps(out(h, i)));
        }
        for token in 0..v.len() / head_dim {
            let at = token * head_dim + channel;
            for i in 0..N.div_ceil(2) {
                _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(2 * at + i * LINE).cast());
            }
            let row = v.as_ptr().add(at);
            let mut values = [_mm512_setzero_ps(); N];
            (0..N).for_each(|i| values[i] = load(row.add(16 * i)));
            for (h, acc) in acc.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*p.get_unchecked(h * stride + token));
                (0..N).for_each(|i| acc[i] = _mm512_fmadd_ps(x, values[i], acc[i]));
            }
        }
        for h in 0..H {
            (0..N).for_each(|i| _mm512_storeu_ps(out(h, i), acc[h][i]));
        }
    }
    16 * N
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn largest(y: &[f16]) -> f32 {
    let mut top = [_mm512_setzero_ps(); 2];
    for y in y.chunks_exact(32) {
        // SAFETY: a chunk has 32 elements.
        unsafe {
            top[0] = _mm512_max_ps(top[0], load(y.as_ptr()));
            top[1] = _mm512_max_ps(top[1], load(y.as_ptr().add(16)));
        }
    }
    _mm512_reduce_max_ps(_mm512_max_ps(top[0], top[1]))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn max(scores: &[f32]) -> f32 {
    let mut top = _mm512_set1_ps(f32::NEG_INFINITY);
    for s in scores.chunks_exact(16) {
        // SAFETY: a chunk has 16 elements.
        top = _mm512_max_ps(top, unsafe { _mm512_loadu_ps(s.as_ptr()) });
    }
    _mm512_reduce_max_ps(top)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn exp(scores: &mut [f32], max: f32, sum: &mut Lanes) {
    let max = _mm512_set1_ps(max);
    let least = _mm512_set1_ps(MIN_EXP);
    // SAFETY: Lanes are 16 aligned numbers.
    let mut total = unsafe { _mm512_load_ps(sum.0.as_ptr()) };
    for s in scores.chunks_exact_mut(16) {
        // SAFETY: a chunk has 16 elements.
        unsafe {
            let x = _mm512_sub_ps(_mm512_loadu_ps(s.as_ptr()), max);
            let seen = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, least);
            let y = _mm512_mul_ps(_mm512_max_ps(x, least), _mm512_set1_ps(std::f32::consts::LOG2_E));
            let n = _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(y);
            let f = _mm512_sub_ps(y, n);
            let mut p = _mm512_set1_ps(EXP2[0]);
            for c in &EXP2[1..] {
                p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(*c));
            }
            let e = _mm512_maskz_scalef_ps(seen, p, n);
            total = _mm512_add_ps(total, e);
            _mm512_storeu_ps(s.as_mut_ptr(), e);
        }
    }
    // SAFETY: as above.
    unsafe { _mm512_store_ps(sum.0.as_mut_ptr(), total) };
}
