//! The proof that comes before the clock: fused, dequant-once and dequant-step decode the same. In: a model and prompts; out:
//! divergences and first differences. Every arm follows the same tokens (those that dequant-step chooses greedily), and the
//! arms that must agree store the keys and values that dequant-step computed: what differs is attention over the same cache.
//! Left to itself each arm would store its own, and rounding would grow from token to token (docs/decisions/0006). f16 runs
//! free: its divergence says what the scheme changes. NOT here: timing.

use super::DecodeArgs;
use crate::args::ArmName;
use crate::failure::Failure;
use crate::output::note;
use crate::{progress, session};
use anyhow::Result;
use kvant_engine::{Distribution, Engine, Feed, Forced, LoadedModel, Request, Tape, load_schemes};
use serde::Serialize;
use std::ops::ControlFlow::Continue;
use std::sync::Arc;

/// Largest mean KL divergence between two arms that read the same packed cache.
const MAX_KLD: f64 = 1e-4;
/// Fewest requests, of all, whose greedy tokens are equal.
const MIN_EQUAL: f64 = 0.95;
/// A first difference where the reference prefers its token by more than this many logits is no rounding.
const MAX_GAP: f64 = 1.0;
/// Logits kept per arm at a time; requests are proved in groups that fit.
const GROUP_BYTES: usize = 256 << 20;

/// The arms that must agree.
const AGREEING: [ArmName; 3] = [ArmName::Fused, ArmName::DequantOnce, ArmName::DequantStep];

/// What was found.
#[derive(Debug, Serialize)]
pub struct Proof {
    requests: usize,
    steps: usize,
    pairs: Vec<Pair>,
    arms: Vec<ArmProof>,
}

/// Mean divergence between two arms.
#[derive(Debug, Serialize)]
struct Pair {
    arms: [&'static str; 2],
    kld_mean: f64,
}

/// One arm against dequant-step.
#[derive(Debug, Serialize)]
struct ArmProof {
    arm: &'static str,
    kld_to_dequant_step: f64,
    requests_equal: usize,
    differences: Vec<Difference>,
}

/// The first token that an arm chooses differently.
#[derive(Debug, Serialize)]
struct Difference {
    request: usize,
    step: usize,
    dequant_step_token: usize,
    token: usize,
    /// Logit of the reference's first choice minus that of its second.
    top_two_gap: f64,
}

/// Decodes the prompts under dequant-step, then follows that text under every arm. Returns the kernel's name too.
///
/// # Errors
/// What the engine refuses.
pub fn prove(
    model: &Arc<LoadedModel>,
    args: &DecodeArgs,
    threads: usize,
    prompts: &[Vec<u32>],
) -> Result<(Proof, String)> {
    let arms: Vec<ArmName> = [ArmName::F16].into_iter().filter(|a| args.arms.contains(a)).chain(AGREEING).collect();
    let mut engines = Vec::new();
    for arm in &arms {
        let schemes = load_schemes(&args.kv, model.config().layers).map_err(Failure::from)?;
        engines.push(session::engine(model, threads, args.kernel.as_deref(), arm.arm(), schemes)?);
    }
    let kernel = engines[0].kernel().to_string();
    let reference = arms.len() - 1;
    let vocabulary = model.config().vocabulary;
    let per_request = (args.steps + 1) * vocabulary * size_of::<f32>()
        + (args.prompt_len + args.steps) * Tape::token_bytes(model.config().layers, model.config().shape.row_len());
    let group = (GROUP_BYTES / per_request).max(1);

    let mut sums = Sums::new(arms.len());
    for (g, prompts) in prompts.chunks(group).enumerate() {
        let wheel = progress::wheel(&format!("prove that the arms agree: {} requests", prompts.len()));
        let texts = greedy(&mut engines[reference], prompts, args.steps)?;
        let mut tape = Tape::default();
        let recorded = follow(&mut engines[reference], Some(&mut tape), &texts, args.prompt_len)?;
        engines[reference].clear().map_err(Failure::from)?;
        let mut logits = Vec::new();
        for (arm, engine) in arms.iter().zip(&mut engines).take(reference) {
            tape.rewind();
            let tape = AGREEING.contains(arm).then_some(&mut tape);
            logits.push(follow(engine, tape, &texts, args.prompt_len)?);
            // Only the logits are needed from here on.
            engine.clear().map_err(Failure::from)?;
        }
        logits.push(recorded);
        sums.add(&logits, reference, vocabulary, g * group, args.steps + 1);
        wheel.finish_and_clear();
    }
    Ok((sums.proof(&arms, reference, prompts.len(), args.steps), kernel))
}

/// Each prompt with the `steps` tokens that the engine chooses behind it.
fn greedy(engine: &mut Engine, prompts: &[Vec<u32>], steps: usize) -> Result<Vec<Vec<u32>>> {
    let request = |p: &Vec<u32>| Request { ignore_end: true, ..Request::greedy(p.clone(), steps) };
    let generation =
        engine.generate(prompts.iter().map(request).collect(), &mut |_| Continue(())).map_err(Failure::from)?;
    Ok(prompts.iter().zip(generation.outcomes).map(|(p, o)| [p.as_slice(), &o.tokens].concat()).collect())
}

/// Logits of each text's positions from the prompt's last token on: one `[steps + 1][vocabulary]` per text.
fn follow(engine: &mut Engine, tape: Option<&mut Tape>, texts: &[Vec<u32>], prompt: usize) -> Result<Vec<Vec<f32>>> {
    let forced: Vec<Forced<'_>> = texts.iter().map(|tokens| Forced { tokens, prompt }).collect();
    let mut logits = vec![Vec::new(); texts.len()];
    let mut each = |text: usize, _position: usize, row: &[f32]| {
        logits[text].extend_from_slice(row);
        Ok(())
    };
    match tape {
        Some(tape) => engine.follow_with(tape, &forced, Feed::Decode, &mut each),
        None => engine.follow(&forced, Feed::Decode, &mut each),
    }
    .map_err(Failure::from)?;
    Ok(logits)
}

/// Sums over requests, taken up group by group.
struct Sums {
    /// KL divergence from arm i to arm j, for i and j of all arms.
    kld: Vec<Vec<f64>>,
    positions: usize,
    differences: Vec<Vec<Difference>>,
}

impl Sums {
    fn new(arms: usize) -> Self {
        let differences = (0..arms).map(|_| Vec::new()).collect();
        Self { kld: vec![vec![0.0; arms]; arms], positions: 0, differences }
    }

    /// `logits[arm][request]` is `[positions][vocabulary]`.
    fn add(
        &mut self,
        logits: &[Vec<Vec<f32>>],
        reference: usize,
        vocabulary: usize,
        first_request: usize,
        positions: usize,
    ) {
        for request in 0..logits[reference].len() {
            let mut differs = vec![false; logits.len()];
            for step in 0..positions {
                let row = |arm: usize| &logits[arm][request][step * vocabulary..(step + 1) * vocabulary];
                let p: Vec<_> = (0..logits.len()).map(|arm| Distribution::of(row(arm))).collect();
                for (i, p_i) in p.iter().enumerate() {
                    for (j, p_j) in p.iter().enumerate().filter(|(j, _)| *j != i) {
                        self.kld[i][j] += p_i.kld(p_j);
                    }
                }
                let (first, second) = top_two(row(reference));
                for (arm, differs) in differs.iter_mut().enumerate().filter(|(_, d)| !**d) {
                    let (token, _) = top_two(row(arm));
                    if token != first {
                        *differs = true;
                        let row = row(reference);
                        self.differences[arm].push(Difference {
                            request: first_request + request,
                            step,
                            dequant_step_token: first,
                            token,
                            top_two_gap: f64::from(row[first]) - f64::from(row[second]),
                        });
                    }
                }
                self.positions += 1;
            }
        }
    }

    fn proof(self, arms: &[ArmName], reference: usize, requests: usize, steps: usize) -> Proof {
        let positions = self.positions.max(1) as f64;
        let mut pairs = Vec::new();
        for (i, a) in arms.iter().enumerate() {
            for (j, b) in arms.iter().enumerate().skip(i + 1) {
                if AGREEING.contains(a) && AGREEING.contains(b) {
                    // Divergence has a direction; the worse of the two counts.
                    let kld_mean = self.kld[i][j].max(self.kld[j][i]) / positions;
                    pairs.push(Pair { arms: [a.name(), b.name()], kld_mean });
                }
            }
        }
        let one = |((arm, name), differences): ((usize, &ArmName), Vec<Difference>)| ArmProof {
            arm: name.name(),
            kld_to_dequant_step: self.kld[reference][arm] / positions,
            requests_equal: requests - differences.len(),
            differences,
        };
        Proof { requests, steps, pairs, arms: arms.iter().enumerate().zip(self.differences).map(one).collect() }
    }
}

impl Proof {
    /// Mean divergence of an arm from dequant-step.
    pub fn kld_to_dequant_step(&self, arm: ArmName) -> f64 {
        self.arms.iter().find(|a| a.arm == arm.name()).map_or(f64::NAN, |a| a.kld_to_dequant_step)
    }

    /// Says on stderr what was found, each first difference included.
    pub fn print(&self) {
        note(format_args!("proof over {} requests, {} steps each:", self.requests, self.steps));
        for pair in &self.pairs {
            note(format_args!("  mean KLD between {} and {}: {:.2e}", pair.arms[0], pair.arms[1], pair.kld_mean));
        }
        for arm in self.arms.iter().filter(|a| a.arm != ArmName::DequantStep.name()) {
            let (equal, kld) = (arm.requests_equal, arm.kld_to_dequant_step);
            note(format_args!(
                "  {}: greedy tokens equal for {equal} of {} requests, mean KLD {kld:.2e}",
                arm.arm, self.requests
            ));
            for d in &arm.differences {
                note(format_args!(
                    "    request {} differs first at step {}: token {} instead of {}, top-two gap {:.4}",
                    d.request + 1,
                    d.step + 1,
                    d.token,
                    d.dequant_step_token,
                    d.top_two_gap
                ));
            }
        }
    }

    /// Whether the arms agree.
    ///
    /// # Errors
    /// [`Failure`] that says which bound was broken.
    pub fn check(&self) -> Result<(), Failure> {
        const HINT: &str = "nothing was timed: one of the arms computes something else";
        // Asked whether it holds, so that NaN fails.
        let within = |value: f64, bound: f64| value <= bound;
        for pair in &self.pairs {
            if !within(pair.kld_mean, MAX_KLD) {
                let [a, b] = pair.arms;
                return Err(Failure::proof(
                    format!("{a} and {b} disagree: mean KLD {:.2e} is over {MAX_KLD:.0e}", pair.kld_mean),
                    HINT,
                ));
            }
        }
        for arm in self.arms.iter().filter(|a| AGREEING.iter().any(|n| n.name() == a.arm)) {
            if (arm.requests_equal as f64) < MIN_EQUAL * self.requests as f64 {
                return Err(Failure::proof(
                    format!(
                        "{} decodes {} of {} requests like dequant-step",
                        arm.arm, arm.requests_equal, self.requests
                    ),
                    HINT,
                ));
            }
            if let Some(d) = arm.differences.iter().find(|d| !within(d.top_two_gap, MAX_GAP)) {
                return Err(Failure::proof(
                    format!(
                        "{} leaves request {} at a top-two gap of {:.3}, over {MAX_GAP}",
                        arm.arm,
                        d.request + 1,
                        d.top_two_gap
                    ),
                    HINT,
                ));
            }
        }
        Ok(())
    }
}

/// Indices of the largest and the second largest logit; the first of equals, as greedy sampling takes it.
fn top_two(logits: &[f32]) -> (usize, usize) {
    let (mut first, mut second) = (0, usize::MAX);
    for (i, &x) in logits.iter().enumerate().skip(1) {
        if x > logits[first] {
            (first, second) = (i, first);
        } else if second == usize::MAX || x > logits[second] {
            second = i;
        }
    }
    (first, second.min(logits.len().saturating_sub(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_largest_logits_and_ties() {
        assert_eq!(top_two(&[1.0, 3.0, 2.0]), (1, 2));
        assert_eq!(top_two(&[3.0, 3.0, 1.0]), (0, 1));
        assert_eq!(top_two(&[1.0, 2.0, 3.0]), (2, 1));
        assert_eq!(top_two(&[5.0]), (0, 0));
    }

    /// Two requests, two positions, three words; arm 0 is fused, arm 1 dequant-step (the reference).
    fn proof_of(fused: [[f32; 6]; 2], step: [[f32; 6]; 2]) -> Proof {
        let logits = [fused, step].map(|arm| arm.map(|r| r.to_vec()).to_vec());
        let mut sums = Sums::new(2);
        sums.add(&logits, 1, 3, 0, 2);
        sums.proof(&[ArmName::Fused, ArmName::DequantStep], 1, 2, 1)
    }

    #[test]
    fn equal_arms_agree_and_different_ones_do_not() {
        let text = [[0.0, 1.0, 2.0, 3.0, 1.0, 0.0]; 2];
        let same = proof_of(text, text);
        assert!(same.check().is_ok());
        assert_eq!(same.kld_to_dequant_step(ArmName::Fused), 0.0);
        assert_eq!(same.arms[0].requests_equal, 2);

        let mut other = text;
        other[1] = [0.0, 1.0, 2.0, 0.0, 1.0, 3.0];
        let differs = proof_of(other, text);
        assert!(differs.check().unwrap_err().what.contains("mean KLD"));
        let d = &differs.arms[0].differences[0];
        assert_eq!((d.request, d.step, d.dequant_step_token, d.token, d.top_two_gap), (1, 1, 0, 2, 2.0));

        let mut broken = text;
        broken[0][0] = f32::NAN;
        assert!(proof_of(broken, text).check().is_err());
    }

    #[test]
    fn a_wide_gap_fails_even_when_divergence_is_small() {
        let text = [[0.0, 1.0, 2.0, 3.0, 1.0, 0.0]; 2];
        let mut proof = proof_of(text, text);
        proof.requests = 40;
        proof.arms[0].requests_equal = 39;
        let difference = |top_two_gap| Difference { request: 3, step: 0, dequant_step_token: 1, token: 2, top_two_gap };
        proof.arms[0].differences = vec![difference(0.01)];
        assert!(proof.check().is_err(), "the reference itself must count the same requests");
        proof.arms[1].requests_equal = 40;
        assert!(proof.check().is_ok());
        proof.arms[0].differences = vec![difference(1.5)];
        assert!(proof.check().unwrap_err().what.contains("top-two gap"));
    }
}
