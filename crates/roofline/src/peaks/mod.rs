//! Peaks of arithmetic: f32 multiply-add, 8-bit dot products, 8-bit matrix tiles, f32 matrix product. In: threads; out: operations per second
//! that this machine reached just now, and which code reached them. One multiplication and one addition are two operations.
//! One file per instruction set; the two tables below are all a new one has to join.
//! NOT here: memory (memory.rs), and what kernels reach of this (verdict.rs).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod matmul;
mod portable;

use crate::memory::{self, CeilingError};
use crate::timer::{self, Contestant};
use serde::Serialize;
use std::convert::Infallible;
use std::hint::black_box;
use std::time::{Duration, Instant};

pub(crate) use matmul::matmul;

/// One way to do many independent multiply-adds in registers.
struct Variant {
    name: &'static str,
    available: fn() -> bool,
    /// Operations of one iteration.
    ops: u64,
    /// Runs this many iterations and returns something that depends on all of them. Panics when not available.
    run: fn(u64) -> f32,
}

/// Name of the variants that every machine has.
const PORTABLE: &str = "portable";

/// f32 multiply-adds.
const FMA: &[Variant] = &[
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx512f",
        available: || avx512::Avx512::new().is_some(),
        ops: avx512::FMA_OPS,
        run: |n| avx512::Avx512::new().expect("checked by available").fma(n),
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx2-fma",
        available: || avx2::Avx2Fma::new().is_some(),
        ops: avx2::FMA_OPS,
        run: |n| avx2::Avx2Fma::new().expect("checked by available").fma(n),
    },
    Variant { name: PORTABLE, available: || true, ops: portable::OPS, run: portable::mul_add },
];

/// Dot products of 8-bit integers, summed in 32 bits.
const INT8_DOT: &[Variant] = &[
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx512-vnni",
        available: || avx512::Avx512Vnni::new().is_some(),
        ops: avx512::DOT_OPS,
        run: |n| avx512::Avx512Vnni::new().expect("checked by available").dot(n),
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx-vnni",
        available: || avx2::AvxVnni::new().is_some(),
        ops: avx2::DOT_OPS,
        run: |n| avx2::AvxVnni::new().expect("checked by available").dot(n),
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx2-maddubs",
        available: || avx2::Avx2Fma::new().is_some(),
        ops: avx2::DOT_OPS,
        run: |n| avx2::Avx2Fma::new().expect("checked by available").dot(n),
    },
    Variant { name: PORTABLE, available: || true, ops: portable::OPS, run: portable::int8_dot },
];

/// Products of 8-bit matrices held in tiles, where a processor has them.
const INT8_TILES: &[Variant] = &[
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "amx-int8",
        available: || amx::Amx::new().is_some(),
        ops: amx::TILE_OPS,
        run: |n| amx::Amx::new().expect("checked by available").multiply(n),
    },
];

/// Best rate of some arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Peak {
    /// 1e9 operations per second, all threads together.
    pub gops: f64,
    /// The code that reached it.
    pub by: String,
    /// True where no instruction-set file fits this processor: then this is a lower bound, not the machine's peak.
    pub lower_bound: bool,
}

/// Time of one timed run: long beside the start of threads, short beside the drift of clocks.
const RUN: Duration = Duration::from_millis(2);

/// Peak of f32 multiply-adds over `rounds` rounds.
///
/// # Errors
/// [`CeilingError`] when the threads do not start.
pub fn fma(threads: usize, rounds: usize) -> Result<Peak, CeilingError> {
    Ok(best(FMA, threads, rounds)?.expect("the portable variant runs everywhere"))
}

/// Peak of 8-bit dot products over `rounds` rounds.
///
/// # Errors
/// As [`fma`].
pub fn int8_dot(threads: usize, rounds: usize) -> Result<Peak, CeilingError> {
    Ok(best(INT8_DOT, threads, rounds)?.expect("the portable variant runs everywhere"))
}

/// Peak of products of 8-bit matrices in tiles over `rounds` rounds; None where there are no tiles.
///
/// # Errors
/// As [`fma`].
pub fn int8_tiles(threads: usize, rounds: usize) -> Result<Option<Peak>, CeilingError> {
    best(INT8_TILES, threads, rounds)
}

/// Runs every variant that this processor has, in turns, and keeps the fastest: the widest need not be it. None when it has
/// none of them.
fn best(variants: &[Variant], threads: usize, rounds: usize) -> Result<Option<Peak>, CeilingError> {
    let pool = memory::pool(threads)?;
    let here: Vec<_> = variants.iter().filter(|v| (v.available)()).collect();
    let iterations: Vec<_> = here.iter().map(|v| iterations(v)).collect();
    let mut contestants: Vec<_> = here
        .iter()
        .zip(&iterations)
        .map(|(v, &n)| {
            let pool = &pool;
            Contestant::<Infallible>::new(1, move |_| {
                pool.broadcast(|_| black_box((v.run)(black_box(n))));
                Ok(())
            })
        })
        .collect();
    let Ok(timings) = timer::interleave(&mut contestants, rounds);
    let rates = here.iter().zip(&iterations).zip(&timings).map(|((v, &n), t)| {
        let ops = v.ops as f64 * n as f64 * threads as f64;
        (ops / t.min_ns as f64, v.name)
    });
    let fastest = rates.max_by(|a, b| a.0.total_cmp(&b.0));
    Ok(fastest.map(|(gops, name)| Peak { gops, by: name.to_string(), lower_bound: name == PORTABLE }))
}

/// Iterations of one thread that take about [`RUN`].
fn iterations(v: &Variant) -> u64 {
    let mut n = 1u64 << 12;
    loop {
        let start = Instant::now();
        black_box((v.run)(black_box(n)));
        let took = start.elapsed();
        if took >= RUN || n >= 1 << 40 {
            return n;
        }
        n *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_that_runs_here_is_faster_than_nothing_and_says_its_name() {
        for variants in [FMA, INT8_DOT, INT8_TILES] {
            for v in variants {
                match (v.available)() {
                    true => assert!((v.run)(3).is_finite(), "{}", v.name),
                    false => println!("skipped {}: this processor has not its instructions", v.name),
                }
            }
        }
        for peak in [fma(1, 1).unwrap(), int8_dot(2, 1).unwrap()] {
            assert!(peak.gops.is_finite() && peak.gops > 0.0, "{peak:?}");
            assert_eq!(peak.lower_bound, peak.by == PORTABLE);
        }
        assert!(fma(0, 1).is_err());
    }

    /// The counted operations are those that are done: a variant that left work out would compute something else.
    #[test]
    fn iterations_are_really_done() {
        for v in FMA.iter().chain(INT8_DOT).chain(INT8_TILES).filter(|v| (v.available)()) {
            assert_ne!((v.run)(1), (v.run)(2), "{}", v.name);
            assert_eq!((v.run)(5), (v.run)(5), "{}", v.name);
        }
    }
}
