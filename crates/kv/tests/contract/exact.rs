//! Exactness: what must be equal to the bit, for every kernel. The layers axis and a loop; a request alone and in any
//! batch, at any place, on any number of threads; a prompt in one piece and in any chunks, single steps included.
//! NOT here: closeness to the true result (src/attend/parity.rs).

use crate::numbers::{Request, Rig, bits, entries, kernels_here};
use kvant_kv::attend::Split;
use kvant_kv::{Arm, AttendOptions, Attention, LayerShape};
use proptest::prelude::*;

#[test]
fn the_layers_axis_equals_a_loop() {
    let shape = LayerShape::new(6, 2, 64).unwrap();
    let schemes = [
        "k4v4g32w16",
        "f16",
        "bf16",
        "k2v8g64w5s4",
        "k8v3g32s1p64",
        "k2l4v2g64w9s4.ls",
        "ktq3vtq2g32w9s4",
        "kvq16x4vvq256x4g64",
    ];
    for kernel in kernels_here() {
        for layers in [1, 3, 4, 32] {
            let schemes: Vec<_> = schemes.into_iter().cycle().take(layers).collect();
            let mut rig = Rig::layers(shape, &schemes, Arm::Fused, kernel, 2);
            let batch = [(rig.add(1), 161), (rig.add(2), 75)];
            rig.append(&batch);
            rig.commit(&batch);
            let batch = [(batch[0].0, 1), (batch[1].0, 3)];
            let q = rig.append(&batch);
            let options = AttendOptions::new(shape.head_dim);
            let mut all = vec![f32::NAN; q.len()];
            rig.attention.attend_layers(&rig.cache, 0..layers, &entries(&batch), &q, &mut all, &options).unwrap();
            let n = q.len() / layers;
            for layer in 0..layers {
                let mut one = vec![f32::NAN; n];
                let q = &q[layer * n..][..n];
                rig.attention.attend(&rig.cache, layer, &entries(&batch), q, &mut one, &options).unwrap();
                assert_eq!(bits(&one), bits(&all[layer * n..][..n]), "{kernel}, layer {layer} of {layers}");
            }
        }
    }
}

/// Prompts and three decode steps of a request, one after another, on its own.
fn alone(shape: LayerShape, scheme: &str, kernel: &str, stream: u64, prompt: usize) -> Vec<Vec<u32>> {
    let mut rig = Rig::new(shape, scheme, kernel, 1);
    let request = rig.add(stream);
    [prompt, 1, 1, 1].map(|rows| bits(&rig.step(&[(request, rows)])[0])).to_vec()
}

#[test]
fn a_request_alone_equals_itself_in_any_batch_at_any_place_on_any_threads() {
    let shape = LayerShape::new(6, 2, 64).unwrap();
    let prompts = [1usize, 37, 66, 300, 511, 715];
    for kernel in kernels_here() {
        for scheme in [
            "f16",
            "bf16",
            "k4v4g64w128s4p512",
            "k2v3g32w7",
            "k2l2v2g64w7s4.mse",
            "ksb1v4g64w9s4",
            "kvq256x8vvq16x4g32w7",
        ] {
            let want: Vec<_> = (0..prompts.len()).map(|i| alone(shape, scheme, kernel, i as u64, prompts[i])).collect();
            for threads in [1, 2, 3, 5] {
                let places = [(4, 6), (5, 3), (0, 6), (1, 6), (2, 2)];
                for (rotate, size) in places.into_iter().take(if threads == 2 { 5 } else { 2 }) {
                    let mut rig = Rig::new(shape, scheme, kernel, threads);
                    let members: Vec<usize> = (0..size).map(|i| (i + rotate) % prompts.len()).collect();
                    let requests: Vec<Request> = members.iter().map(|&m| rig.add(m as u64)).collect();
                    for step in 0..4 {
                        let rows = |m: usize| if step == 0 { prompts[m] } else { 1 };
                        let batch: Vec<_> = requests.iter().zip(&members).map(|(r, &m)| (*r, rows(m))).collect();
                        for (out, &m) in rig.step(&batch).iter().zip(&members) {
                            assert!(
                                bits(out) == want[m][step],
                                "{kernel} {scheme}: request {m} at step {step} among {members:?} on {threads} threads"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Outputs of all positions when `rows` tokens come in the given pieces (the last one takes the rest).
fn in_pieces(shape: LayerShape, scheme: &str, kernel: &str, len: usize, pieces: &[usize]) -> Vec<u32> {
    let mut rig = Rig::new(shape, scheme, kernel, 2);
    let request = rig.add(9);
    let (mut out, mut at) = (Vec::new(), 0);
    for rows in pieces.iter().copied().chain([len]) {
        let rows = rows.min(len - at);
        if rows > 0 {
            out.extend(bits(&rig.step(&[(request, rows)])[0]));
        }
        at += rows;
    }
    out
}

#[test]
fn prefill_in_chunks_and_single_steps_give_the_rows_of_one_prefill() {
    let len = 600;
    for (q_heads, kv_heads) in [(2, 2), (5, 1)] {
        let shape = LayerShape::new(q_heads, kv_heads, 64).unwrap();
        for kernel in kernels_here() {
            for scheme in [
                "f16",
                "bf16",
                "k4v4g64w128s4p512",
                "k3v2g32w0s1",
                "k8v8g32w33p96",
                "k2l4v2g64w33s4p64.ls",
                "ktq4vrvq22g32w33p96",
                "kvq16x8vvq256x8g64w33s4p64",
            ] {
                let whole = in_pieces(shape, scheme, kernel, len, &[len]);
                for chunk in [1, 7, 100, 513] {
                    let chunks = vec![chunk; len / chunk];
                    let got = in_pieces(shape, scheme, kernel, len, &chunks);
                    assert!(got == whole, "{kernel} {scheme}, {q_heads} over {kv_heads} heads, chunks of {chunk}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_chunking_gives_the_same_rows(
        scheme in prop::sample::select(vec!["k4v4g64w128s4p512", "k2v8g32w20s16", "k3v3g32w1p64", "k8v4g128", "k2l8v2g64w20s4.mse", "ktq3vsb3g64w20s4", "kvq16x4vvq16x4g32w1p64"]),
        pieces in prop::collection::vec(prop_oneof![1usize..5, 20usize..180], 1..9),
        head_dim in prop::sample::select(vec![64usize, 80, 96]),
    ) {
        let shape = LayerShape::new(3, 1, head_dim).unwrap();
        let len = pieces.iter().sum::<usize>() + 3;
        for kernel in kernels_here() {
            let whole = in_pieces(shape, scheme, kernel, len, &[len]);
            prop_assert!(in_pieces(shape, scheme, kernel, len, &pieces) == whole, "{} {} {:?}", kernel, scheme, pieces);
        }
    }
}

/// The two arms that attend over f16 copies of the packed part read the same numbers with the same kernel.
#[test]
fn dequant_once_equals_dequant_step() {
    let shape = LayerShape::new(4, 2, 80).unwrap();
    for kernel in kernels_here() {
        for scheme in ["k4v4g64w128s4p512", "k2v3g32", "k2l2v3g64.mse", "ktq2vtq3g64", "kvq256x4vtq4g64"] {
            let [once, step] = [Arm::DequantOnce, Arm::DequantStep].map(|arm| {
                let mut rig = Rig::layers(shape, &[scheme], arm, kernel, 2);
                let request = rig.add(3);
                [600, 1, 40].map(|rows| bits(&rig.step(&[(request, rows)])[0]))
            });
            assert!(once == step, "{kernel} {scheme}");
        }
    }
}

#[test]
fn layers_of_different_schemes_each_equal_a_cache_of_that_scheme() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    let schemes =
        ["f16", "bf16", "k4v4g32w10", "k2v8g128s3", "k3v3g64w64p128", "ktq1vtq4g64w64s2p128", "kvq16x4vvq16x4g32w10"];
    for kernel in kernels_here() {
        let mut mixed = Rig::layers(shape, &schemes, Arm::Fused, kernel, 2);
        let request = mixed.add(4);
        let together: Vec<_> = [270, 1].into_iter().flat_map(|rows| mixed.step(&[(request, rows)])).collect();
        for (layer, scheme) in schemes.into_iter().enumerate() {
            // As many layers, so that the layer keeps its number and with it its numbers.
            let mut uniform = Rig::layers(shape, &[scheme; 7], Arm::Fused, kernel, 2);
            let request = uniform.add(4);
            for (step, rows) in [270, 1].into_iter().enumerate() {
                let out = uniform.step(&[(request, rows)]).remove(0);
                let n = out.len() / schemes.len();
                let own = layer * n..(layer + 1) * n;
                assert_eq!(bits(&out[own.clone()]), bits(&together[step][own]), "{kernel} {scheme}");
            }
        }
    }
}

/// More than one block of ranges, seen from its start and from the middle of a block, cut into units in every way.
#[test]
fn how_work_is_cut_does_not_show() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        for scheme in ["k4v4g64w128s4p512", "k2v2g32", "bf16", "ktq4vtq4g32", "kvq256x4vvq256x4g32"] {
            let mut rig = Rig::new(shape, scheme, kernel, 1);
            let request = rig.add(1);
            rig.append(&[(request, 9100)]);
            rig.commit(&[(request, 9100)]);
            for rows in [1, 3, 5] {
                let batch = [(request, rows)];
                let q = rig.append(&batch);
                for first_visible in [0, 1300] {
                    let options = AttendOptions { first_visible: &[first_visible], ..AttendOptions::new(64) };
                    let out = |threads: usize, split: Split| {
                        let mut attention = Attention::new(threads, Some(kernel)).unwrap();
                        attention.set_split(split);
                        let mut out = vec![f32::NAN; q.len()];
                        attention.attend(&rig.cache, 0, &entries(&batch), &q, &mut out, &options).unwrap();
                        bits(&out)
                    };
                    let rule = out(1, Split::default());
                    for threads in [2, 3, 16] {
                        assert_eq!(out(threads, Split::default()), rule, "{kernel} {scheme} {threads} threads");
                    }
                    for ranges in [1, 2, 3, 5, 8, 9, 100] {
                        let split = Split { ranges_per_unit: Some(ranges), vectors_per_unpack: None };
                        assert_eq!(out(2, split), rule, "{kernel} {scheme} {rows} rows, units of {ranges} ranges");
                    }
                    for vectors in [1, 2, 3, 4] {
                        let split = Split { ranges_per_unit: None, vectors_per_unpack: Some(vectors) };
                        assert_eq!(out(2, split), rule, "{kernel} {scheme} {vectors} vectors share an unpack");
                    }
                }
                rig.commit(&batch);
            }
        }
    }
}
