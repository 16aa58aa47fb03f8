//! The contract of the library, from outside: what a program that links it may rely on. One room per promise.
//! NOT here: what only the inside can see (record bytes: src/cache/tests.rs), tolerances (src/attend/parity.rs), process
//! memory (../memory.rs, a process of its own).

mod budget;
mod bytes;
mod drafts;
mod errors;
mod exact;
mod numbers;
mod options;
mod position;
mod saving;
mod sharing;
mod traps;
mod windows;
