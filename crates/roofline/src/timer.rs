//! Interleaved timing. In: contestants (closures over one or more copies of their data); out: minimum and median of
//! the wall time of each. NOT here: what is timed, what its bytes are (cost.rs), how fast memory is (ceilings.rs).
//!
//! Clock speed and neighbours drift over seconds, so contestants never run one after another in blocks: every round
//! runs each of them once, and the round's first one changes, so that nobody always follows the same predecessor.
//! Cold means that a contestant finds its data outside the caches: it rotates over copies that together exceed them.

use std::time::{Duration, Instant};

/// Bytes that the copies of a cold contestant have together: twice the 300 MiB last-level cache of the largest
/// server processors these kernels were tried on, and ten times the second-level cache of a GPU.
pub const COLD_BYTES: usize = 600_000_000;

/// Wall time of one contestant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// Shortest round.
    pub min_ns: u64,
    /// Middle round (the upper one of the two middle ones for an even count).
    pub median_ns: u64,
    /// Rounds timed.
    pub rounds: usize,
}

impl Timing {
    /// Minimum and median of some rounds, `None` when there are none.
    pub fn of(mut rounds_ns: Vec<u64>) -> Option<Self> {
        rounds_ns.sort_unstable();
        let min_ns = *rounds_ns.first()?;
        Some(Self { min_ns, median_ns: rounds_ns[rounds_ns.len() / 2], rounds: rounds_ns.len() })
    }
}

/// What a contestant does with one of its copies.
type Run<'a, E> = Box<dyn FnMut(usize) -> Result<(), E> + 'a>;

/// One thing to time.
pub struct Contestant<'a, E> {
    copies: usize,
    run: Run<'a, E>,
    reset: Option<Run<'a, E>>,
}

impl<'a, E> Contestant<'a, E> {
    /// `run` gets the number of the copy to work on, `0..copies`; a copies of 0 counts as 1.
    pub fn new(copies: usize, run: impl FnMut(usize) -> Result<(), E> + 'a) -> Self {
        Self { copies: copies.max(1), run: Box::new(run), reset: None }
    }

    /// Calls `reset` with the copy's number after each run, outside the clock: it undoes what the run did.
    pub fn with_reset(mut self, reset: impl FnMut(usize) -> Result<(), E> + 'a) -> Self {
        self.reset = Some(Box::new(reset));
        self
    }

    /// One run and its undoing; the time of the run alone.
    fn once(&mut self, copy: usize) -> Result<u64, E> {
        let start = Instant::now();
        (self.run)(copy)?;
        let ns = nanoseconds(start.elapsed());
        self.reset.as_mut().map_or(Ok(()), |reset| reset(copy))?;
        Ok(ns)
    }
}

/// Copies a contestant of `bytes` per run needs: one when hot, and enough to exceed [`COLD_BYTES`] when cold.
pub fn copies(bytes: usize, hot: bool) -> usize {
    if hot { 1 } else { COLD_BYTES.div_ceil(bytes.max(1)).max(2) }
}

/// Runs every contestant once per round, `rounds` times (0 counts as 1), after one round that is not timed.
///
/// # Errors
/// The first error of a contestant; nothing is timed after it.
pub fn interleave<E>(contestants: &mut [Contestant<'_, E>], rounds: usize) -> Result<Vec<Timing>, E> {
    interleave_while(contestants, |done| done < rounds.max(1))
}

/// As [`interleave`], with rounds for as long as `budget` lasts, held between `least` (0 counts as 1) and `most`.
///
/// # Errors
/// As [`interleave`].
pub fn interleave_within<E>(
    contestants: &mut [Contestant<'_, E>],
    budget: Duration,
    (least, most): (usize, usize),
) -> Result<Vec<Timing>, E> {
    let mut start = None;
    interleave_while(contestants, |done| {
        // The clock starts behind the untimed round.
        let start = *start.get_or_insert_with(Instant::now);
        done < least.max(1) || (done < most && start.elapsed() < budget)
    })
}

fn interleave_while<E>(
    contestants: &mut [Contestant<'_, E>],
    mut more: impl FnMut(usize) -> bool,
) -> Result<Vec<Timing>, E> {
    for c in contestants.iter_mut() {
        c.once(0)?;
    }
    // Grows between the timed calls, never inside one, and never to what somebody only asked for.
    let mut ns = vec![Vec::new(); contestants.len()];
    let mut round = 0;
    while more(round) {
        for turn in 0..contestants.len() {
            let who = (turn + round) % contestants.len();
            let c = &mut contestants[who];
            // Copy 0 was just used by the untimed round: start behind it.
            let copy = (round + 1) % c.copies;
            ns[who].push(c.once(copy)?);
        }
        round += 1;
    }
    Ok(ns.into_iter().filter_map(Timing::of).collect())
}

/// How many rounds fit a time budget when one round takes `round`, held between `least` and `most`.
pub fn rounds_for(budget: Duration, round: Duration, least: usize, most: usize) -> usize {
    let fit = budget.as_nanos() / round.as_nanos().max(1);
    usize::try_from(fit).unwrap_or(most).clamp(least, most)
}

/// Nanoseconds of a duration, at least 1 so that a rate can be formed.
pub fn nanoseconds(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn every_round_runs_each_contestant_once_and_rotates_copies_and_order() {
        let log = RefCell::new(Vec::new());
        let mut contestants: Vec<Contestant<'_, ()>> = [('a', 3), ('b', 1)]
            .into_iter()
            .map(|(name, copies)| {
                let log = &log;
                Contestant::new(copies, move |copy| {
                    log.borrow_mut().push((name, copy));
                    Ok(())
                })
            })
            .collect();
        let timings = interleave(&mut contestants, 3).unwrap();
        assert_eq!(timings.iter().map(|t| t.rounds).collect::<Vec<_>>(), [3, 3]);
        drop(contestants);
        assert_eq!(log.into_inner(), [('a', 0), ('b', 0), ('a', 1), ('b', 0), ('b', 0), ('a', 2), ('a', 0), ('b', 0)]);
    }

    #[test]
    fn every_run_is_undone_before_the_next() {
        let held = RefCell::new(0);
        let run = |_| {
            *held.borrow_mut() += 1;
            if *held.borrow() == 1 { Ok(()) } else { Err("not undone") }
        };
        let reset = |_| {
            *held.borrow_mut() -= 1;
            Ok(())
        };
        interleave(&mut [Contestant::new(1, run).with_reset(reset)], 4).unwrap();
    }

    #[test]
    fn a_budget_is_held_between_fewest_and_most_rounds() {
        let rounds = |budget, bounds| {
            let mut c = [Contestant::<()>::new(1, |_| Ok(()))];
            interleave_within(&mut c, budget, bounds).unwrap()[0].rounds
        };
        assert_eq!(rounds(Duration::ZERO, (0, 9)), 1);
        assert_eq!(rounds(Duration::ZERO, (3, 9)), 3);
        assert_eq!(rounds(Duration::from_secs(3600), (3, 9)), 9);
    }

    #[test]
    fn an_error_stops_the_timing() {
        let mut calls = 0;
        let mut c = [Contestant::new(1, |_| {
            calls += 1;
            if calls == 2 { Err("second") } else { Ok(()) }
        })];
        assert_eq!(interleave(&mut c, 5), Err("second"));
        drop(c);
        assert_eq!(calls, 2);
    }

    #[test]
    fn median_and_minimum() {
        assert_eq!(Timing::of(vec![]), None);
        assert_eq!(Timing::of(vec![9, 1, 5]), Some(Timing { min_ns: 1, median_ns: 5, rounds: 3 }));
        assert_eq!(Timing::of(vec![4, 1, 3, 2]), Some(Timing { min_ns: 1, median_ns: 3, rounds: 4 }));
    }

    #[test]
    fn cold_copies_exceed_the_cache() {
        assert_eq!(copies(64, true), 1);
        for bytes in [1_000_000, 64_000_000, 599_999_999, 700_000_000] {
            let n = copies(bytes, false);
            assert!(n >= 2 && n * bytes >= COLD_BYTES, "{bytes}: {n}");
        }
    }

    #[test]
    fn rounds_stay_in_their_bounds() {
        let ms = Duration::from_millis;
        assert_eq!(rounds_for(ms(1000), ms(10), 5, 500), 100);
        assert_eq!(rounds_for(ms(1000), ms(900), 5, 500), 5);
        assert_eq!(rounds_for(ms(1000), Duration::ZERO, 5, 500), 500);
    }
}
