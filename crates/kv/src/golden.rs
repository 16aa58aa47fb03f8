//! Golden cases: an independent f64 reference (tests/golden/reference.py) wrote inputs and outputs; every kernel that runs
//! here must agree. `KVANT_GOLDEN` names another file of the same keys.
//! NOT here: codecs that are not affine (golden/codecs.rs), comparisons between our own parts (attend/parity.rs).

mod codecs;

use crate::append::cpu;
use crate::attend::dense::{DenseCodes, DenseKv};
use crate::attend::reference::relative_error;
use crate::attend::{AttendOptions, Attention};
use crate::cache::layout::RecordLayout;
use crate::quant::affine::quantize;
use crate::{Arm, Cache, LayerConfig, LayerShape, PackedScheme, Rows, Scheme, SeqId};
use half::f16;
use half::slice::HalfFloatSliceExt;
use safetensors::{Dtype, SafeTensors};

/// The file's bytes. A file that is named but unreadable fails the test.
fn golden_bytes() -> Vec<u8> {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/golden.safetensors");
    read_file(std::env::var_os("KVANT_GOLDEN").unwrap_or_else(|| committed.into()).as_ref())
}

fn read_file(path: &std::path::Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("golden file {}: {e}", path.display()))
}

#[test]
#[should_panic(expected = "golden file /no/such/golden.safetensors")]
fn a_golden_file_that_is_missing_fails() {
    read_file("/no/such/golden.safetensors".as_ref());
}

#[test]
#[should_panic(expected = "whole safetensors file")]
fn a_damaged_golden_file_fails() {
    let bytes = golden_bytes();
    Golden::read(&bytes[..bytes.len() / 2]);
}

struct Golden<'a>(SafeTensors<'a>);

impl<'a> Golden<'a> {
    fn read(bytes: &'a [u8]) -> Self {
        Self(SafeTensors::deserialize(bytes).expect("golden file is a whole safetensors file"))
    }

    fn get<T: bytemuck::AnyBitPattern>(&self, name: &str, dtype: Dtype) -> (Vec<usize>, Vec<T>) {
        self.find(name, dtype).unwrap_or_else(|why| panic!("{why}"))
    }

    /// Shape and numbers of a tensor, or what is wrong with it.
    fn find<T: bytemuck::AnyBitPattern>(&self, name: &str, dtype: Dtype) -> Result<(Vec<usize>, Vec<T>), String> {
        let t = self.0.tensor(name).map_err(|e| format!("golden tensor {name}: {e}"))?;
        if t.dtype() != dtype {
            return Err(format!("golden tensor {name}: {:?}, not {dtype:?}", t.dtype()));
        }
        let values = t.data().chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        Ok((t.shape().to_vec(), values))
    }

    fn f16(&self, name: &str) -> (Vec<usize>, Vec<f16>) {
        self.get(name, Dtype::F16)
    }

    fn f32_of_f16(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let (shape, x) = self.f16(name);
        (shape, x.to_f32_vec())
    }

    fn u8(&self, name: &str) -> Vec<u8> {
        self.get(name, Dtype::U8).1
    }

    fn f64(&self, name: &str) -> Vec<f64> {
        self.get(name, Dtype::F64).1
    }

    fn i64(&self, name: &str) -> Vec<usize> {
        self.get::<i64>(name, Dtype::I64).1.into_iter().map(|x| usize::try_from(x).expect("not negative")).collect()
    }
}

/// Every kernel this processor runs, with its tolerances (packed, f16).
fn each_kernel(mut f: impl FnMut(&str, Attention, f64, f64)) {
    for v in crate::attend::cpu::VARIANTS {
        match (v.available)() {
            Ok(()) => f(v.name, Attention::new(2, Some(v.name)).unwrap(), v.packed_tolerance, v.plain_tolerance),
            Err(why) => println!("skipped {}: {why}", v.name),
        }
    }
}

/// Whether the exact quotient is so near a tie that either code is right (DESIGN: within 1e-4).
fn near_tie(x: f64, scale: f64, zero: f64) -> bool {
    let q = (x - zero) / scale;
    (q - q.floor() - 0.5).abs() <= 1e-4
}

#[test]
fn golden_quantizer() {
    let bytes = golden_bytes();
    let golden = Golden::read(&bytes);
    let mut seen = 0;
    for bits in [2u32, 3, 4, 8] {
        for g in [32usize, 64] {
            for (name, by_token) in [("k", false), ("v", true)] {
                let n = format!("quant.b{bits}.g{g}.{name}");
                let (shape, x) = golden.f32_of_f16(&n);
                let (heads, s, d) = (shape[0], shape[1], shape[2]);
                let codes = golden.u8(&format!("{n}.codes"));
                let (pshape, scale) = golden.f16(&format!("{n}.scale"));
                let (_, zero) = golden.f16(&format!("{n}.zero"));
                for head in 0..heads {
                    let (rows, len) = if by_token { (s, d) } else { (d, s) };
                    for row in 0..rows {
                        let at = |i: usize| {
                            let (t, c) = if by_token { (row, i) } else { (i, row) };
                            (head * s + t) * d + c
                        };
                        for group in 0..len.div_ceil(g) {
                            let span = group * g..((group + 1) * g).min(len);
                            let values: Vec<f32> = span.clone().map(|i| x[at(i)]).collect();
                            let mut got = vec![0; values.len()];
                            let affine = quantize(&values, 0, bits, crate::scheme::Fit::MinMax, &mut got);
                            let (a, b) = if by_token { (row, group) } else { (group, row) };
                            let p = (head * pshape[1] + a) * pshape[2] + b;
                            assert_eq!(affine.scale.to_f32(), scale[p].to_f32(), "{n} scale {p}");
                            assert_eq!(affine.zero.to_f32(), zero[p].to_f32(), "{n} zero {p}");
                            for (i, got) in span.zip(got) {
                                let want = codes[at(i)];
                                let (s, z) = (affine.scale.to_f64(), affine.zero.to_f64());
                                let ok = got == want
                                    || (got.abs_diff(want) == 1 && s != 0.0 && near_tie(x[at(i)] as f64, s, z));
                                assert!(ok, "{n} code at {}: got {got}, want {want}", at(i));
                                seen += 1;
                            }
                        }
                    }
                }
            }
        }
    }
    assert_eq!(seen, 4 * 2 * 2 * 2 * 77 * 80);
}

/// Codes of a dense case, `[..][kv_heads][S][D]`.
struct DenseCase {
    k_codes: Vec<u8>,
    v_codes: Vec<u8>,
    params: [Vec<f16>; 4],
}

impl DenseCase {
    fn read(golden: &Golden<'_>, prefix: &str) -> Self {
        let f = |name: &str| golden.f16(&format!("{prefix}{name}")).1;
        Self {
            k_codes: golden.u8(&format!("{prefix}k_codes")),
            v_codes: golden.u8(&format!("{prefix}v_codes")),
            params: [f("k_scale"), f("k_zero"), f("v_scale"), f("v_zero")],
        }
    }

    /// The part `i` of `n` equal parts of the leading axes.
    fn part(&self, i: usize, n: usize) -> DenseCodes<'_> {
        fn cut<T>(x: &[T], i: usize, n: usize) -> &[T] {
            &x[x.len() / n * i..x.len() / n * (i + 1)]
        }
        let [k_scale, k_zero, v_scale, v_zero] = self.params.each_ref().map(|p| cut(p, i, n));
        DenseCodes {
            k_codes: cut(&self.k_codes, i, n),
            v_codes: cut(&self.v_codes, i, n),
            k_scale,
            k_zero,
            v_scale,
            v_zero,
        }
    }
}

#[test]
fn golden_dense_attention() {
    let bytes = golden_bytes();
    let golden = Golden::read(&bytes);
    for name in ["mha", "gqa4", "gqa3_smol", "gqa8", "one_token", "d80"] {
        let prefix = format!("attend.{name}.");
        let meta = golden.i64(&format!("{prefix}meta"));
        let (qs, q) = golden.f32_of_f16(&format!("{prefix}q"));
        let (ks, _) = golden.f16(&format!("{prefix}k"));
        let want = golden.f64(&format!("{prefix}out"));
        let shape = LayerShape::new(qs[1], ks[1], ks[3]).unwrap();
        let case = DenseCase::read(&golden, &prefix);
        let sizes = (1, qs[0], ks[2]);
        let kv = DenseKv::from_codes(shape, meta[0] as u32, meta[1], sizes, &case.part(0, 1)).unwrap();
        each_kernel(|kernel, mut attention, tolerance, _| {
            let mut out = vec![f32::NAN; q.len()];
            attention.attend_dense(&kv, &q, &mut out, &AttendOptions::new(shape.head_dim)).unwrap();
            let err = relative_error(&out, &want);
            println!("{name} {kernel}: {err:.1e}");
            assert!(err <= tolerance, "{name} {kernel}: {err:.1e} > {tolerance:.0e}");
        });
    }
}

#[test]
fn golden_layers_axis_equals_a_loop() {
    let bytes = golden_bytes();
    let golden = Golden::read(&bytes);
    let (qs, q) = golden.f32_of_f16("layers.q");
    let (ks, _) = golden.f16("layers.k");
    let want = golden.f64("layers.out");
    let shape = LayerShape::new(qs[2], ks[2], ks[4]).unwrap();
    let case = DenseCase::read(&golden, "layers.");
    let (layers, batch, kv_len) = (ks[0], ks[1], ks[3]);
    let options = AttendOptions::new(shape.head_dim);
    let all = DenseKv::from_codes(shape, 2, 32, (layers, batch, kv_len), &case.part(0, 1)).unwrap();
    each_kernel(|kernel, mut attention, tolerance, _| {
        let mut out = vec![f32::NAN; q.len()];
        attention.attend_dense(&all, &q, &mut out, &options).unwrap();
        assert!(relative_error(&out, &want) <= tolerance, "{kernel}");
        let n = q.len() / layers;
        for layer in 0..layers {
            let one = DenseKv::from_codes(shape, 2, 32, (1, batch, kv_len), &case.part(layer, layers)).unwrap();
            let mut single = vec![f32::NAN; n];
            attention.attend_dense(&one, &q[layer * n..][..n], &mut single, &options).unwrap();
            assert_eq!(single, out[layer * n..][..n], "{kernel} layer {layer}");
        }
    });
}

/// K or V `[kv_heads][S][D]` as rows of tokens `[S][kv_heads][D]`.
fn token_rows(x: &[f32], heads: usize, s: usize, d: usize) -> Vec<f32> {
    (0..s).flat_map(|t| (0..heads).flat_map(move |h| x[(h * s + t) * d..][..d].iter().copied())).collect()
}

#[test]
fn golden_variants_of_newer_models() {
    let bytes = golden_bytes();
    let golden = Golden::read(&bytes);
    let (qs, q) = golden.f32_of_f16("variant.q");
    let (ks, k) = golden.f32_of_f16("variant.k");
    let (_, v) = golden.f32_of_f16("variant.v");
    let (_, sinks) = golden.get::<f32>("variant.sink_logit", Dtype::F32);
    let (heads, s, d) = (ks[0], ks[1], ks[2]);
    let shape = LayerShape::new(qs[0], heads, d).unwrap();
    let plain = AttendOptions::new(d);
    let cases = [
        ("plain", plain),
        ("softcap30", AttendOptions { softcap: Some(30.0), ..plain }),
        ("sink_logit", AttendOptions { sink_logits: Some(&sinks), ..plain }),
        ("first37", AttendOptions { first_visible: &[37], ..plain }),
    ];
    let mut cache = Cache::new(&[LayerConfig { shape, scheme: Scheme::F16, visible: None }], Arm::F16).unwrap();
    let seq = cache.add_sequence();
    let rows = [Rows { seq, rows: s }];
    cache.append(0, &rows, &token_rows(&k, heads, s, d), &token_rows(&v, heads, s, d)).unwrap();
    for (name, options) in cases {
        let want = golden.f64(&format!("variant.{name}.out"));
        each_kernel(|kernel, mut attention, _, tolerance| {
            let mut out = vec![f32::NAN; q.len()];
            attention.attend(&cache, 0, &[Rows { seq, rows: 1 }], &q, &mut out, &options).unwrap();
            let err = relative_error(&out, &want);
            assert!(err <= tolerance, "{name} {kernel}: {err:.1e} > {tolerance:.0e}");
        });
    }
}

/// Appends one token (K, V, Q of all heads), attends and commits: what the query sees.
fn decode(
    cache: &mut Cache,
    attention: &mut Attention,
    seq: SeqId,
    head_dim: usize,
    (k, v, q): (&[f32], &[f32], &[f32]),
) -> Vec<f32> {
    let one = [Rows { seq, rows: 1 }];
    cache.append(0, &one, k, v).unwrap();
    let mut out = vec![f32::NAN; q.len()];
    attention.attend(cache, 0, &one, q, &mut out, &AttendOptions::new(head_dim)).unwrap();
    cache.commit(0, &one).unwrap();
    out
}

#[test]
fn golden_cache_decoded_step_by_step() {
    let bytes = golden_bytes();
    let golden = Golden::read(&bytes);
    for name in ["short", "edge", "long", "none", "sinks", "page", "both"] {
        let get = |key: &str| format!("cache.{name}.{key}");
        let meta = golden.i64(&get("meta"));
        let [window, g, bits, prompt, steps, sinks, page] = meta[..] else { panic!("seven numbers") };
        let (qs, q) = golden.f32_of_f16(&get("q"));
        let (ks, k) = golden.f32_of_f16(&get("k"));
        let (_, v) = golden.f32_of_f16(&get("v"));
        let (want, edges) = (golden.f64(&get("out")), golden.i64(&get("edge")));
        let (heads, s, d) = (ks[0], ks[1], ks[2]);
        let (k, v) = (token_rows(&k, heads, s, d), token_rows(&v, heads, s, d));
        let shape = LayerShape::new(qs[1], heads, d).unwrap();
        let scheme = PackedScheme::new(bits as u32, bits as u32, g, window, sinks, page).unwrap();
        each_kernel(|kernel, mut attention, tolerance, _| {
            for arm in [Arm::Fused, Arm::DequantOnce, Arm::DequantStep] {
                let layer = LayerConfig { shape, scheme: Scheme::Packed(scheme), visible: None };
                let mut cache = Cache::new(&[layer], arm).unwrap();
                let seq = cache.add_sequence();
                let row = heads * d;
                let all = [Rows { seq, rows: prompt }];
                cache.append(0, &all, &k[..prompt * row], &v[..prompt * row]).unwrap();
                cache.commit(0, &all).unwrap();
                let n = q.len() / steps;
                for step in 0..steps {
                    let i = prompt + step;
                    assert_eq!(scheme.edge(i), edges[step], "{name} edge({i})");
                    let at = i * row..(i + 1) * row;
                    let q = &q[step * n..][..n];
                    let out = decode(&mut cache, &mut attention, seq, d, (&k[at.clone()], &v[at], q));
                    // dequant arms round x_hat to f16: 2^-11 relative.
                    let tolerance = if arm == Arm::Fused { tolerance } else { 3e-3 };
                    let err = relative_error(&out, &want[step * n..][..n]);
                    assert!(err <= tolerance, "{name} {kernel} {arm} step {step}: {err:.1e} > {tolerance:.0e}");
                }
            }
        });
    }
}

/// The record writer uses the same codes as the quantizer that the golden file checks, group by group.
#[test]
fn golden_keys_through_a_record() {
    let bytes = golden_bytes();
    let golden = Golden::read(&bytes);
    for bits in [2u32, 3, 4, 8] {
        let n = format!("quant.b{bits}.g64.k");
        let (shape, k) = golden.f16(&n);
        let (_, v) = golden.f16(&format!("quant.b{bits}.g64.v"));
        let d = shape[2];
        let layout = RecordLayout::from_parts(d, 64, bits, bits);
        let blocks: Vec<(Vec<f16>, Vec<f16>)> = (0..2)
            .map(|b| {
                let kt = (0..d * 32).map(|i| k[(b * 32 + i % 32) * d + i / 32]).collect();
                (kt, v[b * 32 * d..(b + 1) * 32 * d].to_vec())
            })
            .collect();
        let blocks: Vec<_> = blocks.iter().map(|(k, v)| (&k[..], &v[..])).collect();
        let mut record = vec![0; layout.record_bytes];
        (cpu::best().write_record)(&layout, 0, &blocks, 0, &mut record);
        let (k_hat, v_hat) = crate::append::record::read_record(&layout, 0, &record);
        let codes = golden.u8(&format!("{n}.codes"));
        let (scale, zero) = (golden.f16(&format!("{n}.scale")).1, golden.f16(&format!("{n}.zero")).1);
        let v_name = format!("quant.b{bits}.g64.v");
        let v_codes = golden.u8(&format!("{v_name}.codes"));
        let (v_scale, v_zero) = (golden.f16(&format!("{v_name}.scale")).1, golden.f16(&format!("{v_name}.zero")).1);
        let mut ties = 0;
        for t in 0..64 {
            for c in 0..d {
                let (ks, kz) = (scale[c].to_f32(), zero[c].to_f32());
                let want = codes[t * d + c] as f32 * ks + kz;
                ties += usize::from((k_hat[c * 64 + t] - want).abs() > ks * 1e-3);
                let p = t * d.div_ceil(64) + c / 64;
                let (vs, vz) = (v_scale[p].to_f32(), v_zero[p].to_f32());
                let want = v_codes[t * d + c] as f32 * vs + vz;
                ties += usize::from((v_hat[t * d + c] - want).abs() > vs * 1e-3);
            }
        }
        // A code may differ next to a tie (golden_quantizer checks that it is one): about 2e-4 of them at the very most.
        assert!(ties <= 4, "{n}: {ties} values differ");
    }
}
