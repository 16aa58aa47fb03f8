//! Codecs beside groups, over a tiny model: caches near f16's where their rotations and codebooks are the right ones, and visibly not
//! where they are others; files of codebooks, saved prompts.

mod tiny_model;

use kvant_engine::codebooks::file_bytes;
use kvant_engine::tune::centroids::{self, Learned};
use kvant_engine::{
    Arm, Engine, EngineOptions, Error, Feed, Forced, Limits, LoadedModel, Products, Request, Schemes, load_schemes,
};
use kvant_kv::attend::reference::relative_error;
use std::ops::ControlFlow::Continue;
use std::path::Path;
use std::sync::Arc;
use tiny_model::Tiny;

/// A model whose layers differ as those of trained ones do: in each other channels of values are loud.
fn model(folder: &Path) -> Arc<LoadedModel> {
    let tiny = Tiny { layers: 3, ..Tiny::default() };
    let mut parts = tiny.parts();
    for layer in 0..tiny.layers {
        let name = format!("blk.{layer}.attn_v.weight");
        let mut rows = parts.values(&name);
        for (channel, row) in rows.chunks_exact_mut(tiny.hidden).enumerate() {
            let factor = if (channel / 4 + layer).is_multiple_of(3) { 1.5 } else { 0.2 };
            row.iter_mut().for_each(|x| *x *= factor);
        }
        parts.replace(&name, &[tiny.kv_heads * tiny.head_dim, tiny.hidden], rows);
    }
    let path = parts.write(folder, "tiny.gguf");
    Arc::new(LoadedModel::load(&path, 2, Products::Exact, &|_, _| {}).unwrap())
}

fn engine(loaded: &Arc<LoadedModel>, schemes: Schemes, arm: Arm) -> Result<Engine, Error> {
    let limits = Limits::default();
    Engine::new(loaded.clone(), EngineOptions { threads: 2, kernel: None, arm, schemes, limits })
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + seed * 101 + i * i * 7) % 256) as u32).collect()
}

fn logits(engine: &mut Engine) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let text = tokens(400, 9);
    let on_logits = &mut |_, _, l: &[f32]| {
        all.push(l.to_vec());
        Ok(())
    };
    engine.follow(&[Forced { tokens: &text, prompt: 0 }], Feed::Prefill, on_logits).unwrap();
    all
}

/// Mean distance of a cache's logits from f16's: errors of a model without training grow along the text, and the worst is chance.
fn off(loaded: &Arc<LoadedModel>, schemes: Schemes, plain: &[Vec<f32>]) -> f64 {
    let got = logits(&mut engine(loaded, schemes, Arm::Fused).unwrap());
    let wide = |x: &[f32]| x.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    got.iter().zip(plain).map(|(got, want)| relative_error(got, &wide(want))).sum::<f64>() / got.len() as f64
}

fn learn(loaded: &LoadedModel, scheme: &str) -> Learned {
    // Other texts than the one that is followed.
    let text: Vec<u32> = (20..28).flat_map(|seed| tokens(400, seed)).collect();
    let scheme: kvant_kv::Scheme = scheme.parse().unwrap();
    centroids::learn(loaded, &text, 400, *scheme.packed().unwrap(), 2, &|_, done, all| assert!(done <= all)).unwrap()
}

#[test]
fn codecs_are_near_f16_with_their_own_rotations_and_codebooks_and_not_with_others() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = model(folder.path());
    let of = |kv: &str| load_schemes(kv, 3).unwrap();
    let plain = logits(&mut engine(&loaded, of("f16"), Arm::F16).unwrap());
    let named = |kv: &str| off(&loaded, of(kv), &plain);
    let (four, two) = (named("k4v4g64w32s4"), named("k2v2g64w32s4"));
    for kv in ["ktq4vtq4g64w32s4", "ksb4vsb4g64w32s4", "krvq22vrvq22g64w32s4"] {
        let found = named(kv);
        assert!(found > 0.0 && found < 1.5 * four, "{kv}: {found}, 4 bits in groups: {four}");
    }
    let mixed = learn(&loaded, "ktq4vvq256x4g64w32s4");
    assert_eq!(mixed.schemes.to_string(), "ktq4vvq256x4g64w32s4");
    assert_eq!(mixed.rows, 8 * 396);
    let learned = learn(&loaded, "kvq256x4vvq256x4g64w32s4").schemes;
    let right = off(&loaded, learned.clone(), &plain);
    assert!(off(&loaded, mixed.schemes, &plain) < right, "keys of 4 bits beat keys of 2");
    let books = learned.codebooks().to_vec();
    let turned = [1, 2, 0].map(|layer: usize| books[layer].clone()).to_vec();
    let wrong = off(&loaded, learned.clone().with_codebooks(turned), &plain);
    assert!(right < two, "learned centroids: {right}, 2 bits in groups: {two}");
    assert!(wrong > 1.2 * right, "those of another layer: {wrong}, its own: {right}");

    // From a file they are the same; without one nothing is decoded.
    let file = folder.path().join("vq.toml");
    std::fs::write(folder.path().join("vq.safetensors"), file_bytes(&books).unwrap()).unwrap();
    let text = "codebooks = \"vq.safetensors\"\ndefault = \"kvq256x4vvq256x4g64w32s4\"\n";
    std::fs::write(&file, text).unwrap();
    let read = of(file.to_str().unwrap());
    assert_eq!(read, learned);
    assert_eq!(off(&loaded, read, &plain), right);
    let e = engine(&loaded, of("kvq256x4vvq256x4g64w32s4"), Arm::Fused).err().unwrap();
    assert!(matches!(e, Error::NoCodebooks { layer: 0, .. }), "{e}");
    // The arm that keeps f16 stores no scheme and needs none.
    assert!(engine(&loaded, of("kvq256x4vvq256x4g64w32s4"), Arm::F16).is_ok());
}

/// The bases are part of what a saved prompt is of: centroids and smoothing as much as the scheme.
#[test]
fn a_saved_prompt_is_refused_under_other_codebooks_or_smoothing() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = model(folder.path());
    let learned = learn(&loaded, "kvq16x8vvq16x8g32w32s4").schemes;
    let path = folder.path().join("prompt");
    let text = tokens(200, 3);
    let mut saving = engine(&loaded, learned.clone(), Arm::Fused).unwrap();
    saving.save_prompt(&text, &path).unwrap();
    let asked = Request { ignore_end: true, ..Request::greedy(text.clone(), 20) };
    let made = |engine: &mut Engine| {
        engine.generate_from_session(asked.clone(), &mut |_| Continue(())).unwrap().outcomes.remove(0).tokens
    };
    let said = made(&mut saving);
    let mut same = engine(&loaded, learned.clone(), Arm::Fused).unwrap();
    same.restore_prompt(&path).unwrap();
    assert_eq!(made(&mut same), said);
    let change = |change: &dyn Fn(&mut kvant_engine::LayerBooks)| {
        let mut books = learned.codebooks().to_vec();
        let mut layer = (**books[1].as_ref().unwrap()).clone();
        change(&mut layer);
        books[1] = Some(Arc::new(layer));
        learned.clone().with_codebooks(books)
    };
    for (other, part) in [
        (change(&|books| books.smooth[70] *= 2.0), "other schemes"),
        (change(&|books| books.values.reverse()), "layer 1 is"),
    ] {
        let e = engine(&loaded, other, Arm::Fused).unwrap().restore_prompt(&path).unwrap_err().to_string();
        assert!(e.contains(part), "{e}");
    }
}
