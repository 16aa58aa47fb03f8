//! Codes as bytes with AVX2. In: the codes of half a record; out: panels of 8 bits that hold levels. As expand512.rs, with half
//! lines and 8 tokens at once; 16 dwords are two vectors, chosen between by the code's upper bit.
//! NOT here: products (avx2.rs, avxvnni.rs), the plain way (expand.rs).

use super::kernel::Expand;
use crate::Codebook;
use crate::quant::grid::Grid;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use std::arch::x86_64::*;

/// Bytes of a vector.
const HALF: usize = LINE / 2;
/// Tokens at once.
const TOKENS: usize = 8;

expand_with!("avx2,fma,f16c");

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn grid_codes<const BITS: u32>(grid: &Grid, codes: &[u8], out: &mut [u8], prefetch: *const u8) {
    ahead(prefetch, codes.len());
    let levels: [u8; 16] = std::array::from_fn(|code| grid.level(code as u8));
    let mask = _mm256_set1_epi8(((1 << BITS) - 1) as i8);
    let to = out.as_mut_ptr();
    // SAFETY: out has a slot for every field of every line of codes, as the caller checked.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast()));
        let put = |slot: usize, half: usize, codes: __m256i, bit: i32| {
            let field = _mm256_srl_epi16(codes, _mm_cvtsi32_si128(bit));
            let levels = _mm256_shuffle_epi8(table, _mm256_and_si256(field, mask));
            _mm256_storeu_si256(to.add(slot * LINE + half * HALF).cast(), levels);
        };
        for half in 0..2 {
            let line = |i: usize| _mm256_loadu_si256(codes.as_ptr().add(i * LINE + half * HALF).cast());
            if BITS != 3 {
                let fields = 8 / BITS as usize;
                for i in 0..codes.len() / LINE {
                    let a = line(i);
                    (0..fields).for_each(|j| put(fields * i + j, half, a, (BITS as usize * j) as i32));
                }
                continue;
            }
            let top = |field: __m256i, mask: i8| _mm256_and_si256(field, _mm256_set1_epi8(mask));
            for i in 0..codes.len() / LINE / 3 {
                let [a, b, c] = [line(3 * i), line(3 * i + 1), line(3 * i + 2)];
                for (j, x) in [a, b, c].into_iter().enumerate() {
                    put(8 * i + 2 * j, half, x, 0);
                    put(8 * i + 2 * j + 1, half, x, 3);
                }
                let low = top(_mm256_srli_epi16::<6>(a), 0x03);
                let middle = top(_mm256_srli_epi16::<4>(b), 0x0c);
                let high = top(_mm256_srli_epi16::<2>(c), 0x30);
                let pair = _mm256_or_si256(_mm256_or_si256(low, middle), high);
                put(8 * i + 6, half, pair, 0);
                put(8 * i + 7, half, pair, 3);
            }
        }
    }
}

/// Codes of 8 tokens of a sub-vector as dwords.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn codes_of<const CENTROIDS: usize>(codes: *const u8, sub: usize, token: usize, group_len: usize) -> __m256i {
    // SAFETY: the caller's codes hold every sub-vector and token.
    unsafe {
        if CENTROIDS == 256 {
            return _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.add(sub * group_len + token).cast()));
        }
        let half = group_len / 2;
        let bytes = _mm_loadl_epi64(codes.add(sub * half + token % half).cast());
        let bytes = if token < half { bytes } else { _mm_srli_epi16::<4>(bytes) };
        _mm256_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15)))
    }
}

/// Levels of 8 tokens' centroids: one dword of four channels each. QUADS is the quads of a sub-vector, `part` the one wanted.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn levels_of<const CENTROIDS: usize, const QUADS: usize>(
    levels: *const u8,
    part: usize,
    codes: __m256i,
) -> __m256i {
    // SAFETY: the caller's levels are those of CENTROIDS centroids of QUADS quads, and codes are below that.
    unsafe {
        if CENTROIDS == 16 && QUADS == 1 {
            let low = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(levels.cast()), codes);
            let high = _mm256_permutevar8x32_epi32(_mm256_loadu_si256(levels.add(HALF).cast()), codes);
            // Bit 3 of the code to the sign of the dword.
            let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
            let either = _mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), upper);
            return _mm256_castps_si256(either);
        }
        let from = levels.add(part * QUAD).cast();
        if QUADS == 1 { _mm256_i32gather_epi32::<4>(from, codes) } else { _mm256_i32gather_epi32::<8>(from, codes) }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn keys<const CENTROIDS: usize, const QUADS: usize>(
    book: &Codebook,
    codes: &[u8],
    group_len: usize,
    out: &mut [u8],
) {
    let panel_bytes = PANEL_LANES * book.head_dim();
    for sub in 0..book.subs() {
        let levels = book.levels_of(sub).as_ptr();
        for token in (0..group_len).step_by(TOKENS) {
            let (panel, set) = (token / PANEL_LANES, token % PANEL_LANES / SLOT_LANES);
            // SAFETY: the caller checked the lengths: a panel has two slots for each quad of channels.
            unsafe {
                let codes = codes_of::<CENTROIDS>(codes.as_ptr(), sub, token, group_len);
                for part in 0..QUADS {
                    let slot = (sub * QUADS + part) * 2 + set;
                    let at = panel * panel_bytes + slot * LINE + token % SLOT_LANES * QUAD;
                    let levels = levels_of::<CENTROIDS, QUADS>(levels, part, codes);
                    _mm256_storeu_si256(out.as_mut_ptr().add(at).cast(), levels);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn values<const CENTROIDS: usize, const QUADS: usize>(
    book: &Codebook,
    codes: &[u8],
    group_len: usize,
    out: &mut [u8],
) {
    // Bytes of 4 tokens x 4 channels to 4 channels x 4 tokens, in every 128-bit lane.
    let turn = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for quad in 0..book.head_dim() / QUAD {
        let channel = quad * QUAD;
        let panel = channel / PANEL_LANES * PANEL_LANES;
        let sets = PANEL_LANES.min(book.head_dim() - panel) / SLOT_LANES;
        let set = (channel - panel) / SLOT_LANES;
        let levels = book.levels_of(quad / QUADS).as_ptr();
        for token in (0..group_len).step_by(TOKENS) {
            // SAFETY: the caller checked the lengths: a panel has `sets` slots for each quad of tokens.
            unsafe {
                let codes = codes_of::<CENTROIDS>(codes.as_ptr(), quad / QUADS, token, group_len);
                let row = _mm256_shuffle_epi8(levels_of::<CENTROIDS, QUADS>(levels, quad % QUADS, codes), turn);
                let at = |q: usize| {
                    let slot = (token / QUAD + q) * sets + set;
                    panel * group_len + slot * LINE + channel % SLOT_LANES * QUAD
                };
                _mm_storeu_si128(out.as_mut_ptr().add(at(0)).cast(), _mm256_castsi256_si128(row));
                _mm_storeu_si128(out.as_mut_ptr().add(at(1)).cast(), _mm256_extracti128_si256::<1>(row));
            }
        }
    }
}
