//! Codebooks of sub-vectors: product quantization. In: rows of one head; out: for each 4 or 8 channels the nearest of 16 or 256
//! centroids, and back; centroids by k-means.
//!
//! Formula: the centroid's channel c is `base[c] + step[c] * level`, level an integer 0..=255, since kernels multiply bytes. The
//! nearest centroid m of x is the first with the largest `sum over its channels of x*m, less |m|^2/2`, in f32, channel by
//! channel. VecInfer (arXiv 2510.06175) does so with f16 centroids; what it does to keys before (channels divided by the root of
//! their largest magnitude, then a Hadamard rotation) stands outside: whoever writes rows does it.
//! NOT here: training from rows (append/train.rs), where codes lie (cache/layout.rs), vector code (append/cpu/coded.rs).

use crate::Error;
use crate::codec::{CENTROIDS, SUB_LENS};
use crate::shape::HEAD_DIMS;
use std::sync::OnceLock;

/// Centroids of every sub-vector of one head's keys or values.
#[derive(Debug, Clone, PartialEq)]
pub struct Codebook {
    head_dim: usize,
    centroids: usize,
    sub_len: usize,
    base: Vec<f32>,
    step: Vec<f32>,
    /// `[head_dim / sub_len][centroids][sub_len]`
    levels: Vec<u8>,
    /// What levels stand for, in the same places.
    values: Vec<f32>,
    /// `|m|^2 / 2` of every centroid: `[head_dim / sub_len][centroids]`
    half_squares: Vec<f32>,
    fingerprint: u64,
}

impl Codebook {
    /// A codebook from numbers that were kept.
    ///
    /// Shapes: `base`, `step`: `[head_dim]`; `levels`: `[head_dim / sub_len][centroids][sub_len]`.
    ///
    /// # Errors
    /// [`Error::Dimension`] for sizes that no codec has, [`Error::Shape`] for slices of other lengths, [`Error::Number`] for
    /// values that are no finite f16.
    pub fn from_parts(
        centroids: usize,
        sub_len: usize,
        base: Vec<f32>,
        step: Vec<f32>,
        levels: Vec<u8>,
    ) -> Result<Self, Error> {
        let head_dim = base.len();
        let no = |what, got, supported| Err(Error::Dimension { what, got, supported });
        if !HEAD_DIMS.contains(&head_dim) {
            return no("head_dim of a codebook", head_dim, "64, 80, 96, 128, 256");
        }
        if !CENTROIDS.contains(&centroids) {
            return no("centroids", centroids, "16, 256");
        }
        if !SUB_LENS.contains(&sub_len) {
            return no("channels of a sub-vector", sub_len, "4, 8");
        }
        for (what, expected, got) in [
            ("steps of a codebook", head_dim, step.len()),
            ("levels of a codebook", head_dim * centroids, levels.len()),
        ] {
            if expected != got {
                return Err(Error::Shape { what, expected, got });
            }
        }
        let channel = |i: usize| i / (centroids * sub_len) * sub_len + i % sub_len;
        let values: Vec<f32> =
            levels.iter().enumerate().map(|(i, &l)| base[channel(i)] + step[channel(i)] * f32::from(l)).collect();
        let limit = half::f16::MAX.to_f32();
        if let Some(&value) = values.iter().chain(&base).chain(&step).find(|x| x.is_nan() || x.abs() > limit) {
            return Err(Error::Number { what: "a centroid", value, allowed: "numbers that f16 has" });
        }
        let half_squares = values.chunks_exact(sub_len).map(half_square).collect();
        let numbers = base.iter().chain(&step).flat_map(|x| x.to_le_bytes());
        // FNV-1a.
        let fingerprint = numbers.chain(levels.iter().copied()).fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        Ok(Self { head_dim, centroids, sub_len, base, step, levels, values, half_squares, fingerprint })
    }

    /// The codebook of independent standard normal channels: what a cache has until [`crate::Cache::set_codebooks`].
    pub(crate) fn of_normal(head_dim: usize, centroids: usize, sub_len: usize) -> Self {
        static KEPT: [OnceLock<(f32, f32, Vec<u8>)>; 4] = [const { OnceLock::new() }; 4];
        let kept = &KEPT[usize::from(centroids == CENTROIDS[1]) * 2 + usize::from(sub_len == SUB_LENS[1])];
        let (base, step, levels) = kept.get_or_init(|| {
            const ROWS: usize = 8192;
            const ITERATIONS: usize = 12;
            let mut random = Random(0x5DEE_CE66_D1CE_4E5B);
            let rows: Vec<f32> = (0..ROWS * sub_len).map(|_| random.normal()).collect();
            let mut values = vec![0.0; centroids * sub_len];
            k_means(&rows, sub_len, &mut values, ITERATIONS, 1, plain_assign);
            let top = values.iter().fold(0f32, |top, x| top.max(x.abs()));
            let (base, step) = (-top, 2.0 * top / 255.0);
            let levels = values.iter().map(|x| ((x - base) / step).round().clamp(0.0, 255.0) as u8).collect();
            (base, step, levels)
        });
        let levels = levels.repeat(head_dim / sub_len);
        Self::from_parts(centroids, sub_len, vec![*base; head_dim], vec![*step; head_dim], levels)
            .expect("sizes of a codec and a shape")
    }

    /// Channels of the rows it codes.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }
    /// Centroids of a sub-vector.
    pub fn centroids(&self) -> usize {
        self.centroids
    }
    /// Channels of a sub-vector.
    pub fn sub_len(&self) -> usize {
        self.sub_len
    }
    /// What level 0 stands for, by channel.
    pub fn base(&self) -> &[f32] {
        &self.base
    }
    /// What one level more adds, by channel.
    pub fn step(&self) -> &[f32] {
        &self.step
    }
    /// Levels: `[head_dim / sub_len][centroids][sub_len]`.
    pub fn levels(&self) -> &[u8] {
        &self.levels
    }

    /// Sub-vectors of a row.
    pub(crate) fn subs(&self) -> usize {
        self.head_dim / self.sub_len
    }

    /// Levels of a sub-vector's centroids: `[centroids][sub_len]`.
    pub(crate) fn levels_of(&self, sub: usize) -> &[u8] {
        &self.levels[sub * self.centroids * self.sub_len..][..self.centroids * self.sub_len]
    }

    /// Values of a sub-vector's centroids `[centroids][sub_len]`, and half their squares.
    pub(crate) fn values_of(&self, sub: usize) -> (&[f32], &[f32]) {
        let len = self.centroids * self.sub_len;
        (&self.values[sub * len..][..len], &self.half_squares[sub * self.centroids..][..self.centroids])
    }

    /// The code of a sub-vector, plainly.
    #[cfg(test)]
    pub(crate) fn nearest(&self, sub: usize, x: &[f32]) -> u8 {
        let (values, half_squares) = self.values_of(sub);
        nearest(x, values, half_squares)
    }

    /// What tells it from others: saved sequences name it.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

fn half_square(m: &[f32]) -> f32 {
    m.iter().fold(0.0, |sum, x| sum + x * x) / 2.0
}

/// xorshift64*: the same codebooks on every machine.
pub(crate) struct Random(pub u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 11) as usize % n
    }

    /// Nearly normal: the sum of 12 even numbers, less 6.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.bits() >> 40) as f32 / (1u64 << 24) as f32).sum::<f32>() - 6.0
    }
}

/// Finds the nearest of centroids for rows `[n][len]`: rows, len, centroids, half their squares, codes.
pub(crate) type Assign = fn(&[f32], usize, &[f32], &[f32], &mut [u8]);

/// The same without an instruction set's help.
fn plain_assign(rows: &[f32], len: usize, values: &[f32], half_squares: &[f32], codes: &mut [u8]) {
    for (x, code) in rows.chunks_exact(len).zip(codes) {
        *code = nearest(x, values, half_squares);
    }
}

/// The first centroid with the largest score.
fn nearest(x: &[f32], values: &[f32], half_squares: &[f32]) -> u8 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (code, (m, half)) in values.chunks_exact(x.len()).zip(half_squares).enumerate() {
        let score = x.iter().zip(m).fold(-half, |sum, (x, m)| sum + x * m);
        if score > best.0 {
            best = (score, code);
        }
    }
    best.1 as u8
}

/// k-means of vectors of `len` into `values`.
pub(crate) fn k_means(rows: &[f32], len: usize, values: &mut [f32], iterations: usize, seed: u64, assign: Assign) {
    let mut random = Random(seed | 1);
    for _ in 0..8 {
        random.bits();
    }
    let n = rows.len() / len;
    for m in values.chunks_exact_mut(len) {
        m.copy_from_slice(&rows[random.below(n) * len..][..len]);
    }
    let centroids = values.len() / len;
    let mut codes = vec![0u8; n];
    for _ in 0..iterations {
        let half_squares: Vec<f32> = values.chunks_exact(len).map(half_square).collect();
        assign(rows, len, values, &half_squares, &mut codes);
        let (mut sums, mut counts) = (vec![0f64; values.len()], vec![0u32; centroids]);
        for (row, &code) in rows.chunks_exact(len).zip(&codes) {
            counts[code as usize] += 1;
            sums[code as usize * len..][..len].iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        for ((m, sum), &count) in values.chunks_exact_mut(len).zip(sums.chunks_exact(len)).zip(&counts) {
            if count == 0 {
                m.copy_from_slice(&rows[random.below(n) * len..][..len]);
            } else {
                m.iter_mut().zip(sum).for_each(|(m, sum)| *m = (sum / f64::from(count)) as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codebook_of_normal_channels_beats_one_code_per_channel() {
        let mut random = Random(99);
        // At 2 bits a channel the best scalar code leaves .1175, at 1 bit .3634; rate and distortion allow 1/16 and 1/4.
        for (centroids, sub_len, most) in [(256, 4, 0.11), (256, 8, 0.36), (16, 4, 0.36), (16, 8, 0.65)] {
            let book = Codebook::of_normal(64, centroids, sub_len);
            let rows: Vec<f32> = (0..200 * 64).map(|_| random.normal()).collect();
            let mut error = 0.0;
            for (i, x) in rows.chunks_exact(sub_len).enumerate() {
                let sub = i % book.subs();
                let m = &book.values_of(sub).0[book.nearest(sub, x) as usize * sub_len..][..sub_len];
                error += x.iter().zip(m).map(|(x, m)| (x - m).powi(2)).sum::<f32>();
            }
            let error = error / rows.iter().map(|x| x * x).sum::<f32>();
            assert!(error < most, "{centroids} x {sub_len}: {error}");
        }
    }

    #[test]
    fn what_is_no_codebook_is_refused() {
        let of = |d: usize, c, s, n: usize| Codebook::from_parts(c, s, vec![0.0; d], vec![0.0; d], vec![0; n]);
        assert!(of(64, 16, 4, 1024).is_ok());
        assert!(matches!(of(63, 16, 4, 1024), Err(Error::Dimension { .. })));
        assert!(matches!(of(64, 17, 4, 1024), Err(Error::Dimension { .. })));
        assert!(matches!(of(64, 16, 5, 1024), Err(Error::Dimension { .. })));
        assert!(matches!(of(64, 16, 4, 1023), Err(Error::Shape { .. })));
        let nan = Codebook::from_parts(16, 4, vec![f32::NAN; 64], vec![0.0; 64], vec![0; 1024]);
        assert!(matches!(nan, Err(Error::Number { .. })));
    }
}
