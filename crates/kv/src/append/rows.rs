//! f32 rows into the sink block. In: one token's K and V rows `[kv_heads][head_dim]`; out: the block holds them as f16.
//! NOT here: f16 blocks (cpu/), allocation, checks.

use crate::cache::layout::PlainLayout;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Writes one sink token. Its K is not transposed: sinks are read one by one. Shapes: `k`, `v`: f32
/// `[kv_heads][head_dim]`.
pub(crate) fn write_sink(layout: &PlainLayout, block: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
    let d = layout.head_dim;
    for (head, (k, v)) in k.chunks_exact(d).zip(v.chunks_exact(d)).enumerate() {
        let (k_out, v_out) = layout.head_mut::<f16>(block, head);
        k_out[slot * d..][..d].convert_from_f32_slice(k);
        v_out[slot * d..][..d].convert_from_f32_slice(v);
    }
}
