//! `kvant bench sharing`: what is it worth that the query heads of a kv head share each unpack? In: ratios of query to kv
//! heads; out: one unpack for up to 4 query heads against one for 2 and one per head, over the same ranges of the same cache.
//! The second and later heads find a range in the second-level cache, so what is compared is unpacking, not memory traffic.
//! NOT here: how many vectors the kernels can share, which is a matter of registers.

use super::{Contents, HEAD_DIM, Lab, check_bits, ratio, span, way};
use crate::args::ExperimentArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{progress, units};
use anyhow::Result;
use kvant_kv::Scheme;
use kvant_kv::attend::Split;
use serde::Serialize;

/// Query heads that share one unpack; the last is what the product does.
const SHARED: [usize; 3] = [1, 2, 4];
const KV_HEADS: usize = 8;

#[derive(Serialize)]
struct Row {
    scheme: String,
    kv_heads: usize,
    gqa_ratio: usize,
    head_dim: usize,
    kv_len: usize,
    per_head_min_ns: u64,
    per_head_median_ns: u64,
    pairs_min_ns: u64,
    pairs_median_ns: u64,
    shared_min_ns: u64,
    shared_median_ns: u64,
    /// Medians: one unpack per head over one for up to 4.
    gain: f64,
    gain_min: f64,
}

/// Runs the command.
///
/// # Errors
/// [`Failure`] for bad input, too little memory, or sharing that changes a bit.
pub fn run(args: &ExperimentArgs) -> Result<()> {
    let lab = Lab::new(args, "f16,k8v8g64,k4v4g64,k3v3g64,k2v2g64")?;
    let (ratios, kv_lens): (&[usize], &[usize]) =
        if lab.quick { (&[3, 4], &[600]) } else { (&[1, 2, 4, 8, 16], &[2048, 16384]) };
    let mut rows = Vec::new();
    for &scheme in &lab.schemes {
        for &kv_len in kv_lens {
            let wheel = progress::wheel(&format!("sharing: {scheme}, {kv_len} tokens"));
            for &gqa in ratios {
                rows.push(point(&lab, scheme, gqa, kv_len)?);
            }
            wheel.finish_and_clear();
        }
    }
    let (table, verdict) = (table(&rows), verdict(&rows));
    lab.finish(
        "sharing",
        "one unpack shared by the query heads of a kv head against one per head",
        rows,
        &table,
        verdict,
    )
}

fn point(lab: &Lab, scheme: Scheme, gqa: usize, kv_len: usize) -> Result<Row> {
    let shape = super::shape(KV_HEADS, gqa, HEAD_DIM)?;
    let mut contents = Contents::new(scheme, shape, 1, kv_len, 1);
    let copies = lab.copies(contents.layer_bytes(), SHARED.len());
    contents.uses = vec![(1, copies)];
    contents.check_memory(0)?;
    let filled = contents.fill()?;
    let q = contents.queries(1);
    let attend = |vectors: usize, copy: usize, out: &mut [f32]| {
        lab.attention.borrow_mut().set_split(Split { vectors_per_unpack: Some(vectors), ..Split::default() });
        filled.attend(lab, 0..1, copy, &q, out)
    };
    let mut outs = SHARED.map(|_| vec![f32::NAN; q.len()]);
    for (vectors, out) in SHARED.into_iter().zip(&mut outs) {
        attend(vectors, 0, out).map_err(Failure::from)?;
    }
    check_bits("one unpack per query head", &outs[2], &outs[0])?;
    check_bits("one unpack per pair of query heads", &outs[2], &outs[1])?;
    let attend = &attend;
    let mut ways: Vec<_> = SHARED
        .into_iter()
        .zip(&mut outs)
        .enumerate()
        .map(|(i, (vectors, out))| way(copies, (i, SHARED.len()), move |copy| attend(vectors, copy, out)))
        .collect();
    let timings = lab.race(&mut ways)?;
    lab.attention.borrow_mut().set_split(Split::default());
    let [alone, pairs, shared] = timings[..] else { unreachable!("three ways") };
    Ok(Row {
        scheme: scheme.to_string(),
        kv_heads: KV_HEADS,
        gqa_ratio: gqa,
        head_dim: HEAD_DIM,
        kv_len,
        per_head_min_ns: alone.min_ns,
        per_head_median_ns: alone.median_ns,
        pairs_min_ns: pairs.min_ns,
        pairs_median_ns: pairs.median_ns,
        shared_min_ns: shared.min_ns,
        shared_median_ns: shared.median_ns,
        gain: ratio(alone.median_ns, shared.median_ns),
        gain_min: ratio(alone.min_ns, shared.min_ns),
    })
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("tokens", Align::Right),
        ("ratio", Align::Right),
        ("per head", Align::Right),
        ("per 2 heads", Align::Right),
        ("per 4 heads", Align::Right),
        ("per head / per 4", Align::Right),
        ("of minima", Align::Right),
    ]);
    for r in rows {
        table.row([
            r.scheme.clone(),
            r.kv_len.to_string(),
            r.gqa_ratio.to_string(),
            units::time(r.per_head_median_ns),
            units::time(r.pairs_median_ns),
            units::time(r.shared_median_ns),
            format!("{:.2}x", r.gain),
            format!("{:.2}x", r.gain_min),
        ]);
    }
    table
}

fn verdict(rows: &[Row]) -> Vec<String> {
    let mut lines = vec!["results are the same to the bit whatever shares an unpack".to_string()];
    for scheme_rows in rows.chunk_by(|a, b| a.scheme == b.scheme) {
        let at = |many: bool| scheme_rows.iter().filter(move |r| (r.gqa_ratio >= 4) == many).map(|r| r.gain_min);
        lines.push(format!(
            "{}: one unpack per head takes {} of the shared one's time at ratios of 4 and more, {} below (minima)",
            scheme_rows[0].scheme,
            span(at(true)),
            span(at(false)),
        ));
    }
    lines
}
