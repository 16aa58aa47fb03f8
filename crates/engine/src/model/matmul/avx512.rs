//! AVX-512 VNNI product. Integers of an activation block are stored as two signed 8-bit limbs, `i = 128*hi + lo`:
//! 32 bytes of hi, then 32 of lo. `vpdpbusd` sums four products per column exactly.
//! NOT here: layout of weights (mod.rs).

use super::{Activations, BLOCK, Format, Line, TILE, Tile};
use std::arch::x86_64::*;

/// What [`Avx512Vnni::new`] looks for.
pub(super) const NEEDS: &str = "avx512f, avx512bw, avx512vl, avx512vnni";

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Avx512Vnni(());

/// Rows that share one pass over a tile: two sums each, beside eight lines of codes, fit 32 registers.
const ROWS: usize = 6;
/// Lines ahead of use that are asked for: weights stream from memory, and where the hardware does not run ahead, an
/// unasked line costs a whole memory latency. 2 KiB ahead was best of 1, 2, 4 and 8 on the development machine.
const AHEAD: usize = 32;

impl Avx512Vnni {
    pub(super) fn new() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        all.then_some(Self(()))
    }

    /// See `Kernel::multiply`.
    pub(super) fn multiply(self, tile: &Tile<'_>, x: &Activations, out: &mut [[f32; TILE]]) {
        assert!(tile.params.len() == x.blocks && tile.lines.len() == x.blocks * tile.format.lines());
        assert!(x.integers.len() >= out.len() * x.blocks && x.steps.len() == x.integers.len());
        assert!(x.sums.len() == x.integers.len());
        let mut row = 0;
        while row < out.len() {
            let n = (out.len() - row).min(ROWS);
            // SAFETY: self proves the features; the tile has x.blocks blocks, x and out have rows row..row+n.
            unsafe {
                match (tile.format, n) {
                    (Format::Affine4, 1) => rows::<4, 1>(tile, x, row, out),
                    (Format::Affine4, 2) => rows::<4, 2>(tile, x, row, out),
                    (Format::Affine4, 3) => rows::<4, 3>(tile, x, row, out),
                    (Format::Affine4, 4) => rows::<4, 4>(tile, x, row, out),
                    (Format::Affine4, 5) => rows::<4, 5>(tile, x, row, out),
                    (Format::Affine4, _) => rows::<4, 6>(tile, x, row, out),
                    (Format::Offset8, 1) => rows::<8, 1>(tile, x, row, out),
                    (Format::Offset8, 2) => rows::<8, 2>(tile, x, row, out),
                    (Format::Offset8, 3) => rows::<8, 3>(tile, x, row, out),
                    (Format::Offset8, 4) => rows::<8, 4>(tile, x, row, out),
                    (Format::Offset8, 5) => rows::<8, 5>(tile, x, row, out),
                    (Format::Offset8, _) => rows::<8, 6>(tile, x, row, out),
                }
            }
            row += n;
        }
    }
}

/// Splits integers of at most 16256 into limbs.
pub(super) fn store(integers: &[i16; BLOCK], line: &mut Line) {
    for (i, &y) in integers.iter().enumerate() {
        let high = (y + 64) >> 7;
        line.0[i] = high as i8 as u8;
        line.0[BLOCK + i] = (y - (high << 7)) as i8 as u8;
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
unsafe fn rows<const BITS: usize, const R: usize>(
    tile: &Tile<'_>,
    x: &Activations,
    first: usize,
    out: &mut [[f32; TILE]],
) {
    let blocks = x.blocks;
    let low_bits = _mm512_set1_epi8(15);
    let mut acc = [_mm512_setzero_ps(); R];
    for b in 0..blocks {
        let mut sums = [[_mm512_setzero_si512(); 2]; R];
        // SAFETY: holds for all below: the caller checked that tile has `blocks` blocks and x has rows first..first+R; a prefetch
        // may name any address.
        unsafe {
            let lines = tile.lines.as_ptr().add(b * BITS);
            let integers = |r: usize| x.integers.as_ptr().add((first + r) * blocks + b).cast::<i32>();
            let mut add = |codes: __m512i, quad: usize| {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let high = _mm512_set1_epi32(integers(r).add(quad).read());
                    let low = _mm512_set1_epi32(integers(r).add(8 + quad).read());
                    sums[0] = _mm512_dpbusd_epi32(sums[0], codes, high);
                    sums[1] = _mm512_dpbusd_epi32(sums[1], codes, low);
                }
            };
            for i in 0..BITS {
                _mm_prefetch::<_MM_HINT_T0>(lines.wrapping_add(i + AHEAD).cast());
                let line = _mm512_load_si512(lines.add(i).cast());
                if BITS == 4 {
                    add(_mm512_and_si512(line, low_bits), i);
                    add(_mm512_and_si512(_mm512_srli_epi16::<4>(line), low_bits), i + 4);
                } else {
                    add(line, i);
                }
            }
            let params = tile.params.as_ptr().add(b);
            _mm_prefetch::<_MM_HINT_T0>(params.wrapping_add(AHEAD / BITS).cast());
            let scale = _mm512_cvtph_ps(_mm256_load_si256((*params).scale.as_ptr().cast()));
            let min = _mm512_cvtph_ps(_mm256_load_si256((*params).min.as_ptr().cast()));
            for r in 0..R {
                let at = (first + r) * blocks + b;
                let sum = _mm512_add_epi32(_mm512_slli_epi32::<7>(sums[r][0]), sums[r][1]);
                let factor = _mm512_mul_ps(scale, _mm512_set1_ps(*x.steps.get_unchecked(at)));
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, acc[r]);
                acc[r] = _mm512_fmadd_ps(min, _mm512_set1_ps(*x.sums.get_unchecked(at)), acc[r]);
            }
        }
    }
    for (r, acc) in acc.into_iter().enumerate() {
        // SAFETY: out[..] has 16 elements.
        unsafe { _mm512_storeu_ps(out[first + r].as_mut_ptr(), acc) };
    }
}
