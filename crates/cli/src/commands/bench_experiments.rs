//! Experiments: questions that users of this field ask, answered by measuring on the machine at hand. In: flags that all of
//! them share; out: a table or one JSON object, and a verdict in words whose numbers come from the rows.
//!
//! Every experiment compares ways to do the same work. Ways take turns within rounds, each on another copy of the data, and
//! before anything is timed their results are compared: to the bit where the design promises bits.
//! NOT here: the questions themselves (one file each), the clock (kvant-roofline), attention (kvant-kv).

pub mod cuda;
pub mod layers;
pub mod passes;
pub mod requests;
pub mod sharing;
pub mod splits;
pub mod stacking;

use super::bench_attend::Inputs;
use super::{check_kernel, info};
use crate::args::ExperimentArgs;
use crate::failure::Failure;
use crate::table::Table;
use crate::{output, rss, shape_text};
use anyhow::Result;
use kvant_kv::{Arm, AttendOptions, Attention, Cache, LayerConfig, LayerShape, Rows, Scheme};
use kvant_roofline::timer::{self, Contestant, Timing};
use kvant_roofline::{Cost, Reader};
use serde::Serialize;
use std::cell::RefCell;
use std::ops::Range;
use std::time::{Duration, Instant};

/// head_dim of every experiment that does not vary it: what most models of today have.
const HEAD_DIM: usize = 128;
/// Tokens appended at a time while a cache is filled.
const APPEND_TOKENS: usize = 512;
/// Time for one way when `--rounds` is left out.
const BUDGET: Duration = Duration::from_millis(300);
/// Fewest and most rounds of that choice.
const ROUNDS: (usize, usize) = (5, 60);
/// A way within this share of the best counts as good as it: what repeated runs on a quiet machine differ by.
const NOISE: f64 = 0.1;

/// Error of the library, which contestants return.
type Outcome = std::result::Result<(), kvant_kv::Error>;

/// What one experiment runs with.
struct Lab {
    attention: RefCell<Attention>,
    schemes: Vec<Scheme>,
    threads: usize,
    kernel: &'static str,
    hot: bool,
    quick: bool,
    rounds: Option<usize>,
    json: bool,
    load_average: Option<f64>,
}

#[derive(Serialize)]
struct Report<R> {
    bench: &'static str,
    rows: Vec<R>,
    verdict: Vec<String>,
    cpu: String,
    threads: usize,
    kernel: &'static str,
    cold: bool,
    quick: bool,
    load_average_before: Option<f64>,
}

impl Lab {
    /// Checks the flags. `schemes` is what `--kv` is when left out.
    fn new(args: &ExperimentArgs, schemes: &str) -> Result<Self> {
        let threads = args.machine.threads()?;
        check_kernel(args.kernel.as_deref())?;
        let schemes = shape_text::schemes(args.kv.as_deref().unwrap_or(schemes))?;
        let attention = Attention::new(threads, args.kernel.as_deref()).map_err(Failure::from)?;
        let kernel = attention.kernel();
        let load = std::fs::read_to_string("/proc/loadavg").ok();
        Ok(Self {
            attention: RefCell::new(attention),
            schemes,
            threads,
            kernel,
            hot: args.hot,
            quick: args.quick,
            rounds: args.rounds,
            json: args.json,
            load_average: load.and_then(|l| l.split(' ').next()?.parse().ok()),
        })
    }

    /// Copies that ways of so many bytes per call rotate over: together they exceed the processor's caches, unless one
    /// call alone already does.
    fn copies(&self, bytes: usize, ways: usize) -> usize {
        match (self.hot || self.quick, bytes) {
            (true, _) | (_, timer::COLD_BYTES..) => 1,
            _ => timer::copies(bytes, false).max(ways),
        }
    }

    /// Runs the ways in turns. What they compute must have been compared before.
    fn race(&self, ways: &mut [Contestant<'_, kvant_kv::Error>]) -> Result<Vec<Timing>> {
        let rounds = match (self.rounds, self.quick) {
            (Some(rounds), _) => rounds,
            (None, true) => 1,
            (None, false) => {
                let start = Instant::now();
                timer::interleave(ways, 1).map_err(Failure::from)?;
                // One call is an untimed and a timed round.
                let round = start.elapsed() / 2;
                let budget = BUDGET * u32::try_from(ways.len()).unwrap_or(u32::MAX);
                timer::rounds_for(budget, round, ROUNDS.0, ROUNDS.1)
            }
        };
        Ok(timer::interleave(ways, rounds).map_err(Failure::from)?)
    }

    /// A reader of pieces of `bytes` that lie outside the processor's caches, unless everything is hot.
    fn reader(&self, bytes: usize) -> Result<Reader> {
        let room = if self.hot || self.quick { bytes } else { timer::COLD_BYTES.max(2 * bytes) };
        Ok(Reader::new(self.threads, room).map_err(|e| Failure::input(e, "take fewer threads"))?)
    }

    /// Prints rows, table and verdict.
    fn finish<R: Serialize>(
        self,
        bench: &'static str,
        head: &str,
        rows: Vec<R>,
        table: &Table,
        verdict: Vec<String>,
    ) -> Result<()> {
        let report = Report {
            bench,
            rows,
            verdict,
            cpu: info::cpu_name(),
            threads: self.threads,
            kernel: self.kernel,
            cold: !(self.hot || self.quick),
            quick: self.quick,
            load_average_before: self.load_average,
        };
        if self.json {
            return output::json(&report);
        }
        let sizes = if self.quick { "; tiny sizes, whose figures say nothing" } else { "" };
        let load = report.load_average_before.map_or(String::new(), |l| format!(", load average before {l:.1}"));
        let verdict: String = report.verdict.iter().map(|v| format!("- {v}\n")).collect();
        output::text(
            "the table",
            &format!(
                "{head}\n{}, {} threads, kernel {}, {}{load}{sizes}\n\n{}\n{verdict}",
                report.cpu,
                report.threads,
                report.kernel,
                if report.cold { "cold" } else { "hot" },
                table.render(),
            ),
        )
    }
}

/// One way of several: in every round each works on another copy, so that none finds what its predecessor just read.
fn way<'a>(
    copies: usize,
    (i, ways): (usize, usize),
    mut run: impl FnMut(usize) -> Outcome + 'a,
) -> Contestant<'a, kvant_kv::Error> {
    Contestant::new(copies, move |copy| run((copy + copies * i / ways) % copies))
}

/// What a cache of an experiment holds.
#[derive(Clone)]
struct Contents {
    scheme: Scheme,
    arm: Arm,
    shape: LayerShape,
    batch: usize,
    kv_len: usize,
    /// Newest tokens of each sequence that are attended together; they stay uncommitted when more than one.
    rows: usize,
    /// How many layers are attended, and over how many copies; ascending layers, not more copies for more layers.
    uses: Vec<(usize, usize)>,
}

impl Contents {
    /// One layer and `copies` copies of a batch whose newest token is attended, in the arm that the scheme asks for.
    fn new(scheme: Scheme, shape: LayerShape, batch: usize, kv_len: usize, copies: usize) -> Self {
        Self { scheme, arm: Arm::of(scheme), shape, batch, kv_len, rows: 1, uses: vec![(1, copies)] }
    }

    /// Layers of copy number `copy`.
    fn layers(&self, copy: usize) -> usize {
        self.uses.iter().filter(|(_, copies)| copy < *copies).map(|(layers, _)| *layers).max().unwrap_or(0)
    }

    fn copies(&self) -> usize {
        self.uses.iter().map(|(_, copies)| *copies).max().unwrap_or(0)
    }

    /// Elements of the queries of `layers` layers.
    fn query_len(&self, layers: usize) -> usize {
        layers * self.batch * self.rows * self.shape.q_heads * self.shape.head_dim
    }

    /// Bytes of one layer that attention must read.
    fn layer_bytes(&self) -> usize {
        self.batch * attended_bytes(self.scheme, self.arm, self.shape, self.kv_len)
    }

    /// Refuses what would not fit beside `more` bytes, before anything is allocated.
    fn check_memory(&self, more: usize) -> Result<(), Failure> {
        let layers: usize = (0..self.copies()).map(|c| self.layers(c)).sum();
        let copy =
            if self.arm == Arm::DequantOnce { self.batch * cost(self.scheme, self.shape, self.kv_len) } else { 0 };
        let need = layers * (self.layer_bytes() + copy) + more;
        rss::check(need as f64, "take one scheme at a time with --kv, or --quick")
    }

    /// Fills a cache. Every layer, sequence and token has other data; copies have the same.
    fn fill(&self) -> Result<Filled> {
        let row_len = self.shape.row_len();
        // Starts are spread over this many tokens more than one append takes.
        const SPREAD: usize = 1009;
        let inputs = Inputs::new(self.shape, self.batch, APPEND_TOKENS + SPREAD);
        let most = self.layers(0);
        let layer = LayerConfig { shape: self.shape, scheme: self.scheme, visible: None };
        let mut cache = Cache::new(&vec![layer; most], self.arm).map_err(Failure::from)?;
        let mut copies = Vec::new();
        for copy in 0..self.copies() {
            let seqs: Vec<_> = (0..self.batch).map(|_| cache.add_sequence()).collect();
            for layer in 0..self.layers(copy) {
                for (b, &seq) in seqs.iter().enumerate() {
                    let mut start = 0;
                    while start < self.kv_len {
                        // The rows that are attended come last, in one append.
                        let history = self.kv_len - self.rows;
                        let end = if start < history { (start + APPEND_TOKENS).min(history) } else { self.kv_len };
                        // Primes, so that no two of layer, sequence and start agree for long.
                        let at = (layer * 331 + b * 173 + start / APPEND_TOKENS * 7) % SPREAD * row_len;
                        let span = at..at + (end - start) * row_len;
                        let rows = [Rows { seq, rows: end - start }];
                        let (k, v) = (&inputs.k[span.clone()], &inputs.v[span]);
                        cache.append(layer, &rows, k, v).map_err(Failure::from)?;
                        if self.rows == 1 || start < history {
                            cache.commit(layer, &rows).map_err(Failure::from)?;
                        }
                        start = end;
                    }
                }
            }
            copies.push(seqs.iter().map(|&seq| Rows { seq, rows: self.rows }).collect());
        }
        Ok(Filled { cache, copies, head_dim: self.shape.head_dim })
    }

    /// Queries of `layers` layers: seeded, all different.
    fn queries(&self, layers: usize) -> Vec<f32> {
        let shape = LayerShape { q_heads: self.shape.q_heads, kv_heads: 1, head_dim: self.shape.head_dim };
        Inputs::new(shape, layers * self.batch * self.rows, 1).q
    }
}

fn cost(scheme: Scheme, shape: LayerShape, kv_len: usize) -> usize {
    Cost::of(shape, scheme, kv_len).bytes()
}

/// Bytes that an arm's attention reads of one sequence: of a dequantized copy as much as of plain f16.
fn attended_bytes(scheme: Scheme, arm: Arm, shape: LayerShape, kv_len: usize) -> usize {
    match arm {
        Arm::DequantOnce => cost(Scheme::F16, shape, kv_len),
        _ => cost(scheme, shape, kv_len),
    }
}

/// A filled cache.
struct Filled {
    cache: Cache,
    copies: Vec<Vec<Rows>>,
    head_dim: usize,
}

impl Filled {
    /// One attention call over some layers of a copy.
    fn attend(&self, lab: &Lab, layers: Range<usize>, copy: usize, q: &[f32], out: &mut [f32]) -> Outcome {
        let options = AttendOptions::new(self.head_dim);
        lab.attention.borrow_mut().attend_layers(&self.cache, layers, &self.copies[copy], q, out, &options)
    }
}

/// Fails unless two results are the same to the bit.
fn check_bits(what: &str, expected: &[f32], got: &[f32]) -> Result<(), Failure> {
    match expected.iter().zip(got).position(|(a, b)| a.to_bits() != b.to_bits()) {
        None if expected.len() == got.len() => Ok(()),
        at => Err(Failure::proof(
            format!("{what} changes the result (first at element {})", at.unwrap_or(0)),
            "results must be the same to the bit; nothing was timed",
        )),
    }
}

/// Query heads of a kv head count that the ratio asks for.
fn shape(kv_heads: usize, ratio: usize, head_dim: usize) -> Result<LayerShape, Failure> {
    shape_text::layer_shape(kv_heads * ratio, kv_heads, head_dim)
}

/// `a / b` of two times.
fn ratio(a: u64, b: u64) -> f64 {
    a as f64 / b as f64
}

/// Smallest and largest of some numbers, as text; `-` for none.
fn span(values: impl Iterator<Item = f64>) -> String {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), x| (l.min(x), h.max(x)));
    if low > high { "-".into() } else { format!("{low:.2}x to {high:.2}x") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_hold_as_many_layers_as_their_uses_need() {
        let shape = LayerShape::new(2, 1, 64).unwrap();
        let mut contents = Contents::new(Scheme::F16, shape, 1, 9, 1);
        contents.uses = vec![(2, 5), (3, 2)];
        assert_eq!((0..6).map(|c| contents.layers(c)).collect::<Vec<_>>(), [3, 3, 2, 2, 2, 0]);
        assert_eq!(contents.copies(), 5);
        let filled = contents.fill().unwrap();
        assert_eq!(filled.cache.len(2, filled.copies[1][0].seq).unwrap(), 9);
        assert_eq!(filled.cache.len(2, filled.copies[2][0].seq).unwrap(), 0);
    }

    #[test]
    fn bits_are_compared() {
        assert!(check_bits("x", &[1.0, f32::NAN], &[1.0, f32::NAN]).is_ok());
        assert!(check_bits("x", &[0.0], &[-0.0]).unwrap_err().what.contains("x changes the result"));
        assert!(check_bits("x", &[0.0], &[0.0, 1.0]).is_err());
    }

    #[test]
    fn ways_start_at_different_copies() {
        let seen = RefCell::new(Vec::new());
        let mut ways: Vec<_> = (0..3)
            .map(|i| {
                let seen = &seen;
                way(6, (i, 3), move |copy| {
                    seen.borrow_mut().push(copy);
                    Ok(())
                })
            })
            .collect();
        timer::interleave(&mut ways, 1).unwrap();
        drop(ways);
        assert_eq!(seen.into_inner(), [0, 2, 4, 1, 3, 5]);
    }
}
