//! kvant-roofline: what this machine can do at most, what a kernel must move at least, and fair timing.
//!
//! In: shapes, schemes, closures to time; out: bytes, ceilings, nanoseconds, verdicts, and a report of them.
//! Rooms: memory.rs and peaks/ measure, ceilings.rs gathers; cost.rs counts; timer.rs times; verdict.rs judges; survey/
//! runs operations of kvant-kv through all of it; report/ writes pages.
//! NOT here: any kernel, any printing.

pub mod ceilings;
pub mod cost;
pub mod cuda;
pub mod machine;
pub mod memory;
pub mod peaks;
pub mod report;
pub mod survey;
pub mod timer;
pub mod verdict;

pub use ceilings::{Bandwidth, Ceilings};
pub use cost::Cost;
pub use memory::{CeilingError, Reader};
pub use report::Report;
pub use survey::{Settings, SurveyError, survey};
pub use timer::{Contestant, Timing};
