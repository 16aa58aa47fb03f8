//! Many requests in one engine, coming and going: each gets what it would get alone, whatever it shares, whoever leaves,
//! however short memory is.

mod tiny_model;

use kvant_engine::{
    Arm, Engine, EngineOptions, Error, Event, FinishReason, Limits, LoadedModel, Outcome, Phase, Products, Request,
    Sampling, load_schemes,
};
use std::collections::BTreeMap;
use std::ops::ControlFlow::Continue;
use std::path::Path;
use std::sync::Arc;
use tiny_model::{Parts, Tiny};

const PAGED: &str = "k4v4g32w32s4p64";

fn load(parts: &Parts) -> Arc<LoadedModel> {
    load_from(tempfile::tempdir().unwrap().path(), parts)
}

fn load_from(folder: &Path, parts: &Parts) -> Arc<LoadedModel> {
    let path = parts.write(folder, "tiny.gguf");
    Arc::new(LoadedModel::load(&path, 2, Products::Quantized, &|_, _| {}).unwrap())
}

fn model() -> Arc<LoadedModel> {
    load(&Tiny { layers: 3, context: 3000, ..Tiny::default() }.parts())
}

fn engine(loaded: &Arc<LoadedModel>, scheme: &str, limits: Limits) -> Engine {
    let schemes = load_schemes(scheme, loaded.config().layers).unwrap();
    let arm = Arm::of(schemes.layers()[0]);
    Engine::new(loaded.clone(), EngineOptions { threads: 2, kernel: None, arm, schemes, limits }).unwrap()
}

/// As a server has it.
fn serving(kv_memory: usize) -> Limits {
    let (kv_memory, prompts_first, share_prefixes) = (Some(kv_memory), false, true);
    Limits { kv_memory, prompts_first, share_prefixes, ..Limits::default() }
}

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 37 + seed * 101 + i * i * 7) % 256) as u32).collect()
}

/// Draws of its own: a request that got another's numbers, or its own at other positions, would show.
fn request(prompt: Vec<u32>, max_tokens: usize, seed: u64) -> Request {
    let sampling = Sampling { temperature: 0.8, top_k: 60, seed, ..Sampling::default() };
    Request { sampling, ignore_end: true, logprobs: Some(2), ..Request::greedy(prompt, max_tokens) }
}

/// What a request said: tokens, and how likely each was, to the bit.
type Said = (Vec<u32>, Vec<u32>);

fn alone(loaded: &Arc<LoadedModel>, scheme: &str, request: &Request) -> Said {
    let mut engine = engine(loaded, scheme, Limits::default());
    let mut likely = Vec::new();
    let all = engine.generate(vec![request.clone()], &mut |event| {
        if let Event::Token { logprobs: Some(l), .. } = event {
            likely.push(l.logprob.to_bits());
        }
        Continue(())
    });
    (all.unwrap().outcomes.remove(0).tokens, likely)
}

/// Runs to the end; `each` sees the engine behind every step and may add or cancel.
fn run(engine: &mut Engine, mut each: impl FnMut(&mut Engine, usize)) -> BTreeMap<usize, (Outcome, Said)> {
    let (mut done, mut likely) = (BTreeMap::new(), BTreeMap::<usize, Vec<u32>>::new());
    for step in 0.. {
        let events = engine.step().unwrap();
        for event in &events {
            match event {
                Event::Token { request, logprobs: Some(l), .. } => {
                    likely.entry(*request).or_default().push(l.logprob.to_bits());
                }
                Event::Failed { why, .. } => panic!("{why} {:#?}", engine.status()),
                _ => {}
            }
        }
        let budget = engine.status().budget_bytes;
        let bytes = engine.cache_bytes();
        assert!(budget.is_none_or(|b| bytes.packed_bytes + bytes.window_bytes <= b));
        for (number, outcome) in engine.take_finished().unwrap() {
            let said = (outcome.tokens.clone(), likely.remove(&number).unwrap_or_default());
            done.insert(number, (outcome, said));
        }
        each(engine, step);
        if engine.idle() {
            return done;
        }
    }
    unreachable!()
}

#[test]
fn requests_that_come_and_go_in_every_order_equal_their_solo_runs() {
    let loaded = model();
    let lengths = [37, 300, 64];
    for scheme in [PAGED, "f16", "k2v3g32"] {
        let requests: Vec<_> = (0..3).map(|i| request(tokens(lengths[i], i), 30, i as u64)).collect();
        let solo: Vec<_> = requests.iter().map(|r| alone(&loaded, scheme, r)).collect();
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            for dropped in [None, Some(0), Some(1), Some(2)] {
                let mut engine = engine(&loaded, scheme, serving(64 << 20));
                let mut numbers = BTreeMap::new();
                numbers.insert(order[0], engine.add(requests[order[0]].clone()).unwrap());
                let done = run(&mut engine, |engine, step| {
                    // The others join while the first ones decode; one is dropped in the middle.
                    for (at, who) in [(5, order[1]), (9, order[2])] {
                        if step == at {
                            numbers.insert(who, engine.add(requests[who].clone()).unwrap());
                        }
                    }
                    if step == 14
                        && let Some(who) = dropped
                    {
                        assert!(engine.cancel(numbers[&who]).unwrap());
                        assert!(!engine.cancel(numbers[&who]).unwrap());
                    }
                });
                for (who, number) in &numbers {
                    match done.get(number) {
                        Some((_, said)) => assert_eq!(said, &solo[*who], "{scheme} {order:?} without {dropped:?}"),
                        None => assert_eq!(dropped, Some(*who)),
                    }
                }
            }
        }
    }
}

/// Shared pages give the bits of a prompt that was computed alone, wherever two prompts part: at a page's edge, inside a
/// group, inside a page, and at the last token.
#[test]
fn prompts_that_share_a_prefix_equal_their_solo_runs() {
    let loaded = model();
    for scheme in [PAGED, "f16", "k8v4g32w20s16p64"] {
        let page = if scheme == "f16" { 512 } else { 64 };
        let first = tokens(page * 3 + 5, 1);
        let mut engine = engine(&loaded, scheme, serving(256 << 20));
        let mut check = |prompt: Vec<u32>, cached: std::ops::RangeInclusive<usize>| {
            let asked = request(prompt, 9, 3);
            let want = alone(&loaded, scheme, &asked);
            let number = engine.add(asked).unwrap();
            let done = run(&mut engine, |_, _| {});
            let (outcome, said) = &done[&number];
            assert_eq!(said, &want, "{scheme}");
            assert!(cached.contains(&outcome.cached_tokens), "{scheme} {} {cached:?}", outcome.cached_tokens);
        };
        check(first.clone(), 0..=0);
        for parts_at in [page, 2 * page + 17, 2 * page + 32, 2 * page, page * 3 + 4, 3] {
            let mut prompt = first[..parts_at].to_vec();
            prompt.extend(tokens(40, 9 + parts_at));
            check(prompt, parts_at / page * page..=parts_at);
        }
        // Exactly pages: the last token is computed, its logits are wanted.
        check(first[..2 * page].to_vec(), page..=2 * page - 1);
        check(first.clone(), page * 3..=page * 3 + 4);
    }
}

/// Layers with a window free what is out of sight; a page is shared whole all the same, and a session goes on.
#[test]
fn layers_with_a_window_share_prefixes_too() {
    let tiny = Tiny { architecture: "gemma3", layers: 6, q_heads: 2, kv_heads: 1, head_dim: 256, ..Tiny::default() };
    let loaded = load(&Tiny { context: 3000, ..tiny }.parts());
    assert!((0..6).any(|i| loaded.config().layer(i, kvant_kv::Scheme::F16).visible.is_some_and(|v| v < 100)));
    for scheme in [PAGED, "f16"] {
        let mut engine = engine(&loaded, scheme, serving(256 << 20));
        let page = if scheme == "f16" { 512 } else { 64 };
        let first = tokens(page * 2 + 9, 1);
        let texts = [
            first.clone(),
            [&first[..page + 20], &tokens(50, 3)[..]].concat(),
            [&first[..], &tokens(90, 4)[..]].concat(),
            [&first[..2 * page], &tokens(90, 5)[..]].concat(),
        ];
        for (text, cached) in texts.into_iter().zip([0, page, 2 * page, 2 * page]) {
            let asked = request(text, 25, 1);
            let want = alone(&loaded, scheme, &asked);
            let number = engine.add(asked).unwrap();
            let done = run(&mut engine, |_, _| {});
            assert_eq!(done[&number].1, want, "{scheme}");
            assert!(done[&number].0.cached_tokens >= cached, "{scheme}: {}", done[&number].0.cached_tokens);
        }
    }
}

#[test]
fn interleaved_requests_of_one_prefix_equal_their_solo_runs() {
    let loaded = model();
    let shared = tokens(64 * 2 + 11, 1);
    let prompts = [vec![shared.clone(), tokens(30, 2)], vec![shared[..64 + 40].to_vec(), tokens(60, 3)], vec![shared]];
    let requests: Vec<_> = prompts.iter().zip(0..).map(|(p, i)| request(p.concat(), 40, i)).collect();
    let solo: Vec<_> = requests.iter().map(|r| alone(&loaded, PAGED, r)).collect();
    let mut engine = engine(&loaded, PAGED, Limits { step_tokens: Some(48), ..serving(64 << 20) });
    requests.iter().for_each(|r| assert!(engine.add(r.clone()).is_ok()));
    let done = run(&mut engine, |_, _| {});
    (0..3).for_each(|i| assert_eq!(done[&i].1, solo[i]));
    // The later ones waited for the pages that the first was computing.
    assert_eq!(done[&0].0.cached_tokens, 0);
    assert!(done[&1].0.cached_tokens >= 64 && done[&2].0.cached_tokens >= 128);
}

/// A conversation: each turn has the last one's text and a little more, and computes only what is new.
#[test]
fn a_session_goes_on_where_it_ended() {
    let loaded = model();
    for scheme in [PAGED, "k4v4g32w32", "f16"] {
        let mut engine = engine(&loaded, scheme, serving(64 << 20));
        let mut text = tokens(50, 4);
        for turn in 0..6 {
            let asked = request(text.clone(), 20, turn);
            let want = alone(&loaded, scheme, &asked);
            let number = engine.add(asked).unwrap();
            let done = run(&mut engine, |_, _| {});
            let (outcome, said) = &done[&number];
            assert_eq!(said, &want, "{scheme} turn {turn}");
            // All but the newest tokens of the last turn are there, pages or not.
            let kept = if turn == 0 { 0 } else { text.len() - 12 };
            assert!(outcome.cached_tokens >= kept, "{scheme} turn {turn}: {} of {}", outcome.cached_tokens, text.len());
            text.extend(&outcome.tokens);
            text.extend(tokens(11, turn as usize + 50));
        }
    }
}

#[test]
fn preempted_requests_equal_uninterrupted_ones_with_the_pool_full() {
    let loaded = model();
    let folder = tempfile::tempdir().unwrap();
    for scheme in [PAGED, "f16", "k2v3g32"] {
        let requests: Vec<_> = (0..6).map(|i| request(tokens(40 + 30 * i, i), 150, i as u64)).collect();
        let solo: Vec<_> = requests.iter().map(|r| alone(&loaded, scheme, r)).collect();
        for swap in [None, Some(folder.path().to_path_buf())] {
            for share_prefixes in [false, true] {
                // What the largest takes alone: every step is at the edge.
                let mut probe = engine(&loaded, scheme, Limits { kv_memory: Some(1), ..Limits::default() });
                let Err(Error::NeverFits { need, budget: 1, tokens: 339, .. }) = probe.add(requests[5].clone()) else {
                    panic!("nothing fits into a byte")
                };
                let limits =
                    Limits { swap: swap.clone(), share_prefixes, step_tokens: Some(64), ..serving(need + need / 3) };
                let mut engine = engine(&loaded, scheme, limits);
                requests.iter().for_each(|r| assert!(engine.add(r.clone()).is_ok()));
                let mut out = 0;
                let done = run(&mut engine, |engine, _| {
                    let swapped = engine.status().requests.iter().filter(|r| r.phase == Phase::Swapped).count();
                    out = out.max(swapped);
                });
                (0..6).for_each(|i| assert_eq!(done[&i].1, solo[i], "{scheme} request {i}"));
                let totals = engine.status().totals;
                assert!(totals.preemptions > 0 && out > 0, "{scheme}: {totals:?}");
                assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files have no name");
            }
        }
    }
}

#[test]
fn what_is_kept_goes_when_memory_is_needed_and_all_goes_in_the_end() {
    let loaded = model();
    let mut probe = engine(&loaded, PAGED, Limits { kv_memory: Some(1), ..Limits::default() });
    let Err(Error::NeverFits { need, .. }) = probe.add(request(tokens(400, 0), 10, 0)) else { panic!() };
    let mut engine = engine(&loaded, PAGED, serving(2 * need));
    for turn in 0..12 {
        let asked = request(tokens(400, turn), 10, 7);
        let want = (turn % 5 == 0).then(|| alone(&loaded, PAGED, &asked));
        let number = engine.add(asked).unwrap();
        let done = run(&mut engine, |_, _| {});
        assert!(want.is_none_or(|want| done[&number].1 == want));
    }
    let status = engine.status();
    assert!(status.totals.evictions > 10 && status.pages > 3 && status.sessions > 0, "{status:?}");
    assert_eq!(status.totals.prompt_tokens, 12 * 400);
    let bytes = engine.cache_bytes();
    assert_eq!(status.kept_bytes, bytes.packed_bytes + bytes.window_bytes, "nobody needs anything");
    engine.release_kept().unwrap();
    let status = engine.status();
    assert_eq!((status.blocks_used, status.pages, status.sessions), (0, 0, 0));
}

/// Requests come, go and are cancelled at random in a cache that is always full; some share prefixes and some break off. Each
/// that ends says what it says alone, nobody fails, and nothing is left.
#[test]
fn at_random_in_a_full_cache_everyone_says_what_it_says_alone() {
    let windowed =
        Tiny { architecture: "gemma3", layers: 6, q_heads: 2, kv_heads: 1, head_dim: 256, ..Tiny::default() };
    let models = [model(), load(&Tiny { context: 3000, ..windowed }.parts())];
    let mut totals = [0; 4];
    for (round, (loaded, scheme)) in
        [(&models[0], PAGED), (&models[1], PAGED), (&models[0], "f16"), (&models[1], "k8v8g32w8p32")]
            .into_iter()
            .enumerate()
    {
        let mut random = round as u64 + 1;
        let mut draw = move |n: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % n
        };
        let shared: Vec<Vec<u32>> = (0..3).map(|i| tokens(330, 40 + i)).collect();
        let requests: Vec<Request> = (0..40)
            .map(|i| {
                let prompt = [&shared[draw(3)][..draw(330)], &tokens(1 + draw(60), i)].concat();
                request(prompt, 1 + draw(240), i as u64)
            })
            .collect();
        let mut probe = engine(loaded, scheme, Limits { kv_memory: Some(1), ..Limits::default() });
        let need = requests.iter().map(|r| match probe.add(r.clone()) {
            Err(Error::NeverFits { need, .. }) => need,
            _ => panic!("nothing fits into a byte"),
        });
        // What the largest takes alone, and nothing more.
        let limits = Limits { max_running: 6, step_tokens: Some(256), ..serving(need.max().unwrap()) };
        let mut engine = engine(loaded, scheme, limits);
        let (mut next, mut cancelled) = (0, Vec::new());
        let mut add = |engine: &mut Engine, n: usize| {
            for request in requests.iter().skip(next).take(n) {
                assert_eq!(engine.add(request.clone()).unwrap(), next);
                next += 1;
            }
        };
        add(&mut engine, 3);
        let done = run(&mut engine, |engine, _| {
            if draw(12) == 0 || engine.idle() {
                add(engine, 1 + draw(3));
            }
            let live: Vec<usize> = engine.status().requests.iter().map(|r| r.number).collect();
            if draw(60) == 0 && !live.is_empty() {
                let number = live[draw(live.len())];
                assert!(engine.cancel(number).unwrap());
                cancelled.push(number);
            }
        });
        assert_eq!(done.len() + cancelled.len(), 40);
        for (number, (_, said)) in &done {
            assert_eq!(said, &alone(loaded, scheme, &requests[*number]), "{scheme} request {number}");
        }
        let status = engine.status();
        let sums =
            [status.totals.preemptions, status.totals.evictions, status.totals.cached_tokens, cancelled.len() as u64];
        totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        engine.release_kept().unwrap();
        assert_eq!(engine.status().blocks_used, 0, "{scheme}");
    }
    assert!(totals.iter().all(|&total| total > 5), "preempted, evicted, shared, cancelled: {totals:?}");
}

#[test]
fn what_can_never_fit_is_refused_with_the_numbers_and_limits_are_checked() {
    let loaded = model();
    let mut engine = engine(&loaded, PAGED, serving(200_000));
    let Err(e) = engine.add(request(tokens(500, 0), 10, 0)) else { panic!("it cannot fit") };
    assert!(matches!(e, Error::NeverFits { tokens: 509, budget: 200_000, need, .. } if need > 200_000), "{e}");
    assert!(e.to_string().contains("200000"), "{e}");
    assert!(engine.step().unwrap().is_empty());
    for limits in [
        Limits { max_running: 0, ..Limits::default() },
        Limits { step_tokens: Some(0), ..Limits::default() },
        Limits { share_prefixes: true, ..Limits::default() },
        Limits { swap: Some("/nowhere/at/all".into()), ..Limits::default() },
    ] {
        let schemes = load_schemes(PAGED, 3).unwrap();
        let options = EngineOptions { threads: 1, kernel: None, arm: Arm::Fused, schemes, limits };
        assert!(matches!(Engine::new(loaded.clone(), options), Err(Error::Limit { .. })));
    }
}

/// Keys that f16 cannot hold come from one token's embedding here: the request that has it ends, the other does not notice.
#[test]
fn a_request_that_breaks_ends_alone() {
    let tiny = Tiny { layers: 3, tied: false, ..Tiny::default() };
    let mut parts = tiny.parts();
    let mut embedding = parts.values("token_embd.weight");
    embedding[200 * tiny.hidden] = f32::NAN;
    parts.replace("token_embd.weight", &[tiny_model::VOCABULARY, tiny.hidden], embedding);
    let loaded = load(&parts);
    let mut good = request((0..70).map(|i| i % 150).collect(), 30, 1);
    good.sampling.temperature = 0.0;
    let bad = request((0..90).map(|i| if i == 80 { 200 } else { i % 150 }).collect(), 30, 2);
    let solo = alone(&loaded, PAGED, &good);
    let mut engine = engine(&loaded, PAGED, Limits { step_tokens: Some(32), ..serving(64 << 20) });
    let (a, b) = (engine.add(good).unwrap(), engine.add(bad).unwrap());
    let (mut tokens, mut failed, mut finished) = (Vec::new(), Vec::new(), false);
    for _ in 0..200 {
        for event in engine.step().unwrap() {
            match event {
                Event::Token { request, token, .. } if request == a => tokens.push(token),
                Event::Failed { request, why } => failed.push((request, why)),
                Event::Finished { request, reason, .. } => {
                    assert_eq!((request, reason), (a, FinishReason::Length));
                    finished = true;
                }
                _ => {}
            }
        }
    }
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].0, b);
    assert!(finished);
    assert_eq!(tokens, solo.0);
}

#[test]
fn texts_end_before_what_stops_them() {
    let loaded = model();
    let mut engine = engine(&loaded, PAGED, serving(64 << 20));
    let plain = Request { ignore_end: true, ..Request::greedy(tokens(30, 3), 60) };
    let number = engine.add(plain.clone()).unwrap();
    let text = run(&mut engine, |_, _| {})[&number].0.text.clone();
    let letters: Vec<char> = text.chars().collect();
    let stop: String = letters[letters.len() / 2..letters.len() / 2 + 3].iter().collect();
    let number = engine.add(Request { stop: vec!["never in it".into(), stop.clone()], ..plain }).unwrap();
    let mut streamed = String::new();
    let outcome = loop {
        for event in engine.step().unwrap() {
            if let Event::Token { text, .. } | Event::Finished { text, .. } = event {
                streamed.push_str(&text);
            }
        }
        if let Some((_, outcome)) = engine.take_finished().unwrap().pop() {
            break outcome;
        }
    };
    assert_eq!((outcome.reason, number), (FinishReason::Stop, 1));
    assert_eq!(outcome.text, text[..text.find(&stop).unwrap()]);
    assert_eq!(streamed, outcome.text);
}

#[test]
fn a_prompt_kept_in_a_file_goes_on_as_if_it_had_just_been_computed() {
    // Whoever saves or restores reads the model's file once more.
    let models = tempfile::tempdir().unwrap();
    let tiny = Tiny { layers: 3, context: 3000, ..Tiny::default() };
    let loaded = load_from(models.path(), &tiny.parts());
    let others = tempfile::tempdir().unwrap();
    let other_model = load_from(others.path(), &Tiny { context: 2999, ..tiny }.parts());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.kvant");
    let texts = [tokens(200, 1), [tokens(200, 1), tokens(30, 2)].concat(), tokens(150, 1), tokens(90, 5)];
    for scheme in [PAGED, "f16", "k2v3g32"] {
        let solo: Vec<_> = texts.iter().map(|t| alone(&loaded, scheme, &request(t.clone(), 20, 1)).0).collect();
        let mut saving = engine(&loaded, scheme, Limits::default());
        saving.save_prompt(&texts[0], &path).unwrap();
        let asked = |text: &Vec<u32>| request(text.clone(), 20, 1);
        let made = saving.generate_from_session(asked(&texts[0]), &mut |_| Continue(())).unwrap();
        assert_eq!((&made.outcomes[0].tokens, made.outcomes[0].cached_tokens), (&solo[0], 199));
        for (text, solo) in texts.iter().zip(&solo) {
            let mut restored = engine(&loaded, scheme, Limits::default());
            assert_eq!(restored.restore_prompt(&path).unwrap(), texts[0][..199]);
            let made = restored.generate_from_session(asked(text), &mut |_| Continue(())).unwrap();
            assert_eq!(&made.outcomes[0].tokens, solo, "{scheme}");
            assert_eq!(made.outcomes[0].cached_tokens >= 199, text.starts_with(&texts[0]), "{scheme}");
        }
        let bytes = std::fs::read(&path).unwrap();
        let mut other = engine(&loaded, "k4v4g32w16s4p64", Limits::default());
        let why = |engine: &mut Engine| match engine.restore_prompt(&path) {
            Err(Error::PromptCache { why, .. }) => why,
            Err(e) => panic!("{e}"),
            Ok(_) => panic!("a damaged file was taken"),
        };
        assert!(why(&mut other).contains("other schemes"));
        let mut same = engine(&loaded, scheme, Limits::default());
        assert!(why(&mut engine(&other_model, scheme, Limits::default())).contains("another model"));
        for damage in [0, 9, 13, 60, bytes.len() / 2, bytes.len() - 1] {
            let mut wrong = bytes.clone();
            wrong[damage] ^= 4;
            std::fs::write(&path, &wrong).unwrap();
            why(&mut same);
            std::fs::write(&path, &bytes[..damage]).unwrap();
            why(&mut same);
        }
        assert_eq!(same.status().blocks_used, 0);
        std::fs::remove_file(&path).unwrap();
        why(&mut same);
        // Links, and whatever else is no regular file, stay what they are.
        std::os::unix::fs::symlink("nowhere", &path).unwrap();
        assert!(matches!(same.save_prompt(&texts[3], &path), Err(Error::PromptCache { .. })));
        assert!(std::fs::symlink_metadata(&path).unwrap().is_symlink());
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(same.restore_prompt(folder.path()), Err(Error::PromptCache { .. })));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing half-written stays");
    }
}
