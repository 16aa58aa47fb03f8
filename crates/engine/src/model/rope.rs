//! Rotary position embedding. In: q or k rows and their positions; out: the rows, rotated in place.
//! NOT here: scaled variants other than the linear one and Llama 3's (config.rs refuses them).
//!
//! Formula: the two channels of pair i of each head are one complex number, turned by
//! `position / stretch / divisors[i] / base^(2i/head_dim)`.
//! GGUF files of the llama architecture store q and k so that these pairs are neighbours, channels `2i` and `2i+1`; those of
//! others keep them as they were trained, channels `i` and `i + head_dim/2`.

use std::sync::Arc;

/// Which two channels make a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `2i` and `2i+1`.
    Neighbours,
    /// `i` and `i + head_dim/2`.
    Halves,
}

/// Frequencies of a rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub base: f64,
    /// What positions are divided by (linear scaling); 1 for none.
    pub stretch: f64,
    /// What the frequency of each pair is divided by besides, `[head_dim / 2]`; None: nothing.
    pub divisors: Option<Arc<[f64]>>,
}

/// Llama 3's scaling: frequencies that turn often within the length that a model was first trained for stay as they are, those
/// that do not turn once are divided by a factor, and between the two it goes from one to the other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3 {
    /// What low frequencies are divided by.
    pub factor: f64,
    /// Turns within `trained` up to which a frequency is low.
    pub low: f64,
    /// Turns within `trained` from which a frequency is high; above `low`.
    pub high: f64,
    /// Tokens of the first training.
    pub trained: f64,
}

impl Rope {
    /// Without scaling.
    pub fn of_base(base: f64) -> Self {
        Self { base, stretch: 1.0, divisors: None }
    }

    /// With Llama 3's scaling.
    pub fn llama3(base: f64, head_dim: usize, by: Llama3) -> Self {
        let plain = Self::of_base(base);
        let divisor = |frequency: f64| {
            let turns = by.trained * frequency / std::f64::consts::TAU;
            let kept = ((turns - by.low) / (by.high - by.low)).clamp(0.0, 1.0);
            1.0 / ((1.0 - kept) / by.factor + kept)
        };
        Self { divisors: Some(plain.frequencies(head_dim).into_iter().map(divisor).collect()), ..plain }
    }

    /// Radians per position of each pair, `[head_dim / 2]`; in f64 (an f32 angle is off by 1e-4 at position 8192).
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = |i: usize| self.base.powf(-2.0 * i as f64 / head_dim as f64) / self.stretch;
        let divisor = |i: usize| self.divisors.as_ref().map_or(1.0, |divisors| divisors[i]);
        (0..head_dim / 2).map(|i| plain(i) / divisor(i)).collect()
    }
}

/// Angles of the rows of one step: shared by all layers of one [`Rope`].
pub struct Rotation {
    /// `(cos, sin)`, shape `[rows][head_dim / 2]`.
    turns: Vec<(f32, f32)>,
    pairs: usize,
    pairing: Pairing,
}

impl Rotation {
    /// Angles for rows at `positions`.
    pub fn new(positions: &[usize], head_dim: usize, rope: &Rope, pairing: Pairing) -> Self {
        let pairs = head_dim / 2;
        let frequencies = rope.frequencies(head_dim);
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
    fn llama3_keeps_high_frequencies_divides_low_ones_and_goes_between() {
        let by = Llama3 { factor: 8.0, low: 1.0, high: 4.0, trained: 8192.0 };
        let rope = Rope::llama3(5e5, 128, by);
        let divisors = rope.divisors.as_deref().unwrap();
        let turns: Vec<f64> =
            Rope::of_base(5e5).frequencies(128).iter().map(|f| f * 8192.0 / std::f64::consts::TAU).collect();
        assert_eq!(divisors.len(), 64);
        let mut between = 0;
        for (divisor, turns) in divisors.iter().zip(turns) {
            match turns {
                t if t >= 4.0 => assert_eq!(*divisor, 1.0),
                t if t <= 1.0 => assert_eq!(*divisor, 8.0),
                _ => {
                    between += 1;
                    assert!(*divisor > 1.0 && *divisor < 8.0);
                }
            }
        }
        assert!(divisors.is_sorted() && between > 0);
        assert_eq!(rope.frequencies(128)[63], Rope::of_base(5e5).frequencies(128)[63] / 8.0);
    }

    #[test]
    fn a_turn_keeps_lengths_and_the_product_depends_on_distance_only() {
        let dot_of = |pairing: Pairing, p: usize, q: usize| {
            let turn = Rotation::new(&[p, q], 64, &Rope { stretch: 2.0, ..Rope::of_base(1e5) }, pairing);
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
