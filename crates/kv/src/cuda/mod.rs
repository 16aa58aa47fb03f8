//! The GPU, joined: the cache on a card, which appends and attends by the kernels of append/cuda and attend/cuda. In: layers, f16 rows on
//! the device; out: launches. This is what `kvant_kv::cuda` offers, with the card itself (device/cuda).
//! Rooms: cache.rs (slots, pages, bytes), kind.rs (memory and kernels of layers of one shape and scheme), steps.rs (decode steps and
//! prompts), programs.rs (what tests compile for all architectures).
//! NOT here: kernels and their launches, the order of bytes (cache/cuda).

mod cache;
pub(crate) mod kind;
mod programs;
mod steps;

pub use crate::attend::cuda::OutFormat;
pub use crate::device::cuda::*;
pub use cache::{GpuCache, GpuOptions, PAGE_LEN};
pub use programs::{all_programs, attention_programs, programs, reading};
pub use steps::Fault;
