//! Position decides, checked from the raw rows: this file packs and attends by itself, in f64, from the words of the
//! contract, and shares nothing with the library but `Scheme`'s numbers. In: rows in some chunking; out: agreement.
//! NOT here: bit equality (exact.rs).

use crate::numbers::{Rig, kernels_here, tokens};
use half::{bf16, f16};
use kvant_kv::attend::reference::attend_f64;
use kvant_kv::{LayerShape, PackedScheme, Scheme};

/// Largest relative L2 error of any kernel.
const TOLERANCE: f64 = 3e-3;

fn to_f16(x: f64) -> f64 {
    f16::from_f64(x).to_f64()
}

/// x_hat of one group.
fn round_trip(x: &[f64], bits: u32) -> Vec<f64> {
    let top = f64::from((1u32 << bits) - 1);
    let (min, max) = x.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &x| (a.min(x), b.max(x)));
    let (zero, scale) = (to_f16(min), to_f16((max - min) / top));
    let code = |x: f64| if scale == 0.0 { 0.0 } else { ((x - zero) / scale).round_ties_even().clamp(0.0, top) };
    x.iter().map(|&x| code(x) * scale + zero).collect()
}

/// Keys before this one are packed for a query at `i`, as the contract writes it.
fn edge(p: &PackedScheme, i: usize) -> usize {
    let window = (i + 1).max(p.window_len()) - p.window_len();
    let by_window = window / p.group_len() * p.group_len();
    let by_page = if p.page_len() > 0 { i / p.page_len() * p.page_len() } else { 0 };
    by_window.max(by_page)
}

/// K and V `[tokens][D]` of one head, all packed but the sinks. Tokens after the last whole group stay as they are.
fn pack_all(p: &PackedScheme, d: usize, k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut k_hat, mut v_hat) = (k.to_vec(), v.to_vec());
    let g = p.group_len();
    for start in (0..k.len() / d / g * g).step_by(g) {
        let span = start.max(p.sinks())..start + g;
        for channel in 0..d {
            let x: Vec<f64> = span.clone().map(|t| k[t * d + channel]).collect();
            let x = round_trip(&x, p.k().as_affine().unwrap().0);
            span.clone().zip(x).for_each(|(t, x)| k_hat[t * d + channel] = x);
        }
        for t in span {
            for channels in (0..d).step_by(g.min(d)).map(|c| c..(c + g.min(d)).min(d)) {
                let at = t * d + channels.start..t * d + channels.end;
                v_hat[at.clone()].copy_from_slice(&round_trip(&v[at], p.v().as_affine().unwrap().0));
            }
        }
    }
    (k_hat, v_hat)
}

#[test]
fn a_query_sees_what_its_position_says() {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    let (d, len) = (64, 330);
    for scheme in ["f16", "bf16", "k4v4g64w128s4p512", "k2v3g32", "k3v2g32w40s16p96", "k8v8g128w3", "k4v8g32w0s5p64"] {
        let t = tokens(1, 0, 0..len, &shape);
        let stored = |x: f32| if scheme == "bf16" { bf16::from_f32(x).to_f64() } else { to_f16(x as f64) };
        let mut want = vec![0.0; len * 4 * d];
        for head in 0..2 {
            let row = |x: &[f32]| -> Vec<f64> {
                x.chunks(128).flat_map(|r| r[head * d..][..d].iter().map(|&x| stored(x))).collect()
            };
            let (k, v) = (row(&t.k), row(&t.v));
            let parsed: Scheme = scheme.parse().unwrap();
            let packed = parsed.packed().map(|p| (p, pack_all(p, d, &k, &v)));
            for i in 0..len {
                let edge = packed.as_ref().map_or(0, |(p, _)| edge(p, i));
                let (mut ki, mut vi) = (k[..(i + 1) * d].to_vec(), v[..(i + 1) * d].to_vec());
                if let Some((_, (k_hat, v_hat))) = &packed {
                    ki[..edge * d].copy_from_slice(&k_hat[..edge * d]);
                    vi[..edge * d].copy_from_slice(&v_hat[..edge * d]);
                }
                for h in 2 * head..2 * head + 2 {
                    let at = (i * 4 + h) * d;
                    let q: Vec<f64> = t.q[at..at + d].iter().map(|&x| x as f64).collect();
                    want[at..at + d].copy_from_slice(&attend_f64(&q, &ki, &vi, 0.125, None, None));
                }
            }
        }
        for kernel in kernels_here() {
            for pieces in [&[330][..], &[32, 1, 1, 1, 31, 64, 200], &[1, 127, 2, 170, 30]] {
                let mut rig = Rig::new(shape, scheme, kernel, 2);
                let request = rig.add(1);
                let out: Vec<f32> = pieces.iter().flat_map(|&rows| rig.step(&[(request, rows)]).remove(0)).collect();
                for (i, (got, want)) in out.chunks(4 * d).zip(want.chunks(4 * d)).enumerate() {
                    let off: f64 = got.iter().zip(want).map(|(&g, w)| (g as f64 - w).powi(2)).sum();
                    let err = (off / want.iter().map(|w| w * w).sum::<f64>()).sqrt();
                    assert!(err <= TOLERANCE, "{kernel} {scheme} {pieces:?}: position {i} is {err:.1e} off");
                }
            }
        }
    }
}
