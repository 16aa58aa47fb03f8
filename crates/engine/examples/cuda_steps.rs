//! The model on a CUDA card, looked at from outside: how far it is from the CPU, and what a step takes.
//! In: `kld MODEL TEXT TOKENS`, or `time SHAPE PROMPT BATCH,BATCH,..`; out: lines of figures.
//! NOT here: attention over packed caches: both run over the control's plain one (of the times it is named apart).

use kvant_engine::cuda::{Decoder, DecoderOptions, PlainCache, Shape, Weights};
use kvant_engine::{
    Arm, Basis, Distribution, Engine, EngineOptions, Feed, Forced, Limits, LoadedModel, Products, Source, load_schemes,
};
use kvant_kv::cuda::Gpu;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["kld", model, text, tokens] => kld(model, text, tokens.parse()?),
        ["time", shape, prompt, batches] => {
            let batches = batches.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
            time(shape, prompt.parse()?, &batches)
        }
        _ => Err("usage: kld MODEL TEXT TOKENS | time SHAPE PROMPT BATCH,BATCH,..".into()),
    }
}

fn decoder(weights: Weights, slots: usize, tokens: usize, gpu: &Arc<Gpu>) -> Outcome<Decoder<PlainCache>> {
    let config = weights.config().clone();
    let cache = PlainCache::new(gpu, config.layers, config.shape, (slots, tokens), 2048)?;
    let options = DecoderOptions { most_batch: slots, invariant: false };
    Ok(Decoder::new(weights, cache, &vec![Basis::default(); config.layers], options)?)
}

/// Teacher-forced over a text: each position's prediction against the CPU's, both over an f16 cache.
fn kld(model: &str, text: &str, count: usize) -> Outcome<()> {
    let gpu = Gpu::open(0)?;
    let threads = std::thread::available_parallelism()?.get();
    let mut means = Vec::new();
    let mut per_products: Vec<Vec<Vec<f32>>> = Vec::new();
    let mut tokens = Vec::new();
    for products in [Products::Exact, Products::Quantized] {
        let loaded = Arc::new(LoadedModel::load(Path::new(model), threads, products, &|_, _| {})?);
        tokens = loaded.encode(&std::fs::read_to_string(text)?)?;
        tokens.truncate(count);
        let schemes = load_schemes("f16", loaded.config().layers)?;
        let options = EngineOptions { threads, kernel: None, arm: Arm::F16, schemes, limits: Limits::default() };
        let mut rows = Vec::new();
        let mut keep = |_: usize, _: usize, logits: &[f32]| {
            rows.push(logits.to_vec());
            Ok(())
        };
        let texts = [Forced { tokens: &tokens, prompt: 0 }];
        Engine::new(loaded, options)?.follow(&texts, Feed::Prefill, &mut keep)?;
        per_products.push(rows);
    }
    let started = Instant::now();
    let weights = Weights::load(&gpu, &Source::open(Path::new(model))?, &|_, _| {})?;
    println!(
        "{}: {} MB of weights in {:.1} s",
        gpu.name(),
        weights.bytes() / 1_000_000,
        started.elapsed().as_secs_f64()
    );
    let mut decoder = decoder(weights, 2, tokens.len(), &gpu)?;
    let mut same = 0;
    let mut sums = [0f64; 3];
    for (i, &token) in tokens.iter().enumerate() {
        let chosen = decoder.decode(&[(0, token)])?.remove(0)?;
        let card = Distribution::of(&decoder.logits(0)?);
        let [exact, quantized] = [0, 1].map(|p| Distribution::of(&per_products[p][i]));
        let best = per_products[1][i].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        same += usize::from(per_products[1][i][chosen as usize] == best);
        sums[0] += quantized.kld(&card);
        sums[1] += exact.kld(&card);
        sums[2] += exact.kld(&quantized);
    }
    let n = tokens.len() as f64;
    means.extend(sums.map(|sum| sum / n));
    println!(
        "{} tokens: mean KLD of the card from the CPU {:.2e}, from f32 products {:.2e}",
        tokens.len(),
        means[0],
        means[1]
    );
    println!("of the CPU from f32 products {:.2e}; same choice as the CPU {:.2} %", means[2], 100.0 * same as f64 / n);
    decoder.prefill(1, &tokens)?;
    let chunk = Distribution::of(&decoder.logits(0)?);
    println!("as chunks, last token: {:.2e}", Distribution::of(&per_products[1][tokens.len() - 1]).kld(&chunk));
    Ok(())
}

/// Times of steps of random weights, of which attention over the control's cache is a part.
fn time(shape: &str, prompt: usize, batches: &[usize]) -> Outcome<()> {
    let gpu = Gpu::open(0)?;
    let most = batches.iter().copied().max().unwrap_or(1);
    let started = Instant::now();
    let weights = Weights::random(&gpu, &Shape::load(shape)?, 1)?;
    let (bytes, vocabulary) = (weights.bytes(), weights.config().vocabulary as u32);
    println!("{}: {} MB of weights in {:.1} s", gpu.name(), bytes / 1_000_000, started.elapsed().as_secs_f64());
    let mut decoder = decoder(weights, most, prompt + 512, &gpu)?;
    let tokens: Vec<u32> = (0..prompt as u32).map(|i| i * 7919 % vocabulary).collect();
    for slot in 0..most {
        let started = Instant::now();
        decoder.prefill(slot, &tokens)?;
        if slot < 2 {
            println!("prompt of {prompt}: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
        }
    }
    for &batch in batches {
        let started = Instant::now();
        decoder.prepare(batch)?;
        println!("choosing products of {batch} rows: {:.0} ms", started.elapsed().as_secs_f64() * 1e3);
        let rows: Vec<(usize, u32)> = (0..batch).map(|slot| (slot, slot as u32)).collect();
        let mut times = Vec::new();
        for _ in 0..30 {
            let started = Instant::now();
            decoder.decode(&rows)?.into_iter().collect::<Result<Vec<_>, _>>()?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
        }
        times.drain(..3);
        times.sort_by(f64::total_cmp);
        println!("batch {batch}: a step takes {:.3} ms (median), {:.3} least", times[times.len() / 2], times[0]);
        for c in decoder.choices().iter().filter(|c| c.rows == batch) {
            println!(
                "  {:8} {:3} rows: {:12} {:8.2} us {:6.0} GB/s",
                c.product,
                c.rows,
                c.route,
                c.time_ns / 1e3,
                c.gbps
            );
        }
    }
    Ok(())
}
