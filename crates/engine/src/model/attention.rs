//! Attention of one layer: the place where the model meets the cache.
//! In: q, k, v rows of the step; out: attention rows. Per layer, in this order and nowhere else: append, attend, commit.
//! NOT here: projections (mod.rs), what append, attend and commit do (kvant-kv).

use crate::Error;
use kvant_kv::{AttendOptions, Attention, Cache, Rows};

/// Stores the step's `k` and `v` in `layer` of the cache and attends its `q` over everything each row sees.
///
/// Shapes: `q`, `out`: f32 `[sum of rows][q_heads][head_dim]`; `k`, `v`: f32 `[sum of rows][kv_heads][head_dim]`.
///
/// # Errors
/// Those of the cache, such as a NaN in K or V, which names layer, head and token.
#[allow(clippy::too_many_arguments)] // one step of one layer: what it reads, where it writes
pub fn attend_step(
    cache: &mut Cache,
    attention: &mut Attention,
    layer: usize,
    batch: &[Rows],
    score_scale: f32,
    (q, k, v): (&[f32], &[f32], &[f32]),
    out: &mut [f32],
) -> Result<(), Error> {
    let options = AttendOptions { sm_scale: score_scale, softcap: None, sink_logits: None, first_visible: &[] };
    cache.append(layer, batch, k, v)?;
    attention.attend(cache, layer, batch, q, out, &options)?;
    cache.commit(layer, batch)?;
    Ok(())
}
