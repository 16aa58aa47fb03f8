//! `kvant demo`: four prompts of clearly different lengths, decoded together under four schemes. In: a model; out: one table
//! (size, speed, agreement with f16) and the four texts of each scheme. NOT here: figures typed by hand; all are measured.

use crate::args::DemoArgs;
use crate::failure::Failure;
use crate::session::{self, Prefill};
use crate::table::{Align, Table};
use crate::{models, output, units};
use anyhow::Result;
use kvant_engine::{Engine, Generation, LoadedModel, Request};
use std::sync::Arc;

/// The prompts, shortest first; see demo/README.md.
pub const PROMPTS: [&str; 4] = [
    include_str!("../../../../demo/1-short.txt"),
    include_str!("../../../../demo/2-letter.txt"),
    include_str!("../../../../demo/3-recipe.txt"),
    include_str!("../../../../demo/4-log.txt"),
];

/// The schemes, the control first.
const SCHEMES: [&str; 4] = ["f16", "k8v8g64w128s4p512", "k4v4g64w128s4p512", "k2v2g32w128s4p512"];

struct Run {
    scheme: &'static str,
    bits: f64,
    generation: Generation,
}

impl Run {
    fn held_bytes(&self) -> usize {
        let cache = self.generation.cache;
        cache.packed_bytes + cache.window_bytes + cache.copy_bytes
    }

    /// Tokens equal to another run's before each request's first difference (behind it texts say different things,
    /// and a token in the same place means nothing), and all tokens of the other run.
    fn equal_tokens(&self, other: &Run) -> (usize, usize) {
        let pairs = self.generation.outcomes.iter().zip(&other.generation.outcomes);
        pairs.fold((0, 0), |(equal, all), (a, b)| {
            let same = a.tokens.iter().zip(&b.tokens).take_while(|(x, y)| x == y).count();
            (equal + same, all + b.tokens.len())
        })
    }
}

/// Runs the command.
pub fn run(args: &DemoArgs) -> Result<()> {
    let threads = args.machine.threads()?;
    if models::known(&args.model).is_some() {
        super::pull::pull(&args.model)?;
    }
    let model = session::load(&args.model, threads)?;
    let prompts: Vec<String> = PROMPTS.iter().map(|p| p.trim_end().to_string()).collect();
    let tokens = session::tokens(&model, &prompts, true)?;
    let mut runs = Vec::new();
    for scheme in SCHEMES {
        runs.push(decode(&model, scheme, &tokens, args.max_tokens, threads)?);
    }
    output::text(&render(&runs, &tokens))
}

fn decode(
    model: &Arc<LoadedModel>,
    scheme: &'static str,
    prompts: &[Vec<u32>],
    max_tokens: usize,
    threads: usize,
) -> Result<Run> {
    let (schemes, arm) = session::schemes_and_arm(Some(scheme), None, model.config().layers)?;
    let bits = schemes.layers().first().map_or(16.0, |s| s.bits_per_element(model.config().shape.head_dim));
    let mut engine: Engine = session::engine(model, threads, None, arm, schemes)?;
    eprintln!("{scheme}: {} requests together", prompts.len());
    let mut prefill = Prefill::new(prompts);
    let requests = prompts.iter().map(|p| Request::greedy(p.clone(), max_tokens)).collect();
    let generation = engine.generate(requests, &mut |e| prefill.event(e)).map_err(Failure::from)?;
    Ok(Run { scheme, bits, generation })
}

fn render(runs: &[Run], prompts: &[Vec<u32>]) -> String {
    let mut table = Table::new([
        ("scheme", Align::Left),
        ("bits per element", Align::Right),
        ("resident cache bytes", Align::Right),
        ("times smaller than f16", Align::Right),
        ("decode tokens/s", Align::Right),
        ("tokens equal to f16's", Align::Right),
    ]);
    let control = &runs[0];
    for run in runs {
        let (equal, all) = run.equal_tokens(control);
        table.row([
            run.scheme.into(),
            format!("{:.2}", run.bits),
            format!("{} ({})", run.held_bytes(), units::mib(run.held_bytes())),
            format!("{:.2}", control.held_bytes() as f64 / run.held_bytes().max(1) as f64),
            run.generation.decode.tok_s().map_or("-".into(), |s| format!("{s:.1}")),
            format!("{equal} of {all}"),
        ]);
    }
    let lengths: Vec<_> = prompts.iter().map(|p| p.len().to_string()).collect();
    let mut text =
        format!("\n{} requests of {} prompt tokens, decoded together\n\n", prompts.len(), lengths.join(", "));
    text += &table.render();
    text += "\nEqual tokens are counted up to each request's first difference. Window and sinks stay f16, so short requests\n\
             shrink less than bits per element say.\n";
    for run in runs {
        text += &format!("\n=== {}\n", run.scheme);
        for (i, outcome) in run.generation.outcomes.iter().enumerate() {
            text += &format!("[{}] {}\n", i + 1, outcome.text.trim());
        }
    }
    text
}
