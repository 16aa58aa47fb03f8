//! `kvant bench decode`: whole decoding, arm against arm. In: a model, batches, arms; out: one row per batch and arm.
//! First the arms are proved to agree (bench_decode/proof.rs). Then every arm decodes the same requests in a process of its
//! own (bench_decode/arm_process.rs), so that its peak memory is its own, and the processes take turns of a few steps.
//! NOT here: decoding (the engine), the proof, the processes.

mod arm_process;
mod cuda;
mod proof;

use super::check_kernel;
use crate::args::{ArmName, DecodeArgs};
use crate::commands::demo::PROMPTS;
use crate::failure::{Failure, SCHEME_HINT};
use crate::session::Located;
use crate::table::{Align, Table};
use crate::{output, progress, session, units};
use anyhow::Result;
use arm_process::ArmProcess;
use kvant_engine::LoadedModel;
use kvant_engine::schemes::{load_schemes, parse_layer};
use kvant_kv::{PackedScheme, Scheme};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Groups of tokens that must be packed while the clock runs: a bench whose cache is frozen measures something else.
const FLUSHES: usize = 2;
/// Most requests of a batch.
const MAX_BATCH: usize = 4096;
/// Steps an arm decodes before the next one has its turn.
const TURN_STEPS: usize = 8;

#[derive(Serialize)]
struct Report {
    rows: Vec<Row>,
    scheme: String,
    kernel: String,
    threads: usize,
    steps: usize,
    proof: proof::Proof,
}

#[derive(Serialize)]
struct Row {
    batch: usize,
    prompt_len: usize,
    arm: &'static str,
    ttft_ms: f64,
    decode_tok_s: f64,
    routes: BTreeMap<String, u64>,
    cache_bytes: usize,
    peak_rss_bytes: Option<u64>,
    kld_to_dequant_step: f64,
}

/// Runs the command.
pub fn run(args: &DecodeArgs) -> Result<()> {
    if args.machine.on_gpu()? {
        return cuda::run(args);
    }
    if args.random_weights.is_some() {
        let hint = "add --device cuda, or leave it out";
        return Err(Failure::input("--random-weights fills a model on a GPU only", hint).into());
    }
    let threads = args.machine.threads()?;
    check_kernel(args.kernel.as_deref())?;
    let scheme = packed_scheme(&args.kv)?;
    check_list("--batch", &args.batch)?;
    if let Some(batch) = args.batch.iter().find(|b| **b > MAX_BATCH) {
        return Err(Failure::input(format!("--batch {batch} is over {MAX_BATCH}"), "take fewer requests").into());
    }
    check_arms(&args.arms)?;
    let model = session::locate(&args.model)?;
    if !args.arm_process {
        session::warn_of(&args.kv);
    }
    session::check_schemes(&load_schemes(&args.kv, model.config.layers)?, &model.config)?;
    check_lengths(&scheme, args.prompt_len, args.steps, model.config.context)?;
    if args.arm_process {
        return arm_process::serve(args, &model, threads);
    }
    let report = measure(args, &model, &scheme, threads)?;
    if args.json { output::json(&report) } else { output::text("the table", &render(&report)) }
}

fn packed_scheme(text: &str) -> Result<PackedScheme, Failure> {
    match parse_layer(text)?.0 {
        Scheme::Packed(packed) => Ok(packed),
        plain @ (Scheme::F16 | Scheme::Bf16) => {
            Err(Failure::input(format!("--kv {plain} packs nothing; the f16 arm is always f16"), SCHEME_HINT))
        }
    }
}

/// bf16 is another control than the one that every arm is compared with.
fn check_arms(arms: &[ArmName]) -> Result<(), Failure> {
    check_list("--arms", &arms.iter().map(|a| a.name()).collect::<Vec<_>>())?;
    if arms.contains(&ArmName::Bf16) {
        return Err(Failure::input(
            "--arms has bf16, and this bench has one control, the f16 arm",
            "`kvant bench attend --kv f16,bf16` times both controls, `kvant generate --kv bf16` decodes over bf16",
        ));
    }
    Ok(())
}

fn check_list<T: Ord + std::fmt::Display>(flag: &str, values: &[T]) -> Result<(), Failure> {
    let mut seen = BTreeSet::new();
    match values.iter().find(|v| !seen.insert(*v)) {
        Some(twice) => Err(Failure::input(format!("{flag} has {twice} twice"), "name each once")),
        None => Ok(()),
    }
}

/// Groups packed while `steps` tokens are stored behind a prompt.
fn flushes(scheme: &PackedScheme, prompt_len: usize, steps: usize) -> usize {
    let packed = |len| Scheme::Packed(*scheme).packed_len(len);
    (packed(prompt_len + steps) - packed(prompt_len)) / scheme.group_len()
}

/// The requests fit the model's context, and the cache is not frozen while they decode.
fn check_lengths(scheme: &PackedScheme, prompt_len: usize, steps: usize, context: usize) -> Result<(), Failure> {
    if prompt_len + steps > context {
        return Err(Failure::input(
            format!("{prompt_len} + {steps} tokens do not fit: the context of this model holds {context}"),
            "take a smaller --prompt-len or fewer --steps",
        ));
    }
    let found = flushes(scheme, prompt_len, steps);
    if found >= FLUSHES {
        return Ok(());
    }
    // More steps never pack less, so the fewest that are enough lie where halving the range leads.
    let enough = |steps: usize| flushes(scheme, prompt_len, steps) >= FLUSHES;
    let (mut too_few, mut needed) = (steps, context - prompt_len);
    if !enough(needed) {
        return Err(Failure::input(
            format!(
                "{scheme} packs {} groups behind {prompt_len} tokens until the context of this model ({context} tokens) \
                 is full, and at least {FLUSHES} must be packed while decoding",
                flushes(scheme, prompt_len, needed)
            ),
            "take a smaller --prompt-len, or a scheme with a smaller window_len",
        ));
    }
    while needed - too_few > 1 {
        let middle = too_few + (needed - too_few) / 2;
        if enough(middle) {
            needed = middle;
        } else {
            too_few = middle;
        }
    }
    Err(Failure::input(
        format!(
            "{steps} steps behind {prompt_len} tokens pack {found} groups of {scheme}; at least {FLUSHES} must be packed \
             while decoding, which takes {needed} steps"
        ),
        format!("give --steps {needed} or more"),
    ))
}

/// Prompts of exactly `len` tokens for `batch` requests, all different: stretches of the demo's texts, which are prose.
fn requests(model: &LoadedModel, batch: usize, len: usize) -> Result<Vec<Vec<u32>>> {
    let text = model.encode(&PROMPTS.join("\n")).map_err(Failure::from)?;
    // Starts are spread over the text by a stride that has no common factor with most lengths.
    const STRIDE: usize = 131;
    Ok((0..batch).map(|i| text.iter().copied().cycle().skip(i * STRIDE % text.len()).take(len).collect()).collect())
}

fn measure(args: &DecodeArgs, model: &Located, scheme: &PackedScheme, threads: usize) -> Result<Report> {
    let most = args.batch.iter().copied().max().unwrap_or(1);
    let (proof, kernel) = {
        let model = session::load(model, threads)?;
        let prompts = requests(&model, most, args.prompt_len)?;
        proof::prove(&model, args, threads, &prompts)?
    };
    proof.print();
    proof.check()?;
    let mut rows = Vec::new();
    for &batch in &args.batch {
        rows.extend(time_batch(args, batch, threads, &proof)?);
    }
    Ok(Report { rows, scheme: scheme.to_string(), kernel, threads, steps: args.steps, proof })
}

/// Starts one process per arm, lets them decode in turns, and collects what each has to say.
fn time_batch(args: &DecodeArgs, batch: usize, threads: usize, proof: &proof::Proof) -> Result<Vec<Row>> {
    let mut arms = Vec::new();
    for &arm in &args.arms {
        let wheel = progress::wheel(&format!("batch {batch}: prefill of {}", arm.name()));
        // One after another: prefill is timed too, and must not share the machine with another arm's.
        arms.push((arm, ArmProcess::start(args, arm, batch, threads)?));
        wheel.finish_and_clear();
    }
    let wheel = progress::wheel(&format!("batch {batch}: decode in turns"));
    let mut left = args.steps;
    let mut turn = 0;
    while left > 0 {
        let steps = left.min(TURN_STEPS);
        for i in 0..arms.len() {
            // Nobody always follows the same predecessor.
            let at = (i + turn) % arms.len();
            arms[at].1.decode(steps)?;
        }
        left -= steps;
        turn += 1;
    }
    let rows = arms.into_iter().map(|(arm, process)| row(args, batch, arm, process, proof)).collect();
    wheel.finish_and_clear();
    rows
}

fn row(args: &DecodeArgs, batch: usize, arm: ArmName, process: ArmProcess, proof: &proof::Proof) -> Result<Row> {
    let end = process.end()?;
    if end.tokens != batch * args.steps {
        let what = format!("arm {} decoded {} tokens instead of {}", arm.name(), end.tokens, batch * args.steps);
        return Err(Failure::proof(what, "no request may end before the last step of this bench").into());
    }
    Ok(Row {
        batch,
        prompt_len: args.prompt_len,
        arm: arm.name(),
        ttft_ms: end.ttft_ms,
        decode_tok_s: end.tokens as f64 * 1e9 / end.decode_ns as f64,
        routes: end.routes,
        cache_bytes: end.cache_bytes,
        peak_rss_bytes: end.peak_rss_bytes,
        kld_to_dequant_step: proof.kld_to_dequant_step(arm),
    })
}

fn render(report: &Report) -> String {
    let mut table = Table::new([
        ("batch", Align::Right),
        ("prompt_len", Align::Right),
        ("arm", Align::Left),
        ("first token ms", Align::Right),
        ("decode tokens/s", Align::Right),
        ("vs f16", Align::Right),
        ("cache bytes", Align::Right),
        ("peak memory", Align::Right),
        ("KLD to dequant-step", Align::Right),
        ("routes", Align::Left),
    ]);
    for r in &report.rows {
        let f16 = report.rows.iter().find(|other| other.batch == r.batch && other.arm == ArmName::F16.name());
        let routes: Vec<_> = r.routes.iter().map(|(name, count)| format!("{name} {count}")).collect();
        table.row([
            r.batch.to_string(),
            r.prompt_len.to_string(),
            r.arm.into(),
            format!("{:.0}", r.ttft_ms),
            format!("{:.1}", r.decode_tok_s),
            f16.map_or("-".into(), |f| format!("{:.2}x", r.decode_tok_s / f.decode_tok_s)),
            units::mib(r.cache_bytes),
            r.peak_rss_bytes.map_or("-".into(), |b| units::mib(usize::try_from(b).unwrap_or(usize::MAX))),
            format!("{:.1e}", r.kld_to_dequant_step),
            routes.join(", "),
        ]);
    }
    format!(
        "{} over {} steps, kernel {}, {} threads\n\n{}",
        report.scheme,
        report.steps,
        report.kernel,
        report.threads,
        table.render()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheme(text: &str) -> PackedScheme {
        packed_scheme(text).unwrap()
    }

    #[test]
    fn steps_must_pack_two_groups() {
        // A page edge at 1024 packs two groups of 64 at once.
        let check = |text: &str, prompt_len, steps| check_lengths(&scheme(text), prompt_len, steps, 8192);
        assert!(check("k4v4g64w128s4p512", 1024, 96).is_ok());
        let e = check("k4v4g64w128", 1024, 96).unwrap_err();
        assert!(e.what.contains("pack 1 groups") && e.hint.contains("--steps 128"), "{e}");
        assert!(check("k4v4g64w128", 1024, 128).is_ok());
        // A prompt below the window: the needed number counts the way to the window's edge too.
        for text in ["k4v4g64w128", "k4v4g32", "k2v2g128w7000p1024"] {
            let e = check(text, 10, 1).unwrap_err();
            let needed: usize = e.hint.trim_start_matches("give --steps ").split(' ').next().unwrap().parse().unwrap();
            assert!(check(text, 10, needed).is_ok() && check(text, 10, needed - 1).is_err(), "{text}: {needed}");
        }
    }

    #[test]
    fn steps_that_no_context_holds_are_not_suggested() {
        for text in ["k4v4g64w1073741824", "k4v4g64w8190"] {
            let e = check_lengths(&scheme(text), 64, 96, 8192).unwrap_err();
            assert!(e.what.contains("packs 0 groups behind 64 tokens until the context"), "{e}");
        }
        let e = check_lengths(&scheme("k4v4g64"), 8000, 193, 8192).unwrap_err();
        assert!(e.what.contains("do not fit"), "{e}");
    }

    #[test]
    fn lists_name_each_value_once() {
        assert!(check_list("--batch", &[1, 4]).is_ok());
        assert!(check_list("--batch", &[4, 4]).unwrap_err().what.contains("--batch has 4 twice"));
        assert!(packed_scheme("f16").is_err());
        assert!(packed_scheme("bf16").unwrap_err().what.contains("--kv bf16 packs nothing"));
        assert!(check_arms(&[ArmName::F16, ArmName::Fused]).is_ok());
        assert!(check_arms(&[ArmName::F16, ArmName::Bf16]).unwrap_err().what.contains("one control"));
    }
}
