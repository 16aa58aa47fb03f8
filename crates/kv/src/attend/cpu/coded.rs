//! Halves of records whose codec is a grid or sub-vectors, within one range of keys. In: records; out: scores, and sums of
//! values, as generic.rs has them for groups with scale and zero.
//!
//! Algebra: codes stand for integers u of 0..=255 (a table's levels, or a centroid's), which are written to a panel of bytes in
//! the first-level cache and multiplied as codes of 8 bits are; every query vector shares that. Codes that are their own integers
//! are multiplied where they lie.
//! - a grid: `x_hat = scale[token] * unit * (u - middle)`. Keys: q*unit is folded once per range, then each sum is moved by
//!   `-middle * sum(q*unit)` and multiplied by its token's scale. Values: weights times scales are folded, and the middle is
//!   taken off once per range.
//! - sub-vectors: `x_hat = base[channel] + step[channel] * u`, folded into q for keys, applied once per range for values.
//!
//! NOT here: how codes become bytes on an instruction set (kernel.rs, [`Vectors::expand`]).

use super::generic::{Ahead, Keys, MAX_STEPS, RANGE_LEN, Ready, Tops, Work};
use super::kernel::{Expand, Kernel, Lanes, MAX_FOLD, Panels, Vectors};
use crate::cache::layout::{Half, RecordLayout, book};
use crate::quant::grid::Grid;
use half::f16;

/// Scales of what has none.
const ONES: [f16; MAX_FOLD] = [f16::ONE; MAX_FOLD];

/// Whether codes are multiplied where they lie.
fn is_direct(grid: &Grid) -> bool {
    grid.table.is_none() && grid.bits > 1
}

/// Panels of bytes for the codes of half a record. The codes are in `ready[0]` then, and what the kernel makes of them in
/// `ready[1]`.
#[inline(always)]
fn bytes<'a, K: Kernel, const H: usize>(
    kernel: K,
    from: &Expand<'_>,
    (lanes, rows): (usize, usize),
    ready: &'a mut [Ready; 2],
    prefetch: *const u8,
) -> (Panels<'a>, &'a [u8]) {
    let [codes, prepared] = ready;
    let codes = &mut codes.0[..lanes * rows];
    kernel.vectors().expand(from, codes, prefetch);
    let prefetch = codes.as_ptr();
    let panels = Panels { bits: 8, codes, lanes, rows, prefetch };
    kernel.prepare::<H>(panels, &mut prepared.0);
    (panels, &prepared.0)
}

/// Panels of the codes as they lie.
#[inline(always)]
fn direct<'a, K: Kernel, const H: usize>(
    kernel: K,
    bits: u32,
    codes: &'a [u8],
    (lanes, rows): (usize, usize),
    ready: &'a mut [Ready; 2],
    prefetch: *const u8,
) -> (Panels<'a>, &'a [u8]) {
    let panels = Panels { bits, codes, lanes, rows, prefetch };
    kernel.prepare::<H>(panels, &mut ready[1].0);
    (panels, &ready[1].0)
}

/// Scores of the packed keys; `out`: `[H][RANGE_LEN]`.
#[inline(always)]
pub(super) fn scores<K: Kernel, const H: usize>(
    kernel: K,
    keys: &Keys<'_>,
    layout: &RecordLayout,
    q: &[f32],
    out: &mut [f32],
    folded: &mut <K::Vectors as Vectors>::Folded<H>,
    work: &mut Work,
) {
    let Work { ready, sums, planes } = work;
    let (d, g, vectors) = (layout.head_dim, layout.group_len, kernel.vectors());
    // q times what an integer counts in each channel, and what integers of 0 would give.
    let mut offset = [0.0; H];
    for ((planes, q), offset) in planes[..H].iter_mut().zip(q.chunks_exact(d)).zip(&mut offset) {
        match &layout.k {
            Half::Groups => unreachable!("the caller asks for others"),
            Half::Grid(grid) => {
                planes.iter_mut().zip(q).for_each(|(x, q)| *x = q * grid.unit);
                *offset = -grid.middle * planes[..d].iter().sum::<f32>();
            }
            Half::Vectors(books) => {
                let book = book(books, keys.task.head);
                planes.iter_mut().zip(q).zip(book.step()).for_each(|((x, q), step)| *x = q * step);
                *offset = q.iter().zip(book.base()).map(|(q, base)| q * base).sum();
            }
        }
    }
    let planes = planes.as_flattened();
    let bound = vectors.bound::<H>(planes, MAX_FOLD, &[1.0; MAX_FOLD][..d]);
    vectors.fold::<H>(planes, MAX_FOLD, &ONES[..d], &bound, folded, 0);
    for (i, record) in keys.records().iter().enumerate() {
        // While these keys are read, the next ones are fetched, and after the last keys the first values.
        let next = match keys.records().get(i + 1) {
            Some(next) => &next[layout.k_bytes()],
            None => &keys.records()[0][layout.v_bytes()],
        };
        let at = layout.k_codes();
        let prefetch = Ahead::of(vectors, next, layout.k_bytes().start).at(at.start);
        let codes = &record[at];
        let (panels, prepared) = match &layout.k {
            Half::Groups => unreachable!("the caller asks for others"),
            Half::Grid(grid) if is_direct(grid) => direct::<K, H>(kernel, grid.bits, codes, (g, d), ready, prefetch),
            Half::Grid(grid) => bytes::<K, H>(kernel, &Expand::Grid { grid, codes }, (g, d), ready, prefetch),
            Half::Vectors(books) => {
                let from = Expand::Keys { book: book(books, keys.task.head), codes, group_len: g };
                bytes::<K, H>(kernel, &from, (g, d), ready, prefetch)
            }
        };
        let out = &mut out[keys.skipped() + i * g..];
        (0..H).for_each(|h| out[h * RANGE_LEN..][..g].fill(offset[h]));
        kernel.panels::<H>(panels, prepared, folded, out, RANGE_LEN, sums);
        if let Half::Grid(_) = layout.k {
            let mut scales = [0.0; 128];
            vectors.widen(layout.k_scales(record), &mut scales[..g]);
            for h in 0..H {
                out[h * RANGE_LEN..][..g].iter_mut().zip(&scales).for_each(|(x, scale)| *x *= scale);
            }
        }
    }
}

/// Adds the packed values; `p`: `[H][RANGE_LEN]` weights, `tops` their largest per group, `out`: `[H][MAX_FOLD]`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) fn values<K: Kernel, const H: usize>(
    kernel: K,
    keys: &Keys<'_>,
    layout: &RecordLayout,
    p: &[f32],
    tops: &Tops<H>,
    out: &mut [f32],
    folded: &mut <K::Vectors as Vectors>::Folded<H>,
    work: &mut Work,
) {
    let Work { ready, sums, planes } = work;
    let (d, g, vectors) = (layout.head_dim, layout.group_len, kernel.vectors());
    let tops_from = keys.skipped() / g;
    debug_assert!(tops_from + keys.records().len() <= MAX_STEPS);
    let mut weights = [Lanes::ZERO; H];
    planes[..H].iter_mut().for_each(|row| row[..d].fill(0.0));
    for (i, record) in keys.records().iter().enumerate() {
        let next = match (keys.records().get(i + 1), keys.task.next_group) {
            (Some(next), _) => &next[layout.v_bytes()],
            (None, Some(group)) => &keys.task.source.record(keys.task.head, group)[layout.k_bytes()],
            (None, None) => &record[layout.v_bytes()],
        };
        let at = layout.all_v_codes();
        let prefetch = Ahead::of(vectors, next, layout.v_bytes().start).at(at.start);
        let codes = &record[at];
        let scales = match &layout.v {
            Half::Grid(_) => layout.v_scales(record),
            _ => &ONES[..g],
        };
        let p = &p[keys.skipped() + i * g..];
        let top = vectors.largest(scales);
        vectors.fold::<H>(p, RANGE_LEN, scales, &tops.map(|tops| tops[tops_from + i] * top), folded, 0);
        vectors.dot(p, RANGE_LEN, scales, &mut weights);
        let (panels, prepared) = match &layout.v {
            Half::Groups => unreachable!("the caller asks for others"),
            Half::Grid(grid) if is_direct(grid) => direct::<K, H>(kernel, grid.bits, codes, (d, g), ready, prefetch),
            Half::Grid(grid) => bytes::<K, H>(kernel, &Expand::Grid { grid, codes }, (d, g), ready, prefetch),
            Half::Vectors(books) => {
                let from = Expand::Values { book: book(books, keys.task.head), codes, group_len: g };
                bytes::<K, H>(kernel, &from, (d, g), ready, prefetch)
            }
        };
        kernel.panels::<H>(panels, prepared, folded, planes.as_flattened_mut(), MAX_FOLD, sums);
    }
    for h in 0..H {
        let (weight, out) = (weights[h].total(), &mut out[h * MAX_FOLD..][..d]);
        match &layout.v {
            Half::Groups => unreachable!("the caller asks for others"),
            Half::Grid(grid) => {
                let middle = grid.middle * weight;
                out.iter_mut().zip(&planes[h]).for_each(|(out, x)| *out += (x - middle) * grid.unit);
            }
            Half::Vectors(books) => {
                let book = book(books, keys.task.head);
                let channels = book.base().iter().zip(book.step()).zip(&planes[h]);
                out.iter_mut().zip(channels).for_each(|(out, ((base, step), x))| *out += base * weight + step * x);
            }
        }
    }
}
