//! Parity: every entry of the VARIANTS table against the f64 oracle, over a table of cases. In: shapes, schemes, lengths,
//! options and data; out: a failure that names variant and case. It prints each variant's worst error, and what it
//! skips with the reason; `REQUIRE_KERNELS=a,b` fails when a named one cannot run here.
//! NOT here: the oracle itself (reference.rs; golden.rs checks both against a foreign one), exactness to the bit
//! (tests/contract/exact.rs).

use super::cpu::{VARIANTS, Variant};
use super::reference::attend_cache_f64;
use super::{AttendOptions, Attention};
use crate::{Arm, Cache, LayerConfig, LayerShape, Rows, Scheme};
use std::collections::BTreeMap;

/// Largest relative L2 error of arms that round dequantized values to f16 (2^-11 each).
const ROUNDED_TOLERANCE: f64 = 3e-3;

/// What the numbers of a case are like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Data {
    /// Normal numbers.
    Plain,
    /// K channels 3 and d-1, V channel 1: 30 times the others, as trained models have them.
    LoudChannels,
    /// Every channel of K and every row of V has one value for a whole group (scale 0).
    ConstantGroups,
    ZeroValues,
    /// K and V in the subnormals of f16, down to the smallest.
    Subnormal,
    /// V of +-65504; one K channel of +-65504 under a small query.
    Extreme,
    /// Some V of +-1e30; one K channel of +-1e30 under a small query.
    BeyondF16,
    /// V in the subnormals of f32 and above them, K ordinary.
    SubnormalF32,
    /// One key's logit is 15 above all others, which are flat.
    OneHot,
}

/// One call to check: `past` tokens appended and committed, then `rows` appended and attended.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scheme: String,
    pub arm: Arm,
    pub past: usize,
    pub rows: usize,
    pub first_visible: Option<usize>,
    /// The layer's window.
    pub visible: Option<usize>,
    pub softcap: Option<f32>,
    pub sink_logits: bool,
    pub data: Data,
}

impl Case {
    /// The last of `len` tokens over one kv head with two query heads.
    pub fn decode(head_dim: usize, scheme: impl Into<String>, len: usize) -> Self {
        Self {
            q_heads: 2,
            kv_heads: 1,
            head_dim,
            scheme: scheme.into(),
            arm: Arm::Fused,
            past: len - 1,
            rows: 1,
            first_visible: None,
            visible: None,
            softcap: None,
            sink_logits: false,
            data: Data::Plain,
        }
    }
}

/// xorshift64*: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Nearly normal: mean 0, variance 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 3f32.sqrt()
    }
}

pub(super) struct Numbers {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

pub(super) fn numbers(case: &Case) -> Numbers {
    let (d, tokens, kv_heads) = (case.head_dim, case.past + case.rows, case.kv_heads);
    let mut random = Random(0x9E37_79B9 + tokens as u64 * 131 + d as u64);
    let mut normals = |n: usize| -> Vec<f32> { (0..n).map(|_| random.normal()).collect() };
    let mut q = normals(case.rows * case.q_heads * d);
    let (mut k, mut v) = (normals(tokens * kv_heads * d), normals(tokens * kv_heads * d));
    // Means other than 0 make zeros matter.
    v.iter_mut().for_each(|x| *x += 0.3);
    let scheme: Scheme = case.scheme.parse().unwrap();
    let group_len = scheme.packed().map_or(32, |p| p.group_len());
    let place = |i: usize| (i / (kv_heads * d), i % d);
    match case.data {
        Data::Plain => {}
        Data::LoudChannels => {
            for i in 0..k.len() {
                let (_, channel) = place(i);
                k[i] *= if channel == 3 || channel == d - 1 { 30.0 } else { 1.0 };
                v[i] *= if channel == 1 { 30.0 } else { 1.0 };
            }
            // Scores of some tens, as loud channels give them in trained models, which have learned to live with them.
            q.iter_mut().enumerate().for_each(|(i, x)| *x *= if [3, d - 1].contains(&(i % d)) { 0.2 } else { 1.0 });
        }
        Data::ConstantGroups => {
            for i in 0..k.len() {
                let (token, channel) = place(i);
                k[i] = ((token / group_len * 7 + channel * 3) % 11) as f32 / 5.0 - 1.0;
                v[i] = (token % 13) as f32 - 6.0;
            }
        }
        Data::ZeroValues => v.fill(0.0),
        Data::Subnormal => {
            let smallest = 2f32.powi(-24);
            for x in k.iter_mut().chain(&mut v) {
                *x = (*x * 20.0).round() * smallest;
            }
        }
        Data::Extreme => {
            for i in 0..k.len() {
                let (token, channel) = place(i);
                v[i] = if (token * 5 + channel * 3) % 7 < 4 { 65504.0 } else { -65504.0 };
                if channel == 2 {
                    k[i] = if token % 3 == 0 { 65504.0 } else { -65504.0 };
                }
            }
            q.iter_mut().skip(2).step_by(d).for_each(|x| *x *= 1e-5);
        }
        Data::BeyondF16 => {
            for i in 0..k.len() {
                let (token, channel) = place(i);
                v[i] *= if channel % 2 == 0 { 1e30 } else { 1.0 };
                if channel == 2 {
                    k[i] = if token % 3 == 0 { 1e30 } else { -1e30 };
                }
            }
            q.iter_mut().skip(2).step_by(d).for_each(|x| *x *= 1e-30);
        }
        Data::SubnormalF32 => v.iter_mut().for_each(|x| *x *= 2f32.powi(-126)),
        Data::OneHot => {
            k.iter_mut().for_each(|x| *x *= 0.01);
            let ratio = case.q_heads / kv_heads;
            let sm_scale = (d as f32).powf(-0.5);
            for head in 0..kv_heads {
                let q = &q[head * ratio * d..][..d];
                let norm: f32 = q.iter().map(|x| x * x).sum();
                let hot = &mut k[(tokens / 3 * kv_heads + head) * d..][..d];
                hot.iter_mut().zip(q).for_each(|(k, q)| *k = 15.0 * q / (norm * sm_scale));
            }
        }
    }
    Numbers { q, k, v }
}

/// Relative L2 error of the worst query row (all its heads); absolute where the exact row is zero. NaN gives NaN.
pub(super) fn worst_row(got: &[f32], want: &[f64], row_len: usize) -> f64 {
    assert_eq!(got.len(), want.len());
    let rows = got.chunks_exact(row_len).zip(want.chunks_exact(row_len)).map(|(got, want)| {
        let off: f64 = got.iter().zip(want).map(|(&g, &w)| (g as f64 - w).powi(2)).sum();
        let size: f64 = want.iter().map(|w| w * w).sum();
        if size == 0.0 { off.sqrt() } else { (off / size).sqrt() }
    });
    // f64::max would drop a NaN.
    rows.fold(0.0, |worst, e| if e > worst || e.is_nan() { e } else { worst })
}

/// The variants that run here. Says which do not and why; a kernel named in REQUIRE_KERNELS must.
fn variants() -> Vec<&'static Variant> {
    let (run, skip): (Vec<_>, Vec<_>) = VARIANTS.iter().partition(|v| (v.available)().is_ok());
    for v in skip {
        println!("skipped {}: {}", v.name, (v.available)().unwrap_err());
    }
    let required = std::env::var("REQUIRE_KERNELS").unwrap_or_default();
    for name in required.split(',').map(str::trim).filter(|n| !n.is_empty()) {
        assert!(run.iter().any(|v| v.name == name), "REQUIRE_KERNELS names {name}, which did not run");
    }
    run
}

/// Checks cases against the oracle with every variant, and prints each one's worst error.
fn check(cases: impl IntoIterator<Item = Case>) {
    let mut kernels: Vec<_> = variants().into_iter().map(|v| (v, Attention::new(2, Some(v.name)).unwrap())).collect();
    let mut worst = BTreeMap::new();
    let mut count = 0;
    for case in cases {
        count += 1;
        let shape = LayerShape::new(case.q_heads, case.kv_heads, case.head_dim).unwrap();
        let scheme = case.scheme.parse().unwrap();
        let mut cache = Cache::new(&[LayerConfig { shape, scheme, visible: case.visible }], case.arm).unwrap();
        if let Some(p) = scheme.packed().filter(|_| !matches!(case.arm, Arm::F16 | Arm::Bf16)) {
            // Every head and sub-vector its own.
            let books = |codec, seed| crate::append::parity::books(codec, case.head_dim, case.kv_heads, seed);
            cache.set_codebooks(0, books(p.k(), 1), books(p.v(), 2)).unwrap();
        }
        let seq = cache.add_sequence();
        let x = numbers(&case);
        let past = case.past * shape.row_len();
        if case.past > 0 {
            let rows = [Rows { seq, rows: case.past }];
            cache.append(0, &rows, &x.k[..past], &x.v[..past]).unwrap();
            cache.commit(0, &rows).unwrap();
        }
        let rows = [Rows { seq, rows: case.rows }];
        cache.append(0, &rows, &x.k[past..], &x.v[past..]).unwrap();

        let logits: Vec<f32> = (0..case.q_heads).map(|h| h as f32 * 0.7 - 2.0).collect();
        let first_visible: Vec<usize> = case.first_visible.into_iter().collect();
        let options = AttendOptions {
            softcap: case.softcap,
            sink_logits: case.sink_logits.then_some(&logits[..]),
            first_visible: &first_visible,
            ..AttendOptions::new(case.head_dim)
        };
        let want = attend_cache_f64(&cache, 0, &rows, &x.q, &options).unwrap();
        let packed = cache.bytes().packed_bytes > 0;
        for (variant, attention) in &mut kernels {
            let mut out = vec![f32::NAN; x.q.len()];
            attention.attend(&cache, 0, &rows, &x.q, &mut out, &options).unwrap();
            let tolerance = match case.arm {
                _ if !packed => variant.plain_tolerance,
                Arm::Fused | Arm::F16 | Arm::Bf16 => variant.packed_tolerance,
                Arm::DequantOnce | Arm::DequantStep => ROUNDED_TOLERANCE,
            };
            let err = worst_row(&out, &want, case.q_heads * case.head_dim);
            assert!(err <= tolerance, "{}: error {err:.2e} > {tolerance:.0e} for {case:?}", variant.name);
            let entry = worst.entry((variant.name, packed)).or_insert(0.0);
            *entry = err.max(*entry);
        }
    }
    assert!(count > 0);
    for ((name, packed), err) in worst {
        println!("{name}, {}: worst error {err:.1e}", if packed { "packed" } else { "plain only" });
    }
    println!("{count} cases");
}

/// Every pair of bits, with every group_len and head_dim; the length leaves packed groups, a window and an odd tail.
#[test]
fn bits_groups_and_head_dims() {
    let mut cases = Vec::new();
    for k_bits in crate::scheme::BITS {
        for v_bits in crate::scheme::BITS {
            for group_len in crate::scheme::GROUP_LENS {
                for head_dim in crate::shape::HEAD_DIMS {
                    let scheme = format!("k{k_bits}v{v_bits}g{group_len}w21");
                    let case = Case::decode(head_dim, scheme, 2 * group_len + 53);
                    // Few query vectors on a kv head, and as many as any kernel takes at once.
                    cases.push(Case { q_heads: 8, ..case.clone() });
                    cases.push(case);
                }
            }
        }
    }
    check(cases);
}

/// Every share of loud channels, with every group_len, head_dim and arm.
#[test]
fn loud_channels() {
    let mut cases = Vec::new();
    for loud in &crate::scheme::LOUD[1..] {
        for group_len in crate::scheme::GROUP_LENS {
            for head_dim in crate::shape::HEAD_DIMS {
                let scheme = format!("k2l{loud}v2g{group_len}w21s4.mse");
                for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep] {
                    let case = Case { arm, ..Case::decode(head_dim, &scheme, 2 * group_len + 53) };
                    cases.push(Case { q_heads: 8, ..case.clone() });
                    cases.push(case);
                }
            }
        }
    }
    check(cases);
}

/// Every codec but affine ones, of keys and of values, with every group_len, head_dim and arm.
#[test]
fn codecs() {
    let mut cases = Vec::new();
    for (at, codec) in crate::append::parity::CODECS.into_iter().enumerate() {
        for group_len in crate::scheme::GROUP_LENS {
            for head_dim in crate::shape::HEAD_DIMS {
                let other = ["4", "2l4", "8"][at % 3].replace("2l4", "2");
                let tail = ["w21", "w33s4", "w64s16p256"][(at + head_dim / 16) % 3];
                for scheme in
                    [format!("k{codec}v{other}g{group_len}{tail}"), format!("k{other}v{codec}g{group_len}{tail}")]
                {
                    let case = Case::decode(head_dim, scheme, 2 * group_len + 353);
                    cases.push(Case { q_heads: [1, 4, 8, 15][at % 4], ..case.clone() });
                    cases.push(case.clone());
                    for arm in [Arm::DequantOnce, Arm::DequantStep] {
                        cases.push(Case { arm, past: 140, rows: 70, ..case.clone() });
                    }
                }
            }
        }
    }
    check(cases);
}

#[test]
fn every_gqa_ratio() {
    let mut cases = Vec::new();
    for ratio in 1..=crate::shape::MAX_GQA_RATIO {
        for (head_dim, scheme) in [
            (64, "k4v4g64w32s4"),
            (80, "k3v8g32"),
            (128, "k2v2g128w5"),
            (128, "k2l4v2g64"),
            (64, "ktq3vsb2g64"),
            (64, "kvq16x4vvq256x4g32"),
            (256, "f16"),
            (96, "bf16"),
        ] {
            let case = Case::decode(head_dim, scheme, 291);
            cases.push(Case { q_heads: 2 * ratio, kv_heads: 2, ..case });
        }
    }
    check(cases);
}

/// One token, odd lengths, and one below, at and above each edge of groups, windows, pages, blocks and key ranges.
#[test]
fn lengths_around_every_edge() {
    let schemes = [
        "f16",
        "bf16",
        "k4v4g32",
        "k8v4g32w64",
        "k4v8g64w128s4",
        "k2v2g32w1s16p64",
        "k3v3g64w100p128",
        "k4v2g128w31s1p512",
        "k2l8v2g64w128s4p512.ls",
        "ktq4vtq2g64w128s4p512",
        "ksb1v4g32w7",
        "kvq256x8vvq16x4g64w64s4",
    ];
    let edges = [2usize, 16, 32, 64, 96, 101, 128, 160, 192, 256, 512, 640, 1024];
    let mut lens: Vec<_> = edges.into_iter().flat_map(|n| [n - 1, n, n + 1]).chain([37, 201, 335]).collect();
    lens.sort_unstable();
    lens.dedup();
    check(lens.iter().flat_map(|&len| schemes.map(|scheme| Case::decode(64, scheme, len))));
}

#[test]
fn softcap_sink_logits_and_first_visible() {
    let len = 1400;
    let mut cases = Vec::new();
    for scheme in [
        "f16",
        "bf16",
        "k4v4g64w128s4p512",
        "k2v3g32s16",
        "k8v8g128w300",
        "ktq3vrvq21g64w128s4p512",
        "kvq16x4vvq16x8g32w9",
    ] {
        for first in [0, 1, 3, 4, 15, 16, 31, 32, 100, 511, 512, 513, 777, 1024, 1270, 1272, 1280, 1398, 1399] {
            let case = Case { first_visible: Some(first), ..Case::decode(64, scheme, len) };
            cases.push(Case { sink_logits: first % 2 == 1, ..case.clone() });
            cases.push(Case { softcap: Some(2.5), ..case });
        }
        for softcap in [0.5, 30.0] {
            let case = Case { softcap: Some(softcap), sink_logits: true, ..Case::decode(96, scheme, len) };
            cases.push(Case { q_heads: 15, kv_heads: 3, ..case });
        }
    }
    check(cases);
}

/// Windows that begin inside a group, a block and a range, at their edges, and among the sinks, for one row and for
/// chunks whose rows begin at different keys.
#[test]
fn windows_of_layers() {
    let schemes = [
        "f16",
        "bf16",
        "k4v4g64w128s4p512",
        "k2v3g32s16",
        "k3v8g128w20s2",
        "k2l4v4g64.mse",
        "ktq2vtq3g64w128s4p512",
        "ksb2vvq256x4g32s3",
    ];
    let mut cases = Vec::new();
    for scheme in schemes {
        let case = |head_dim, past, rows, visible| Case { past, rows, visible, ..Case::decode(head_dim, scheme, 1) };
        for visible in [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 512, 513, 700, 1290, 1296, 1299, 1300, 5000] {
            cases.push(case(64, 1299, 1, Some(visible)));
            cases.push(Case { q_heads: 6, kv_heads: 2, ..case(80, 1291, 9, Some(visible)) });
        }
        for (past, rows) in [(0, 1), (0, 300), (64, 64), (500, 24), (509, 7), (40, 600)] {
            for visible in [1, 37, 64, 200] {
                cases.push(Case { q_heads: 3, ..case(64, past, rows, Some(visible)) });
            }
        }
        // The call's own first position hides more, or less.
        for first in [10, 590, 600] {
            cases.push(Case { first_visible: Some(first), ..case(64, 600, 30, Some(40)) });
        }
        let softcap = Case { softcap: Some(3.0), sink_logits: true, q_heads: 16, ..case(256, 700, 40, Some(512)) };
        cases.push(softcap);
        for arm in [Arm::DequantOnce, Arm::DequantStep, Arm::F16] {
            cases.push(Case { arm, ..case(96, 700, 70, Some(100)) });
        }
    }
    check(cases);
}

/// A query that sees no key at all gives zeros, not NaN: older rows of a call whose first_visible is beyond them.
#[test]
fn a_row_that_sees_nothing_is_zero() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for scheme in ["f16", "bf16", "k4v4g32", "ktq2vtq2g32", "kvq16x4vvq256x8g32"] {
        let mut cache =
            Cache::new(&[LayerConfig { shape, scheme: scheme.parse().unwrap(), visible: None }], Arm::Fused).unwrap();
        let seq = cache.add_sequence();
        let rows = [Rows { seq, rows: 100 }];
        let x = numbers(&Case { rows: 100, past: 0, q_heads: 4, kv_heads: 2, ..Case::decode(64, scheme, 100) });
        cache.append(0, &rows, &x.k, &x.v).unwrap();
        for variant in variants() {
            let mut attention = Attention::new(2, Some(variant.name)).unwrap();
            let mut out = vec![f32::NAN; x.q.len()];
            for first in [70, 99, 100, 5000] {
                let options = AttendOptions { first_visible: &[first], ..AttendOptions::new(64) };
                attention.attend(&cache, 0, &rows, &x.q, &mut out, &options).unwrap();
                let (unseen, seen) = out.split_at(first.min(100) * 4 * 64);
                assert!(unseen.iter().all(|&x| x == 0.0), "{} {scheme} {first}", variant.name);
                assert!(seen.iter().all(|&x| x.is_finite() && x != 0.0), "{} {scheme} {first}", variant.name);
            }
        }
    }
}

/// Rows of a prefill, of a later chunk, and of drafts: tiles that cross edges of groups, windows, pages and tiles.
#[test]
fn several_rows() {
    let mut cases = Vec::new();
    let schemes = [
        "f16",
        "bf16",
        "k4v4g32",
        "k4v4g64w128s4p512",
        "k3v2g32w64s4p64",
        "k2v8g32w17s16",
        "k8v3g128w1",
        "k4v4g32w0s4p32",
        "ktq4vtq3g64w128s4p512",
        "ksb3v4g32w32s4p64",
        "kvq256x4vvq16x4g32w17s16",
    ];
    for scheme in schemes {
        for (past, rows) in [(0, 1), (0, 33), (0, 300), (31, 2), (64, 64), (127, 5), (200, 41), (500, 24), (509, 7)] {
            let case = Case { past, rows, ..Case::decode(64, scheme, 1) };
            cases.push(Case { q_heads: 6, kv_heads: 2, ..case });
        }
        cases.push(Case { past: 600, rows: 50, first_visible: Some(513), ..Case::decode(80, scheme, 1) });
        cases.push(Case {
            past: 90,
            rows: 70,
            first_visible: Some(7),
            softcap: Some(5.0),
            ..Case::decode(96, scheme, 1)
        });
    }
    check(cases);
}

/// The arms that read f16 copies see the same numbers, rounded to f16.
#[test]
fn dequantizing_arms() {
    let mut cases = Vec::new();
    for arm in [Arm::DequantOnce, Arm::DequantStep, Arm::F16, Arm::Bf16] {
        for scheme in [
            "k4v4g64w128s4p512",
            "k2v3g32s4",
            "k8v2g128w31",
            "k3v8g32w64p96",
            "ktq1vsb4g64w31s4",
            "krvq22vvq16x4g32",
            "f16",
            "bf16",
        ] {
            for (past, rows) in [(0, 1), (96, 1), (640, 1), (128, 20), (0, 150)] {
                cases.push(Case { arm, past, rows, ..Case::decode(80, scheme, 1) });
            }
        }
    }
    check(cases);
}

#[test]
fn hard_data() {
    let mut cases = Vec::new();
    for data in [Data::LoudChannels, Data::ConstantGroups, Data::ZeroValues, Data::Subnormal, Data::Extreme] {
        for bits in ["k2v2", "k3v3", "k4v4", "k8v8", "k8v2", "k2v8"] {
            for (head_dim, rest) in [(64, "g32w16"), (128, "g64w20s4"), (80, "g64"), (256, "g128w40")] {
                cases.push(Case { data, ..Case::decode(head_dim, format!("{bits}{rest}"), 421) });
            }
        }
        for scheme in ["ktq4vtq4g64w20s4", "ksb1vsb3g32w16", "krvq21vtq1g128w40"] {
            cases.push(Case { data, ..Case::decode(128, scheme, 421) });
        }
        for scheme in ["f16", "bf16"] {
            cases.push(Case { data, ..Case::decode(128, scheme, 421) });
        }
    }
    check(cases);
}

/// Numbers that bf16 holds and f16 does not: V near the largest, K that tiny queries meet, and the subnormals of f32.
#[test]
fn the_range_of_bf16() {
    let mut cases = Vec::new();
    for data in [Data::BeyondF16, Data::SubnormalF32] {
        for head_dim in crate::shape::HEAD_DIMS {
            for (past, rows) in [(420, 1), (40, 7)] {
                cases.push(Case { data, past, rows, q_heads: 3, ..Case::decode(head_dim, "bf16", 1) });
            }
        }
    }
    check(cases);
}

/// One logit 15 above many flat ones: together the flat ones still carry weight, each far below the largest.
#[test]
fn one_logit_far_above_flat_ones() {
    let schemes =
        ["k8v8g64", "k4v4g64w128s4p512", "k2v2g32", "k3v4g128w31", "ktq4vtq4g64", "kvq256x4vvq256x4g64", "f16", "bf16"];
    check(schemes.map(|scheme| Case { data: Data::OneHot, ..Case::decode(64, scheme, 16 * 1024 + 5) }));
}
