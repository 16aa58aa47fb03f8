//! `kvant bench`: which bench, or with `--test` every one at a tiny size. NOT here: the benches (bench_attend.rs, bench_decode.rs).

use super::{bench_attend, bench_decode};
use crate::args::{Bench, BenchArgs};
use crate::failure::Failure;
use anyhow::Result;

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.bench {
        Some(Bench::Attend(args)) => bench_attend::run(args),
        Some(Bench::Decode(args)) => bench_decode::run(args),
        None if args.test => test(),
        None => {
            Err(Failure::input("`kvant bench` needs to know what to measure", "give attend, decode or --test").into())
        }
    }
}

fn test() -> Result<()> {
    todo!()
}
