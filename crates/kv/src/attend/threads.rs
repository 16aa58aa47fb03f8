//! Threads of the attention operation. In: a number of independent pieces; out: their results in order.
//! The calling thread works too; the others sleep between calls. Inside a rayon pool that is large enough its threads are
//! used: a second pool would fight with the first one's idle threads for the same cores (an engine decoding 7,700 tokens
//! deep on two threads spent a third of its time that way).
//! NOT here: what a piece is (plan.rs).

use crate::Error;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most threads a pool may have: a typing error should not start a million.
pub(crate) const MAX_THREADS: usize = 1024;

/// A fixed number of threads.
pub(crate) struct Threads {
    count: usize,
    /// The threads beside the calling one; None for one thread.
    others: Option<rayon::ThreadPool>,
}

impl Threads {
    pub(crate) fn new(count: usize) -> Result<Self, Error> {
        let no = |why: String| Error::Threads { threads: count, why };
        if count == 0 {
            return Err(no("at least one is needed".into()));
        }
        if count > MAX_THREADS {
            return Err(no(format!("at most {MAX_THREADS} are allowed")));
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(count - 1).thread_name(|i| format!("attend-{i}"));
        let others = if count > 1 { Some(pool.build().map_err(|e| no(e.to_string()))?) } else { None };
        Ok(Self { count, others })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// `[f(0), f(1), ..]`. Which thread computes which piece is open; the results are not.
    pub(crate) fn map<T: Send>(&self, pieces: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let helpers = (self.count - 1).min(pieces.saturating_sub(1));
        if helpers == 0 {
            return (0..pieces).map(f).collect();
        }
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(pieces));
        let work = || {
            let mut own = Vec::new();
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= pieces {
                    break;
                }
                own.push((i, f(i)));
            }
            done.lock().expect("a panic of a piece ends the scope").append(&mut own);
        };
        match &self.others {
            Some(pool) if !inside_pool_of(self.count) => pool.in_place_scope(|scope| {
                (0..helpers).for_each(|_| scope.spawn(|_| work()));
                work();
            }),
            _ => rayon::in_place_scope(|scope| {
                (0..helpers).for_each(|_| scope.spawn(|_| work()));
                work();
            }),
        }
        let mut done = done.into_inner().expect("as above");
        done.sort_unstable_by_key(|(i, _)| *i);
        done.into_iter().map(|(_, t)| t).collect()
    }
}

/// Whether the calling thread belongs to a rayon pool of at least this many threads.
fn inside_pool_of(threads: usize) -> bool {
    rayon::current_thread_index().is_some() && rayon::current_num_threads() >= threads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order() {
        for count in [1, 2, 3, 8] {
            for pieces in [0, 1, 2, 100] {
                let got = Threads::new(count).unwrap().map(pieces, |i| i * i);
                assert_eq!(got, (0..pieces).map(|i| i * i).collect::<Vec<_>>());
            }
        }
        // Called from inside a pool, large enough or not.
        for outer in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(outer).build().unwrap();
            let threads = Threads::new(2).unwrap();
            assert_eq!(pool.install(|| threads.map(50, |i| i + 1)), (1..51).collect::<Vec<_>>());
        }
        assert!(Threads::new(0).is_err());
        assert!(Threads::new(MAX_THREADS + 1).is_err());
    }
}
