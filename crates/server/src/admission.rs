//! Who may come in. In: how many places there are; out: places, given back when they are dropped, or how long to stay
//! away. NOT here: what a request costs in memory (the engine's own limits).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Longest time a client is told to stay away.
const LONGEST_RETRY_S: u64 = 60;

/// The places of a server: one per request that is running or waiting, so that neither memory nor queues grow without bound.
#[derive(Debug)]
pub struct Admission {
    places: Arc<Semaphore>,
    of: usize,
    running: usize,
    /// Bodies that are being read and parsed: bounds the memory of requests that have no place yet.
    bodies: Arc<Semaphore>,
    /// KiB of what of them is there.
    kib: Arc<Semaphore>,
    /// Mean duration of finished requests in microseconds, newer ones counting more.
    mean_us: AtomicU64,
    finished: AtomicUsize,
}

/// Places that a request holds.
#[derive(Debug)]
pub struct Places(#[allow(dead_code)] OwnedSemaphorePermit);

/// Leave to read a body, and to hold what has come of it.
#[derive(Debug)]
pub struct Reading {
    _body: OwnedSemaphorePermit,
    kib: OwnedSemaphorePermit,
    full: Full,
}

impl Reading {
    /// Leave to hold so many bytes in all.
    ///
    /// # Errors
    /// [`Full`] when the bodies of everyone take too much.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Full> {
        let more = bytes.div_ceil(1024).saturating_sub(self.kib.num_permits());
        let more = u32::try_from(more).map_err(|_| self.full)?;
        let more = self.kib.semaphore().clone().try_acquire_many_owned(more).map_err(|_| self.full)?;
        self.kib.merge(more);
        Ok(())
    }
}

/// There is no place; the client may try again after this time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// Whole seconds, 1 or more.
    pub retry_after_s: u64,
}

impl Admission {
    /// `running` requests at once and `waiting` behind them; bodies that are being read hold `bodies_bytes` together.
    pub fn new(running: usize, waiting: usize, bodies_bytes: usize) -> Self {
        let of = running.saturating_add(waiting).min(Semaphore::MAX_PERMITS / 2);
        Self {
            places: Arc::new(Semaphore::new(of)),
            of,
            running: running.clamp(1, of.max(1)),
            bodies: Arc::new(Semaphore::new(of + BODIES_BESIDE)),
            kib: Arc::new(Semaphore::new(bodies_bytes.div_ceil(1024).min(Semaphore::MAX_PERMITS))),
            mean_us: AtomicU64::new(0),
            finished: AtomicUsize::new(0),
        }
    }

    /// Places there are.
    pub fn places(&self) -> usize {
        self.of
    }

    /// Leave to read a body.
    ///
    /// # Errors
    /// [`Full`].
    pub fn body(&self) -> Result<Reading, Full> {
        let full = self.full();
        let body = self.bodies.clone().try_acquire_owned().map_err(|_| full)?;
        let kib = self.kib.clone().try_acquire_many_owned(0).map_err(|_| full)?;
        Ok(Reading { _body: body, kib, full })
    }

    /// Places for `n` requests that belong together: all or none.
    ///
    /// # Errors
    /// [`Full`].
    pub fn enter(&self, n: usize) -> Result<Places, Full> {
        let n = u32::try_from(n).map_err(|_| self.full())?;
        self.places.clone().try_acquire_many_owned(n).map(Places).map_err(|_| self.full())
    }

    /// Notes how long a request took, for the time others are told to stay away.
    pub fn ended(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        // Two writers at once lose one of their samples: it is a guess for the client and no more.
        let old = self.mean_us.load(Ordering::Relaxed);
        let first = self.finished.fetch_add(1, Ordering::Relaxed) == 0;
        let mean = if first { us } else { old - old / 8 + us / 8 };
        self.mean_us.store(mean, Ordering::Relaxed);
    }

    /// A place comes free about once per mean duration and running request.
    fn full(&self) -> Full {
        let us = self.mean_us.load(Ordering::Relaxed) / self.running as u64;
        Full { retry_after_s: us.div_ceil(1_000_000).clamp(1, LONGEST_RETRY_S) }
    }
}

/// Bodies read at once beyond the number of places, so that a burst of small requests is refused for places and not for these.
const BODIES_BESIDE: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back_and_groups_enter_whole() {
        let a = Admission::new(2, 1, 1 << 20);
        let two = a.enter(2).unwrap();
        assert_eq!(a.enter(2).unwrap_err(), Full { retry_after_s: 1 });
        let one = a.enter(1).unwrap();
        assert!(a.enter(1).is_err());
        drop(two);
        drop(one);
        assert!(a.enter(3).is_ok());
        assert!(a.enter(4).is_err() && a.enter(usize::MAX).is_err());
    }

    #[test]
    fn bodies_hold_no_more_than_their_bytes_together() {
        let a = Admission::new(8, 8, 4 << 10);
        let (mut one, mut two) = (a.body().unwrap(), a.body().unwrap());
        one.grow(100).unwrap();
        one.grow(3 << 10).unwrap();
        two.grow(1 << 10).unwrap();
        assert!(two.grow((1 << 10) + 1).is_err());
        drop(one);
        two.grow(4 << 10).unwrap();
        assert!(a.body().unwrap().grow(1).is_err());
        drop(two);
        assert!(a.body().unwrap().grow(4 << 10).is_ok());
    }

    #[test]
    fn the_time_to_stay_away_follows_what_requests_take_and_has_bounds() {
        let a = Admission::new(2, 0, 1 << 20);
        a.ended(Duration::from_secs(9));
        assert_eq!(a.full().retry_after_s, 5);
        (0..100).for_each(|_| a.ended(Duration::from_secs(100_000)));
        assert_eq!(a.full().retry_after_s, LONGEST_RETRY_S);
        (0..200).for_each(|_| a.ended(Duration::ZERO));
        assert_eq!(a.full().retry_after_s, 1);
    }
}
