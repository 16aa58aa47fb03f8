//! Many requests of different lengths on a GPU, through the engine that `kvant serve` has. In: `SHAPE SCHEME REQUESTS MEMORY_BYTES`;
//! out: lines of figures: output tokens a second, time to the first token, time between tokens, and how many requests of 4,000 tokens
//! are in the cache at once.
//! NOT here: HTTP, text: random weights have no tokenizer.

use kvant_engine::cuda::{Shape, Weights};
use kvant_engine::{Arm, Engine, EngineOptions, Event, Limits, LoadedModel, Request, load_schemes};
use kvant_kv::cuda::Gpu;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Tokens of the requests that are counted.
const FIT: usize = 4000;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [shape, scheme, requests, memory] = &arguments[..] else {
        return Err("usage: SHAPE SCHEME REQUESTS MEMORY_BYTES".into());
    };
    let (requests, memory): (usize, usize) = (requests.parse()?, memory.parse()?);
    let shape = Shape::load(shape)?;
    println!("{requests} requests over {scheme}, {:.1} GB for the cache", memory as f64 / 1e9);
    let mut engine = engine(&shape, scheme, memory, requests)?;
    run(&mut engine, requests, shape.config.vocabulary)?;
    drop(engine);
    let mut engine = self::engine(&shape, scheme, memory, 1024)?;
    for _ in 0..1024 {
        engine.add(Request::greedy(tokens(16, 1, shape.config.vocabulary), FIT - 15))?;
    }
    engine.step()?;
    println!("in the cache at once: {} requests of {FIT} tokens", engine.status().running);
    Ok(())
}

fn engine(shape: &Shape, scheme: &str, memory: usize, most: usize) -> Outcome<Engine> {
    let gpu = Gpu::open(0)?;
    let weights = Weights::random(&gpu, shape, 7)?;
    let schemes = load_schemes(scheme, shape.config.layers)?;
    let arm = if scheme == "f16" { Arm::F16 } else { Arm::Fused };
    let limits = Limits { kv_memory: Some(memory), max_running: most, prompts_first: false, ..Limits::default() };
    let options = EngineOptions { threads: 1, kernel: None, arm, schemes, limits };
    Ok(Engine::on_card(Arc::new(LoadedModel::of_config(shape.config.clone())), weights, options)?)
}

fn tokens(count: usize, salt: u64, vocabulary: usize) -> Vec<u32> {
    let of = |i: u64| ((i + 1).wrapping_mul(salt + 77).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % vocabulary as u64;
    (0..count as u64).map(|i| of(i) as u32).collect()
}

fn run(engine: &mut Engine, requests: usize, vocabulary: usize) -> Outcome<()> {
    // Prompts of 256 to 4,096 tokens, answers of 128 to 512, in an order that mixes them.
    for i in 0..requests {
        let place = i * 37 % requests;
        let prompt = 256 + 3840 * place / requests.max(2).saturating_sub(1);
        let mut request =
            Request::greedy(tokens(prompt, i as u64, vocabulary), 128 + 384 * (i * 11 % requests) / requests);
        request.ignore_end = true;
        engine.add(request)?;
    }
    let started = Instant::now();
    let (mut first, mut last, mut between) = (Vec::new(), HashMap::new(), Vec::new());
    let mut output = 0usize;
    while !engine.idle() {
        for event in engine.step()? {
            match event {
                Event::Token { request, .. } => {
                    let now = started.elapsed().as_secs_f64() * 1e3;
                    output += 1;
                    match last.insert(request, now) {
                        None => first.push(now),
                        Some(before) => between.push(now - before),
                    }
                }
                Event::Failed { why, .. } => return Err(why.into()),
                _ => {}
            }
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let of = |name: &str, values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() - 1) as f64 * share) as usize];
        println!("{name}: median {:.1} ms, p95 {:.1} ms", at(0.5), at(0.95));
    };
    of("first token", &mut first);
    of("between tokens", &mut between);
    println!("output: {output} tokens in {seconds:.2} s, {:.0} tokens/s", output as f64 / seconds);
    Ok(())
}
