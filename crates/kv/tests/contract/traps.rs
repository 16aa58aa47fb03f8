//! Traps that public projects fell into, each as a test. Records and their bytes are looked at from inside
//! (src/cache/tests.rs); here is what a user would notice.

use crate::numbers::{Request, Rig, bits, kernels_here, tokens};
use kvant_kv::{Arm, LayerShape, Scheme};

/// Decode tokens that never get packed because only the current call's length is looked at.
#[test]
fn prefill_32_then_168_steps_equals_one_prefill_of_200() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        for scheme in ["k4v4g32", "k4v4g64w16", "k2v2g32w64s4", "k8v3g32w100p64"] {
            let mut stepped = Rig::new(shape, scheme, kernel, 2);
            let a = stepped.add(1);
            stepped.step(&[(a, 32)]);
            let mut newest = Vec::new();
            for _ in 0..168 {
                newest = stepped.step(&[(a, 1)]).remove(0);
            }
            let mut whole = Rig::new(shape, scheme, kernel, 2);
            let b = whole.add(1);
            let rows = whole.step(&[(b, 200)]).remove(0);
            assert_eq!(stepped.cache.bytes(), whole.cache.bytes(), "{scheme}");
            assert!(whole.cache.bytes().packed_bytes > 0);
            assert_eq!(bits(&newest), bits(&rows[rows.len() - newest.len()..]), "{kernel} {scheme}");
            assert_eq!(bits(&stepped.newest(a)), bits(&whole.newest(b)), "{kernel} {scheme}");
        }
    }
}

/// A flag that is accepted while the live cache stays f16.
#[test]
fn the_packed_part_really_differs_from_f16() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        let newest = |scheme: &str| {
            let mut rig = Rig::new(shape, scheme, kernel, 2);
            let request = rig.add(1);
            rig.step(&[(request, 200)]);
            (rig.newest(request), rig.attention.routes().keys().cloned().collect::<Vec<_>>())
        };
        let (plain, route) = newest("f16");
        assert_eq!(route, [format!("{kernel}:window-only")]);
        let size: f32 = plain.iter().map(|x| x * x).sum();
        let mut last = 0.0;
        for scheme in ["k8v8g64", "k4v4g64", "k3v3g64", "k2v2g64"] {
            let (packed, route) = newest(scheme);
            assert_eq!(route, [format!("{kernel}:packed")]);
            let off: f32 = packed.iter().zip(&plain).map(|(a, b)| (a - b).powi(2)).sum();
            let err = (off / size).sqrt();
            // Fewer bits, larger error; and the packed part is the cache, not noise.
            assert!(err > last && err < 1.0, "{kernel} {scheme}: {err}");
            last = err;
        }
        // All of it in the window: nothing is packed, and nothing differs.
        let (window, route) = newest("k2v2g64w200");
        assert_eq!((bits(&window), route), (bits(&plain), vec![format!("{kernel}:window-only")]));
    }
}

/// A control that is accepted while the live cache stays f16: bf16 rounds eight times as coarsely.
#[test]
fn a_bf16_cache_really_is_bf16_whether_by_scheme_or_by_arm() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    for kernel in kernels_here() {
        let newest = |scheme: &str, arm: Arm| {
            let mut rig = Rig::layers(shape, &[scheme], arm, kernel, 2);
            let request = rig.add(1);
            rig.step(&[(request, 200)]);
            (rig.newest(request), rig.attention.routes().keys().cloned().collect::<Vec<_>>())
        };
        let (f16, route) = newest("k4v4g64", Arm::F16);
        assert_eq!(route, [format!("{kernel}:f16")]);
        let (bf16, route) = newest("bf16", Arm::Fused);
        assert_eq!(route, [format!("{kernel}:bf16")]);
        let off: f32 = bf16.iter().zip(&f16).map(|(a, b)| (a - b).powi(2)).sum();
        let err = (off / f16.iter().map(|x| x * x).sum::<f32>()).sqrt();
        // Rounding alone is at most 2^-9 of a number, and errors of many keys cancel in part.
        assert!(err > 1e-4 && err < 1e-2, "{kernel}: {err}");
        for (scheme, arm) in [("bf16", Arm::Bf16), ("k4v4g64", Arm::Bf16), ("bf16", Arm::DequantStep)] {
            assert_eq!(newest(scheme, arm), (bf16.clone(), route.clone()), "{scheme} {arm}");
        }
    }
}

/// A benchmark that does not attend its newest token, or whose window, packed part or sinks are decoration.
#[test]
fn every_kind_of_token_counts() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    let (len, scheme) = (1030, "k4v4g64w128s4p512");
    // By the window alone 896 tokens were packed; the page at 1,024 packs the rest of what lies before it.
    let edge = scheme.parse::<Scheme>().unwrap().edge(len - 1);
    assert_eq!(edge, 1024);
    for kernel in kernels_here() {
        let out = |changed: Option<(usize, bool)>| {
            let mut rig = Rig::new(shape, scheme, kernel, 2);
            let request = rig.add(1);
            let mut t = tokens(1, 0, 0..len, &shape);
            if let Some((token, key)) = changed {
                let x = if key { &mut t.k } else { &mut t.v };
                x[token * shape.row_len()..][..shape.row_len()].iter_mut().for_each(|x| *x += 1.0);
            }
            let rows = [kvant_kv::Rows { seq: request.seq, rows: len }];
            rig.cache.append(0, &rows, &t.k, &t.v).unwrap();
            rig.cache.commit(0, &rows).unwrap();
            rig.newest(request)
        };
        let plain = out(None);
        let kinds = [("newest", 1029), ("window", 1026), ("page's packed", 1000), ("packed", 300), ("sink", 2)];
        for (kind, token) in kinds {
            assert_eq!(token < edge, kind.contains("packed") || kind == "sink");
            for key in [true, false] {
                let changed = out(Some((token, key)));
                for (head, (a, b)) in plain.chunks(64).zip(changed.chunks(64)).enumerate() {
                    let tensor = if key { "K" } else { "V" };
                    assert_ne!(bits(a), bits(b), "{kernel}: {tensor} of a {kind} token, query head {head}");
                }
            }
        }
    }
}

/// A benchmark whose cache is frozen: no flush in its steps.
#[test]
fn decoding_packs_a_group_whenever_one_is_due() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    let mut rig = Rig::new(shape, "k4v4g64w128", "portable", 1);
    let request = rig.add(1);
    rig.step(&[(request, 200)]);
    let record_bytes = 2 * 64 * 64 * 9 / 2 / 8 * 2; // K and V, 64 tokens of 64 channels, 4.5 bits, 2 heads
    for len in 201..=500 {
        rig.step(&[(request, 1)]);
        assert_eq!(rig.cache.bytes().packed_bytes, (len - 128) / 64 * record_bytes, "{len} tokens");
    }
}

#[test]
fn the_same_prompt_four_times_gives_four_equal_results_equal_to_it_alone() {
    let shape = LayerShape::new(4, 4, 64).unwrap();
    for kernel in kernels_here() {
        for scheme in ["f16", "bf16", "k4v4g64w128s4p512", "k2v2g32"] {
            let mut one = Rig::new(shape, scheme, kernel, 2);
            let single = one.add(7);
            let mut four = Rig::new(shape, scheme, kernel, 2);
            let requests: Vec<Request> = (0..4).map(|_| four.add(7)).collect();
            for rows in [333, 1, 1] {
                let want = bits(&one.step(&[(single, rows)])[0]);
                let batch: Vec<_> = requests.iter().map(|r| (*r, rows)).collect();
                four.step(&batch).iter().for_each(|out| assert_eq!(bits(out), want, "{kernel} {scheme}"));
            }
        }
    }
}

/// A batch as large as the number of heads, where a mistaken axis would go unnoticed in shapes.
#[test]
fn batch_size_equal_to_the_number_of_heads_is_no_special_case() {
    for kernel in kernels_here() {
        for (q_heads, kv_heads, size) in [(4, 4, 4), (4, 2, 2), (4, 2, 4), (1, 1, 1), (8, 8, 8)] {
            let shape = LayerShape::new(q_heads, kv_heads, 64).unwrap();
            let mut rig = Rig::new(shape, "k4v4g32w8", kernel, 2);
            let batch: Vec<_> = (0..size).map(|i| (rig.add(i as u64), 64 + 13 * i)).collect();
            for (i, out) in rig.step(&batch).iter().enumerate() {
                let mut alone = Rig::new(shape, "k4v4g32w8", kernel, 2);
                let request = alone.add(i as u64);
                assert_eq!(bits(out), bits(&alone.step(&[(request, batch[i].1)])[0]), "{kernel} {q_heads}/{kv_heads}");
            }
        }
    }
}

/// Padding inside key groups: a longer row in the batch would shift or stretch a shorter one's groups.
#[test]
fn a_longer_or_shorter_row_in_the_batch_changes_nothing() {
    let shape = LayerShape::new(2, 1, 64).unwrap();
    for kernel in kernels_here() {
        for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep, Arm::F16, Arm::Bf16] {
            let decode = |other: Option<usize>| {
                let mut rig = Rig::layers(shape, &["k4v4g64w16"], arm, kernel, 2);
                let request = rig.add(1);
                let other = other.map(|len| (rig.add(2), len));
                let mut prompts = vec![(request, 150)];
                prompts.extend(other);
                let mut outs = rig.step(&prompts).remove(0);
                for _ in 0..70 {
                    let batch: Vec<_> = prompts.iter().map(|(r, _)| (*r, 1)).collect();
                    outs.extend(rig.step(&batch).remove(0));
                }
                bits(&outs)
            };
            let alone = decode(None);
            for other in [1, 63, 149, 151, 640] {
                assert!(decode(Some(other)) == alone, "{kernel} {arm}: beside {other} tokens");
            }
        }
    }
}

/// Head dims that are no power of two, odd lengths and one token, step by step beside one prefill.
#[test]
fn head_dim_80_and_96_at_odd_lengths() {
    for kernel in kernels_here() {
        for head_dim in [80, 96] {
            let shape = LayerShape::new(3, 1, head_dim).unwrap();
            for scheme in ["k4v4g64w128s4p512", "k3v2g32w5", "k8v8g128"] {
                let mut stepped = Rig::new(shape, scheme, kernel, 2);
                let request = stepped.add(1);
                let mut outs = stepped.step(&[(request, 1)]).remove(0);
                for rows in [2, 61, 1, 1, 126, 1, 67] {
                    outs.extend(stepped.step(&[(request, rows)]).remove(0));
                }
                let mut whole = Rig::new(shape, scheme, kernel, 2);
                let request = whole.add(1);
                assert_eq!(bits(&outs), bits(&whole.step(&[(request, 260)])[0]), "{kernel} {scheme} {head_dim}");
            }
        }
    }
}
