//! The basis that a layer's keys and values are stored in. In: q, k, v rows after RoPE; out: the same rows in that basis, and
//! attention's rows back from it. Attention in exact arithmetic does not notice: products of keys and queries and sums of
//! values stay what they are. Quantization does: a rotation spreads outliers over all channels, an order of the key channels
//! puts the loud ones first, where a scheme keeps more bits.
//!
//! Formula: the rotation is a Hadamard matrix over the largest power of two that divides head_dim (80: blocks of 16), divided
//! by the root of its size: its own inverse. Keys and queries share theirs, values and attention's rows another.
//! Codecs that code a row by one scale (`Codec::wants_rotation`) want random signs before it: `y = H(s * x)`, back
//! `x = s * H(y)`, s one fixed +-1 per channel, the same in all heads, layers and models. Without them rows with a pattern that
//! the matrix knows would meet in one channel.
//! Smoothing (VecInfer, arXiv 2510.06175) divides each key channel of a kv head by a factor that calibration found, and
//! multiplies its queries by it, before the rotation (a plain one: codebooks are learned of what comes out, so signs would
//! change nothing).
//! The value rotation could also be folded into the value and output projections. With weights of 4 bits that would round
//! them anew; the butterfly costs about a thousandth of a layer's products (docs/decisions/0012-schemes-by-error.md).
//! NOT here: which layer has which basis (schemes.rs), RoPE (rope.rs).

use super::each_row;
use kvant_kv::LayerShape;
use std::sync::Arc;

/// Whether a tensor is rotated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Turn {
    /// It stays as it is.
    #[default]
    None,
    /// By the Hadamard matrix.
    Plain,
    /// By random signs and the Hadamard matrix.
    Signed,
}

/// How a layer's keys and values are turned before they are stored.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Basis {
    /// How keys and queries are rotated.
    pub keys: Turn,
    /// How values are rotated; what attention makes of them is rotated back.
    pub values: Turn,
    /// What key channels are divided by, and those of queries multiplied, before the rotation: `[kv_heads][head_dim]`.
    pub smooth: Option<Arc<[f32]>>,
    /// Per kv head, which channel of keys and queries comes first, second and so on: `[kv_heads][head_dim]`. None: as they are.
    pub key_order: Option<Arc<[Vec<u16>]>>,
}

impl Basis {
    /// Turns the rows of a step. Shapes: `q` f32 `[rows][q_heads][head_dim]`; `k`, `v` `[rows][kv_heads][head_dim]`.
    pub fn enter(&self, shape: &LayerShape, q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
        let d = shape.head_dim;
        let (q_len, k_len) = (shape.q_heads * d, shape.row_len());
        let ratio = shape.q_heads / shape.kv_heads;
        if let Some(smooth) = &self.smooth {
            each_row(q, q_len, |_, row| {
                for (head, row) in row.chunks_exact_mut(d).enumerate() {
                    row.iter_mut().zip(&smooth[head / ratio * d..]).for_each(|(x, factor)| *x *= factor);
                }
            });
            each_row(k, k_len, |_, row| row.iter_mut().zip(&smooth[..]).for_each(|(x, factor)| *x /= factor));
        }
        self.keys.turn(q, q_len, d);
        self.keys.turn(k, k_len, d);
        self.values.turn(v, k_len, d);
        if let Some(orders) = &self.key_order {
            each_row(q, q_len, |_, row| reorder(row, d, |head| &orders[head / ratio]));
            each_row(k, k_len, |_, row| reorder(row, d, |head| &orders[head]));
        }
    }

    /// Turns attention's rows back. Shape: f32 `[rows][q_heads][head_dim]`.
    pub fn leave(&self, shape: &LayerShape, out: &mut [f32]) {
        self.values.turn_back(out, shape.q_heads * shape.head_dim, shape.head_dim);
    }
}

impl Turn {
    /// Rotates rows of `width` numbers.
    fn turn(self, rows: &mut [f32], width: usize, head_dim: usize) {
        match self {
            Turn::None => {}
            Turn::Plain => each_row(rows, width, |_, row| rotate_heads(row, head_dim)),
            Turn::Signed => each_row(rows, width, |_, row| {
                change_signs(row, head_dim);
                rotate_heads(row, head_dim);
            }),
        }
    }

    /// Undoes [`Turn::turn`].
    fn turn_back(self, rows: &mut [f32], width: usize, head_dim: usize) {
        match self {
            Turn::None => {}
            Turn::Plain => each_row(rows, width, |_, row| rotate_heads(row, head_dim)),
            Turn::Signed => each_row(rows, width, |_, row| {
                rotate_heads(row, head_dim);
                change_signs(row, head_dim);
            }),
        }
    }
}

/// Most channels of a head.
const MOST_CHANNELS: usize = 256;
/// The random signs, those of smaller heads the first ones. Caches in files are of these: another seed is another format.
pub(crate) const SIGNS: [f32; MOST_CHANNELS] = {
    let mut signs = [1.0; MOST_CHANNELS];
    // xorshift64*
    let mut state: u64 = 0x5EED_0F51_6E50_F00D;
    let mut channel = 0;
    while channel < MOST_CHANNELS {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        if state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 63 == 1 {
            signs[channel] = -1.0;
        }
        channel += 1;
    }
    signs
};

/// Multiplies each head of some rows by the random signs.
fn change_signs(rows: &mut [f32], head_dim: usize) {
    for row in rows.chunks_exact_mut(head_dim) {
        row.iter_mut().zip(&SIGNS).for_each(|(x, sign)| *x *= sign);
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
    let mut old = [0.0; MOST_CHANNELS];
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
            let smooth: Vec<f32> = (0..2 * d).map(|i| 0.25 + (i % 7) as f32).collect();
            for basis in [
                Basis { keys: Turn::Plain, values: Turn::Plain, key_order: Some(orders.into()), smooth: None },
                Basis { keys: Turn::Signed, values: Turn::Signed, ..Basis::default() },
                Basis { keys: Turn::Plain, values: Turn::Signed, smooth: Some(smooth.into()), ..Basis::default() },
            ] {
                holds(&shape, &basis);
            }
        }
    }

    fn holds(shape: &LayerShape, basis: &Basis) {
        let d = shape.head_dim;
        let (mut q, mut k, mut v) = (rows(4 * d, 1.0), rows(2 * d, 2.0), rows(2 * d, 3.0));
        let dots = |q: &[f32], k: &[f32]| -> Vec<f32> {
            (0..4).map(|h| q[h * d..][..d].iter().zip(&k[h / 2 * d..][..d]).map(|(a, b)| a * b).sum()).collect()
        };
        let (want, keys, values) = (dots(&q, &k), k.clone(), v.clone());
        basis.enter(shape, &mut q, &mut k, &mut v);
        assert!(dots(&q, &k).iter().zip(&want).all(|(a, b)| (a - b).abs() < 2e-4), "{d} {basis:?}");
        for (turned, straight) in [(&k, &keys), (&v, &values)] {
            assert!(turned.iter().zip(straight).any(|(a, b)| (a - b).abs() > 0.1), "{d} {basis:?}: it is turned");
        }
        // Query heads 0 and 1 attend to one value, that of their kv head; 2 and 3 to the other's.
        let mut out = [&v[..d], &v[..d], &v[d..], &v[d..]].concat();
        basis.leave(shape, &mut out);
        for (h, out) in out.chunks_exact(d).enumerate() {
            assert!(out.iter().zip(&values[h / 2 * d..]).all(|(a, b)| (a - b).abs() < 1e-5), "{d} {basis:?}");
        }
    }

    /// A row that the plain matrix gathers in one channel is spread by the signs, about as many of each kind.
    #[test]
    fn signs_spread_what_the_plain_rotation_gathers() {
        for d in [64, 80, 96, 128, 256] {
            let minus = SIGNS[..d].iter().filter(|&&s| s < 0.0).count();
            assert!((d * 3 / 8..=d * 5 / 8).contains(&minus), "{d}: {minus}");
        }
        let largest = |turn: Turn| {
            let mut row = [1.0; 64];
            turn.turn(&mut row, 64, 64);
            row.iter().fold(0f32, |most, x| most.max(x.abs()))
        };
        assert!((largest(Turn::Plain) - 8.0).abs() < 1e-5);
        assert!(largest(Turn::Signed) < 4.0, "{}", largest(Turn::Signed));
    }

    #[test]
    fn an_order_has_every_channel_once() {
        assert_eq!(order_with_first(&[5, 2], 8), [2, 5, 0, 1, 3, 4, 6, 7]);
        let mut row: Vec<f32> = (0..8).map(|i| i as f32).collect();
        reorder(&mut row, 8, |_| Box::leak(Box::new(order_with_first(&[5, 2], 8))));
        assert_eq!(row, [2.0, 5.0, 0.0, 1.0, 3.0, 4.0, 6.0, 7.0]);
    }
}
