//! Codes as bytes, plainly: what every instruction set's own way must give, and what those without one use. In: the codes of
//! half a record; out: panels of 8 bits (quant/pack.rs) that hold levels.

use super::kernel::Expand;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES, sub_codes, unpack_slot};

/// Gives an instruction set's file its `expand`, out of its `grid_codes`, `keys` and `values`: these are compiled for every number
/// of bits and size of sub-vectors.
#[cfg(target_arch = "x86_64")]
macro_rules! expand_with {
    ($features:literal) => {
        /// See [`super::kernel::Vectors::expand`].
        ///
        /// # Safety
        /// The processor has the features.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn expand(from: &Expand<'_>, out: &mut [u8], prefetch: *const u8) {
            from.check(out);
            // SAFETY: lengths were checked.
            unsafe {
                match *from {
                    Expand::Grid { grid, codes } => match grid.bits {
                        1 => grid_codes::<1>(grid, codes, out, prefetch),
                        2 => grid_codes::<2>(grid, codes, out, prefetch),
                        3 => grid_codes::<3>(grid, codes, out, prefetch),
                        _ => grid_codes::<4>(grid, codes, out, prefetch),
                    },
                    Expand::Keys { book, codes, group_len } => {
                        ahead(prefetch, codes.len());
                        match (book.centroids(), book.sub_len()) {
                            (16, 4) => keys::<16, 1>(book, codes, group_len, out),
                            (16, _) => keys::<16, 2>(book, codes, group_len, out),
                            (_, 4) => keys::<256, 1>(book, codes, group_len, out),
                            _ => keys::<256, 2>(book, codes, group_len, out),
                        }
                    }
                    Expand::Values { book, codes, group_len } => {
                        ahead(prefetch, codes.len());
                        match (book.centroids(), book.sub_len()) {
                            (16, 4) => values::<16, 1>(book, codes, group_len, out),
                            (16, _) => values::<16, 2>(book, codes, group_len, out),
                            (_, 4) => values::<256, 1>(book, codes, group_len, out),
                            _ => values::<256, 2>(book, codes, group_len, out),
                        }
                    }
                }
            }
        }

        /// Asks for so many bytes.
        #[inline]
        #[target_feature(enable = $features)]
        fn ahead(prefetch: *const u8, bytes: usize) {
            for at in (0..bytes).step_by(LINE) {
                _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(at).cast());
            }
        }
    };
}

/// See [`super::kernel::Vectors::expand`].
#[inline(always)]
pub(super) fn expand(from: &Expand<'_>, out: &mut [u8]) {
    match *from {
        Expand::Grid { grid, codes } => {
            // Slots of a line are neighbours, whatever the panel: its slots follow one another as they do in bytes.
            let table = std::array::from_fn::<u8, 16, _>(|code| grid.level(code as u8));
            for (slot, line) in out.as_chunks_mut::<LINE>().0.iter_mut().enumerate() {
                *line = unpack_slot(grid.bits, codes, slot).map(|code| table[code as usize & 15]);
            }
        }
        Expand::Keys { book, codes, group_len } => {
            let (n, code) = (book.sub_len(), sub_codes(codes, book.centroids(), group_len));
            let rows = book.head_dim();
            for sub in 0..book.subs() {
                let levels = book.levels_of(sub);
                for token in 0..group_len {
                    let level = &levels[code(sub, token) as usize * n..][..n];
                    let panel = token / PANEL_LANES * PANEL_LANES * rows;
                    for (part, level) in level.as_chunks::<QUAD>().0.iter().enumerate() {
                        let slot = (sub * n / QUAD + part) * 2 + token % PANEL_LANES / SLOT_LANES;
                        out[panel + slot * LINE + token % SLOT_LANES * QUAD..][..QUAD].copy_from_slice(level);
                    }
                }
            }
        }
        Expand::Values { book, codes, group_len } => {
            let (n, code) = (book.sub_len(), sub_codes(codes, book.centroids(), group_len));
            let lanes = book.head_dim();
            for sub in 0..book.subs() {
                let levels = book.levels_of(sub);
                let first = sub * n;
                let panel = first / PANEL_LANES * PANEL_LANES;
                let sets = PANEL_LANES.min(lanes - panel) / SLOT_LANES;
                for token in 0..group_len {
                    let level = &levels[code(sub, token) as usize * n..][..n];
                    let slot = token / QUAD * sets + (first - panel) / SLOT_LANES;
                    let at = panel * group_len + slot * LINE + first % SLOT_LANES * QUAD + token % QUAD;
                    for (c, level) in level.iter().enumerate() {
                        out[at + c * QUAD] = *level;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Codebook;
    use crate::attend::cpu::kernel::Vectors;
    use crate::codec::{CENTROIDS, Codec, GRID_BITS, SUB_LENS};
    use crate::quant::grid::Grid;

    fn byte(i: usize) -> u8 {
        (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17) as u8
    }

    /// Every instruction set here writes the plain bytes.
    fn agree(from: &Expand<'_>, bytes: usize, case: &str) {
        let mut want = vec![0; bytes];
        expand(from, &mut want);
        let mut ran = 0;
        let mut check = |name: &str, run: &dyn Fn(&mut [u8])| {
            let mut got = vec![0xAA; bytes];
            run(&mut got);
            let first = got.iter().zip(&want).position(|(a, b)| a != b);
            assert_eq!(first, None, "{name}, {case}");
            ran += 1;
        };
        let ahead = from.codes().as_ptr();
        check("portable", &|out| crate::attend::cpu::portable::Portable.expand(from, out, ahead));
        #[cfg(target_arch = "x86_64")]
        {
            if let Some(kernel) = crate::attend::cpu::avx2::Avx2::new() {
                check("avx2", &|out| kernel.expand(from, out, ahead));
            }
            if let Some(kernel) = crate::attend::cpu::avx512::Avx512Vnni::new() {
                check("avx512", &|out| kernel.expand(from, out, ahead));
            }
        }
        assert!(ran > 0 && want.iter().any(|&x| x != want[0]), "{case}");
    }

    #[test]
    fn every_instruction_set_expands_alike() {
        for d in crate::shape::HEAD_DIMS {
            for g in crate::scheme::GROUP_LENS {
                for bits in GRID_BITS {
                    let grid = Grid::of(Codec::Turbo { bits }).unwrap();
                    let codes: Vec<u8> = (0..d * g * bits as usize / 8).map(byte).collect();
                    agree(&Expand::Grid { grid: &grid, codes: &codes }, d * g, &format!("tq{bits} {d} {g}"));
                }
                for (centroids, sub_len) in CENTROIDS.into_iter().flat_map(|n| SUB_LENS.map(|len| (n, len))) {
                    let levels = (0..d * centroids).map(|i| byte(i + 99)).collect();
                    let book = Codebook::from_parts(centroids, sub_len, vec![0.0; d], vec![1.0; d], levels).unwrap();
                    let codes: Vec<u8> = (0..d / sub_len * g).map(byte).collect();
                    let codes = &codes[..codes.len() * centroids.ilog2() as usize / 8];
                    let case = format!("vq{centroids}x{sub_len} {d} {g}");
                    agree(&Expand::Keys { book: &book, codes, group_len: g }, d * g, &case);
                    agree(&Expand::Values { book: &book, codes, group_len: g }, d * g, &case);
                }
            }
        }
    }
}
