//! What an operation must move and compute. In: a shape and a scheme; out: bytes and operations. NOT here: anything a
//! variant of a kernel chooses (padding, copies, scratch, two multipliers in place of one): a kernel that does more than
//! this is measured against this all the same.

use kvant_kv::{Codec, Fit, LayerShape, Scheme};

/// Bytes of an f16.
const F16_BYTES: usize = 2;

/// Bytes of an f32: queries, outputs, and keys and values before they are stored.
const F32_BYTES: usize = 4;
/// Operations that the quantizer's formula takes per element: two comparisons for minimum and maximum, a subtraction, a
/// division, a rounding, two comparisons of the clamp.
const QUANTIZE_OPS: usize = 7;
/// Operations that one candidate of a fit by error takes per element: its code (subtract, multiply, clamp, round: 5), the error and its
/// square (3), the sum.
const CANDIDATE_OPS: usize = 9;
/// Candidates of `mse`: the range, and as many shrunk ones as `shrinks` in the library's quant/fit.rs has.
const MSE_CANDIDATES: usize = 10;
/// Times that `ls` refits: four sums and two products more per element, then a candidate.
const LS_REFITS: usize = 3;
/// Steps that sign bits of more than one bit try: quant/grid.rs.
const SIGN_STEPS: usize = 8;
/// What a refit's sums take.
const REFIT_OPS: usize = CANDIDATE_OPS + 6;
/// Operations that storing an element as f16 takes: the rounding.
const ROUND_OPS: usize = 1;
/// Operations of attention per query head, key and channel: a multiply-add for the score, one for the output.
const ATTEND_OPS: usize = 4;

/// Operations per packed element: keys and values averaged, as each has half of the elements.
fn pack_ops(scheme: Scheme) -> usize {
    let Some(p) = scheme.packed() else { return 0 };
    let search = |bits: u32| match p.fit() {
        // 8 bits take the range.
        Fit::MinMax => 0,
        _ if bits == 8 => 0,
        Fit::Mse => MSE_CANDIDATES * CANDIDATE_OPS,
        Fit::Ls => MSE_CANDIDATES * CANDIDATE_OPS + LS_REFITS * (REFIT_OPS + CANDIDATE_OPS),
    };
    let of = |codec: Codec| match codec {
        Codec::Affine { bits, .. } => QUANTIZE_OPS + search(bits),
        // A square and its sum, a product, and a comparison and sum per border.
        Codec::Turbo { bits } => 3 + 2 * ((1 << bits) - 1),
        Codec::Residual { first, second } => 3 + 2 * ((1 << (first + second)) - 1),
        // The sign and two sums; with more bits per step that is tried a code (multiply, add, floor, clamp: 5), two products and
        // sums.
        Codec::Sign { bits: 1 } => 5,
        Codec::Sign { .. } => 2 + SIGN_STEPS * 9,
        // A multiply-add per centroid and channel, and per sub-vector and centroid a comparison with the best.
        Codec::Vector { centroids, sub_len } => 2 * centroids + centroids / sub_len,
    };
    (of(p.k()) + of(p.v())) / 2
}

/// Compulsory bytes of one sequence of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Codes, scales and zeros of whole packed groups.
    pub packed_bytes: usize,
    /// Keys and values that the scheme keeps in f16: sinks, window, unpacked tail; for f16 everything.
    pub window_bytes: usize,
}

impl Cost {
    /// What the newest of `kv_len` tokens must read of keys and values: each once.
    ///
    /// Formula: with `e = edge(kv_len - 1)`, per kv head `e / group_len` groups of the bytes that the scheme's codecs say
    /// (affine: `4*d + group_len*(d+loud)*k_bits/8 + group_len*(4*ceil(d/gv) + d*v_bits/8)`) and
    /// `kv_len - e + min(sinks, e)` tokens of `4*d` bytes.
    pub fn of(shape: LayerShape, scheme: Scheme, kv_len: usize) -> Self {
        Self::of_rows(shape, scheme, kv_len, 1)
    }

    /// What the newest `rows` of `kv_len` tokens must read of keys and values: each stored form once. Tokens that the
    /// newest row sees packed and the oldest still in f16 are read in both forms.
    pub fn of_rows(shape: LayerShape, scheme: Scheme, kv_len: usize, rows: usize) -> Self {
        let d = shape.head_dim;
        let edge = scheme.packed_len(kv_len);
        let first_edge = scheme.packed_len((kv_len + 1).saturating_sub(rows.max(1)).min(kv_len));
        let token_bytes = 2 * d * F16_BYTES;
        let (packed, sinks) = match scheme {
            Scheme::F16 | Scheme::Bf16 => (0, 0),
            Scheme::Packed(p) => {
                let (k, v) = p.record_bytes(d);
                (edge / p.group_len() * (k + v), p.sinks().min(edge))
            }
        };
        Self {
            packed_bytes: shape.kv_heads * packed,
            window_bytes: shape.kv_heads * (kv_len - first_edge + sinks) * token_bytes,
        }
    }

    /// Both parts together.
    pub fn bytes(&self) -> usize {
        self.packed_bytes + self.window_bytes
    }
}

/// What a call must move and compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Bytes read and written: each input once, each output once.
    pub bytes: usize,
    /// Operations: a multiplication or an addition is one.
    pub ops: usize,
}

impl Work {
    /// Attention of the newest `rows` of `kv_len` tokens of each of `batch` sequences.
    ///
    /// Formula: bytes are [`Cost::of_rows`] plus queries and outputs in f32; operations are
    /// `4 * head_dim * q_heads` per row and visible key (softmax is left out).
    pub fn attend(shape: LayerShape, scheme: Scheme, batch: usize, kv_len: usize, rows: usize) -> Self {
        let q = rows * shape.q_heads * shape.head_dim;
        let first = kv_len.saturating_sub(rows);
        // Row i of the call, at position first + i, sees first + i + 1 keys.
        let visible = rows * first + rows * (rows + 1) / 2;
        Self {
            bytes: batch * (Cost::of_rows(shape, scheme, kv_len, rows).bytes() + 2 * q * F32_BYTES),
            ops: batch * visible * shape.q_heads * shape.head_dim * ATTEND_OPS,
        }
    }

    /// Appending `rows` tokens to each of `batch` sequences that hold `held` tokens.
    ///
    /// Formula: read are the rows in f32 and the f16 rows of earlier tokens that become packed; written are the new
    /// groups and the new tokens that stay f16, sinks included. Operations: 7 per element packed (minimum, maximum,
    /// subtract, divide, round, clamp), and what a fit by error searches; 1 per element stored as f16.
    pub fn append(shape: LayerShape, scheme: Scheme, batch: usize, held: usize, rows: usize) -> Self {
        let (elements, f16_token) = (2 * shape.row_len(), 2 * shape.row_len() * F16_BYTES);
        let len = held + rows;
        let (edge_before, edge) = (scheme.packed_len(held), scheme.packed_len(len));
        let packed = |len| Cost::of(shape, scheme, len).packed_bytes;
        let sinks = scheme.packed().map_or(0, |p| p.sinks());
        let new_sinks = sinks.min(len) - sinks.min(held);
        // A sink before the edge is one more copy of a token; one behind it is counted with the tokens that stay f16.
        let new_f16 = len - edge.max(held) + new_sinks.min(edge.saturating_sub(held.min(edge)));
        let repacked = edge.min(held).saturating_sub(edge_before);
        let written = packed(len) - packed(held) + new_f16 * f16_token;
        Self {
            bytes: batch * (rows * elements * F32_BYTES + repacked * f16_token + written),
            ops: batch * elements * ((edge - edge_before) * pack_ops(scheme) + new_f16 * ROUND_OPS),
        }
    }

    /// Operations per byte.
    pub fn intensity(&self) -> f64 {
        self.ops as f64 / self.bytes.max(1) as f64
    }
}

/// Tokens by which the cache's f16 rows grow.
const F16_BLOCK_LEN: usize = 32;

/// What the cache allocates for one sequence of one layer: the packed groups, f16 rows in whole blocks behind them, and
/// the sinks, whose block is there from the first token on.
pub fn resident_bytes(shape: LayerShape, scheme: Scheme, kv_len: usize) -> usize {
    let token_bytes = 4 * shape.row_len();
    let sinks = scheme.packed().map_or(0, |p| p.sinks());
    let tail = (kv_len - scheme.packed_len(kv_len)).next_multiple_of(F16_BLOCK_LEN);
    Cost::of(shape, scheme, kv_len).packed_bytes + (tail + sinks) * token_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_kv::{Arm, Cache, LayerConfig, Rows};

    fn cost(scheme: &str, len: usize) -> Cost {
        Cost::of(LayerShape::new(32, 8, 128).unwrap(), scheme.parse().unwrap(), len)
    }

    #[test]
    fn f16_is_four_bytes_per_channel_and_token() {
        assert_eq!(cost("f16", 100), Cost { packed_bytes: 0, window_bytes: 8 * 100 * 128 * 4 });
        assert_eq!(cost("f16", 0).bytes(), 0);
    }

    #[test]
    fn packed_groups_match_bits_per_element() {
        for scheme in ["k4v4g64", "k2v2g32", "k3v3g128", "k8v2g64", "k8v8g32"] {
            let parsed: Scheme = scheme.parse().unwrap();
            let got = cost(scheme, 1024);
            assert_eq!(got.window_bytes, 0, "{scheme}");
            let bits = got.packed_bytes as f64 * 8.0 / (8.0 * 1024.0 * 128.0 * 2.0);
            assert_eq!(bits, parsed.bits_per_element(128), "{scheme}");
        }
        // By hand, k4v4g64, head_dim 128: one group of one head has K params 512, K codes 4096, V params 512, V codes 4096.
        assert_eq!(cost("k4v4g64", 64).packed_bytes, 8 * (512 + 4096 + 512 + 4096));
    }

    #[test]
    fn window_sinks_and_tail_stay_f16() {
        // 200 tokens, window 128: position 199 packs floor((200-128)/64)*64 = 64 tokens, 4 of them kept aside as sinks.
        let got = cost("k4v4g64w128s4", 200);
        assert_eq!(got.packed_bytes, 8 * 9216);
        assert_eq!(got.window_bytes, 8 * (200 - 64 + 4) * 512);
        // Nothing is packed yet: the sinks are not counted twice.
        assert_eq!(cost("k4v4g64w128s4", 100).bytes(), cost("f16", 100).bytes());
    }

    fn shape() -> LayerShape {
        LayerShape::new(32, 8, 128).unwrap()
    }

    #[test]
    fn rows_of_different_edges_read_both_forms() {
        let scheme = "k4v4g64".parse().unwrap();
        let (one, all) = (Cost::of(shape(), scheme, 256), Cost::of_rows(shape(), scheme, 256, 256));
        assert_eq!(all.packed_bytes, one.packed_bytes);
        // The first row sees nothing packed, so every token was read in f16 by some row.
        assert_eq!((one.window_bytes, all.window_bytes), (0, 8 * 256 * 512));
        assert_eq!(Cost::of_rows(shape(), Scheme::F16, 256, 256), Cost::of(shape(), Scheme::F16, 256));
    }

    #[test]
    fn attention_work_by_hand() {
        // f16, 100 tokens, one row: 100 tokens * 8 heads * 512 bytes, q and out of 32 * 128 f32.
        let one = Work::attend(shape(), Scheme::F16, 1, 100, 1);
        assert_eq!(one, Work { bytes: 100 * 8 * 512 + 2 * 4096 * 4, ops: 100 * 4096 * 4 });
        // Three rows of a prompt see 1, 2 and 3 keys.
        assert_eq!(Work::attend(shape(), Scheme::F16, 1, 3, 3).ops, 6 * 4096 * 4);
        // The newest 2 of 10 tokens see 9 and 10; two sequences cost twice one.
        assert_eq!(Work::attend(shape(), Scheme::F16, 2, 10, 2).ops, 2 * 19 * 4096 * 4);
        // Bytes alone set the intensity of long decode attention: 4 query heads * 4 operations over 4 bytes.
        assert!((Work::attend(shape(), Scheme::F16, 1, 1 << 20, 1).intensity() - 4.0).abs() < 1e-3);
    }

    #[test]
    fn append_work_by_hand() {
        let (token_f32, token_f16, elements) = (2 * 1024 * 4, 2 * 1024 * 2, 2 * 1024);
        let f16 = Work::append(shape(), Scheme::F16, 1, 50, 10);
        assert_eq!(f16, Work { bytes: 10 * (token_f32 + token_f16), ops: 10 * elements });
        let scheme: Scheme = "k4v4g64".parse().unwrap();
        // A whole group at once: 8 heads of 9216 bytes, nothing stays f16.
        let group = Work::append(shape(), scheme, 1, 0, 64);
        assert_eq!(group, Work { bytes: 64 * token_f32 + 8 * 9216, ops: 64 * elements * 7 });
        // The token that fills a group: 63 earlier rows are read back in f16.
        let last = Work::append(shape(), scheme, 1, 63, 1);
        assert_eq!(last, Work { bytes: token_f32 + 63 * token_f16 + 8 * 9216, ops: 64 * elements * 7 });
        // Sinks are one more f16 copy of the tokens that are packed all the same.
        let sinks = Work::append(shape(), "k4v4g64s4".parse().unwrap(), 2, 0, 64);
        assert_eq!(sinks.bytes, 2 * (group.bytes + 4 * token_f16));
        // A search by error moves no byte more: 10 candidates of 9 operations; `ls` refits three times.
        let of = |text: &str| Work::append(shape(), text.parse().unwrap(), 1, 0, 64);
        assert_eq!(of("k4v4g64.mse"), Work { ops: 64 * elements * (7 + 90), ..group });
        assert_eq!(of("k4v4g64.ls"), Work { ops: 64 * elements * (7 + 90 + 72), ..group });
        assert_eq!(of("k8v8g64.ls").ops, of("k8v8g64").ops);
        // Nothing is due: the token is stored as f16, whatever the scheme.
        assert_eq!(Work::append(shape(), scheme, 1, 64, 1), Work::append(shape(), Scheme::F16, 1, 64, 1));
    }

    #[test]
    fn what_fits_is_what_the_cache_allocates() {
        for (q, kv, d) in [(9, 3, 64), (4, 2, 80), (8, 2, 128)] {
            let shape = LayerShape::new(q, kv, d).unwrap();
            for text in
                ["f16", "k8v8g64w128s4p512", "k2l4v3g64w128s4.mse", "k3v2g32", "k2v2g32w128s4p512", "k4v4g128w32s16"]
            {
                let scheme: Scheme = text.parse().unwrap();
                for len in [1, 31, 33, 200, 640, 1025] {
                    let mut cache =
                        Cache::new(&[LayerConfig { shape, scheme, visible: None }], Arm::of(scheme)).unwrap();
                    let rows = [Rows { seq: cache.add_sequence(), rows: len }];
                    let zeros = vec![0.0; len * shape.row_len()];
                    cache.append(0, &rows, &zeros, &zeros).unwrap();
                    cache.commit(0, &rows).unwrap();
                    let held = cache.bytes();
                    let expected = held.packed_bytes + held.window_bytes;
                    assert_eq!(resident_bytes(shape, scheme, len), expected, "{text} {len} tokens, head_dim {d}");
                }
            }
        }
    }
}
