//! One self-contained page: plots, tables, sweeps, the machine. In: a report; out: HTML text with inline SVG and CSS, no
//! script, nothing fetched. NOT here: drawing (plot.rs).

use super::plot::{self, colour, escape};
use super::{Op, Report, Row, SweepPoint, bytes, count, plural, time, tokens};
use crate::verdict::{BOUND_PCT, Bound, FLOOR_TIMES, OCCUPANCY_GAIN};
use std::fmt::Write;

const STYLE: &str = "
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, 'DejaVu Sans', 'Liberation Sans', sans-serif; color: #1c2024; background: #fff; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 44px 0 8px; padding-top: 14px; border-top: 1px solid #d5dae0; }
p { margin: 6px 0 10px; max-width: 78ch; }
.sub { color: #505a64; margin: 2px 0; }
.warn { background: #fff3cd; border: 1px solid #d9b84a; padding: 8px 12px; }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 18px 0 6px; }
.tile { border: 1px solid #d5dae0; border-radius: 6px; padding: 8px 14px; min-width: 118px; }
.tile b { display: block; font-size: 20px; font-weight: 650; }
.tile span { color: #505a64; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; margin: 10px 0; }
caption { text-align: left; color: #505a64; padding: 4px 0; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid #e6e9ed; white-space: nowrap; }
th { color: #505a64; font-weight: 600; border-bottom: 1px solid #aab2bb; vertical-align: bottom; }
.l { text-align: left; }
.why td { text-align: left; white-space: normal; color: #505a64; padding: 0 8px 6px 24px; }
tr.more td { border-bottom: none; }
tr:target td { background: #fff3cd; }
.v { display: inline-block; padding: 0 7px; border-radius: 9px; border: 1px solid; font-size: 12px; }
.memory { color: #00573a; background: #e3f4ec; } .compute { color: #0b3f73; background: #e4eef9; }
.dispatch { color: #6b4300; background: #fbf0dc; } .occupancy { color: #6a1b6a; background: #f6e7f6; }
.unexplained { color: #7d1028; background: #fbe6ea; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px; }
.bar { display: inline-block; height: 11px; background: #0067a5; vertical-align: middle; }
.track { display: inline-block; width: 220px; background: #e9edf1; text-align: left; line-height: 11px; }
.scroll { overflow-x: auto; }
svg.plot { width: 100%; height: auto; display: block; margin: 8px 0; font-family: inherit; }
.grid { stroke: #e6e9ed; } .frame { fill: none; stroke: #8a939c; } .tick { font-size: 12px; fill: #505a64; }
.axis { font-size: 13px; fill: #1c2024; } .roof { stroke: #3c454e; stroke-width: 1.6; } .faint { stroke-opacity: .3; }
.roofname { font-size: 11.5px; fill: #3c454e; } .label { font-size: 11px; }
.leader { stroke: #b4bbc3; stroke-width: 1; }
svg a:hover .label, svg a:focus .label { font-weight: 700; text-decoration: underline; }
svg a:hover circle, svg a:focus circle { stroke: #1c2024; stroke-width: 3; }
dt { font-weight: 600; } dd { margin: 0 0 6px; color: #333b43; }
@media print { main { max-width: none; } h2 { break-before: auto; } }
";

/// The page.
pub fn html(report: &Report) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>kvant roofline, {}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n",
        escape(&report.machine.cpu)
    );
    head(&mut page, report);
    for op in report.ops() {
        let _ = writeln!(page, "<h2 id=\"{op}\">{}</h2>", op.title());
        let _ = writeln!(page, "<p>{}</p>", explain(op));
        legend(&mut page, report);
        page += &plot::roofline(report, op);
        table(&mut page, report, op);
    }
    ceilings(&mut page, report);
    if !report.sweeps.threads.is_empty() {
        sweeps(&mut page, report);
    }
    method(&mut page);
    machine(&mut page, report);
    page += "</main>\n</body>\n</html>\n";
    page
}

fn head(page: &mut String, r: &Report) {
    let _ = writeln!(page, "<h1>Roofline of this machine</h1>");
    let _ =
        writeln!(page, "<p class=\"sub\">{} &middot; {}</p>", escape(&r.machine.cpu), plural(r.machine.cores, "core"));
    let _ = writeln!(page, "<p class=\"sub\">{}</p>", escape(&r.subject()));
    let note = r.note.as_ref().map_or(String::new(), |n| format!(" &middot; {}", escape(n)));
    let _ = writeln!(page, "<p class=\"sub\">kvant {} &middot; {}{note}</p>", r.version, r.machine.date);
    if r.quick {
        page.push_str("<p class=\"warn\"><b>Quick run.</b> Sizes and rounds are tiny and data is not cold: it shows that everything runs. Its figures say nothing.</p>\n");
    }
    page.push_str("<div class=\"tiles\">\n");
    let mut tile = |figure: String, what: &str| {
        let _ = writeln!(page, "<div class=\"tile\"><b>{}</b><span>{}</span></div>", escape(&figure), escape(what));
    };
    let c = &r.ceilings;
    tile(format!("{:.1} GB/s", c.memory_read()), "read, beyond caches");
    tile(format!("{:.0} Gop/s", c.int8_dot.gops), "int8 dot peak");
    tile(format!("{:.0} Gop/s", c.fma.gops), "f32 FMA peak");
    tile(format!("{:.0} Gop/s", c.matmul.gops), "f32 matrix product");
    tile(time(r.dispatch.empty_min_ns), "empty dispatch");
    page.push_str("</div>\n<p>Of ");
    let verdicts: Vec<_> =
        Bound::ALL.into_iter().filter(|&b| r.count(b) > 0).map(|b| format!("{} {}", r.count(b), badge(b))).collect();
    let _ = writeln!(page, "{}: {}.</p>", plural(r.rows.len(), "row"), verdicts.join(", "));
}

fn explain(op: Op) -> &'static str {
    match op {
        Op::Attend => {
            "One new token over everything the cache holds, data outside the caches. Left of where a bandwidth line meets \
             a level line, memory decides; a point on the solid slanted line moves its bytes as fast as this machine reads \
             memory. Fewer bits move a scheme's points right: fewer bytes for the same operations. \
             Each point is labelled with scheme and tokens; hover or select it for its figures, follow it to its line in the table."
        }
        Op::Prefill => {
            "Many new rows at once: each byte of the cache serves every row, so arithmetic decides. The dashed level line \
             is what a tuned f32 matrix product reaches on the same threads."
        }
        Op::Append => {
            "Keys and values in f32 into the cache: rounded, checked, and in whole groups quantized and packed. It runs on \
             the thread that calls it, so it is compared with one thread's copying."
        }
    }
}

fn legend(page: &mut String, r: &Report) {
    let keys: Vec<_> = r
        .schemes()
        .iter()
        .enumerate()
        .map(|(i, s)| format!("<span class=\"key\" style=\"background:{}\"></span>{}", colour(i), escape(s)))
        .collect();
    let _ = writeln!(page, "<p class=\"sub\">{}</p>", keys.join(" &emsp; "));
}

fn badge(bound: Bound) -> String {
    let name = bound.to_string();
    format!("<span class=\"v {}\">{name}</span>", name.trim_end_matches("-bound"))
}

fn table(page: &mut String, report: &Report, op: Op) {
    page.push_str("<div class=\"scroll\"><table>\n<thead><tr><th class=\"l\">scheme</th><th class=\"l\">size</th><th>shortest</th><th>median</th><th>bytes</th><th>op/B</th><th>GB/s</th><th>% of<br>bandwidth</th><th>Gop/s</th><th>% of<br>arithmetic</th>");
    if let Some(column) = op.own_column() {
        let _ = write!(page, "<th>{}</th>", column.replace(" of ", " of<br>").replace(" as ", "<br>as "));
    }
    page.push_str("<th>times<br>smallest</th><th class=\"l\">verdict</th></tr></thead>\n<tbody>\n");
    for row in report.rows_of(op) {
        line(page, row);
    }
    page.push_str("</tbody></table></div>\n");
}

fn line(page: &mut String, r: &Row) {
    let own = r.own_figure().map_or(String::new(), |figure| format!("<td>{figure}</td>"));
    // What shares and times decide stands in the line's columns; what reruns showed gets a line of its own.
    let told = matches!(r.verdict.bound, Bound::Memory | Bound::Compute | Bound::Dispatch);
    let more = if told { "" } else { " class=\"more\"" };
    let _ = writeln!(
        page,
        "<tr id=\"row-{}\"{more}><td class=\"l\">{}</td><td class=\"l\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1}</td><td>{:.1}</td><td>{:.0}</td><td>{:.1}</td><td>{:.0}</td>{own}<td>{:.1}</td><td class=\"l\">{}</td></tr>",
        escape(&r.id()),
        escape(&r.scheme),
        escape(&r.size()),
        time(r.min_ns),
        time(r.median_ns),
        bytes(r.bytes),
        r.intensity,
        r.gbps,
        r.pct_of_bandwidth,
        r.gops,
        r.pct_of_compute,
        r.times_floor,
        badge(r.verdict.bound),
    );
    if !told {
        let columns = if own.is_empty() { 12 } else { 13 };
        let _ = writeln!(page, "<tr class=\"why\"><td colspan=\"{columns}\">{}</td></tr>", escape(&r.verdict.why));
    }
}

fn ceilings(page: &mut String, r: &Report) {
    page.push_str("<h2 id=\"ceilings\">Ceilings</h2>\n<p>Measured in this run, in turns, for the threads in use. Nothing here comes from a data sheet. Copying counts bytes read plus bytes written.</p>\n");
    page.push_str(&plot::bandwidths(r));
    page.push_str("<div class=\"scroll\"><table>\n<thead><tr><th class=\"l\">peak</th><th>Gop/s</th><th>one thread</th><th class=\"l\">reached by</th></tr></thead>\n<tbody>\n");
    let (all, one) = (&r.ceilings, &r.one_thread);
    for ((name, all), (_, one)) in all.peaks().zip(one.peaks()) {
        let caution = if all.lower_bound { " (portable code: a lower bound, not this machine's peak)" } else { "" };
        let _ = writeln!(
            page,
            "<tr><td class=\"l\">{name}</td><td>{:.0}</td><td>{:.0}</td><td class=\"l\">{}{caution}</td></tr>",
            all.gops,
            one.gops,
            escape(&all.by)
        );
    }
    page.push_str("</tbody></table></div>\n");
    let d = &r.dispatch;
    let _ = writeln!(
        page,
        "<p>Starting work: an empty dispatch of attention's threads takes {} at best, {} in the median; attention over one token {}.</p>",
        time(d.empty_min_ns),
        time(d.empty_median_ns),
        time(d.one_token_ns)
    );
}

fn sweeps(page: &mut String, r: &Report) {
    page.push_str("<h2 id=\"sweeps\">The same bytes, cut otherwise</h2>\n<p>Decode attention over the same number of tokens, cold. Bars show the share of what as many threads read from memory in the same rounds.</p>\n");
    let s = &r.sweeps;
    sweep(page, "By threads", "threads", &s.threads, |p| p.threads.to_string());
    sweep(page, "By requests", "requests", &s.requests, |p| format!("{} x {}", p.batch, tokens(p.kv_len)));
    sweep(page, "By key ranges per unit of work", "ranges per unit", &s.splits, |p| {
        p.ranges_per_unit.map_or("product's rule".to_string(), |n| n.to_string())
    });
}

fn sweep(page: &mut String, caption: &str, column: &str, points: &[SweepPoint], cut: impl Fn(&SweepPoint) -> String) {
    let _ = writeln!(
        page,
        "<div class=\"scroll\"><table>\n<caption>{caption}</caption>\n<thead><tr><th class=\"l\">scheme</th><th class=\"l\">{column}</th><th>shortest</th><th>GB/s</th><th>read GB/s</th><th>% of read</th><th class=\"l\"></th></tr></thead>\n<tbody>"
    );
    for p in points {
        let _ = writeln!(
            page,
            "<tr><td class=\"l\">{}</td><td class=\"l\">{}</td><td>{}</td><td>{:.1}</td><td>{:.1}</td><td>{:.0}</td><td class=\"l\"><span class=\"track\"><span class=\"bar\" style=\"width:{:.0}%\"></span></span></td></tr>",
            escape(&p.scheme),
            escape(&cut(p)),
            time(p.min_ns),
            p.gbps,
            p.read_gbps,
            p.pct_of_read(),
            p.pct_of_read().clamp(0.0, 100.0)
        );
    }
    page.push_str("</tbody></table></div>\n");
}

fn method(page: &mut String) {
    let _ = writeln!(
        page,
        "<h2 id=\"method\">How rows are judged</h2>\n<p>Bytes and operations follow from shape and scheme alone: each input read once, each output written once, whatever a kernel does beyond that. Kernels run in turns with their ceiling; the shortest round of each is compared.</p>\n<dl>\n<dt>{}</dt><dd>at least {BOUND_PCT:.0} % of the bandwidth of its working set</dd>\n<dt>{}</dt><dd>at least {BOUND_PCT:.0} % of the peak of its arithmetic (over packed codes int8 matrix tiles where the kernel uses them, else int8 dot for integer kernels; f32 FMA for all else)</dd>\n<dt>{}</dt><dd>neither, and within {FLOOR_TIMES:.0} times the smallest call of its kind</dd>\n<dt>{}</dt><dd>none of these, and {OCCUPANCY_GAIN} times as fast with more independent work at the same bytes</dd>\n<dt>{}</dt><dd>none of these; what reruns showed is in its line</dd>\n</dl>",
        badge(Bound::Memory),
        badge(Bound::Compute),
        badge(Bound::Dispatch),
        badge(Bound::Occupancy),
        badge(Bound::Unexplained)
    );
}

fn machine(page: &mut String, r: &Report) {
    let m = &r.machine;
    page.push_str("<h2 id=\"machine\">Machine</h2>\n<div class=\"scroll\"><table>\n<tbody>\n");
    let mut fact = |name: &str, value: String| {
        let _ = writeln!(page, "<tr><td class=\"l\">{name}</td><td class=\"l\">{}</td></tr>", escape(&value));
    };
    fact("processor", m.cpu.clone());
    fact("architecture", m.arch.clone());
    fact("system", m.os.clone());
    fact("cores", m.cores.to_string());
    fact("threads in use", r.threads.to_string());
    fact("memory", m.memory_bytes.map_or("unknown".to_string(), bytes));
    for c in &m.caches {
        fact(&format!("{} cache", c.name), format!("{} shared by processors {}", bytes(c.bytes), c.shared_by));
    }
    fact("huge pages", m.huge_pages.clone().unwrap_or_else(|| "unknown".to_string()));
    fact("attention kernel", r.kernel.clone());
    fact("operations of the largest row", count(r.rows.iter().map(|r| r.ops).max().unwrap_or(0) as f64));
    page.push_str("</tbody></table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::example;

    #[test]
    fn the_page_is_whole_escaped_and_fetches_nothing() {
        let page = html(&example());
        for fetched in ["http:", "https:", "<script", "src=", "@import", "url(", "<link"] {
            assert!(!page.contains(fetched), "{fetched}");
        }
        assert!(page.contains("Example &lt;CPU&gt;") && page.contains("commit &lt;b&gt;"));
        assert!(!page.contains("NaN"));
        for tag in ["html", "body", "main", "table", "svg", "a", "g", "tr", "td", "div", "p", "dl"] {
            let opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "<{tag}> is closed");
        }
    }

    #[test]
    fn every_row_is_in_a_plot_and_in_a_table_that_the_plot_links_to() {
        let report = example();
        let page = html(&report);
        for row in &report.rows {
            for part in [format!("data-row=\"{}\"", row.id()), format!("href=\"#row-{}\"", row.id())] {
                assert_eq!(page.matches(&part).count(), 1, "{part}");
            }
            assert_eq!(page.matches(&format!("<tr id=\"row-{}\"", row.id())).count(), 1);
        }
        assert_eq!(page.matches("data-row=").count(), report.rows.len());
        let rerun = [Bound::Occupancy, Bound::Unexplained].map(|b| report.count(b)).iter().sum::<usize>();
        assert_eq!(page.matches("<tr class=\"why\">").count(), rerun, "what reruns showed is told");
    }

    #[test]
    fn a_quick_run_says_that_it_says_nothing() {
        let mut report = example();
        assert!(!html(&report).contains("Quick run"));
        report.quick = true;
        assert!(html(&report).contains("Quick run"));
    }
}
