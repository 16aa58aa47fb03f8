//! The machine's memory bandwidth. In: a working set and a thread count; out: a reader and a copier to time beside the
//! kernels, in the same rounds. NOT here: the clock (timer.rs), verdicts (verdict.rs), peaks of arithmetic (peaks/).
//!
//! Tried on 2 cores of a Xeon of family 6 model 207, 18 MiB cold, GB/s: one stream 23, two 21-25, **four streams one
//! 4 KiB page apart 29**, eight 22, one stream with software prefetch 28. Four streams keep four hardware prefetchers
//! busy; wider instructions change nothing (SSE2, AVX2 and AVX-512 read the same), so the loop needs no instruction
//! set of its own and no `unsafe`.

use memmap2::{Advice, MmapMut};
use rayon::prelude::*;
use std::hint::black_box;
use std::sync::Mutex;

/// Bytes of a page of one stream: hardware prefetchers stop at this boundary, so streams lie this far apart.
const PAGE_BYTES: usize = 4096;
/// Streams one thread reads at a time.
const STREAMS: usize = 4;
/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Why a ceiling could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CeilingError {
    /// The operating system refused the buffer.
    #[error("could not map {bytes} bytes to measure the memory bandwidth: {why}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        why: std::io::Error,
    },
    /// The threads could not start.
    #[error("cannot measure on {threads} threads: {why}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// Why not.
        why: String,
    },
}

/// A buffer and threads that read it as fast as this machine can.
pub struct Reader {
    buffer: MmapMut,
    pool: rayon::ThreadPool,
    threads: usize,
}

impl Reader {
    /// A reader of `threads` threads (1 or more) over a buffer of at least `bytes`.
    ///
    /// # Errors
    /// [`CeilingError`] for zero threads, threads that do not start, or memory that the system refuses.
    pub fn new(threads: usize, bytes: usize) -> Result<Self, CeilingError> {
        Ok(Self { pool: pool(threads)?, buffer: buffer(bytes.max(PAGE_BYTES * STREAMS))?, threads })
    }

    /// Threads that read.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Pieces of `bytes` that the buffer holds without overlap (1 at least).
    pub fn pieces(&self, bytes: usize) -> usize {
        (self.buffer.len() / bytes.max(1)).max(1)
    }

    /// Reads the first `bytes` of the buffer `times` times in one dispatch, each thread its own share again and again:
    /// what a working set that stays where it is can be read at, without the cost of starting threads.
    pub fn read_repeated(&self, bytes: usize, times: usize) -> u64 {
        let all = &self.buffer[..bytes.min(self.buffer.len())];
        let share = all.len().div_ceil(self.threads).next_multiple_of(PAGE_BYTES * STREAMS);
        let sums = self.pool.broadcast(|thread| {
            let Some(part) = all.chunks(share).nth(thread.index()) else { return 0 };
            (0..times).fold(0u64, |a, _| a.wrapping_add(sum(black_box(part))))
        });
        sums.into_iter().fold(0, u64::wrapping_add)
    }

    /// Reads piece number `piece` of `bytes` (at most the whole buffer) once and returns a sum of it, which keeps the
    /// compiler from leaving the reads out. Pieces beyond [`Reader::pieces`] start again at the first.
    pub fn read(&self, piece: usize, bytes: usize) -> u64 {
        let bytes = bytes.min(self.buffer.len());
        let start = piece % self.pieces(bytes) * bytes;
        let all = &self.buffer[start..start + bytes];
        // One share per thread, cut at the unit of the inner loop so that only the last share has a rest.
        let share = bytes.div_ceil(self.threads).next_multiple_of(PAGE_BYTES * STREAMS);
        self.pool.install(|| all.par_chunks(share).with_max_len(1).map(sum).reduce(|| 0, u64::wrapping_add))
    }
}

/// A pool of exactly `threads` threads.
///
/// # Errors
/// [`CeilingError::Threads`].
pub(crate) fn pool(threads: usize) -> Result<rayon::ThreadPool, CeilingError> {
    let failed = |why: String| CeilingError::Threads { threads, why };
    if threads == 0 {
        return Err(failed("at least 1 is needed".into()));
    }
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| failed(e.to_string()))
}

/// Memory whose every page is there.
fn buffer(bytes: usize) -> Result<MmapMut, CeilingError> {
    let mut buffer = MmapMut::map_anon(bytes).map_err(|why| CeilingError::Memory { bytes, why })?;
    // Huge pages are a wish: without them the reader is a little slower, and so are the kernels beside it.
    #[cfg(target_os = "linux")]
    let _ = buffer.advise(Advice::HugePage);
    // Written once, so that every page is really there (untouched pages all map to one page of zeros).
    buffer.fill(1);
    Ok(buffer)
}

/// Two buffers and threads that copy one into the other as fast as the system's `memcpy` can.
pub struct Copier {
    from: MmapMut,
    to: MmapMut,
    pool: rayon::ThreadPool,
    threads: usize,
}

impl Copier {
    /// A copier of `threads` threads whose working set, source and destination together, is at most `bytes`.
    ///
    /// # Errors
    /// As [`Reader::new`].
    pub fn new(threads: usize, bytes: usize) -> Result<Self, CeilingError> {
        let half = (bytes / 2).max(PAGE_BYTES);
        Ok(Self { pool: pool(threads)?, from: buffer(half)?, to: buffer(half)?, threads })
    }

    /// Copies half of a working set of `bytes` into its other half, `times` times in one dispatch, each thread its own
    /// share. Moves `times * bytes` (read and written; lines fetched only to be overwritten are not counted).
    pub fn copy_repeated(&mut self, bytes: usize, times: usize) {
        let half = (bytes / 2).clamp(1, self.from.len());
        let share = half.div_ceil(self.threads).next_multiple_of(PAGE_BYTES);
        let shares = self.from[..half].chunks(share).zip(self.to[..half].chunks_mut(share));
        let shares: Vec<_> = shares.map(|(from, to)| Mutex::new((from, to))).collect();
        self.pool.broadcast(|thread| {
            let Some(share) = shares.get(thread.index()) else { return };
            let mut share = share.lock().expect("each share has one thread, which cannot panic");
            let (from, to) = &mut *share;
            for _ in 0..times {
                to.copy_from_slice(black_box(from));
                black_box(&mut **to);
            }
        });
    }
}

/// Wrapping sum of a slice as little-endian u64 lines, four pages at a time; the rest byte by byte.
fn sum(part: &[u8]) -> u64 {
    const WORDS: usize = LINE_BYTES / 8;
    let mut lanes = [[0u64; WORDS]; STREAMS];
    let blocks = part.chunks_exact(PAGE_BYTES * STREAMS);
    let rest = blocks.remainder();
    for block in blocks {
        for at in (0..PAGE_BYTES).step_by(LINE_BYTES) {
            for (stream, lane) in lanes.iter_mut().enumerate() {
                let from = stream * PAGE_BYTES + at;
                let line: &[u8] = &block[from..from + LINE_BYTES];
                for (word, bytes) in lane.iter_mut().zip(line.chunks_exact(8)) {
                    let mut eight = [0; 8];
                    eight.copy_from_slice(bytes);
                    *word = word.wrapping_add(u64::from_le_bytes(eight));
                }
            }
        }
    }
    let tail = rest.iter().fold(0u64, |a, &b| a.wrapping_add(u64::from(b)));
    lanes.iter().flatten().fold(tail, |a, &b| a.wrapping_add(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read_once_whatever_the_threads_and_the_length() {
        const UNIT: usize = PAGE_BYTES * STREAMS;
        for threads in [1, 2, 3] {
            let reader = Reader::new(threads, 8 * UNIT).unwrap();
            for bytes in [1, LINE_BYTES, UNIT - 1, UNIT, UNIT + 1, 4 * UNIT, 8 * UNIT] {
                // Every byte is 1: whole units add one word of ones per 8 bytes, the rest adds one per byte.
                let share = bytes.div_ceil(threads).next_multiple_of(UNIT);
                let mut expected = 0u64;
                let mut left = bytes;
                while left > 0 {
                    let part = left.min(share);
                    expected = expected
                        .wrapping_add(((part / UNIT * UNIT / 8) as u64).wrapping_mul(0x0101_0101_0101_0101))
                        .wrapping_add((part % UNIT) as u64);
                    left -= part;
                }
                for piece in [0, 1, 7] {
                    assert_eq!(reader.read(piece, bytes), expected, "{threads} threads, {bytes} bytes, piece {piece}");
                }
            }
        }
    }

    #[test]
    fn repeated_reads_read_every_byte_each_time() {
        let reader = Reader::new(2, 1 << 18).unwrap();
        for bytes in [1 << 16, 1 << 18] {
            let once = reader.read(0, bytes);
            assert_ne!(once, 0);
            for times in [0, 1, 3] {
                assert_eq!(reader.read_repeated(bytes, times), once.wrapping_mul(times as u64));
            }
        }
    }

    #[test]
    fn copies_arrive_whole() {
        for threads in [1, 3] {
            let mut copier = Copier::new(threads, 1 << 18).unwrap();
            for (bytes, mark) in [(2, 7), (3 * PAGE_BYTES, 8), (1 << 18, 9)] {
                copier.from.fill(mark);
                copier.copy_repeated(bytes, 2);
                assert!(copier.to[..bytes / 2].iter().all(|&b| b == mark), "{threads} threads, {bytes} bytes");
                assert!(copier.to[bytes / 2..].iter().all(|&b| b != mark), "{threads} threads, {bytes} bytes");
            }
        }
    }

    #[test]
    fn zero_threads_is_an_error() {
        assert!(matches!(Reader::new(0, 1), Err(CeilingError::Threads { threads: 0, .. })));
        assert!(matches!(Copier::new(0, 1), Err(CeilingError::Threads { threads: 0, .. })));
    }

    #[test]
    fn pieces_do_not_overlap() {
        let reader = Reader::new(1, 1 << 20).unwrap();
        assert_eq!(reader.pieces(1 << 18), 4);
        assert_eq!(reader.pieces(3 << 18), 1);
        assert_eq!(reader.pieces(8 << 20), 1);
    }
}
