//! `kvant bench passes`: fused attention against decoding the packed part to f16 first and attending that. In: lengths and
//! numbers of query rows; out: fused, both passes, and the second pass alone (which is what a first pass of no cost would
//! leave), and where the crossover is.
//! NOT here: the f16 cache as a rival (bench attend); the second pass reads the same bytes as it would.

use super::{Contents, HEAD_DIM, Lab, ratio, span, way};
use crate::args::ExperimentArgs;
use crate::failure::{Failure, SCHEME_HINT};
use crate::table::{Align, Table};
use crate::{progress, units};
use anyhow::Result;
use kvant_kv::attend::reference::relative_error;
use kvant_kv::{Arm, Scheme};
use serde::Serialize;

const ARMS: [Arm; 3] = [Arm::Fused, Arm::DequantStep, Arm::DequantOnce];
const KV_HEADS: usize = 8;
const GQA_RATIO: usize = 4;
/// The f16 copy rounds every value: half a unit in the last of 11 bits, for keys and for values.
const COPY_ROUNDING: f64 = 1e-3;

#[derive(Serialize)]
struct Row {
    scheme: String,
    kv_heads: usize,
    gqa_ratio: usize,
    head_dim: usize,
    kv_len: usize,
    rows: usize,
    fused_min_ns: u64,
    fused_median_ns: u64,
    both_passes_min_ns: u64,
    both_passes_median_ns: u64,
    second_pass_min_ns: u64,
    second_pass_median_ns: u64,
    /// Medians: both passes over fused.
    both_vs_fused: f64,
    both_vs_fused_min: f64,
    /// Medians: the second pass alone over fused.
    second_vs_fused: f64,
    second_vs_fused_min: f64,
    /// Relative distance between the two results.
    distance: f64,
}

/// Runs the command.
///
/// # Errors
/// [`Failure`] for bad input, too little memory, or results further apart than the kernels' tolerances.
pub fn run(args: &ExperimentArgs) -> Result<()> {
    let lab = Lab::new(args, "k4v4g64,k2v2g64")?;
    if let Some(plain) = lab.schemes.iter().find(|s| s.packed().is_none()) {
        return Err(Failure::input(format!("--kv {plain} has nothing to decode"), SCHEME_HINT).into());
    }
    // kv_len and query rows.
    let points: &[(usize, usize)] = if lab.quick {
        &[(200, 1), (600, 1), (600, 40)]
    } else {
        &[
            (128, 1),
            (512, 1),
            (2048, 1),
            (8192, 1),
            (16384, 1),
            (65536, 1),
            (8192, 2),
            (8192, 4),
            (8192, 8),
            (8192, 16),
            (8192, 64),
            (8192, 256),
        ]
    };
    let mut rows = Vec::new();
    for &scheme in &lab.schemes {
        for &(kv_len, query_rows) in points {
            let wheel = progress::wheel(&format!("passes: {scheme}, {query_rows} rows over {kv_len} tokens"));
            rows.push(point(&lab, scheme, kv_len, query_rows)?);
            wheel.finish_and_clear();
        }
    }
    let (table, verdict) = (table(&rows), verdict(&rows));
    lab.finish("passes", "fused attention against decoding to f16 first", rows, &table, verdict)
}

fn point(lab: &Lab, scheme: Scheme, kv_len: usize, query_rows: usize) -> Result<Row> {
    let shape = super::shape(KV_HEADS, GQA_RATIO, HEAD_DIM)?;
    let arms = ARMS.map(|arm| {
        let mut contents = Contents { arm, rows: query_rows, ..Contents::new(scheme, shape, 1, kv_len, 1) };
        contents.uses = vec![(1, lab.copies(contents.layer_bytes(), 1))];
        contents
    });
    let caches: usize = arms.iter().map(|c| c.copies() * c.layer_bytes()).sum();
    arms.iter().try_for_each(|c| c.check_memory(caches))?;
    let filled = arms.iter().map(Contents::fill).collect::<Result<Vec<_>>>()?;
    let q = arms[0].queries(1);
    let mut outs = ARMS.map(|_| vec![f32::NAN; q.len()]);
    for (filled, out) in filled.iter().zip(&mut outs) {
        filled.attend(lab, 0..1, 0, &q, out).map_err(Failure::from)?;
    }
    let far = relative_error(&outs[0], &outs[1]).max(relative_error(&outs[2], &outs[1]));
    let allowed = lab.attention.borrow().tolerance(true) + lab.attention.borrow().tolerance(false) + COPY_ROUNDING;
    // Asked this way round, NaN fails too.
    let holds = far <= allowed;
    if !holds {
        return Err(Failure::proof(
            format!("{scheme}: fused and two passes are {far:.1e} apart at {query_rows} rows over {kv_len} tokens"),
            format!("their tolerances allow {allowed:.1e}; nothing was timed"),
        )
        .into());
    }
    let q = &q;
    let mut ways: Vec<_> = filled
        .iter()
        .zip(&mut outs)
        .map(|(filled, out)| way(filled.copies.len(), (0, 1), move |copy| filled.attend(lab, 0..1, copy, q, out)))
        .collect();
    let timings = lab.race(&mut ways)?;
    let [fused, both, second] = timings[..] else { unreachable!("three arms") };
    Ok(Row {
        scheme: scheme.to_string(),
        kv_heads: KV_HEADS,
        gqa_ratio: GQA_RATIO,
        head_dim: HEAD_DIM,
        kv_len,
        rows: query_rows,
        fused_min_ns: fused.min_ns,
        fused_median_ns: fused.median_ns,
        both_passes_min_ns: both.min_ns,
        both_passes_median_ns: both.median_ns,
        second_pass_min_ns: second.min_ns,
        second_pass_median_ns: second.median_ns,
        both_vs_fused: ratio(both.median_ns, fused.median_ns),
        both_vs_fused_min: ratio(both.min_ns, fused.min_ns),
        second_vs_fused: ratio(second.median_ns, fused.median_ns),
        second_vs_fused_min: ratio(second.min_ns, fused.min_ns),
        distance: far,
    })
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("tokens", Align::Right),
        ("query rows", Align::Right),
        ("fused", Align::Right),
        ("both passes", Align::Right),
        ("second pass alone", Align::Right),
        ("both/fused", Align::Right),
        ("of minima", Align::Right),
        ("second/fused", Align::Right),
        ("of minima", Align::Right),
    ]);
    for r in rows {
        table.row([
            r.scheme.clone(),
            r.kv_len.to_string(),
            r.rows.to_string(),
            units::time(r.fused_median_ns),
            units::time(r.both_passes_median_ns),
            units::time(r.second_pass_median_ns),
            format!("{:.2}x", r.both_vs_fused),
            format!("{:.2}x", r.both_vs_fused_min),
            format!("{:.2}x", r.second_vs_fused),
            format!("{:.2}x", r.second_vs_fused_min),
        ]);
    }
    table
}

/// Where `slower` is below 1 in rows ascending by `size`: in words.
fn crossover(rows: &[&Row], size: impl Fn(&Row) -> usize, unit: &str, slower: impl Fn(&Row) -> f64) -> String {
    let wins: Vec<_> = rows.iter().filter(|r| slower(r) < 1.0).map(|r| size(r).to_string()).collect();
    match wins.is_empty() {
        true => format!("at none of the sizes from {} to {} {unit}", size(rows[0]), size(rows[rows.len() - 1])),
        false => format!("at {} {unit}", wins.join(", ")),
    }
}

fn verdict(rows: &[Row]) -> Vec<String> {
    let mut lines = Vec::new();
    for scheme_rows in rows.chunk_by(|a, b| a.scheme == b.scheme) {
        let scheme = &scheme_rows[0].scheme;
        let decode: Vec<_> = scheme_rows.iter().filter(|r| r.rows == 1).collect();
        let many: Vec<_> = scheme_rows.iter().filter(|r| r.rows > 1).collect();
        let both = |r: &Row| r.both_vs_fused_min;
        let second = |r: &Row| r.second_vs_fused_min;
        lines.push(format!(
            "{scheme}, one query row: both passes take {} of fused; they win {}; the second pass alone wins {} (minima)",
            span(decode.iter().map(|r| both(r))),
            crossover(&decode, |r| r.kv_len, "tokens", both),
            crossover(&decode, |r| r.kv_len, "tokens", second),
        ));
        if !many.is_empty() {
            lines.push(format!(
                "{scheme}, several query rows over {} tokens: both passes take {} of fused; they win {}; the second pass alone \
                 wins {} (minima)",
                many[0].kv_len,
                span(many.iter().map(|r| both(r))),
                crossover(&many, |r| r.rows, "rows", both),
                crossover(&many, |r| r.rows, "rows", second),
            ));
        }
    }
    lines.push(
        "two passes keep an f16 copy beside the packed part (or write one on every step): the memory that packing saved is \
         gone, whatever the time"
            .into(),
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row in which fused takes 100 and the two others what is given.
    fn row(kv_len: usize, rows: usize, both: u64, second: u64) -> Row {
        Row {
            scheme: "k4v4g64".into(),
            kv_heads: 8,
            gqa_ratio: 4,
            head_dim: 128,
            kv_len,
            rows,
            fused_min_ns: 100,
            fused_median_ns: 100,
            both_passes_min_ns: both,
            both_passes_median_ns: both,
            second_pass_min_ns: second,
            second_pass_median_ns: second,
            both_vs_fused: ratio(both, 100),
            both_vs_fused_min: ratio(both, 100),
            second_vs_fused: ratio(second, 100),
            second_vs_fused_min: ratio(second, 100),
            distance: 1e-4,
        }
    }

    #[test]
    fn the_crossover_is_where_two_passes_take_less() {
        let rows = [row(128, 1, 130, 90), row(512, 1, 300, 100), row(512, 64, 90, 80)];
        let words = verdict(&rows);
        assert!(words[0].contains("both passes take 1.30x to 3.00x of fused"), "{words:?}");
        assert!(words[0].contains("they win at none of the sizes from 128 to 512 tokens"), "{words:?}");
        assert!(words[0].contains("the second pass alone wins at 128 tokens"), "{words:?}");
        assert!(words[1].contains("over 512 tokens") && words[1].contains("they win at 64 rows"), "{words:?}");
    }
}
