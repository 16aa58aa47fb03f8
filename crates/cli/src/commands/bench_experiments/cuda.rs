//! `kvant bench layers|requests|stacking --device cuda`: the seed question on a GPU. In: the flags of all experiments; out: a table
//! and a verdict whose numbers come from the rows.
//!
//! layers: one launch over all layers against a launch for each. requests: at fixed bytes, work units in flight against bandwidth, and
//! the number of blocks that share the work. stacking: what a shared unpack, and reading codes instead of dequantizing first, is worth.
//! NOT here: the clock (kvant-roofline), kernels (kvant-kv).

use super::HEAD_DIM;
use crate::args::ExperimentArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{output, shape_text, units};
use anyhow::Result;
use half::f16;
use kvant_kv::cuda::cudarc::driver::CudaSlice;
use kvant_kv::cuda::{Gpu, GpuCache, GpuOptions, OutFormat};
use kvant_kv::{Arm, Error, LayerConfig, LayerShape, Scheme};
use kvant_roofline::cuda::{Captured, GpuReader, LAUNCHES, interleave};
use kvant_roofline::timer::COLD_BYTES;
use kvant_roofline::{Cost, Timing};
use serde::Serialize;
use std::sync::Arc;

/// Rounds of every comparison.
const ROUNDS: usize = 20;
/// Query heads and kv heads of questions that do not vary them.
const HEADS: (usize, usize) = (32, 8);

/// Which question.
#[derive(Clone, Copy)]
pub enum Question {
    /// One launch over layers.
    Layers,
    /// Units in flight, and blocks.
    Requests,
    /// Shared unpack, fused reading.
    Stacking,
}

#[derive(Serialize)]
struct Row {
    scheme: String,
    batch: usize,
    kv_len: usize,
    layers: usize,
    /// What is done.
    way: String,
    min_ns: u64,
    median_ns: u64,
    bytes: usize,
    gbps: f64,
    /// Of a plain read of as many bytes, in percent; None where layers are timed together.
    pct_of_read: Option<f64>,
    /// Medians: of the first way of the same work, over this one.
    speed: f64,
    bit_identical: Option<bool>,
}

#[derive(Serialize)]
struct Report {
    bench: &'static str,
    rows: Vec<Row>,
    verdict: Vec<String>,
    card: String,
    quick: bool,
}

/// A cache on the card with real contents, a step begun, and what attention reads and writes.
struct Work {
    cache: GpuCache,
    q: CudaSlice<f16>,
    out: CudaSlice<f32>,
    scheme: Scheme,
    shape: LayerShape,
    batch: usize,
    kv_len: usize,
    layers: usize,
}

impl Work {
    fn new(
        gpu: &Arc<Gpu>,
        scheme: Scheme,
        arm: Arm,
        shape: LayerShape,
        (batch, kv_len, layers): (usize, usize, usize),
    ) -> Result<Self, Error> {
        let config = LayerConfig { shape, scheme, visible: None };
        let out = OutFormat::F32;
        let options =
            GpuOptions { slots: batch, max_tokens: kv_len, bytes: usize::MAX, out, softcap: None, invariant: false };
        let mut cache = GpuCache::new(gpu, &vec![config; layers], arm, options)?;
        let slots = (0..batch).map(|_| cache.add(kv_len)).collect::<Result<Vec<_>, _>>()?;
        let rows = kv_len.min(2048) - 1;
        let values = |salt: f32| -> Vec<f16> {
            (0..rows * shape.row_len()).map(|i| f16::from_f32(((i as f32 + salt) * 0.7317).sin() * 1.5)).collect()
        };
        if rows > 0 {
            cache.begin_prefill(slots[0], rows)?;
            cache.append_prefill(0, &gpu.upload(&values(0.1))?, &gpu.upload(&values(0.6))?)?;
            cache.end_prefill();
        }
        cache.spread(slots[0], true)?;
        for &slot in &slots {
            cache.set_len(slot, kv_len - 1)?;
        }
        cache.begin_decode(&slots, batch)?;
        cache.pack_due()?;
        let n = layers * batch * shape.q_heads * shape.head_dim;
        let q: Vec<f16> = (0..n).map(|i| f16::from_f32((i as f32 * 0.37).sin())).collect();
        let (q, out) = (gpu.upload(&q)?, gpu.zeros(n)?);
        Ok(Self { cache, q, out, scheme, shape, batch, kv_len, layers })
    }

    fn scale(&self) -> f32 {
        (self.shape.head_dim as f32).powf(-0.5)
    }

    /// Of one layer.
    fn bytes(&self) -> usize {
        self.batch * Cost::of(self.shape, self.scheme, self.kv_len).bytes()
    }

    /// Launches of single layers, one after another.
    fn captured(&mut self, gpu: &Arc<Gpu>) -> Result<Captured, Error> {
        let (scale, layers) = (self.scale(), self.layers);
        let Self { cache, q, out, .. } = self;
        Captured::new(gpu, LAUNCHES.max(layers), |i| cache.attend(i % layers, q, out, scale))
    }

    fn row(&self, way: impl Into<String>, timing: Timing, read: Option<Timing>, first: Timing) -> Row {
        let bytes = self.bytes();
        Row {
            scheme: self.scheme.to_string(),
            batch: self.batch,
            kv_len: self.kv_len,
            layers: self.layers,
            way: way.into(),
            min_ns: timing.min_ns,
            median_ns: timing.median_ns,
            bytes,
            gbps: bytes as f64 / timing.median_ns as f64,
            pct_of_read: read.map(|r| (100.0 * r.median_ns as f64 / timing.median_ns as f64).min(100.0)),
            speed: first.median_ns as f64 / timing.median_ns as f64,
            bit_identical: None,
        }
    }
}

/// Runs a question.
///
/// # Errors
/// [`Failure`] for bad input, a machine without a GPU, too little memory, or results that differ where they must not.
pub fn run(args: &ExperimentArgs, question: Question) -> Result<()> {
    if args.kernel.is_some() || args.hot {
        let what = if args.hot { "--hot" } else { "--kernel" };
        return Err(Failure::input(format!("{what} is of the CPU's kernels"), "leave it out with --device cuda").into());
    }
    let schemes = shape_text::schemes(args.kv.as_deref().unwrap_or("f16,k4v4g64,k2v2g64"))?;
    let gpu = Gpu::open(0).map_err(Failure::from)?;
    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { ROUNDS });
    let mut rows = Vec::new();
    let (bench, title, verdict) = match question {
        Question::Layers => {
            for &scheme in &schemes {
                layers(&gpu, scheme, args.quick, rounds, &mut rows).map_err(Failure::from)?;
            }
            ("layers", "one launch over all layers against a launch for each", layers_verdict(&rows))
        }
        Question::Requests => {
            for &scheme in &schemes {
                requests(&gpu, scheme, args.quick, rounds, &mut rows).map_err(Failure::from)?;
            }
            ("requests", "work units in flight and blocks, at fixed bytes", requests_verdict(&rows))
        }
        Question::Stacking => {
            for &scheme in schemes.iter().filter(|s| s.packed().is_some()) {
                stacking(&gpu, scheme, args.quick, rounds, &mut rows).map_err(Failure::from)?;
            }
            ("stacking", "shared unpack and fused reading", stacking_verdict(&rows))
        }
    };
    if rows.iter().any(|r| r.bit_identical == Some(false)) {
        return Err(Failure::proof(
            "one launch over layers differs from a loop in a bit",
            "this is a defect; please report it",
        )
        .into());
    }
    let report = Report { bench, rows, verdict, card: gpu.name().to_string(), quick: args.quick };
    if args.json {
        return output::json(&report);
    }
    let text = format!("{title}, on {}\n\n{}\n{}\n", report.card, render(&report.rows), report.verdict.join("\n"));
    output::text("the table", &text)
}

fn shape((q_heads, kv_heads): (usize, usize)) -> Result<LayerShape, Error> {
    LayerShape::new(q_heads, kv_heads, HEAD_DIM)
}

/// One launch over all layers, and one for each, of the same cache.
fn layers(gpu: &Arc<Gpu>, scheme: Scheme, quick: bool, rounds: usize, rows: &mut Vec<Row>) -> Result<(), Error> {
    let (counts, lens, batches): (&[usize], &[usize], &[usize]) =
        if quick { (&[2], &[300], &[1]) } else { (&[28, 32, 48, 80], &[128, 2048, 16384], &[1, 16]) };
    for (&n, (&kv_len, &batch)) in
        counts.iter().flat_map(|n| lens.iter().flat_map(move |l| batches.iter().map(move |b| (n, (l, b)))))
    {
        let mut work = Work::new(gpu, scheme, Arm::of(scheme), shape(HEADS)?, (batch, kv_len, n))?;
        let (scale, len) = (work.scale(), work.out.len() / n);
        // A launch for each writes layer by layer; q of every layer is the first one's there, so here too.
        let one_layer: Vec<f16> = gpu.stream().clone_dtoh(&work.q.slice(..len))?;
        work.q = gpu.upload(&one_layer.repeat(n))?;
        let Work { cache, q, out, .. } = &mut work;
        cache.attend_layers(0, n, q, out, scale, 0, 0)?;
        let together = gpu.stream().clone_dtoh(&*out)?;
        let mut same = true;
        for layer in 0..n {
            cache.attend(layer, q, out, scale)?;
            let alone = gpu.stream().clone_dtoh(&out.slice(..len))?;
            same &= alone.iter().zip(&together[layer * len..][..len]).all(|(a, b)| a.to_bits() == b.to_bits());
        }
        let call = Captured::new(gpu, 4, |_| cache.attend_layers(0, n, q, out, scale, 0, 0))?;
        let each = Captured::new(gpu, 4, |_| (0..n).try_for_each(|layer| cache.attend(layer, q, out, scale)))?;
        let timings = interleave(&[&each, &call], rounds)?;
        for (way, timing) in [("a launch for each", timings[0]), ("one launch", timings[1])] {
            let mut row = work.row(way, timing, None, timings[0]);
            row.bytes *= n;
            row.gbps = row.bytes as f64 / timing.median_ns as f64;
            row.bit_identical = Some(same);
            rows.push(row);
        }
    }
    Ok(())
}

/// The same bytes as few long or many short requests; and the same work on fewer blocks.
fn requests(gpu: &Arc<Gpu>, scheme: Scheme, quick: bool, rounds: usize, rows: &mut Vec<Row>) -> Result<(), Error> {
    let tokens = if quick { 4096 } else { 1 << 19 };
    let batches: &[usize] = if quick { &[1, 4] } else { &[1, 2, 4, 8, 16, 32, 64, 128] };
    let mut works = Vec::new();
    for &batch in batches {
        let bytes = Cost::of(shape(HEADS)?, scheme, tokens).bytes();
        let layers = if quick { 1 } else { COLD_BYTES.div_ceil(bytes).clamp(1, 8) };
        works.push(Work::new(gpu, scheme, Arm::of(scheme), shape(HEADS)?, (batch, tokens / batch, layers))?);
    }
    let captured = works.iter_mut().map(|w| w.captured(gpu)).collect::<Result<Vec<_>, _>>()?;
    let bytes = works[0].bytes();
    let reader = GpuReader::new(gpu, bytes.max(COLD_BYTES))?;
    let places = (COLD_BYTES / bytes).max(1);
    let read = Captured::new(gpu, LAUNCHES, |i| reader.launch(i % places * bytes, bytes))?;
    let all: Vec<&Captured> = captured.iter().chain([&read]).collect();
    let timings = interleave(&all, rounds)?;
    let read = timings[works.len()];
    for (work, timing) in works.iter().zip(&timings) {
        rows.push(work.row(format!("{} rows", work.batch * HEADS.1), *timing, Some(read), timings[0]));
    }
    drop(captured);
    // Blocks: of one request, all the way down to one block for every row.
    let mut work = works.swap_remove(0);
    drop(works);
    let slots: Vec<usize> = vec![0];
    let most = gpu.multiprocessors();
    let mut swept = Vec::new();
    for blocks in [8, 16, 33, 66, most] {
        work.cache.vary(8, Some(blocks));
        work.cache.begin_decode(&slots, 1)?;
        work.cache.pack_due()?;
        let captured = work.captured(gpu)?;
        let timing = interleave(&[&captured], rounds)?[0];
        swept.push((blocks, timing));
    }
    for (blocks, timing) in &swept {
        rows.push(work.row(format!("{blocks} blocks"), *timing, Some(read), swept[0].1));
    }
    Ok(())
}

/// The kernel as it is, with an unpack for every query head, and dequantizing everything first.
fn stacking(gpu: &Arc<Gpu>, scheme: Scheme, quick: bool, rounds: usize, rows: &mut Vec<Row>) -> Result<(), Error> {
    let sizes: &[(usize, usize)] = if quick { &[(1, 600)] } else { &[(1, 65536), (32, 4096), (64, 16384)] };
    for &(batch, kv_len) in sizes {
        let bytes = batch * Cost::of(shape(HEADS)?, scheme, kv_len).bytes();
        let layers = if quick { 1 } else { COLD_BYTES.div_ceil(bytes).clamp(1, 24) };
        let slots: Vec<usize> = (0..batch).collect();
        let size = (batch, kv_len, layers);
        let mut shared = Work::new(gpu, scheme, Arm::Fused, shape(HEADS)?, size)?;
        let mut apart = Work::new(gpu, scheme, Arm::Fused, shape(HEADS)?, size)?;
        apart.cache.vary(1, None);
        apart.cache.begin_decode(&slots, batch)?;
        apart.cache.pack_due()?;
        let mut step = Work::new(gpu, scheme, Arm::DequantStep, shape(HEADS)?, size)?;
        let captured = [shared.captured(gpu)?, apart.captured(gpu)?, step.captured(gpu)?];
        let timings = interleave(&captured.iter().collect::<Vec<_>>(), rounds)?;
        let ways = ["shared unpack", "an unpack per head", "dequantize, then attend"];
        for (way, timing) in ways.into_iter().zip(&timings) {
            rows.push(shared.row(way, *timing, None, timings[0]));
        }
    }
    Ok(())
}

/// Least and most of some numbers.
fn range(values: impl Iterator<Item = f64>) -> Option<String> {
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    values.for_each(|v| (least, most) = (least.min(v), most.max(v)));
    if least > most {
        return None;
    }
    let times = |x: f64| format!("{x:.2}x");
    let (least, most) = (times(least), times(most));
    Some(if least == most { least } else { format!("{least} to {most}") })
}

fn layers_verdict(rows: &[Row]) -> Vec<String> {
    let of = |short: bool| {
        let one = rows.iter().filter(move |r| r.way == "one launch" && (r.kv_len * r.batch <= 2048) == short);
        range(one.map(|r| r.speed)).unwrap_or_default()
    };
    vec![
        format!("One launch over all layers is {} as fast as a launch for each up to 2,048 keys, {} above; to the bit the same.", of(true), of(false)),
        "In a decode step layers depend on each other, so this is what batching independent attention calls could gain at most.".into(),
    ]
}

fn requests_verdict(rows: &[Row]) -> Vec<String> {
    let share = |ending: &'static str| {
        range(rows.iter().filter(move |r| r.way.ends_with(ending)).filter_map(|r| r.pct_of_read.map(|p| p / 100.0)))
    };
    vec![
        format!(
            "At the same bytes the share of the read ceiling is {} over all batches.",
            share("rows").unwrap_or_default()
        ),
        format!("Over the block counts tried for one request it is {}.", share("blocks").unwrap_or_default()),
    ]
}

fn stacking_verdict(rows: &[Row]) -> Vec<String> {
    let slower =
        |way: &'static str| range(rows.iter().filter(move |r| r.way == way).map(|r| 1.0 / r.speed)).unwrap_or_default();
    vec![
        format!("An unpack per query head takes {} of the time of a shared one.", slower("an unpack per head")),
        format!(
            "Dequantizing everything first takes {} of the time of reading codes.",
            slower("dequantize, then attend")
        ),
    ]
}

fn render(rows: &[Row]) -> String {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("batch", Align::Right),
        ("keys", Align::Right),
        ("layers", Align::Right),
        ("way", Align::Left),
        ("minimum", Align::Right),
        ("median", Align::Right),
        ("GB/s", Align::Right),
        ("% of read", Align::Right),
        ("speed", Align::Right),
    ]);
    for r in rows {
        table.row([
            r.scheme.clone(),
            r.batch.to_string(),
            r.kv_len.to_string(),
            r.layers.to_string(),
            r.way.clone(),
            units::time(r.min_ns),
            units::time(r.median_ns),
            format!("{:.0}", r.gbps),
            r.pct_of_read.map_or_else(String::new, |p| format!("{p:.0}")),
            format!("{:.2}x", r.speed),
        ]);
    }
    table.render()
}
