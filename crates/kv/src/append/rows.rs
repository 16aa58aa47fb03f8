//! f16 rows in and out of blocks. In: one token's K or V rows `[kv_heads][head_dim]`; out: the block holds it.
//! NOT here: allocation, checks.

use crate::cache::layout::F16Layout;
use half::f16;

/// Writes one token at `slot` of a block. Shapes: `k`, `v`: f16 `[kv_heads][head_dim]`.
pub(crate) fn write_row(layout: &F16Layout, block: &mut [u8], slot: usize, k: &[f16], v: &[f16]) {
    let d = layout.head_dim;
    for (head, (k, v)) in k.chunks_exact(d).zip(v.chunks_exact(d)).enumerate() {
        let (k_out, v_out) = layout.head_mut(block, head);
        for (channel, &x) in k.iter().enumerate() {
            k_out[channel * layout.tokens + slot] = x;
        }
        v_out[slot * d..][..d].copy_from_slice(v);
    }
}

/// Writes one sink token. Its K is not transposed: sinks are read one by one. Shapes as in [`write_row`].
pub(crate) fn write_sink(layout: &F16Layout, block: &mut [u8], slot: usize, k: &[f16], v: &[f16]) {
    let d = layout.head_dim;
    for (head, (k, v)) in k.chunks_exact(d).zip(v.chunks_exact(d)).enumerate() {
        let (k_out, v_out) = layout.head_mut(block, head);
        k_out[slot * d..][..d].copy_from_slice(k);
        v_out[slot * d..][..d].copy_from_slice(v);
    }
}
