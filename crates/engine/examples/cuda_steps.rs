//! The model on a CUDA card, looked at from outside: how far it is from the CPU, and what a step takes.
//! In: `kld MODEL TEXT TOKENS SCHEME`, or `time SHAPE SCHEME BATCHxLEN,BATCHxLEN,..`; out: lines of figures. SCHEME `plain` is
//! the control of the model's tests, an f16 cache with a slow attention.
//! NOT here: what the program's own commands measure.

use kvant_engine::cuda::{Decoder, DecoderOptions, PlainCache, Shape, StepCache, Weights, bucket};
use kvant_engine::{
    Arm, Basis, Distribution, Engine, EngineOptions, Feed, Forced, Limits, LoadedModel, Products, Schemes, Source,
    load_schemes,
};
use kvant_kv::cuda::{Gpu, GpuCache, GpuOptions, OutFormat};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["kld", model, text, tokens, scheme] => kld(model, text, tokens.parse()?, scheme),
        ["time", shape, scheme, sizes] => {
            let size = |s: &str| -> Outcome<(usize, usize)> {
                let (batch, len) = s.split_once('x').ok_or("sizes are BATCHxLEN")?;
                Ok((batch.parse()?, len.parse()?))
            };
            time(shape, scheme, &sizes.split(',').map(size).collect::<Result<Vec<_>, _>>()?)
        }
        _ => Err("usage: kld MODEL TEXT TOKENS SCHEME | time SHAPE SCHEME BATCHxLEN,..".into()),
    }
}

fn plain(weights: Weights, slots: usize, tokens: usize, gpu: &Arc<Gpu>) -> Outcome<Decoder<PlainCache>> {
    let config = weights.config().clone();
    let cache = PlainCache::new(gpu, config.layers, config.shape, (slots, tokens), 2048)?;
    let options = DecoderOptions { most_batch: slots, invariant: false };
    Ok(Decoder::new(weights, cache, &vec![Basis::default(); config.layers], options)?)
}

fn packed(weights: Weights, scheme: &str, slots: usize, tokens: usize, gpu: &Arc<Gpu>) -> Outcome<Decoder<GpuCache>> {
    let config = weights.config().clone();
    let schemes: Schemes = load_schemes(scheme, config.layers)?;
    let layers: Vec<_> = schemes.layers().iter().enumerate().map(|(i, s)| config.layer(i, *s)).collect();
    let arm = if scheme == "f16" { Arm::F16 } else { Arm::Fused };
    let bytes = gpu.memory()?.0 / 10 * 8;
    let slots = bucket(slots).ok_or("too many rows")?;
    let options =
        GpuOptions { slots, max_tokens: tokens, bytes, out: OutFormat::Bf16, softcap: None, invariant: false };
    let cache = GpuCache::new(gpu, &layers, arm, options)?;
    let options = DecoderOptions { most_batch: slots, invariant: false };
    Ok(Decoder::new(weights, cache, schemes.bases(), options)?)
}

/// Teacher-forced over a text: each position's prediction against the CPU's, both over the same kind of cache.
fn kld(model: &str, text: &str, count: usize, scheme: &str) -> Outcome<()> {
    let gpu = Gpu::open(0)?;
    let threads = std::thread::available_parallelism()?.get();
    let on_cpu = if scheme == "plain" { "f16" } else { scheme };
    let mut references: Vec<Vec<Vec<f32>>> = Vec::new();
    let mut tokens = Vec::new();
    for products in [Products::Exact, Products::Quantized] {
        let loaded = Arc::new(LoadedModel::load(Path::new(model), threads, products, &|_, _| {})?);
        tokens = loaded.encode(&std::fs::read_to_string(text)?)?;
        tokens.truncate(count);
        let schemes = load_schemes(on_cpu, loaded.config().layers)?;
        let arm = if on_cpu == "f16" { Arm::F16 } else { Arm::Fused };
        let options = EngineOptions { threads, kernel: None, arm, schemes, limits: Limits::default() };
        let mut rows = Vec::new();
        let mut keep = |_: usize, _: usize, logits: &[f32]| {
            rows.push(logits.to_vec());
            Ok(())
        };
        let texts = [Forced { tokens: &tokens, prompt: 0 }];
        Engine::new(loaded, options)?.follow(&texts, Feed::Prefill, &mut keep)?;
        references.push(rows);
    }
    let started = Instant::now();
    let weights = Weights::load(&gpu, &Source::open(Path::new(model))?, &|_, _| {})?;
    let (bytes, seconds) = (weights.bytes() / 1_000_000, started.elapsed().as_secs_f64());
    println!("{}: {bytes} MB of weights in {seconds:.1} s", gpu.name());
    if scheme == "plain" {
        let mut decoder = plain(weights, 2, tokens.len(), &gpu)?;
        compare(&mut decoder, 0, &tokens, &references)?;
        decoder.prefill(1, &tokens)?;
        let chunk = Distribution::of(&decoder.logits(0)?);
        let off = Distribution::of(&references[1][tokens.len() - 1]).kld(&chunk);
        println!("{scheme}: as chunks, last token: {off:.2e}");
        return Ok(());
    }
    let mut decoder = packed(weights, scheme, 1, tokens.len(), &gpu)?;
    let slot = decoder.cache_mut().add(tokens.len())?;
    println!("{scheme}:");
    compare(&mut decoder, slot, &tokens, &references)
}

fn compare<C: StepCache>(
    decoder: &mut Decoder<C>,
    slot: usize,
    tokens: &[u32],
    references: &[Vec<Vec<f32>>],
) -> Outcome<()> {
    let mut same = 0;
    let mut sums = [0f64; 3];
    for (i, &token) in tokens.iter().enumerate() {
        let chosen = decoder.decode(&[(slot, token)])?.remove(0)?;
        let card = Distribution::of(&decoder.logits(0)?);
        let [exact, quantized] = [0, 1].map(|p| Distribution::of(&references[p][i]));
        let best = references[1][i].iter().copied().fold(f32::NEG_INFINITY, f32::max);
        same += usize::from(references[1][i][chosen as usize] == best);
        sums[0] += quantized.kld(&card);
        sums[1] += exact.kld(&card);
        sums[2] += exact.kld(&quantized);
    }
    let n = tokens.len() as f64;
    let [cpu, exact, of_cpu] = sums.map(|sum| sum / n);
    println!("{n} tokens: mean KLD of the card from the CPU {cpu:.2e}, from f32 products {exact:.2e}");
    println!("of the CPU from f32 products {of_cpu:.2e}; same choice as the CPU {:.2} %", 100.0 * same as f64 / n);
    Ok(())
}

/// Times of steps of random weights over contents that nobody wrote.
fn time(shape: &str, scheme: &str, sizes: &[(usize, usize)]) -> Outcome<()> {
    let gpu = Gpu::open(0)?;
    let shape = Shape::load(shape)?;
    let most = sizes.iter().map(|s| s.0).max().unwrap_or(1);
    let started = Instant::now();
    let weights = Weights::random(&gpu, &shape, 1)?;
    println!("{} MB of random weights in {:.1} s", weights.bytes() / 1_000_000, started.elapsed().as_secs_f64());
    let longest = sizes.iter().map(|s| s.1).max().unwrap_or(0) + 64;
    if scheme == "plain" {
        let mut decoder = plain(weights, most, longest, &gpu)?;
        for &(batch, len) in sizes {
            let tokens: Vec<u32> = (0..len as u32).map(|i| i * 7919 % shape.config.vocabulary as u32).collect();
            for slot in 0..batch {
                decoder.cache_mut().clear(slot);
                let started = Instant::now();
                decoder.prefill(slot, &tokens)?;
                if slot < 2 {
                    println!("prompt of {len}: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
                }
            }
            steps(&mut decoder, &(0..batch).collect::<Vec<_>>(), len)?;
        }
        return Ok(());
    }
    let mut decoder = packed(weights, scheme, most, longest, &gpu)?;
    for &(batch, len) in sizes {
        let cache = decoder.cache_mut();
        let mut slots = Vec::new();
        for _ in 0..batch {
            let slot = cache.add(len + 64)?;
            cache.set_len(slot, len)?;
            slots.push(slot);
        }
        steps(&mut decoder, &slots, len)?;
        slots.into_iter().try_for_each(|slot| decoder.cache_mut().remove(slot))?;
    }
    Ok(())
}

fn steps<C: StepCache>(decoder: &mut Decoder<C>, slots: &[usize], len: usize) -> Outcome<()> {
    let (batch, started) = (slots.len(), Instant::now());
    decoder.prepare(batch)?;
    let chosen = started.elapsed().as_secs_f64() * 1e3;
    let rows: Vec<(usize, u32)> = slots.iter().map(|&slot| (slot, slot as u32)).collect();
    let mut times = Vec::new();
    for _ in 0..33 {
        let started = Instant::now();
        decoder.decode(&rows)?.into_iter().collect::<Result<Vec<_>, _>>()?;
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    times.drain(..3);
    times.sort_by(f64::total_cmp);
    println!(
        "{batch}x{len}: a step takes {:.3} ms (median), {:.3} least; choosing took {chosen:.0} ms",
        times[15], times[0]
    );
    let size = bucket(batch).unwrap_or(0);
    for c in decoder.choices().iter().filter(|c| c.rows == size && chosen > 1.0) {
        println!("  {:8} {:3} rows: {:12} {:8.2} us {:6.0} GB/s", c.product, c.rows, c.route, c.time_ns / 1e3, c.gbps);
    }
    Ok(())
}
