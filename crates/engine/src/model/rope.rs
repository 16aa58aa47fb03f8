//! Rotary position embedding. In: q or k rows and their positions; out: the rows, rotated in place.
//! NOT here: scaled variants other than the linear one (config.rs refuses them).
//!
//! Formula: the two channels of pair i of each head are one complex number, turned by
//! `position / stretch / base^(2i/head_dim)`.
//! GGUF files of the llama architecture store q and k so that these pairs are neighbours, channels `2i` and `2i+1`; those of
//! others keep them as they were trained, channels `i` and `i + head_dim/2`.

/// Which two channels make a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `2i` and `2i+1`.
    Neighbours,
    /// `i` and `i + head_dim/2`.
    Halves,
}

/// Frequencies of a rotary embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub base: f64,
    /// What positions are divided by (linear scaling); 1 for none.
    pub stretch: f64,
}

/// Angles of the rows of one step: shared by all layers of one [`Rope`].
pub struct Rotation {
    /// `(cos, sin)`, shape `[rows][head_dim / 2]`.
    turns: Vec<(f32, f32)>,
    pairs: usize,
    pairing: Pairing,
}

impl Rotation {
    /// Angles for rows at `positions`; computed in f64 (an f32 angle is off by 1e-4 at position 8192).
    pub fn new(positions: &[usize], head_dim: usize, rope: Rope, pairing: Pairing) -> Self {
        let pairs = head_dim / 2;
        let frequencies: Vec<f64> =
            (0..pairs).map(|i| rope.base.powf(-2.0 * i as f64 / head_dim as f64) / rope.stretch).collect();
        let turn = |angle: f64| {
            let (sin, cos) = angle.sin_cos();
            (cos as f32, sin as f32)
        };
        let turns = positions.iter().flat_map(|&p| frequencies.iter().map(move |f| turn(p as f64 * f))).collect();
        Self { turns, pairs, pairing }
    }

    /// Rotates one row, which holds whole heads.
    pub fn apply(&self, row: usize, heads: &mut [f32]) {
        let turns = &self.turns[row * self.pairs..(row + 1) * self.pairs];
        for head in heads.chunks_exact_mut(2 * self.pairs) {
            let turn = |a: &mut f32, b: &mut f32, (cos, sin): (f32, f32)| {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            };
            match self.pairing {
                Pairing::Neighbours => {
                    let (pairs, _) = head.as_chunks_mut::<2>();
                    pairs.iter_mut().zip(turns).for_each(|([a, b], &by)| turn(a, b, by));
                }
                Pairing::Halves => {
                    let (low, high) = head.split_at_mut(self.pairs);
                    low.iter_mut().zip(high).zip(turns).for_each(|((a, b), &by)| turn(a, b, by));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_keeps_lengths_and_the_product_depends_on_distance_only() {
        let dot_of = |pairing: Pairing, p: usize, q: usize| {
            let turn = Rotation::new(&[p, q], 64, Rope { base: 1e5, stretch: 2.0 }, pairing);
            let (mut a, mut b): (Vec<f32>, Vec<f32>) =
                ((0..64).map(|i| (i as f32).sin()).collect(), (0..64).map(|i| (i as f32 * 0.7).cos()).collect());
            turn.apply(0, &mut a);
            turn.apply(1, &mut b);
            let length: f32 = a.iter().map(|x| x * x).sum();
            assert!((length - (0..64).map(|i| (i as f32).sin().powi(2)).sum::<f32>()).abs() < 1e-3);
            a.iter().zip(&b).map(|(a, b)| a * b).sum::<f32>()
        };
        for pairing in [Pairing::Neighbours, Pairing::Halves] {
            let dot = |p, q| dot_of(pairing, p, q);
            assert!((dot(5, 3) - dot(8005, 8003)).abs() < 1e-2);
            assert!((dot(5, 3) - dot(5, 4)).abs() > 1e-2);
        }
    }
}
