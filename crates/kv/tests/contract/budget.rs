//! The budget: what is asked beforehand is what is taken, nothing goes over it, and a refusal changes nothing.

use crate::numbers::{Rig, bits, entries, tokens};
use kvant_kv::{Arm, Cache, Error, LayerConfig, LayerShape};

const SCHEMES: [&[&str]; 5] =
    [&["k4v4g64w128s4p512"], &["k8v4g32w20s16p64", "f16"], &["k2v3g32"], &["f16"], &["k2v2g128w64s4p512", "bf16"]];

fn held(rig: &Rig) -> usize {
    let bytes = rig.cache.bytes();
    bytes.packed_bytes + bytes.window_bytes + bytes.copy_bytes
}

#[test]
fn bytes_needed_are_the_bytes_taken() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for arm in [Arm::Fused, Arm::DequantOnce] {
        for schemes in SCHEMES {
            let mut rig = Rig::layers(shape, schemes, arm, "portable", 1);
            let (a, b) = (rig.add(1), rig.add(2));
            for (i, j) in [(300, 1), (1, 90), (1, 1), (211, 700), (1, 1), (60, 64), (512, 1), (1, 1)] {
                let batch = [(a, i), (b, j)];
                let before = held(&rig);
                let need = rig.cache.bytes_needed(&entries(&batch)).unwrap();
                let mut most = 0;
                for layer in 0..rig.cache.layers() {
                    let of = |(r, rows): &(crate::numbers::Request, usize)| {
                        let len = rig.cache.len(layer, r.seq).unwrap();
                        tokens(r.stream, layer, len..len + rows, &shape)
                    };
                    let t: Vec<_> = batch.iter().map(of).collect();
                    let k: Vec<f32> = t.iter().flat_map(|t| t.k.clone()).collect();
                    let v: Vec<f32> = t.iter().flat_map(|t| t.v.clone()).collect();
                    rig.cache.append(layer, &entries(&batch), &k, &v).unwrap();
                    most = most.max(held(&rig));
                    rig.cache.commit(layer, &entries(&batch)).unwrap();
                }
                assert_eq!(need, most.saturating_sub(before), "{arm} {schemes:?} {i} {j}");
                assert_eq!(held(&rig), [a, b].map(|r| rig.cache.sequence_bytes(r.seq).unwrap()).iter().sum());
            }
        }
    }
}

#[test]
fn bytes_to_reach_a_length_are_the_most_ever_held() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for schemes in SCHEMES {
        let mut rig = Rig::layers(shape, schemes, Arm::Fused, "portable", 1);
        let a = rig.add(1);
        let mut most = 0;
        for rows in [256, 256, 256, 132].into_iter().chain([1; 200]) {
            most = most.max(held(&rig) + rig.cache.bytes_needed(&entries(&[(a, rows)])).unwrap());
            rig.step(&[(a, rows)]);
        }
        // One block more than was held: steps of other lengths may reach into it.
        let reach = rig.cache.bytes_to_reach(1100, 900, 256);
        assert!((most..=most + 32 * 2 * 128 * 2).contains(&reach), "{schemes:?}: {reach} {most}");
        assert_eq!(rig.cache.bytes_at(1100), held(&rig), "{schemes:?}");
    }
}

/// Blocks that a page owns too stay when a layer with a window lets go of them.
#[test]
fn bytes_needed_know_what_pages_keep() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for scheme in ["k4v4g32w20s4p64", "f16"] {
        let config = |visible| LayerConfig { shape, scheme: scheme.parse().unwrap(), visible };
        let mut rig = Rig::layers(shape, &[scheme], Arm::Fused, "portable", 1);
        rig.cache = Cache::new(&[None, Some(100), Some(40)].map(config), Arm::Fused).unwrap();
        let a = rig.add(1);
        let page = rig.cache.share_len().unwrap();
        let mut pages = Vec::new();
        for step in 1..40 {
            let rows = page / 8;
            let (before, need) = (held(&rig), rig.cache.bytes_needed(&entries(&[(a, rows)])).unwrap());
            let mut most = before;
            for layer in 0..3 {
                let len = rig.cache.len(layer, a.seq).unwrap();
                let t = tokens(1, layer, len..len + rows, &shape);
                rig.cache.append(layer, &entries(&[(a, rows)]), &t.k, &t.v).unwrap();
                most = most.max(held(&rig));
                rig.cache.commit(layer, &entries(&[(a, rows)])).unwrap();
            }
            assert_eq!(need, most - before, "{scheme} step {step}");
            if step % 8 == 0 {
                let (before, need) = (held(&rig), rig.cache.bytes_to_hold(a.seq).unwrap());
                pages.push(rig.cache.hold_page(a.seq, step / 8 - 1).unwrap());
                assert_eq!(held(&rig) - before, need);
            }
        }
        let alone: usize = pages.iter().map(|p| rig.cache.page_bytes_alone(*p).unwrap()).sum();
        let before = held(&rig);
        assert!(alone > 0, "layers with a window have let go of blocks");
        pages.iter().for_each(|p| rig.cache.release_page(*p).unwrap());
        assert_eq!(before - held(&rig), alone);
    }
}

#[test]
fn nothing_goes_over_the_budget_and_a_refusal_changes_nothing() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for schemes in SCHEMES {
        let mut free = Rig::layers(shape, schemes, Arm::Fused, "portable", 1);
        let mut tight = Rig::layers(shape, schemes, Arm::Fused, "portable", 1);
        let (a, b) = (free.add(1), tight.add(1));
        for rows in [100, 1, 200, 1, 300] {
            let need = tight.cache.bytes_needed(&entries(&[(b, rows)])).unwrap();
            let (before, bytes) = (tight.cache.bytes(), held(&tight));
            if need > 0 {
                tight.cache.set_budget(Some(bytes + need - 1));
                let mut refused = None;
                for layer in 0..tight.cache.layers() {
                    let t = tokens(1, layer, tight.cache.len(layer, b.seq).unwrap()..0, &shape);
                    assert!(t.k.is_empty());
                    let len = tight.cache.len(layer, b.seq).unwrap();
                    let t = tokens(1, layer, len..len + rows, &shape);
                    match tight.cache.append(layer, &entries(&[(b, rows)]), &t.k, &t.v) {
                        Ok(()) if schemes.len() > 1 => tight.cache.commit(layer, &entries(&[(b, rows)])).unwrap(),
                        Ok(()) => {}
                        Err(e) => {
                            refused = Some(e);
                            break;
                        }
                    }
                    assert!(held(&tight) < bytes + need);
                }
                assert!(matches!(refused, Some(Error::OutOfBlocks { .. })), "{schemes:?} {rows}");
                if schemes.len() > 1 {
                    // A later layer refused: an engine drops such a sequence. Here the rig starts again.
                    break;
                }
                assert_eq!(tight.cache.bytes(), before);
            }
            tight.cache.set_budget(Some(bytes + need));
            assert_eq!(bits(&tight.step(&[(b, rows)])[0]), bits(&free.step(&[(a, rows)])[0]));
        }
    }
}
