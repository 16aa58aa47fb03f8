//! The threads of one engine. In: a count; out: a pool that every parallel loop of the engine runs on.
//! NOT here: the threads of attention (kvant-kv owns those).

use crate::Error;

/// The threads of one engine; work given to [`Pool::run`] stays on them.
pub struct Pool {
    pool: rayon::ThreadPool,
    threads: usize,
}

impl Pool {
    /// A pool of `threads` threads.
    ///
    /// # Errors
    /// [`Error::Threads`] for zero threads, or threads that cannot start.
    pub fn new(threads: usize) -> Result<Self, Error> {
        let no = |why: String| Error::Threads { threads, why };
        if threads == 0 {
            return Err(no("at least one thread is needed".into()));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("kvant-{i}"))
            .build()
            .map_err(|e| no(e.to_string()))?;
        Ok(Self { pool, threads })
    }

    /// Threads of this pool.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on one of the pool's threads; parallel loops inside it use all of them.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_has_the_threads_asked_for_and_at_least_one() {
        assert!(matches!(Pool::new(0), Err(Error::Threads { threads: 0, .. })));
        let pool = Pool::new(2).unwrap();
        assert_eq!((pool.threads(), pool.run(rayon::current_num_threads)), (2, 2));
    }
}
