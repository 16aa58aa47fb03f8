//! Times prefill and decoding of the real model, part by part.
//! Usage: decode_time [threads] [prompt tokens] [requests] [scheme] [steps].
use kvant_engine::{Arm, Engine, EngineOptions, Limits, LoadedModel, Products, Request, load_schemes};
use std::ops::ControlFlow::Continue;
use std::sync::Arc;
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |a| a.parse());
    let (threads, prompt, requests, steps) = (number(0, 2)?, number(1, 16)?, number(2, 1)?, number(4, 128)?);
    let scheme = args.get(3).map_or("k4v4g64w128s4p512", String::as_str);
    let path = std::env::var("KVANT_MODEL").unwrap_or("models/SmolLM2-135M-Instruct.Q4_1.gguf".into());
    let started = Instant::now();
    let loaded = Arc::new(LoadedModel::load(path.as_ref(), threads, Products::Quantized, &|_, _| {})?);
    println!("load {:.2} s", started.elapsed().as_secs_f64());
    let schemes = load_schemes(scheme, loaded.config().layers)?;
    let options = EngineOptions { threads, kernel: None, arm: Arm::Fused, schemes, limits: Limits::default() };
    let mut engine = Engine::new(loaded.clone(), options)?;
    let tokens = loaded.encode(&"The quick brown fox jumps over the lazy dog, and then it rests. ".repeat(prompt))?;
    for _ in 0..3 {
        let requests = (0..requests)
            .map(|i| Request { ignore_end: true, ..Request::greedy(tokens[i..prompt + i].to_vec(), steps) })
            .collect();
        let made = engine.generate(requests, &mut |_| Continue(()))?;
        let ttft = made.outcomes[0].ttft.as_secs_f64();
        println!(
            "{threads} threads, {} x {prompt} tokens, {scheme}, {}: prefill {:.0} tok/s, decode {:.1} tok/s, {:?}",
            made.outcomes.len(),
            engine.kernel(),
            prompt as f64 / ttft,
            made.decode.tok_s().unwrap_or(0.0),
            made.routes
        );
    }
    let peak = std::fs::read_to_string("/proc/self/status")?;
    println!("{}", peak.lines().find(|l| l.starts_with("VmHWM")).unwrap_or(""));
    Ok(())
}
