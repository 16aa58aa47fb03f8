//! `kvant bench`: which bench, or with `--test` every one at a tiny size. NOT here: the benches
//! (bench_attend.rs, bench_decode.rs, bench_experiments/).

use super::bench_experiments::{layers, passes, requests, sharing, splits, stacking};
use super::{bench_attend, bench_decode, roofline};
use crate::args::{Bench, BenchArgs, Cli, Command, Machine};
use crate::failure::Failure;
use crate::output;
use anyhow::Result;
use clap::Parser;

/// Every bench with the smallest arguments that still take all its paths: does it run? Figures of these sizes say nothing.
const TINY: [&str; 10] = [
    // Every bit width, sinks, a window and pages, over a ragged tail.
    "bench attend --hot --rounds 1 --shape b=2,q=6,kv=2,d=64,s=333 --kv f16,k8v8g64,k4v4g64w64s4p128,k3v3g32,k2v4g128",
    // Cold, and a head_dim whose last value group is short.
    "bench attend --rounds 1 --shape b=1,q=2,kv=1,d=80,s=16384 --kv f16,k4v4g64",
    // Every arm, two flushes.
    "bench decode --batch 1,2 --prompt-len 64 --steps 64 --kv k4v4g32w32s4",
    "bench layers --quick",
    "bench stacking --quick",
    "bench requests --quick",
    "bench sharing --quick",
    "bench passes --quick",
    "bench splits --quick",
    // Every row of the roofline.
    "roofline --quick --shape q=6,kv=2,d=80 --kv f16,k4v4g64",
];

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.bench {
        Some(Bench::Attend(args)) => bench_attend::run(args),
        Some(Bench::Decode(args)) => bench_decode::run(args),
        Some(Bench::Layers(args)) => layers::run(args),
        Some(Bench::Stacking(args)) => stacking::run(args),
        Some(Bench::Requests(args)) => requests::run(args),
        Some(Bench::Sharing(args)) => sharing::run(args),
        Some(Bench::Passes(args)) => passes::run(args),
        Some(Bench::Splits(args)) => splits::run(args),
        None if args.test => test(&args.machine),
        None => Err(Failure::input(
            "`kvant bench` needs to know what to measure",
            "give attend, decode, layers, stacking, requests, sharing, passes, splits or --test",
        )
        .into()),
    }
}

fn test(machine: &Machine) -> Result<()> {
    let threads = machine.threads()?.to_string();
    for line in TINY {
        output::text("the name of a bench", &format!("== kvant {line}\n"))?;
        let on = ["--device", &machine.device, "--threads", &threads];
        let words: Vec<_> = ["kvant"].into_iter().chain(line.split(' ')).chain(on).map(str::to_string).collect();
        match Cli::try_parse_from(&words).map_err(|e| Failure::from_clap(&e, &words))?.command {
            Command::Bench(args) => run(&args)?,
            Command::Roofline(args) => roofline::run(&args)?,
            _ => return Err(Failure::input(format!("`{line}` is no bench"), "this is a fault of the program").into()),
        }
        output::text("a line break", "\n")?;
    }
    let all = format!("all {} benches ran; figures of these sizes say nothing\n", TINY.len());
    output::text("that all benches ran", &all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiny_benches_parse() {
        for line in TINY {
            let words = ["kvant"].into_iter().chain(line.split(' '));
            let command = Cli::try_parse_from(words).expect(line).command;
            let bench = matches!(&command, Command::Bench(b) if b.bench.is_some());
            assert!(bench || matches!(command, Command::Roofline(_)), "{line}");
        }
    }
}
