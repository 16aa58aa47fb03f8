//! Codes as bytes, plainly: what every instruction set's own way must give, and what those without one use. In: the codes of
//! half a record; out: panels of 8 bits (quant/pack.rs) that hold levels.

use super::kernel::Expand;
use crate::append::record::sub_codes;
use crate::quant::pack::{LINE, PANEL_LANES, QUAD, SLOT_LANES, unpack_slot};

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
