//! The page of an evaluation: one picture, one table, how it was measured. In: a report; out: HTML with inline SVG and CSS,
//! no script, nothing fetched. Across: bits of the whole cache at 8k tokens; up: mean KL divergence, logarithmic.
//! NOT here: where labels go (kvant-roofline places them), figures.

use super::report::{Report, Row, nats};
use kvant_roofline::report::escape;
use kvant_roofline::report::labels::{self, Area};
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 540.0;
const FRAME: Area = Area { left: 84.0, top: 16.0, right: 944.0, bottom: 482.0 };
/// Width of a letter of a label, measured generously: fonts differ.
const LETTER: f64 = 6.3;
const OURS: &str = "#0067a5";
const IMITATED: &str = "#b8441f";
const PUBLISHED: &str = "#5c5c5c";

/// A figure that others measured: llama.cpp's own tool on the text this page's `SOURCE` names.
struct Published {
    name: &'static str,
    bits: f64,
    kld: f64,
}

/// Formats of llama.cpp, which keeps nothing in f16: whole-cache bits are those of the format.
const FIGURES: [Published; 5] = [
    Published { name: "llama.cpp q8_0 rotated, its own tool, f32 weights", bits: 8.5, kld: 0.0002 },
    Published { name: "llama.cpp q4_0 rotated, its own tool, f32 weights", bits: 4.5, kld: 0.0379 },
    Published { name: "llama.cpp q8_0, its own tool", bits: 8.5, kld: 0.0036 },
    Published { name: "llama.cpp q4_0 rotated, its own tool", bits: 4.5, kld: 0.041 },
    Published { name: "llama.cpp q4_0, its own tool", bits: 4.5, kld: 0.11 },
];
const SOURCE: &str = "Hollow points: llama.cpp's own perplexity tool over SmolLM2-135M-Instruct Q4_1 and Around the World in 80 \
    Days, contexts of 2048 tokens, second half of each scored; its 8-bit activations alone put about .003 under every figure but those with f32 weights.";

const STYLE: &str = "
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, 'DejaVu Sans', 'Liberation Sans', sans-serif; color: #1c2024; background: #fff; margin: 0; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
p { margin: 6px 0 10px; max-width: 84ch; }
.sub { color: #505a64; margin: 2px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; margin: 16px 0; }
th, td { padding: 4px 8px; text-align: right; border-bottom: 1px solid #e6e9ed; white-space: nowrap; }
th { color: #505a64; font-weight: 600; border-bottom: 1px solid #aab2bb; vertical-align: bottom; }
.l { text-align: left; }
svg { width: 100%; height: auto; display: block; margin: 12px 0; font-family: inherit; }
.grid { stroke: #e6e9ed; } .frame { fill: none; stroke: #8a939c; } .tick { font-size: 12px; fill: #505a64; }
.axis { font-size: 13px; fill: #1c2024; } .label { font-size: 11px; } .leader { stroke: #b4bbc3; stroke-width: 1; }
";

/// The page.
pub(super) fn html(report: &Report) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>kvant eval, {}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>What a smaller cache costs</h1>\n",
        escape(&report.model)
    );
    let _ = writeln!(page, "<p class=\"sub\">{}</p>", escape(&report.model));
    let _ = writeln!(page, "<p class=\"sub\">{}</p>", escape(&report.subject()));
    let _ =
        writeln!(page, "<p class=\"sub\">text sha256 {}; kvant {}</p>", escape(&report.text.sha256), report.version);
    page += &plot(report);
    let _ = writeln!(
        page,
        "<p><span style=\"color:{OURS}\">&#9679;</span> kvant, its real cache and kernels, this run. \
         <span style=\"color:{IMITATED}\">&#9670;</span> another program's format, imitated in this run (rounded as that \
         format rounds; +w: with kvant's window and sinks). {}</p>",
        escape(SOURCE)
    );
    page += &table(report);
    page += "<p>The model follows the text over each cache; at every scored position its prediction is compared with that over an \
             f16 cache. Bits of the whole cache count window, sinks and the tail that is not packed yet as f16.</p>\n\
             </main>\n</body>\n</html>\n";
    page
}

/// A point of the picture.
struct Point {
    name: String,
    bits: f64,
    kld: f64,
    colour: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Ours,
    Imitated,
    Published,
}

/// Points that a logarithmic axis can hold.
fn points(report: &Report) -> Vec<Point> {
    let row = |r: &Row| {
        let (colour, kind) = if r.imitated { (IMITATED, Kind::Imitated) } else { (OURS, Kind::Ours) };
        Point { name: r.scheme.clone(), bits: r.at[1], kld: r.figures.kld_mean, colour, kind }
    };
    let published = FIGURES.iter().map(|p| Point {
        name: p.name.into(),
        bits: p.bits,
        kld: p.kld,
        colour: PUBLISHED,
        kind: Kind::Published,
    });
    report.rows.iter().map(row).chain(published).filter(|p| p.kld.is_finite() && p.kld > 0.0).collect()
}

fn plot(report: &Report) -> String {
    let points = points(report);
    let largest = points.iter().map(|p| p.bits).fold(0.0, f64::max);
    let smallest = points.iter().map(|p| p.bits).fold(f64::INFINITY, f64::min);
    let (left, right) = ((smallest - 0.5).floor().max(0.0), (largest + 0.5).ceil());
    let low = 10f64.powf(points.iter().map(|p| p.kld).fold(f64::INFINITY, f64::min).log10().floor());
    let high = points.iter().map(|p| p.kld).fold(0.0, f64::max) * 1.6;
    let x = |bits: f64| FRAME.left + (bits - left) / (right - left) * (FRAME.right - FRAME.left);
    let y = |kld: f64| FRAME.bottom - (kld / low).ln() / (high / low).ln() * (FRAME.bottom - FRAME.top);
    let mut svg = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"KL divergence over bits of the whole cache\">\n"
    );
    for bits in left as u32..=right as u32 {
        let at = x(f64::from(bits));
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{}\" x2=\"{at:.1}\" y2=\"{}\"/><text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{bits}</text>",
            FRAME.top,
            FRAME.bottom,
            FRAME.bottom + 18.0
        );
    }
    let decades = low.log10().round() as i32..=high.log10().floor() as i32;
    for tick in decades.flat_map(|e| [1.0, 2.0, 5.0].map(|s| s * 10f64.powi(e))).filter(|t| *t <= high) {
        let at = y(tick);
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{}\" y1=\"{at:.1}\" x2=\"{}\" y2=\"{at:.1}\"/><text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            FRAME.left,
            FRAME.right,
            FRAME.left - 8.0,
            at + 4.0,
            tick_name(tick)
        );
    }
    let (middle_x, middle_y) = ((FRAME.left + FRAME.right) / 2.0, (FRAME.top + FRAME.bottom) / 2.0);
    let _ = writeln!(
        svg,
        "<rect class=\"frame\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/><text class=\"axis\" x=\"{middle_x}\" y=\"{}\" text-anchor=\"middle\">bits per element of the whole cache at 8,192 tokens</text><text class=\"axis\" x=\"18\" y=\"{middle_y}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle_y})\">mean KL divergence from f16, nats</text>",
        FRAME.left,
        FRAME.top,
        FRAME.right - FRAME.left,
        FRAME.bottom - FRAME.top,
        FRAME.bottom + 40.0
    );
    let places: Vec<_> =
        points.iter().map(|p| (x(p.bits), y(p.kld), p.name.chars().count() as f64 * LETTER + 2.0)).collect();
    for ((point, &(px, py, _)), area) in points.iter().zip(&places).zip(labels::place(&places, FRAME, &[])) {
        draw(&mut svg, point, px, py, &area);
    }
    svg + "</svg>\n"
}

fn draw(svg: &mut String, point: &Point, x: f64, y: f64, area: &Area) {
    let Point { name, bits, kld, colour, kind } = point;
    let name = escape(name);
    let _ = write!(svg, "<g><title>{name}: {bits:.2} bits, KL divergence {}</title>", nats(*kld));
    if let Some((lx, ly)) = labels::leader(x, y, area) {
        let _ = write!(svg, "<line class=\"leader\" x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{lx:.1}\" y2=\"{ly:.1}\"/>");
    }
    let _ = match kind {
        Kind::Ours => write!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\" fill=\"{colour}\"/>"),
        Kind::Imitated => write!(
            svg,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"8\" height=\"8\" fill=\"{colour}\" transform=\"rotate(45 {x:.1} {y:.1})\"/>",
            x - 4.0,
            y - 4.0
        ),
        Kind::Published => write!(
            svg,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\" fill=\"#fff\" stroke=\"{colour}\" stroke-width=\"1.6\"/>"
        ),
    };
    let _ = writeln!(
        svg,
        "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text></g>",
        area.left + 1.0,
        area.bottom - 3.0
    );
}

/// A number of the axis without needless zeros.
fn tick_name(tick: f64) -> String {
    if tick < 1e-3 { format!("{tick:.0e}") } else { format!("{}", (tick * 1e4).round() / 1e4) }
}

fn table(report: &Report) -> String {
    let mut text = "<table>\n<tr><th class=\"l\">cache</th><th>bits</th><th>whole cache</th><th>at 2k</th><th>at 8k</th><th>at 32k</th><th>perplexity</th><th>vs f16</th><th>KLD mean</th><th>KLD 99 %</th><th>same first</th><th class=\"l\">source</th></tr>\n".to_owned();
    for row in report.all() {
        let (f, [at_2k, at_8k, at_32k]) = (&row.figures, row.at);
        let _ = writeln!(
            text,
            "<tr><td class=\"l\">{}</td><td>{:.2}</td><td>{:.2}</td><td>{at_2k:.2}</td><td>{at_8k:.2}</td><td>{at_32k:.2}</td><td>{:.3}</td><td>{:.4}</td><td>{}</td><td>{}</td><td>{:.1} %</td><td class=\"l\">{}</td></tr>",
            escape(&row.scheme),
            row.bits,
            row.whole_bits,
            f.ppl,
            f.ppl_ratio,
            nats(f.kld_mean),
            nats(f.kld_p99),
            100.0 * f.top1_same,
            row.source()
        );
    }
    text + "</table>\n"
}
