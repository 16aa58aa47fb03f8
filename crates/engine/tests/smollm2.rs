//! SmolLM2-135M-Instruct, the real model: `models/` of the workspace or the file that `KVANT_MODEL` names.
//! A missing file fails these tests: `kvant pull` fetches it.
//! The text is that of the demo's prompts.

use kvant_engine::sampler::greedy;
use kvant_engine::{
    Arm, Distribution, Engine, EngineOptions, Error, Event, Feed, Forced, Limits, LoadedModel, Message, Products,
    Request, load_schemes,
};
use std::ops::ControlFlow::Continue;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

const TEXT: &str = concat!(
    include_str!("../../../demo/3-recipe.txt"),
    include_str!("../../../demo/2-letter.txt"),
    include_str!("../../../demo/4-log.txt")
);
/// Pieces of the text, as first token and tokens: of the recipe, the letter, the log. One crosses a page's edge while
/// decoding.
const PIECES: [(usize, usize); 7] = [(5, 190), (349, 90), (60, 260), (500, 380), (900, 140), (1300, 120), (1900, 60)];
const SCHEMES: [&str; 5] = ["f16", "k8v8g64w128s4p512", "k4v4g64w128s4p512", "k3v3g64w128s4p512", "k2v2g32w128s4p512"];

fn path() -> PathBuf {
    let path = std::env::var_os("KVANT_MODEL").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/SmolLM2-135M-Instruct.Q4_1.gguf")),
        PathBuf::from,
    );
    assert!(path.is_file(), "no model at {}: run `kvant pull`", path.display());
    path
}

/// The model, loaded once; one test at a time, so that their threads do not fight for the cores.
fn model() -> (Arc<LoadedModel>, MutexGuard<'static, ()>) {
    static MODEL: OnceLock<Arc<LoadedModel>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let load = || Arc::new(LoadedModel::load(&path(), 2, Products::Quantized, &|_, _| {}).unwrap());
    (MODEL.get_or_init(load).clone(), turn)
}

fn engine(loaded: &Arc<LoadedModel>, scheme: &str, arm: Arm, threads: usize) -> Engine {
    let schemes = load_schemes(scheme, loaded.config().layers).unwrap();
    Engine::new(loaded.clone(), EngineOptions { threads, kernel: None, arm, schemes, limits: Limits::default() })
        .unwrap()
}

/// Mean and largest KL divergence of `got` from `expected` (logits), and how often the likeliest token is the same.
fn divergence(expected: &[Vec<f32>], got: &[Vec<f32>]) -> (f64, f64, f64) {
    assert_eq!(expected.len(), got.len());
    let (mut sum, mut worst, mut same) = (0.0, 0.0f64, 0);
    for (e, g) in expected.iter().zip(got) {
        let kld = Distribution::of(e).kld(&Distribution::of(g));
        sum += kld;
        worst = worst.max(kld);
        same += usize::from(greedy(e) == greedy(g));
    }
    let n = expected.len() as f64;
    (sum / n, worst, f64::from(same as u32) / n)
}

fn follow(engine: &mut Engine, tokens: &[u32], prompt: usize, feed: Feed) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut keep = |_: usize, _: usize, logits: &[f32]| -> Result<(), Error> {
        all.push(logits.to_vec());
        Ok(())
    };
    engine.follow(&[Forced { tokens, prompt }], feed, &mut keep).unwrap();
    all
}

#[test]
fn prompts_of_all_lengths_decoded_together_equal_each_alone() {
    let (loaded, _turn) = model();
    let tokens = loaded.encode(TEXT).unwrap();
    let mut at = 0;
    let requests: Vec<Request> = [3, 37, 66, 300, 1500]
        .iter()
        .map(|n| {
            at += 40;
            Request::greedy(tokens[at..at + n].to_vec(), 24)
        })
        .collect();
    for scheme in SCHEMES {
        let results = |threads: usize, together: bool| -> Vec<Vec<u32>> {
            let mut engine = engine(&loaded, scheme, Arm::Fused, threads);
            let batches: Vec<Vec<Request>> =
                if together { vec![requests.clone()] } else { requests.iter().map(|r| vec![r.clone()]).collect() };
            let made = batches.into_iter().flat_map(|b| engine.generate(b, &mut |_| Continue(())).unwrap().outcomes);
            made.map(|o| o.tokens).collect()
        };
        let alone = results(2, false);
        assert_eq!(results(2, true), alone, "{scheme}, 2 threads");
        assert_eq!(results(1, true), alone, "{scheme}, 1 thread");
    }
}

#[test]
fn the_same_prompt_four_times_gives_four_equal_results_equal_to_it_alone() {
    let (loaded, _turn) = model();
    let tokens = loaded.encode(TEXT).unwrap();
    let request = Request::greedy(tokens[..150].to_vec(), 48);
    for scheme in ["f16", "k4v4g64w128s4p512", "k2v2g32"] {
        let mut engine = engine(&loaded, scheme, Arm::Fused, 2);
        let four = engine.generate(vec![request.clone(); 4], &mut |_| Continue(())).unwrap().outcomes;
        let alone = engine.generate(vec![request.clone()], &mut |_| Continue(())).unwrap().outcomes;
        assert!(four.iter().all(|o| o.tokens == alone[0].tokens && o.text == alone[0].text), "{scheme}");
    }
}

/// The arms whose agreement is asked for; the last is the reference.
const AGREEING: [Arm; 3] = [Arm::Fused, Arm::DequantOnce, Arm::DequantStep];

/// What arms made of the same texts, taken up position by position.
struct Agreement {
    /// KL divergence of arm j from arm i, summed.
    kld: [[f64; 3]; 3],
    positions: usize,
    /// Per arm: text, step and top-two gap of the reference where its own choice first leaves the text.
    left: [Vec<(usize, usize, f32)>; 3],
}

/// Decodes the prompts greedily under dequant-step, then follows that text under every arm. While an arm's own choices are
/// those of the text, its own greedy decoding would have produced it; the first other choice is where it would have left.
fn agreement(loaded: &Arc<LoadedModel>, scheme: &str, prompts: &[Vec<u32>], steps: usize) -> Agreement {
    let mut reference = engine(loaded, scheme, Arm::DequantStep, 2);
    let request = |p: &Vec<u32>| Request { ignore_end: true, ..Request::greedy(p.clone(), steps) };
    let made = reference.generate(prompts.iter().map(request).collect(), &mut |_| Continue(())).unwrap();
    let texts: Vec<Vec<u32>> =
        prompts.iter().zip(made.outcomes).map(|(p, o)| [p.as_slice(), &o.tokens].concat()).collect();
    let forced: Vec<Forced<'_>> =
        texts.iter().zip(prompts).map(|(tokens, p)| Forced { tokens, prompt: p.len() }).collect();
    // [arm][text]: logits of the prompt's last token and of every step.
    let logits = AGREEING.map(|arm| {
        let mut logits = vec![Vec::new(); texts.len()];
        let mut engine = engine(loaded, scheme, arm, 2);
        engine
            .follow(&forced, Feed::Decode, &mut |text, _, l: &[f32]| {
                logits[text].push(l.to_vec());
                Ok(())
            })
            .unwrap();
        assert!(engine.cache_bytes().packed_bytes > 0, "{scheme} packs nothing here");
        logits
    });
    let mut found = Agreement { kld: Default::default(), positions: 0, left: Default::default() };
    for text in 0..texts.len() {
        assert!(logits.iter().all(|arm| arm[text].len() == steps + 1));
        let mut left = [false; 3];
        for step in 0..=steps {
            let rows = [0, 1, 2].map(|arm| logits[arm][text][step].as_slice());
            let p = rows.map(Distribution::of);
            for (i, j) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
                found.kld[i][j] += p[i].kld(&p[j]);
            }
            let first = greedy(rows[2]);
            assert!(
                step == steps || first == texts[text][prompts[text].len() + step],
                "the text is the reference's own"
            );
            for arm in (0..3).filter(|&arm| greedy(rows[arm]) != first) {
                if !std::mem::replace(&mut left[arm], true) {
                    let others = rows[2].iter().enumerate().filter(|(i, _)| *i != first as usize);
                    let second = others.map(|(_, &l)| l).fold(f32::MIN, f32::max);
                    found.left[arm].push((text, step, rows[2][first as usize] - second));
                }
            }
            found.positions += 1;
        }
    }
    found
}

/// The contract of `bench decode`: mean KL divergence between each two arms of at most 1e-4; greedy tokens equal for at least
/// 95 % of the requests; a first difference only where the reference's two likeliest tokens are within 1.0. Requests are
/// counted over all schemes: 95 % of a few say nothing, as any text may hold a tie that the last bit of one f32 decides.
#[test]
fn fused_and_dequantized_attention_agree_over_160_steps() {
    let (loaded, _turn) = model();
    let tokens = loaded.encode(TEXT).unwrap();
    let prompts = PIECES.map(|(from, len)| tokens[from..from + len].to_vec());
    let (mut requests, mut equal) = (0, [0; 3]);
    // Schemes with a window: without one, two f32 kernels disagree as much (decision 0006).
    for scheme in ["k8v8g64w128s4p512", "k4v4g64w128s4p512", "k2v2g32w128s4p512"] {
        let found = agreement(&loaded, scheme, &prompts, 160);
        for (i, j) in [(0, 1), (0, 2), (1, 2)] {
            // Divergence has a direction; the worse of the two counts, and NaN fails.
            let [there, back] = [found.kld[i][j], found.kld[j][i]].map(|sum| sum / found.positions as f64);
            let (a, b) = (AGREEING[i], AGREEING[j]);
            println!("{scheme}: {a} and {b}: mean KLD {there:.2e} and {back:.2e}");
            assert!(there <= 1e-4 && back <= 1e-4, "{scheme}: {a} and {b}: mean KLD {there} and {back}");
        }
        requests += prompts.len();
        for (arm, left) in found.left.iter().enumerate() {
            equal[arm] += prompts.len() - left.len();
            let name = AGREEING[arm];
            for (text, step, gap) in left {
                println!("{scheme}: {name} leaves text {text} at step {step}, top-two gap {gap:.4}");
                assert!(*gap <= 1.0, "{scheme}: {name} leaves text {text} at step {step} at a top-two gap of {gap}");
            }
        }
    }
    for (arm, equal) in AGREEING.iter().zip(equal) {
        println!("{arm}: greedy tokens equal for {equal} of {requests} requests");
        assert!(f64::from(equal as u32) >= 0.95 * requests as f64, "{arm}: {equal} of {requests} requests are equal");
    }
}

#[test]
fn products_stay_close_to_f32_weights_and_products() {
    let (loaded, _turn) = model();
    let tokens = loaded.encode(TEXT).unwrap();
    let exact = Arc::new(LoadedModel::load(&path(), 2, Products::Exact, &|_, _| {}).unwrap());
    let [expected, got] =
        [&exact, &loaded].map(|model| follow(&mut engine(model, "f16", Arm::F16, 2), &tokens[..400], 1, Feed::Prefill));
    let (mean, worst, same) = divergence(&expected, &got);
    println!("products against f32: mean KLD {mean:.2e}, worst {worst:.2e}, same likeliest token {same:.3}");
    assert!(mean <= 0.0005, "mean KLD {mean}");
    assert!(same >= 0.97, "same likeliest token {same}");
}

#[test]
fn the_text_is_read_and_continued_sensibly() {
    let (loaded, _turn) = model();
    let tokenizer = loaded.tokenizer().unwrap();
    let tokens = loaded.encode(TEXT).unwrap();
    assert_eq!(tokenizer.decode(&tokens), TEXT);
    assert_eq!(loaded.encode("1872").unwrap().len(), 4, "smollm splits every digit");
    let chat = loaded.encode_chat(&[Message::user("What is the capital of France?")]).unwrap();
    assert_eq!(tokenizer.piece(chat[0]).unwrap(), "<|im_start|>");
    let mut engine = engine(&loaded, "k8v8g64w128s4p512", Arm::Fused, 2);
    let requests =
        vec![Request::greedy(loaded.encode("The capital of France is").unwrap(), 8), Request::greedy(chat, 40)];
    let mut streamed = [String::new(), String::new()];
    let made = engine
        .generate(requests, &mut |event| {
            if let Event::Token { request, text, .. } | Event::Finished { request, text, .. } = event {
                streamed[*request].push_str(text);
            }
            Continue(())
        })
        .unwrap();
    for (outcome, streamed) in made.outcomes.iter().zip(&streamed) {
        assert!(outcome.text.contains("Paris"), "{:?}", outcome.text);
        assert_eq!(&outcome.text, streamed);
    }
    assert_eq!(made.outcomes[1].reason, kvant_engine::FinishReason::Stop);
}

#[test]
fn a_prompt_longer_than_the_context_is_an_error_before_any_work() {
    let (loaded, _turn) = model();
    let mut engine = engine(&loaded, "f16", Arm::F16, 2);
    let e = engine.generate(vec![Request::greedy(vec![5; 8193], 4)], &mut |_| Continue(())).unwrap_err();
    assert!(matches!(e, Error::PromptTooLong { tokens: 8193, context: 8192, .. }), "{e}");
}
