//! `kvant roofline`: what bounds each kernel on this machine. In: a shape, schemes, where to write pages; out: a table, one
//! JSON object, an HTML page, a Markdown page. NOT here: measuring, judging, drawing (kvant-roofline).

mod cuda;

use super::check_kernel;
use crate::args::RooflineArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{output, progress, rss, shape_text};
use anyhow::Result;
use kvant_kv::Scheme;
use kvant_roofline::report::{self, Op, SweepPoint, bytes, time};
use kvant_roofline::verdict::Bound;
use kvant_roofline::{Report, Settings, SurveyError, survey, timer};

/// Bytes that a full run needs beside the caches of one size: the larger of the bandwidth's two buffers and what rotates.
const BUFFERS_BYTES: f64 = 2.2e9;
/// Tokens of the longest request of a full run.
const LONGEST: f64 = 65536.0;

/// Runs the command.
pub fn run(args: &RooflineArgs) -> Result<()> {
    if args.machine.on_gpu()? {
        return cuda::run(args);
    }
    let settings = settings(args)?;
    // A page that cannot be written should not cost a run first.
    [&args.html, &args.markdown].into_iter().flatten().try_for_each(|path| output::check_page(path))?;
    let mut wheel: Option<indicatif::ProgressBar> = None;
    let result = survey(&settings, &mut |next| {
        if let Some(wheel) = wheel.take() {
            wheel.finish_and_clear();
        }
        wheel = Some(progress::wheel(next));
    });
    if let Some(wheel) = wheel {
        wheel.finish_and_clear();
    }
    let mut report = result.map_err(failure)?;
    report.note.clone_from(&args.note);
    if let Some(path) = &args.html {
        output::page(path, &report::html(&report))?;
    }
    if let Some(path) = &args.markdown {
        output::page(path, &report::markdown(&report))?;
    }
    if args.json { output::json(&report) } else { output::text("the tables", &render(&report)) }
}

fn settings(args: &RooflineArgs) -> Result<Settings, Failure> {
    let threads = args.machine.threads()?;
    check_kernel(args.kernel.as_deref())?;
    let [q, kv, d] = shape_text::parts(&args.shape, ["q", "kv", "d"], "q=32,kv=8,d=128")?;
    let shape = shape_text::layer_shape(q, kv, d)?;
    let schemes = shape_text::schemes(&args.kv)?;
    if schemes.contains(&Scheme::Bf16) {
        return Err(Failure::input(
            "the roofline judges f16 and packed schemes only, not bf16",
            "take f16, which moves the same bytes; `kvant bench attend --kv f16,bf16` times both",
        ));
    }
    if !args.quick {
        // The longest request: every scheme's copies at once.
        let f16 = 4.0 * shape.row_len() as f64 * LONGEST;
        let caches = schemes.iter().map(|s| f16 * s.bits_per_element(d) / 16.0);
        let need = BUFFERS_BYTES + caches.map(|one| (2.0 * one).max(one + timer::COLD_BYTES as f64)).sum::<f64>();
        rss::check(need, "take fewer schemes, a smaller shape, or --quick")?;
    }
    let ops = match &args.only {
        None => Op::ALL.to_vec(),
        Some(names) => names.split(',').map(op).collect::<Result<_, _>>()?,
    };
    Ok(Settings { shape, schemes, threads, kernel: args.kernel.clone(), ops, quick: args.quick })
}

fn op(name: &str) -> Result<Op, Failure> {
    let known = Op::ALL.into_iter().find(|op| op.name() == name);
    known.ok_or_else(|| Failure::input(format!("--only: unknown operation `{name}`"), "attend, prefill, append"))
}

fn failure(e: SurveyError) -> Failure {
    match e {
        SurveyError::Kv(e) => e.into(),
        SurveyError::Wrong { .. } => Failure::proof(e, "nothing was timed"),
        e => Failure::input(e, "take fewer threads, fewer schemes, or --quick"),
    }
}

fn render(r: &Report) -> String {
    let m = &r.machine;
    let mut text = format!("{}, {} cores\n{}\n", m.cpu, m.cores, r.subject());
    if r.quick {
        text += "quick: sizes and rounds are tiny and data is not cold; these figures say nothing\n";
    }
    text += "\n";
    text += &ceilings(r);
    for op in r.ops() {
        text += &format!("\n{}\n\n{}", op.title(), rows(r, op));
    }
    if !r.sweeps.threads.is_empty() {
        text += "\nThe same bytes, cut otherwise\n\n";
        text += &sweeps(r);
    }
    let counts: Vec<_> =
        Bound::ALL.iter().filter(|b| r.count(**b) > 0).map(|b| format!("{} {b}", r.count(*b))).collect();
    text + &format!("\n{} rows: {}\n", r.rows.len(), counts.join(", "))
}

fn ceilings(r: &Report) -> String {
    let all = &r.ceilings;
    let mut columns = vec![("GB/s by working set".to_string(), Align::Left)];
    columns.extend(all.read.iter().map(|b| (bytes(b.bytes), Align::Right)));
    let mut table = Table::with_columns(columns);
    let curves = [
        (r.threads, "read", &all.read),
        (r.threads, "copy", &all.copy),
        (1, "read", &r.one_thread.read),
        (1, "copy", &r.one_thread.copy),
    ];
    let curves = &curves[..if r.threads == 1 { 2 } else { 4 }];
    for (threads, what, curve) in curves {
        let mut cells = vec![format!("{what}, {threads} threads")];
        cells.extend(curve.iter().map(|b| format!("{:.1}", b.gbps)));
        table.row(cells);
    }
    let mut text = table.render() + "\n";
    let mut table = Table::new([
        ("peak", Align::Left),
        ("Gop/s", Align::Right),
        ("one thread", Align::Right),
        ("reached by", Align::Left),
    ]);
    for ((name, all), (_, one)) in r.ceilings.peaks().zip(r.one_thread.peaks()) {
        let caution = if all.lower_bound { " (portable code: a lower bound, not the machine's peak)" } else { "" };
        table.row([
            name.to_string(),
            format!("{:.0}", all.gops),
            format!("{:.0}", one.gops),
            format!("{}{caution}", all.by),
        ]);
    }
    text += &table.render();
    let d = &r.dispatch;
    text + &format!(
        "\nempty dispatch {} at best, {} in the median; attention over one token {}\n",
        time(d.empty_min_ns),
        time(d.empty_median_ns),
        time(d.one_token_ns)
    )
}

fn rows(r: &Report, op: Op) -> String {
    let mut columns = [
        ("scheme", Align::Left),
        ("size", Align::Left),
        ("shortest", Align::Right),
        ("bytes", Align::Right),
        ("op/B", Align::Right),
        ("GB/s", Align::Right),
        ("% of bandwidth", Align::Right),
        ("Gop/s", Align::Right),
        ("% of arithmetic", Align::Right),
    ]
    .map(|(name, align)| (name.to_string(), align))
    .to_vec();
    columns.extend(op.own_column().map(|name| (name.to_string(), Align::Right)));
    columns.extend([("verdict".into(), Align::Left), ("why".into(), Align::Left)]);
    let mut table = Table::with_columns(columns);
    for row in r.rows_of(op) {
        let mut cells = vec![
            row.scheme.clone(),
            row.size(),
            time(row.min_ns),
            bytes(row.bytes),
            format!("{:.1}", row.intensity),
            format!("{:.1}", row.gbps),
            format!("{:.0}", row.pct_of_bandwidth),
            format!("{:.1}", row.gops),
            format!("{:.0}", row.pct_of_compute),
        ];
        cells.extend(row.own_figure());
        cells.extend([row.verdict.bound.to_string(), row.verdict.why.clone()]);
        table.row(cells);
    }
    table.render()
}

fn sweeps(r: &Report) -> String {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("threads", Align::Right),
        ("requests", Align::Right),
        ("kv_len", Align::Right),
        ("ranges per unit", Align::Right),
        ("shortest", Align::Right),
        ("GB/s", Align::Right),
        ("read GB/s", Align::Right),
        ("% of read", Align::Right),
    ]);
    let points: Vec<&SweepPoint> =
        [&r.sweeps.threads, &r.sweeps.requests, &r.sweeps.splits].into_iter().flatten().collect();
    for p in points {
        table.row([
            p.scheme.clone(),
            p.threads.to_string(),
            p.batch.to_string(),
            p.kv_len.to_string(),
            p.ranges_per_unit.map_or("rule".to_string(), |n| n.to_string()),
            time(p.min_ns),
            format!("{:.1}", p.gbps),
            format!("{:.1}", p.read_gbps),
            format!("{:.0}", p.pct_of_read()),
        ]);
    }
    table.render()
}

/// Schemes of a run that is not told any.
pub const DEFAULT_SCHEMES: &str = "f16,k8v8g64,k4v4g64,k3v3g64,k2v2g64";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_schemes_are_schemes_with_the_control_among_them() {
        assert!(shape_text::schemes(DEFAULT_SCHEMES).is_ok_and(|s| s.contains(&Scheme::F16)));
    }
}
