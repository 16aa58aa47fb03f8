//! Codebooks from rows of a real model. In: rows of one head; out: centroids of its sub-vectors (k-means of quant/codebook.rs, with
//! the append kernel that finds nearest centroids).
//! NOT here: which rows (the engine collects them), what is done to keys before.

use super::cpu::best;
use crate::quant::codebook::k_means;
use crate::{Codebook, Error};

/// Fewest rows that say anything.
const FEWEST_ROWS: usize = 16;

impl Codebook {
    /// Centroids of rows by k-means: `iterations` of Lloyd's from centroids that a seed draws from the rows. A centroid that
    /// nothing is nearest to takes another row.
    ///
    /// Shape: `rows`: f32 `[n][head_dim]`, finite f16 numbers, n at least 16.
    ///
    /// # Errors
    /// As [`Codebook::from_parts`]; [`Error::Shape`] for too few rows or part of one.
    pub fn train(
        head_dim: usize,
        centroids: usize,
        sub_len: usize,
        rows: &[f32],
        iterations: usize,
        seed: u64,
    ) -> Result<Self, Error> {
        let whole = rows.len() / head_dim.max(1);
        if whole < FEWEST_ROWS || !rows.len().is_multiple_of(head_dim) {
            return Err(Error::Shape {
                what: "rows to train a codebook (16 or more)",
                expected: FEWEST_ROWS,
                got: whole,
            });
        }
        // Sizes are checked before anything is computed of them.
        Self::from_parts(centroids, sub_len, vec![0.0; head_dim], vec![0.0; head_dim], vec![0; head_dim * centroids])?;
        let mut values = vec![0.0; head_dim * centroids];
        for (sub, values) in values.chunks_exact_mut(centroids * sub_len).enumerate() {
            let part: Vec<f32> =
                rows.chunks_exact(head_dim).flat_map(|row| &row[sub * sub_len..][..sub_len]).copied().collect();
            k_means(
                &part,
                sub_len,
                values,
                iterations,
                seed ^ (sub as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                best().assign,
            );
        }
        let (mut base, mut step) = (vec![f32::INFINITY; head_dim], vec![f32::NEG_INFINITY; head_dim]);
        let channel = |i: usize| i / (centroids * sub_len) * sub_len + i % sub_len;
        for (i, &x) in values.iter().enumerate() {
            base[channel(i)] = base[channel(i)].min(x);
            step[channel(i)] = step[channel(i)].max(x);
        }
        step.iter_mut().zip(&base).for_each(|(step, base)| *step = (*step - base) / 255.0);
        let level = |(i, &x): (usize, &f32)| {
            let (base, step) = (base[channel(i)], step[channel(i)]);
            if step > 0.0 { ((x - base) / step).round().clamp(0.0, 255.0) as u8 } else { 0 }
        };
        let levels = values.iter().enumerate().map(level).collect();
        Self::from_parts(centroids, sub_len, base, step, levels)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::codebook::Random;

    #[test]
    fn centroids_are_where_rows_are() {
        // 16 places and a little noise, in every sub-vector other ones.
        let mut random = Random(5);
        let place = |i: usize, c: usize| ((i * 7 + c * 3) % 16) as f32 - 8.0;
        let rows: Vec<f32> = (0..4000)
            .flat_map(|i| (0..64).map(move |c| (i, c)))
            .map(|(i, c)| place(i, c) + 0.01 * random.normal())
            .collect();
        let book = Codebook::train(64, 16, 4, &rows, 20, 3).unwrap();
        let mut error = 0.0;
        for row in rows.chunks_exact(64) {
            for (sub, x) in row.chunks_exact(4).enumerate() {
                let m = &book.values_of(sub).0[book.nearest(sub, x) as usize * 4..][..4];
                error += x.iter().zip(m).map(|(x, m)| (x - m).powi(2)).sum::<f32>();
            }
        }
        let each = error / rows.len() as f32;
        // Draws that fall on one place twice leave some places shared: far below the spread of 21 all the same.
        assert!(each < 2.0, "{each}");
        assert_eq!(book, Codebook::train(64, 16, 4, &rows, 20, 3).unwrap());
        assert_ne!(book.fingerprint(), Codebook::train(64, 16, 4, &rows, 20, 4).unwrap().fingerprint());
    }

    #[test]
    fn too_few_rows_are_refused() {
        assert!(matches!(Codebook::train(64, 16, 4, &[0.0; 64], 3, 0), Err(Error::Shape { .. })));
        assert!(matches!(Codebook::train(64, 17, 4, &[0.0; 6400], 3, 0), Err(Error::Dimension { .. })));
    }
}
