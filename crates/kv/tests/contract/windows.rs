//! Layers whose queries see a window of keys: equal to the bit to what a call's own options hide, in any chunking and batch.
//! NOT here: closeness to the true result (src/attend/parity.rs), what may not be read (src/attend/unread.rs).

use crate::numbers::{Rig, bits, entries, kernels_here};
use kvant_kv::{Arm, AttendOptions, Cache, Error, LayerConfig, LayerShape, Scheme};

const SCHEMES: [&str; 6] = ["ksb2vtq3g64w33s4", "f16", "bf16", "k4v4g64w128s4p512", "k3v2g32s16", "k2l4v2g128w33s4.ls"];

/// Outputs of all positions of a windowed layer when its tokens come in pieces, other requests beside them.
fn in_pieces(scheme: &str, kernel: &str, visible: usize, pieces: &[usize], others: usize) -> Vec<u32> {
    let shape = LayerShape::new(5, 1, 64).unwrap();
    let mut rig = Rig::windowed(shape, &[scheme], Some(visible), Arm::Fused, kernel, 1 + others);
    let others: Vec<_> = (0..others).map(|i| (rig.add(20 + i as u64), 7 + 90 * i)).collect();
    let request = rig.add(9);
    let mut out = Vec::new();
    for &rows in pieces {
        let batch: Vec<_> = others.iter().copied().chain([(request, rows)]).collect();
        out.extend(bits(rig.step(&batch).last().unwrap()));
    }
    out
}

#[test]
fn chunks_and_batches_give_the_rows_of_one_prefill() {
    for kernel in kernels_here() {
        for scheme in SCHEMES {
            for visible in [1, 37, 64, 500] {
                let whole = in_pieces(scheme, kernel, visible, &[640], 0);
                for (pieces, others) in
                    [(vec![1; 640], 0), (vec![7; 91], 1), (vec![100, 513, 27], 0), (vec![33, 300, 307], 2)]
                {
                    let got = in_pieces(scheme, kernel, visible, &pieces, others);
                    let what = format!("{kernel} {scheme}, {visible} visible, pieces of {}", pieces[0]);
                    assert!(got[..] == whole[..got.len()], "{what}");
                }
            }
        }
    }
}

#[test]
fn a_window_hides_what_first_visible_would_and_a_long_one_nothing() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        for scheme in SCHEMES {
            for (len, visible) in [(700, 1), (700, 90), (700, 512), (1100, 600), (700, 700), (700, 9000)] {
                let of = |window: Option<usize>, first: usize| {
                    let mut rig = Rig::windowed(shape, &[scheme], window, Arm::Fused, kernel, 2);
                    let request = rig.add(5);
                    rig.append(&[(request, len - 1)]);
                    rig.commit(&[(request, len - 1)]);
                    let q = rig.append(&[(request, 1)]);
                    let options = AttendOptions { first_visible: &[first], ..AttendOptions::new(64) };
                    let mut out = vec![f32::NAN; q.len()];
                    rig.attention.attend(&rig.cache, 0, &entries(&[(request, 1)]), &q, &mut out, &options).unwrap();
                    bits(&out)
                };
                let first = len.saturating_sub(visible);
                assert_eq!(of(Some(visible), 0), of(None, first), "{kernel} {scheme} {visible} of {len}");
            }
        }
    }
}

#[test]
fn a_layer_that_sees_nothing_is_refused() {
    let layer = LayerConfig { shape: LayerShape::new(2, 1, 64).unwrap(), scheme: Scheme::F16, visible: Some(0) };
    assert!(matches!(Cache::new(&[layer], Arm::F16), Err(Error::Shape { got: 0, .. })));
    let layer = LayerConfig { visible: Some(3), ..layer };
    let cache = Cache::new(&[layer], Arm::F16).unwrap();
    assert_eq!(cache.layer_config(0).unwrap(), layer);
}
