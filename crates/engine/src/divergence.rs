//! How far two predictions are apart. In: logits; out: KL divergence. For agreement of arms, and for accuracy.
//! NOT here: which positions are compared, and what is asked of the result.

/// The model's choice at one position.
pub struct Distribution {
    p: Vec<f64>,
    log_p: Vec<f64>,
}

impl Distribution {
    /// Softmax of logits.
    pub fn of(logits: &[f32]) -> Self {
        let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut p: Vec<f64> = logits.iter().map(|&x| f64::from(x - top).exp()).collect();
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
        let shift = f64::from(top) + sum.ln();
        Self { p, log_p: logits.iter().map(|&x| f64::from(x) - shift).collect() }
    }

    /// KL divergence of `q` from this one, in nats: the sum of `p * (log p - log q)`.
    pub fn kld(&self, q: &Self) -> f64 {
        self.p.iter().zip(&self.log_p).zip(&q.log_p).map(|((p, log_p), log_q)| p * (log_p - log_q)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_distributions() {
        let a = Distribution::of(&[0.0, 0.0]);
        let b = Distribution::of(&[1.0, 0.0]);
        assert_eq!(a.kld(&a), 0.0);
        // 0.5 ln(0.5/s) + 0.5 ln(0.5/(1-s)) with s = e/(1+e).
        let s = 1f64.exp() / (1.0 + 1f64.exp());
        assert!((a.kld(&b) - (0.5 * (0.5 / s).ln() + 0.5 * (0.5 / (1.0 - s)).ln())).abs() < 1e-12);
    }
}
