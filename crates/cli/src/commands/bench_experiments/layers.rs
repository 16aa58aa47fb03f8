//! `kvant bench layers`: does it pay to attend all layers in one call? In: layer counts, kv heads, ratios, lengths; out: one
//! call over the `layers` axis against a loop of calls, the results compared to the bit first.
//! NOT here: the cost of bringing layers together (stacking.rs); here they already lie in one cache.

use super::{Contents, HEAD_DIM, Lab, Outcome, check_bits, ratio, span, way};
use crate::args::ExperimentArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{progress, units};
use anyhow::Result;
use kvant_kv::Scheme;
use serde::Serialize;

#[derive(Serialize)]
struct Row {
    scheme: String,
    kv_heads: usize,
    gqa_ratio: usize,
    head_dim: usize,
    kv_len: usize,
    layers: usize,
    bytes: usize,
    call_min_ns: u64,
    call_median_ns: u64,
    loop_min_ns: u64,
    loop_median_ns: u64,
    /// Medians: loop over call.
    loop_vs_call: f64,
    loop_vs_call_min: f64,
    bit_identical: bool,
}

struct Sizes {
    layers: &'static [usize],
    kv_heads: &'static [usize],
    ratios: &'static [usize],
    kv_lens: &'static [usize],
}

const SIZES: Sizes =
    Sizes { layers: &[28, 32, 48, 80], kv_heads: &[2, 4, 8], ratios: &[1, 4, 8], kv_lens: &[128, 2048, 16384] };
const QUICK: Sizes = Sizes { layers: &[2, 5], kv_heads: &[2], ratios: &[1, 4], kv_lens: &[128, 600] };

/// Runs the command.
///
/// # Errors
/// [`Failure`] for bad input, too little memory, or a call that differs from the loop in a bit.
pub fn run(args: &ExperimentArgs) -> Result<()> {
    if args.machine.on_gpu()? {
        return super::cuda::run(args, super::cuda::Question::Layers);
    }
    let lab = Lab::new(args, "f16,k4v4g64")?;
    let sizes = if lab.quick { QUICK } else { SIZES };
    let mut rows = Vec::new();
    for &scheme in &lab.schemes {
        for &kv_len in sizes.kv_lens {
            let wheel = progress::wheel(&format!("layers: {scheme}, {kv_len} tokens"));
            for &kv_heads in sizes.kv_heads {
                for &gqa in sizes.ratios {
                    rows.extend(point(&lab, &sizes, scheme, (kv_heads, gqa, kv_len))?);
                }
            }
            wheel.finish_and_clear();
        }
    }
    let (table, verdict) = (table(&rows, &sizes), verdict(&rows, &sizes));
    lab.finish("layers", "one call over all layers against a loop of one call per layer", rows, &table, verdict)
}

/// Every layer count of one shape and length, over one cache.
fn point(lab: &Lab, sizes: &Sizes, scheme: Scheme, (kv_heads, gqa, kv_len): (usize, usize, usize)) -> Result<Vec<Row>> {
    let shape = super::shape(kv_heads, gqa, HEAD_DIM)?;
    let mut contents = Contents::new(scheme, shape, 1, kv_len, 1);
    let layer_bytes = contents.layer_bytes();
    contents.uses = sizes.layers.iter().map(|&layers| (layers, lab.copies(layers * layer_bytes, 2))).collect();
    contents.check_memory(0)?;
    let filled = contents.fill()?;
    let mut rows = Vec::new();
    for &(layers, copies) in &contents.uses {
        let q = contents.queries(layers);
        let mut outs = [vec![f32::NAN; q.len()], vec![f32::NAN; q.len()]];
        let call = |copy: usize, out: &mut [f32]| filled.attend(lab, 0..layers, copy, &q, out);
        let layer_len = contents.query_len(1);
        let looped = |copy: usize, out: &mut [f32]| -> Outcome {
            for (layer, (q, out)) in q.chunks(layer_len).zip(out.chunks_mut(layer_len)).enumerate() {
                filled.attend(lab, layer..layer + 1, copy, q, out)?;
            }
            Ok(())
        };
        let [one, many] = &mut outs;
        call(0, one).map_err(Failure::from)?;
        looped(0, many).map_err(Failure::from)?;
        check_bits("one call over all layers", many, one)?;
        let timings =
            lab.race(&mut [way(copies, (0, 2), |c| call(c, one)), way(copies, (1, 2), |c| looped(c, many))])?;
        let (call, looped) = (timings[0], timings[1]);
        rows.push(Row {
            scheme: scheme.to_string(),
            kv_heads,
            gqa_ratio: gqa,
            head_dim: HEAD_DIM,
            kv_len,
            layers,
            bytes: layers * layer_bytes,
            call_min_ns: call.min_ns,
            call_median_ns: call.median_ns,
            loop_min_ns: looped.min_ns,
            loop_median_ns: looped.median_ns,
            loop_vs_call: ratio(looped.median_ns, call.median_ns),
            loop_vs_call_min: ratio(looped.min_ns, call.min_ns),
            // A difference ended the command above.
            bit_identical: true,
        });
    }
    Ok(rows)
}

/// One line per shape and length; layer counts are columns.
fn table(rows: &[Row], sizes: &Sizes) -> Table {
    let mut columns = vec![
        ("scheme".to_string(), Align::Left),
        ("kv heads".into(), Align::Right),
        ("ratio".into(), Align::Right),
        ("tokens".into(), Align::Right),
    ];
    for layers in sizes.layers {
        columns.push((format!("{layers} layers, one call"), Align::Right));
        columns.push(("loop/call".into(), Align::Right));
        columns.push(("of minima".into(), Align::Right));
    }
    let mut table = Table::with_columns(columns);
    for point in rows.chunks(sizes.layers.len()) {
        let first = &point[0];
        let mut cells = vec![
            first.scheme.clone(),
            first.kv_heads.to_string(),
            first.gqa_ratio.to_string(),
            first.kv_len.to_string(),
        ];
        for r in point {
            cells.push(units::time(r.call_median_ns));
            cells.push(format!("{:.2}x", r.loop_vs_call));
            cells.push(format!("{:.2}x", r.loop_vs_call_min));
        }
        table.row(cells);
    }
    table
}

fn verdict(rows: &[Row], sizes: &Sizes) -> Vec<String> {
    let mut lines = vec![format!("results of call and loop were the same to the bit in all {} rows", rows.len())];
    for &kv_len in sizes.kv_lens {
        let at = |r: &&Row| r.kv_len == kv_len;
        let mut saved: Vec<_> = rows
            .iter()
            .filter(at)
            .map(|r| (r.loop_min_ns as f64 - r.call_min_ns as f64) / r.layers as f64 / 1e3)
            .collect();
        saved.sort_by(f64::total_cmp);
        lines.push(format!(
            "{kv_len} tokens: the loop takes {} of one call's time (minima: {}); saved per layer: {:.1} us in the middle row",
            span(rows.iter().filter(at).map(|r| r.loop_vs_call)),
            span(rows.iter().filter(at).map(|r| r.loop_vs_call_min)),
            saved[saved.len() / 2],
        ));
    }
    lines.push(
        "this cannot speed up one request of a standard transformer: the query of layer l+1 is made from the whole output \
         of layer l, attention included, so at the moment of a call only one layer's query exists. One call pays where \
         queries of several layers exist at once: scoring or replaying recorded queries, layers in parallel by design, \
         draft heads, tests"
            .into(),
    );
    lines
}
