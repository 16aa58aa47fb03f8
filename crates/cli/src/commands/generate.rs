//! `kvant generate`: continues one prompt, or several together. In: prompts and flags; out: text as it is decoded, or one
//! JSON object with what was decoded, how fast, by which route and what the cache really holds. NOT here: decoding.

use super::{MOST_ON_GPU, check_kernel};
use crate::args::{GenerateArgs, SamplingArgs};
use crate::failure::Failure;
use crate::session::{self, Prefill};
use crate::{output, rss, units};
use anyhow::Result;
use kvant_engine::model::Config;
use kvant_engine::schemes::files_of;
use kvant_engine::{Engine, Error, Event, Generation, Limits, Outcome, Request, Sampling};
use kvant_kv::Scheme;
use kvant_roofline::cost::resident_bytes;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

#[derive(Serialize)]
struct Report<'a> {
    requests: Vec<RequestReport<'a>>,
    decode_tok_s: Option<f64>,
    routes: &'a BTreeMap<String, u64>,
    cache: CacheReport,
    arm: &'static str,
    kernel: &'a str,
    products: &'a str,
    threads: usize,
    peak_rss_bytes: Option<u64>,
}

#[derive(Serialize)]
struct RequestReport<'a> {
    prompt_tokens: usize,
    cached_tokens: usize,
    text: &'a str,
    tokens: &'a [u32],
    ttft_ms: f64,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct CacheReport {
    scheme: String,
    packed_bytes: usize,
    window_bytes: usize,
    copy_bytes: usize,
    f16_bytes_equivalent: usize,
    f16_resident_bytes: usize,
}

/// Runs the command.
pub fn run(args: &GenerateArgs) -> Result<()> {
    // Cheap checks come before the model is loaded.
    let on_gpu = args.machine.on_gpu()?;
    if on_gpu && (args.save_cache.is_some() || args.restore_cache.is_some()) {
        let hint = "leave --device cuda out, or the cache's file";
        return Err(Failure::input("caches are saved and restored on the CPU only", hint).into());
    }
    check_kernel(args.kernel.as_deref())?;
    let prompts = prompts(args)?;
    session::check_text(args.cache.kv.as_deref())?;
    let located = session::locate(&args.model)?;
    if let Some(path) = &args.save_cache {
        let files = args.cache.kv.as_deref().map(files_of).unwrap_or_default();
        let read = files.iter().chain(&args.prompts).map(PathBuf::as_path).chain([located.path()]);
        output::check_apart(&[path], &read.collect::<Vec<_>>())?;
    }
    let (schemes, arm) = session::schemes_and_arm(args.cache.kv.as_deref(), args.cache.arm, located.config.layers)?;
    session::check_schemes(&schemes, &located.config)?;
    let kernel = args.kernel.as_deref();
    // On a GPU every place has a window of its own from the start.
    let limits = match on_gpu {
        true => Limits { max_running: prompts.len().min(MOST_ON_GPU), ..Limits::default() },
        false => Limits::default(),
    };
    let (model, mut engine) = session::model_and_engine(&args.machine, &located, kernel, arm, schemes, limits)?;
    let tokens = session::tokens(&model, &prompts, args.chat)?;
    let mut prefill = Prefill::new(&tokens);
    if let Some(path) = &args.save_cache {
        engine.save_prompt(&tokens[0], path).map_err(Failure::from)?;
    }
    if let Some(path) = &args.restore_cache {
        engine.restore_prompt(path).map_err(Failure::from)?;
    }
    let from_cache = args.save_cache.is_some() || args.restore_cache.is_some();
    let sampling = sampling(&args.sampling);
    let mut requests: Vec<Request> =
        tokens.into_iter().map(|prompt| Request { sampling, ..Request::greedy(prompt, args.max_tokens) }).collect();

    let mut printer = Printer { texts: vec![String::new(); prompts.len()], silent: args.json, failed: None };
    let on_event = &mut |event: &Event| {
        prefill.event(event);
        printer.event(event)
    };
    let generation = match requests.pop() {
        Some(request) if from_cache => engine.generate_from_session(request, on_event),
        last => engine.generate(requests.into_iter().chain(last).collect(), on_event),
    };
    if let Some(error) = printer.failed {
        return Err(error);
    }
    let generation = generation.map_err(Failure::from)?;
    let report = report(&generation, &engine)?;
    if args.json { output::json(&report) } else { summary(&report) }
}

fn sampling(args: &SamplingArgs) -> Sampling {
    let SamplingArgs { temperature, top_k, top_p, min_p, seed } = *args;
    Sampling { temperature, top_k, top_p, min_p, seed }
}

/// The prompts that the flags name.
fn prompts(args: &GenerateArgs) -> Result<Vec<String>> {
    if let Some(path) = &args.prompts {
        return read_prompts(path);
    }
    let prompt = match args.prompt.as_deref() {
        Some("-") => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .map_err(|e| Failure::input(format!("cannot read the prompt from stdin: {e}"), "send UTF-8 text"))?;
            // The line break that ends a text file is not part of the prompt.
            let text = without_mark(&text);
            text.strip_suffix('\n').map_or(text, |t| t.strip_suffix('\r').unwrap_or(t)).to_string()
        }
        Some(text) => text.to_string(),
        None => return Err(Failure::input("no prompt was given", "give --prompt TEXT or --prompts FILE").into()),
    };
    // A chat template still has something to say around an empty message.
    if prompt.is_empty() && !args.chat {
        return Err(Failure::from(Error::EmptyPrompt { request: 0 }).into());
    }
    Ok(vec![prompt])
}

/// A text file's content: a byte order mark at its start says how it is encoded and is no part of it.
fn without_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

fn read_prompts(path: &Path) -> Result<Vec<String>> {
    const HINT: &str = "--prompts takes a UTF-8 text file with one prompt per line";
    let text = std::fs::read_to_string(path)
        .map_err(|e| Failure::input(format!("cannot read the prompts in {}: {e}", path.display()), HINT))?;
    let lines: Vec<String> = without_mark(&text).lines().map(str::to_string).collect();
    if lines.is_empty() {
        return Err(Failure::input(format!("{} has no prompt in it", path.display()), HINT).into());
    }
    if let Some(empty) = lines.iter().position(|l| l.trim().is_empty()) {
        return Err(Failure::input(format!("line {} of {} is empty", empty + 1, path.display()), HINT).into());
    }
    Ok(lines)
}

/// Prints what is decoded: one text as it comes, several texts each when it is whole.
struct Printer {
    texts: Vec<String>,
    silent: bool,
    failed: Option<anyhow::Error>,
}

impl Printer {
    /// Breaks when stdout takes no more: nobody would read what is decoded behind that.
    fn event(&mut self, event: &Event) -> ControlFlow<()> {
        if self.silent {
            return ControlFlow::Continue(());
        }
        let alone = self.texts.len() == 1;
        let text = match event {
            Event::Token { text, .. } if alone => text.clone(),
            Event::Finished { text, .. } if alone => format!("{text}\n"),
            Event::Token { request, text, .. } => {
                self.texts[*request].push_str(text);
                return ControlFlow::Continue(());
            }
            Event::Finished { request, text, .. } => {
                format!("== prompt {}\n{}{text}\n\n", request + 1, self.texts[*request])
            }
            Event::Prefilled { .. } | Event::Failed { .. } => return ControlFlow::Continue(()),
        };
        // Nobody can be told from inside the engine; the command reports it when the engine returns.
        self.failed = output::text("the text", &text).err();
        if self.failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn report<'a>(generation: &'a Generation, engine: &'a Engine) -> Result<Report<'a>> {
    let cache = generation.cache;
    Ok(Report {
        requests: generation
            .outcomes
            .iter()
            .map(|o| RequestReport {
                prompt_tokens: o.prompt_tokens,
                cached_tokens: o.cached_tokens,
                text: &o.text,
                tokens: &o.tokens,
                ttft_ms: o.ttft.as_secs_f64() * 1e3,
                finish_reason: o.reason.as_str(),
            })
            .collect(),
        decode_tok_s: generation.decode.tok_s(),
        routes: &generation.routes,
        cache: CacheReport {
            scheme: engine.schemes().map_err(Failure::from)?.to_string(),
            packed_bytes: cache.packed_bytes,
            window_bytes: cache.window_bytes,
            copy_bytes: cache.copy_bytes,
            f16_bytes_equivalent: cache.f16_bytes_equivalent,
            f16_resident_bytes: f16_resident_bytes(generation, engine.model().config()),
        },
        arm: super::arm_name(engine.arm()),
        kernel: engine.kernel(),
        products: engine.products(),
        threads: engine.threads(),
        peak_rss_bytes: rss::peak_rss_bytes(),
    })
}

/// What an f16 cache would hold of the same requests: in whole blocks, as this one's figures are.
fn f16_resident_bytes(generation: &Generation, config: &Config) -> usize {
    let of = |o: &Outcome| config.layers * resident_bytes(config.shape, Scheme::F16, o.stored_tokens());
    generation.outcomes.iter().map(of).sum()
}

/// One line on stderr: stdout carries the text alone.
fn summary(report: &Report<'_>) -> Result<()> {
    let held = report.cache.packed_bytes + report.cache.window_bytes + report.cache.copy_bytes;
    let speed = report.decode_tok_s.map_or("no decode step".to_string(), |s| format!("decode {s:.1} tokens/s"));
    let routes: Vec<_> = report.routes.iter().map(|(name, count)| format!("{name} {count}")).collect();
    output::note(format_args!(
        "[{} prompt tokens, {} tokens, {speed}, cache {} {} ({:.2} times smaller than f16), arm {}, routes {}, {} threads]",
        report.requests.iter().map(|r| r.prompt_tokens).sum::<usize>(),
        report.requests.iter().map(|r| r.tokens.len()).sum::<usize>(),
        report.cache.scheme,
        units::mib(held),
        report.cache.f16_resident_bytes as f64 / held.max(1) as f64,
        report.arm,
        routes.join(" "),
        report.threads,
    ));
    Ok(())
}
