//! The oracle: attention in f64, as slowly and plainly as it reads. In: numbers; out: numbers.
//! Formula: `softmax(sm_scale * q.k_hat) . v_hat`; softcap `c*tanh(s/c)`; a sink logit adds `exp(logit)` to the denominator.
//! NOT here: any code that kernels share.

use super::AttendOptions;
use crate::append::record::read_record;
use crate::cache::layout::BLOCK_LEN;
use crate::cache::store::SeqView;
use crate::element::Element;
use crate::{Cache, Error, RowFormat, Rows};
use half::{bf16, f16};

/// Relative L2 distance of `got` from `want`. A NaN anywhere gives NaN, which fails `<=`.
pub fn relative_error<T: Copy + Into<f64>>(got: &[f32], want: &[T]) -> f64 {
    assert_eq!(got.len(), want.len());
    let (mut error, mut norm) = (0.0, 0.0);
    for (&got, &want) in got.iter().zip(want) {
        let want: f64 = want.into();
        error += (f64::from(got) - want).powi(2);
        norm += want.powi(2);
    }
    (error / norm).sqrt()
}

/// Attention of one query vector over keys and values `[n][head_dim]`, all of them visible.
pub fn attend_f64(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    sm_scale: f64,
    softcap: Option<f64>,
    sink_logit: Option<f64>,
) -> Vec<f64> {
    let d = q.len();
    let mut scores: Vec<f64> =
        k.chunks_exact(d).map(|k| sm_scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()).collect();
    if let Some(cap) = softcap {
        scores.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
    }
    let top = scores.iter().copied().chain(sink_logit).fold(f64::NEG_INFINITY, f64::max);
    let mut sum = sink_logit.map_or(0.0, |s| (s - top).exp());
    let mut out = vec![0.0; d];
    for (s, v) in scores.iter().zip(v.chunks_exact(d)) {
        let w = (s - top).exp();
        sum += w;
        out.iter_mut().zip(v).for_each(|(out, v)| *out += w * v);
    }
    out.iter_mut().for_each(|x| *x /= sum);
    out
}

/// [`super::Attention::attend`] in f64 over what the cache really holds: packed keys as their codes say, the rest as
/// the f16 or bf16 that is there.
///
/// Shapes: `q`: f32 `[sum of rows][q_heads][head_dim]`; out: f64, the same.
///
/// # Errors
/// [`Error::NoSuchLayer`], [`Error::NoSuchSequence`].
pub fn attend_cache_f64(
    cache: &Cache,
    layer: usize,
    batch: &[Rows],
    q: &[f32],
    options: &AttendOptions<'_>,
) -> Result<Vec<f64>, Error> {
    let shape = cache.layer_config(layer)?.shape;
    let (d, ratio) = (shape.head_dim, shape.gqa_ratio());
    let mut out = Vec::with_capacity(q.len());
    let mut rows_of_q = q.chunks_exact(shape.q_heads * d);
    for (i, entry) in batch.iter().enumerate() {
        let view = cache.view(layer, entry.seq)?;
        let hidden = options.first_visible.get(i).copied().unwrap_or(0);
        for position in view.len - entry.rows..view.len {
            let first_visible = match view.spec.visible {
                Some(n) if position + 1 > n => hidden.max(position + 1 - n),
                _ => hidden,
            };
            let q = rows_of_q.next().expect("q has a row for every row of the batch");
            let mut cached: Option<(usize, Vec<f64>, Vec<f64>)> = None;
            for (h, q) in q.chunks_exact(d).enumerate() {
                let head = h / ratio;
                if cached.as_ref().is_none_or(|c| c.0 != head) {
                    let (k, v) = visible(&view, head, position, first_visible);
                    cached = Some((head, k, v));
                }
                let (_, k, v) = cached.as_ref().expect("just made");
                let q: Vec<f64> = q.iter().map(|&x| x as f64).collect();
                let sink = options.sink_logits.map(|s| s[h] as f64);
                out.extend(attend_f64(&q, k, v, options.sm_scale as f64, options.softcap.map(f64::from), sink));
            }
        }
    }
    Ok(out)
}

/// K and V `[n][D]` that a query at `position` sees.
fn visible(view: &SeqView<'_>, head: usize, position: usize, first_visible: usize) -> (Vec<f64>, Vec<f64>) {
    let (d, edge) = (view.spec.shape.head_dim, view.spec.scheme.edge(position));
    let (mut k, mut v) = (Vec::new(), Vec::new());
    let mut group: Option<(usize, Vec<f32>, Vec<f32>)> = None;
    for j in first_visible..=position {
        if j < edge && j < view.spec.sinks.tokens {
            let (sk, sv) = view.sinks(head).expect("a scheme with sinks has a sink block");
            k.extend(sk[j * d..][..d].iter().map(|x| x.to_f64()));
            v.extend(sv[j * d..][..d].iter().map(|x| x.to_f64()));
        } else if j < edge {
            let layout = view.spec.record.as_ref().expect("packed tokens have records");
            let g = layout.group_len;
            if group.as_ref().is_none_or(|x| x.0 != j / g) {
                let (gk, gv) = read_record(layout, head, view.record(head, j / g));
                group = Some((j / g, gk, gv));
            }
            let (_, gk, gv) = group.as_ref().expect("just read");
            k.extend((0..d).map(|c| gk[c * g + j % g] as f64));
            v.extend(gv[j % g * d..][..d].iter().map(|&x| x as f64));
        } else {
            match view.spec.plain.format {
                RowFormat::F16 => plain::<f16>(view, head, j, &mut k, &mut v),
                RowFormat::Bf16 => plain::<bf16>(view, head, j, &mut k, &mut v),
            }
        }
    }
    (k, v)
}

/// Adds the K and V of a position that is stored plain.
fn plain<E: Element>(view: &SeqView, head: usize, position: usize, k: &mut Vec<f64>, v: &mut Vec<f64>) {
    let d = view.spec.shape.head_dim;
    let (block_k, block_v) = view.block::<E>(head, position / BLOCK_LEN * BLOCK_LEN);
    let slot = position % BLOCK_LEN;
    k.extend((0..d).map(|c| block_k[c * BLOCK_LEN + slot].to_f64()));
    v.extend(block_v[slot * d..][..d].iter().map(|x| x.to_f64()));
}

#[cfg(test)]
mod tests {
    use super::relative_error;

    #[test]
    fn errors_are_relative_and_nan_stays() {
        assert!((relative_error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-9);
        assert!(relative_error(&[f32::NAN], &[1.0]).is_nan());
    }
}
