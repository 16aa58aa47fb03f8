//! `kvant demo`: four prompts of clearly different lengths, decoded together under four schemes. In: a model; out: one table
//! (size, speed, agreement with f16) and the four texts of each scheme. NOT here: figures typed by hand; all are measured.

use super::info::times_smaller;
use crate::args::DemoArgs;
use crate::failure::Failure;
use crate::session::{self, Prefill};
use crate::table::{Align, Table};
use crate::{models, output, units};
use anyhow::Result;
use kvant_engine::{Engine, Generation, LoadedModel, Request};
use kvant_kv::{LayerShape, Scheme};
use std::ops::ControlFlow::Continue;
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

/// Length of the request that the line under the table speaks of: one at which a window of 128 tokens counts little.
const FORMULA_LEN: usize = 2000;

struct Run {
    scheme: Scheme,
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
    let model = session::load(&session::locate(&args.model)?, threads)?;
    let prompts: Vec<String> = PROMPTS.iter().map(|p| p.trim_end().to_string()).collect();
    let tokens = session::tokens(&model, &prompts, true)?;
    let mut runs = Vec::new();
    for scheme in SCHEMES {
        runs.push(decode(&model, scheme, &tokens, args.max_tokens, threads)?);
    }
    output::text("the table", &render(&runs, &tokens, model.config().shape))
}

fn decode(
    model: &Arc<LoadedModel>,
    scheme: &str,
    prompts: &[Vec<u32>],
    max_tokens: usize,
    threads: usize,
) -> Result<Run> {
    let (schemes, arm) = session::schemes_and_arm(Some(scheme), None, model.config().layers)?;
    let mut engine: Engine = session::engine(model, threads, None, arm, schemes)?;
    output::note(format_args!("{scheme}: {} requests together", prompts.len()));
    let mut prefill = Prefill::new(prompts);
    let requests = prompts.iter().map(|p| Request::greedy(p.clone(), max_tokens)).collect();
    let generation = engine.generate(requests, &mut |event| {
        prefill.event(event);
        Continue(())
    });
    let generation = generation.map_err(Failure::from)?;
    // What the cache says it holds, not what was asked for; a scheme given as text is that of every layer.
    let scheme = engine.schemes().map_err(Failure::from)?.layers()[0];
    Ok(Run { scheme, generation })
}

fn render(runs: &[Run], prompts: &[Vec<u32>], shape: LayerShape) -> String {
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
            run.scheme.to_string(),
            format!("{:.2}", run.scheme.bits_per_element(shape.head_dim)),
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
    let smaller = |run: &Run| format!("{} {:.2}", run.scheme, times_smaller(run.scheme, shape, FORMULA_LEN));
    let smaller: Vec<_> = runs[1..].iter().map(smaller).collect();
    text += &format!(
        "Times smaller than f16 for one request of {FORMULA_LEN} tokens, by the formula: {}.\n",
        smaller.join(", ")
    );
    for run in runs {
        text += &format!("\n=== {}\n", run.scheme);
        for (i, outcome) in run.generation.outcomes.iter().enumerate() {
            text += &format!("[{}] {}\n", i + 1, outcome.text.trim());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_engine::{DecodeTime, FinishReason, Outcome};
    use std::time::Duration;

    /// One request of five prompt tokens that produced these.
    fn run(scheme: &str, held: usize, tokens: &[u32]) -> Run {
        let outcome = Outcome {
            prompt_tokens: 5,
            cached_tokens: 0,
            queued: Duration::ZERO,
            tokens: tokens.to_vec(),
            text: format!("text of {scheme}"),
            reason: FinishReason::Length,
            ttft: Duration::from_millis(1),
        };
        let cache = kvant_kv::CacheBytes { window_bytes: held, ..Default::default() };
        let decode = DecodeTime { tokens: 3, steps: 3, time: Duration::from_secs(2) };
        let generation = Generation { outcomes: vec![outcome], decode, routes: Default::default(), cache };
        Run { scheme: scheme.parse().unwrap(), generation }
    }

    #[test]
    fn the_table_shows_what_was_measured_and_the_line_below_what_the_formula_gives() {
        let runs = [
            run("f16", 4000, &[1, 2, 3, 4]),
            run("k4v4g64w128", 1000, &[1, 2, 9, 4]),
            run("k2v2g32w128s4p512", 500, &[7, 2, 3, 4]),
        ];
        // The layers of SmolLM2: three kv heads of 64.
        let text = render(&runs, &[vec![0; 5]], LayerShape::new(9, 3, 64).unwrap());
        let row = |scheme: &str| -> Vec<&str> {
            text.lines().find(|l| l.starts_with(scheme)).unwrap().split_whitespace().collect()
        };
        assert_eq!(row("k4v4g64w128"), ["k4v4g64w128", "4.50", "1000", "(0.00", "MiB)", "4.00", "1.5", "2", "of", "4"]);
        assert!(row("k2v2g32w128s4p512").ends_with(&["0", "of", "4"]));
        assert!(text.contains("=== k2v2g32w128s4p512\n[1] text of k2v2g32w128s4p512\n"), "{text}");

        // By hand, per kv head in units of 256 bytes (one f16 token). f16: 2000 tokens in blocks of 32 are 2016. k4: 29 groups
        // of 64 tokens, 64 * 4.5 / 16 = 18 each, and 144 tokens in 160: 682. k2: 58 groups of 32 tokens, 32 * 3 / 16 = 6
        // each, 144 tokens in 160, and 4 sinks: 512.
        let line = format!(
            "Times smaller than f16 for one request of 2000 tokens, by the formula: k4v4g64w128 {:.2}, k2v2g32w128s4p512 {:.2}.",
            2016.0 / 682.0,
            2016.0 / 512.0
        );
        assert!(text.contains(&line), "{line}\n{text}");
    }

    #[test]
    fn the_schemes_of_the_demo_shrink_a_long_request_as_promised() {
        let smaller =
            |i: usize| times_smaller(SCHEMES[i].parse().unwrap(), LayerShape::new(9, 3, 64).unwrap(), FORMULA_LEN);
        assert_eq!(smaller(0), 1.0);
        assert!((smaller(2) - 3.0).abs() < 0.1, "k4: about 3.0, got {}", smaller(2));
        assert!((smaller(3) - 4.0).abs() < 0.1, "k2: about 4.0, got {}", smaller(3));
    }
}
