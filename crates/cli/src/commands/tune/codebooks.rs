//! `kvant tune --codebooks`: centroids of sub-vectors. In: a model, a calibration text, a scheme with `vq`; out: a scheme file
//! and, beside it, the safetensors file that it names.
//! NOT here: learning (the engine's tune room), the file's tensors (the engine's codebooks.rs).

use crate::args::TuneArgs;
use crate::failure::Failure;
use crate::{output, progress, session, text};
use anyhow::Result;
use kvant_engine::schemes::{is_file, parse_layer};
use kvant_engine::tune::centroids::{self, Progress};
use kvant_engine::{Products, Schemes, codebooks};
use kvant_kv::Codec;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

/// Tokens of the text that are followed unless told otherwise.
const TOKENS: usize = 8192;
/// Tokens of a chunk, where the model's context holds so many.
const CTX: usize = 2048;

#[derive(Debug, Serialize)]
struct Report {
    path: PathBuf,
    codebooks: PathBuf,
    codebook_bytes: usize,
    scheme: String,
    bits: f64,
    tokens: usize,
    ctx: usize,
    rows_per_head: usize,
    /// Codebooks there are: one per layer, kv head and tensor.
    heads: usize,
    seconds: f64,
}

/// Runs the command.
pub fn run(args: &TuneArgs) -> Result<()> {
    let threads = args.machine.threads()?;
    let (scheme, basis) = parse_layer(&args.kv).map_err(Failure::from)?;
    // With the rotation of a tensor that has no sub-vectors, if it is asked for.
    let scheme_text = Schemes::of_parts(vec![(scheme, basis)]).text(0);
    let packed = scheme.packed().copied().filter(|p| [p.k(), p.v()].iter().any(Codec::wants_codebooks));
    let Some(packed) = packed else {
        let what = format!("--kv {} has no sub-vectors, and --codebooks learns their centroids", args.kv);
        return Err(Failure::input(what, "give --kv such as kvq256x4vvq256x4g64w128s4p512").into());
    };
    if packed.loud() > 0 {
        let what = format!("--kv {} has loud channels, and --codebooks does not find out which these are", args.kv);
        return Err(Failure::input(what, "leave l2, l4 or l8 out").into());
    }
    if !is_file(&args.out.to_string_lossy()) {
        let what =
            format!("--out {} would be no scheme file for --kv: its name does not end in .toml", args.out.display());
        return Err(Failure::input(what, "name it something.toml").into());
    }
    let books_path = args.out.with_extension("safetensors");
    let written = [args.out.as_path(), &books_path];
    written.iter().try_for_each(|path| output::check_page(path))?;
    output::check_apart(&written, &[&args.text])?;
    if books_path.exists() && !args.out.exists() {
        // What lies there is not this command's: it writes the scheme file, too.
        let what = format!("{} is there already, and {} is not", books_path.display(), args.out.display());
        return Err(Failure::input(what, "give --out another name: the codebooks lie beside it").into());
    }
    let name = books_path.file_name().and_then(|name| name.to_str()).ok_or_else(|| {
        Failure::input(format!("--out {} is no UTF-8, and a scheme file is", args.out.display()), "name it otherwise")
    })?;
    let text = text::read(&args.text)?;
    let located = session::locate(&args.model)?;
    output::check_apart(&written, &[located.path()])?;
    let config = located.config.clone();
    let (layers, shape) = (config.layers, config.shape);
    let ctx = args.ctx.unwrap_or(CTX.min(config.context));
    text::check_ctx(ctx, &config)?;
    let text = text::tokens(&text, &located.tokenizer()?)?;
    let there = text.tokens.len();
    let tokens = match args.tokens {
        Some(asked) if asked > there => {
            let what = format!("{} has {there} tokens, and --tokens asks for {asked}", args.text.display());
            return Err(Failure::input(what, "give a longer --text, or fewer --tokens").into());
        }
        asked => &text.tokens[..asked.unwrap_or(TOKENS).min(there)],
    };
    check_rows(tokens.len(), ctx, &packed)?;
    text::check_memory(centroids::kept_bytes(layers, &shape, tokens.len()), &config, Products::default())?;
    let model_sha256 = text::sha256_of(located.path())?;

    let model = session::load(&located, threads)?;
    let started = Instant::now();
    let bars = Mutex::new((progress::tokens("follow the text", tokens.len() as u64), false));
    let on_progress = |what, done, all: usize| {
        let mut bars = bars.lock().unwrap_or_else(|e| e.into_inner());
        if what == Progress::Learned && !bars.1 {
            bars.0.finish_and_clear();
            *bars = (progress::percent("learn codebooks"), true);
            bars.0.set_length(all as u64);
        }
        bars.0.set_position(bars.0.position().max(done as u64));
    };
    let learned = centroids::learn(&model, tokens, ctx, packed, threads, &on_progress).map_err(Failure::from)?;
    bars.into_inner().unwrap_or_else(|e| e.into_inner()).0.finish_and_clear();
    let bytes = codebooks::file_bytes(learned.schemes.codebooks()).map_err(Failure::from)?;
    let books = learned.schemes.codebooks().iter().flatten();
    let report = Report {
        path: args.out.clone(),
        codebooks: books_path.clone(),
        codebook_bytes: bytes.len(),
        scheme: scheme_text,
        bits: scheme.bits_per_element(shape.head_dim),
        tokens: tokens.len(),
        ctx,
        rows_per_head: learned.rows,
        heads: books.map(|b| b.keys.len() + b.values.len()).sum(),
        seconds: started.elapsed().as_secs_f64(),
    };
    // The file that names the other one comes last.
    output::file(&books_path, &bytes)?;
    output::file(&args.out, scheme_file(args, &report, name, layers, (&model_sha256, &text.sha256)).as_bytes())?;
    if args.json { output::json(&report) } else { output::text("the summary", &render(&report)) }
}

/// As many rows as centroids at the least, and some behind the sinks.
fn check_rows(tokens: usize, ctx: usize, scheme: &kvant_kv::PackedScheme) -> Result<(), Failure> {
    let of = |codec| if let Codec::Vector { centroids, .. } = codec { centroids } else { 0 };
    let least = of(scheme.k()).max(of(scheme.v()));
    let (whole, rest) = (tokens / ctx, tokens % ctx);
    let rows = whole * ctx.saturating_sub(scheme.sinks()) + rest.saturating_sub(scheme.sinks());
    if rows >= least {
        return Ok(());
    }
    let what =
        format!("{tokens} tokens in chunks of {ctx} make {rows} rows, and {least} centroids want as many at least");
    Err(Failure::input(what, "give a longer --text, or more --tokens"))
}

/// The file that `--kv` reads.
fn scheme_file(
    args: &TuneArgs,
    report: &Report,
    books: &str,
    layers: usize,
    (model_sha256, text_sha256): (&str, &str),
) -> String {
    let named = match layers {
        1 => "0".to_string(),
        _ => format!("\"0-{}\"", layers - 1),
    };
    format!(
        "# Written by `kvant tune --codebooks --ctx {} --tokens {} --kv {}` {}.\n\
         # Model {} (sha256 {model_sha256}), calibrated on a text of sha256 {text_sha256}.\n\
         codebooks = {books:?}\n[layers]\n{named} = \"{}\"\n",
        report.ctx,
        report.tokens,
        report.scheme,
        env!("CARGO_PKG_VERSION"),
        Path::new(&args.model).file_name().unwrap_or_default().to_string_lossy(),
        report.scheme,
    )
}

fn render(report: &Report) -> String {
    format!(
        "{} codebooks of {} learned from {} rows each ({} tokens in chunks of {}), {:.0} s\n\
         {}: {:.4} bits a packed element\n{}: {} bytes\n\
         `kvant eval --kv {}` says what they cost, on a text of its own.\n",
        report.heads,
        report.scheme,
        report.rows_per_head,
        report.tokens,
        report.ctx,
        report.seconds,
        report.path.display(),
        report.bits,
        report.codebooks.display(),
        report.codebook_bytes,
        report.path.display(),
    )
}
