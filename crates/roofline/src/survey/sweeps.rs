//! The same bytes cut otherwise: over threads, requests, and key ranges per unit of work. In: a survey's context; out:
//! points with the reading ceiling of the same rounds. NOT here: what the product's rule should be (the bench of splits).

use super::rows::{cold_reader, contestant};
use super::workload::{AttendCall, Size};
use super::{Context, SurveyError};
use crate::memory::Reader;
use crate::report::{SweepPoint, Sweeps};
use kvant_kv::attend::Split;
use kvant_kv::{Attention, Codec, Scheme};
use std::sync::Mutex;

/// Key ranges per unit of work that are tried beside the product's rule.
const RANGES: [usize; 4] = [1, 2, 4, 8];

/// One way to run a call.
struct Way<'a> {
    call: &'a AttendCall<'a>,
    attention: Mutex<Attention>,
    threads: usize,
    ranges_per_unit: Option<usize>,
}

impl<'a> Way<'a> {
    fn new(
        call: &'a AttendCall<'a>,
        threads: usize,
        ranges_per_unit: Option<usize>,
        kernel: &str,
    ) -> Result<Self, SurveyError> {
        let mut attention = Attention::new(threads, Some(kernel))?;
        attention.set_split(Split { ranges_per_unit, ..Split::default() });
        Ok(Self { call, attention: Mutex::new(attention), threads, ranges_per_unit })
    }
}

/// All sweeps.
pub(super) fn measure(c: &Context<'_>) -> Result<Sweeps, SurveyError> {
    let packed = c.settings.schemes.iter().copied().find(|s| s.packed().is_some_and(|p| p.k() == Codec::affine(4)));
    let packed = packed.or_else(|| c.settings.schemes.iter().copied().find(|s| *s != Scheme::F16));
    let scheme = packed.unwrap_or(Scheme::F16);
    let call = |scheme: Scheme, batch: usize| {
        let size = Size { batch, kv_len: c.plan.sweep_len / batch, new_rows: 1 };
        let bytes = crate::cost::Work::attend(c.settings.shape, scheme, batch, size.kv_len, 1).bytes;
        AttendCall::new(c.settings.shape, scheme, size, c.copies(bytes), c.data)
    };
    let kernel = c.kernel();
    let all = c.settings.threads;

    let one = call(scheme, 1)?;
    let f16 = if scheme == Scheme::F16 { None } else { Some(call(Scheme::F16, 1)?) };
    let mut threads = Vec::new();
    for n in thread_counts(all) {
        let ways = [Some(&one), f16.as_ref()].into_iter().flatten().map(|call| Way::new(call, n, None, &kernel));
        threads.extend(points(c, &ways.collect::<Result<Vec<_>, _>>()?)?);
    }
    drop(f16);
    let ways = RANGES.into_iter().map(Some).chain([None]).map(|ranges| Way::new(&one, all, ranges, &kernel));
    let splits = points(c, &ways.collect::<Result<Vec<_>, _>>()?)?;
    drop(one);
    let calls = c.plan.sweep_batches.iter().map(|&batch| call(scheme, batch)).collect::<Result<Vec<_>, _>>()?;
    let ways = calls.iter().map(|call| Way::new(call, all, None, &kernel));
    let requests = points(c, &ways.collect::<Result<Vec<_>, _>>()?)?;
    Ok(Sweeps { threads, requests, splits })
}

/// Times ways of the same thread count in turns with reading.
fn points(c: &Context<'_>, ways: &[Way<'_>]) -> Result<Vec<SweepPoint>, SurveyError> {
    let Some(first) = ways.first() else { return Ok(Vec::new()) };
    let reader = Reader::new(first.threads, c.plan.cold_bytes)?;
    let (read_bytes, read) = cold_reader(&reader, c.plan.cold_bytes);
    let mut contestants = vec![read];
    contestants.extend(ways.iter().map(|way| contestant(way.call, &way.attention)));
    let timings = c.time(&mut contestants)?;
    let read_gbps = read_bytes as f64 / timings[0].min_ns as f64;
    let point = |way: &Way<'_>, min_ns: u64| SweepPoint {
        scheme: way.call.scheme.to_string(),
        threads: way.threads,
        batch: way.call.size.batch,
        kv_len: way.call.size.kv_len,
        ranges_per_unit: way.ranges_per_unit,
        min_ns,
        gbps: way.call.work.bytes as f64 / min_ns as f64,
        read_gbps,
    };
    Ok(ways.iter().zip(&timings[1..]).map(|(way, t)| point(way, t.min_ns)).collect())
}

/// 1, 2, 4, .. and the number itself.
fn thread_counts(most: usize) -> Vec<usize> {
    let mut counts: Vec<_> = std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|&n| n < most).collect();
    counts.push(most);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_double_and_end_at_the_most() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(6), [1, 2, 4, 6]);
    }
}
