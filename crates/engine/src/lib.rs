//! kvant-engine: decodes real models over a kvant-kv cache.
//!
//! In: a GGUF file or a folder of safetensors, and requests; out: tokens and text. The rooms, in the order of a token's way: [`tokenizer`],
//! [`request`], `sequence`, [`scheduler`] (pure), [`model`] (where `model/attention.rs` visibly appends, attends and
//! commits), [`sampler`]; [`Engine::step`] walks through them. Beside it [`eval`]: how accurate a cache is.
//! NOT here: cache formats and attention kernels (kvant-kv), flags and printing (the program), network.

pub mod chat;
pub mod codebooks;
pub mod cuda;
mod divergence;
mod engine;
mod error;
pub mod eval;
mod folder;
mod forced;
pub mod gguf;
mod limits;
mod loaded;
pub mod model;
mod prefixes;
pub mod presets;
mod prompt_cache;
pub mod request;
pub mod sampler;
pub mod scheduler;
pub mod schemes;
mod sequence;
pub mod source;
pub mod specials;
mod status;
mod swap;
mod threads;
pub mod tokenizer;
pub mod tune;

pub use chat::Message;
pub use codebooks::LayerBooks;
pub use divergence::Distribution;
pub use engine::{DecodeTime, Engine, EngineOptions, Generation, requests_on_card};
pub use error::Error;
pub use folder::{Folder, architecture_of};
pub use forced::{EveryRow, Feed, Forced, OnBlock, OnLogits, StoredRows, Tape};
pub use kvant_kv::Arm;
pub use limits::{Limits, STEP_TOKENS};
pub use loaded::LoadedModel;
pub use model::{Basis, Products, Turn, product_kernels};
pub use request::{Event, FinishReason, Outcome, Request, TokenLogprobs};
pub use sampler::Sampling;
pub use scheduler::Phase;
pub use schemes::{Schemes, load_schemes};
pub use source::Source;
pub use status::{RequestStatus, Status, Totals};
pub use threads::Pool;
