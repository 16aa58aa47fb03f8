//! The threads of one engine. In: a count; out: a pool that every parallel loop of the engine runs on.
//! NOT here: the threads of attention (kvant-kv owns those).
//!
//! candle-core starts one process-wide pool whose workers spin between calls: on a machine where each thread has one
//! core, a spinning worker takes the core that attention needs, and its size cannot differ between two engines of one
//! process. So candle's pool is given no workers at all, every product of candle then runs on the thread that calls
//! it, and the engine splits the work over its own threads: `threads` means the same for all of it.

use crate::Error;
use std::sync::OnceLock;

/// The threads of one engine; work given to [`Pool::run`] stays on them.
pub struct Pool {
    pool: rayon::ThreadPool,
    threads: usize,
}

impl Pool {
    /// A pool of `threads` threads.
    ///
    /// # Errors
    /// [`Error::Threads`] for zero threads, threads that cannot start, or a process in which candle's own pool was
    /// already started with workers of its own.
    pub fn new(threads: usize) -> Result<Self, Error> {
        let no = |why: String| Error::Threads { threads, why };
        if threads == 0 {
            return Err(no("at least one thread is needed".into()));
        }
        calm_candle().map_err(|workers| {
            no(format!("the tensor library already runs {workers} threads of its own in this process"))
        })?;
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

/// Starts candle's pool without workers. Err: the workers it already has.
fn calm_candle() -> Result<(), usize> {
    static WORKERS: OnceLock<usize> = OnceLock::new();
    let workers = *WORKERS.get_or_init(|| {
        // SAFETY: the environment is written once per process, under this lock, before the first use of candle's
        // pool; Rust's own readers of the environment share a lock with the writer, and this process calls no C code
        // that reads the environment while an engine is loaded.
        unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
        candle_core::utils::barrier_pool().n_workers()
    });
    if workers == 0 { Ok(()) } else { Err(workers) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_threads_are_an_error_and_the_library_pool_has_no_workers() {
        assert!(matches!(Pool::new(0), Err(Error::Threads { threads: 0, .. })));
        let pool = Pool::new(2).unwrap();
        assert_eq!((pool.threads(), pool.run(rayon::current_num_threads)), (2, 2));
        assert_eq!(candle_core::utils::barrier_pool().n_workers(), 0);
    }
}
