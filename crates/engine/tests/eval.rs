//! The evaluation, over the real model (see smollm2.rs) and a short text: broken codecs fail the gate that the honest scheme
//! passes, and an imitation of kvant's own format is that format. The broken codecs are here and nowhere else.

use kvant_engine::eval::{Contestant, Evaluation, Gate, Imitation, Scored, Settings, WholeBits, evaluate};
use kvant_engine::{Arm, LoadedModel, Products, load_schemes};
use kvant_kv::{RowCodec, Scheme};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

const TEXT: &str = concat!(
    include_str!("../../../demo/3-recipe.txt"),
    include_str!("../../../demo/2-letter.txt"),
    include_str!("../../../demo/4-log.txt")
);

/// The model, loaded once; one test at a time, so that their threads do not fight for the cores.
fn model() -> (Arc<LoadedModel>, MutexGuard<'static, ()>) {
    static MODEL: OnceLock<Arc<LoadedModel>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let path = std::env::var_os("KVANT_MODEL").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/SmolLM2-135M-Instruct.Q4_1.gguf")),
        PathBuf::from,
    );
    assert!(path.is_file(), "no model at {}: run `kvant pull`", path.display());
    // The product's own products: what is asked here is far above their error, and they are what a test build does fast.
    let load = || Arc::new(LoadedModel::load(&path, 2, Products::Quantized, &|_, _| {}).unwrap());
    (MODEL.get_or_init(load).clone(), turn)
}

/// What is wrong with a codec of 2 to 8 bits.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// Nothing: kvant's formula (quant/affine.rs), in its most naive form.
    None,
    /// Each group is read with scale and zero of its neighbour.
    SwappedGroups,
    /// Keys share scale and zero along the channels of a token, not along the tokens of a channel.
    KeysPerToken,
}

struct Affine {
    bits: u32,
    fault: Fault,
}

/// Scale and zero of some values.
fn parameters(values: &[f32], bits: u32) -> (f32, f32) {
    let min = values.iter().copied().fold(f32::INFINITY, f32::min);
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let f16 = |x: f32| half::f16::from_f32(x).to_f32();
    (f16((max - min) / ((1u32 << bits) - 1) as f32), f16(min))
}

impl Affine {
    /// Quantizes groups of `len` values that lie one after another.
    fn groups(&self, x: &mut [f32], len: usize) {
        let top = ((1u32 << self.bits) - 1) as f32;
        let of: Vec<(f32, f32)> = x.chunks(len).map(|group| parameters(group, self.bits)).collect();
        for (i, group) in x.chunks_mut(len).enumerate() {
            let (scale, zero) = of[i];
            let neighbour = if i + 1 == of.len() { i.saturating_sub(1) } else { i ^ 1 };
            let (read_scale, read_zero) = if self.fault == Fault::SwappedGroups { of[neighbour] } else { of[i] };
            for x in group {
                let code = if scale == 0.0 { 0.0 } else { ((*x - zero) / scale).round_ties_even().clamp(0.0, top) };
                *x = code * read_scale + read_zero;
            }
        }
    }
}

impl RowCodec for Affine {
    fn round_trip(&self, d: usize, k: &mut [f32], v: &mut [f32]) {
        let tokens = k.len() / d;
        if self.fault == Fault::KeysPerToken {
            self.groups(k, tokens.min(d));
        } else {
            let mut channels: Vec<f32> = (0..k.len()).map(|i| k[i % tokens * d + i / tokens]).collect();
            self.groups(&mut channels, tokens);
            (0..k.len()).for_each(|i| k[i % tokens * d + i / tokens] = channels[i]);
        }
        self.groups(v, tokens.min(d));
    }
}

/// A ring of rows whose newest slot is written too late: every 16th row still holds what was there 32 rows before.
struct StaleRows;

impl RowCodec for StaleRows {
    fn round_trip(&self, d: usize, k: &mut [f32], v: &mut [f32]) {
        for x in [k, v] {
            for row in (32..x.len() / d).rev().filter(|row| row % 16 == 15) {
                x.copy_within((row - 32) * d..(row - 31) * d, row * d);
            }
        }
    }
}

fn packed(name: &str) -> Contestant {
    Contestant::scheme(load_schemes(name, 30).unwrap(), 64)
}

/// A scheme whose packed groups are what a codec gives back.
fn imitated(scheme: &str, codec: Affine) -> Contestant {
    let Scheme::Packed(kept) = scheme.parse().unwrap() else { panic!("{scheme} packs") };
    let imitation = Imitation { name: scheme.into(), bits: 4.0, kept: Some(kept), codec: Arc::new(codec) };
    Contestant::imitation(&imitation, 30)
}

fn run(model: &Arc<LoadedModel>, contestants: &[Contestant], scored: Scored) -> Evaluation {
    let tokens = model.tokenizer().unwrap().encode_text(TEXT).unwrap();
    let settings = Settings { ctx: 512, scored, threads: 2, kernel: None };
    let mut followed = 0;
    let found = evaluate(model, &[&tokens[..512]], contestants, &settings, &mut |done, _| followed = done).unwrap();
    assert_eq!(followed, 512 * (contestants.len() + 1));
    for (contestant, f) in contestants.iter().zip(&found.rows) {
        println!("{}: KLD {:.5}, PPL ratio {:.4}, same {:.3}", contestant.name, f.kld_mean, f.ppl_ratio, f.top1_same);
    }
    found
}

#[test]
fn broken_codecs_fail_the_gate_that_honest_schemes_pass() {
    let (model, _turn) = model();
    let stale = Contestant { every_row: Some(Arc::new(StaleRows)), ..packed("k4v4g64w64s4") };
    let contestants = [
        packed("k4v4g64w64s4"),
        imitated("k4v4g64w64s4", Affine { bits: 4, fault: Fault::SwappedGroups }),
        stale,
        packed("k3v3g64w64s4"),
        imitated("k3v3g64w64s4", Affine { bits: 3, fault: Fault::KeysPerToken }),
    ];
    let found = run(&model, &contestants, Scored::SecondHalf);
    assert_eq!(found.base.positions, 255);
    assert_eq!((found.base.kld_mean, found.base.ppl_ratio, found.base.top1_same), (0.0, 1.0, 1.0));
    for (honest, broken, max_kld) in [(0, 1, FOUR_BITS), (0, 2, FOUR_BITS), (3, 4, THREE_BITS)] {
        let gate = Gate { max_kld: Some(max_kld), max_ppl_ratio: None };
        assert!(gate.check("honest", &found.rows[honest]).is_ok(), "{:?}", found.rows[honest]);
        assert!(gate.check("broken", &found.rows[broken]).is_err(), "{:?}", found.rows[broken]);
    }
}

/// Bounds of the gate: about twice what the honest schemes have on this text.
const FOUR_BITS: f64 = 0.0025;
const THREE_BITS: f64 = 0.015;

#[test]
fn an_imitation_of_our_own_format_is_that_format() {
    let (model, _turn) = model();
    let real = Contestant { arm: Arm::DequantOnce, ..packed("k4v4g64w64") };
    let contestants =
        [real, imitated("k4v4g64w64", Affine { bits: 4, fault: Fault::None }), packed("k4v4g64w64"), packed("f16")];
    let found = run(&model, &contestants, Scored::All);
    // The same numbers in the copy: the same logits, to the bit.
    assert_eq!(found.rows[0], found.rows[1]);
    // The fused arm differs by rounding only.
    assert!((found.rows[2].kld_mean / found.rows[0].kld_mean - 1.0).abs() < 0.05);
    // Two runs of one cache: nothing, to the bit.
    assert_eq!((found.rows[3].kld_mean, found.rows[3].kld_p99, found.rows[3].ppl_ratio), (0.0, 0.0, 1.0));
    // Nothing is packed for the first 127 positions, so nothing differs there; the buckets tell.
    let buckets: Vec<_> = found.rows[0].buckets.iter().map(|b| (b.from, b.figures.positions)).collect();
    assert_eq!(buckets, [(0, 256), (256, 255)]);
    assert!(found.rows[0].buckets[0].figures.kld_mean < found.rows[0].buckets[1].figures.kld_mean);
    assert_eq!(WholeBits::of_schemes(&load_schemes("k4v4g64w64", 30).unwrap(), 64).packed(), 4.5);
}
