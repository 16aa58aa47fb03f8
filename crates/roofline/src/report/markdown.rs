//! The report's tables for a document. In: a report; out: Markdown. NOT here: what the document says around them.

use super::{Op, Report, Row, SweepPoint, bytes, time, tokens};
use std::fmt::Write;

/// Machine, ceilings, one table per operation, sweeps.
pub fn markdown(report: &Report) -> String {
    let r = report;
    let mut text = format!("Machine: {}, {} cores, {}.  \n", r.machine.cpu, r.machine.cores, r.machine.os);
    let _ = writeln!(text, "Run: kvant {}, {}; {}.  ", r.version, r.machine.date, r.subject());
    if let Some(note) = &r.note {
        let _ = writeln!(text, "{note}  ");
    }
    if r.quick {
        text += "**Quick run: its figures say nothing.**\n";
    }
    text += "\n### Ceilings\n\n| bandwidth, GB/s |";
    let working_sets = &r.ceilings.read;
    working_sets.iter().for_each(|b| text += &format!(" {} |", bytes(b.bytes)));
    text += "\n|---|";
    working_sets.iter().for_each(|_| text += "---:|");
    text += "\n";
    let threads = super::plural(r.threads, "thread");
    let mut curves =
        vec![(format!("read, {threads}"), &r.ceilings.read), (format!("copy, {threads}"), &r.ceilings.copy)];
    if r.threads > 1 {
        curves.push(("read, 1 thread".into(), &r.one_thread.read));
        curves.push(("copy, 1 thread".into(), &r.one_thread.copy));
    }
    for (name, curve) in curves {
        let _ = write!(text, "| {name} |");
        curve.iter().for_each(|b| text += &format!(" {:.1} |", b.gbps));
        text += "\n";
    }
    let _ = writeln!(text, "\n| peak | Gop/s, {threads} | one thread | reached by |\n|---|---:|---:|---|");
    let (all, one) = (&r.ceilings, &r.one_thread);
    for ((name, all), (_, one)) in all.peaks().zip(one.peaks()) {
        let caution = if all.lower_bound { " (a lower bound)" } else { "" };
        let _ = writeln!(text, "| {name} | {:.0} | {:.0} | {}{caution} |", all.gops, one.gops, all.by);
    }
    let d = &r.dispatch;
    let _ = writeln!(
        text,
        "\nEmpty dispatch: {} at best, {} in the median; attention over one token: {}.",
        time(d.empty_min_ns),
        time(d.empty_median_ns),
        time(d.one_token_ns)
    );
    for op in r.ops() {
        table(&mut text, r, op);
    }
    let s = &r.sweeps;
    if s.threads.is_empty() {
        return text;
    }
    text += "\n### The same bytes, cut otherwise\n";
    sweep(&mut text, "threads", &s.threads, |p| p.threads.to_string());
    sweep(&mut text, "requests", &s.requests, |p| format!("{} x {}", p.batch, tokens(p.kv_len)));
    let ranges = |p: &SweepPoint| p.ranges_per_unit.map_or("product's rule".to_string(), |n| n.to_string());
    sweep(&mut text, "key ranges per unit", &s.splits, ranges);
    text
}

fn table(text: &mut String, r: &Report, op: Op) {
    let name = op.own_column().map_or(String::new(), |name| format!(" {name} |"));
    let rule = if name.is_empty() { "" } else { "---:|" };
    let _ = writeln!(
        text,
        "\n### {}\n\n| scheme | size | shortest | bytes | op/B | GB/s | % of bandwidth | Gop/s | % of arithmetic |{name} verdict | why |\n|---|---|---:|---:|---:|---:|---:|---:|---:|{rule}---|---|",
        op.title()
    );
    for row in r.rows_of(op) {
        line(text, row);
    }
}

fn line(text: &mut String, r: &Row) {
    let own = r.own_figure().map_or(String::new(), |figure| format!(" {figure} |"));
    let _ = writeln!(
        text,
        "| {} | {} | {} | {} | {:.1} | {:.1} | {:.0} | {:.1} | {:.0} |{own} {} | {} |",
        r.scheme,
        r.size(),
        time(r.min_ns),
        bytes(r.bytes),
        r.intensity,
        r.gbps,
        r.pct_of_bandwidth,
        r.gops,
        r.pct_of_compute,
        r.verdict.bound,
        r.verdict.why
    );
}

fn sweep(text: &mut String, column: &str, points: &[SweepPoint], cut: impl Fn(&SweepPoint) -> String) {
    let _ = writeln!(
        text,
        "\n| scheme | {column} | shortest | GB/s | read GB/s | % of read |\n|---|---|---:|---:|---:|---:|"
    );
    for p in points {
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.1} | {:.1} | {:.0} |",
            p.scheme,
            cut(p),
            time(p.min_ns),
            p.gbps,
            p.read_gbps,
            p.pct_of_read()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::example;

    #[test]
    fn every_row_is_a_line_and_tables_are_even() {
        let report = example();
        let text = markdown(&report);
        for row in &report.rows {
            assert!(text.contains(&format!("| {} | {} |", row.scheme, row.size())), "{}", row.id());
        }
        for block in text.split("\n\n") {
            let lines: Vec<_> = block.lines().filter(|l| l.starts_with('|')).collect();
            let bars = |l: &str| l.matches('|').count();
            assert!(lines.iter().all(|l| bars(l) == bars(lines[0])), "{block}");
        }
    }
}
