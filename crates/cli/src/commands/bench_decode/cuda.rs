//! `kvant bench decode --device cuda`: whole decode steps on a GPU, arm against arm. In: a model, or a shape with random weights;
//! batches, prompt lengths, arms; out: one row each.
//!
//! One prompt is computed, which gives the time to the first token; its cache is then copied to the batch's other sequences, each at
//! memory of its own, and all decode together. A step is timed by the host's clock, from its tokens to the next ones.
//! NOT here: steps (the engine), kernels (kvant-kv).

use super::{check_arms, check_lengths, check_list, flushes, packed_scheme};
use crate::args::{ArmName, DecodeArgs};
use crate::commands::check_rows;
use crate::commands::demo::PROMPTS;
use crate::failure::Failure;
use crate::session::{self, Located};
use crate::table::{Align, Table};
use crate::{output, progress, units};
use anyhow::Result;
use kvant_engine::cuda::{Decoder, DecoderOptions, Shape, Weights, bucket};
use kvant_engine::model::{Basis, Config};
use kvant_engine::{Distribution, Error, LoadedModel, Source};
use kvant_kv::cuda::{Gpu, GpuCache, GpuOptions, OutFormat};
use kvant_kv::{Arm, LayerConfig, PackedScheme, Scheme};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Seed of random weights.
const SEED: u64 = 20_261;
/// Tokens of the prompt over which arms are compared, and tokens fed behind it.
const PROOF: (usize, usize) = (448, 64);
/// Largest mean divergence between the packed arms over the same tokens: they read the same numbers, rounded otherwise.
const MOST_KLD: f64 = 1e-3;
/// Steps that are not counted: the first one captures its graph.
const WARM: usize = 3;

#[derive(Serialize)]
struct Report {
    rows: Vec<Row>,
    scheme: String,
    card: String,
    model: String,
    steps: usize,
}

#[derive(Serialize)]
struct Row {
    batch: usize,
    prompt_len: usize,
    arm: &'static str,
    scheme: String,
    /// Of one prompt alone.
    ttft_ms: f64,
    decode_tok_s: f64,
    step_min_ms: f64,
    step_median_ms: f64,
    routes: BTreeMap<String, u64>,
    cache_bytes: usize,
    weight_bytes: usize,
    /// Of the card's memory, in use behind the steps.
    device_bytes: usize,
    kld_to_dequant_step: Option<f64>,
    /// Why there are no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<String>,
}

/// Where weights come from.
enum From {
    Shape(Shape),
    Model(Located),
}

impl From {
    fn config(&self) -> &Config {
        match self {
            From::Shape(shape) => &shape.config,
            From::Model(located) => &located.config,
        }
    }

    fn weights(&self, gpu: &Arc<Gpu>) -> Result<Weights, Error> {
        match self {
            From::Shape(shape) => Weights::random(gpu, shape, SEED),
            From::Model(located) => Weights::load(gpu, &Source::open(located.path())?, &|_, _| {}),
        }
    }

    /// Tokens to decode: prose, or numbers without a pattern.
    fn tokens(&self, count: usize) -> Result<Vec<u32>, Error> {
        match self {
            From::Shape(shape) => {
                let vocabulary = shape.config.vocabulary as u64;
                let token = |i: usize| ((i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % vocabulary;
                Ok((0..count).map(|i| token(i + 1) as u32).collect())
            }
            From::Model(located) => {
                let loaded = LoadedModel::without_weights(&Source::open(located.path())?, located.path())?;
                let text = loaded.encode(&PROMPTS.join("\n"))?;
                Ok(text.into_iter().cycle().take(count).collect())
            }
        }
    }
}

/// Runs the command.
pub fn run(args: &DecodeArgs) -> Result<()> {
    if args.kernel.is_some() {
        return Err(Failure::input("--kernel is of the CPU's kernels", "leave it out with --device cuda").into());
    }
    let scheme = packed_scheme(&args.kv)?;
    check_list("--batch", &args.batch)?;
    args.batch.iter().try_for_each(|&batch| check_rows("--batch", batch))?;
    check_arms(&args.arms)?;
    let (from, name) = match &args.random_weights {
        Some(name) => (From::Shape(Shape::load(name).map_err(Failure::from)?), format!("{name} (random weights)")),
        None => (From::Model(session::locate(&args.model)?), args.model.clone()),
    };
    check_lengths(&scheme, args.prompt_len, args.steps, from.config().context)?;
    let schemes = kvant_engine::load_schemes(&args.kv, from.config().layers).map_err(Failure::from)?;
    session::check_schemes(&schemes, from.config())?;
    session::check_on_gpu(&schemes, from.config(), Arm::Fused)?;
    let gpu = Gpu::open(0).map_err(Failure::from)?;
    let bases = schemes.complete_bases(&from.config().shape);
    let bench = Bench { gpu, from, schemes: schemes.layers().to_vec(), bases, args };
    let proof = bench.prove()?;
    let mut rows = Vec::new();
    for &batch in &args.batch {
        for &arm in &args.arms {
            let wheel = progress::wheel(&format!("{} x {} of {batch}", arm.name(), args.prompt_len));
            let mut row = bench.time(arm, batch).map_err(Failure::from)?;
            row.kld_to_dequant_step = proof.get(arm.name()).copied();
            wheel.finish_and_clear();
            rows.push(row);
        }
    }
    let card = bench.gpu.name().to_string();
    let report = Report { rows, scheme: args.kv.clone(), card, model: name, steps: args.steps };
    if args.json { output::json(&report) } else { output::text("the table", &render(&report, &scheme)) }
}

struct Bench<'a> {
    gpu: Arc<Gpu>,
    from: From,
    schemes: Vec<Scheme>,
    bases: Vec<Basis>,
    args: &'a DecodeArgs,
}

impl Bench<'_> {
    /// A model with an empty cache of this arm.
    fn decoder(&self, arm: Arm, batch: usize, tokens: usize) -> Result<Decoder<GpuCache>, Error> {
        let config = self.from.config();
        let layers: Vec<LayerConfig> =
            self.schemes.iter().enumerate().map(|(i, &scheme)| config.layer(i, scheme)).collect();
        let weights = self.from.weights(&self.gpu)?;
        let why = || format!("{batch} rows are more than a step has");
        let slots = bucket(batch).ok_or_else(|| Error::Limit { option: "batch", why: why() })?;
        let options = GpuOptions {
            slots,
            max_tokens: tokens,
            bytes: usize::MAX,
            out: OutFormat::Bf16,
            softcap: None,
            invariant: false,
        };
        let cache = GpuCache::new(&self.gpu, &layers, arm, options)?;
        let plain = vec![Basis::default(); config.layers];
        let bases = if arm == Arm::F16 { &plain } else { &self.bases };
        Decoder::new(weights, cache, bases, DecoderOptions { most_batch: batch, invariant: false })
    }

    /// Feeds every arm the same tokens; mean divergence of each packed one from dequant-step.
    fn prove(&self) -> Result<BTreeMap<&'static str, f64>> {
        let mut arms = self.args.arms.clone();
        if !arms.contains(&ArmName::DequantStep) {
            arms.push(ArmName::DequantStep);
        }
        let tokens = self.from.tokens(PROOF.0 + PROOF.1).map_err(Failure::from)?;
        let mut logits: Vec<(ArmName, Vec<Vec<f32>>)> = Vec::new();
        for arm in arms {
            let wheel = progress::wheel(&format!("prove that arms agree: {}", arm.name()));
            logits.push((arm, self.follow(arm.arm(), &tokens).map_err(Failure::from)?));
            wheel.finish_and_clear();
        }
        let control = logits.iter().find(|(arm, _)| *arm == ArmName::DequantStep).map(|(_, l)| l.clone());
        let control = control.unwrap_or_default();
        let mut found = BTreeMap::new();
        for (arm, rows) in &logits {
            let klds = control.iter().zip(rows).map(|(p, q)| Distribution::of(p).kld(&Distribution::of(q)));
            let mean = klds.sum::<f64>() / control.len() as f64;
            found.insert(arm.name(), mean);
            // Asked this way round, NaN fails too. The f16 arm reads other numbers: what packing costs is no error.
            let holds = arm.arm() == Arm::F16 || mean <= MOST_KLD;
            if !holds {
                let what = format!("the arms {} and dequant-step disagree: mean divergence {mean:.1e}", arm.name());
                return Err(Failure::proof(what, format!("at most {MOST_KLD:.0e}; nothing was timed")).into());
            }
        }
        Ok(found)
    }

    fn follow(&self, arm: Arm, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let mut decoder = self.decoder(arm, 1, tokens.len())?;
        let slot = decoder.cache_mut().add(tokens.len())?;
        let (prompt, rest) = tokens.split_at(PROOF.0);
        decoder.prefill(slot, prompt)?;
        let mut logits = Vec::with_capacity(rest.len());
        for &token in rest {
            for outcome in decoder.decode(&[(slot, token)])? {
                outcome?;
            }
            logits.push(decoder.logits(0)?);
        }
        Ok(logits)
    }

    /// A row of the table; what does not fit on the card is a result of its own.
    fn time(&self, arm: ArmName, batch: usize) -> Result<Row, Error> {
        match self.timed(arm, batch) {
            Err(e @ Error::Kv(kvant_kv::Error::GpuOutOfMemory { .. })) => {
                Ok(Row { failed: Some(e.to_string()), ..self.empty(arm, batch) })
            }
            row => row,
        }
    }

    /// A row without figures.
    fn empty(&self, arm: ArmName, batch: usize) -> Row {
        let scheme = match arm.arm() {
            Arm::F16 => Scheme::F16.to_string(),
            _ => self.args.kv.clone(),
        };
        Row {
            batch,
            prompt_len: self.args.prompt_len,
            arm: arm.name(),
            scheme,
            ttft_ms: 0.0,
            decode_tok_s: 0.0,
            step_min_ms: 0.0,
            step_median_ms: 0.0,
            routes: BTreeMap::new(),
            cache_bytes: 0,
            weight_bytes: 0,
            device_bytes: 0,
            kld_to_dequant_step: None,
            failed: None,
        }
    }

    fn timed(&self, arm: ArmName, batch: usize) -> Result<Row, Error> {
        let (args, config) = (self.args, self.from.config());
        let room = args.prompt_len + args.steps + WARM + 1;
        let mut decoder = self.decoder(arm.arm(), batch, room)?;
        let tokens = self.from.tokens(args.prompt_len)?;
        let slots = (0..batch).map(|_| decoder.cache_mut().add(room)).collect::<Result<Vec<_>, _>>()?;
        // Twice: the first time chooses products.
        decoder.prefill(slots[0], &tokens)?;
        decoder.cache_mut().set_len(slots[0], 0)?;
        let started = Instant::now();
        let first = decoder.prefill(slots[0], &tokens)?;
        let ttft_ms = started.elapsed().as_secs_f64() * 1e3;
        decoder.cache_mut().spread(slots[0], false)?;
        for &slot in &slots {
            decoder.cache_mut().set_len(slot, args.prompt_len)?;
        }
        let mut next: Vec<(usize, u32)> = slots.iter().map(|&slot| (slot, first)).collect();
        let mut times = Vec::with_capacity(args.steps);
        for step in 0..WARM + args.steps {
            let started = Instant::now();
            let outcomes = decoder.decode(&next)?;
            if step >= WARM {
                times.push(started.elapsed().as_secs_f64() * 1e3);
            }
            for ((_, token), outcome) in next.iter_mut().zip(outcomes) {
                *token = outcome?;
            }
        }
        let all: f64 = times.iter().sum();
        times.sort_by(f64::total_cmp);
        let (free, total) = self.gpu.memory()?;
        let bytes = decoder.cache().bytes();
        let calls = (config.layers * (args.steps + WARM)) as u64;
        Ok(Row {
            ttft_ms,
            decode_tok_s: (batch * args.steps) as f64 / (all / 1e3),
            step_min_ms: times[0],
            step_median_ms: times[times.len() / 2],
            routes: BTreeMap::from([(format!("cuda {} decode", arm.name()), calls)]),
            cache_bytes: bytes.packed_bytes + bytes.window_bytes + bytes.copy_bytes,
            weight_bytes: decoder.weight_bytes(),
            device_bytes: total - free,
            ..self.empty(arm, batch)
        })
    }
}

fn render(report: &Report, scheme: &PackedScheme) -> String {
    let mut table = Table::new([
        ("batch", Align::Right),
        ("prompt", Align::Right),
        ("arm", Align::Left),
        ("step median", Align::Right),
        ("tok/s", Align::Right),
        ("first token", Align::Right),
        ("cache", Align::Right),
        ("card in use", Align::Right),
    ]);
    for r in &report.rows {
        let figures = |x: String| if r.failed.is_some() { "-".to_string() } else { x };
        table.row([
            r.batch.to_string(),
            r.prompt_len.to_string(),
            r.arm.to_string(),
            figures(format!("{:.2} ms", r.step_median_ms)),
            figures(format!("{:.0}", r.decode_tok_s)),
            figures(format!("{:.1} ms", r.ttft_ms)),
            figures(units::mib(r.cache_bytes)),
            r.failed.clone().unwrap_or_else(|| units::mib(r.device_bytes)),
        ]);
    }
    let first = report.rows.first().map_or(0, |r| r.prompt_len);
    format!(
        "{} on {}, {} steps, {} groups packed meanwhile\n\n{}",
        report.model,
        report.card,
        report.steps,
        flushes(scheme, first, report.steps),
        table.render()
    )
}
