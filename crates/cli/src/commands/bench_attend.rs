//! `kvant bench attend`: one attention call per scheme beside an f16 cache and the machine's read bandwidth. In: a shape and
//! schemes; out: one row per scheme. Correctness comes first: every row carries its error against the f64 reference, and a
//! kernel beyond its stated tolerance is not timed. NOT here: the clock (kvant-roofline), the kernels (kvant-kv).

mod cuda;

use super::check_kernel;
use crate::args::AttendArgs;
use crate::failure::{Failure, SCHEME_HINT};
use crate::table::{Align, Table};
use crate::{output, progress, rss, shape_text, units};
use anyhow::Result;
use kvant_engine::schemes::{is_file, layers_named, load_schemes};
use kvant_kv::attend::reference::{attend_cache_f64, relative_error};
use kvant_kv::{Arm, AttendOptions, Attention, Cache, LayerConfig, LayerShape, Rows, Scheme};
use kvant_roofline::cost::resident_bytes;
use kvant_roofline::timer::{self, Contestant, Timing};
use kvant_roofline::{Cost, Reader};
use serde::Serialize;
use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens appended at a time while a cache is filled.
const APPEND_TOKENS: usize = 512;
/// Time for one scheme when `--rounds` is left out.
const BUDGET: Duration = Duration::from_secs(2);
/// Fewest and most rounds of that choice.
const ROUNDS: (usize, usize) = (7, 200);

/// What the command prints.
#[derive(Debug, Serialize)]
pub struct Report {
    rows: Vec<Row>,
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    kv_len: usize,
    threads: usize,
    cold: bool,
    rounds: usize,
}

#[derive(Debug, Serialize)]
struct Row {
    scheme: String,
    kernel: &'static str,
    min_ns: u64,
    median_ns: u64,
    bytes: usize,
    gbps: f64,
    read_gbps: f64,
    pct_of_read: f64,
    read_unreliable: bool,
    vs_f16: f64,
    rel_err: f64,
}

/// Runs the command.
pub fn run(args: &AttendArgs) -> Result<()> {
    let report = if args.machine.on_gpu()? { cuda::measure(args)? } else { measure(args)? };
    if args.json { output::json(&report) } else { output::text("the table", &render(&report)) }
}

/// One cache: `copies` times a batch of sequences. A scheme's has one layer; that of a scheme file has all layers of the
/// file, and what is timed is one pass over them.
struct Subject {
    name: String,
    layers: Vec<Scheme>,
    cache: Cache,
    copies: Vec<Vec<Rows>>,
    /// Of all layers.
    bytes: usize,
}

/// What `--kv` names: a scheme's text, or a file's path, with the schemes of its layers.
type Named = (String, Vec<Scheme>);

/// The items of a list, each once, in their order.
fn named(text: &str) -> Result<Vec<Named>, Failure> {
    let mut all: Vec<Named> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (name, layers) = if is_file(part) {
            let layers = load_schemes(part, layers_named(Path::new(part))?)?;
            (part.to_string(), layers.layers().to_vec())
        } else {
            // Rotations cost attention nothing, but are part of the scheme that was asked for.
            let schemes = load_schemes(part, 1)?;
            (schemes.to_string(), schemes.layers().to_vec())
        };
        if all.iter().any(|(n, _)| *n == name) {
            return Err(Failure::input(format!("{name} appears twice in `{text}`"), SCHEME_HINT));
        }
        all.push((name, layers));
    }
    Ok(all)
}

/// Measures everything.
///
/// # Errors
/// [`Failure`] for bad input, for data beyond the memory there is, and for a kernel that is wrong.
pub fn measure(args: &AttendArgs) -> Result<Report> {
    let threads = args.machine.threads()?;
    if args.ragged || args.invariant {
        let what = if args.ragged { "--ragged" } else { "--invariant" };
        return Err(Failure::input(format!("{what} is of the GPU's kernels"), "add --device cuda").into());
    }
    check_kernel(args.kernel.as_deref())?;
    let [batch, q, kv, d, kv_len] =
        shape_text::parts(&args.shape, ["b", "q", "kv", "d", "s"], "b=1,q=32,kv=8,d=128,s=16384")?;
    let shape = shape_text::layer_shape(q, kv, d)?;
    let asked = named(&args.kv)?;
    // The control always runs, whether or not it is asked for; it is a row only when it is.
    let control = (Scheme::F16.to_string(), vec![Scheme::F16]);
    let wants_control = asked.contains(&control);
    let mut all = vec![control.clone()];
    all.extend(asked.into_iter().filter(|named| *named != control));

    check_memory(&all, shape, batch, kv_len, args.hot)?;
    let attention = RefCell::new(Attention::new(threads, args.kernel.as_deref()).map_err(Failure::from)?);
    let rows = Inputs::new(shape, batch, kv_len);
    let mut subjects = Vec::new();
    for named in all {
        let wheel = progress::wheel(&format!("fill the caches of {}", named.0));
        subjects.push(Subject::fill(named, shape, batch, kv_len, args.hot, &rows)?);
        wheel.finish_and_clear();
    }
    let errors = subjects
        .iter()
        .map(|s| s.relative_error(&mut attention.borrow_mut(), shape, &rows))
        .collect::<Result<Vec<_>>>()?;
    for (subject, error) in subjects.iter().zip(&errors) {
        // Asked this way round, NaN fails too.
        let tolerance = attention.borrow().tolerance(subject.layers.iter().any(|s| s.packed().is_some()));
        let holds = *error <= tolerance;
        if !holds {
            return Err(Failure::proof(
                format!(
                    "kernel {} is wrong on {}: relative error {error:.1e}",
                    attention.borrow().kernel(),
                    subject.name
                ),
                format!("its tolerance is {tolerance:.0e}; nothing was timed"),
            )
            .into());
        }
    }

    let wheel = progress::wheel("time attention");
    let (timings, rounds) = time(&subjects, &attention, shape, &rows, args)?;
    wheel.finish_and_clear();

    let kernel = attention.borrow().kernel();
    let f16_median = timings[0].0.median_ns as f64;
    let report_rows = subjects.iter().zip(&timings).zip(&errors).skip(usize::from(!wants_control));
    let rows = report_rows
        .map(|((subject, (attend, read)), &rel_err)| {
            // Bandwidths compare minimum with minimum: what either reaches when nothing disturbs it.
            let gbps = subject.bytes as f64 / attend.min_ns as f64;
            let read_gbps = subject.bytes as f64 / read.min_ns as f64;
            let (pct_of_read, read_unreliable) = share_of_read(gbps, read_gbps);
            // Of one layer: a scheme file's pass has many.
            let layers = subject.layers.len() as u64;
            Row {
                scheme: subject.name.clone(),
                kernel,
                min_ns: attend.min_ns / layers,
                median_ns: attend.median_ns / layers,
                bytes: subject.bytes / subject.layers.len(),
                gbps,
                read_gbps,
                pct_of_read,
                read_unreliable,
                vs_f16: f16_median * layers as f64 / attend.median_ns as f64,
                rel_err,
            }
        })
        .collect();
    Ok(Report { rows, batch, q_heads: q, kv_heads: kv, head_dim: d, kv_len, threads, cold: !args.hot, rounds })
}

/// Percent of the read bandwidth, at most 100, and whether the read is no ceiling here: a read of the same bytes that took
/// longer than attention did. That happens where starting the threads outweighs reading (small sizes), or by noise where
/// both are equally fast.
fn share_of_read(gbps: f64, read_gbps: f64) -> (f64, bool) {
    let percent = 100.0 * gbps / read_gbps;
    (percent.min(100.0), percent > 100.0)
}

/// What a sequence takes beside its blocks: its entry in the cache, the lists of its blocks and its place in a batch
/// (measured with 200,000 sequences of one token: about this much, rounded up).
const SEQUENCE_BYTES: f64 = 1024.0;

/// Refuses what would not fit, before anything is allocated.
fn check_memory(schemes: &[Named], shape: LayerShape, batch: usize, kv_len: usize, hot: bool) -> Result<(), Failure> {
    let need = needed_bytes(schemes, shape, batch, kv_len, hot);
    rss::check(
        need,
        if hot { "take a smaller shape or fewer schemes" } else { "take a smaller shape, fewer schemes, or --hot" },
    )
}

/// About what all of it takes: inputs, outputs, every copy of every cache in whole blocks, and the reader's buffer.
fn needed_bytes(schemes: &[Named], shape: LayerShape, batch: usize, kv_len: usize, hot: bool) -> f64 {
    // In floating point: the parts of a shape go up to 2^30 each, their products beyond 64 bits.
    let (sequences, cold) = (batch as f64, timer::COLD_BYTES as f64);
    let token = (2 * shape.row_len()) as f64;
    let keys_and_values = token * kv_len as f64 * size_of::<f32>() as f64;
    // Queries, an output per scheme, and the reference's in twice the width.
    let outputs = sequences * (shape.q_heads * shape.head_dim * size_of::<f32>()) as f64 * (schemes.len() + 4) as f64;
    let (mut caches, mut largest) = (0.0, 0.0f64);
    for (_, layers) in schemes {
        // No scheme takes more than f16 (and bf16). Where even one sequence of that is beyond 64 bits, its exact bytes are no matter.
        let bound = token * 2.0 * (kv_len as f64 + 2.0 * shape.head_dim as f64);
        let (read, held) = if bound < (1u64 << 60) as f64 {
            let sum = |bytes: &dyn Fn(Scheme) -> usize| layers.iter().map(|&scheme| bytes(scheme) as f64).sum::<f64>();
            (sum(&|s| Cost::of(shape, s, kv_len).bytes()), sum(&|s| resident_bytes(shape, s, kv_len)))
        } else {
            (bound * layers.len() as f64, bound * layers.len() as f64)
        };
        let copies = if hot { 1.0 } else { (cold / (sequences * read)).ceil().max(2.0) };
        caches += copies * sequences * (held + SEQUENCE_BYTES);
        largest = largest.max(sequences * read);
    }
    let reader = if hot { largest } else { cold.max(2.0 * largest) };
    keys_and_values + outputs + caches + reader
}

/// Keys, values and queries: the same for every scheme and every copy (each copy is memory of its own all the same).
pub(super) struct Inputs {
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) q: Vec<f32>,
}

impl Inputs {
    pub(super) fn new(shape: LayerShape, batch: usize, kv_len: usize) -> Self {
        let mut random = Random(0x6b76_616e_7400_0001);
        let mut fill = |len: usize| (0..len).map(|_| random.normal()).collect::<Vec<f32>>();
        let mut k = fill(kv_len * shape.row_len());
        // Real keys have channels far louder than the rest, which is what a scale per channel is for.
        for row in k.chunks_mut(shape.head_dim) {
            for channel in row.iter_mut().step_by(LOUD_EVERY) {
                *channel *= LOUD;
            }
        }
        Self { k, v: fill(kv_len * shape.row_len()), q: fill(batch * shape.q_heads * shape.head_dim) }
    }
}

/// One channel in this many is loud, by this factor.
const LOUD_EVERY: usize = 16;
const LOUD: f32 = 4.0;

/// splitmix64: small, seeded, good enough for test data.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Mean 0, variance 1: the sum of three uniform values, each of variance 1/12, times 2.
    fn normal(&mut self) -> f32 {
        2.0 * (self.uniform() + self.uniform() + self.uniform() - 1.5)
    }
}

impl Subject {
    fn fill(
        (name, layers): Named,
        shape: LayerShape,
        batch: usize,
        kv_len: usize,
        hot: bool,
        inputs: &Inputs,
    ) -> Result<Self> {
        let bytes = batch * layers.iter().map(|&scheme| Cost::of(shape, scheme, kv_len).bytes()).sum::<usize>();
        let configs: Vec<_> = layers.iter().map(|&scheme| LayerConfig { shape, scheme, visible: None }).collect();
        let arm = if let [scheme] = layers[..] { Arm::of(scheme) } else { Arm::Fused };
        let mut cache = Cache::new(&configs, arm).map_err(Failure::from)?;
        let mut copies = Vec::new();
        for _ in 0..timer::copies(bytes, hot) {
            let mut copy = Vec::new();
            for _ in 0..batch {
                let seq = cache.add_sequence();
                for start in (0..kv_len).step_by(APPEND_TOKENS) {
                    let end = (start + APPEND_TOKENS).min(kv_len);
                    let span = start * shape.row_len()..end * shape.row_len();
                    let rows = [Rows { seq, rows: end - start }];
                    for layer in 0..layers.len() {
                        let (k, v) = (&inputs.k[span.clone()], &inputs.v[span.clone()]);
                        cache.append(layer, &rows, k, v).map_err(Failure::from)?;
                        cache.commit(layer, &rows).map_err(Failure::from)?;
                    }
                }
                copy.push(Rows { seq, rows: 1 });
            }
            copies.push(copy);
        }
        Ok(Self { name, layers, cache, copies, bytes })
    }

    /// Attends the newest token of each sequence of a copy in one layer.
    fn attend(
        &self,
        attention: &mut Attention,
        copy: usize,
        layer: usize,
        shape: LayerShape,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), kvant_kv::Error> {
        let options = AttendOptions::new(shape.head_dim);
        attention.attend(&self.cache, layer, &self.copies[copy], q, out, &options)
    }

    /// Relative L2 distance between the kernel's output and the f64 reference over the same cache: the worst of its schemes.
    fn relative_error(&self, attention: &mut Attention, shape: LayerShape, inputs: &Inputs) -> Result<f64> {
        let mut out = vec![0.0; inputs.q.len()];
        let options = AttendOptions::new(shape.head_dim);
        let mut worst = 0.0f64;
        for (layer, scheme) in self.layers.iter().enumerate() {
            if self.layers[..layer].contains(scheme) {
                continue;
            }
            self.attend(attention, 0, layer, shape, &inputs.q, &mut out).map_err(Failure::from)?;
            let rows = &self.copies[0];
            let exact = attend_cache_f64(&self.cache, layer, rows, &inputs.q, &options).map_err(Failure::from)?;
            let error = relative_error(&out, &exact);
            // NaN stays: it fails every tolerance.
            worst = if error > worst || error.is_nan() { error } else { worst };
        }
        Ok(worst)
    }
}

/// Times every subject and the reader over the same bytes, in turns.
fn time(
    subjects: &[Subject],
    attention: &RefCell<Attention>,
    shape: LayerShape,
    inputs: &Inputs,
    args: &AttendArgs,
) -> Result<(Vec<(Timing, Timing)>, usize)> {
    let largest = subjects.iter().map(|s| s.bytes).max().unwrap_or(0);
    let room = if args.hot { largest } else { timer::COLD_BYTES.max(2 * largest) };
    let reader = Reader::new(attention.borrow().threads(), room)
        .map_err(|e| Failure::input(e, "take a smaller shape or fewer threads"))?;
    let mut contestants: Vec<Contestant<'_, kvant_kv::Error>> = Vec::new();
    for subject in subjects {
        let mut out = vec![0.0; inputs.q.len()];
        contestants.push(Contestant::new(subject.copies.len(), move |copy| {
            let attention = &mut attention.borrow_mut();
            (0..subject.layers.len())
                .try_for_each(|layer| subject.attend(attention, copy, layer, shape, &inputs.q, &mut out))
        }));
        let pieces = if args.hot { 1 } else { reader.pieces(subject.bytes) };
        let reader = &reader;
        contestants.push(Contestant::new(pieces, move |piece| {
            std::hint::black_box(reader.read(piece, subject.bytes));
            Ok(())
        }));
    }
    let rounds = match args.rounds {
        Some(rounds) => rounds,
        None => {
            let start = Instant::now();
            timer::interleave(&mut contestants, 1).map_err(Failure::from)?;
            // One call is an untimed and a timed round.
            let round = start.elapsed() / 2;
            let budget = BUDGET * u32::try_from(subjects.len()).unwrap_or(u32::MAX);
            timer::rounds_for(budget, round, ROUNDS.0, ROUNDS.1)
        }
    };
    let timings = timer::interleave(&mut contestants, rounds).map_err(Failure::from)?;
    Ok((timings.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(), rounds))
}

fn render(report: &Report) -> String {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("kernel", Align::Left),
        ("minimum", Align::Right),
        ("median", Align::Right),
        ("bytes", Align::Right),
        ("GB/s", Align::Right),
        ("read GB/s", Align::Right),
        ("% of read", Align::Right),
        ("vs f16", Align::Right),
        ("relative error", Align::Right),
    ]);
    for r in &report.rows {
        table.row([
            r.scheme.clone(),
            r.kernel.into(),
            units::time(r.min_ns),
            units::time(r.median_ns),
            units::mib(r.bytes),
            format!("{:.1}", r.gbps),
            format!("{:.1}", r.read_gbps),
            format!("{:.0}{}", r.pct_of_read, if r.read_unreliable { "?" } else { "" }),
            format!("{:.2}x", r.vs_f16),
            format!("{:.1e}", r.rel_err),
        ]);
    }
    let unreliable = report.rows.iter().any(|r| r.read_unreliable);
    format!(
        "attention of {} requests of {} tokens, {} q heads, {} kv heads, head_dim {}; {} threads, {}, {} rounds\n\n{}{}",
        report.batch,
        report.kv_len,
        report.q_heads,
        report.kv_heads,
        report.head_dim,
        report.threads,
        if report.cold { "cold" } else { "hot" },
        report.rounds,
        table.render(),
        if unreliable {
            "\n? the read of the same bytes took longer than attention: too small or too noisy for a ceiling\n"
        } else {
            ""
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_data_is_seeded_and_about_normal() {
        let mut random = Random(1);
        let xs: Vec<f32> = (0..100_000).map(|_| random.normal()).collect();
        let mean = xs.iter().sum::<f32>() / xs.len() as f32;
        let variance = xs.iter().map(|x| x * x).sum::<f32>() / xs.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        assert_eq!(Random(1).normal(), xs[0]);
    }

    #[test]
    fn shapes_beyond_memory_are_refused_without_overflow() {
        let shape = LayerShape::new(128, 8, 256).unwrap();
        let e = check_memory(&[(String::new(), vec![Scheme::F16])], shape, 1 << 30, 1 << 30, false).unwrap_err();
        assert!(e.what.contains("GB of memory"));
        // Three million sequences of one token: 768 MB of tokens, each in a block of 32.
        let f16 = [(String::new(), vec![Scheme::F16])];
        let need = |hot| needed_bytes(&f16, LayerShape::new(1, 1, 64).unwrap(), 3_000_000, 1, hot);
        assert!(need(true) > 3e6 * 32.0 * 256.0, "{}", need(true));
        assert!(need(false) > 2.0 * 3e6 * 32.0 * 256.0, "cold: two copies of it, {}", need(false));
    }

    #[test]
    fn a_read_slower_than_attention_is_no_ceiling() {
        assert_eq!(share_of_read(30.0, 40.0), (75.0, false));
        assert_eq!(share_of_read(40.0, 40.0), (100.0, false));
        assert_eq!(share_of_read(40.0, 4.0), (100.0, true));
    }
}
