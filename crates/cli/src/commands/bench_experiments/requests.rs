//! `kvant bench requests`: how much parallel work does a step need? In: the same bytes as few long or many short requests
//! with few or many kv heads, cut into more and more units of work; out: bandwidth over units in flight.
//! NOT here: the choice of the number itself (splits.rs).

use super::splits::{Step, sweep};
use super::{HEAD_DIM, Lab, NOISE, ratio};
use crate::args::ExperimentArgs;
use crate::table::{Align, Table};
use crate::{progress, units};
use anyhow::Result;
use serde::Serialize;

/// Tokens times kv heads of every step: what one request of 16,384 tokens and 8 kv heads holds.
const HEAD_TOKENS: usize = 16384 * 8;
const QUICK_HEAD_TOKENS: usize = 4096;
const GQA_RATIO: usize = 4;
/// Batch and kv heads.
const STEPS: [(usize, usize); 9] = [(1, 1), (1, 2), (1, 4), (1, 8), (4, 8), (8, 8), (16, 8), (32, 8), (128, 8)];
const QUICK_STEPS: [(usize, usize); 3] = [(1, 1), (1, 2), (4, 2)];

#[derive(Serialize)]
struct Row {
    scheme: String,
    batch: usize,
    kv_heads: usize,
    gqa_ratio: usize,
    head_dim: usize,
    kv_len: usize,
    ranges_per_unit: usize,
    units: usize,
    units_per_thread: f64,
    rule: bool,
    bytes: usize,
    min_ns: u64,
    median_ns: u64,
    gbps: f64,
    read_gbps: f64,
    pct_of_read: f64,
}

/// Runs the command.
///
/// # Errors
/// [`crate::failure::Failure`] for bad input, too little memory, or a split that changes a bit.
pub fn run(args: &ExperimentArgs) -> Result<()> {
    if args.machine.on_gpu()? {
        return super::cuda::run(args, super::cuda::Question::Requests);
    }
    let lab = Lab::new(args, "f16,k4v4g64")?;
    let (steps, head_tokens): (&[_], _) =
        if lab.quick { (&QUICK_STEPS, QUICK_HEAD_TOKENS) } else { (&STEPS, HEAD_TOKENS) };
    let mut rows = Vec::new();
    for &scheme in &lab.schemes {
        for &(batch, kv_heads) in steps {
            let kv_len = head_tokens / (batch * kv_heads);
            let wheel = progress::wheel(&format!("requests: {scheme}, {batch} requests of {kv_len} tokens"));
            let step = Step { batch, kv_len, shape: super::shape(kv_heads, GQA_RATIO, HEAD_DIM)? };
            rows.extend(sweep(&lab, scheme, step)?.into_iter().map(|p| Row {
                scheme: scheme.to_string(),
                batch,
                kv_heads,
                gqa_ratio: GQA_RATIO,
                head_dim: HEAD_DIM,
                kv_len,
                ranges_per_unit: p.ranges_per_unit,
                units: p.units,
                units_per_thread: p.units as f64 / lab.threads as f64,
                rule: p.rule,
                bytes: p.bytes,
                min_ns: p.attend.min_ns,
                median_ns: p.attend.median_ns,
                // Minimum against minimum: what either reaches when nothing disturbs it.
                gbps: p.bytes as f64 / p.attend.min_ns as f64,
                read_gbps: p.bytes as f64 / p.read.min_ns as f64,
                pct_of_read: 100.0 * ratio(p.read.min_ns, p.attend.min_ns),
            }));
            wheel.finish_and_clear();
        }
    }
    let (table, verdict) = (table(&rows), verdict(&rows, lab.threads));
    lab.finish("requests", "units of work in flight against bandwidth, the bytes being the same", rows, &table, verdict)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("batch", Align::Right),
        ("kv heads", Align::Right),
        ("tokens", Align::Right),
        ("ranges per unit", Align::Right),
        ("units", Align::Right),
        ("per thread", Align::Right),
        ("minimum", Align::Right),
        ("median", Align::Right),
        ("GB/s", Align::Right),
        ("read GB/s", Align::Right),
        ("% of read", Align::Right),
    ]);
    for r in rows {
        table.row([
            r.scheme.clone(),
            r.batch.to_string(),
            r.kv_heads.to_string(),
            r.kv_len.to_string(),
            format!("{}{}", r.ranges_per_unit, if r.rule { " (rule)" } else { "" }),
            r.units.to_string(),
            format!("{:.1}", r.units_per_thread),
            units::time(r.min_ns),
            units::time(r.median_ns),
            format!("{:.1}", r.gbps),
            format!("{:.1}", r.read_gbps),
            format!("{:.0}", r.pct_of_read),
        ]);
    }
    table
}

/// Best share of the read bandwidth of each number of units, ascending by units.
fn by_units(rows: &[Row]) -> Vec<(usize, f64)> {
    let mut best = std::collections::BTreeMap::new();
    for r in rows {
        let pct: &mut f64 = best.entry(r.units).or_default();
        *pct = pct.max(r.pct_of_read);
    }
    best.into_iter().collect()
}

/// Fewest units that reach all but the noise of `top`, and the larger numbers that do not: what starves, and what is cut
/// too small.
fn enough(by_units: &[(usize, f64)], top: f64) -> (usize, Vec<usize>) {
    let fed = |pct: f64| pct >= top * (1.0 - NOISE);
    let fewest = by_units.iter().find(|(_, pct)| fed(*pct)).map_or(0, |(units, _)| *units);
    (fewest, by_units.iter().filter(|(units, pct)| *units > fewest && !fed(*pct)).map(|(units, _)| *units).collect())
}

fn verdict(rows: &[Row], threads: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for scheme_rows in rows.chunk_by(|a, b| a.scheme == b.scheme) {
        let scheme = &scheme_rows[0].scheme;
        let units = by_units(scheme_rows);
        let top = units.iter().map(|(_, pct)| *pct).fold(0.0, f64::max);
        let list: Vec<_> = units.iter().map(|(n, pct)| format!("{n}: {pct:.0}")).collect();
        lines.push(format!("{scheme}, best % of read bandwidth by units in flight: {}", list.join(", ")));
        let (fewest, lost) = enough(&units, top);
        let lost: Vec<_> = lost.iter().map(ToString::to_string).collect();
        let lost = match lost.is_empty() {
            true => "every larger number does too".to_string(),
            false => format!("of the larger numbers {} do not", lost.join(", ")),
        };
        lines.push(format!(
            "{scheme}: {fewest} units ({:.1} per thread) are the fewest that reach {:.0} % of the best; {lost}",
            fewest as f64 / threads as f64,
            100.0 * (1.0 - NOISE),
        ));
        let rule: Vec<_> = scheme_rows.iter().filter(|r| r.rule).collect();
        let worst = rule.iter().min_by(|a, b| a.pct_of_read.total_cmp(&b.pct_of_read));
        if let Some(w) = worst {
            lines.push(format!(
                "{scheme}: the product's rule reaches {:.0} % of read bandwidth at worst ({} requests of {} tokens, {} kv heads, {} \
                 units) and the best of all is {top:.0} %",
                w.pct_of_read, w.batch, w.kv_len, w.kv_heads, w.units
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_units_is_where_nothing_starves_any_more() {
        let units = [(1, 40.0), (2, 80.0), (3, 60.0), (4, 79.0), (8, 75.0)];
        assert_eq!(enough(&units, 80.0), (2, vec![3]));
        assert_eq!(enough(&units[..2], 80.0), (2, vec![]));
        assert_eq!(enough(&[(1, 80.0), (2, 40.0)], 80.0), (1, vec![2]));
    }

    #[test]
    fn verdicts_name_what_starves_and_where_the_rule_is_worst() {
        let row = |batch, units, pct_of_read, rule| Row {
            scheme: "f16".into(),
            batch,
            kv_heads: 1,
            gqa_ratio: 4,
            head_dim: 128,
            kv_len: 512,
            ranges_per_unit: 1,
            units,
            units_per_thread: 0.0,
            rule,
            bytes: 1,
            min_ns: 1,
            median_ns: 1,
            gbps: 1.0,
            read_gbps: 1.0,
            pct_of_read,
        };
        let lines = verdict(&[row(1, 1, 30.0, true), row(1, 2, 80.0, false), row(4, 4, 20.0, true)], 2);
        assert!(lines[0].contains("1: 30, 2: 80, 4: 20"), "{lines:?}");
        assert!(lines[1].contains("2 units (1.0 per thread)") && lines[1].contains("numbers 4 do not"), "{lines:?}");
        assert!(lines[2].contains("20 % of read bandwidth at worst (4 requests"), "{lines:?}");
    }

    #[test]
    fn every_step_holds_the_same_bytes() {
        for (batch, kv_heads) in STEPS {
            assert_eq!(HEAD_TOKENS % (batch * kv_heads * 64), 0);
        }
        for (batch, kv_heads) in QUICK_STEPS {
            assert_eq!(QUICK_HEAD_TOKENS % (batch * kv_heads * 64), 0);
        }
    }
}
