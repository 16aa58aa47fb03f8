//! kvant-kv: a low-bit KV cache and the attention that reads it packed.
//!
//! In: f32 K/V/Q rows of a model's layers; out: attention outputs, from a cache that stays packed at 1 to 8 bits.
//! NOT here: models, tokenizers, files, network, printing.

pub mod append;
pub mod attend;
pub mod cache;
pub mod codec;
pub mod cuda;
mod device;
mod element;
mod error;
#[cfg(test)]
mod golden;
mod quant;
pub mod scheme;
pub mod shape;

pub use attend::{AttendOptions, Attention};
pub use cache::{Arm, Cache, CacheBytes, LayerConfig, PageId, RowCodec, Rows, SeqId};
pub use codec::Codec;
pub use element::RowFormat;
pub use error::Error;
pub use quant::codebook::Codebook;
pub use scheme::{Fit, PackedScheme, Scheme, SchemeError};
pub use shape::LayerShape;
