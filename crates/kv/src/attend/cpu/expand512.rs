//! Codes as bytes with AVX-512. In: the codes of half a record; out: panels of 8 bits that hold levels.
//!
//! - A grid: fields of a line are masked and looked up among 16 bytes (`vpshufb`).
//! - Sub-vectors of keys: the four levels of a centroid are a dword, and 16 tokens' dwords are a slot: looked up among 16
//!   (`vpermd`), or gathered among 256.
//! - Sub-vectors of values: the same dwords of four neighbouring quads of channels, transposed twice: bytes of 4 tokens inside a
//!   128-bit lane, then lanes.
//!
//! Tried and lost: writing the bytes of the next group before those of this one are used (3 to 8 % slower: they leave the
//! first-level cache).
//! NOT here: products (avx512.rs), the plain way (expand.rs).

use super::kernel::Expand;
use crate::Codebook;
use crate::quant::grid::Grid;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES};
use std::arch::x86_64::*;

expand_with!("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni");

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn grid_codes<const BITS: u32>(grid: &Grid, codes: &[u8], out: &mut [u8], prefetch: *const u8) {
    let levels: [u8; 16] = std::array::from_fn(|code| grid.level(code as u8));
    let mask = _mm512_set1_epi8(((1 << BITS) - 1) as i8);
    let to = out.as_mut_ptr();
    // SAFETY: out has a slot for every field of every line of codes, as the caller checked; a prefetch may name any address.
    unsafe {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(levels.as_ptr().cast()));
        let line = |i: usize| {
            _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(i * LINE).cast());
            _mm512_loadu_si512(codes.as_ptr().add(i * LINE).cast())
        };
        let put = |slot: usize, codes: __m512i| {
            let levels = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
            _mm512_storeu_si512(to.add(slot * LINE).cast(), levels);
        };
        let lines = codes.len() / LINE;
        match BITS {
            1 => {
                for i in 0..lines {
                    let a = line(i);
                    put(8 * i, a);
                    put(8 * i + 1, _mm512_srli_epi16::<1>(a));
                    put(8 * i + 2, _mm512_srli_epi16::<2>(a));
                    put(8 * i + 3, _mm512_srli_epi16::<3>(a));
                    put(8 * i + 4, _mm512_srli_epi16::<4>(a));
                    put(8 * i + 5, _mm512_srli_epi16::<5>(a));
                    put(8 * i + 6, _mm512_srli_epi16::<6>(a));
                    put(8 * i + 7, _mm512_srli_epi16::<7>(a));
                }
            }
            2 => {
                for i in 0..lines {
                    let a = line(i);
                    put(4 * i, a);
                    put(4 * i + 1, _mm512_srli_epi16::<2>(a));
                    put(4 * i + 2, _mm512_srli_epi16::<4>(a));
                    put(4 * i + 3, _mm512_srli_epi16::<6>(a));
                }
            }
            3 => {
                let top = |shift: __m512i, mask: i8| _mm512_and_si512(shift, _mm512_set1_epi8(mask));
                for i in 0..lines / 3 {
                    let [a, b, c] = [line(3 * i), line(3 * i + 1), line(3 * i + 2)];
                    for (j, x) in [a, b, c].into_iter().enumerate() {
                        put(8 * i + 2 * j, x);
                        put(8 * i + 2 * j + 1, _mm512_srli_epi16::<3>(x));
                    }
                    let low = top(_mm512_srli_epi16::<6>(a), 0x03);
                    let middle = top(_mm512_srli_epi16::<4>(b), 0x0c);
                    let high = top(_mm512_srli_epi16::<2>(c), 0x30);
                    let pair = _mm512_or_si512(_mm512_or_si512(low, middle), high);
                    put(8 * i + 6, pair);
                    put(8 * i + 7, _mm512_srli_epi16::<3>(pair));
                }
            }
            _ => {
                for i in 0..lines {
                    let a = line(i);
                    put(2 * i, a);
                    put(2 * i + 1, _mm512_srli_epi16::<4>(a));
                }
            }
        }
    }
}

/// Codes of 16 tokens of a sub-vector as dwords.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn codes_of<const CENTROIDS: usize>(codes: *const u8, sub: usize, token: usize, group_len: usize) -> __m512i {
    // SAFETY: the caller's codes hold every sub-vector and token.
    unsafe {
        if CENTROIDS == 256 {
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.add(sub * group_len + token).cast()));
        }
        let half = group_len / 2;
        let bytes = _mm_loadu_si128(codes.add(sub * half + token % half).cast());
        let bytes = if token < half { bytes } else { _mm_srli_epi16::<4>(bytes) };
        _mm512_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15)))
    }
}

/// Where the levels of one quad of channels are looked up: a dword for each centroid. QUADS is the quads of a sub-vector.
#[derive(Clone, Copy)]
struct Levels<const CENTROIDS: usize, const QUADS: usize> {
    /// Of 16 centroids.
    table: __m512i,
    /// Of 256.
    from: *const i32,
}

impl<const CENTROIDS: usize, const QUADS: usize> Levels<CENTROIDS, QUADS> {
    /// Levels of quad `part` of a sub-vector whose levels `[CENTROIDS][QUADS * 4]` are given.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn new(levels: &[u8], part: usize) -> Self {
        assert!(levels.len() == CENTROIDS * QUADS * QUAD && part < QUADS);
        let (from, mut table) = (levels[part * QUAD..].as_ptr().cast::<i32>(), _mm512_setzero_si512());
        if CENTROIDS == 16 {
            // SAFETY: the length was just checked.
            unsafe {
                let first = _mm512_loadu_si512(levels.as_ptr().cast());
                table = first;
                if QUADS == 2 {
                    let second = _mm512_loadu_si512(levels.as_ptr().add(LINE).cast());
                    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
                    let order = _mm512_add_epi32(even, _mm512_set1_epi32(part as i32));
                    table = _mm512_permutex2var_epi32(first, order, second);
                }
            }
        }
        Self { table, from }
    }

    /// Levels of 16 tokens' centroids: one dword of four channels each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn of(self, codes: __m512i) -> __m512i {
        // SAFETY: codes are below CENTROIDS, whose levels are there.
        unsafe {
            match (CENTROIDS, QUADS) {
                (16, _) => _mm512_permutexvar_epi32(codes, self.table),
                (_, 1) => _mm512_i32gather_epi32::<4>(codes, self.from),
                _ => _mm512_i32gather_epi32::<8>(codes, self.from),
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn keys<const CENTROIDS: usize, const QUADS: usize>(
    book: &Codebook,
    codes: &[u8],
    group_len: usize,
    out: &mut [u8],
) {
    let panel_bytes = PANEL_LANES * book.head_dim();
    for sub in 0..book.subs() {
        // SAFETY: levels are those of a sub-vector, which has one quad or two.
        let levels: [Levels<CENTROIDS, QUADS>; QUADS] =
            std::array::from_fn(|part| unsafe { Levels::new(book.levels_of(sub), part) });
        for token in (0..group_len).step_by(SLOT_LANES) {
            let (panel, set) = (token / PANEL_LANES, token % PANEL_LANES / SLOT_LANES);
            // SAFETY: the caller checked the lengths: a panel has two slots for each quad of channels.
            unsafe {
                let codes = codes_of::<CENTROIDS>(codes.as_ptr(), sub, token, group_len);
                for (part, levels) in levels.iter().enumerate() {
                    let slot = (sub * QUADS + part) * 2 + set;
                    let to = out.as_mut_ptr().add(panel * panel_bytes + slot * LINE);
                    _mm512_storeu_si512(to.cast(), levels.of(codes));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn values<const CENTROIDS: usize, const QUADS: usize>(
    book: &Codebook,
    codes: &[u8],
    group_len: usize,
    out: &mut [u8],
) {
    // Bytes of 4 tokens x 4 channels to 4 channels x 4 tokens, in every 128-bit lane.
    let turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    for channel in (0..book.head_dim()).step_by(SLOT_LANES) {
        let panel = channel / PANEL_LANES * PANEL_LANES;
        let sets = PANEL_LANES.min(book.head_dim() - panel) / SLOT_LANES;
        let set = (channel - panel) / SLOT_LANES;
        let first = channel / QUAD;
        // SAFETY: levels are those of a sub-vector, which has one quad or two.
        let levels: [Levels<CENTROIDS, QUADS>; 4] =
            std::array::from_fn(|i| unsafe { Levels::new(book.levels_of((first + i) / QUADS), (first + i) % QUADS) });
        for token in (0..group_len).step_by(SLOT_LANES) {
            let mut rows = [_mm512_setzero_si512(); 4];
            for (i, row) in rows.iter_mut().enumerate() {
                // SAFETY: the caller checked the lengths.
                unsafe {
                    let codes = codes_of::<CENTROIDS>(codes.as_ptr(), (first + i) / QUADS, token, group_len);
                    *row = _mm512_shuffle_epi8(levels[i].of(codes), turn);
                }
            }
            // Lane q of row i becomes lane i of slot q.
            let [a, b, c, d] = rows;
            let (ab, cd) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d));
            let (ef, gh) = (_mm512_shuffle_i32x4::<0xEE>(a, b), _mm512_shuffle_i32x4::<0xEE>(c, d));
            let slots = [
                _mm512_shuffle_i32x4::<0x88>(ab, cd),
                _mm512_shuffle_i32x4::<0xDD>(ab, cd),
                _mm512_shuffle_i32x4::<0x88>(ef, gh),
                _mm512_shuffle_i32x4::<0xDD>(ef, gh),
            ];
            for (q, slot) in slots.into_iter().enumerate() {
                let at = panel * group_len + ((token / QUAD + q) * sets + set) * LINE;
                // SAFETY: a panel has `sets` slots for each quad of tokens.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().add(at).cast(), slot) }
            }
        }
    }
}
