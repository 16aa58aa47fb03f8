//! Bounds that an evaluation must keep. In: figures and bounds; out: nothing, or the first figure beyond its bound.
//! NOT here: exit codes (the program).

use super::Figures;
use std::fmt;

/// Bounds; None bounds nothing. NaN is beyond every bound.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Gate {
    /// Largest mean KL divergence from f16.
    pub max_kld: Option<f64>,
    /// Largest ratio of perplexity to that of f16.
    pub max_ppl_ratio: Option<f64>,
}

/// A bound that was not kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Exceeded {
    /// Whose figure.
    pub name: String,
    /// Which figure.
    pub what: &'static str,
    /// Its value.
    pub got: f64,
    /// The most it may be.
    pub bound: f64,
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, what, got, bound } = self;
        write!(f, "{name} has a {what} of {got:.6}, and the bound is {bound}")
    }
}

impl Gate {
    /// Whether these figures keep the bounds.
    ///
    /// # Errors
    /// The first bound that they do not keep.
    pub fn check(&self, name: &str, figures: &Figures) -> Result<(), Exceeded> {
        let bounds = [
            ("mean KL divergence", figures.kld_mean, self.max_kld),
            ("perplexity ratio", figures.ppl_ratio, self.max_ppl_ratio),
        ];
        for (what, got, bound) in bounds {
            if let Some(bound) = bound
                && (got.is_nan() || got > bound)
            {
                return Err(Exceeded { name: name.to_owned(), what, got, bound });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_kept_up_to_themselves_and_never_by_nan() {
        let figures = |kld_mean, ppl_ratio| Figures {
            positions: 1,
            ppl: 2.0,
            ppl_ratio,
            kld_mean,
            kld_p99: 0.0,
            top1_same: 1.0,
            buckets: Vec::new(),
        };
        let gate = Gate { max_kld: Some(0.01), max_ppl_ratio: Some(1.02) };
        assert!(gate.check("a", &figures(0.01, 1.02)).is_ok());
        let e = gate.check("a", &figures(0.011, 1.0)).unwrap_err();
        assert_eq!(e.to_string(), "a has a mean KL divergence of 0.011000, and the bound is 0.01");
        assert_eq!(gate.check("a", &figures(0.0, 1.03)).unwrap_err().what, "perplexity ratio");
        assert!(gate.check("a", &figures(f64::NAN, 1.0)).is_err() && gate.check("a", &figures(0.0, f64::NAN)).is_err());
        assert!(Gate::default().check("a", &figures(f64::NAN, f64::NAN)).is_ok());
    }
}
