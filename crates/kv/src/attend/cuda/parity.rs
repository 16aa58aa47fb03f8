//! The GPU's records against the CPU's, and its attention against the f64 oracle. In: cases as in attend/parity.rs; out: a failure
//! that names the case, and the worst error. Without a GPU each test says that it skips; `REQUIRE_KERNELS=cuda` makes that fail.
//! NOT here: whether kernels compile (tests/kernels.rs), speed.

use super::super::parity::{Case, Data, numbers, worst_row};
use crate::attend::reference::attend_cache_f64;
use crate::cache::cuda::layout::RecordShape;
use crate::cuda::{Gpu, GpuCache, GpuOptions, OutFormat};
use crate::{Arm, AttendOptions, Cache, LayerConfig, LayerShape, Rows, Scheme};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::sync::{Arc, OnceLock};

/// Largest relative L2 error: products of f16 numbers, sums in f32.
const TOLERANCE: f64 = 2e-3;

fn gpu() -> Option<Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    let open = || match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(e) => {
            let required = std::env::var("REQUIRE_KERNELS").unwrap_or_default();
            let required = required.split(',').any(|name| name.trim() == "cuda");
            assert!(!required, "REQUIRE_KERNELS names cuda, which did not run: {e}");
            println!("skipped cuda: {e}");
            None
        }
    };
    GPU.get_or_init(open).clone()
}

fn options(case: &Case, slots: usize, invariant: bool) -> GpuOptions {
    let max_tokens = case.past + case.rows;
    let out = OutFormat::F32;
    GpuOptions { slots, max_tokens, bytes: 4 << 30, out, softcap: case.softcap, invariant }
}

/// Rounded to f16, as both caches store it.
fn rounded(x: &[f32]) -> Vec<f16> {
    x.iter().map(|&x| f16::from_f32(x)).collect()
}

/// A GPU cache after the case's tokens but the last one, `slots` times.
fn filled(
    gpu: &Arc<Gpu>,
    case: &Case,
    x: &[(Vec<f16>, Vec<f16>)],
    invariant: bool,
    chunk: usize,
) -> (GpuCache, Vec<usize>) {
    let shape = LayerShape::new(case.q_heads, case.kv_heads, case.head_dim).unwrap();
    let config = LayerConfig { shape, scheme: case.scheme.parse().unwrap(), visible: case.visible };
    let mut cache = GpuCache::new(gpu, &[config], case.arm, options(case, x.len(), invariant)).unwrap();
    let row = shape.row_len();
    let slots = x.iter().map(|(k, v)| {
        let tokens = k.len() / row;
        let slot = cache.add(tokens).unwrap();
        let mut at = 0;
        while at < tokens - 1 {
            let rows = chunk.min(tokens - 1 - at);
            let part = |x: &[f16]| gpu.upload(&x[at * row..(at + rows) * row]).unwrap();
            cache.begin_prefill(slot, rows).unwrap();
            cache.append_prefill(0, &part(k), &part(v)).unwrap();
            cache.end_prefill();
            at += rows;
        }
        slot
    });
    let slots: Vec<_> = slots.collect();
    (cache, slots)
}

/// One decode step of all slots; results `[slots][q_heads][head_dim]`.
fn step(
    gpu: &Arc<Gpu>,
    case: &Case,
    cache: &mut GpuCache,
    slots: &[usize],
    x: &[(Vec<f16>, Vec<f16>)],
    q: &[f16],
) -> Vec<f32> {
    let row = case.kv_heads * case.head_dim;
    let last = |x: &[f16]| x[x.len() - row..].to_vec();
    let k = gpu.upload(&x.iter().flat_map(|(k, _)| last(k)).collect::<Vec<_>>()).unwrap();
    let v = gpu.upload(&x.iter().flat_map(|(_, v)| last(v)).collect::<Vec<_>>()).unwrap();
    let q = gpu.upload(q).unwrap();
    let mut out = gpu.upload(&vec![f32::NAN; q.len()]).unwrap();
    let logits: Vec<f32> = (0..case.q_heads).map(|h| h as f32 * 0.7 - 2.0).collect();
    let logits = gpu.upload(&logits).unwrap();
    let first = gpu.upload(&vec![case.first_visible.unwrap_or(0) as u32; slots.len()]).unwrap();
    let address = |x| crate::cuda::kind::address(gpu, x);
    let first_visible = if case.first_visible.is_some() { crate::cuda::kind::address(gpu, &first) } else { 0 };
    cache.begin_decode(slots, slots.len()).unwrap();
    cache.pack_due().unwrap();
    cache.plan_from(first_visible).unwrap();
    cache.append_decode(0, &k, &v).unwrap();
    let sink_logits = if case.sink_logits { address(&logits) } else { 0 };
    let scale = (case.head_dim as f32).powf(-0.5);
    if case.arm == Arm::DequantStep {
        // The way that dequantizes first; it takes no options.
        cache.attend(0, &q, &mut out, scale).unwrap();
    } else {
        cache.attend_layers(0, 1, &q, &mut out, scale, sink_logits, first_visible).unwrap();
    }
    cache.end_decode();
    assert_eq!(cache.take_fault().unwrap(), None);
    gpu.stream().clone_dtoh(&out).unwrap()
}

/// The oracle's result for the case's rows, over the CPU's cache of the same tokens; and that cache.
fn oracle(case: &Case, k: &[f16], v: &[f16], q: &[f16]) -> (Vec<f64>, Cache) {
    let shape = LayerShape::new(case.q_heads, case.kv_heads, case.head_dim).unwrap();
    let scheme = case.scheme.parse().unwrap();
    let mut cache = Cache::new(&[LayerConfig { shape, scheme, visible: case.visible }], Arm::Fused).unwrap();
    let seq = cache.add_sequence();
    let (row, tokens) = (shape.row_len(), k.len() / shape.row_len());
    let past = tokens - case.rows;
    let (k, v) = (k.to_f32_vec(), v.to_f32_vec());
    if past > 0 {
        let rows = [Rows { seq, rows: past }];
        cache.append(0, &rows, &k[..past * row], &v[..past * row]).unwrap();
        cache.commit(0, &rows).unwrap();
    }
    let rows = [Rows { seq, rows: case.rows }];
    cache.append(0, &rows, &k[past * row..], &v[past * row..]).unwrap();
    let logits: Vec<f32> = (0..case.q_heads).map(|h| h as f32 * 0.7 - 2.0).collect();
    let first_visible: Vec<usize> = case.first_visible.into_iter().collect();
    let options = AttendOptions {
        softcap: case.softcap,
        sink_logits: case.sink_logits.then_some(&logits[..]),
        first_visible: &first_visible,
        ..AttendOptions::new(case.head_dim)
    };
    let want = attend_cache_f64(&cache, 0, &rows, &q.to_f32_vec(), &options).unwrap();
    (want, cache)
}

/// Every record of a GPU cache of one sequence holds what the CPU's does.
fn check_records(gpu: &Gpu, case: &Case, gpu_cache: &GpuCache, cpu: &Cache) {
    let Scheme::Packed(p) = case.scheme.parse().unwrap() else { return };
    let (k_bits, v_bits) = (p.k().as_affine().unwrap().0, p.v().as_affine().unwrap().0);
    let shape = RecordShape { head_dim: case.head_dim, group_len: p.group_len(), k_bits, v_bits };
    let bytes = gpu_cache.record_bytes_of(gpu, 0);
    cpu.each_record(0, |layout, head, group, record| {
        let gpu_record = &bytes[gpu_cache.record_at(0, 0, head, group)..][..shape.record_bytes()];
        let (got, mut want) = (shape.read(gpu_record), shape.read_cpu(layout, record));
        if group == 0 {
            // Nobody reads the codes of sinks, nor what their values' scales are.
            let sinks = p.sinks() * case.head_dim;
            want.k_codes[..sinks].copy_from_slice(&got.k_codes[..sinks]);
            want.v_codes[..sinks].copy_from_slice(&got.v_codes[..sinks]);
            let params = p.sinks() * shape.v_groups();
            want.v_params[..params].copy_from_slice(&got.v_params[..params]);
        }
        assert!(got == want, "head {head} group {group} of {case:?}");
    });
}

/// Checks cases one by one against the oracle.
fn check(cases: impl IntoIterator<Item = Case>) {
    let Some(gpu) = gpu() else { return };
    let cases: Vec<_> = cases.into_iter().collect();
    prepare(&gpu, &cases);
    let mut worst = 0.0f64;
    for case in &cases {
        let x = numbers(case);
        let (k, v, q) = (rounded(&x.k), rounded(&x.v), rounded(&x.q));
        let (want, cpu) = oracle(case, &k, &v, &q);
        let kv = [(k, v)];
        for (invariant, chunk) in [(false, usize::MAX), (true, 97)] {
            let (mut cache, slots) = filled(&gpu, case, &kv, invariant, chunk);
            let out = step(&gpu, case, &mut cache, &slots, &kv, &q);
            check_records(&gpu, case, &cache, &cpu);
            let err = worst_row(&out, &want, case.q_heads * case.head_dim);
            assert!(err <= TOLERANCE, "error {err:.2e} (invariant: {invariant}) for {case:?}");
            worst = worst.max(err);
        }
    }
    println!("{} cases, worst error {worst:.1e}", cases.len());
}

/// Compiles what cases need, on all threads.
fn prepare(gpu: &Gpu, cases: &[Case]) {
    let mut programs = Vec::new();
    for case in cases {
        let record = match case.scheme.parse().unwrap() {
            Scheme::Packed(p) => RecordShape {
                head_dim: case.head_dim,
                group_len: p.group_len(),
                k_bits: p.k().as_affine().unwrap().0,
                v_bits: p.v().as_affine().unwrap().0,
            },
            _ => RecordShape::plain(case.head_dim),
        };
        let read = if case.arm == Arm::Fused { record } else { RecordShape::plain(case.head_dim) };
        for crowded in [false, true] {
            let config = super::Config::choose(&read, gpu.shared_bytes(), crowded);
            programs.push(super::program(&read, &config, case.softcap.is_some(), OutFormat::F32));
        }
        programs.push(crate::append::cuda::program(&record));
        let prefill = super::prefill::Config::choose(&record, gpu.architecture());
        programs.push(super::prefill::program(&record, &prefill, case.softcap.is_some(), OutFormat::F32));
    }
    programs.sort_by_key(|p| p.title());
    programs.dedup();
    gpu.prepare(&programs).unwrap();
}

fn decode(head_dim: usize, scheme: impl Into<String>, len: usize) -> Case {
    Case { q_heads: 8, kv_heads: 2, ..Case::decode(head_dim, scheme, len) }
}

/// Every pair of bits, and every group_len with every head_dim.
#[test]
fn bits_groups_and_head_dims() {
    let mut cases = Vec::new();
    for (k, v) in crate::scheme::BITS.into_iter().flat_map(|k| crate::scheme::BITS.map(|v| (k, v))) {
        cases.push(decode(128, format!("k{k}v{v}g64w21"), 2 * 64 + 53));
    }
    for bits in crate::scheme::BITS {
        for group_len in crate::scheme::GROUP_LENS {
            for head_dim in crate::shape::HEAD_DIMS {
                cases.push(decode(head_dim, format!("k{bits}v{bits}g{group_len}w21s4"), 3 * group_len + 53));
            }
        }
    }
    for head_dim in crate::shape::HEAD_DIMS {
        cases.push(decode(head_dim, "f16", 333));
    }
    check(cases);
}

#[test]
fn every_gqa_ratio() {
    let of = |ratio| Case { q_heads: 2 * ratio, kv_heads: 2, ..Case::decode(128, "k4v4g64w32s4", 391) };
    check((1..=crate::shape::MAX_GQA_RATIO).map(of));
}

#[test]
fn lengths_around_every_edge() {
    let schemes = ["f16", "k4v4g64", "k4v4g64w128s4p512", "k2v2g64w1s16p64", "k8v8g64w100p128"];
    let edges = [2usize, 16, 32, 64, 96, 128, 192, 256, 512, 1024];
    let mut lens: Vec<_> = edges.into_iter().flat_map(|n| [n - 1, n, n + 1]).chain([37, 201, 335, 5000]).collect();
    lens.sort_unstable();
    lens.dedup();
    check(lens.iter().flat_map(|&len| schemes.map(|scheme| decode(128, scheme, len))));
}

#[test]
fn softcap_sink_logits_first_visible_and_windows_of_layers() {
    let mut cases = Vec::new();
    for scheme in ["f16", "k4v4g64w128s4p512", "k2v2g64w1s16p64"] {
        for first in [0, 3, 4, 16, 100, 511, 512, 777, 1270, 1280, 1399] {
            let case = Case { first_visible: Some(first), ..decode(128, scheme, 1400) };
            cases.push(Case { sink_logits: first % 2 == 1, ..case.clone() });
            cases.push(Case { softcap: Some(2.5), ..case });
        }
        for visible in [1, 31, 64, 129, 700, 5000] {
            cases.push(Case { visible: Some(visible), ..decode(128, scheme, 1300) });
        }
        cases.push(Case { softcap: Some(30.0), sink_logits: true, ..decode(128, scheme, 9000) });
    }
    check(cases);
}

#[test]
fn dequantizing_arms() {
    let mut cases = Vec::new();
    for arm in [Arm::DequantOnce, Arm::DequantStep] {
        for scheme in ["k4v4g64w128s4p512", "k2v2g64w1s16p64", "k8v8g64"] {
            cases.extend([3, 130, 1400].map(|len| Case { arm, ..decode(128, scheme, len) }));
        }
    }
    check(cases);
}

#[test]
fn hard_data() {
    let mut cases = Vec::new();
    for data in [Data::LoudChannels, Data::ConstantGroups, Data::ZeroValues, Data::OneHot] {
        for scheme in ["f16", "k4v4g64", "k2v2g64w1s16p64", "k8v8g64"] {
            let len = if data == Data::OneHot { 16 * 1024 + 5 } else { 421 };
            cases.push(Case { data, q_heads: 2, kv_heads: 1, ..Case::decode(128, scheme, len) });
        }
    }
    check(cases);
}

/// Rows of a prompt: one part after another, each over what the earlier ones left.
#[test]
fn rows_of_prompts() {
    let Some(gpu) = gpu() else { return };
    let mut cases = Vec::new();
    for scheme in ["f16", "k4v4g64w128s4p512", "k2v2g64w1s16p64", "k8v8g64", "k3v4g32w17s16"] {
        for (past, rows) in [(0, 1), (0, 300), (31, 2), (127, 5), (200, 41), (509, 7), (1200, 64), (3000, 17)] {
            let case = decode(128, scheme, past + rows);
            cases.push(Case { past, rows, sink_logits: rows % 2 == 1, ..case });
        }
        for visible in [1, 37, 200] {
            cases.push(Case { past: 500, rows: 90, visible: Some(visible), ..decode(128, scheme, 590) });
        }
    }
    for head_dim in crate::shape::HEAD_DIMS {
        for ratio in [1, 3, 16] {
            let (q_heads, kv_heads) = (2 * ratio, 2);
            cases.push(Case { past: 333, rows: 70, q_heads, kv_heads, ..decode(head_dim, "k4v4g64w128s4", 403) });
            cases.push(Case { past: 333, rows: 70, q_heads, kv_heads, ..decode(head_dim, "f16", 403) });
        }
    }
    cases.push(Case { past: 100, rows: 60, softcap: Some(2.5), ..decode(128, "k4v4g64w128s4p512", 160) });
    prepare(&gpu, &cases);
    let mut worst = 0.0f64;
    for case in &cases {
        let x = numbers(case);
        let (k, v, q) = (rounded(&x.k), rounded(&x.v), rounded(&x.q));
        let row = case.kv_heads * case.head_dim;
        // The cache after `past` tokens: as for a decode step of one more.
        let before = Case { past: case.past, rows: 1, ..case.clone() };
        let end = (case.past + 1) * row;
        let kv = [(k[..end].to_vec(), v[..end].to_vec())];
        let shape = LayerShape::new(case.q_heads, case.kv_heads, case.head_dim).unwrap();
        let config = LayerConfig { shape, scheme: case.scheme.parse().unwrap(), visible: case.visible };
        let mut cache = GpuCache::new(&gpu, &[config], case.arm, options(case, 1, false)).unwrap();
        let slot = cache.add(case.past + case.rows).unwrap();
        if case.past > 0 {
            cache.begin_prefill(slot, before.past).unwrap();
            let part = |x: &[f16]| gpu.upload(&x[..before.past * row]).unwrap();
            cache.append_prefill(0, &part(&kv[0].0), &part(&kv[0].1)).unwrap();
            cache.end_prefill();
        }
        cache.begin_prefill(slot, case.rows).unwrap();
        let part = |x: &[f16]| gpu.upload(&x[case.past * row..]).unwrap();
        cache.append_prefill(0, &part(&k), &part(&v)).unwrap();
        let device_q = gpu.upload(&q).unwrap();
        let mut out = gpu.upload(&vec![f32::NAN; q.len()]).unwrap();
        let logits: Vec<f32> = (0..case.q_heads).map(|h| h as f32 * 0.7 - 2.0).collect();
        let logits = gpu.upload(&logits).unwrap();
        let address = if case.sink_logits { crate::cuda::kind::address(&gpu, &logits) } else { 0 };
        let scale = (case.head_dim as f32).powf(-0.5);
        cache.attend_prompt(0, &device_q, &mut out, scale, address, 0).unwrap();
        cache.end_prefill();
        let out = gpu.stream().clone_dtoh(&out).unwrap();
        let (want, cpu) = oracle(case, &k, &v, &q);
        check_records(&gpu, case, &cache, &cpu);
        let err = worst_row(&out, &want, case.q_heads * case.head_dim);
        assert!(err <= TOLERANCE, "error {err:.2e} for {case:?}");
        worst = worst.max(err);
    }
    println!("{} prompts, worst error {worst:.1e}", cases.len());
}

/// A batch of different lengths gives each what it gets alone: within the tolerance, and to the bit in the invariant mode. Long
/// rows are split over many blocks, and short ones share a block.
#[test]
fn a_batch_of_different_lengths() {
    let Some(gpu) = gpu() else { return };
    for scheme in ["k4v4g64w128s4p512", "f16"] {
        for lens in
            [vec![1, 5, 64, 65, 4000, 700, 129, 2], (0..40).map(|i| 1 + i * 53 % 900).collect(), vec![20_000, 3]]
        {
            let of = |len: usize| decode(128, scheme, len);
            let x: Vec<_> = lens.iter().map(|&len| numbers(&of(len))).collect();
            let kv: Vec<_> = x.iter().map(|x| (rounded(&x.k), rounded(&x.v))).collect();
            let q: Vec<f16> = x.iter().flat_map(|x| rounded(&x.q)).collect();
            let case = of(*lens.iter().max().unwrap());
            let n = case.q_heads * case.head_dim;
            for invariant in [false, true] {
                let (mut cache, slots) = filled(&gpu, &case, &kv, invariant, usize::MAX);
                let out = step(&gpu, &case, &mut cache, &slots, &kv, &q);
                for (i, len) in lens.iter().enumerate() {
                    let (want, _) = oracle(&of(*len), &kv[i].0, &kv[i].1, &q[i * n..(i + 1) * n]);
                    let err = worst_row(&out[i * n..(i + 1) * n], &want, n);
                    assert!(err <= TOLERANCE, "{scheme} {lens:?}: row {i}: {err:.2e}");
                    if invariant {
                        let (mut alone, slot) = filled(&gpu, &case, &kv[i..=i], true, usize::MAX);
                        let one = step(&gpu, &case, &mut alone, &slot, &kv[i..=i], &q[i * n..(i + 1) * n]);
                        assert!(one == out[i * n..(i + 1) * n], "{scheme} {lens:?}: row {i} differs from itself alone");
                    }
                }
            }
        }
    }
}

/// A value that f16 cannot hold is reported with its place, once.
#[test]
fn a_value_beyond_f16_is_reported() {
    let Some(gpu) = gpu() else { return };
    let case = decode(128, "k4v4g64w128s4p512", 70);
    let x = numbers(&case);
    let (mut k, v) = (rounded(&x.k), rounded(&x.v));
    let row = case.kv_heads * case.head_dim;
    k[33 * row + 130] = f16::NAN;
    let (mut cache, _) = filled(&gpu, &case, &[(k, v)], false, usize::MAX);
    let fault = cache.take_fault().unwrap().expect("a fault");
    assert_eq!((fault.tensor, fault.layer, fault.head, fault.position), ("K", 0, 1, 33));
    assert!(fault.value.is_nan());
    assert_eq!(cache.take_fault().unwrap(), None);
}

/// Whoever gets the place of a sequence that brought such a value finds numbers only: a tile's rows that are not written anew are
/// multiplied with weights of 0.
#[test]
fn a_poisoned_place_is_clean_for_the_next_one() {
    let Some(gpu) = gpu() else { return };
    for scheme in ["f16", "k4v4g64w128s4p512"] {
        let case = decode(128, scheme, 40);
        let x = numbers(&case);
        let (k, mut v) = (rounded(&x.k), rounded(&x.v));
        let row = case.kv_heads * case.head_dim;
        v[33 * row..34 * row].fill(f16::INFINITY);
        let (mut cache, slots) = filled(&gpu, &case, &[(k, v)], false, usize::MAX);
        assert!(cache.take_fault().unwrap().is_some());
        cache.remove(slots[0]).unwrap();
        let (k, v, q) = (rounded(&x.k[..33 * row]), rounded(&x.v[..33 * row]), rounded(&x.q));
        let slot = cache.add(33).unwrap();
        cache.begin_prefill(slot, 32).unwrap();
        let part = |x: &[f16]| gpu.upload(&x[..32 * row]).unwrap();
        cache.append_prefill(0, &part(&k), &part(&v)).unwrap();
        cache.end_prefill();
        let out = step(&gpu, &case, &mut cache, &[slot], &[(k, v)], &q);
        assert!(out.iter().all(|x| x.is_finite()), "{scheme}");
    }
}
