//! The basis that a layer's keys and values are stored in. In: q, k, v rows after RoPE; out: the same rows in that basis, and
//! attention's rows back from it. Attention in exact arithmetic does not notice: products of keys and queries and sums of
//! values stay what they are. Quantization does: a rotation spreads outliers over all channels, an order of the key channels
//! puts the loud ones first, where a scheme keeps more bits.
//!
//! Formula: the rotation is a Hadamard matrix over the largest power of two that divides head_dim (80: blocks of 16), divided
//! by the root of its size: its own inverse. Keys and queries share theirs, values and attention's rows another.
//! The value rotation could also be folded into the value and output projections. With weights of 4 bits that would round
//! them anew; the butterfly costs about a thousandth of a layer's products (docs/decisions/0012-schemes-by-error.md).
//! NOT here: which layer has which basis (schemes.rs), RoPE (rope.rs).

use super::each_row;
use kvant_kv::LayerShape;
use std::sync::Arc;

/// How a layer's keys and values are turned before they are stored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Basis {
    /// Keys and queries are rotated.
    pub rotate_k: bool,
    /// Values are rotated, and what attention makes of them is rotated back.
    pub rotate_v: bool,
    /// Per kv head, which channel of keys and queries comes first, second and so on: `[kv_heads][head_dim]`. None: as they are.
    pub key_order: Option<Arc<[Vec<u16>]>>,
}

impl Basis {
    /// Turns the rows of a step. Shapes: `q` f32 `[rows][q_heads][head_dim]`; `k`, `v` `[rows][kv_heads][head_dim]`.
    pub fn enter(&self, shape: &LayerShape, q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
        let d = shape.head_dim;
        let (q_len, k_len) = (shape.q_heads * d, shape.row_len());
        if self.rotate_k {
            each_row(q, q_len, |_, row| rotate_heads(row, d));
            each_row(k, k_len, |_, row| rotate_heads(row, d));
        }
        if self.rotate_v {
            each_row(v, k_len, |_, row| rotate_heads(row, d));
        }
        if let Some(orders) = &self.key_order {
            let ratio = shape.q_heads / shape.kv_heads;
            each_row(q, q_len, |_, row| reorder(row, d, |head| &orders[head / ratio]));
            each_row(k, k_len, |_, row| reorder(row, d, |head| &orders[head]));
        }
    }

    /// Turns attention's rows back. Shape: f32 `[rows][q_heads][head_dim]`.
    pub fn leave(&self, shape: &LayerShape, out: &mut [f32]) {
        if self.rotate_v {
            each_row(out, shape.q_heads * shape.head_dim, |_, row| rotate_heads(row, shape.head_dim));
        }
    }
}

/// Rotates each head of some rows: see the formula above.
pub(crate) fn rotate_heads(rows: &mut [f32], head_dim: usize) {
    let size = 1 << head_dim.trailing_zeros();
    let scale = (size as f32).sqrt().recip();
    for block in rows.chunks_exact_mut(size) {
        let mut half = 1;
        while half < size {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|x| *x *= scale);
    }
}

/// Puts the channels of each head of a row in the order that `of` has for it.
fn reorder<'a>(row: &mut [f32], head_dim: usize, of: impl Fn(usize) -> &'a Vec<u16>) {
    let mut old = [0.0; 256];
    for (head, row) in row.chunks_exact_mut(head_dim).enumerate() {
        let old = &mut old[..head_dim];
        old.copy_from_slice(row);
        row.iter_mut().zip(of(head)).for_each(|(x, &from)| *x = old[from as usize]);
    }
}

/// An order with these channels first and the others behind them, each part ascending.
pub fn order_with_first(first: &[u16], head_dim: usize) -> Vec<u16> {
    let (mut order, rest): (Vec<u16>, Vec<u16>) = (0..head_dim as u16).partition(|channel| first.contains(channel));
    order.extend(rest);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| ((i as f32 + seed) * 0.37).sin()).collect()
    }

    #[test]
    fn products_and_sums_stay_what_they_are() {
        for d in [64, 80, 96, 128, 256] {
            let shape = LayerShape::new(4, 2, d).unwrap();
            let orders: Vec<_> = [[3, 1], [5, 0]].iter().map(|first| order_with_first(first, d)).collect();
            let basis = Basis { rotate_k: true, rotate_v: true, key_order: Some(orders.into()) };
            let (mut q, mut k, mut v) = (rows(4 * d, 1.0), rows(2 * d, 2.0), rows(2 * d, 3.0));
            let dots = |q: &[f32], k: &[f32]| -> Vec<f32> {
                (0..4).map(|h| q[h * d..][..d].iter().zip(&k[h / 2 * d..][..d]).map(|(a, b)| a * b).sum()).collect()
            };
            let (want, values) = (dots(&q, &k), v.clone());
            basis.enter(&shape, &mut q, &mut k, &mut v);
            assert!(dots(&q, &k).iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4), "{d}");
            assert!(v.iter().zip(&values).any(|(a, b)| (a - b).abs() > 0.1), "{d}: values are turned");
            // Query heads 0 and 2 attend to one value each: that of their kv head.
            let mut out = [&v[..d], &v[..d], &v[d..], &v[d..]].concat();
            basis.leave(&shape, &mut out);
            for (h, out) in out.chunks_exact(d).enumerate() {
                assert!(out.iter().zip(&values[h / 2 * d..]).all(|(a, b)| (a - b).abs() < 1e-5), "{d}");
            }
        }
    }

    #[test]
    fn an_order_has_every_channel_once() {
        assert_eq!(order_with_first(&[5, 2], 8), [2, 5, 0, 1, 3, 4, 6, 7]);
        let mut row: Vec<f32> = (0..8).map(|i| i as f32).collect();
        reorder(&mut row, 8, |_| Box::leak(Box::new(order_with_first(&[5, 2], 8))));
        assert_eq!(row, [2.0, 5.0, 0.0, 1.0, 3.0, 4.0, 6.0, 7.0]);
    }
}
