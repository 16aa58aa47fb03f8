//! Products of f32 weights with f32 rows: the reference that accuracy is measured against. In: weights `[n][k]`, rows
//! `[m][k]`; out: f32 `[m][n]`, by the gemm crate.
//!
//! Accuracy: each output is a sum of k fused multiply-adds in f32, in order over runs of up to 1,024 inputs that are then
//! added: relative to `sum |x*w|` an error of at most about k * 2^-24, in practice its square root.
//! A row's result depends on that row only, bit for bit, not on the other rows or on threads. The library promises no such
//! thing; it holds because every output has a lane of its own and the length of a run follows from k and the kernel's
//! size alone, once the shapes are kept away that the library treats apart ([`fewest_rows`]). The test below compares bits.
//! NOT here: low-bit weights (mod.rs).

/// Rows that are multiplied at least. The library has ways of their own for one row, for products of up to 256 outputs
/// and for matrices of up to 64 by 64, which add in another order.
fn fewest_rows(n: usize) -> usize {
    if n > 64 { 16 } else { 80.max(272_usize.div_ceil(n.max(1))) }
}

/// `out[r][j] = sum_i w[j][i] * x[r][i]`, on the threads of the pool that calls this.
pub(crate) fn f32_products(x: &[f32], w: &[f32], k: usize, n: usize, out: &mut [f32]) {
    let rows = x.len() / k;
    let fewest = fewest_rows(n);
    if rows >= fewest {
        return multiply(rows, x, w, k, n, out);
    }
    let mut padded = vec![0.0; fewest * k];
    padded[..x.len()].copy_from_slice(x);
    let mut products = vec![0.0; fewest * n];
    multiply(fewest, &padded, w, k, n, &mut products);
    out.copy_from_slice(&products[..rows * n]);
}

fn multiply(rows: usize, x: &[f32], w: &[f32], k: usize, n: usize, out: &mut [f32]) {
    assert!(x.len() == rows * k && w.len() == n * k && out.len() == rows * n);
    let (k_stride, n_stride) = (k as isize, n as isize);
    // SAFETY: `x`, `w` and `out` are valid for `rows`, `n` and `rows` rows of k, k and n numbers at strides of one column
    // and k, k and n per row, as just checked, and `out`, borrowed mutably, overlaps neither `x` nor `w`.
    unsafe {
        gemm::gemm(
            rows,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n_stride,
            false,
            x.as_ptr(),
            1,
            k_stride,
            w.as_ptr(),
            k_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(rayon::current_num_threads()),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn products(x: &[f32], w: &[f32], k: usize, n: usize, threads: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() / k * n];
        crate::Pool::new(threads).unwrap().run(|| f32_products(x, w, k, n, &mut out));
        out
    }

    #[test]
    fn they_are_the_products() {
        let (k, n, rows) = (577, 33, 21);
        let (x, w) = (numbers(rows * k, 1), numbers(n * k, 2));
        for (i, got) in products(&x, &w, k, n, 2).into_iter().enumerate() {
            let terms = || x[i / n * k..][..k].iter().zip(&w[i % n * k..][..k]).map(|(a, b)| f64::from(a * b));
            let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            assert!((f64::from(got) - sum).abs() <= 1e-6 * size, "{i}: {got}, not {sum}");
        }
    }

    #[test]
    fn a_row_alone_equals_that_row_among_others_on_any_threads() {
        for (k, n) in [(576, 192), (576, 1536), (1536, 576), (64, 8), (100, 64), (576, 4100), (2, 3), (1100, 65)] {
            let rows = 300;
            let (x, w) = (numbers(rows * k, 3), numbers(n * k, 4));
            let all = products(&x, &w, k, n, 2);
            for (first, count) in [(0, 1), (299, 1), (7, 1), (150, 2), (1, 17), (20, 63), (64, 64), (100, 65), (3, 200)]
            {
                for threads in [1, 2, 3] {
                    let some = products(&x[first * k..(first + count) * k], &w, k, n, threads);
                    let same = some.iter().zip(&all[first * n..]).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "k {k}, n {n}: rows {first}..{} on {threads} threads", first + count);
                }
            }
        }
    }
}
