//! `kvant bench splits`: how many ranges of 512 keys should one unit of work have? In: shapes; out: a sweep of ranges per
//! unit beside the product's own rule. Results are the same to the bit whatever the number, which is checked first.
//! NOT here: the length of a range itself, which is part of the results (docs/decisions/0001-position-ranges.md).

use super::{Contents, HEAD_DIM, Lab, NOISE, check_bits, ratio, span, way};
use crate::args::ExperimentArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{progress, units};
use anyhow::Result;
use kvant_kv::attend::Split;
use kvant_kv::{LayerShape, Scheme};
use kvant_roofline::timer::{Contestant, Timing};
use serde::Serialize;

/// Keys of a range.
const RANGE_LEN: usize = 512;

/// A batch of requests of one length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub batch: usize,
    pub kv_len: usize,
    pub shape: LayerShape,
}

impl Step {
    /// Ranges of one kv head of one request.
    fn ranges(&self) -> usize {
        self.kv_len.div_ceil(RANGE_LEN)
    }

    /// Units of work of a call.
    fn units(&self, ranges_per_unit: usize) -> usize {
        self.batch * self.shape.kv_heads * self.ranges().div_ceil(ranges_per_unit)
    }

    /// The product's number.
    fn rule(&self, threads: usize) -> usize {
        Split::rule(self.batch * self.shape.kv_heads * self.ranges(), threads).min(self.ranges())
    }
}

/// One number of ranges per unit, timed.
pub(super) struct Point {
    pub ranges_per_unit: usize,
    pub units: usize,
    pub rule: bool,
    pub bytes: usize,
    pub attend: Timing,
    /// The machine's reader over as many bytes, in the same rounds.
    pub read: Timing,
}

/// Times every power of two of ranges per unit, and the rule's number.
pub(super) fn sweep(lab: &Lab, scheme: Scheme, step: Step) -> Result<Vec<Point>> {
    let rule = step.rule(lab.threads);
    let mut numbers: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n < step.ranges()).collect();
    numbers.extend([step.ranges(), rule]);
    numbers.sort_unstable();
    numbers.dedup();
    let mut contents = Contents::new(scheme, step.shape, step.batch, step.kv_len, 1);
    let bytes = contents.layer_bytes();
    let copies = lab.copies(bytes, numbers.len());
    contents.uses = vec![(1, copies)];
    contents.check_memory(bytes.max(kvant_roofline::timer::COLD_BYTES))?;
    let filled = contents.fill()?;
    let q = contents.queries(1);
    let attend = |number: Option<usize>, copy: usize, out: &mut [f32]| {
        lab.attention.borrow_mut().set_split(Split { ranges_per_unit: number, ..Split::default() });
        filled.attend(lab, 0..1, copy, &q, out)
    };
    let mut expected = vec![f32::NAN; q.len()];
    attend(None, 0, &mut expected).map_err(Failure::from)?;
    for &n in &numbers {
        let mut out = vec![f32::NAN; q.len()];
        attend(Some(n), 0, &mut out).map_err(Failure::from)?;
        check_bits(&format!("{n} ranges per unit"), &expected, &out)?;
    }
    let reader = lab.reader(bytes)?;
    let mut ways: Vec<Contestant<'_, kvant_kv::Error>> = Vec::new();
    for (i, &n) in numbers.iter().enumerate() {
        let mut out = vec![f32::NAN; q.len()];
        let attend = &attend;
        ways.push(way(copies, (i, numbers.len()), move |copy| attend(Some(n), copy, &mut out)));
    }
    let pieces = if lab.hot || lab.quick { 1 } else { reader.pieces(bytes) };
    ways.push(Contestant::new(pieces, |piece| {
        std::hint::black_box(reader.read(piece, bytes));
        Ok(())
    }));
    let timings = lab.race(&mut ways)?;
    drop(ways);
    lab.attention.borrow_mut().set_split(Split::default());
    let read = timings[numbers.len()];
    Ok(numbers
        .iter()
        .zip(timings)
        .map(|(&n, attend)| Point { ranges_per_unit: n, units: step.units(n), rule: n == rule, bytes, attend, read })
        .collect())
}

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
    rule: bool,
    min_ns: u64,
    median_ns: u64,
    /// Medians: this number over the rule's.
    vs_rule: f64,
    vs_rule_min: f64,
}

/// Runs the command.
///
/// # Errors
/// [`Failure`] for bad input, too little memory, or a split that changes a bit.
pub fn run(args: &ExperimentArgs) -> Result<()> {
    let lab = Lab::new(args, "f16,k4v4g64,k2v2g64")?;
    // Batch, kv heads, ratio, head_dim, kv_len.
    let steps: &[[usize; 5]] = if lab.quick {
        &[[1, 2, 4, HEAD_DIM, 2000], [3, 1, 2, 64, 700]]
    } else {
        &[
            [1, 8, 4, HEAD_DIM, 2048],
            [1, 8, 4, HEAD_DIM, 4096],
            [1, 8, 4, HEAD_DIM, 16384],
            [1, 8, 4, HEAD_DIM, 65536],
            [1, 2, 4, HEAD_DIM, 16384],
            [16, 8, 4, HEAD_DIM, 1024],
            [1, 3, 3, 64, 8192],
            [16, 3, 3, 64, 1024],
        ]
    };
    let mut rows = Vec::new();
    for &scheme in &lab.schemes {
        for &[batch, kv_heads, gqa, head_dim, kv_len] in steps {
            let wheel = progress::wheel(&format!("splits: {scheme}, {batch} requests of {kv_len} tokens"));
            let step = Step { batch, kv_len, shape: super::shape(kv_heads, gqa, head_dim)? };
            let points = sweep(&lab, scheme, step)?;
            let rule = points.iter().find(|p| p.rule).expect("the rule's number is always swept").attend;
            rows.extend(points.into_iter().map(|p| Row {
                scheme: scheme.to_string(),
                batch,
                kv_heads,
                gqa_ratio: gqa,
                head_dim,
                kv_len,
                ranges_per_unit: p.ranges_per_unit,
                units: p.units,
                rule: p.rule,
                min_ns: p.attend.min_ns,
                median_ns: p.attend.median_ns,
                vs_rule: ratio(p.attend.median_ns, rule.median_ns),
                vs_rule_min: ratio(p.attend.min_ns, rule.min_ns),
            }));
            wheel.finish_and_clear();
        }
    }
    let (table, verdict) = (table(&rows), verdict(&rows));
    lab.finish("splits", "ranges of 512 keys per unit of work, and the rule the product uses", rows, &table, verdict)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("batch", Align::Right),
        ("kv heads", Align::Right),
        ("head_dim", Align::Right),
        ("tokens", Align::Right),
        ("ranges per unit", Align::Right),
        ("units", Align::Right),
        ("minimum", Align::Right),
        ("median", Align::Right),
        ("vs rule", Align::Right),
        ("of minima", Align::Right),
    ]);
    for r in rows {
        table.row([
            r.scheme.clone(),
            r.batch.to_string(),
            r.kv_heads.to_string(),
            r.head_dim.to_string(),
            r.kv_len.to_string(),
            format!("{}{}", r.ranges_per_unit, if r.rule { " (rule)" } else { "" }),
            r.units.to_string(),
            units::time(r.min_ns),
            units::time(r.median_ns),
            format!("{:.2}x", r.vs_rule),
            format!("{:.2}x", r.vs_rule_min),
        ]);
    }
    table
}

/// Rows of one scheme and step.
fn groups(rows: &[Row]) -> impl Iterator<Item = &[Row]> {
    rows.chunk_by(|a, b| {
        let key = |r: &Row| (r.scheme.clone(), r.batch, r.kv_heads, r.head_dim, r.kv_len);
        key(a) == key(b)
    })
}

fn verdict(rows: &[Row]) -> Vec<String> {
    let lost = |group: &[Row]| {
        let best = group.iter().map(|r| r.vs_rule_min).fold(f64::INFINITY, f64::min);
        1.0 / best
    };
    let worst = |group: &[Row]| group.iter().map(|r| r.vs_rule_min).fold(0.0, f64::max);
    let within = groups(rows).filter(|g| lost(g) <= 1.0 + NOISE).count();
    vec![
        "results are the same to the bit for every number of ranges per unit".into(),
        format!(
            "the rule's number takes {} of the best number's time (minima); within {:.0} % of the best in {within} of {} steps",
            span(groups(rows).map(lost)),
            100.0 * NOISE,
            groups(rows).count(),
        ),
        format!("the worst number takes {} of the rule's time", span(groups(rows).map(worst))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_count_what_is_cut() {
        let step = Step { batch: 2, kv_len: 1025, shape: LayerShape::new(12, 3, 64).unwrap() };
        assert_eq!(step.ranges(), 3);
        assert_eq!([1, 2, 3, 9].map(|n| step.units(n)), [18, 12, 6, 6]);
        assert_eq!(step.rule(1), 2);
        assert_eq!(step.rule(64), 1);
    }
}
