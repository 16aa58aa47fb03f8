//! The f32 matrix product of a library that is tuned for this: what prefill attention, two matrix products with a softmax
//! between, could reach at most in f32. In: threads; out: a rate. NOT here: the engine's own products of low-bit weights.

use super::Peak;
use crate::memory::{self, CeilingError};
use crate::timer::{self, Contestant};
use std::convert::Infallible;

/// Rows and columns of the matrices tried: the fastest counts.
const SIZES: [usize; 3] = [384, 768, 1152];
/// The size for a quick look.
const QUICK_SIZES: [usize; 1] = [384];

/// Best rate over `rounds` rounds.
///
/// # Errors
/// [`CeilingError`] when the threads do not start.
pub(crate) fn matmul(threads: usize, rounds: usize, quick: bool) -> Result<Peak, CeilingError> {
    let pool = memory::pool(threads)?;
    let sizes: &[usize] = if quick { &QUICK_SIZES } else { &SIZES };
    let mut contestants: Vec<_> = sizes
        .iter()
        .map(|&n| {
            let (a, b, mut c) = (vec![0.5f32; n * n], vec![0.25f32; n * n], vec![0.0f32; n * n]);
            let pool = &pool;
            Contestant::<Infallible>::new(1, move |_| {
                pool.install(|| multiply(n, &a, &b, &mut c, threads));
                std::hint::black_box(&c);
                Ok(())
            })
        })
        .collect();
    let Ok(timings) = timer::interleave(&mut contestants, rounds);
    let rates = sizes.iter().zip(&timings).map(|(&n, t)| (2.0 * (n * n * n) as f64 / t.min_ns as f64, n));
    let (gops, n) = rates.max_by(|a, b| a.0.total_cmp(&b.0)).expect("there is a size");
    Ok(Peak { gops, by: format!("gemm crate, f32, {n} x {n} x {n}"), lower_bound: false })
}

/// `c = a b`, all `[n][n]` by rows, on the threads of the pool that calls this.
fn multiply(n: usize, a: &[f32], b: &[f32], c: &mut [f32], threads: usize) {
    assert!(a.len() == n * n && b.len() == n * n && c.len() == n * n);
    let row = n as isize;
    // SAFETY: the three pointers are valid for n rows of n numbers at strides of one column and n per row, as just
    // checked, and `c`, borrowed mutably, overlaps neither `a` nor `b`.
    unsafe {
        gemm::gemm(
            n,
            n,
            n,
            c.as_mut_ptr(),
            1,
            row,
            false,
            a.as_ptr(),
            1,
            row,
            b.as_ptr(),
            1,
            row,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(threads),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_matrix_product() {
        let n = 3;
        let (a, b) = ([1., 2., 3., 4., 5., 6., 7., 8., 9.], [1., 0., 2., 0., 1., 0., 1., 0., 1.]);
        let mut c = [f32::NAN; 9];
        multiply(n, &a, &b, &mut c, 1);
        assert_eq!(c, [4., 2., 5., 10., 5., 14., 16., 8., 23.]);
    }

    #[test]
    fn a_rate_is_positive() {
        let peak = matmul(2, 1, true).unwrap();
        assert!(peak.gops > 0.0 && peak.gops.is_finite());
    }
}
