//! `kvant eval`: what a cache costs in accuracy. In: a model, a text, caches; out: a table, one JSON object, a CSV, one page
//! with a picture, and a failure when a bound is not kept. All that is cheap to see is checked before the model is loaded.
//! NOT here: following the text and computing figures (the engine's eval room), tables (eval/report.rs), the picture
//! (eval/picture.rs), hidden facts (eval/retrieval.rs).

mod picture;
mod report;
mod retrieval;

use super::check_kernel;
use crate::args::EvalArgs;
use crate::failure::{Failure, SCHEME_HINT};
use crate::session::Located;
use crate::text::{Text, check_ctx, check_memory, read, tokens};
use crate::{output, progress, session};
use anyhow::Result;
use indicatif::ProgressBar;
use kvant_engine::eval::{self, Contestant, Gate, Imitation, RIVALS, Settings};
use kvant_engine::model::Config;
use kvant_engine::schemes::{files_of, is_file, load_schemes};
use kvant_kv::Scheme;
use report::Report;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A cache on the command line.
struct Entry {
    contestant: Contestant,
    /// Another program's format, not one of kvant's schemes.
    imitated: bool,
}

/// Runs the command.
pub fn run(args: &EvalArgs) -> Result<()> {
    let threads = args.machine.threads()?;
    check_kernel(args.kernel.as_deref())?;
    // A page that cannot be written should not cost a run first.
    [&args.html, &args.csv].into_iter().flatten().try_for_each(|path| output::check_page(path))?;
    let outputs: Vec<&Path> = [&args.html, &args.csv].into_iter().flatten().map(PathBuf::as_path).collect();
    let files: Vec<PathBuf> = args.kv.split(',').map(str::trim).flat_map(files_of).collect();
    let files = || files.iter().map(PathBuf::as_path).chain([args.text.as_path()]);
    output::check_apart(&outputs, &files().collect::<Vec<_>>())?;
    let bytes = read(&args.text)?;
    let located = session::locate(&args.model)?;
    output::check_apart(&outputs, &[located.path()])?;
    let entries = entries(&args.kv, &located.config)?;
    let settings = Settings { ctx: args.ctx, scored: args.score.scored(), threads, kernel: args.kernel.clone() };
    if args.retrieval {
        let text = tokens(&bytes, &located.tokenizer()?)?;
        return retrieval::run(args, &located, entries, &settings, &text);
    }
    check_ctx(args.ctx, &located.config)?;
    check_packs(&entries, args.ctx)?;
    check_memory(settings.logits_bytes(located.config.vocabulary), &located.config, args.activations.products())?;
    let text = tokens(&bytes, &located.tokenizer()?)?;
    let chunks = chunks(args, &text)?;
    let report = measure(args, &located, &entries, &settings, &text, &chunks)?;
    if let Some(path) = &args.csv {
        output::page(path, &report::csv(&report))?;
    }
    if let Some(path) = &args.html {
        output::page(path, &picture::html(&report))?;
    }
    if args.json {
        output::json(&report)?
    } else {
        output::text("the table", &report::render(&report))?
    }
    Ok(check_bounds(args, &entries, &report)?)
}

fn measure(
    args: &EvalArgs,
    located: &Located,
    entries: &[Entry],
    settings: &Settings,
    text: &Text,
    chunks: &[&[u32]],
) -> Result<Report> {
    let model = session::load_for(located, settings.threads, args.activations.products())?;
    let started = Instant::now();
    let bar = Bar::new((entries.len() + 1) * chunks.len() * args.ctx);
    let contestants: Vec<Contestant> = entries.iter().map(|e| e.contestant.clone()).collect();
    let found = eval::evaluate(&model, chunks, &contestants, settings, &mut |done, name| bar.at(done, name));
    let found = found.map_err(Failure::from)?;
    let rows = entries.iter().zip(found.rows);
    Ok(Report {
        model: args.model.clone(),
        text: report::TextInfo {
            path: args.text.display().to_string(),
            sha256: text.sha256.clone(),
            tokens: text.tokens.len(),
        },
        ctx: args.ctx,
        chunks: args.chunks,
        skip_chunks: args.skip_chunks,
        score: args.score,
        activations: args.activations,
        base: report::Row::base(found.base, &located.config, args.ctx),
        rows: rows.map(|(e, f)| report::Row::new(&e.contestant, e.imitated, f, args.ctx)).collect(),
        kernel: found.kernel,
        products: model.products(),
        threads: settings.threads,
        seconds: started.elapsed().as_secs_f64(),
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// A bar over all passes that says whose turn it is.
struct Bar(ProgressBar);

impl Bar {
    fn new(tokens: usize) -> Self {
        Self(progress::tokens("follow the text", tokens as u64))
    }

    fn at(&self, done: usize, name: &str) {
        self.0.set_position(done as u64);
        if !name.is_empty() {
            self.0.set_message(name.to_owned());
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Caches of a comma-separated list, each once, in their order.
fn entries(text: &str, config: &Config) -> Result<Vec<Entry>, Failure> {
    let mut entries: Vec<Entry> = Vec::new();
    for part in text.split(',').map(str::trim) {
        let entry = match Imitation::parse(part) {
            Some(imitation) => {
                let hint =
                    format!("other programs' formats: {}; each also as in {}+w128s4", RIVALS.join(", "), RIVALS[0]);
                let imitation = imitation.map_err(|e| Failure::input(e, hint))?;
                Entry { contestant: Contestant::imitation(&imitation, config.layers), imitated: true }
            }
            None => {
                let schemes = load_schemes(part, config.layers)?;
                session::check_schemes(&schemes, config)?;
                let mut contestant = Contestant::scheme(schemes, config.shape.head_dim);
                if is_file(part) {
                    // What layers and loud channels were called is clearer than all of them.
                    contestant.name = part.to_owned();
                }
                Entry { contestant, imitated: false }
            }
        };
        if entries.iter().any(|e| e.contestant.name == entry.contestant.name) {
            return Err(Failure::input(format!("{} appears twice in `{text}`", entry.contestant.name), SCHEME_HINT));
        }
        entries.push(entry);
    }
    Ok(entries)
}

/// A cache that packs nothing before the last scored token is f16, and a bound on it bounds nothing.
fn check_packs(entries: &[Entry], ctx: usize) -> Result<(), Failure> {
    for Entry { contestant, .. } in entries {
        let packed = |scheme: &Scheme| scheme.packed().is_some_and(|p| p.edge(ctx - 2) > p.sinks());
        let layers = contestant.schemes.layers();
        if layers.iter().any(|s| s.packed().is_some()) && !layers.iter().any(packed) {
            let what = format!("{} packs nothing in {ctx} tokens: its window is as long", contestant.name);
            return Err(Failure::input(what, "take a larger --ctx or a scheme with a smaller window"));
        }
    }
    Ok(())
}

/// The chunks to follow.
fn chunks<'a>(args: &EvalArgs, text: &'a Text) -> Result<Vec<&'a [u32]>, Failure> {
    let all: Vec<&[u32]> = text.tokens.chunks_exact(args.ctx).collect();
    let fit = all.len().saturating_sub(args.skip_chunks);
    if fit < args.chunks {
        let behind =
            if args.skip_chunks > 0 { format!(" behind the {} left out", args.skip_chunks) } else { String::new() };
        return Err(Failure::input(
            format!(
                "the text has {} tokens{}: {fit} chunks of {} fit{behind}, and --chunks asks for {}",
                text.tokens.len(),
                if text.cut { " in the part that is read, its first 3 MiB" } else { "" },
                args.ctx,
                args.chunks
            ),
            "take fewer --chunks, a smaller --ctx or a longer text",
        ));
    }
    Ok(all[args.skip_chunks..][..args.chunks].to_vec())
}

/// Whether kvant's own schemes keep the bounds; what is imitated is there to be compared with.
fn check_bounds(args: &EvalArgs, entries: &[Entry], report: &Report) -> Result<(), Failure> {
    let gate = Gate { max_kld: args.max_kld, max_ppl_ratio: args.max_ppl_ratio };
    for (_, row) in entries.iter().zip(&report.rows).filter(|(e, _)| !e.imitated) {
        gate.check(&row.scheme, &row.figures).map_err(|e| {
            Failure::proof(e, "give this scheme more bits, a window or sinks, or the run a wider bound")
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_counted_before_anything_is_followed() {
        use clap::Parser;
        let args = |words: &[&str]| {
            let words = ["kvant", "eval", "--text", "x"].iter().chain(words);
            match crate::args::Cli::try_parse_from(words).unwrap().command {
                crate::args::Command::Eval(args) => args,
                _ => unreachable!("it is eval"),
            }
        };
        let text = Text { sha256: String::new(), tokens: (0..100).collect(), cut: false };
        let found = chunks(&args(&["--ctx", "32", "--chunks", "2", "--skip-chunks", "1"]), &text).unwrap();
        assert_eq!((found.len(), found[0][0], found[1][31]), (2, 32, 95));
        let e = chunks(&args(&["--ctx", "32", "--chunks", "4"]), &text).unwrap_err();
        assert_eq!(e.what, "the text has 100 tokens: 3 chunks of 32 fit, and --chunks asks for 4");
        let e = chunks(&args(&["--ctx", "32", "--chunks", "1", "--skip-chunks", "9"]), &text).unwrap_err();
        assert!(e.what.contains("0 chunks of 32 fit behind the 9 left out"), "{e}");
    }
}
