//! Parity of append: every entry of the VARIANTS table against the plain formula (reference.rs), to the bit. Prints what
//! it skips and why. `REQUIRE_KERNELS=a,b` fails when a variant here whose name begins one of these (`avx512` begins
//! `avx512-vnni`) cannot run; attend/parity.rs refuses names that no kernel has.
//! NOT here: the golden file (golden.rs), bytes of a cache after any history (cache/tests.rs).

use super::cpu::{Dequantize, VARIANTS, Variant};
use super::reference::{dequantize_plain, write_record_plain, write_rows_plain};
use crate::cache::layout::{BLOCK_LEN, Half, PlainLayout, RecordLayout};
use crate::{Codebook, Codec, Fit, LayerShape, RowFormat, Scheme};
use half::f16;

/// The variants that run here.
fn variants() -> Vec<&'static Variant> {
    let (run, skip): (Vec<_>, Vec<_>) = VARIANTS.iter().partition(|v| (v.available)().is_ok());
    let required = std::env::var("REQUIRE_KERNELS").unwrap_or_default();
    for v in skip {
        let why = (v.available)().unwrap_err();
        println!("skipped {}: {why}", v.name);
        let named = required.split(',').any(|r| r.trim().starts_with(v.name));
        assert!(!named, "REQUIRE_KERNELS={required} needs append's {}, which did not run: {why}", v.name);
    }
    run
}

/// xorshift64*: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In -1..1, with 24 bits.
    fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// What the numbers of a group are like.
#[derive(Debug, Clone, Copy)]
enum Data {
    Plain,
    /// Every finite f16 bit pattern is as likely: subnormals, both zeros, +-65504.
    AnyBits,
    /// 0 and the smallest subnormals: scales that round to 0 or to a subnormal far from the exact step.
    Subnormal,
    /// Only +-65504.
    Extreme,
    /// Zeros of both signs.
    SignedZeros,
    Constant,
    /// Whole multiples of a quarter: many exact ties.
    Ties,
    /// Far from 0 and close together.
    Offset,
}

const DATA: [Data; 8] = [
    Data::Plain,
    Data::AnyBits,
    Data::Subnormal,
    Data::Extreme,
    Data::SignedZeros,
    Data::Constant,
    Data::Ties,
    Data::Offset,
];

fn number(data: Data, random: &mut Random) -> f16 {
    let x = random.uniform();
    match data {
        Data::Plain => f16::from_f32(x * 3.0),
        Data::AnyBits => loop {
            let x = f16::from_bits((random.bits() >> 48) as u16);
            if x.is_finite() {
                break x;
            }
        },
        Data::Subnormal => f16::from_bits((random.bits() >> 48) as u16 & 0x800f),
        Data::Extreme => f16::from_f32(65504f32.copysign(x)),
        Data::SignedZeros => f16::from_f32(0f32.copysign(x)),
        Data::Constant => f16::from_f32(-0.3),
        Data::Ties => f16::from_f32((x * 40.0).round() * 0.25),
        Data::Offset => f16::from_f32(1000.0 + x * 4.0),
    }
}

/// The kv head whose records are compared: not the first, whose codebook would be taken for any other's.
const HEAD: usize = 2;
/// Codecs that are not affine.
pub(crate) const CODECS: [&str; 15] = [
    "tq1", "tq2", "tq3", "tq4", "rvq11", "rvq21", "rvq22", "sb1", "sb2", "sb3", "sb4", "vq16x4", "vq16x8", "vq256x4",
    "vq256x8",
];

/// Codebooks of numbers at random, a different one for each head; none where the codec has none.
pub(crate) fn books(codec: Codec, head_dim: usize, heads: usize, seed: u64) -> Vec<Codebook> {
    let Codec::Vector { centroids, sub_len } = codec else { return Vec::new() };
    let mut random = Random(0x1234_5678_9ABC_DEF1 ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut book = |_| {
        let levels = (0..head_dim * centroids).map(|_| (random.bits() >> 33) as u8).collect();
        let mut channels =
            |from: f32, to: f32| (0..head_dim).map(|_| from + (to - from) * random.uniform().abs()).collect();
        let (base, step) = (channels(-2.5, -1.5), channels(0.01, 0.02));
        Codebook::from_parts(centroids, sub_len, base, step, levels).unwrap()
    };
    (0..heads).map(&mut book).collect()
}

/// Nearest centroids in vectors are those found one after another, at every number of rows around a vector's.
#[test]
fn nearest_centroids_of_rows() {
    let mut random = Random(3);
    for (centroids, sub_len) in [(16, 4), (16, 8), (256, 4), (256, 8)] {
        let book = &books(Codec::Vector { centroids, sub_len }, 64, 1, 5)[0];
        let (values, half_squares) = book.values_of(3);
        for n in [1, 2, 15, 16, 17, 31, 32, 33, 200] {
            let mut rows: Vec<f32> = (0..n * sub_len).map(|_| number(Data::Plain, &mut random).to_f32()).collect();
            // A row that is as far from every centroid: all scores are equal but for the centroids' own part.
            rows[..sub_len].fill(0.0);
            let want: Vec<u8> = rows.chunks_exact(sub_len).map(|row| book.nearest(3, row)).collect();
            for v in variants() {
                let mut got = vec![0xAA; n];
                (v.assign)(&rows, sub_len, values, half_squares, &mut got);
                assert_eq!(got, want, "{}: {centroids} x {sub_len}, {n} rows", v.name);
            }
        }
    }
}

/// Every codec of keys and of values: the bytes of the formula, and its numbers back.
#[test]
fn coded_records() {
    let variants = variants();
    let mut count = 0;
    for head_dim in crate::shape::HEAD_DIMS {
        for group_len in crate::scheme::GROUP_LENS {
            for (at, k) in CODECS.into_iter().enumerate() {
                // Over all shapes many pairs come up; the halves know nothing of each other.
                let v = CODECS[(at * 7 + head_dim / 16 + group_len / 32) % CODECS.len()];
                let scheme: Scheme = format!("k{k}v{v}g{group_len}").parse().unwrap();
                let packed = scheme.packed().unwrap();
                let mut layout = RecordLayout::new(head_dim, packed);
                for (half, codec, seed) in [(&mut layout.k, packed.k(), 3), (&mut layout.v, packed.v(), 4)] {
                    let books = books(codec, head_dim, HEAD + 1, seed);
                    if !books.is_empty() {
                        *half = Half::Vectors(books.into());
                    }
                }
                let turn = at + head_dim / 16 + group_len / 32;
                for data in [DATA[turn % DATA.len()], Data::Plain] {
                    records_of(&layout, data, [0, 1, 5, 16][turn / 3 % 4], &variants, &scheme);
                    count += 1;
                }
            }
        }
    }
    println!("{count} records");
}

/// One record of every variant against the plain one.
fn records_of(layout: &RecordLayout, data: Data, sinks: usize, variants: &[&'static Variant], scheme: &Scheme) {
    let mut random = Random(0x9E37_79B9 + (layout.head_dim * 1000 + layout.group_len * 10) as u64);
    let n = BLOCK_LEN * layout.head_dim;
    let mut tensor = || -> Vec<f16> { (0..n).map(|_| number(data, &mut random)).collect() };
    let blocks: Vec<_> = (0..layout.group_len / BLOCK_LEN).map(|_| (tensor(), tensor())).collect();
    let blocks: Vec<_> = blocks.iter().map(|(k, v)| (&k[..], &v[..])).collect();
    let mut want = vec![0; layout.record_bytes];
    write_record_plain(layout, HEAD, &blocks, sinks, &mut want);
    let rows_of = |dequantize: Dequantize| {
        let mut rows = vec![(vec![f16::NAN; n], vec![f16::NAN; n]); blocks.len()];
        let mut parts: Vec<_> = rows.iter_mut().map(|(k, v)| (&mut k[..], &mut v[..])).collect();
        dequantize(layout, HEAD, &want, &mut parts);
        rows
    };
    let want_rows = rows_of(dequantize_plain);
    for v in variants {
        // What was there before must not matter.
        let mut got = vec![0xAA; layout.record_bytes];
        (v.write_record)(layout, HEAD, &blocks, sinks, &mut got);
        let case = format!("{scheme} {sinks} sinks d{} {data:?}", layout.head_dim);
        let first = got.iter().zip(&want).position(|(a, b)| a != b);
        assert_eq!(first, None, "{}, {case}: first wrong byte", v.name);
        assert!(rows_of(v.dequantize) == want_rows, "{}, {case}: dequantized", v.name);
    }
}

/// Every shape of a record, sinks and data: the bytes of the formula, and its numbers back.
#[test]
fn records() {
    let variants = variants();
    let mut count = 0;
    for head_dim in crate::shape::HEAD_DIMS {
        for group_len in crate::scheme::GROUP_LENS {
            for (at, k_bits) in crate::scheme::BITS.into_iter().enumerate() {
                // Over all shapes every pair of bits comes up; the panels of K and of V know nothing of each other.
                let v_bits = crate::scheme::BITS[(at + head_dim / 16 + group_len / 32) % 4];
                let text = format!("k{k_bits}v{v_bits}g{group_len}");
                for (i, data) in DATA.into_iter().enumerate() {
                    // Every fit, and for 2-bit keys every share of loud channels, meets every kind of data at some shape.
                    let turn = i + at + head_dim / 16 + group_len / 32;
                    let loud = if k_bits == 2 { crate::scheme::LOUD[turn / 3 % 4] } else { 0 };
                    let scheme = match text.parse() {
                        Ok(Scheme::Packed(scheme)) => scheme.with_loud(loud).unwrap().with_fit(Fit::ALL[turn % 3].0),
                        other => panic!("{text}: {other:?}"),
                    };
                    let layout = RecordLayout::new(head_dim, &scheme);
                    for sinks in [0, [1, 4, 15, 16][i % 4]] {
                        records_of(&layout, data, sinks, &variants, &Scheme::Packed(scheme));
                        count += 1;
                    }
                }
            }
        }
    }
    println!("{count} records");
    assert!(count > 0);
}

/// Rows into blocks: every start and number of rows, in blocks that hold other tokens.
#[test]
fn rows() {
    let variants = variants();
    let mut random = Random(77);
    for (kv_heads, head_dim) in [(1, 64), (2, 80), (3, 96), (2, 128), (1, 256)] {
        let shape = LayerShape::new(kv_heads, kv_heads, head_dim).unwrap();
        let row_len = shape.row_len();
        let places = (0..BLOCK_LEN).flat_map(|slot| [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32].map(|rows| (slot, rows)));
        for (slot, rows) in places.filter(|(slot, rows)| slot + rows <= BLOCK_LEN) {
            for format in [RowFormat::F16, RowFormat::Bf16] {
                let layout = PlainLayout::block(&shape, format);
                let largest = format.refused_from().next_down();
                // Ties between two numbers of either format, subnormals and the largest included.
                let mut number = |i: usize| match (i % 6, format) {
                    (0, _) => random.uniform() * 70.0,
                    (1, RowFormat::F16) => number(Data::AnyBits, &mut random).to_f32(),
                    (1, RowFormat::Bf16) => f32::from_bits(random.bits() as u32 & 0xbfff_ffff),
                    (2, RowFormat::F16) => random.uniform() * 2f32.powi(-20),
                    (2, RowFormat::Bf16) => random.uniform() * 2f32.powi(-126),
                    (3, _) => (random.uniform() * 4096.0).round() + 0.5,
                    (4, _) => f32::from_bits((random.bits() as u32 & 0x87ff_0000 | 0x3800_0000) + 0x8000),
                    _ => largest.copysign(random.uniform()),
                };
                let k: Vec<f32> = (0..rows * row_len).map(&mut number).collect();
                let v: Vec<f32> = (0..rows * row_len).map(&mut number).collect();
                // Numbers of 4 bytes give the block the alignment of f16.
                let held: Vec<u32> =
                    (0..layout.block_bytes(kv_heads) / 4).map(|i| (i as u32).wrapping_mul(0x9E37_79B9)).collect();
                let (mut want, mut got) = (held.clone(), held.clone());
                write_rows_plain(&layout, bytemuck::cast_slice_mut(&mut want), slot, row_len, &k, &v);
                for variant in &variants {
                    got.copy_from_slice(&held);
                    (variant.write_rows)(&layout, bytemuck::cast_slice_mut(&mut got), slot, row_len, &k, &v);
                    assert!(got == want, "{}: {rows} {format} rows of {kv_heads} x {head_dim} at {slot}", variant.name);
                }
            }
        }
    }
}

/// The check sees every place of a row, and nothing else is refused.
#[test]
fn finite() {
    for (variant, format) in variants().into_iter().flat_map(|v| [RowFormat::F16, RowFormat::Bf16].map(|f| (v, f))) {
        let limit = format.refused_from();
        for len in [0, 1, 15, 16, 17, 63, 64, 65, 200] {
            let mut x: Vec<f32> = (0..len).map(|i| if i % 2 == 0 { limit.next_down() } else { -65504.0 }).collect();
            assert!((variant.finite)(&x, format), "{} {format}, {len}", variant.name);
            for i in 0..len {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, limit, -limit, f32::MAX] {
                    let good = std::mem::replace(&mut x[i], bad);
                    assert!(!(variant.finite)(&x, format), "{} {format}: {bad} at {i} of {len}", variant.name);
                    x[i] = good;
                }
            }
        }
    }
}
