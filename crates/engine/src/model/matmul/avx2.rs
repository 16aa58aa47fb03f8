//! AVX2 product: codes and integers as 16-bit pairs (`vpmaddwd`), exact in i32: `32 * 255 * 16256 < 2^31`.
//! Integers of an activation block are stored as 32 i16 (portable.rs).
//! NOT here: layout of weights (mod.rs).

use super::{Activations, Format, TILE, Tile};
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

    /// See `Kernel::multiply`.
    pub(super) fn multiply(self, tile: &Tile<'_>, x: &Activations, out: &mut [[f32; TILE]]) {
        assert!(tile.params.len() == x.blocks && tile.lines.len() == x.blocks * tile.format.lines());
        assert!(x.integers.len() >= out.len() * x.blocks);
        for (row, out) in out.iter_mut().enumerate() {
            // SAFETY: self proves the features; the tile has x.blocks blocks and x has the row.
            unsafe {
                match tile.format {
                    Format::Affine4 => one_row::<4>(tile, x, row, out),
                    Format::Offset8 => one_row::<8>(tile, x, row, out),
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one_row<const BITS: usize>(tile: &Tile<'_>, x: &Activations, row: usize, out: &mut [f32; TILE]) {
    let mut acc = [_mm256_setzero_ps(); 2];
    let low_bits = _mm_set1_epi8(15);
    for b in 0..x.blocks {
        let at = row * x.blocks + b;
        // Four columns each, two partial sums per column.
        let mut sums = [_mm256_setzero_si256(); 4];
        // SAFETY: the caller checked that the tile has x.blocks blocks of BITS lines and x the row.
        unsafe {
            let integers = x.integers.as_ptr().add(at).cast::<i64>();
            for i in 0..BITS {
                let line = tile.lines.as_ptr().add(b * BITS + i).cast::<__m128i>();
                let quad = |q: usize| _mm256_set1_epi64x(integers.add(q).read());
                for (c, sum) in sums.iter_mut().enumerate() {
                    let bytes = _mm_load_si128(line.add(c));
                    let mut add = |codes: __m128i, q: usize| {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_cvtepu8_epi16(codes), quad(q)));
                    };
                    if BITS == 4 {
                        add(_mm_and_si128(bytes, low_bits), i);
                        add(_mm_and_si128(_mm_srli_epi16::<4>(bytes), low_bits), i + 4);
                    } else {
                        add(bytes, i);
                    }
                }
            }
            let params = &tile.params[b];
            for half in 0..2 {
                // hadd interleaves its operands' 128-bit lanes: columns 0 1 4 5 | 2 3 6 7.
                let pairs = _mm256_hadd_epi32(sums[2 * half], sums[2 * half + 1]);
                let sum = _mm256_permute4x64_epi64::<0b11_01_10_00>(pairs);
                let scale = _mm256_cvtph_ps(_mm_loadu_si128(params.scale.as_ptr().add(8 * half).cast()));
                let min = _mm256_cvtph_ps(_mm_loadu_si128(params.min.as_ptr().add(8 * half).cast()));
                let factor = _mm256_mul_ps(scale, _mm256_set1_ps(x.steps[at]));
                acc[half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, acc[half]);
                acc[half] = _mm256_fmadd_ps(min, _mm256_set1_ps(x.sums[at]), acc[half]);
            }
        }
    }
    // SAFETY: out has 16 elements.
    unsafe {
        _mm256_storeu_ps(out.as_mut_ptr(), acc[0]);
        _mm256_storeu_ps(out.as_mut_ptr().add(8), acc[1]);
    }
}
