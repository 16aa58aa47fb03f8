//! `kvant bench stacking`: what a step pays when each layer's cache is a buffer of its own and they are gathered into one
//! stacked buffer before every call. In: layer counts and lengths; out: the gathering beside the attention that our storage
//! does without it.
//!
//! The gathering is the cheapest there can be: one `memcpy` per layer on all threads into a buffer that already exists.
//! NOT here: one call against a loop (layers.rs).

use super::{Contents, HEAD_DIM, Lab, ratio, span, way};
use crate::args::ExperimentArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{progress, units};
use anyhow::Result;
use kvant_kv::Scheme;
use kvant_roofline::timer::{COLD_BYTES, Contestant};
use memmap2::MmapMut;
use rayon::prelude::*;
use serde::Serialize;

/// Most memory of either side of the gathering. What is larger goes round in it, which stays outside the caches.
const RING_BYTES: usize = 2 * COLD_BYTES;
/// Piece of a layer that one thread copies at a time: many per thread, each far larger than a page.
const PIECE_BYTES: usize = 1 << 18;
const KV_HEADS: usize = 8;
const GQA_RATIO: usize = 4;

#[derive(Serialize)]
struct Row {
    scheme: String,
    kv_heads: usize,
    gqa_ratio: usize,
    head_dim: usize,
    kv_len: usize,
    layers: usize,
    bytes: usize,
    attend_min_ns: u64,
    attend_median_ns: u64,
    gather_min_ns: u64,
    gather_median_ns: u64,
    /// Medians: gathering and attending over attending alone.
    step_vs_ours: f64,
    step_vs_ours_min: f64,
}

/// Runs the command.
///
/// # Errors
/// [`Failure`] for bad input or too little memory.
pub fn run(args: &ExperimentArgs) -> Result<()> {
    if args.machine.on_gpu()? {
        return super::cuda::run(args, super::cuda::Question::Stacking);
    }
    let lab = Lab::new(args, "f16,k4v4g64")?;
    let (layers, kv_lens): (&[usize], &[usize]) =
        if lab.quick { (&[2, 5], &[128, 600]) } else { (&[28, 32, 48, 80], &[128, 2048, 16384]) };
    let mut rows = Vec::new();
    for &scheme in &lab.schemes {
        for &kv_len in kv_lens {
            let wheel = progress::wheel(&format!("stacking: {scheme}, {kv_len} tokens"));
            rows.extend(point(&lab, scheme, layers, kv_len)?);
            wheel.finish_and_clear();
        }
    }
    let (table, verdict) = (table(&rows), verdict(&rows, kv_lens));
    lab.finish("stacking", "gathering per-layer buffers into one on every step", rows, &table, verdict)
}

fn point(lab: &Lab, scheme: Scheme, layers: &[usize], kv_len: usize) -> Result<Vec<Row>> {
    let shape = super::shape(KV_HEADS, GQA_RATIO, HEAD_DIM)?;
    let mut contents = Contents::new(scheme, shape, 1, kv_len, 1);
    let layer_bytes = contents.layer_bytes();
    contents.uses = layers.iter().map(|&n| (n, lab.copies(n * layer_bytes, 2))).collect();
    let most = layers.iter().max().copied().unwrap_or(0) * layer_bytes;
    contents.check_memory(most.clamp(RING_BYTES, 2 * RING_BYTES))?;
    let filled = contents.fill()?;
    let mut gathering = Gathering::new(lab, most)?;
    let mut rows = Vec::new();
    for &(layers, copies) in &contents.uses {
        let q = contents.queries(layers);
        let mut out = vec![f32::NAN; q.len()];
        let gathering = &mut gathering;
        let mut step = 0;
        let timings = lab.race(&mut [
            way(copies, (0, 2), |c| filled.attend(lab, 0..layers, c, &q, &mut out)),
            Contestant::new(1, |_| {
                gathering.gather(step, layers, layer_bytes);
                step += 1;
                Ok(())
            }),
        ])?;
        let (attend, gather) = (timings[0], timings[1]);
        rows.push(Row {
            scheme: scheme.to_string(),
            kv_heads: KV_HEADS,
            gqa_ratio: GQA_RATIO,
            head_dim: HEAD_DIM,
            kv_len,
            layers,
            bytes: layers * layer_bytes,
            attend_min_ns: attend.min_ns,
            attend_median_ns: attend.median_ns,
            gather_min_ns: gather.min_ns,
            gather_median_ns: gather.median_ns,
            step_vs_ours: ratio(attend.median_ns + gather.median_ns, attend.median_ns),
            step_vs_ours_min: ratio(attend.min_ns + gather.min_ns, attend.min_ns),
        });
    }
    Ok(rows)
}

/// Per-layer buffers, the stacked buffer, and threads that copy.
struct Gathering {
    /// Layers one after another, step after step; a step's layers never follow each other in the stacked buffer's order
    /// by accident, as each is a slice of its own.
    separate: MmapMut,
    stacked: MmapMut,
    pool: rayon::ThreadPool,
}

impl Gathering {
    fn new(lab: &Lab, most: usize) -> Result<Self> {
        let from = if lab.hot || lab.quick { most } else { RING_BYTES };
        let map = |bytes: usize| -> Result<MmapMut> {
            let failed = |e| Failure::input(format!("could not map {bytes} bytes: {e}"), "take --quick");
            let mut map = MmapMut::map_anon(bytes).map_err(failed)?;
            // A wish, as for the cache's own memory.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            map.fill(1);
            Ok(map)
        };
        let pool = rayon::ThreadPoolBuilder::new().num_threads(lab.threads).build();
        let pool = pool.map_err(|e| Failure::input(e, "take fewer --threads"))?;
        Ok(Self { separate: map(from)?, stacked: map(most.min(RING_BYTES))?, pool })
    }

    /// Copies every layer to its place in the stacked buffer.
    fn gather(&mut self, step: usize, layers: usize, layer_bytes: usize) {
        let slots = self.separate.len() / layer_bytes;
        let places = self.stacked.len() / layer_bytes;
        let separate = &self.separate;
        // Places beyond the buffer start again at its beginning: waves of distinct places.
        for wave in 0..layers.div_ceil(places) {
            let first = wave * places;
            let now = places.min(layers - first);
            let stacked = &mut self.stacked[..now * layer_bytes];
            self.pool.install(|| {
                stacked.par_chunks_mut(layer_bytes).enumerate().for_each(|(i, to)| {
                    let slot = (step * layers + first + i) % slots;
                    let from = &separate[slot * layer_bytes..][..layer_bytes];
                    to.par_chunks_mut(PIECE_BYTES).zip(from.par_chunks(PIECE_BYTES)).for_each(|(to, from)| {
                        to.copy_from_slice(from);
                    });
                });
            });
        }
        std::hint::black_box(&mut self.stacked[..]);
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("layers", Align::Right),
        ("tokens", Align::Right),
        ("bytes", Align::Right),
        ("attend (ours)", Align::Right),
        ("gather", Align::Right),
        ("gather/attend", Align::Right),
        ("step vs ours", Align::Right),
        ("of minima", Align::Right),
    ]);
    for r in rows {
        table.row([
            r.scheme.clone(),
            r.layers.to_string(),
            r.kv_len.to_string(),
            units::mib(r.bytes),
            units::time(r.attend_median_ns),
            units::time(r.gather_median_ns),
            format!("{:.2}", ratio(r.gather_median_ns, r.attend_median_ns)),
            format!("{:.2}x", r.step_vs_ours),
            format!("{:.2}x", r.step_vs_ours_min),
        ]);
    }
    table
}

fn verdict(rows: &[Row], kv_lens: &[usize]) -> Vec<String> {
    let mut lines = Vec::new();
    for &kv_len in kv_lens {
        let at = |r: &&Row| r.kv_len == kv_len;
        lines.push(format!(
            "{kv_len} tokens: a step that gathers first takes {} of ours (minima: {})",
            span(rows.iter().filter(at).map(|r| r.step_vs_ours)),
            span(rows.iter().filter(at).map(|r| r.step_vs_ours_min)),
        ));
    }
    lines.push(
        "our storage gathers nothing: a call over many layers reads each layer's records where append put them".into(),
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn every_layer_arrives_at_its_place() {
        let cli = Cli::try_parse_from(["kvant", "bench", "stacking", "--quick", "--threads", "2"]).unwrap();
        let Command::Bench(args) = cli.command else { panic!() };
        let Some(crate::args::Bench::Stacking(args)) = args.bench else { panic!() };
        let lab = Lab::new(&args, "f16").unwrap();
        const BYTES: usize = 3 * PIECE_BYTES + 5;
        let mut gathering = Gathering::new(&lab, 4 * BYTES).unwrap();
        for layer in 0..4 {
            gathering.separate[layer * BYTES..][..BYTES].fill(10 + layer as u8);
        }
        gathering.gather(0, 4, BYTES);
        for layer in 0..4 {
            assert!(gathering.stacked[layer * BYTES..][..BYTES].iter().all(|&b| b == 10 + layer as u8));
        }
    }
}
