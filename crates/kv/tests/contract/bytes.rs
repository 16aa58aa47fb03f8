//! Memory by formula: what a cache says it holds is what the formula of its scheme says, at every length, to the byte.
//! The formula is written here once more, from the scheme's words, not from the library's layout.
//! NOT here: process memory (../memory.rs).

use crate::numbers::{Request, Rig};
use kvant_kv::{Arm, CacheBytes, Codec, LayerConfig, LayerShape, PackedScheme, Scheme};

/// Tokens of a block of f16 or bf16 rows.
const BLOCK: usize = 32;

fn plain_row_bytes(shape: &LayerShape) -> usize {
    shape.kv_heads * shape.head_dim * 2 * 2
}

/// Bits of one half of a group of one kv head whose codec is not affine.
fn coded_bits(codec: Codec, d: usize, g: usize) -> usize {
    match codec {
        Codec::Affine { .. } => unreachable!("asked for others"),
        // A scale per token.
        Codec::Turbo { bits } | Codec::Sign { bits } => g * (16 + d * bits as usize),
        Codec::Residual { first, second } => g * (16 + d * (first + second) as usize),
        // 4 or 8 bits per sub-vector, in whole lines of 64 bytes.
        Codec::Vector { centroids, sub_len } => {
            (g * d / sub_len * if centroids == 16 { 4 } else { 8 }).div_ceil(512) * 512
        }
    }
}

/// Bits of K and V codes and their f16 scales and zeros, for one group of tokens over all kv heads.
fn group_bytes(shape: &LayerShape, p: &PackedScheme) -> usize {
    let (d, g) = (shape.head_dim, p.group_len());
    // A loud channel has two more bits; loud channels come in eights.
    let loud = if p.loud() > 0 { d.div_ceil(p.loud()).div_ceil(8) * 8 } else { 0 };
    let k = match p.k() {
        Codec::Affine { bits, .. } => (d * bits as usize + loud * 2) * g + d * 32,
        other => coded_bits(other, d, g),
    };
    let v = match p.v() {
        Codec::Affine { bits, .. } => d * g * bits as usize + g * d.div_ceil(g.min(d)) * 32,
        other => coded_bits(other, d, g),
    };
    assert_eq!((k + v) % 8, 0);
    shape.kv_heads * (k + v) / 8
}

/// The bytes of one layer with sequences of (committed, all) tokens.
fn expected(config: &LayerConfig, arm: Arm, sequences: &[(usize, usize)]) -> CacheBytes {
    let mut sum = CacheBytes::default();
    let row = plain_row_bytes(&config.shape);
    for &(committed, len) in sequences {
        sum.f16_bytes_equivalent += len * row;
        let scheme = match arm {
            Arm::F16 => Scheme::F16,
            Arm::Bf16 => Scheme::Bf16,
            _ => config.scheme,
        };
        let Scheme::Packed(p) = scheme else {
            sum.window_bytes += len.div_ceil(BLOCK) * BLOCK * row;
            continue;
        };
        // f16 rows stay from the edge of the newest committed token on: uncommitted rows still see them.
        let (kept_from, packed) = (scheme.packed_len(committed), scheme.packed_len(len));
        sum.packed_bytes += packed / p.group_len() * group_bytes(&config.shape, &p);
        sum.window_bytes += (len - kept_from).div_ceil(BLOCK) * BLOCK * row;
        sum.window_bytes += if len > 0 { p.sinks() * row } else { 0 };
        sum.copy_bytes += if arm == Arm::DequantOnce { packed * row } else { 0 };
    }
    sum
}

/// Compares a rig whose layers all hold sequences of (committed, all) tokens.
fn check(rig: &Rig, arm: Arm, schemes: &[&str], sequences: &[(usize, usize)]) {
    let layers = schemes.iter().map(|s| LayerConfig { shape: rig.shape, scheme: s.parse().unwrap(), visible: None });
    let want = layers.map(|config| expected(&config, arm, sequences)).fold(CacheBytes::default(), std::ops::Add::add);
    assert_eq!(rig.cache.bytes(), want, "{schemes:?} {arm} {sequences:?}");
}

#[test]
fn bytes_equal_the_formula_at_every_length_and_after_every_operation() {
    let all = [
        "f16",
        "bf16",
        "k4v4g64w128s4p512",
        "k2v8g32w17s16",
        "k3v3g128",
        "k8v2g64w1p64",
        "k2l8v3g64w9s4.mse",
        "ktq3vsb1g64w9s4",
        "kvq16x8vvq256x4g32w5",
    ];
    for (head_dim, kv_heads) in [(64, 1), (80, 2), (128, 3)] {
        let shape = LayerShape::new(kv_heads, kv_heads, head_dim).unwrap();
        for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep, Arm::F16, Arm::Bf16] {
            let mut rig = Rig::layers(shape, &all, arm, "portable", 1);
            check(&rig, arm, &all, &[]);
            let a = rig.add(1);
            check(&rig, arm, &all, &[(0, 0)]);
            // Step by step around the first edges, then in strides.
            let mut len = 0;
            for rows in std::iter::repeat_n(1, 200).chain([61, 1, 2, 250, 1, 13, 512, 3]) {
                rig.append(&[(a, rows)]);
                check(&rig, arm, &all, &[(len, len + rows)]);
                rig.commit(&[(a, rows)]);
                len += rows;
                check(&rig, arm, &all, &[(len, len)]);
            }
            // A second sequence, drafts, and a trim of the drafts.
            let b = rig.add(2);
            rig.append(&[(b, 77), (a, 5)]);
            check(&rig, arm, &all, &[(len, len + 5), (0, 77)]);
            rig.cache.trim(a.seq, len + 2).unwrap();
            check(&rig, arm, &all, &[(len, len + 2), (0, 77)]);
            rig.cache.trim(a.seq, len).unwrap();
            rig.commit(&[(b, 77)]);
            check(&rig, arm, &all, &[(len, len), (77, 77)]);
            rig.cache.remove_sequence(a.seq).unwrap();
            check(&rig, arm, &all, &[(77, 77)]);
            rig.cache.remove_sequence(b.seq).unwrap();
            assert_eq!(rig.cache.bytes(), CacheBytes::default(), "everything went back");
            assert!(rig.cache.is_empty());
        }
    }
}

/// A sequence trimmed to nothing holds nothing, and can start again.
#[test]
fn trim_to_zero_gives_everything_back() {
    let shape = LayerShape::new(2, 2, 64).unwrap();
    let schemes = ["k4v4g64w128s4p512", "f16", "bf16", "k2v2g32"];
    for arm in [Arm::Fused, Arm::DequantOnce] {
        let mut rig = Rig::layers(shape, &schemes, arm, "portable", 1);
        let a: Request = rig.add(1);
        rig.append(&[(a, 300)]);
        rig.cache.trim(a.seq, 0).unwrap();
        assert_eq!(rig.cache.bytes(), CacheBytes::default());
        rig.step(&[(a, 300)]);
        check(&rig, arm, &schemes, &[(300, 300)]);
    }
}

/// The size that is promised to users: 2,000 tokens, head_dim 64.
#[test]
fn packed_caches_are_as_many_times_smaller_as_their_bits_say() {
    let shape = LayerShape::new(9, 3, 64).unwrap();
    // 2,000 tokens of 16 bits against 1,856 packed, 160 (blocks of 32) in f16 and the sinks: with k4v4g64w128
    // 32,000 / (1,856 * 4.5 + 160 * 16) = 2.93. `kvant info` says 2.96: it compares with f16 blocks of 32 as well.
    let promised =
        [("k4v4g64w128", 2.93), ("k2v2g32w128", 3.94), ("k8v8g64w128s4p512", 1.74), ("k4v4g64w128s4p512", 2.92)];
    for (scheme, promised) in promised {
        let mut rig = Rig::new(shape, scheme, "portable", 1);
        let request = rig.add(1);
        rig.append(&[(request, 2000)]);
        rig.commit(&[(request, 2000)]);
        let b = rig.cache.bytes();
        let times = b.f16_bytes_equivalent as f64 / (b.packed_bytes + b.window_bytes) as f64;
        println!("{scheme}: {times:.2} times smaller than f16");
        assert!((times - promised).abs() <= 0.01, "{scheme}: {times}");
    }
}
