//! Tests of the model on a card. In: golden models and random ones; out: failures. Without a card each says that it skips, and
//! fails if REQUIRE_GPU is set; kernels are compiled for all architectures wherever NVRTC is (REQUIRE_NVRTC).
//! NOT here: attention over packed caches (kvant-kv).

use super::{Decoder, DecoderOptions, PlainCache, Shape, Weights, programs};
use crate::model::Turn;
use crate::{Arm, Basis, Error, Source, load_schemes};
use kvant_kv::attend::reference::relative_error;
use kvant_kv::cuda::{ARCHITECTURES, Gpu, GpuCache, GpuOptions, OutFormat, compiler_version};
use rayon::prelude::*;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn card(test: &str) -> Option<Arc<Gpu>> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(e) => {
            assert!(std::env::var_os("REQUIRE_GPU").is_none(), "REQUIRE_GPU is set, and {e}");
            println!("skipped: {test}: {e}");
            None
        }
    }
}

fn decoder(
    weights: Weights,
    basis: &Basis,
    (slots, tokens): (usize, usize),
    most_batch: usize,
    invariant: bool,
) -> Decoder<PlainCache> {
    let config = weights.config().clone();
    let cache = PlainCache::new(&weights.gpu, config.layers, config.shape, (slots, tokens), 2048).unwrap();
    Decoder::new(weights, cache, &vec![basis.clone(); config.layers], DecoderOptions { most_batch, invariant }).unwrap()
}

/// A model whose few rows take few.cu, and others the library.
fn random(gpu: &Arc<Gpu>) -> Weights {
    let text = "architecture = 'qwen3'\nlayers = 3\nhidden = 256\nq_heads = 4\nkv_heads = 2\nhead_dim = 64\n\
                feed_forward = 448\nvocabulary = 1000\ncontext = 512\n";
    Weights::random(gpu, &Shape::parse(text, "random").unwrap(), 7).unwrap()
}

#[test]
fn every_program_compiles_for_every_architecture_within_its_registers() {
    if let Err(e) = compiler_version() {
        assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set, and {e}");
        println!("skipped: compiling kernels: {e}");
        return;
    }
    let programs = programs();
    let cases: Vec<_> = programs.iter().flat_map(|p| ARCHITECTURES.map(|a| (p, a))).collect();
    let wrong: Vec<String> = cases.par_iter().filter_map(|(p, a)| p.check(a).err().map(|e| e.to_string())).collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models")
}

fn golden(name: &str) -> (Vec<u32>, Vec<Vec<f64>>) {
    let bytes = std::fs::read(models().join("golden.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let words = |key: &str| -> Vec<[u8; 4]> { all.tensor(key).unwrap().data().as_chunks::<4>().0.to_vec() };
    let key = format!("{name}.logits_f16");
    let width = all.tensor(&key).unwrap().shape()[1];
    let tokens = words(&format!("{name}.tokens")).into_iter().map(u32::from_le_bytes).collect();
    let logits: Vec<f64> = words(&key).into_iter().map(|w| f64::from(f32::from_le_bytes(w))).collect();
    (tokens, logits.chunks_exact(width).map(<[f64]>::to_vec).collect())
}

/// Tiny models against the logits of transformers, token by token and as one chunk, plainly and with every rotation, which
/// exact arithmetic would not notice.
#[test]
fn golden_logits_on_the_card() {
    let Some(gpu) = card("golden logits") else { return };
    let turned = Basis { keys: Turn::Plain, values: Turn::Signed, ..Basis::default() };
    for name in ["llama", "llama3", "qwen2", "qwen3"] {
        let (tokens, want) = golden(name);
        for (basis, bound) in [(&Basis::default(), 2e-2), (&turned, 3e-2)] {
            let source = Source::open(&models().join(name)).unwrap();
            let weights = Weights::load(&gpu, &source, &|_, _| {}).unwrap();
            let mut decoder = decoder(weights, basis, (2, tokens.len() + 1), 4, false);
            let mut got = Vec::new();
            let mut chosen = Vec::new();
            for &token in &tokens {
                chosen.push(decoder.decode(&[(0, token)]).unwrap().remove(0).unwrap());
                got.push(decoder.logits(0).unwrap());
            }
            let off = |(got, want): (&Vec<f32>, &Vec<f64>)| relative_error(got, want);
            let last = &got[got.len() - want.len()..];
            let worst = last.iter().zip(&want).map(off).fold(0.0, |a, e| if e > a || e.is_nan() { e } else { a });
            let next = decoder.prefill(1, &tokens).unwrap();
            let prefilled = off((&decoder.logits(0).unwrap(), want.last().unwrap()));
            println!(
                "{name} {:?}: worst relative error of a row {worst:.1e}, as one chunk {prefilled:.1e}",
                basis.values
            );
            assert!(worst <= bound && prefilled <= bound, "{name} {basis:?}: {worst:.1e} {prefilled:.1e}");
            for (token, logits) in chosen.into_iter().chain([next]).zip(got.iter().chain([&decoder.logits(0).unwrap()]))
            {
                let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(
                    logits.iter().position(|&l| l == best),
                    Some(token as usize),
                    "{name}: the likeliest is chosen"
                );
            }
        }
    }
}

/// In the invariant mode bit by bit what the row gives alone; otherwise near it: the library's ways sum in other orders.
#[test]
fn a_row_among_others_is_the_row_alone() {
    let Some(gpu) = card("rows among others") else { return };
    let token = |slot: usize, step: usize| (slot * 131 + step * 17) as u32 % 1000;
    for invariant in [true, false] {
        let mut decoder = decoder(random(&gpu), &Basis::default(), (16, 64), 16, invariant);
        let mut alone = Vec::new();
        for step in 0..5 {
            decoder.decode(&[(0, token(3, step))]).unwrap().remove(0).unwrap();
            alone.push(decoder.logits(0).unwrap());
        }
        for (slots, row) in [(vec![4, 3], 1), (vec![3, 1, 2, 4, 5, 6, 7, 8], 0), ((1..13).collect::<Vec<_>>(), 2)] {
            (1..16).for_each(|slot| decoder.cache_mut().clear(slot));
            for (step, alone) in alone.iter().enumerate() {
                let rows: Vec<(usize, u32)> = slots.iter().map(|&slot| (slot, token(slot, step))).collect();
                let outcomes = decoder.decode(&rows).unwrap();
                assert!(outcomes.iter().all(Result::is_ok));
                let got = decoder.logits(row).unwrap();
                let same = got.iter().zip(alone).all(|(a, b)| a.to_bits() == b.to_bits());
                let want: Vec<f64> = alone.iter().map(|&x| f64::from(x)).collect();
                let off = relative_error(&got, &want);
                assert!(same || !invariant, "{} rows, step {step}: {off:.1e}", slots.len());
                assert!(off <= 2e-2, "{} rows, step {step}: {off:.1e}", slots.len());
                println!("invariant {invariant}, {} rows, step {step}: {off:.1e} from the row alone", slots.len());
            }
        }
        println!(
            "{:?}",
            decoder.choices().iter().map(|c| format!("{} {}: {}", c.product, c.rows, c.route)).collect::<Vec<_>>()
        );
    }
}

#[test]
fn chunks_of_a_prompt_agree_with_its_tokens() {
    let Some(gpu) = card("chunks of a prompt") else { return };
    let mut decoder = decoder(random(&gpu), &Basis::default(), (3, 3000), 2, false);
    let tokens: Vec<u32> = (0..2100).map(|i| i * 37 % 1000).collect();
    decoder.prefill(0, &tokens).unwrap();
    let whole: Vec<f64> = decoder.logits(0).unwrap().into_iter().map(f64::from).collect();
    decoder.prefill(1, &tokens[..1000]).unwrap();
    decoder.prefill(1, &tokens[1000..2095]).unwrap();
    for &token in &tokens[2095..] {
        decoder.decode(&[(1, token)]).unwrap().remove(0).unwrap();
    }
    let off = relative_error(&decoder.logits(0).unwrap(), &whole);
    println!("chunks against tokens: {off:.1e}");
    assert!(off <= 2e-2, "{off:.1e}");
}

/// kvant-kv's cache under the same model: plain, and packed in 8 bits with and without rotated values.
#[test]
fn packed_caches_are_near_the_plain_one() {
    let Some(gpu) = card("packed caches") else { return };
    let tokens: Vec<u32> = (0..300).map(|i| i * 37 % 1000).collect();
    let mut plain = decoder(random(&gpu), &Basis::default(), (1, 300), 1, false);
    let logits =
        |decoder: &Decoder<PlainCache>| -> Vec<f64> { decoder.logits(0).unwrap().into_iter().map(f64::from).collect() };
    let mut want = Vec::new();
    for &token in &tokens {
        plain.decode(&[(0, token)]).unwrap().remove(0).unwrap();
        want.push(logits(&plain));
    }
    for (scheme, bound) in
        [("f16", 1e-2), ("k8v8g64w128s4", 5e-2), ("k8v8g64w128s4p512.rotv", 5e-2), ("k8v8g64.rotk", 5e-2)]
    {
        let weights = random(&gpu);
        let config = weights.config().clone();
        let schemes = load_schemes(scheme, config.layers).unwrap();
        let layers: Vec<_> = schemes.layers().iter().enumerate().map(|(i, s)| config.layer(i, *s)).collect();
        let arm = if scheme == "f16" { Arm::F16 } else { Arm::Fused };
        let options = GpuOptions {
            slots: 1,
            max_tokens: 300,
            bytes: 64 << 20,
            out: OutFormat::Bf16,
            softcap: None,
            invariant: false,
        };
        let mut cache = GpuCache::new(&gpu, &layers, arm, options).unwrap();
        let slot = cache.add(300).unwrap();
        let options = DecoderOptions { most_batch: 1, invariant: false };
        let mut decoder = Decoder::new(weights, cache, schemes.bases(), options).unwrap();
        let mut worst = 0f64;
        for (&token, want) in tokens.iter().zip(&want) {
            decoder.decode(&[(slot, token)]).unwrap().remove(0).unwrap();
            let off = relative_error(&decoder.logits(0).unwrap(), want);
            worst = if off > worst || off.is_nan() { off } else { worst };
        }
        println!("{scheme}: worst relative error of a row {worst:.1e} against the plain cache");
        assert!(worst <= bound, "{scheme}: {worst:.1e}");
    }
}

#[test]
fn keys_that_f16_cannot_hold_are_named() {
    let Some(gpu) = card("lost keys") else { return };
    let mut weights = random(&gpu);
    // Keys have norms of their own behind this one; values have not.
    weights.layers[1].attention_norm = gpu.upload(&[1e7f32; 256]).unwrap();
    let mut decoder = decoder(weights, &Basis::default(), (2, 64), 2, false);
    for outcome in decoder.decode(&[(0, 1), (1, 2)]).unwrap() {
        let why = outcome.unwrap_err().to_string();
        assert!(why.contains("V has a value") && why.contains("layer 1") && why.contains("token 0"), "{why}");
    }
    let why = decoder.prefill(1, &[5, 6]).unwrap_err().to_string();
    assert!(why.contains("layer 1") && why.contains("token 1"), "{why}");
    let mut weights = random(&gpu);
    weights.norm = gpu.upload(&[f32::NAN; 256]).unwrap();
    let mut decoder = self::decoder(weights, &Basis::default(), (2, 64), 2, false);
    let outcome = decoder.decode(&[(0, 1)]).unwrap().remove(0);
    assert!(matches!(outcome, Err(Error::NanLogit { token: 0, position: 0 })), "{outcome:?}");
    assert!(matches!(decoder.decode(&[(0, 1000)]), Err(Error::NoSuchToken { token: 1000, .. })));
}

#[test]
fn random_weights_follow_from_the_seed() {
    let Some(gpu) = card("random weights") else { return };
    let read = |w: &Weights| gpu.stream().clone_dtoh(&w.layers[2].down).unwrap();
    let values: Vec<f64> = read(&random(&gpu)).iter().map(|x| f64::from(x.to_f32())).collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt();
    let want = 448f64.sqrt().recip();
    assert!(mean.abs() < want * 1e-2 && (deviation / want - 1.0).abs() < 2e-2, "{mean} {deviation} {want}");
    assert_eq!(read(&random(&gpu)), read(&random(&gpu)));
    let first = gpu.stream().clone_dtoh(&random(&gpu).layers[0].down).unwrap();
    assert_ne!(first, read(&random(&gpu)));
}
