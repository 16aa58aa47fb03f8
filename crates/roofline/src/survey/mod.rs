//! The whole roofline of this machine: ceilings, then every operation, scheme and size beside them, then verdicts with the
//! reruns that they need, then the same bytes in other pieces. In: a shape, schemes, threads; out: a [`Report`].
//! Rooms: workload.rs caches to measure on; rows.rs the rows and their verdicts; sweeps.rs the same bytes cut otherwise.
//! NOT here: pages (report/), rules (verdict.rs), counts (cost.rs).

mod rows;
mod sweeps;
mod workload;

use crate::ceilings::{Ceilings, Effort};
use crate::machine::Machine;
use crate::memory::CeilingError;
use crate::report::{Dispatch, Op, Report, Sweeps};
use crate::timer::{self, COLD_BYTES, Contestant};
use kvant_kv::{Attention, Error, LayerShape, Scheme};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use workload::{AttendCall, Data, Size};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SurveyError {
    /// A ceiling could not be measured.
    #[error(transparent)]
    Ceiling(#[from] CeilingError),
    /// An operation refused.
    #[error(transparent)]
    Kv(#[from] Error),
    /// A kernel is wrong: nothing is timed then.
    #[error("kernel {kernel} is wrong on {scheme}: relative error {error:.1e}, its tolerance is {tolerance:.0e}")]
    Wrong {
        /// Its name.
        kernel: String,
        /// The scheme it is wrong on.
        scheme: String,
        /// Relative L2 error against the f64 reference.
        error: f64,
        /// What it promises.
        tolerance: f64,
    },
}

/// What to survey.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Heads and head_dim.
    pub shape: LayerShape,
    /// Schemes, in the order of the rows.
    pub schemes: Vec<Scheme>,
    /// Threads of attention and ceilings.
    pub threads: usize,
    /// Attention kernel, or the best there is.
    pub kernel: Option<String>,
    /// Operations to look at.
    pub ops: Vec<Op>,
    /// Tiny sizes and few rounds: does it run? Its figures say nothing.
    pub quick: bool,
}

/// Sizes and efforts of a run.
struct Plan {
    effort: Effort,
    cold_bytes: usize,
    /// Time for one row.
    budget: Duration,
    /// Fewest and most rounds.
    rounds: (usize, usize),
    /// Tokens of one request, decode attention.
    attend: &'static [usize],
    /// Tokens held before, new rows.
    prefill: &'static [(usize, usize)],
    /// Requests, tokens held before, new rows.
    append: &'static [(usize, usize, usize)],
    /// Tokens of the sweeps.
    sweep_len: usize,
    /// Requests of the sweep over requests.
    sweep_batches: &'static [usize],
}

const FULL: Plan = Plan {
    effort: Effort { largest_bytes: 1 << 30, rounds: 7, quick: false },
    cold_bytes: COLD_BYTES,
    budget: Duration::from_millis(600),
    rounds: (2, 60),
    attend: &[256, 1024, 4096, 16384, 65536],
    prefill: &[(0, 1024), (8192, 128), (32768, 64)],
    append: &[(16, 1024, 1), (1, 0, 64), (1, 0, 512), (1, 0, 4096)],
    sweep_len: 16384,
    sweep_batches: &[1, 4, 16, 64],
};

const QUICK: Plan = Plan {
    effort: Effort { largest_bytes: 4 << 20, rounds: 2, quick: true },
    cold_bytes: 16 << 20,
    budget: Duration::from_millis(1),
    rounds: (2, 2),
    attend: &[256, 1024],
    prefill: &[(0, 128), (512, 64)],
    append: &[(2, 64, 1), (1, 0, 256)],
    sweep_len: 1024,
    sweep_batches: &[1, 4],
};

/// Sizes that every scheme is proved right on before anything is timed: odd ones, with rows of different edges.
const PROOFS: [Size; 2] = [Size { batch: 2, kv_len: 333, new_rows: 1 }, Size { batch: 1, kv_len: 270, new_rows: 77 }];
/// Calls that the cost of starting work is taken from.
const DISPATCH_ROUNDS: usize = 300;

/// What every part of a survey needs.
struct Context<'a> {
    settings: &'a Settings,
    plan: &'a Plan,
    data: &'a Data,
    attention: Mutex<Attention>,
    one_thread_attention: Mutex<Attention>,
    ceilings: Ceilings,
    one_thread: Ceilings,
    /// Bytes of the processor's largest cache, where the system says.
    last_cache_bytes: Option<usize>,
    /// Shortest attention over one token, by scheme.
    floors: Vec<(Scheme, u64)>,
}

impl Context<'_> {
    /// Copies of a batch that a cold call rotates over.
    fn copies(&self, bytes: usize) -> usize {
        self.plan.cold_bytes.div_ceil(bytes.max(1)).max(2)
    }

    fn kernel(&self) -> String {
        self.attention.lock().unwrap_or_else(PoisonError::into_inner).kernel().to_string()
    }

    /// Times contestants in turns for about the plan's budget each.
    fn time(&self, contestants: &mut [Contestant<'_, Error>]) -> Result<Vec<timer::Timing>, SurveyError> {
        let budget = self.plan.budget * u32::try_from(contestants.len()).unwrap_or(u32::MAX);
        Ok(timer::interleave_within(contestants, budget, self.plan.rounds)?)
    }
}

/// Surveys this machine. `progress` is told what comes next.
///
/// # Errors
/// [`SurveyError`]: no memory, no threads, a kernel that is not there or is wrong.
pub fn survey(settings: &Settings, progress: &mut dyn FnMut(&str)) -> Result<Report, SurveyError> {
    let plan = if settings.quick { &QUICK } else { &FULL };
    let attention = Attention::new(settings.threads, settings.kernel.as_deref())?;
    let kernel = attention.kernel();
    let longest = |n: usize| n.max(512);
    let append = plan.append.iter().map(|a| a.2).max().map_or(0, longest);
    let q_rows = plan.prefill.iter().map(|p| p.1).chain(plan.sweep_batches.iter().copied()).max().map_or(0, longest);
    let data = Data::new(settings.shape, append.max(q_rows), q_rows);

    progress("prove the kernels right");
    let attention = Mutex::new(attention);
    prove(settings, &attention, &data)?;

    progress("measure the ceilings");
    let ceilings = Ceilings::measure(settings.threads, plan.effort)?;
    let one_thread = if settings.threads == 1 { ceilings.clone() } else { Ceilings::measure(1, plan.effort)? };

    progress("measure the cost of starting work");
    let (dispatch, floors) = floors(settings, &attention, &data)?;
    let one_thread_attention = Mutex::new(Attention::new(1, Some(kernel))?);
    let machine = Machine::here();
    let last_cache_bytes = machine.caches.iter().map(|c| c.bytes).max();
    let data = &data;
    let context = Context {
        settings,
        plan,
        data,
        attention,
        one_thread_attention,
        ceilings,
        one_thread,
        last_cache_bytes,
        floors,
    };
    let rows = rows::measure(&context, progress)?;
    let sweeps = if settings.ops.contains(&Op::Attend) {
        progress("cut the same bytes otherwise");
        sweeps::measure(&context)?
    } else {
        Sweeps::default()
    };
    Ok(Report {
        version: env!("CARGO_PKG_VERSION").to_string(),
        note: None,
        machine,
        quick: settings.quick,
        cold_bytes: plan.cold_bytes,
        q_heads: settings.shape.q_heads,
        kv_heads: settings.shape.kv_heads,
        head_dim: settings.shape.head_dim,
        threads: settings.threads,
        kernel: kernel.to_string(),
        ceilings: context.ceilings,
        one_thread: context.one_thread,
        dispatch,
        rows,
        sweeps,
    })
}

/// Every scheme against the f64 reference.
fn prove(settings: &Settings, attention: &Mutex<Attention>, data: &Data) -> Result<(), SurveyError> {
    for &scheme in &settings.schemes {
        for size in PROOFS {
            let error = AttendCall::new(settings.shape, scheme, size, 1, data)?.relative_error(attention)?;
            let attention = attention.lock().unwrap_or_else(PoisonError::into_inner);
            let tolerance = attention.tolerance(scheme != Scheme::F16);
            // Asked this way round, NaN fails too.
            let holds = error <= tolerance;
            if !holds {
                return Err(SurveyError::Wrong {
                    kernel: attention.kernel().to_string(),
                    scheme: scheme.to_string(),
                    error,
                    tolerance,
                });
            }
        }
    }
    Ok(())
}

/// The empty dispatch, and attention over one token under each scheme.
fn floors(
    settings: &Settings,
    attention: &Mutex<Attention>,
    data: &Data,
) -> Result<(Dispatch, Vec<(Scheme, u64)>), SurveyError> {
    let size = Size { batch: 1, kv_len: 1, new_rows: 1 };
    let calls = settings.schemes.iter().map(|&s| AttendCall::new(settings.shape, s, size, 1, data));
    let calls = calls.collect::<Result<Vec<_>, _>>()?;
    let mut contestants = vec![Contestant::new(1, |_| {
        attention.lock().unwrap_or_else(PoisonError::into_inner).dispatch_nothing();
        Ok::<(), Error>(())
    })];
    for call in &calls {
        let mut out = vec![0.0; call.out_len()];
        contestants.push(Contestant::new(1, move |copy| call.run(attention, copy, &mut out)));
    }
    let timings = timer::interleave(&mut contestants, DISPATCH_ROUNDS)?;
    let floors: Vec<_> = settings.schemes.iter().copied().zip(timings[1..].iter().map(|t| t.min_ns)).collect();
    let dispatch = Dispatch {
        empty_min_ns: timings[0].min_ns,
        empty_median_ns: timings[0].median_ns,
        one_token_ns: floors.iter().map(|f| f.1).max().unwrap_or(0),
    };
    Ok((dispatch, floors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_survey_has_every_row_and_every_figure() {
        let schemes = vec!["f16".parse().unwrap(), "k4v2g32".parse().unwrap()];
        let settings = Settings {
            shape: LayerShape::new(4, 2, 64).unwrap(),
            schemes,
            threads: 2,
            kernel: Some("portable".into()),
            ops: Op::ALL.to_vec(),
            quick: true,
        };
        let mut heard = Vec::new();
        let report = survey(&settings, &mut |what| heard.push(what.to_string())).unwrap();
        assert!(heard.len() > 4);
        for op in Op::ALL {
            let rows: Vec<_> = report.rows_of(op).collect();
            assert_eq!(rows.len(), 4, "{op}: two schemes, two sizes");
            for r in rows {
                let figures = [r.gbps, r.gops, r.ceiling_gbps, r.pct_of_bandwidth, r.peak_gops, r.pct_of_compute];
                assert!(figures.iter().all(|x| x.is_finite() && *x > 0.0), "{r:?}");
                assert!(r.min_ns <= r.median_ns && r.floor_ns > 0 && !r.verdict.why.is_empty());
                assert_eq!(r.pct_of_matmul.is_some(), op == Op::Prefill);
                assert_eq!(r.input_gbps.is_some(), op == Op::Append);
            }
        }
        assert_eq!(report.sweeps.threads.iter().map(|p| p.threads).max(), Some(2));
        assert!(report.sweeps.requests.len() > 1 && report.sweeps.splits.len() > 1);
        serde_json::to_string(&report).unwrap();
    }

    #[test]
    fn a_kernel_that_is_not_there_is_an_error() {
        let settings = Settings {
            shape: LayerShape::new(4, 2, 64).unwrap(),
            schemes: vec![Scheme::F16],
            threads: 1,
            kernel: Some("abacus".into()),
            ops: vec![Op::Append],
            quick: true,
        };
        assert!(matches!(survey(&settings, &mut |_| {}), Err(SurveyError::Kv(Error::Unsupported { .. }))));
    }
}
