//! Options that are no usable numbers are refused with their value.
//! NOT here: what the options mean (src/golden.rs, src/attend/parity.rs).

use kvant_kv::{Arm, AttendOptions, Attention, Cache, Error, LayerConfig, LayerShape, Rows, Scheme};

#[test]
fn options_that_are_no_numbers_are_errors() {
    let shape = LayerShape::new(2, 1, 64).unwrap();
    let mut cache = Cache::new(&[LayerConfig { shape, scheme: Scheme::F16, visible: None }], Arm::F16).unwrap();
    let batch = [Rows { seq: cache.add_sequence(), rows: 1 }];
    cache.append(0, &batch, &[1.0; 64], &[1.0; 64]).unwrap();
    let mut attention = Attention::new(1, None).unwrap();
    let plain = AttendOptions::new(64);
    let cases = [
        AttendOptions { sm_scale: f32::NAN, ..plain },
        AttendOptions { softcap: Some(0.0), ..plain },
        AttendOptions { softcap: Some(-1.0), ..plain },
        AttendOptions { softcap: Some(f32::INFINITY), ..plain },
        AttendOptions { sink_logits: Some(&[0.0, f32::NAN]), ..plain },
    ];
    for options in &cases {
        let mut out = [7.0; 128];
        let e = attention.attend(&cache, 0, &batch, &[1.0; 128], &mut out, options).unwrap_err();
        assert!(matches!(e, Error::Number { .. }), "{e}");
        assert_eq!(out, [7.0; 128], "nothing is written");
    }
    let mut out = [7.0; 128];
    attention.attend(&cache, 0, &batch, &[1.0; 128], &mut out, &plain).unwrap();
    assert!(out.iter().all(|x| (x - 1.0).abs() <= 1e-3));
}
