//! Rows of logits, scored. In: logits of the f16 base and of a contestant at the same positions, and the token that really
//! follows; out: per row negative log-likelihood, KL divergence and whether both choose the same token first; over rows,
//! figures as a whole and by position.
//!
//! Formula, for logits x (base) and y with Z = log sum exp: `nll = Z(y) - y[token]`,
//! `kld = sum_i exp(x_i - Z(x)) * ((x_i - Z(x)) - (y_i - Z(y)))`, in nats.
//! Accuracy: exponentials in f32, differences and sums in f64: equal logits have a divergence of exactly 0.
//! NOT here: where logits come from (mod.rs).

use rayon::prelude::*;

/// One position of one contestant.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowScore {
    pub position: usize,
    pub nll: f64,
    pub kld: f64,
    pub same: bool,
}

/// A row's largest logit, where it is (the first of equals), and the logarithm of the sum of exponentials.
#[derive(Debug, Clone, Copy)]
pub(super) struct Summary {
    top: usize,
    log_sum: f64,
}

impl Summary {
    pub(super) fn of(logits: &[f32]) -> Self {
        let mut top = 0;
        for (i, x) in logits.iter().enumerate() {
            // A NaN becomes the top and stays it: no comparison with it holds.
            if *x > logits[top] || x.is_nan() {
                top = i;
                if x.is_nan() {
                    break;
                }
            }
        }
        let largest = logits[top];
        let sum: f64 = logits.iter().map(|x| f64::from((x - largest).exp())).sum();
        Self { top, log_sum: f64::from(largest) + sum.ln() }
    }

    /// Negative log-likelihood of a token, in nats.
    pub(super) fn nll(&self, logits: &[f32], token: u32) -> f64 {
        self.log_sum - f64::from(logits[token as usize])
    }
}

/// Logits of the base over the scored positions of one chunk.
pub(crate) struct Base {
    vocabulary: usize,
    logits: Vec<f32>,
    summaries: Vec<Summary>,
}

impl Base {
    pub(crate) fn new(vocabulary: usize) -> Self {
        Self { vocabulary, logits: Vec::new(), summaries: Vec::new() }
    }

    /// Forgets the chunk and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.logits.clear();
        self.summaries.clear();
    }

    /// Keeps a block of rows whose first is at position `first`, and scores them.
    pub(crate) fn keep(&mut self, first: usize, logits: &[f32], chunk: &[u32]) -> Vec<RowScore> {
        self.logits.extend_from_slice(logits);
        let summaries: Vec<_> = logits.par_chunks_exact(self.vocabulary).map(Summary::of).collect();
        let rows = logits.chunks_exact(self.vocabulary).zip(&summaries).enumerate();
        let scores = rows.map(|(r, (logits, summary))| {
            let position = first + r;
            // A logit that is no number shows as such, not as a divergence of 0.
            let kld = if summary.log_sum.is_nan() { f64::NAN } else { 0.0 };
            RowScore { position, nll: summary.nll(logits, chunk[position + 1]), kld, same: true }
        });
        let scores = scores.collect();
        self.summaries.extend(summaries);
        scores
    }

    /// Scores a block of a contestant's rows: the first is at `position`, and its base is row `row` of those kept.
    pub(crate) fn compare(&self, row: usize, position: usize, logits: &[f32], chunk: &[u32]) -> Vec<RowScore> {
        let v = self.vocabulary;
        let base = &self.logits[row * v..];
        let rows = logits.par_chunks_exact(v).zip(base.par_chunks_exact(v)).zip(&self.summaries[row..]).enumerate();
        rows.map(|(r, ((y, x), base))| {
            let got = Summary::of(y);
            let position = position + r;
            let nll = got.nll(y, chunk[position + 1]);
            RowScore { position, nll, kld: divergence(x, base, y, &got), same: base.top == got.top }
        })
        .collect()
    }
}

/// KL divergence of `y` from `x`.
fn divergence(x: &[f32], base: &Summary, y: &[f32], got: &Summary) -> f64 {
    let shift = base.log_sum - got.log_sum;
    let log_sum = base.log_sum as f32;
    let terms = x.iter().zip(y).map(|(&x, &y)| f64::from((x - log_sum).exp()) * (f64::from(x) - f64::from(y) - shift));
    terms.sum()
}

/// First positions of the buckets that figures are given for.
pub(super) const BUCKETS: [usize; 4] = [0, 256, 1024, 2048];

/// What was found over some positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Figures {
    /// Positions scored.
    pub positions: usize,
    /// Exponential of the mean negative log-likelihood.
    pub ppl: f64,
    /// Its ratio to the f16 base's over the same positions.
    pub ppl_ratio: f64,
    /// Mean KL divergence from the f16 base, in nats.
    pub kld_mean: f64,
    /// Its 99th percentile over all positions: the smallest value that 99 % of them do not exceed.
    pub kld_p99: f64,
    /// Share of positions where both caches choose the same token first.
    pub top1_same: f64,
    /// The same by position; buckets without positions are left out.
    pub buckets: Vec<Bucket>,
}

/// Figures of some positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Bucket {
    /// First position.
    pub from: usize,
    /// First position behind it; None: to the end.
    pub to: Option<usize>,
    /// Theirs; without buckets.
    pub figures: Figures,
}

impl Figures {
    pub(super) fn of(rows: &[RowScore], base: &[RowScore]) -> Self {
        let mut figures = Self::whole(rows, base);
        for (i, &from) in BUCKETS.iter().enumerate() {
            let to = BUCKETS.get(i + 1).copied();
            let inside = |row: &&RowScore| row.position >= from && to.is_none_or(|to| row.position < to);
            let [rows, base] = [rows, base].map(|rows| rows.iter().filter(inside).copied().collect::<Vec<_>>());
            if !rows.is_empty() {
                figures.buckets.push(Bucket { from, to, figures: Self::whole(&rows, &base) });
            }
        }
        figures
    }

    fn whole(rows: &[RowScore], base: &[RowScore]) -> Self {
        let n = rows.len() as f64;
        let nll = |rows: &[RowScore]| rows.iter().map(|r| r.nll).sum::<f64>() / n;
        let mut klds: Vec<f64> = rows.iter().map(|r| r.kld).collect();
        let kld_mean = klds.iter().sum::<f64>() / n;
        // NaN counts as the largest: it can raise the percentile, never lower it.
        klds.sort_by(|a, b| a.is_nan().cmp(&b.is_nan()).then(a.total_cmp(b)));
        let rank = (0.99 * n).ceil() as usize;
        Self {
            positions: rows.len(),
            ppl: nll(rows).exp(),
            ppl_ratio: (nll(rows) - nll(base)).exp(),
            kld_mean,
            kld_p99: klds.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN),
            top1_same: rows.iter().filter(|r| r.same).count() as f64 / n,
            buckets: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Distribution;

    #[test]
    fn rows_are_scored_as_distributions_are() {
        let row = |seed: usize| -> Vec<f32> { (0..300).map(|i| ((i * i + seed * i) % 97) as f32 / 9.0).collect() };
        let (x, y) = ([row(1), row(2)].concat(), [row(3), row(2)].concat());
        let chunk = [0, 0, 0, 7, 9, 5];
        let mut base = Base::new(300);
        let kept = base.keep(2, &x, &chunk);
        let found = base.compare(0, 2, &y, &chunk);
        let expected = Distribution::of(&x[..300]).kld(&Distribution::of(&y[..300]));
        assert!((found[0].kld - expected).abs() < 1e-5 * expected, "{} {expected}", found[0].kld);
        // Equal logits: nothing at all, on the second block's row too.
        assert_eq!((found[1].kld, found[1].nll, found[1].same), (0.0, kept[1].nll, true));
        assert_eq!(base.compare(1, 3, &y[300..], &chunk)[0].kld, 0.0);
        let nll = |logits: &[f32], token: usize| {
            let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            sum.ln() - f64::from(logits[token])
        };
        assert!((found[0].nll - nll(&y[..300], 7)).abs() < 1e-6);
        assert!((kept[1].nll - nll(&x[300..], 9)).abs() < 1e-6);
    }

    #[test]
    fn a_nan_shows_in_every_mean() {
        let mut base = Base::new(3);
        let kept = base.keep(0, &[1.0, 2.0, 3.0], &[0, 1]);
        for at in 0..3 {
            let mut y = [1.0, 2.0, 3.0];
            y[at] = f32::NAN;
            let found = base.compare(0, 0, &y, &[0, 1]);
            let figures = Figures::of(&found, &kept);
            assert!(figures.kld_mean.is_nan() && figures.ppl.is_nan() && figures.ppl_ratio.is_nan(), "{figures:?}");
            assert!(figures.kld_p99.is_nan());
        }
    }

    #[test]
    fn figures_are_means_percentiles_and_buckets() {
        let rows: Vec<RowScore> =
            (0..200).map(|i| RowScore { position: 100 + 10 * i, nll: 2.0, kld: i as f64, same: i % 4 != 0 }).collect();
        let base: Vec<RowScore> = rows.iter().map(|r| RowScore { nll: 1.0, kld: 0.0, same: true, ..*r }).collect();
        let f = Figures::of(&rows, &base);
        assert_eq!((f.positions, f.kld_mean, f.kld_p99, f.top1_same), (200, 99.5, 197.0, 0.75));
        assert!((f.ppl - 2f64.exp()).abs() < 1e-12 && (f.ppl_ratio - 1f64.exp()).abs() < 1e-12);
        let spans: Vec<_> = f.buckets.iter().map(|b| (b.from, b.to, b.figures.positions)).collect();
        assert_eq!(spans, [(0, Some(256), 16), (256, Some(1024), 77), (1024, Some(2048), 102), (2048, None, 5)]);
    }
}
