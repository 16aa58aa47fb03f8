//! Caches to measure on. In: a scheme and sizes; out: caches with as many copies of the data as being cold takes, and
//! calls of kvant-kv over one copy. NOT here: the clock (timer.rs), verdicts.

use super::SurveyError;
use crate::cost::Work;
use kvant_kv::attend::reference::{attend_cache_f64, relative_error};
use kvant_kv::{Arm, AttendOptions, Attention, Cache, Error, LayerConfig, LayerShape, Rows, Scheme, SeqId};
use std::sync::{Mutex, PoisonError};

/// Tokens appended at a time while a cache is filled.
const FILL_TOKENS: usize = 512;

/// Keys, values and queries that every workload takes its rows from.
pub(super) struct Data {
    row_len: usize,
    tokens: usize,
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
}

impl Data {
    /// `tokens` different rows of keys and values, and `q_rows` of queries.
    pub(super) fn new(shape: LayerShape, tokens: usize, q_rows: usize) -> Self {
        let mut state = 0x6b76_616e_7401_u64;
        // A sum of three uniform numbers is close enough to normal; splitmix64 makes them.
        let mut uniform = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
        };
        let mut fill =
            |n: usize| -> Vec<f32> { (0..n).map(|_| 2.0 * (uniform() + uniform() + uniform() - 1.5)).collect() };
        let row_len = shape.row_len();
        let (k, v) = (fill(tokens * row_len), fill(tokens * row_len));
        Self { row_len, tokens, k, v, q: fill(q_rows * shape.q_heads * shape.head_dim) }
    }

    /// `n` rows of keys and values (at most as many as there are), from another place for another `from`.
    fn rows(&self, from: usize, n: usize) -> (&[f32], &[f32]) {
        let start = from % (self.tokens - n + 1);
        let span = start * self.row_len..(start + n) * self.row_len;
        (&self.k[span.clone()], &self.v[span])
    }
}

/// Sizes of one attention call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub batch: usize,
    /// Tokens that each request holds, the new ones included.
    pub kv_len: usize,
    /// New rows of each request.
    pub new_rows: usize,
}

/// Attention over one scheme's cache, in several copies.
pub(super) struct AttendCall<'a> {
    pub scheme: Scheme,
    pub size: Size,
    pub work: Work,
    shape: LayerShape,
    data: &'a Data,
    cache: Cache,
    copies: Vec<Vec<Rows>>,
}

impl<'a> AttendCall<'a> {
    /// Fills the cache. `copies` of the batch are kept apart in memory.
    pub(super) fn new(
        shape: LayerShape,
        scheme: Scheme,
        size: Size,
        copies: usize,
        data: &'a Data,
    ) -> Result<Self, SurveyError> {
        let mut cache = new_cache(shape, scheme)?;
        let Size { batch, kv_len, new_rows } = size;
        let mut all = Vec::with_capacity(copies);
        for copy in 0..copies {
            let mut entries = Vec::with_capacity(batch);
            for request in 0..batch {
                let seq = cache.add_sequence();
                // One new row sees what is left after its own commit; many need the f16 rows that the oldest still sees.
                let held = if new_rows == 1 { kv_len } else { kv_len - new_rows };
                fill(&mut cache, seq, held, 31 * copy + 7 * request, data)?;
                if held < kv_len {
                    let rows = [Rows { seq, rows: new_rows }];
                    let (k, v) = data.rows(copy, new_rows);
                    cache.append(0, &rows, k, v)?;
                }
                entries.push(Rows { seq, rows: new_rows });
            }
            all.push(entries);
        }
        let work = Work::attend(shape, scheme, batch, kv_len, new_rows);
        Ok(Self { scheme, size, work, shape, data, cache, copies: all })
    }

    /// Copies there are.
    pub(super) fn copies(&self) -> usize {
        self.copies.len()
    }

    /// Numbers of the call's output.
    pub(super) fn out_len(&self) -> usize {
        self.size.batch * self.size.new_rows * self.shape.q_heads * self.shape.head_dim
    }

    /// One call over one copy.
    pub(super) fn run(&self, attention: &Mutex<Attention>, copy: usize, out: &mut [f32]) -> Result<(), Error> {
        let mut attention = attention.lock().unwrap_or_else(PoisonError::into_inner);
        let options = AttendOptions::new(self.shape.head_dim);
        attention.attend(&self.cache, 0, &self.copies[copy], &self.data.q[..out.len()], out, &options)
    }

    /// Relative L2 distance to the f64 reference over the first copy.
    pub(super) fn relative_error(&self, attention: &Mutex<Attention>) -> Result<f64, SurveyError> {
        let mut out = vec![f32::NAN; self.out_len()];
        self.run(attention, 0, &mut out)?;
        let options = AttendOptions::new(self.shape.head_dim);
        let exact = attend_cache_f64(&self.cache, 0, &self.copies[0], &self.data.q[..out.len()], &options)?;
        Ok(relative_error(&out, &exact))
    }
}

/// Appending to one scheme's cache, and undoing it.
pub(super) struct AppendCall {
    pub work: Work,
    cache: Cache,
    entries: Vec<Rows>,
    held: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl AppendCall {
    /// `batch` sequences of `held` tokens, ready to take `rows` more each.
    pub(super) fn new(
        shape: LayerShape,
        scheme: Scheme,
        batch: usize,
        held: usize,
        rows: usize,
        data: &Data,
    ) -> Result<Self, SurveyError> {
        let mut cache = new_cache(shape, scheme)?;
        let mut entries = Vec::with_capacity(batch);
        for request in 0..batch {
            let seq = cache.add_sequence();
            fill(&mut cache, seq, held, 7 * request, data)?;
            entries.push(Rows { seq, rows });
        }
        // The cache gives memory back to the system when all of a piece is free. Neighbours that grew together with the
        // measured sequence keep every piece alive, so that the clock sees appending and not the system's page faults.
        let neighbour = cache.add_sequence();
        for start in (0..rows).step_by(FILL_TOKENS / 8) {
            let n = (rows - start).min(FILL_TOKENS / 8);
            let (k, v) = data.rows(start, n);
            for seq in [entries[0].seq, neighbour] {
                cache.append(0, &[Rows { seq, rows: n }], k, v)?;
            }
        }
        cache.trim(entries[0].seq, held)?;
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for request in 0..batch {
            let (rows_k, rows_v) = data.rows(request, rows);
            k.extend_from_slice(rows_k);
            v.extend_from_slice(rows_v);
        }
        let work = Work::append(shape, scheme, batch, held, rows);
        Ok(Self { work, cache, entries, held, k, v })
    }

    /// Appends the rows, uncommitted.
    pub(super) fn run(&mut self) -> Result<(), Error> {
        self.cache.append(0, &self.entries, &self.k, &self.v)
    }

    /// Drops them again.
    pub(super) fn undo(&mut self) -> Result<(), Error> {
        self.entries.iter().try_for_each(|entry| self.cache.trim(entry.seq, self.held))
    }
}

fn new_cache(shape: LayerShape, scheme: Scheme) -> Result<Cache, Error> {
    Cache::new(&[LayerConfig { shape, scheme, visible: None }], Arm::of(scheme))
}

/// Appends and commits `n` tokens.
fn fill(cache: &mut Cache, seq: SeqId, n: usize, from: usize, data: &Data) -> Result<(), Error> {
    for start in (0..n).step_by(FILL_TOKENS) {
        let rows = (n - start).min(FILL_TOKENS).min(data.tokens);
        let batch = [Rows { seq, rows }];
        let (k, v) = data.rows(from + start, rows);
        cache.append(0, &batch, k, v)?;
        cache.commit(0, &batch)?;
    }
    Ok(())
}
