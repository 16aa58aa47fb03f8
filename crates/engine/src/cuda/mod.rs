//! Whole decode steps on a CUDA card. In: a model (or a shape with random weights) and a cache on the card; out: next tokens.
//! The rooms, in the order of a token's way: shapes.rs or a model file, weights.rs, buffers.rs, step.rs, which calls kernels.rs,
//! products.rs (few.cu, library.rs) and a [`StepCache`].
//! NOT here: packed caches and attention (kvant-kv), scheduling, sampling, text.
//!
//! Weights and what enters products are bf16, sums and the residual stream f32, queries, keys and values f16.

mod buckets;
mod buffers;
mod cache;
mod kernels;
mod library;
#[cfg(test)]
mod on_card;
mod packed;
mod plain;
mod products;
mod shapes;
mod step;
mod weights;

pub use buckets::{BUCKETS, CHUNK, bucket};
pub use cache::StepCache;
pub use kernels::programs;
pub use plain::PlainCache;
pub use products::Choice;
pub use shapes::{PRESETS, Shape};
pub use step::{Decoder, DecoderOptions, RowOutcome};
pub use weights::Weights;

use crate::Error;
use crate::model::{Activation, Basis, Config};

/// Whether the card computes models like this.
pub(crate) fn check_config(config: &Config) -> Result<(), Error> {
    let built = config.architecture;
    let other = built.has_post_norms()
        || built.activation() != Activation::Silu
        || config.windows.is_some()
        || config.embedding_scale != 1.0;
    if other {
        return Err(Error::CpuOnly { what: format!("architecture `{}`", built.name()) });
    }
    Ok(())
}

/// Whether the card turns keys and values like this.
fn check_bases(bases: &[Basis]) -> Result<(), Error> {
    for (layer, basis) in bases.iter().enumerate() {
        let what = match basis {
            Basis { smooth: Some(_), .. } => "smoothed key channels",
            Basis { key_order: Some(_), .. } => "an order of key channels (loud ones)",
            _ => continue,
        };
        return Err(Error::CpuOnly { what: format!("a scheme with {what} (layer {layer})") });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Turn;

    #[test]
    fn bases_that_only_the_cpu_has_are_refused() {
        let turned = Basis { keys: Turn::Plain, values: Turn::Signed, ..Basis::default() };
        assert!(check_bases(&[turned.clone(), Basis::default()]).is_ok());
        let ordered = Basis { key_order: Some(vec![vec![0]].into()), ..Basis::default() };
        let why = check_bases(&[turned, ordered]).unwrap_err().to_string();
        assert!(why.contains("CPU only") && why.contains("layer 1"), "{why}");
    }
}
