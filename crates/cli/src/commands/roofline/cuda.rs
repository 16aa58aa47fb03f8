//! `kvant roofline --device cuda`: what bounds each operation on a GPU. In: a shape, schemes; out: tables, one JSON object, or a
//! Markdown page. NOT here: measuring and judging (kvant-roofline).

use crate::args::RooflineArgs;
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{output, progress, shape_text, units};
use anyhow::Result;
use kvant_kv::Scheme;
use kvant_kv::cuda::Gpu;
use kvant_roofline::cuda::survey::{GpuSettings, Survey, survey};

/// Runs the command.
pub fn run(args: &RooflineArgs) -> Result<()> {
    if args.kernel.is_some() || args.only.is_some() || args.html.is_some() {
        let what = "--kernel, --only and --html are of the CPU's roofline";
        return Err(Failure::input(what, "leave them out with --device cuda").into());
    }
    let [q, kv, d] = shape_text::parts(&args.shape, ["q", "kv", "d"], "q=32,kv=8,d=128")?;
    let shape = shape_text::layer_shape(q, kv, d)?;
    let schemes = shape_text::schemes(&args.kv)?;
    if schemes.contains(&Scheme::Bf16) {
        return Err(Failure::input("bf16 caches are on the CPU only", "take f16, which moves the same bytes").into());
    }
    if let Some(path) = &args.markdown {
        output::check_page(path)?;
    }
    let gpu = Gpu::open(0).map_err(Failure::from)?;
    let mut wheel: Option<indicatif::ProgressBar> = None;
    let settings = GpuSettings { shape, schemes, quick: args.quick };
    let result = survey(&gpu, &settings, &mut |next| {
        if let Some(wheel) = wheel.replace(progress::wheel(next)) {
            wheel.finish_and_clear();
        }
    });
    if let Some(wheel) = wheel {
        wheel.finish_and_clear();
    }
    let found = result.map_err(Failure::from)?;
    if let Some(path) = &args.markdown {
        let note = args.note.as_ref().map_or(String::new(), |note| format!("{note}\n\n"));
        output::page(path, &format!("{}, {}\n\n{note}{}", found.card, heads(&found), markdown(&found)))?;
    }
    if args.json { output::json(&found) } else { output::text("the tables", &render(&found)) }
}

fn heads(s: &Survey) -> String {
    format!("{} query heads, {} kv heads, head_dim {}", s.q_heads, s.kv_heads, s.head_dim)
}

const COLUMNS: [&str; 9] =
    ["operation", "scheme", "batch x tokens", "new rows", "median", "GB/s", "% of read", "% of matrix", "bound by"];

/// Cells of the rows, in the order of [`COLUMNS`].
fn cells(s: &Survey) -> impl Iterator<Item = [String; 9]> {
    s.rows.iter().map(|r| {
        [
            r.op.to_string(),
            r.scheme.clone(),
            format!("{} x {}", r.batch, r.kv_len),
            r.rows.to_string(),
            units::time(r.median_ns),
            format!("{:.0}", r.bytes as f64 / r.median_ns as f64),
            format!("{:.0}", r.pct_of_read),
            format!("{:.1}", r.pct_of_matrix),
            r.limit.to_string(),
        ]
    })
}

fn ceilings(s: &Survey) -> String {
    let read: Vec<_> = s.read.iter().map(|(bytes, gbps)| format!("{} {gbps:.0}", units::mib(*bytes))).collect();
    format!(
        "plain read, GB/s by bytes: {}\nproduct of bf16: {:.0} Tflop/s\nempty launch in a graph: {}\n",
        read.join(", "),
        s.matrix_gops / 1e3,
        units::time(s.launch_ns)
    )
}

fn render(s: &Survey) -> String {
    let align = |i: usize| if [0, 1, 8].contains(&i) { Align::Left } else { Align::Right };
    let mut table = Table::with_columns(COLUMNS.iter().enumerate().map(|(i, c)| (c.to_string(), align(i))).collect());
    cells(s).for_each(|row| table.row(row));
    let quick = if s.quick { "quick: sizes and rounds are tiny; these figures say nothing\n" } else { "" };
    format!("{}, {}\n{quick}\n{}\n{}", s.card, heads(s), ceilings(s), table.render())
}

fn markdown(s: &Survey) -> String {
    let mut text =
        format!("```\n{}```\n\n| {} |\n|{}\n", ceilings(s), COLUMNS.join(" | "), "---|".repeat(COLUMNS.len()));
    for row in cells(s) {
        text += &format!("| {} |\n", row.join(" | "));
    }
    text
}
