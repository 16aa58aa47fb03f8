//! Chooses the next token. In: logits of one row; out: a token.
//! NOT here: what happens with it (sequence.rs).
//!
//! Order: top-k, then top-p and min-p on the model's own probabilities, then temperature, then one draw. Every request
//! has its own generator, so what is drawn depends neither on the batch nor on its order.

use crate::Error;
use crate::request::TokenLogprobs;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

/// How to choose. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token; larger flattens the distribution.
    pub temperature: f32,
    /// Keeps the likeliest tokens only; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest likeliest tokens that reach this probability together; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens that have at least this part of the likeliest one's probability; 0 keeps all.
    pub min_p: f32,
    /// Same seed, same logits: same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

impl Sampling {
    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::Sampling`].
    pub fn check(&self) -> Result<(), Error> {
        let no = |option, allowed, got: f32| Err(Error::Sampling { option, allowed, got: got.to_string() });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return no("temperature", "0 or more", self.temperature);
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return no("top_p", "above 0 and at most 1", self.top_p);
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return no("min_p", "0 to 1", self.min_p);
        }
        Ok(())
    }
}

/// The choice of one request.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    random: ChaCha8Rng,
}

impl Sampler {
    /// A sampler at the start of its random stream.
    ///
    /// # Errors
    /// Those of [`Sampling::check`].
    pub fn new(sampling: Sampling) -> Result<Self, Error> {
        sampling.check()?;
        Ok(Self { sampling, random: ChaCha8Rng::seed_from_u64(sampling.seed) })
    }

    /// Whether it takes the likeliest token.
    pub fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// The token after `position`.
    ///
    /// # Errors
    /// [`Error::NanLogit`].
    pub fn choose(&mut self, logits: &[f32], position: usize) -> Result<u32, Error> {
        if let Some(token) = logits.iter().position(|l| l.is_nan()) {
            return Err(Error::NanLogit { token, position });
        }
        if self.sampling.temperature == 0.0 {
            return Ok(greedy(logits));
        }
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let mut kept: Vec<(u32, f32)> = logits.iter().enumerate().map(|(i, &l)| (i as u32, l)).collect();
        if top_k > 0 {
            keep_likeliest(&mut kept, top_k);
        }
        let largest = kept.iter().map(|&(_, l)| l).fold(f32::NEG_INFINITY, f32::max);
        let weight = |l: f32| if l == largest { 1.0 } else { f64::from(l - largest).exp() };
        if top_p < 1.0 {
            let enough = f64::from(top_p) * kept.iter().map(|&(_, l)| weight(l)).sum::<f64>();
            keep_until(&mut kept, weight, enough);
        }
        if min_p > 0.0 {
            kept.retain(|&(_, l)| weight(l) >= f64::from(min_p));
        }
        let flatter = |l: f32| if l == largest { 1.0 } else { (f64::from(l - largest) / f64::from(temperature)).exp() };
        let weights: Vec<f64> = kept.iter().map(|&(_, l)| flatter(l)).collect();
        let mut left = self.random.random::<f64>() * weights.iter().sum::<f64>();
        for (&(token, _), weight) in kept.iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return Ok(token);
            }
        }
        // Rounding of the sum can leave a rest behind the last weight.
        Ok(kept[kept.len() - 1].0)
    }
}

/// Likelier tokens first, of equal ones the lowest.
fn likelier(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Keeps the `n` likeliest, in any order.
fn keep_likeliest(kept: &mut Vec<(u32, f32)>, n: usize) {
    if n < kept.len() {
        kept.select_nth_unstable_by(n - 1, likelier);
        kept.truncate(n);
    }
}

/// Keeps the fewest likeliest whose weights reach `enough` together. Most of a vocabulary is never sorted: the likeliest few
/// nearly always suffice.
fn keep_until(kept: &mut Vec<(u32, f32)>, weight: impl Fn(f32) -> f64, enough: f64) {
    const FIRST: usize = 256;
    let mut n = FIRST;
    loop {
        n = n.min(kept.len());
        if n < kept.len() {
            kept.select_nth_unstable_by(n - 1, likelier);
        }
        kept[..n].sort_unstable_by(likelier);
        let mut reached = 0.0;
        let last = kept[..n].iter().position(|&(_, l)| {
            reached += weight(l);
            reached >= enough
        });
        match last {
            Some(last) => return kept.truncate(last + 1),
            None if n == kept.len() => return,
            None => n *= 4,
        }
    }
}

/// Log probabilities of `token` and of the `top` likeliest tokens (of equal ones the lowest first), by the softmax of `logits`.
pub fn logprobs(logits: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - largest).exp()).sum();
    let of = |l: f32| (f64::from(l) - largest - sum.ln()) as f32;
    let mut best: Vec<(u32, f32)> = if top > 0 { (0..).zip(logits.iter().copied()).collect() } else { Vec::new() };
    keep_likeliest(&mut best, top);
    best.sort_unstable_by(likelier);
    let top = best.into_iter().map(|(token, l)| (token, of(l))).collect();
    TokenLogprobs { logprob: of(logits[token as usize]), top }
}

/// The likeliest token; of equal ones the lowest.
pub fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &l) in logits.iter().enumerate() {
        if l > logits[best] {
            best = i;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(sampling: Sampling, logits: &[f32], n: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling).unwrap();
        (0..n).map(|i| sampler.choose(logits, i).unwrap()).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_equal_logits_and_nan_is_an_error() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0, -1.0]), 1);
        assert_eq!(greedy(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
        let mut sampler = Sampler::new(Sampling::default()).unwrap();
        let e = sampler.choose(&[0.0, f32::NAN], 7).unwrap_err();
        assert!(matches!(e, Error::NanLogit { token: 1, position: 7 }));
    }

    #[test]
    fn a_seed_fixes_the_draws_and_another_changes_them() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin()).collect();
        let with = |seed| draw(Sampling { temperature: 1.0, seed, ..Sampling::default() }, &logits, 40);
        assert_eq!(with(3), with(3));
        assert_ne!(with(3), with(4));
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0, 2f32.ln(), 5f32.ln()];
        let drawn = draw(Sampling { temperature: 1.0, ..Sampling::default() }, &logits, 8000);
        for (token, p) in [(0, 1.0 / 8.0), (1, 2.0 / 8.0), (2, 5.0 / 8.0)] {
            let share = drawn.iter().filter(|&&t| t == token).count() as f64 / 8000.0;
            assert!((share - p).abs() < 0.03, "token {token}: {share} instead of {p}");
        }
    }

    #[test]
    fn cuts_keep_what_they_say() {
        // Probabilities .4 .3 .2 .1 of tokens 3 2 1 0.
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        let base = Sampling { temperature: 5.0, ..Sampling::default() };
        let kept = |sampling| {
            let mut kept = draw(sampling, &logits, 400);
            kept.sort_unstable();
            kept.dedup();
            kept
        };
        assert_eq!(kept(base), [0, 1, 2, 3]);
        assert_eq!(kept(Sampling { top_k: 2, ..base }), [2, 3]);
        assert_eq!(kept(Sampling { top_p: 0.65, ..base }), [2, 3]);
        assert_eq!(kept(Sampling { min_p: 0.45, ..base }), [1, 2, 3]);
        assert_eq!(kept(Sampling { top_p: 0.01, ..base }), [3]);
    }

    #[test]
    fn a_flat_distribution_keeps_as_many_as_it_takes() {
        let mut kept: Vec<(u32, f32)> = (0..3000).map(|i| (i, 0.0)).collect();
        keep_until(&mut kept, |_| 1.0, 2000.5);
        assert_eq!(kept.iter().map(|k| k.0).collect::<Vec<_>>(), (0..2001).collect::<Vec<_>>());
        keep_until(&mut kept, |_| 1.0, 9999.0);
        assert_eq!(kept.len(), 2001);
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let logits: Vec<f32> = [0.1f32, 0.4, 0.4, 0.1].iter().map(|p| p.ln() + 30.0).collect();
        let all = logprobs(&logits, 3, 9);
        assert!((all.logprob - 0.1f32.ln()).abs() < 1e-5);
        assert_eq!(all.top.iter().map(|(t, _)| *t).collect::<Vec<_>>(), [1, 2, 0, 3]);
        assert!((all.top[0].1 - 0.4f32.ln()).abs() < 1e-5);
        assert_eq!(logprobs(&logits, 0, 2).top.iter().map(|(t, _)| *t).collect::<Vec<_>>(), [1, 2]);
        assert!(logprobs(&logits, 0, 0).top.is_empty());
    }

    #[test]
    fn numbers_outside_their_range_are_refused() {
        let base = Sampling::default();
        for bad in [
            Sampling { temperature: -1.0, ..base },
            Sampling { temperature: f32::NAN, ..base },
            Sampling { top_p: 0.0, ..base },
            Sampling { top_p: 1.5, ..base },
            Sampling { min_p: -0.1, ..base },
        ] {
            assert!(matches!(bad.check(), Err(Error::Sampling { .. })), "{bad:?}");
        }
    }
}
