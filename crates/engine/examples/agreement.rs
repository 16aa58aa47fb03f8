//! How far fused attention is from dequant-step, and from the portable fused kernel, on the real model, per kernel and
//! scheme (teacher-forced, 96 steps): docs/decisions/0006-agreement-over-one-cache.md.
//! Usage: agreement SCHEME...
use kvant_engine::{
    Arm, Distribution, Engine, EngineOptions, Feed, Forced, Limits, LoadedModel, Products, load_schemes,
};
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::var("KVANT_MODEL").unwrap_or("models/SmolLM2-135M-Instruct.Q4_1.gguf".into());
    let loaded = Arc::new(LoadedModel::load(path.as_ref(), 2, Products::Quantized, &|_, _| {})?);
    let text = concat!(include_str!("../../../demo/3-recipe.txt"), include_str!("../../../demo/4-log.txt"));
    let tokens = loaded.encode(text)?;
    let (prompt, steps) = (330, 96);
    for scheme in std::env::args().skip(1) {
        let schemes = load_schemes(&scheme, loaded.config().layers)?;
        let follow = |arm, kernel: &str| -> Result<Vec<Distribution>, kvant_engine::Error> {
            let options = EngineOptions {
                threads: 2,
                kernel: Some(kernel.into()),
                arm,
                schemes: schemes.clone(),
                limits: Limits::default(),
            };
            let mut all = Vec::new();
            let text = [Forced { tokens: &tokens[..prompt + steps], prompt }];
            Engine::new(loaded.clone(), options)?.follow(&text, Feed::Decode, &mut |_, _, l| {
                all.push(Distribution::of(l));
                Ok(())
            })?;
            Ok(all)
        };
        let kernels: Vec<&str> =
            kvant_kv::attend::kernels().into_iter().filter(|(_, runs)| runs.is_ok()).map(|(name, _)| name).collect();
        let portable = follow(Arm::Fused, "portable")?;
        for kernel in &kernels {
            let (step, fused) = (follow(Arm::DequantStep, kernel)?, follow(Arm::Fused, kernel)?);
            for (name, reference) in [("dequant-step", &step), ("portable fused", &portable)] {
                let klds: Vec<f64> = reference.iter().zip(&fused).map(|(p, q)| p.kld(q)).collect();
                let (mean, worst) =
                    (klds.iter().sum::<f64>() / klds.len() as f64, klds.iter().copied().fold(0.0, f64::max));
                println!("{scheme} {kernel} against {name}: mean KLD {mean:.2e}, worst {worst:.2e}");
            }
        }
    }
    Ok(())
}
