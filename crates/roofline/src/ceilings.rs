//! What this machine can do at most, measured now, for the threads in use. In: threads; out: bandwidths by working set and
//! peaks of arithmetic. Nothing here is taken from a data sheet.
//! NOT here: the cost of starting threads for a kernel (survey/, by the kernels' own threads).

use crate::memory::{CeilingError, Copier, Reader};
use crate::peaks::{self, Peak};
use crate::timer::{self, Contestant, Timing};
use serde::Serialize;
use std::cell::RefCell;
use std::convert::Infallible;
use std::hint::black_box;

/// Bandwidth at one working set.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bandwidth {
    /// Bytes of the working set, all threads together.
    pub bytes: usize,
    /// 1e9 bytes per second.
    pub gbps: f64,
}

/// Ceilings of some threads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ceilings {
    /// Threads they were measured with.
    pub threads: usize,
    /// Reading, smallest working set first.
    pub read: Vec<Bandwidth>,
    /// Copying: bytes read plus bytes written, over source and destination together.
    pub copy: Vec<Bandwidth>,
    /// f32 multiply-adds.
    pub fma: Peak,
    /// 8-bit dot products.
    pub int8_dot: Peak,
    /// Products of 8-bit matrices in tiles, where the processor has them.
    pub int8_tiles: Option<Peak>,
    /// f32 matrix product.
    pub matmul: Peak,
}

/// How much of it to measure.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Working sets.
    pub largest_bytes: usize,
    /// Rounds of each.
    pub rounds: usize,
    /// One small matrix product in place of three.
    pub quick: bool,
}

/// Smallest working set: inside the second-level cache of any processor of today.
const SMALLEST_BYTES: usize = 256 << 10;
/// Each working set is this many times the one before.
const STEP: usize = 4;
/// Bytes that a thread moves in one timed run at least: some milliseconds, long beside the start of threads.
const RUN_BYTES: usize = 64 << 20;

impl Ceilings {
    /// Measures them.
    ///
    /// # Errors
    /// [`CeilingError`] for memory that the system refuses and threads that do not start.
    pub fn measure(threads: usize, effort: Effort) -> Result<Self, CeilingError> {
        let (read, copy) = bandwidths(threads, effort)?;
        Ok(Self {
            threads,
            read,
            copy,
            fma: peaks::fma(threads, effort.rounds)?,
            int8_dot: peaks::int8_dot(threads, effort.rounds)?,
            int8_tiles: peaks::int8_tiles(threads, effort.rounds)?,
            matmul: peaks::matmul(threads, effort.rounds, effort.quick)?,
        })
    }

    /// Every peak with its name, the fastest kind first.
    pub fn peaks(&self) -> impl Iterator<Item = (&'static str, &Peak)> {
        let tiles = self.int8_tiles.iter().map(|peak| ("int8 matrix tiles", peak));
        tiles.chain([("int8 dot", &self.int8_dot), ("f32 FMA", &self.fma), ("f32 matrix product", &self.matmul)])
    }

    /// Fastest copying at a working set of `bytes` or the next larger one measured: what moves more than it reads.
    pub fn copy_at(&self, bytes: usize) -> f64 {
        at(&self.copy, bytes)
    }

    /// Reading beyond every cache: the largest working set measured.
    pub fn memory_read(&self) -> f64 {
        self.read.last().map_or(f64::NAN, |b| b.gbps)
    }
}

/// Bandwidth at a working set, between two measured ones by the logarithm of its bytes; beyond the ends, the end's.
fn at(curve: &[Bandwidth], bytes: usize) -> f64 {
    let after = curve.iter().position(|b| b.bytes >= bytes);
    match after {
        None => curve.last().map_or(f64::NAN, |b| b.gbps),
        Some(0) => curve[0].gbps,
        Some(i) => {
            let (a, b) = (curve[i - 1], curve[i]);
            let part = (bytes as f64 / a.bytes as f64).ln() / (b.bytes as f64 / a.bytes as f64).ln();
            a.gbps + part * (b.gbps - a.gbps)
        }
    }
}

/// Reading and copying by working set, all in turns.
fn bandwidths(threads: usize, effort: Effort) -> Result<(Vec<Bandwidth>, Vec<Bandwidth>), CeilingError> {
    let sizes = std::iter::successors(Some(SMALLEST_BYTES), |b| b.checked_mul(STEP));
    let sizes: Vec<_> = sizes.take_while(|&b| b <= effort.largest_bytes).collect();
    let largest = sizes.last().copied().unwrap_or(SMALLEST_BYTES);
    let reader = Reader::new(threads, largest)?;
    let copier = RefCell::new(Copier::new(threads, largest)?);
    let times = |bytes: usize| (RUN_BYTES * threads).div_ceil(bytes).max(1);
    let mut contestants = Vec::with_capacity(2 * sizes.len());
    for &bytes in &sizes {
        let (reader, copier) = (&reader, &copier);
        contestants.push(Contestant::<Infallible>::new(1, move |_| {
            black_box(reader.read_repeated(bytes, times(bytes)));
            Ok(())
        }));
        contestants.push(Contestant::new(1, move |_| {
            copier.borrow_mut().copy_repeated(bytes, times(bytes));
            Ok(())
        }));
    }
    let Ok(timings) = timer::interleave(&mut contestants, effort.rounds);
    let rate = |bytes: usize, t: &Timing| Bandwidth { bytes, gbps: (bytes * times(bytes)) as f64 / t.min_ns as f64 };
    let pairs = sizes.iter().zip(timings.chunks_exact(2));
    Ok(pairs.map(|(&bytes, t)| (rate(bytes, &t[0]), rate(bytes, &t[1]))).unzip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_read_between_their_points_and_flat_beyond_them() {
        let curve = [Bandwidth { bytes: 100, gbps: 40.0 }, Bandwidth { bytes: 400, gbps: 20.0 }];
        assert_eq!([50, 100, 400, 900].map(|b| at(&curve, b)), [40.0, 40.0, 20.0, 20.0]);
        assert!((at(&curve, 200) - 30.0).abs() < 1e-9, "half way by logarithm");
        assert!(at(&[], 1).is_nan());
    }

    #[test]
    fn a_quick_measurement_has_every_ceiling() {
        let effort = Effort { largest_bytes: 1 << 20, rounds: 1, quick: true };
        let c = Ceilings::measure(2, effort).unwrap();
        assert_eq!(c.read.iter().map(|b| b.bytes).collect::<Vec<_>>(), [256 << 10, 1 << 20]);
        assert_eq!(c.copy.len(), 2);
        let rates = c.read.iter().chain(&c.copy).map(|b| b.gbps).chain(c.peaks().map(|(_, peak)| peak.gops));
        assert!(rates.into_iter().all(|r| r.is_finite() && r > 0.0), "{c:?}");
        assert!(Ceilings::measure(0, effort).is_err());
    }
}
