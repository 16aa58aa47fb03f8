//! Tests of the cache from inside: the bytes of its records and what it keeps in f16, after any history.
//! layout_page.rs holds the numbers of docs/layout.md.
//! NOT here: what a user of the library sees (tests/contract), outputs of kernels (attend/parity.rs).

mod layout_page;

use super::layout::BLOCK_LEN;
use super::{Arm, Cache, LayerConfig, Rows, SeqId};
use crate::append::cpu::best;
use crate::element::Element;
use crate::{Error, LayerShape, RowFormat, Scheme};
use half::{bf16, f16};
use proptest::prelude::*;

const SCHEMES: [&str; 8] = [
    "k4v4g64w128s4p512",
    "k2v3g32",
    "k3v2g32w17s16p64",
    "k8v8g128w1",
    "k4v2g64w0s1p128",
    "k8v4g32w300s2",
    "f16",
    "bf16",
];

fn shape() -> LayerShape {
    LayerShape::new(2, 2, 64).unwrap()
}

fn cache(scheme: &str) -> Cache {
    Cache::new(&[LayerConfig { shape: shape(), scheme: scheme.parse().unwrap(), visible: None }], Arm::Fused).unwrap()
}

/// K or V rows of a request's positions: equal places give equal numbers.
fn rows(request: usize, tensor: usize, positions: std::ops::Range<usize>) -> Vec<f32> {
    let number = |p: usize, i: usize| {
        let place = (request * 3 + tensor + 1).wrapping_mul(0x9E37_79B9) ^ p.wrapping_mul(0x85EB_CA6B);
        let x = place ^ i.wrapping_mul(0x27D4_EB2F);
        let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D) & 0xffff_ffff;
        ((x ^ (x >> 13)) & 0xffff) as f32 / 32768.0 - 1.0
    };
    positions.flat_map(|p| (0..shape().row_len()).map(move |i| number(p, i))).collect()
}

/// Appends the next `n` rows of each (sequence, request).
fn append(cache: &mut Cache, batch: &[(SeqId, usize, usize)]) {
    let (mut k, mut v, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    for &(seq, request, n) in batch {
        let held = cache.len(0, seq).unwrap();
        k.extend(rows(request, 0, held..held + n));
        v.extend(rows(request, 1, held..held + n));
        entries.push(Rows { seq, rows: n });
    }
    cache.append(0, &entries, &k, &v).unwrap();
}

fn commit(cache: &mut Cache, seqs: &[SeqId]) {
    let entries: Vec<_> = seqs.iter().map(|&seq| Rows { seq, rows: 1 }).collect();
    cache.commit(0, &entries).unwrap();
}

/// Everything later queries can see of a sequence.
#[derive(Debug, PartialEq)]
struct Held {
    len: usize,
    /// `[group][head]`
    records: Vec<Vec<u8>>,
    /// Bits of rows `[position][head]` from the edge on, K then V.
    plain_rows: Vec<Vec<u16>>,
    /// `[head]`, K then V of the sinks that have a token.
    sinks: Vec<Vec<f16>>,
}

fn held(cache: &Cache, seq: SeqId) -> Held {
    let view = cache.view(0, seq).unwrap();
    let d = view.spec.shape.head_dim;
    let heads = 0..view.spec.shape.kv_heads;
    let from = view.spec.scheme.packed_len(view.len);
    fn bits<E: Element>((k, v): (&[E], &[E]), slot: usize) -> Vec<u16> {
        let (k, v): (&[u16], &[u16]) = (bytemuck::cast_slice(k), bytemuck::cast_slice(v));
        let d = k.len() / BLOCK_LEN;
        (0..d).map(|c| k[c * BLOCK_LEN + slot]).chain(v[slot * d..][..d].iter().copied()).collect()
    }
    let row = |p: usize, head: usize| {
        let (block, slot) = (p / BLOCK_LEN * BLOCK_LEN, p % BLOCK_LEN);
        match view.spec.plain.format {
            RowFormat::F16 => bits::<f16>(view.block(head, block), slot),
            RowFormat::Bf16 => bits::<bf16>(view.block(head, block), slot),
        }
    };
    let sinks = |head: usize| {
        view.sinks(head).map(|(k, v)| {
            let n = view.len.min(view.spec.sinks.tokens) * d;
            [&k[..n], &v[..n]].concat()
        })
    };
    Held {
        len: view.len,
        records: view.groups().flat_map(|g| heads.clone().map(move |h| view.record(h, g).to_vec())).collect(),
        plain_rows: (from..view.len).flat_map(|p| heads.clone().map(move |h| row(p, h))).collect(),
        sinks: heads.clone().filter_map(sinks).collect(),
    }
}

/// What one prefill of `len` tokens holds.
fn prefilled(scheme: &str, request: usize, len: usize) -> Held {
    let mut cache = cache(scheme);
    let seq = cache.add_sequence();
    if len > 0 {
        append(&mut cache, &[(seq, request, len)]);
        commit(&mut cache, &[seq]);
    }
    held(&cache, seq)
}

/// Decode tokens that never get packed because only the current call's length is looked at.
#[test]
fn prefill_32_then_168_steps_holds_the_bytes_of_one_prefill_of_200() {
    for scheme in SCHEMES {
        let mut cache = cache(scheme);
        let seq = cache.add_sequence();
        append(&mut cache, &[(seq, 1, 32)]);
        commit(&mut cache, &[seq]);
        for _ in 0..168 {
            append(&mut cache, &[(seq, 1, 1)]);
            commit(&mut cache, &[seq]);
        }
        let got = held(&cache, seq);
        assert!(got == prefilled(scheme, 1, 200), "{scheme}");
        assert_eq!(got.records.is_empty(), matches!(scheme, "f16" | "bf16" | "k8v4g32w300s2"), "{scheme}");
    }
}

/// A flush shorter than a group: at every length there are whole groups only, as many as the edge says, and each holds
/// its own tokens.
#[test]
fn groups_are_whole_at_every_length() {
    for scheme in SCHEMES {
        let Scheme::Packed(p) = scheme.parse().unwrap() else { continue };
        let longest = prefilled(scheme, 1, 900);
        let mut cache = cache(scheme);
        let seq = cache.add_sequence();
        for len in 1..=600 {
            append(&mut cache, &[(seq, 1, 1)]);
            commit(&mut cache, &[seq]);
            let got = held(&cache, seq);
            assert_eq!(got.records.len(), p.edge(len - 1) / p.group_len() * 2, "{scheme}, {len} tokens");
            assert_eq!(got.plain_rows.len(), (len - p.edge(len - 1)) * 2, "{scheme}, {len} tokens");
            assert!(got.records[..] == longest.records[..got.records.len()], "{scheme}, {len} tokens");
        }
    }
}

/// A record is the quantized rows of its own group, nothing more: written here directly from the rows.
#[test]
fn a_record_is_its_own_tokens() {
    for scheme in SCHEMES {
        let got = prefilled(scheme, 3, 700);
        let cache = cache(scheme);
        let Some(layout) = cache.layer(0).unwrap().record.as_ref() else { continue };
        let (d, g, sinks) = (64, layout.group_len, cache.layer(0).unwrap().sinks.tokens);
        for (i, record) in got.records.iter().enumerate() {
            let (group, head) = (i / 2, i % 2);
            let part = |tensor| -> Vec<f16> {
                let rows = rows(3, tensor, group * g..(group + 1) * g);
                rows.chunks(2 * d).flat_map(|r| r[head * d..][..d].iter().map(|&x| f16::from_f32(x))).collect()
            };
            let (k, v) = (part(0), part(1));
            let blocks: Vec<(Vec<f16>, &[f16])> = (0..g / BLOCK_LEN)
                .map(|b| {
                    let k_block = &k[b * BLOCK_LEN * d..][..BLOCK_LEN * d];
                    let transposed = (0..d * BLOCK_LEN).map(|x| k_block[x % BLOCK_LEN * d + x / BLOCK_LEN]);
                    (transposed.collect(), &v[b * BLOCK_LEN * d..][..BLOCK_LEN * d])
                })
                .collect();
            let blocks: Vec<_> = blocks.iter().map(|(k, v)| (&k[..], *v)).collect();
            let mut want = vec![0; layout.record_bytes];
            let sinks_here = if group == 0 { sinks } else { 0 };
            (best().write_record)(layout, head, &blocks, sinks_here, &mut want);
            assert!(*record == want, "{scheme}: group {group}, head {head}");
        }
    }
}

/// Two requests whose tokens of one call together fill a group: neither has one.
#[test]
fn groups_do_not_straddle_requests() {
    for (scheme, parts) in [("k4v4g64", [(20, 44), (30, 70)]), ("k2v2g32", [(31, 1), (1, 33)])] {
        let mut cache = cache(scheme);
        let (a, b) = (cache.add_sequence(), cache.add_sequence());
        for (na, nb) in parts {
            append(&mut cache, &[(a, 1, na), (b, 2, nb)]);
            commit(&mut cache, &[a, b]);
            for (seq, request) in [(a, 1), (b, 2)] {
                let len = cache.len(0, seq).unwrap();
                assert!(held(&cache, seq) == prefilled(scheme, request, len), "{scheme}: request {request}, {len}");
            }
        }
    }
}

/// A bf16 row is its f32 row rounded once: not by way of f16, which would round twice and lose what f16 cannot hold.
#[test]
fn bf16_rows_are_rounded_straight_from_f32() {
    let mut cache = cache("bf16");
    let seq = cache.add_sequence();
    let row_len = shape().row_len();
    // f16 makes the first a tie, which then falls to the even side; the others are beyond f16 on either end.
    let numbers = [(1.0 + 2f32.powi(-8)).next_up(), 1e30, -3e-39, 2f32.powi(-133), 70_000.0, -0.0];
    let x: Vec<f32> = (0..40 * row_len).map(|i| numbers[i % numbers.len()]).collect();
    cache.append(0, &[Rows { seq, rows: 40 }], &x, &x).unwrap();
    let held = held(&cache, seq);
    assert_ne!(bf16::from_f32(numbers[0]), bf16::from_f32(f16::from_f32(numbers[0]).to_f32()));
    for (i, got) in held.plain_rows.iter().enumerate() {
        let (position, head) = (i / 2, i % 2);
        let row = x[position * row_len + head * 64..][..64].iter().map(|&x| bf16::from_f32(x).to_bits());
        let want: Vec<u16> = row.clone().chain(row).collect();
        assert_eq!(*got, want, "position {position}, head {head}");
    }
}

/// A value that no f16 holds, in the call that would pack two groups: not a byte changes.
#[test]
fn a_refused_append_changes_no_byte() {
    for scheme in SCHEMES {
        let mut cache = cache(scheme);
        let (a, b) = (cache.add_sequence(), cache.add_sequence());
        append(&mut cache, &[(a, 1, 100), (b, 2, 7)]);
        commit(&mut cache, &[a, b]);
        let before = (held(&cache, a), held(&cache, b), cache.bytes());
        let (k, mut v) = (rows(1, 0, 100..400), rows(1, 1, 100..400));
        v[299 * 128 + 70] = f32::NAN;
        let batch = [Rows { seq: a, rows: 150 }, Rows { seq: b, rows: 150 }];
        let e = cache.append(0, &batch, &k, &v).unwrap_err();
        assert!(matches!(e, Error::NotFinite { tensor: "V", layer: 0, head: 1, token: 156, .. }), "{e}");
        assert!(before == (held(&cache, a), held(&cache, b), cache.bytes()), "{scheme}");
    }
}

/// One thing that can happen to a sequence.
#[derive(Debug, Clone)]
enum Event {
    /// Append and commit.
    Step(usize),
    /// Append, keep some, drop the others, commit.
    Draft { rows: usize, keep: usize },
    /// Drop the newest committed tokens, as far as the edge allows.
    Back(usize),
    /// Commit with nothing new.
    Commit,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1usize..4).prop_map(Event::Step),
        3 => (1usize..200).prop_map(Event::Step),
        2 => (1usize..100, 0usize..100).prop_map(|(rows, keep)| Event::Draft { rows, keep: keep.min(rows) }),
        1 => (1usize..40).prop_map(Event::Back),
        1 => Just(Event::Commit),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Whatever two requests went through together, each holds what one prefill of its tokens holds.
    #[test]
    fn any_history_holds_the_bytes_of_one_prefill(
        scheme in prop::sample::select(SCHEMES.to_vec()),
        history in prop::collection::vec((event(), any::<bool>()), 1..14),
    ) {
        let mut cache = cache(scheme);
        let parsed: Scheme = scheme.parse().unwrap();
        let seqs = [cache.add_sequence(), cache.add_sequence()];
        for (event, second) in history {
            let (request, seq) = (usize::from(second), seqs[usize::from(second)]);
            let len = cache.len(0, seq).unwrap();
            match event {
                // Steps take both requests along, in either order.
                Event::Step(n) => {
                    append(&mut cache, &[(seq, request, n), (seqs[1 - request], 1 - request, 1)]);
                    commit(&mut cache, &seqs);
                }
                Event::Draft { rows, keep } => {
                    append(&mut cache, &[(seq, 9, rows)]);
                    cache.trim(seq, len).unwrap();
                    append(&mut cache, &[(seq, request, rows)]);
                    cache.trim(seq, len + keep).unwrap();
                    commit(&mut cache, &[seq]);
                }
                Event::Back(n) => {
                    let to = (0..=n.min(len)).map(|n| len - n).filter(|&to| parsed.packed_len(to) == parsed.packed_len(len));
                    cache.trim(seq, to.min().unwrap()).unwrap();
                }
                Event::Commit => commit(&mut cache, &[seq]),
            }
        }
        for (request, seq) in seqs.into_iter().enumerate() {
            let len = cache.len(0, seq).unwrap();
            prop_assert!(held(&cache, seq) == prefilled(scheme, request, len), "{} request {}, {}", scheme, request, len);
        }
        let in_use = |cache: &Cache| (cache.bytes().packed_bytes, cache.bytes().window_bytes);
        for seq in seqs {
            cache.remove_sequence(seq).unwrap();
        }
        prop_assert_eq!(in_use(&cache), (0, 0));
    }
}

/// Growth and commit leave the packed past where it is.
#[test]
fn packed_records_never_move() {
    let mut cache = cache("k4v4g64w128s4p512");
    let seq = cache.add_sequence();
    append(&mut cache, &[(seq, 1, 300)]);
    commit(&mut cache, &[seq]);
    let places = |cache: &Cache, n: usize| -> Vec<usize> {
        let view = cache.view(0, seq).unwrap();
        (0..n).flat_map(|group| (0..2).map(move |head| view.record(head, group).as_ptr() as usize)).collect()
    };
    let groups = cache.view(0, seq).unwrap().groups().len();
    assert_eq!(groups, 2);
    let before = places(&cache, groups);
    for n in [1, 700, 5000, 1, 20_000] {
        append(&mut cache, &[(seq, 1, n)]);
        commit(&mut cache, &[seq]);
    }
    assert_eq!(places(&cache, groups), before);
}
