//! kvant-roofline: what this machine can do at most, what a kernel must move at least, and fair timing.
//!
//! In: shapes, schemes, closures to time; out: bytes, bandwidth ceilings, nanoseconds.
//! NOT here: any kernel, any printing; verdicts and reports come with the roofline command.

pub mod ceilings;
pub mod cost;
pub mod timer;

pub use ceilings::{CeilingError, Reader};
pub use cost::Cost;
pub use timer::{Contestant, Timing};
