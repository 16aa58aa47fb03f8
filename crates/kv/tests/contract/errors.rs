//! Errors: each names what is wrong and where, and nothing of the call is done.

use crate::numbers::{Rig, bits, tokens};
use kvant_kv::{
    Arm, AttendOptions, Attention, Cache, Codebook, Error, LayerConfig, LayerShape, RowFormat, Rows, Scheme,
};

fn shape() -> LayerShape {
    LayerShape::new(4, 2, 64).unwrap()
}

/// A rig of three layers with two requests, of 70 and 33 tokens.
fn two_requests() -> (Rig, [crate::numbers::Request; 2]) {
    let mut rig = Rig::layers(shape(), &["k4v4g32w8s2", "f16", "bf16"], Arm::Fused, "portable", 1);
    let requests = [rig.add(1), rig.add(2)];
    rig.step(&[(requests[0], 70), (requests[1], 33)]);
    (rig, requests)
}

#[test]
fn a_value_that_the_format_cannot_hold_names_its_place_and_nothing_is_stored() {
    let beyond_f16 = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65520.0, -65520.0, 1e30];
    // Half a step above the largest bf16, 0x7f7f, on.
    let tie = f32::from_bits(0x7f7f_8000);
    let beyond_bf16 = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, tie, -tie, f32::MAX];
    for i in 0..6 {
        for tensor in ["K", "V"] {
            for layer in [0, 1, 2] {
                let (value, format) = match layer {
                    2 => (beyond_bf16[i], RowFormat::Bf16),
                    _ => (beyond_f16[i], RowFormat::F16),
                };
                let (mut rig, [a, b]) = two_requests();
                let before = (rig.cache.bytes(), bits(&rig.newest(a)), bits(&rig.newest(b)));
                // 40 rows of a would pack a group; the bad value is in row 3 of b, head 1.
                let batch = [Rows { seq: a.seq, rows: 40 }, Rows { seq: b.seq, rows: 5 }];
                let mut t = tokens(1, layer, 70..115, &shape());
                let x = if tensor == "K" { &mut t.k } else { &mut t.v };
                x[(40 + 3) * 128 + 64 + 9 * i] = value;
                let e = rig.cache.append(layer, &batch, &t.k, &t.v).unwrap_err();
                let text = e.to_string();
                let Error::NotFinite { tensor: t2, format: f2, layer: l2, head: 1, token: 36, value: v2, .. } = e
                else {
                    panic!("{e:?}")
                };
                assert!(t2 == tensor && f2 == format && l2 == layer && v2.to_bits() == value.to_bits(), "{text}");
                let place = format!("layer {layer}, head 1, token 36");
                let start = format!("{tensor} has a value that {format} cannot hold ({value})");
                assert!(text.starts_with(&start) && text.contains(&place), "{text}");
                assert_eq!(before, (rig.cache.bytes(), bits(&rig.newest(a)), bits(&rig.newest(b))));
                assert_eq!((rig.cache.len(layer, a.seq), rig.cache.len(layer, b.seq)), (Ok(70), Ok(33)));
            }
        }
    }
}

/// The largest numbers that round to a finite f16 or bf16 are stored.
#[test]
fn values_that_round_to_the_largest_of_the_format_are_stored() {
    let (mut rig, [a, _]) = two_requests();
    for (layer, largest) in [(0, 65519.0), (1, 65519.0), (2, f32::from_bits(0x7f7f_7fff))] {
        let mut t = tokens(1, layer, 70..71, &shape());
        (t.k[5], t.v[7]) = (largest, -largest);
        rig.cache.append(layer, &[Rows { seq: a.seq, rows: 1 }], &t.k, &t.v).unwrap();
        assert_eq!(rig.cache.len(layer, a.seq), Ok(71));
    }
}

#[test]
fn calls_with_wrong_sequences_rows_layers_or_lengths_are_refused() {
    let (mut rig, [a, b]) = two_requests();
    let gone = rig.add(3);
    rig.cache.remove_sequence(gone.seq).unwrap();
    let bytes = rig.cache.bytes();
    let one = |seq| Rows { seq, rows: 1 };
    let row = vec![0.5; 128];
    let rows = vec![0.5; 256];
    let cache = &mut rig.cache;

    let e = cache.append(0, &[one(a.seq), one(a.seq)], &rows, &rows).unwrap_err();
    assert!(matches!(e, Error::DuplicateSequence { .. }), "{e}");
    let e = cache.commit(0, &[one(a.seq), one(b.seq), one(a.seq)]).unwrap_err();
    assert!(matches!(e, Error::DuplicateSequence { .. }), "{e}");
    let e = cache.append(0, &[one(b.seq), Rows { seq: a.seq, rows: 0 }], &row, &row).unwrap_err();
    assert!(matches!(e, Error::Shape { expected: 1, got: 0, .. }), "{e}");
    for (k, v, what) in [(&rows, &row, "length of K"), (&row, &rows, "length of V"), (&vec![], &row, "length of K")] {
        match cache.append(0, &[one(a.seq)], k, v).unwrap_err() {
            Error::Shape { what: w, expected: 128, got } => {
                assert_eq!((w, got), (what, if what == "length of K" { k.len() } else { v.len() }))
            }
            e => panic!("{e}"),
        }
    }
    assert!(matches!(cache.append(0, &[one(a.seq), one(gone.seq)], &rows, &rows), Err(Error::NoSuchSequence { .. })));
    assert!(matches!(cache.commit(0, &[one(gone.seq)]), Err(Error::NoSuchSequence { .. })));
    assert!(matches!(cache.trim(gone.seq, 0), Err(Error::NoSuchSequence { .. })));
    assert!(matches!(cache.remove_sequence(gone.seq), Err(Error::NoSuchSequence { .. })));
    assert!(matches!(cache.len(0, gone.seq), Err(Error::NoSuchSequence { .. })));
    let no_layer = Error::NoSuchLayer { layer: 3, layers: 3 };
    assert_eq!(cache.append(3, &[one(a.seq)], &row, &row), Err(no_layer.clone()));
    assert_eq!(cache.commit(3, &[one(a.seq)]), Err(no_layer.clone()));
    assert_eq!(cache.len(3, a.seq), Err(no_layer.clone()));
    assert_eq!(cache.layer_config(3), Err(no_layer));
    assert!(matches!(cache.trim(a.seq, 71), Err(Error::Shape { expected: 70, got: 71, .. })));
    assert_eq!(cache.bytes(), bytes, "none of these changed anything");
    cache.append(0, &[], &[], &[]).unwrap();
    cache.commit(0, &[]).unwrap();
    assert_eq!(cache.bytes(), bytes, "an empty batch is nothing");
    assert!(matches!(Cache::new(&[], Arm::Fused), Err(Error::Shape { .. })));
}

#[test]
fn attention_refuses_what_it_cannot_answer() {
    let (mut rig, [a, b]) = two_requests();
    let gone = rig.add(3);
    rig.cache.remove_sequence(gone.seq).unwrap();
    let empty = rig.add(4);
    let one = |seq| Rows { seq, rows: 1 };
    let plain = AttendOptions::new(64);
    let mut out = vec![7.0; 512];
    let Rig { cache, attention, .. } = &mut rig;
    let mut attend = |layer: usize, batch: &[Rows], q: &[f32], n: usize, options: &AttendOptions<'_>| {
        attention.attend(cache, layer, batch, q, &mut out[..n], options).unwrap_err()
    };
    let q = vec![0.5; 512];
    assert!(matches!(attend(0, &[one(gone.seq)], &q[..256], 256, &plain), Error::NoSuchSequence { .. }));
    assert!(matches!(attend(3, &[one(a.seq)], &q[..256], 256, &plain), Error::NoSuchLayer { layer: 3, layers: 3 }));
    assert!(matches!(attend(0, &[one(a.seq)], &q[..255], 256, &plain), Error::Shape { what: "length of q", .. }));
    assert!(matches!(attend(0, &[one(a.seq)], &q[..256], 512, &plain), Error::Shape { what: "length of out", .. }));
    assert!(matches!(attend(0, &[one(empty.seq)], &q[..256], 256, &plain), Error::Shape { expected: 0, got: 1, .. }));
    assert!(matches!(attend(0, &[Rows { seq: a.seq, rows: 0 }], &[], 0, &plain), Error::Shape { got: 0, .. }));
    let options = AttendOptions { sink_logits: Some(&[0.0; 3]), ..plain };
    let e = attend(0, &[one(a.seq)], &q[..256], 256, &options);
    assert_eq!(e, Error::Shape { what: "length of sink_logits", expected: 4, got: 3 });
    let options = AttendOptions { first_visible: &[0], ..plain };
    let e = attend(0, &[one(a.seq), one(b.seq)], &q, 512, &options);
    assert_eq!(e, Error::Shape { what: "length of first_visible", expected: 2, got: 1 });
    let mut q = q;
    q[256 + 2 * 64 + 5] = f32::NEG_INFINITY;
    let e = attend(1, &[one(a.seq), one(b.seq)], &q, 512, &plain);
    let place = Error::NotFinite {
        tensor: "Q",
        format: RowFormat::F16,
        layer: 1,
        head: 2,
        token: 32,
        value: f32::NEG_INFINITY,
        seq: Some(b.seq),
    };
    assert_eq!(e, place);
    assert!(out.iter().all(|&x| x == 7.0), "a refused call writes nothing");
    assert!(attention.routes().values().sum::<u64>() == 3, "and counts nothing: the three are two_requests' own");
}

#[test]
fn attention_over_an_empty_batch_is_nothing() {
    let (mut rig, _) = two_requests();
    rig.attention.attend(&rig.cache, 0, &[], &[], &mut [], &AttendOptions::new(64)).unwrap();
    rig.attention.attend_layers(&rig.cache, 0..2, &[], &[], &mut [], &AttendOptions::new(64)).unwrap();
}

#[test]
fn layers_of_different_shapes_are_no_axis() {
    let other = LayerShape::new(4, 2, 128).unwrap();
    let layers = [shape(), other].map(|shape| LayerConfig { shape, scheme: Scheme::F16, visible: None });
    let mut cache = Cache::new(&layers, Arm::Fused).unwrap();
    let seq = cache.add_sequence();
    let rows = [Rows { seq, rows: 1 }];
    cache.append(0, &rows, &[1.0; 128], &[1.0; 128]).unwrap();
    cache.append(1, &rows, &[1.0; 256], &[1.0; 256]).unwrap();
    let mut attention = Attention::new(1, None).unwrap();
    let e = attention.attend_layers(&cache, 0..2, &rows, &[0.0; 512], &mut [0.0; 512], &AttendOptions::new(64));
    assert!(matches!(e, Err(Error::Shape { what: "layers of one shape", .. })));
}

#[test]
fn threads_and_kernels_that_do_not_exist_are_refused() {
    assert!(matches!(Attention::new(0, None), Err(Error::Threads { threads: 0, .. })));
    assert!(matches!(Attention::new(100_000, None), Err(Error::Threads { threads: 100_000, .. })));
    let Err(e) = Attention::new(1, Some("avx1024")) else { panic!("there is no such kernel") };
    assert!(e.to_string().contains("avx1024") && e.to_string().contains("portable"), "{e}");
    for (name, available) in kvant_kv::attend::kernels() {
        match (available, Attention::new(1, Some(name))) {
            (Ok(()), Ok(attention)) => assert_eq!(attention.kernel(), name),
            (Err(why), Err(Error::Unsupported { kernel, why: told })) => assert_eq!((name, why), (&*kernel, told)),
            (available, _) => panic!("{name}: {available:?}, yet the other way"),
        }
    }
}

/// Commit frees plain rows that only older rows saw; rows that old are refused, and the newest that can be attended are.
#[test]
fn rows_older_than_what_commit_left_are_refused() {
    for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep] {
        let layer = LayerConfig { shape: shape(), scheme: "k4v4g32w8s2".parse().unwrap(), visible: None };
        let mut cache = Cache::new(&[layer], arm).unwrap();
        let seq = cache.add_sequence();
        let mut attention = Attention::new(2, None).unwrap();
        let t = tokens(1, 0, 0..110, &shape());
        let all = [Rows { seq, rows: 110 }];
        cache.append(0, &all, &t.k, &t.v).unwrap();
        let mut attend = |cache: &Cache, rows: usize| {
            let mut out = vec![f32::NAN; rows * 256];
            let q = vec![0.1; rows * 256];
            attention.attend(cache, 0, &[Rows { seq, rows }], &q, &mut out, &AttendOptions::new(64)).map(|()| out)
        };
        let before = attend(&cache, 110).unwrap();
        cache.commit(0, &all).unwrap();
        // The newest row's window of 8 begins at 102, so that 96 tokens are packed for it, as for the rows from 103 on.
        for rows in 1..=110 {
            match attend(&cache, rows) {
                Ok(out) => assert!(rows <= 7 && bits(&out) == bits(&before[(110 - rows) * 256..]), "{rows} rows"),
                Err(Error::Shape { expected: 7, got, .. }) => assert!(rows > 7 && got == rows),
                Err(e) => panic!("{rows} rows: {e}"),
            }
        }
    }
}

#[test]
fn codebooks_of_other_layers_are_refused() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    let layer = |scheme: &str| LayerConfig { shape, scheme: scheme.parse().unwrap(), visible: None };
    let mut cache = Cache::new(
        &[layer("kvq16x4v4g32"), layer("f16"), layer("k4vvq256x8g64"), layer("f16"), layer("kvq16x4vvq256x8g64")],
        Arm::Fused,
    )
    .unwrap();
    let book = |centroids, sub_len| {
        Codebook::from_parts(centroids, sub_len, vec![0.5; 64], vec![0.01; 64], vec![3; 64 * centroids]).unwrap()
    };
    let refused = |cache: &mut Cache, layer, k: Vec<Codebook>, v: Vec<Codebook>, why: &str| {
        let e = cache.set_codebooks(layer, k, v).unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
    };
    refused(&mut cache, 5, vec![], vec![], "layer 5 does not exist");
    refused(&mut cache, 1, vec![book(16, 4)], vec![], "has no sub-vectors");
    refused(&mut cache, 0, vec![], vec![book(16, 4)], "no sub-vectors of values");
    refused(&mut cache, 0, vec![book(16, 8)], vec![], "16x8 for 64 channels");
    refused(&mut cache, 0, vec![book(16, 4); 3], vec![], "3 codebooks of keys for 2 kv heads");
    refused(&mut cache, 2, vec![], vec![book(256, 4)], "256x4");
    // Good keys beside bad values change nothing: what the cache writes says so below.
    refused(&mut cache, 4, vec![book(16, 4)], vec![book(256, 4)], "256x4");
    let mut saved = Vec::new();
    let seq = cache.add_sequence();
    cache.save_sequence(seq, &mut saved).unwrap();
    cache.remove_sequence(seq).unwrap();
    let fresh =
        [layer("kvq16x4v4g32"), layer("f16"), layer("k4vvq256x8g64"), layer("f16"), layer("kvq16x4vvq256x8g64")];
    let mut fresh = Cache::new(&fresh, Arm::Fused).unwrap();
    fresh.restore_sequence(&mut &saved[..], &[]).unwrap();
    cache.set_codebooks(0, vec![book(16, 4); 2], vec![]).unwrap();
    cache.set_codebooks(2, vec![], vec![book(256, 8)]).unwrap();
    cache.set_codebooks(2, vec![], vec![]).unwrap();
    cache.add_sequence();
    let e = cache.set_codebooks(0, vec![book(16, 4)], vec![]).unwrap_err().to_string();
    assert!(e.contains("holds sequences"), "{e}");
}
