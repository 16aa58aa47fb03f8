//! Partial softmax states and their algebra. A state over a set of keys is `m` (largest score), `l` (sum of
//! `exp(score-m)`) and `o` (sum of `exp(score-m) * v`); states over disjoint sets merge exactly, up to rounding.
//! The empty state is `m = -inf, l = 0, o = 0`, and merging it changes nothing, not even a bit.
//! Source: the online softmax of Milakov and Gimelshein (arXiv 1805.02867), as split-KV decoding uses it.
//! NOT here: scores, values, which keys.

/// States of several query vectors, in one piece of memory: `m[vectors]`, `l[vectors]`, `o[vectors][head_dim]`.
#[derive(Debug, Clone)]
pub(crate) struct States {
    numbers: Vec<f32>,
    vectors: usize,
    head_dim: usize,
}

impl States {
    /// Empty states.
    pub(crate) fn init(vectors: usize, head_dim: usize) -> Self {
        let mut numbers = vec![0.0; vectors * (2 + head_dim)];
        numbers[..vectors].fill(f32::NEG_INFINITY);
        Self { numbers, vectors, head_dim }
    }

    fn m(&self, i: usize) -> f32 {
        self.numbers[i]
    }

    fn l(&self, i: usize) -> f32 {
        self.numbers[self.vectors + i]
    }

    fn o(&self, i: usize) -> &[f32] {
        &self.numbers[2 * self.vectors + i * self.head_dim..][..self.head_dim]
    }

    /// Merges one vector's partial state into state `i`. The order of merges is part of the result's bits.
    pub(crate) fn merge(&mut self, i: usize, m: f32, l: f32, o: &[f32]) {
        if m == f32::NEG_INFINITY {
            return;
        }
        let (own_m, own_l) = (self.m(i), self.l(i));
        let own = &mut self.numbers[2 * self.vectors + i * self.head_dim..][..self.head_dim];
        let (top, total) = if own_m == f32::NEG_INFINITY {
            own.copy_from_slice(o);
            (m, l)
        } else {
            let top = if m > own_m { m } else { own_m };
            let (keep, add) = ((own_m - top).exp(), (m - top).exp());
            for (own, &o) in own.iter_mut().zip(o) {
                *own = *own * keep + o * add;
            }
            (top, own_l * keep + l * add)
        };
        self.numbers[i] = top;
        self.numbers[self.vectors + i] = total;
    }

    /// Merges all vectors of `other`.
    pub(crate) fn merge_all(&mut self, other: &Self) {
        for i in 0..other.vectors {
            self.merge(i, other.m(i), other.l(i), other.o(i));
        }
    }

    /// The attention output of vector `i`: `o / l`; a sink logit is one more term of the sum. Zero when nothing was seen.
    pub(crate) fn finish(&self, i: usize, sink_logit: Option<f32>, out: &mut [f32]) {
        let o = self.o(i);
        let (mut l, mut factor) = (self.l(i), 1.0);
        if let Some(sink) = sink_logit {
            let top = if sink > self.m(i) { sink } else { self.m(i) };
            factor = (self.m(i) - top).exp();
            l = l * factor + (sink - top).exp();
        }
        let factor = if l == 0.0 { 0.0 } else { factor / l };
        for (out, &o) in out.iter_mut().zip(o) {
            *out = o * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state(scores: &[(f32, f32)]) -> States {
        let mut s = States::init(1, 1);
        for &(score, v) in scores {
            s.merge(0, score, 1.0, &[v]);
        }
        s
    }

    #[test]
    fn empty_states_change_nothing() {
        let mut s = state(&[(1.0, 2.0), (-3.0, 5.0)]);
        let before = s.numbers.clone();
        s.merge(0, f32::NEG_INFINITY, 0.0, &[0.0]);
        assert_eq!(before, s.numbers);
        let mut out = [1.0];
        States::init(1, 1).finish(0, None, &mut out);
        assert_eq!(out, [0.0]);
        States::init(1, 1).finish(0, Some(1.0), &mut out);
        assert_eq!(out, [0.0]);
    }

    proptest! {
        #[test]
        fn merging_is_the_softmax_of_the_union(
            pairs in prop::collection::vec((-80f32..80.0, -1f32..1.0), 1..20), cut in 0usize..20, sink in -5f32..5.0
        ) {
            let cut = cut.min(pairs.len());
            let mut s = state(&pairs[..cut]);
            s.merge_all(&state(&pairs[cut..]));
            let mut out = [0.0];
            s.finish(0, Some(sink), &mut out);
            let top = pairs.iter().map(|p| p.0).fold(sink, f32::max) as f64;
            let w = |x: f32| (x as f64 - top).exp();
            let den: f64 = pairs.iter().map(|p| w(p.0)).sum::<f64>() + w(sink);
            let want = pairs.iter().map(|p| w(p.0) * p.1 as f64).sum::<f64>() / den;
            prop_assert!((out[0] as f64 - want).abs() <= 1e-5);
        }
    }
}
