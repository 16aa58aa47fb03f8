//! Where bytes live. In: block sizes; out: blocks of memory and the count of bytes in use.
//! NOT here: what the bytes mean (cache/layout.rs) or any operation on them.

pub(crate) mod cpu;
pub mod cuda;
