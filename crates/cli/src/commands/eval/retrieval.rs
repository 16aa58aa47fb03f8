//! `kvant eval --retrieval`: facts hidden in the text. In: lengths, depths, a seed; out: per cache, length and depth the share
//! of questions whose true answer is the likeliest of 20, and its mean rank. NOT here: questions and ranks (the engine).

use super::{Bar, Entry, Text};
use crate::args::EvalArgs;
use crate::failure::Failure;
use crate::output;
use crate::session::{self, Located};
use crate::table::{Align, Table};
use anyhow::Result;
use kvant_engine::Schemes;
use kvant_engine::eval::{self, Cell, Contestant, Retrieval, Settings};
use kvant_kv::Scheme;
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    rows: Vec<Row>,
    model: String,
    text_sha256: String,
    seed: u64,
    products: &'static str,
    threads: usize,
}

#[derive(Serialize)]
struct Row {
    scheme: String,
    length: usize,
    depth: usize,
    questions: usize,
    rank1_share: f64,
    mean_rank: f64,
}

/// Runs the command.
pub(super) fn run(
    args: &EvalArgs,
    located: &Located,
    entries: Vec<Entry>,
    settings: &Settings,
    text: &Text,
) -> Result<()> {
    let config = &located.config;
    if let Some(length) = args.lengths.iter().find(|l| **l > config.context) {
        return Err(Failure::input(
            format!("--lengths has {length}, and the context of this model holds {} tokens", config.context),
            "take smaller --lengths",
        )
        .into());
    }
    let asked = Retrieval {
        lengths: args.lengths.clone(),
        depths: args.depths.clone(),
        per_cell: args.per_cell,
        seed: args.seed,
    };
    let questions = asked
        .questions(&located.tokenizer()?, &text.tokens)
        .map_err(|e| Failure::input(e, "take larger --lengths, or a longer text"))?;
    let f16 = Contestant::scheme(Schemes::uniform(Scheme::F16, config.layers), config.shape.head_dim);
    let mut contestants = vec![f16];
    contestants.extend(entries.into_iter().map(|e| e.contestant).filter(|c| c.name != "f16"));
    let model = session::load_for(located, settings.threads, args.activations.products())?;
    let tokens = args.lengths.iter().sum::<usize>() * args.depths.len() * args.per_cell;
    let bar = Bar::new(contestants.len() * tokens);
    let found = eval::retrieve(&model, &questions, &contestants, settings, &mut |done, name| bar.at(done, name));
    drop(bar);
    let rows = contestants.iter().zip(found.map_err(Failure::from)?);
    let row = |scheme: &str, cell: Cell| Row {
        scheme: scheme.to_owned(),
        length: cell.length,
        depth: cell.depth,
        questions: cell.questions,
        rank1_share: cell.first,
        mean_rank: cell.mean_rank,
    };
    let report = Report {
        rows: rows.flat_map(|(c, cells)| cells.into_iter().map(move |cell| row(&c.name, cell))).collect(),
        model: args.model.clone(),
        text_sha256: text.sha256.clone(),
        seed: args.seed,
        products: model.products(),
        threads: settings.threads,
    };
    if args.json { output::json(&report) } else { output::text("the table", &render(&report)) }
}

fn render(report: &Report) -> String {
    let mut table = Table::new([
        ("cache", Align::Left),
        ("tokens", Align::Right),
        ("depth", Align::Right),
        ("questions", Align::Right),
        ("likeliest", Align::Right),
        ("mean rank", Align::Right),
    ]);
    for r in &report.rows {
        table.row([
            r.scheme.clone(),
            r.length.to_string(),
            format!("{} %", r.depth),
            r.questions.to_string(),
            format!("{:.0} %", 100.0 * r.rank1_share),
            format!("{:.1}", r.mean_rank),
        ]);
    }
    format!("rank of the true answer among 20, seed {}; chance: 5 %, 10.5\n\n{}", report.seed, table.render())
}
