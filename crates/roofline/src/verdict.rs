//! What bounds a kernel. In: shares of ceilings and reruns; out: a verdict and the reason in words. NOT here: measuring
//! (survey/), counting (cost.rs).

use serde::Serialize;
use std::fmt;

/// Percent of a ceiling from which on that ceiling is what bounds a kernel.
pub const BOUND_PCT: f64 = 60.0;
/// A call within this many times the latency of the same operation's smallest call is bound by starting it.
pub const FLOOR_TIMES: f64 = 2.0;
/// Speedup from more independent work at the same bytes from which on too little of it was what bound the kernel.
pub const OCCUPANCY_GAIN: f64 = 1.25;

/// What bounds a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// At least [`BOUND_PCT`] of the bandwidth of its working set.
    Memory,
    /// At least [`BOUND_PCT`] of the peak of its arithmetic.
    Compute,
    /// Neither, and within [`FLOOR_TIMES`] of the smallest call.
    Dispatch,
    /// None of these, and a rerun with more independent work at the same bytes was [`OCCUPANCY_GAIN`] times faster.
    Occupancy,
    /// None of these.
    Unexplained,
}

impl Bound {
    /// Every verdict, in the order in which they are tried.
    pub const ALL: [Self; 5] = [Self::Memory, Self::Compute, Self::Dispatch, Self::Occupancy, Self::Unexplained];
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Memory => "memory-bound",
            Self::Compute => "compute-bound",
            Self::Dispatch => "dispatch-bound",
            Self::Occupancy => "occupancy-bound",
            Self::Unexplained => "unexplained",
        })
    }
}

/// What was measured of a row before any rerun.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    /// Percent of the bandwidth of its working set.
    pub pct_of_bandwidth: f64,
    /// Percent of the peak of its arithmetic.
    pub pct_of_compute: f64,
    /// Its time over that of the smallest call.
    pub times_floor: f64,
}

/// What reruns of a row that no ceiling explains have shown. `None`: not rerun that way.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reruns {
    /// Speedup with the same bytes cut into more independent pieces.
    pub more_work_in_flight: Option<f64>,
    /// Speedup of all threads over one.
    pub over_one_thread: Option<f64>,
    /// Time with the data in the caches over the time without; for data that can be there.
    pub hot_over_cold: Option<f64>,
}

/// A verdict with its reason.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// What bounds the kernel.
    pub bound: Bound,
    /// Why, in words.
    pub why: String,
}

/// The verdict that needs no rerun, or `None`. Of two ceilings reached, the nearer one bounds.
pub fn by_shares(s: Shares) -> Option<Verdict> {
    let (memory, compute) = (s.pct_of_bandwidth, s.pct_of_compute);
    if memory >= BOUND_PCT && (memory >= compute || compute.is_nan()) {
        let why = format!("{memory:.0} % of the bandwidth of its working set");
        return Some(Verdict { bound: Bound::Memory, why });
    }
    if compute >= BOUND_PCT {
        return Some(Verdict { bound: Bound::Compute, why: format!("{compute:.0} % of the peak of its arithmetic") });
    }
    (s.times_floor <= FLOOR_TIMES)
        .then(|| Verdict { bound: Bound::Dispatch, why: format!("{:.1} times the smallest call", s.times_floor) })
}

/// The verdict after reruns, for a row that [`by_shares`] does not explain.
pub fn by_reruns(s: Shares, r: Reruns, threads: usize) -> Verdict {
    let mut why = Vec::new();
    if let Some(gain) = r.more_work_in_flight {
        why.push(format!("with more independent work it is {gain:.2} times as fast"));
        if gain >= OCCUPANCY_GAIN {
            return Verdict { bound: Bound::Occupancy, why: why.concat() };
        }
    }
    if let Some(gain) = r.over_one_thread {
        // Threads that add little may wait for work, for memory or for a neighbour: said, but no verdict.
        why.push(format!("{threads} threads are {gain:.2} times as fast as one"));
    }
    if let Some(hot) = r.hot_over_cold {
        let reading = match hot {
            h if h >= 0.9 => ": memory does not hold it back, instructions that are no part of the counted work do",
            h if h <= 0.6 => ": waiting for memory holds it back, not bandwidth",
            _ => "",
        };
        why.push(format!("with its data in the caches it takes {hot:.2} times as long{reading}"));
    }
    let reached = format!("{:.0} % of bandwidth, {:.0} % of arithmetic", s.pct_of_bandwidth, s.pct_of_compute);
    why.insert(0, reached);
    Verdict { bound: Bound::Unexplained, why: why.join("; ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(memory: f64, compute: f64, floor: f64) -> Option<Bound> {
        by_shares(Shares { pct_of_bandwidth: memory, pct_of_compute: compute, times_floor: floor }).map(|v| v.bound)
    }

    #[test]
    fn shares_decide_in_order_and_at_their_limits() {
        assert_eq!(bound(60.0, 10.0, 9.0), Some(Bound::Memory));
        assert_eq!(bound(59.9, 60.0, 9.0), Some(Bound::Compute));
        assert_eq!(bound(70.0, 80.0, 1.0), Some(Bound::Compute));
        assert_eq!(bound(80.0, 70.0, 1.0), Some(Bound::Memory));
        assert_eq!(bound(59.9, 59.9, 2.0), Some(Bound::Dispatch));
        assert_eq!(bound(59.9, 59.9, 2.1), None);
    }

    #[test]
    fn what_was_not_measured_explains_nothing() {
        let nan = f64::NAN;
        assert_eq!(bound(nan, nan, nan), None);
        assert_eq!(bound(70.0, nan, nan), Some(Bound::Memory));
        assert_eq!(bound(nan, 70.0, nan), Some(Bound::Compute));
    }

    #[test]
    fn reruns_confirm_occupancy_or_leave_it_unexplained() {
        let shares = Shares { pct_of_bandwidth: 30.0, pct_of_compute: 20.0, times_floor: 9.0 };
        let with = |more_work_in_flight, over_one_thread, threads| {
            by_reruns(shares, Reruns { more_work_in_flight, over_one_thread, hot_over_cold: None }, threads).bound
        };
        assert_eq!(with(Some(1.25), None, 8), Bound::Occupancy);
        assert_eq!(with(Some(1.2), None, 8), Bound::Unexplained);
        assert_eq!(with(Some(f64::NAN), None, 8), Bound::Unexplained);
        assert_eq!(with(Some(1.0), Some(1.0), 8), Bound::Unexplained, "only more work in flight confirms it");
        assert_eq!(with(None, Some(1.0), 8), Bound::Unexplained);
        assert_eq!(with(None, None, 8), Bound::Unexplained);
        let hot = by_reruns(shares, Reruns { hot_over_cold: Some(0.97), ..Reruns::default() }, 2);
        assert!(hot.why.contains("30 % of bandwidth, 20 % of arithmetic") && hot.why.contains("instructions"));
    }

    #[test]
    fn the_page_that_explains_verdicts_has_these_limits() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/roofline.md");
        let page = std::fs::read_to_string(path).unwrap();
        for bound in Bound::ALL {
            assert!(page.contains(&format!("| {bound} |")), "{bound}");
        }
        for limit in [
            format!("at least {BOUND_PCT} % of the bandwidth"),
            format!("at least {BOUND_PCT} % of the peak"),
            format!("within {FLOOR_TIMES} times the smallest call"),
            format!("at least {OCCUPANCY_GAIN} times as fast"),
        ] {
            assert!(page.contains(&limit), "{limit}");
        }
    }

    #[test]
    fn names_in_text_and_json_agree() {
        for bound in Bound::ALL {
            let json = serde_json::to_string(&bound).unwrap();
            let text = bound.to_string();
            assert_eq!(text.strip_suffix("-bound").unwrap_or(&text), json.trim_matches('"'));
        }
    }
}
