//! Scales and zeros of 16 groups at once. In: their values as vectors; out: parameters as stored and as used.
//! Formulas: quant/affine.rs (the range), quant/fit.rs (by error), to the bit on every instruction set.
//! NOT here: which values form a group, codes and lines (generic.rs).

use super::generic::{Kernel, LANES, LARGEST, RowFit, top};
use crate::quant::fit::{REFITS, SHRINKS, shrinks};
use crate::scheme::Fit;
use half::f16;

/// Parameters of 16 groups, as stored and as used.
pub(super) struct Fitted {
    pub scale: [f16; LANES],
    pub zero: [f16; LANES],
    pub rows: [RowFit; LANES],
    /// Largest value of each.
    high: [f32; LANES],
}

/// Fits 16 groups: the range of group i is that of the lanes of `low[i]` and `high[i]`.
#[inline(always)]
pub(super) fn fit<T: Kernel>(
    kernel: T,
    bits: &[u32; LANES],
    low: &[T::Lanes; LANES],
    high: &[T::Lanes; LANES],
) -> Fitted {
    let low = kernel.store(kernel.min_of_each(low));
    let high = kernel.store(kernel.max_of_each(high));
    let (mut zero, mut step) = ([0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        // -0 becomes 0: which of the two a minimum is would depend on the order of its comparisons.
        zero[i] = low[i] + 0.0;
        step[i] = round_to_odd((high[i] as f64 - low[i] as f64) / top(bits[i] as usize) as f64);
    }
    let scale = kernel.round(&step);
    let step = kernel.store(kernel.load(&scale));
    Fitted { scale, zero: kernel.round(&zero), rows: row_fits(&zero, &step), high }
}

#[inline(always)]
fn row_fits(zero: &[f32; LANES], step: &[f32; LANES]) -> [RowFit; LANES] {
    let inverse = |step: f32| if step == 0.0 { 0.0 } else { 1.0 / step };
    std::array::from_fn(|i| RowFit { zero: zero[i], step: step[i], inverse: inverse(step[i]) })
}

/// Vectors of the longest group.
pub(super) const MAX_GROUP: usize = 128 / LANES;

/// Sums over the values of each of 16 groups.
struct GroupSums {
    error: [f32; LANES],
    code: [f32; LANES],
    code_code: [f32; LANES],
    y: [f32; LANES],
    code_y: [f32; LANES],
}

/// The search of quant/fit.rs for 16 groups at once: moves `fit`, which is that of the range, to the best candidate.
/// Group i has the first `n` vectors of `values[i]`, without the first `skipped` (at most 16) values.
#[inline(always)]
pub(super) fn search<T: Kernel>(
    kernel: T,
    how: Fit,
    bits: &[u32; LANES],
    values: &[[T::Lanes; MAX_GROUP]; LANES],
    n: usize,
    skipped: usize,
    fit: &mut Fitted,
) {
    let tops: [f32; LANES] = std::array::from_fn(|i| top(bits[i] as usize));
    let ratios: [&[f32; SHRINKS]; LANES] = std::array::from_fn(|i| shrinks(bits[i]).expect("2 to 4 bits"));
    let (mut mid, mut half) = ([0.0; LANES], [0.0; LANES]);
    for i in 0..LANES {
        (mid[i], half[i]) = ((fit.rows[i].zero + fit.high[i]) * 0.5, (fit.high[i] - fit.rows[i].zero) * 0.5);
    }
    let mut best = errors(kernel, values, n, skipped, &fit.rows, &tops);
    for at in 0..SHRINKS {
        let (mut zero, mut step) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            let width = half[i] * ratios[i][at];
            (zero[i], step[i]) = (mid[i] - width, (width + width) / tops[i]);
        }
        offer(kernel, values, n, skipped, &tops, &zero, &step, fit, &mut best);
    }
    for _ in 0..if how == Fit::Ls { REFITS } else { 0 } {
        let s = sums::<T, true>(kernel, values, n, skipped, &fit.rows, &tops);
        let count = (n * LANES - skipped) as f32;
        let (mut zero, mut step) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            let spread = count * s.code_code[i] - s.code[i] * s.code[i];
            let scale = (count * s.code_y[i] - s.code[i] * s.y[i]) / spread;
            let moved = fit.rows[i].zero + (s.y[i] - scale * s.code[i]) / count;
            // One that does not move is no better than itself.
            let moves = spread > 0.0 && scale > 0.0 && scale <= LARGEST && moved.abs() <= LARGEST;
            (zero[i], step[i]) = if moves { (moved, scale) } else { (fit.rows[i].zero, fit.rows[i].step) };
        }
        offer(kernel, values, n, skipped, &tops, &zero, &step, fit, &mut best);
    }
}

/// Takes, group by group, these parameters (rounded to f16) when their error is smaller than `best`.
#[allow(clippy::too_many_arguments)] // one candidate of a search: what it is compared on, with and in
#[inline(always)]
fn offer<T: Kernel>(
    kernel: T,
    values: &[[T::Lanes; MAX_GROUP]; LANES],
    n: usize,
    skipped: usize,
    tops: &[f32; LANES],
    zero: &[f32; LANES],
    step: &[f32; LANES],
    fit: &mut Fitted,
    best: &mut [f32; LANES],
) {
    let (zero, scale): ([f16; LANES], [f16; LANES]) = (kernel.round(zero), kernel.round(step));
    // A zero is never -0.
    let zero = kernel.store(kernel.load(&zero)).map(|zero| zero + 0.0);
    let rows = row_fits(&zero, &kernel.store(kernel.load(&scale)));
    let zero: [f16; LANES] = kernel.round(&zero);
    let errors = errors(kernel, values, n, skipped, &rows, tops);
    for i in 0..LANES {
        if errors[i] < best[i] {
            (best[i], fit.rows[i], fit.scale[i], fit.zero[i]) = (errors[i], rows[i], scale[i], zero[i]);
        }
    }
}

#[inline(always)]
fn errors<T: Kernel>(
    kernel: T,
    values: &[[T::Lanes; MAX_GROUP]; LANES],
    n: usize,
    skipped: usize,
    rows: &[RowFit; LANES],
    tops: &[f32; LANES],
) -> [f32; LANES] {
    sums::<T, false>(kernel, values, n, skipped, rows, tops).error
}

/// See quant/fit.rs. All sums, or only that of errors.
#[inline(always)]
fn sums<T: Kernel, const ALL: bool>(
    kernel: T,
    values: &[[T::Lanes; MAX_GROUP]; LANES],
    n: usize,
    skipped: usize,
    rows: &[RowFit; LANES],
    tops: &[f32; LANES],
) -> GroupSums {
    let none = kernel.splat(0.0);
    let mut all = [[none; LANES]; 5];
    for i in 0..LANES {
        let [zero, step, inverse, top] =
            [rows[i].zero, rows[i].step, rows[i].inverse, tops[i]].map(|x| kernel.splat(x));
        let mut sums = [none; 5];
        for (at, &x) in values[i][..n].iter().enumerate() {
            let y = kernel.sub(x, zero);
            let code = kernel.integer(kernel.min(kernel.max(kernel.mul(y, inverse), none), top));
            let d = kernel.sub(kernel.mul(code, step), y);
            let keep = |x| if at == 0 && skipped > 0 { kernel.select(skipped, none, x) } else { x };
            sums[0] = kernel.add(sums[0], keep(kernel.mul(d, d)));
            if ALL {
                sums[1] = kernel.add(sums[1], keep(code));
                sums[2] = kernel.add(sums[2], keep(kernel.mul(code, code)));
                sums[3] = kernel.add(sums[3], keep(y));
                sums[4] = kernel.add(sums[4], keep(kernel.mul(code, y)));
            }
        }
        (0..5).for_each(|s| all[s][i] = sums[s]);
    }
    let total = |s: usize| if ALL || s == 0 { kernel.store(kernel.sum_of_each(&all[s])) } else { [0.0; LANES] };
    GroupSums { error: total(0), code: total(1), code_code: total(2), y: total(3), code_y: total(4) }
}

/// Cuts an f64 (0, or above 1e-30) to an f32 and sets the last bit when anything was lost: rounding that to f16 is rounding
/// once.
#[inline(always)]
fn round_to_odd(x: f64) -> f32 {
    /// The bits of an f64 that an f32 does not have.
    const LOST: u64 = (1 << 29) - 1;
    let bits = x.to_bits();
    // The sum carries into the bit above when any lost bit is set.
    let sticky = ((bits & LOST) + LOST) & (LOST + 1);
    f64::from_bits(bits & !LOST | sticky) as f32
}
