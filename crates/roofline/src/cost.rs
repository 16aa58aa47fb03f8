//! What a decode attention must move. In: a shape and a scheme; out: bytes. NOT here: anything a variant of a kernel
//! chooses (padding, copies, scratch): a kernel that moves more than this is measured against this all the same.

use kvant_kv::{LayerShape, Scheme};

/// Bytes of an f16.
const F16_BYTES: usize = 2;
/// Bytes of a group's scale and zero, f16 each.
const PARAMS_BYTES: usize = 2 * F16_BYTES;

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
    /// Formula: with `e = edge(kv_len - 1)`, per kv head `e / group_len` groups of
    /// `4*d + group_len*d*k_bits/8 + group_len*(4*ceil(d/gv) + d*v_bits/8)` bytes and
    /// `kv_len - e + min(sinks, e)` tokens of `4*d` bytes.
    pub fn of(shape: LayerShape, scheme: Scheme, kv_len: usize) -> Self {
        let d = shape.head_dim;
        let edge = scheme.packed_len(kv_len);
        let token_bytes = 2 * d * F16_BYTES;
        let (packed, sinks) = match scheme {
            Scheme::F16 => (0, 0),
            Scheme::Packed(p) => {
                let g = p.group_len();
                let k = d * PARAMS_BYTES + g * d * p.k_bits() as usize / 8;
                let v = g * (d.div_ceil(p.v_group_len(d)) * PARAMS_BYTES + d * p.v_bits() as usize / 8);
                (edge / g * (k + v), p.sinks().min(edge))
            }
        };
        Self {
            packed_bytes: shape.kv_heads * packed,
            window_bytes: shape.kv_heads * (kv_len - edge + sinks) * token_bytes,
        }
    }

    /// Both parts together.
    pub fn bytes(&self) -> usize {
        self.packed_bytes + self.window_bytes
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

    #[test]
    fn what_fits_is_what_the_cache_allocates() {
        for (q, kv, d) in [(9, 3, 64), (4, 2, 80), (8, 2, 128)] {
            let shape = LayerShape::new(q, kv, d).unwrap();
            for text in
                ["f16", "k8v8g64w128s4p512", "k4v4g64w128s4p512", "k3v2g32", "k2v2g32w128s4p512", "k4v4g128w32s16"]
            {
                let scheme: Scheme = text.parse().unwrap();
                let arm = if scheme == Scheme::F16 { Arm::F16 } else { Arm::Fused };
                for len in [1, 31, 33, 200, 640, 1025] {
                    let mut cache = Cache::new(&[LayerConfig { shape, scheme }], arm).unwrap();
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
