//! Plots as SVG text. In: rows and ceilings; out: a log-log roofline per operation, and bandwidth by working set.
//! Every row is a point with a visible label, a hover title and a link to its line in the table; no script.
//! NOT here: the page around them (html.rs), where labels go (labels.rs).

use super::labels::{self, Area};
use super::{Op, Report, Row};
use crate::ceilings::Bandwidth;
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 540.0;
const FRAME: Area = Area { left: 74.0, top: 16.0, right: 944.0, bottom: 482.0 };
/// Times that the plot goes on to the left of where the fastest bandwidth meets the highest peak.
const ROOF_SPAN: f64 = 6.0;
/// Width of a letter of a label, measured generously: fonts differ.
const LETTER: f64 = 6.3;

/// Colours of schemes, in their order: dark enough on white, told apart by colour-blind readers.
pub(super) const COLOURS: [&str; 8] =
    ["#222222", "#0067a5", "#b8441f", "#00784a", "#8e2a8e", "#8a6100", "#5b4bb5", "#b3003c"];

/// The colour of scheme number `i`.
pub fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

/// Text that is safe inside HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A logarithmic axis: values to pixels.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let part = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + part * (self.to - self.from)
    }

    /// 1, 2 and 5 times powers of ten; only powers of ten where there would be too many.
    fn ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let steps: &[f64] = if decades > 3.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let all = (first..=last).flat_map(|e| steps.iter().map(move |s| s * 10f64.powi(e)));
        all.filter(|&t| t >= self.low * 0.999 && t <= self.high * 1.001).collect()
    }
}

/// A line of the roof.
struct Roof {
    /// Label.
    name: String,
    /// GB/s of a slanted line, Gop/s of a level one.
    value: f64,
    /// Slanted: bandwidth.
    slanted: bool,
    /// Stroke pattern.
    dash: &'static str,
}

/// The lines that bound an operation.
fn roofs(report: &Report, op: Op) -> Vec<Roof> {
    let mut roofs = Vec::new();
    let (ceilings, curve, what) = match op {
        Op::Append => (&report.one_thread, &report.one_thread.copy, "copy"),
        _ => (&report.ceilings, &report.ceilings.read, "read"),
    };
    let threads = super::plural(ceilings.threads, "thread");
    if let (Some(small), Some(large)) = (curve.first(), curve.last()) {
        for (b, dash) in [(large, ""), (small, "6 4")] {
            let name = format!("{what} {}: {:.1} GB/s, {threads}", super::bytes(b.bytes), b.gbps);
            roofs.push(Roof { name, value: b.gbps, slanted: true, dash });
        }
    }
    let mut level = |name: &str, value: f64, dash| {
        let name = format!("{name}: {value:.0} Gop/s, {threads}");
        roofs.push(Roof { name, value, slanted: false, dash });
    };
    level("f32 FMA", ceilings.fma.gops, "");
    if op != Op::Append {
        level("int8 dot", ceilings.int8_dot.gops, "");
    }
    if let Some(tiles) = ceilings.int8_tiles.as_ref().filter(|_| op == Op::Prefill) {
        level("int8 matrix tiles", tiles.gops, "");
    }
    if op == Op::Prefill {
        level("f32 matrix product", ceilings.matmul.gops, "6 4");
    }
    roofs
}

/// The roofline of one operation.
pub(super) fn roofline(report: &Report, op: Op) -> String {
    let rows: Vec<&Row> = report.rows_of(op).collect();
    let roofs = roofs(report, op);
    let (x, y) = axes(&rows, &roofs);
    let mut svg = format!(
        "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Roofline of {}: operations per second over operations per byte\">\n",
        op.title().to_lowercase()
    );
    let ticks: Vec<_> = x.ticks().into_iter().map(|t| (x.at(t), number(t))).collect();
    grid(&mut svg, &ticks, &y, "operations per byte", "10⁹ operations per second");
    let taken = draw_roofs(&mut svg, &roofs, &x, &y);
    let schemes = report.schemes();
    let points: Vec<_> = rows
        .iter()
        .map(|r| {
            let label = format!("{} {}", r.scheme, r.size());
            (x.at(r.intensity), y.at(r.gops), label.chars().count() as f64 * LETTER + 2.0)
        })
        .collect();
    let areas = labels::place(&points, FRAME, &taken);
    for ((row, &(px, py, _)), area) in rows.iter().zip(&points).zip(&areas) {
        let colour = colour(schemes.iter().position(|s| *s == row.scheme).unwrap_or(0));
        let id = escape(&row.id());
        let _ = write!(svg, "<a href=\"#row-{id}\" data-row=\"{id}\"><title>{}</title>", escape(&row.sentence()));
        if let Some((lx, ly)) = labels::leader(px, py, area) {
            let _ = write!(svg, "<line class=\"leader\" x1=\"{px:.1}\" y1=\"{py:.1}\" x2=\"{lx:.1}\" y2=\"{ly:.1}\"/>");
        }
        let _ = writeln!(
            svg,
            "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"4.5\" fill=\"{colour}\"/><text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{} {}</text></a>",
            area.left + 1.0,
            area.bottom - 3.0,
            escape(&row.scheme),
            escape(&row.size()),
        );
    }
    svg += "</svg>\n";
    svg
}

/// Axes that hold every row and every level roof.
fn axes(rows: &[&Row], roofs: &[Roof]) -> (Axis, Axis) {
    let span = |values: &mut dyn Iterator<Item = f64>, air: f64| {
        let (mut low, mut high) = (f64::INFINITY, 0f64);
        for v in values.filter(|v| v.is_finite() && *v > 0.0) {
            low = low.min(v);
            high = high.max(v);
        }
        if low > high { (0.1, 10.0) } else { (low / air, high * air) }
    };
    let (mut left, mut right) = span(&mut rows.iter().map(|r| r.intensity), 1.8);
    // Half a decade at least, or a cluster of rows would fill the plot with nothing to compare it with.
    let missing = (3.2 / (right / left)).max(1.0).sqrt();
    left /= missing;
    right *= missing;
    let level = roofs.iter().filter(|r| !r.slanted).map(|r| r.value);
    // Far enough to the left for every bandwidth to be a line long enough for its name.
    let fastest = roofs.iter().filter(|r| r.slanted).map(|r| r.value).fold(0.0, f64::max);
    let meets = level.clone().fold(0.0, f64::max) / fastest;
    if meets.is_finite() && meets > 0.0 {
        left = left.min(meets / ROOF_SPAN);
    }
    let slanted = roofs.iter().filter(|r| r.slanted).map(|r| r.value * left);
    let (low, high) = span(&mut rows.iter().map(|r| r.gops).chain(level), 1.6);
    let low = slanted.fold(low, |low, s| if s > low / 3.0 { low.min(s / 1.1) } else { low });
    (
        Axis { low: left, high: right, from: FRAME.left, to: FRAME.right },
        Axis { low, high, from: FRAME.bottom, to: FRAME.top },
    )
}

/// Grid lines, numbers and names of both axes.
fn grid(svg: &mut String, x_ticks: &[(f64, String)], y: &Axis, x_name: &str, y_name: &str) {
    for (at, name) in x_ticks {
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{}\" x2=\"{at:.1}\" y2=\"{}\"/><text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            FRAME.top,
            FRAME.bottom,
            FRAME.bottom + 18.0,
            name
        );
    }
    for t in y.ticks() {
        let at = y.at(t);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{}\" y1=\"{at:.1}\" x2=\"{}\" y2=\"{at:.1}\"/><text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            FRAME.left,
            FRAME.right,
            FRAME.left - 8.0,
            at + 4.0,
            number(t)
        );
    }
    let (middle_x, middle_y) = ((FRAME.left + FRAME.right) / 2.0, (FRAME.top + FRAME.bottom) / 2.0);
    let _ = writeln!(
        svg,
        "<rect class=\"frame\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/><text class=\"axis\" x=\"{middle_x}\" y=\"{}\" text-anchor=\"middle\">{x_name}</text><text class=\"axis\" x=\"18\" y=\"{middle_y}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle_y})\">{y_name}</text>",
        FRAME.left,
        FRAME.top,
        FRAME.right - FRAME.left,
        FRAME.bottom - FRAME.top,
        FRAME.bottom + 40.0,
    );
}

/// Draws the roof's lines with their names, and returns the areas of the names.
fn draw_roofs(svg: &mut String, roofs: &[Roof], x: &Axis, y: &Axis) -> Vec<Area> {
    let top = roofs.iter().filter(|r| !r.slanted).map(|r| r.value).fold(0.0, f64::max);
    let mut names: Vec<Area> = Vec::new();
    for roof in roofs {
        let width = roof.name.chars().count() as f64 * LETTER;
        if roof.slanted {
            // From the left or lower border up to the highest level roof or the right border.
            let from = x.low.max(y.low / roof.value);
            let to = x.high.min(top / roof.value);
            if from >= to {
                continue;
            }
            let (x1, y1, x2, y2) = (x.at(from), y.at(from * roof.value), x.at(to), y.at(to * roof.value));
            let angle = (y2 - y1).atan2(x2 - x1).to_degrees();
            let _ = writeln!(
                svg,
                "<line class=\"roof\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke-dasharray=\"{}\"/>",
                roof.dash
            );
            let long = (x2 - x1).hypot(y2 - y1);
            if long > width + 16.0 {
                // Along the line, from its lower end: above the fastest, below the others, which may be close to it.
                let fastest = roofs.iter().all(|r| !r.slanted || r.value <= roof.value);
                let off = if fastest { 5.0 } else { -13.0 };
                let (dx, dy) = ((x2 - x1) / long, (y2 - y1) / long);
                let (tx, ty) = (x1 + 22.0 * dx + off * dy, y1 + 22.0 * dy - off * dx);
                let _ = writeln!(
                    svg,
                    "<text class=\"roofname\" x=\"{tx:.1}\" y=\"{ty:.1}\" transform=\"rotate({angle:.2} {tx:.1} {ty:.1})\">{}</text>",
                    escape(&roof.name)
                );
                // The name as a chain of small areas.
                for i in 0..=(width / 12.0) as usize {
                    let (cx, cy) = (tx + dx * 12.0 * i as f64, ty + dy * 12.0 * i as f64 - 4.0);
                    names.push(Area { left: cx - 7.0, right: cx + 7.0, top: cy - 8.0, bottom: cy + 8.0 });
                }
            }
        } else {
            let at = y.at(roof.value);
            let from = roofs.iter().filter(|r| r.slanted).map(|r| roof.value / r.value).fold(f64::INFINITY, f64::min);
            // Where bandwidth is the lower ceiling the line goes on, faint: it may meet no bandwidth inside the frame.
            let x1 = x.at(from.clamp(x.low, x.high));
            for (class, from, to) in [("roof faint", FRAME.left, x1), ("roof", x1, FRAME.right)] {
                let _ = writeln!(
                    svg,
                    "<line class=\"{class}\" x1=\"{from:.1}\" y1=\"{at:.1}\" x2=\"{to:.1}\" y2=\"{at:.1}\" stroke-dasharray=\"{}\"/>",
                    roof.dash
                );
            }
            // Above its line, or below it where another name is in the way.
            let place = |baseline: f64| Area {
                left: FRAME.right - 6.0 - width,
                right: FRAME.right - 6.0,
                top: baseline - 11.0,
                bottom: baseline + 3.0,
            };
            let free = |a: &Area| names.iter().all(|n| a.bottom <= n.top || a.top >= n.bottom);
            let baseline = if free(&place(at - 5.0)) { at - 5.0 } else { at + 14.0 };
            let _ = writeln!(
                svg,
                "<text class=\"roofname\" x=\"{}\" y=\"{baseline:.1}\" text-anchor=\"end\">{}</text>",
                FRAME.right - 6.0,
                escape(&roof.name)
            );
            names.push(place(baseline));
        }
    }
    names
}

/// Bandwidth by working set.
pub(super) fn bandwidths(report: &Report) -> String {
    let (all, one) = (&report.ceilings, &report.one_thread);
    let mut curves: Vec<(&str, &[Bandwidth], &str, &str)> =
        vec![("read, all threads", &all.read, COLOURS[1], ""), ("copy, all threads", &all.copy, COLOURS[2], "")];
    if report.threads > 1 {
        curves.push(("read, 1 thread", &one.read, COLOURS[1], "6 4"));
        curves.push(("copy, 1 thread", &one.copy, COLOURS[2], "6 4"));
    }
    let points = || curves.iter().flat_map(|c| c.1);
    let (low, high) = points().fold((f64::INFINITY, 0f64), |(l, h), b| (l.min(b.gbps), h.max(b.gbps)));
    let (first, last) = points().fold((usize::MAX, 1), |(f, l), b| (f.min(b.bytes), l.max(b.bytes)));
    let x = Axis { low: first as f64 / 1.3, high: last as f64 * 2.6, from: FRAME.left, to: FRAME.right };
    let y = Axis { low: low / 1.4, high: high * 1.4, from: FRAME.bottom, to: FRAME.top };
    let mut svg = format!(
        "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"Bandwidth by working set\">\n"
    );
    // Working sets are powers of two: their own numbers make better ticks than powers of ten.
    let ticks: Vec<_> = all.read.iter().map(|b| (x.at(b.bytes as f64), super::bytes(b.bytes))).collect();
    grid(&mut svg, &ticks, &y, "bytes of the working set, all threads together", "GB/s");
    let ends: Vec<_> = curves
        .iter()
        .filter_map(|c| c.1.last().map(|b| (x.at(b.bytes as f64), y.at(b.gbps), c.0.chars().count() as f64 * LETTER)))
        .collect();
    let areas = labels::place(&ends, FRAME, &[]);
    for ((name, curve, colour, dash), area) in curves.iter().zip(&areas) {
        let line: Vec<_> = curve.iter().map(|b| format!("{:.1},{:.1}", x.at(b.bytes as f64), y.at(b.gbps))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-dasharray=\"{dash}\"/>",
            line.join(" ")
        );
        for b in *curve {
            let _ = writeln!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"><title>{name}, {}: {:.1} GB/s</title></circle>",
                x.at(b.bytes as f64),
                y.at(b.gbps),
                super::bytes(b.bytes),
                b.gbps
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>",
            area.left + 2.0,
            area.bottom - 3.0
        );
    }
    svg += "</svg>\n";
    svg
}

/// A number of an axis.
fn number(v: f64) -> String {
    match v {
        v if v >= 1e4 => format!("{:.0}k", v / 1e3),
        v if v >= 1.0 => format!("{v:.0}"),
        v => format!("{}", (v * 1e6).round() / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::example;

    #[test]
    fn every_row_is_a_labelled_point_inside_the_frame() {
        let report = example();
        for op in Op::ALL {
            let svg = roofline(&report, op);
            for row in report.rows_of(op) {
                let mark = format!("data-row=\"{}\"", row.id());
                let at = svg.find(&mark).unwrap_or_else(|| panic!("{mark} is not in the plot"));
                let point = &svg[at..at + svg[at..].find("</a>").unwrap()];
                assert!(point.contains(&format!(">{} {}</text>", row.scheme, row.size())), "{point}");
                let number = |name: &str| {
                    let text = point.split(&format!("{name}=\"")).nth(1).unwrap();
                    text.split('"').next().unwrap().parse::<f64>().unwrap()
                };
                let (cx, cy) = (number("cx"), number("cy"));
                assert!((FRAME.left..=FRAME.right).contains(&cx) && (FRAME.top..=FRAME.bottom).contains(&cy));
                assert!(point.contains("<title>"));
            }
            assert_eq!(svg.matches("data-row=").count(), report.rows_of(op).count());
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
        }
    }

    #[test]
    fn every_ceiling_is_a_named_line_even_where_bandwidths_are_close() {
        let mut report = example();
        report.ceilings.read[0].gbps = 1.02 * report.ceilings.memory_read();
        for op in Op::ALL {
            let svg = roofline(&report, op);
            for roof in roofs(&report, op) {
                assert!(svg.contains(&format!(">{}</text>", roof.name)), "{op}: {}", roof.name);
            }
            let levels = roofs(&report, op).iter().filter(|r| !r.slanted).count();
            assert_eq!(svg.matches("class=\"roof faint\"").count(), levels);
        }
        // Names of close lines lie on different sides of them: further apart than the text is high.
        let svg = roofline(&report, Op::Attend);
        let baselines: Vec<(f64, f64)> = svg
            .match_indices("transform=\"rotate(")
            .filter(|(at, _)| svg[..*at].ends_with("\" ") && svg[..*at].rfind("roofname") > svg[..*at].rfind("</"))
            .map(|(at, start)| {
                let numbers = svg[at + start.len()..].split(')').next().unwrap();
                let mut numbers = numbers.split(' ').skip(1).map(|n| n.parse().unwrap());
                (numbers.next().unwrap(), numbers.next().unwrap())
            })
            .collect();
        let [(ax, ay), (bx, by)] = baselines[..] else { panic!("two slanted names: {baselines:?}") };
        assert!((ax - bx).hypot(ay - by) > 12.0, "{baselines:?}");
    }

    #[test]
    fn axes_are_logarithmic_with_round_ticks() {
        let axis = Axis { low: 1.0, high: 100.0, from: 0.0, to: 200.0 };
        assert!((axis.at(10.0) - 100.0).abs() < 1e-9);
        assert_eq!(axis.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        let wide = Axis { low: 1.0, high: 1e5, from: 0.0, to: 1.0 };
        assert_eq!(wide.ticks().len(), 6);
        assert_eq!([number(0.05), number(20.0), number(50_000.0)], ["0.05", "20", "50k"]);
    }

    #[test]
    fn the_bandwidth_plot_has_every_point() {
        let svg = bandwidths(&example());
        assert_eq!(svg.matches("<circle").count(), 4 * 7);
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
    }
}
