//! Drafts and trim: uncommitted tokens go without a trace, committed ones while the edge stays; else a clear error.

use crate::numbers::{Rig, bits, kernels_here};
use kvant_kv::{Arm, Error, LayerShape};

const SCHEMES: [&str; 7] =
    ["ktq3vvq16x4g32w20s4p64", "k4v4g64w128s4p512", "k2v3g32", "k8v4g32w20s16p64", "k3v3g128w1", "f16", "bf16"];

/// Drafts that are dropped leave the cache as if they had never been: bytes, and every later output.
#[test]
fn dropped_drafts_leave_no_trace() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep] {
            for scheme in SCHEMES {
                let mut plain = Rig::layers(shape, &[scheme], arm, kernel, 2);
                let mut drafting = Rig::layers(shape, &[scheme], arm, kernel, 2);
                let (a, b) = (plain.add(1), drafting.add(1));
                for (i, rows) in [60, 1, 3, 1, 62, 1, 1, 130, 254, 1, 64].into_iter().enumerate() {
                    let len = plain.cache.len(0, a.seq).unwrap();
                    let want = plain.step(&[(a, rows)]).remove(0);
                    // Other tokens first (another stream), as many as cross the next group; twice, then dropped.
                    let other = crate::numbers::Request { seq: b.seq, stream: 50 + i as u64 };
                    let before = (drafting.cache.bytes(), (len > 0).then(|| bits(&drafting.newest(b))));
                    for n in [3, 140] {
                        let q = drafting.append(&[(other, n)]);
                        drafting.attend(&[(other, n)], &q);
                    }
                    drafting.cache.trim(b.seq, len + 70).unwrap();
                    drafting.cache.trim(b.seq, len).unwrap();
                    let after = (drafting.cache.bytes(), (len > 0).then(|| bits(&drafting.newest(b))));
                    assert_eq!(before, after, "{kernel} {arm} {scheme} at {len}");
                    let got = drafting.step(&[(b, rows)]).remove(0);
                    assert_eq!(bits(&got), bits(&want), "{kernel} {arm} {scheme} from {len}, {rows} rows");
                }
                assert_eq!(plain.cache.bytes(), drafting.cache.bytes());
            }
        }
    }
}

/// Drafts that are kept, in part and in several calls, give what plain decoding gives.
#[test]
fn accepted_drafts_equal_plain_decoding() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        for scheme in SCHEMES {
            let mut plain = Rig::new(shape, scheme, kernel, 2);
            let a = plain.add(1);
            let want = bits(&plain.step(&[(a, 450)])[0]);
            let mut drafting = Rig::new(shape, scheme, kernel, 2);
            let b = drafting.add(1);
            let row = 4 * 64;
            let mut got = bits(&drafting.step(&[(b, 50)])[0]);
            while drafting.cache.len(0, b.seq).unwrap() < 450 {
                let len = drafting.cache.len(0, b.seq).unwrap();
                // Eight tokens in two calls, all eight attended in the second; the first five are accepted.
                let first = drafting.append(&[(b, 3)]);
                let second = drafting.append(&[(b, 5)]);
                let out = drafting.attend(&[(b, 8)], &[first, second].concat()).remove(0);
                got.extend(bits(&out[..5 * row]));
                drafting.cache.trim(b.seq, len + 5).unwrap();
                drafting.commit(&[(b, 5)]);
            }
            assert!(got == want, "{kernel} {scheme}");
        }
    }
}

#[test]
fn committed_tokens_can_be_trimmed_exactly_while_the_edge_stays() {
    let shape = LayerShape::new(2, 1, 64).unwrap();
    for scheme in SCHEMES {
        let parsed: kvant_kv::Scheme = scheme.parse().unwrap();
        for len in [1usize, 63, 64, 65, 128, 190, 191, 192, 200, 511, 512, 513, 576] {
            for to in (0..=len).filter(|to| len - to < 3 || to % 64 < 2 || to % 64 == 63) {
                let mut rig = Rig::new(shape, scheme, "portable", 1);
                let a = rig.add(1);
                rig.append(&[(a, len)]);
                rig.commit(&[(a, len)]);
                let bytes = rig.cache.bytes();
                let result = rig.cache.trim(a.seq, to);
                if parsed.packed_len(to) == parsed.packed_len(len) {
                    assert_eq!(result, Ok(()), "{scheme} {len} to {to}");
                    let mut fresh = Rig::new(shape, scheme, "portable", 1);
                    let b = fresh.add(1);
                    if to > 0 {
                        fresh.append(&[(b, to)]);
                        fresh.commit(&[(b, to)]);
                        assert_eq!(bits(&rig.newest(a)), bits(&fresh.newest(b)), "{scheme} {len} to {to}");
                    }
                    assert_eq!(rig.cache.bytes(), fresh.cache.bytes(), "{scheme} {len} to {to}");
                    assert_eq!(
                        bits(&rig.step(&[(a, 80)])[0]),
                        bits(&fresh.step(&[(b, 80)])[0]),
                        "{scheme} {len} to {to}"
                    );
                } else {
                    let packed = parsed.packed_len(len);
                    assert_eq!(result, Err(Error::TrimPacked { to, len, packed }), "{scheme} {len} to {to}");
                    assert_eq!(rig.cache.bytes(), bytes);
                    assert_eq!(rig.cache.len(0, a.seq), Ok(len));
                }
            }
        }
    }
}

/// One layer that cannot be trimmed keeps all layers as they are.
#[test]
fn a_refused_trim_changes_no_layer() {
    let shape = LayerShape::new(2, 1, 64).unwrap();
    let mut rig = Rig::layers(shape, &["f16", "k4v4g32", "k4v4g64w128"], Arm::Fused, "portable", 1);
    let a = rig.add(1);
    rig.step(&[(a, 100)]);
    let (bytes, newest) = (rig.cache.bytes(), bits(&rig.newest(a)));
    assert_eq!(rig.cache.trim(a.seq, 90), Err(Error::TrimPacked { to: 90, len: 100, packed: 96 }));
    assert_eq!((rig.cache.bytes(), bits(&rig.newest(a))), (bytes, newest));
    rig.cache.trim(a.seq, 97).unwrap();
    assert_eq!((0..3).map(|layer| rig.cache.len(layer, a.seq).unwrap()).collect::<Vec<_>>(), [97; 3]);
}
