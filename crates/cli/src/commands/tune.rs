//! `kvant tune`: bits by layer under a budget. In: a model, a calibration text, budgets; out: one scheme file per budget, which
//! `--kv` reads everywhere. What was measured is kept beside them after every layer, so that a run that was stopped goes on
//! where it was. With --codebooks: tune/codebooks.rs.
//! NOT here: measuring and choosing (the engine's tune room), reading scheme files (the engine).

mod codebooks;

use crate::args::TuneArgs;
use crate::failure::{Failure, SCHEME_HINT};
use crate::table::{Align, Table};
use crate::{output, progress, session, text};
use anyhow::Result;
use kvant_engine::schemes::{is_file, parse_layer};
use kvant_engine::tune::{self, FORMS, Form, QUICK_FORMS, Sensitivity, Session, Template, Tensor};
use kvant_engine::{Basis, Products, Schemes, Turn};
use kvant_kv::Scheme;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What a state file is good for: costs measured under other words are not these.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Question {
    model_sha256: String,
    text_sha256: String,
    ctx: usize,
    chunk: usize,
    template: String,
}

/// What is kept between runs.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    question: Question,
    /// KL divergence by `layer form`.
    costs: BTreeMap<String, f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    files: Vec<Tuned>,
    template: String,
    quick: bool,
    measured: usize,
    taken_from_state: usize,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Tuned {
    path: PathBuf,
    /// null with --uniform.
    budget_bits: Option<f64>,
    bits: f64,
    /// null with --uniform.
    expected_kld: Option<f64>,
}

/// Runs the command.
pub fn run(args: &TuneArgs) -> Result<()> {
    if args.codebooks {
        return codebooks::run(args);
    }
    let threads = args.machine.threads()?;
    let (scheme, basis) = parse_layer(&args.kv).map_err(Failure::from)?;
    let Scheme::Packed(scheme) = scheme else {
        let what = format!("--kv {} packs nothing, and tune chooses the bits of a packed scheme", args.kv);
        return Err(Failure::input(what, SCHEME_HINT).into());
    };
    let template = Template { scheme, rotate_k: basis.keys != Turn::None, rotate_v: basis.values != Turn::None };
    if !is_file(&args.out.to_string_lossy()) {
        let what =
            format!("--out {} would be no scheme file for --kv: its name does not end in .toml", args.out.display());
        return Err(Failure::input(what, "name it something.toml").into());
    }
    let paths: Vec<PathBuf> = args.budget_bits.iter().map(|&bits| out_path(args, bits)).collect();
    paths.iter().try_for_each(|path| output::check_page(path))?;
    let state_path = args.state.clone().unwrap_or_else(|| args.out.with_extension("state.json"));
    output::check_page(&state_path)?;
    let written: Vec<&Path> = paths.iter().chain([&state_path]).map(PathBuf::as_path).collect();
    output::check_apart(&written, &[&args.text])?;
    let text = text::read(&args.text)?;
    let located = session::locate(&args.model)?;
    let config = located.config.clone();
    let (layers, head_dim) = (config.layers, config.shape.head_dim);
    let form = |tensor, bits, loud| Form { tensor, bits, loud };
    let bits = |codec: kvant_kv::Codec| {
        let (bits, _) = codec.as_affine().ok_or_else(|| {
            Failure::input(
                format!(
                    "{scheme}: tune chooses bits of schemes whose groups have scale and zero, and {codec} has none"
                ),
                "give --kv such as k2v2g64w128s4p512.ls.rotv",
            )
        })?;
        Ok::<_, Failure>(bits)
    };
    let asked = (form(Tensor::K, bits(scheme.k())?, scheme.loud()), form(Tensor::V, bits(scheme.v())?, 0));
    let codes = (asked.0.code_bits(head_dim) + asked.1.code_bits(head_dim)) / 2.0;
    let params = scheme.bits_per_element(head_dim) - codes;
    for &bits in &args.budget_bits {
        if bits < 2.0 + params {
            let least = 2.0 + params;
            let what =
                format!("--budget-bits {bits} is below {least}, what 2-bit codes with their scales and zeros take");
            return Err(Failure::input(what, format!("give at least {least}")).into());
        }
    }
    let text = text::tokens(&text, &located.tokenizer()?)?;
    let tokens = &text.tokens;
    let ctx = args.ctx.unwrap_or(if args.quick { QUICK_CTX } else { CTX });
    text::check_ctx(ctx, &config)?;
    let held = layers * ctx * config.hidden * size_of::<f32>() + ctx / 2 * config.vocabulary * size_of::<f32>();
    text::check_memory(held, &config, Products::default())?;
    let Some(chunk) = tokens.chunks_exact(ctx).nth(args.skip_chunks) else {
        let fit = tokens.len() / ctx;
        let what = format!("{} has {} tokens, so {fit} chunks of {ctx}", args.text.display(), tokens.len());
        return Err(Failure::input(what, "give a longer --text, or a smaller --ctx or --skip-chunks").into());
    };
    // What is compared lies in the second half: in its middle something must be packed, or nothing is measured.
    if scheme.edge(ctx * 3 / 4) <= scheme.sinks() {
        let what = format!("{} packs next to nothing in {ctx} tokens, so that nothing could be measured", args.kv);
        return Err(Failure::input(what, "take a larger --ctx, or a --kv with a smaller window").into());
    }
    let question = Question {
        model_sha256: text::sha256_of(located.path())?,
        text_sha256: text.sha256.clone(),
        ctx,
        chunk: args.skip_chunks,
        template: template_text(&template),
    };
    let mut costs = if args.uniform { Sensitivity::new() } else { read_state(&state_path, &question, layers)? };

    let started = Instant::now();
    let forms: &[Form] = match (args.uniform, args.quick) {
        (true, _) => &[],
        (_, true) => &QUICK_FORMS,
        (_, false) => &FORMS,
    };
    let todo: Vec<(usize, Form)> = (0..layers).flat_map(|layer| forms.iter().map(move |&form| (layer, form))).collect();
    let todo: Vec<_> = todo.into_iter().filter(|key| !costs.contains_key(key)).collect();
    let taken_from_state = costs.len();
    let model = session::load(&located, threads)?;
    let mut session = Session::new(model, chunk.to_vec(), threads).map_err(Failure::from)?;
    // A layer near the end has fewer layers behind it to run.
    let work = |layer: usize| (layers - layer) as u64 + 2;
    let bar = progress::percent("measure layers");
    bar.set_length(todo.iter().map(|&(layer, _)| work(layer)).sum());
    for (i, &(layer, form)) in todo.iter().enumerate() {
        let cost = session.measure(layer, form, &template).map_err(Failure::from)?;
        if !cost.is_finite() {
            let what = format!("{form} in layer {layer} makes a divergence from f16 that is no number");
            return Err(Failure::input(
                what,
                "give another --text; if that helps nothing, the model's weights are damaged",
            )
            .into());
        }
        costs.insert((layer, form), cost);
        bar.inc(work(layer));
        if todo.get(i + 1).is_none_or(|next| next.0 != layer) {
            write_state(&state_path, &question, &costs)?;
        }
    }
    bar.finish_and_clear();

    let all = tune::complete(&costs, layers, head_dim);
    let mut files = Vec::new();
    if args.uniform {
        let schemes = schemes(&template, &[asked].repeat(layers), session.ranked())?;
        files.push(write_file(args, &question, args.out.clone(), None, None, &schemes, head_dim)?);
    }
    for (&budget, path) in args.budget_bits.iter().zip(&paths) {
        let Some(chosen) = tune::allocate(&all, layers, head_dim, budget - params) else {
            let what = "a layer's cost is no number: its divergence from f16 cannot be told".to_string();
            return Err(Failure::input(what, "give another --text").into());
        };
        let schemes = schemes(&template, &chosen.layers, session.ranked())?;
        let expected = Some(chosen.expected);
        files.push(write_file(args, &question, path.clone(), Some(budget), expected, &schemes, head_dim)?);
    }
    let report = Report {
        files,
        template: question.template,
        quick: args.quick,
        measured: todo.len(),
        taken_from_state,
        seconds: started.elapsed().as_secs_f64(),
    };
    if args.json { output::json(&report) } else { output::text("the table", &render(&report)) }
}

/// Tokens that a form's cost is measured over: half of them are compared.
const CTX: usize = 1024;
/// The same of the quick way.
const QUICK_CTX: usize = 512;

/// Where the file of a budget goes: `--out`, with the bits in its name when there are several.
fn out_path(args: &TuneArgs, bits: f64) -> PathBuf {
    if args.budget_bits.len() == 1 {
        return args.out.clone();
    }
    let stem = args.out.file_stem().unwrap_or_default().to_string_lossy();
    args.out.with_file_name(format!("{stem}-{bits}.toml"))
}

fn template_text(template: &Template) -> String {
    let turn = |on: bool| if on { Turn::Plain } else { Turn::None };
    let basis = Basis { keys: turn(template.rotate_k), values: turn(template.rotate_v), ..Basis::default() };
    Schemes::of_parts(vec![(Scheme::Packed(template.scheme), basis)]).text(0)
}

/// Writes the file of some schemes and says what is in it.
fn write_file(
    args: &TuneArgs,
    question: &Question,
    path: PathBuf,
    budget_bits: Option<f64>,
    expected_kld: Option<f64>,
    schemes: &Schemes,
    head_dim: usize,
) -> Result<Tuned, Failure> {
    let layers = schemes.layers();
    let bits = layers.iter().map(|s| s.bits_per_element(head_dim)).sum::<f64>() / layers.len() as f64;
    let tuned = Tuned { path, budget_bits, bits, expected_kld };
    output::page(&tuned.path, &scheme_file(args, question, &tuned, schemes))?;
    Ok(tuned)
}

fn schemes(template: &Template, chosen: &[(Form, Form)], ranked: &[Vec<Vec<u16>>]) -> Result<Schemes, Failure> {
    let layers = chosen.iter().zip(ranked);
    let parts = layers.map(|(&(k, v), ranked)| template.layer(k, v, ranked)).collect::<Result<Vec<_>, _>>();
    Ok(Schemes::of_parts(parts.map_err(Failure::from)?))
}

/// The file that `--kv` reads.
fn scheme_file(args: &TuneArgs, question: &Question, tuned: &Tuned, schemes: &Schemes) -> String {
    let budget = tuned
        .budget_bits
        .map_or("the same in every layer".to_string(), |b| format!("at most {b} bits a packed element"));
    let mut text = format!(
        "# Written by `kvant tune{}--ctx {} --skip-chunks {} --kv {}` {}: {budget}, {:.4} bits used.\n\
         # Model {} (sha256 {}), calibrated on a text of sha256 {}.\n",
        if args.quick { " --quick " } else { " " },
        question.ctx,
        question.chunk,
        question.template,
        env!("CARGO_PKG_VERSION"),
        tuned.bits,
        Path::new(&args.model).file_name().unwrap_or_default().to_string_lossy(),
        question.model_sha256,
        question.text_sha256,
    );
    if let Some(expected) = tuned.expected_kld {
        let _ = writeln!(text, "# Sum of the layers' divergences from f16 there: {expected:.5} nats.");
    }
    text.push_str("[layers]\n");
    for layer in 0..schemes.layers().len() {
        let _ = writeln!(text, "{layer} = \"{}\"", schemes.text(layer));
    }
    text.push_str("[loud]\n");
    for (layer, basis) in schemes.bases().iter().enumerate() {
        if let Some(heads) = &basis.key_order {
            let _ = writeln!(text, "{layer} = {heads:?}");
        }
    }
    text
}

fn key_text((layer, form): &(usize, Form)) -> String {
    format!("{layer} {form}")
}

/// Costs that an earlier run of the same question measured.
fn read_state(path: &Path, question: &Question, layers: usize) -> Result<Sensitivity, Failure> {
    let text = match fs::read_to_string(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Sensitivity::new()),
        Err(e) => {
            let what = format!("cannot read the state file {}: {e}", path.display());
            return Err(Failure::input(what, "name another one with --state"));
        }
        Ok(text) => text,
    };
    let hint = "remove it to measure anew, or name another one with --state";
    let state: State = serde_json::from_str(&text)
        .map_err(|e| Failure::input(format!("{} is no state of `kvant tune`: {e}", path.display()), hint))?;
    if state.question != *question {
        let what = format!("{} was measured with another model, text, ctx, chunk or --kv", path.display());
        return Err(Failure::input(what, hint));
    }
    let mut costs = Sensitivity::new();
    for (key, cost) in state.costs {
        let mut keys = (0..layers).flat_map(|layer| FORMS.into_iter().map(move |form| (layer, form)));
        let Some(known) = keys.find(|known| key_text(known) == key).filter(|_| cost.is_finite() && cost >= 0.0) else {
            let what = format!("{} has an entry that is none, `{key}`: {cost}", path.display());
            return Err(Failure::input(what, hint));
        };
        costs.insert(known, cost);
    }
    Ok(costs)
}

/// Writes beside and renames: a run stopped while it writes leaves the old file, and two runs do not meet.
fn write_state(path: &Path, question: &Question, costs: &Sensitivity) -> Result<()> {
    let state = State { question: question.clone(), costs: costs.iter().map(|(key, &x)| (key_text(key), x)).collect() };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        let mut beside = tempfile::NamedTempFile::new_in(folder)?;
        beside.write_all(serde_json::to_string_pretty(&state)?.as_bytes())?;
        beside.persist(path)?;
        Ok(())
    };
    write().map_err(|e| {
        let what = format!("cannot write the state file {}: {e}", path.display());
        Failure::input(what, "name another one with --state")
    })?;
    Ok(())
}

fn render(report: &Report) -> String {
    let mut table = Table::new([
        ("file", Align::Left),
        ("budget", Align::Right),
        ("bits", Align::Right),
        ("sum of KLD", Align::Right),
    ]);
    for t in &report.files {
        table.row(vec![
            t.path.display().to_string(),
            t.budget_bits.map_or(String::new(), |b| b.to_string()),
            format!("{:.4}", t.bits),
            t.expected_kld.map_or(String::new(), |x| format!("{x:.5}")),
        ]);
    }
    format!(
        "{} forms measured, {} taken from the state file, {:.0} s\n\n{}\n`kvant eval --kv FILE` says what each really costs, on a text of its own.\n",
        report.measured,
        report.taken_from_state,
        report.seconds,
        table.render()
    )
}
