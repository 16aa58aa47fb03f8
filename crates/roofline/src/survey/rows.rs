//! The rows of a survey. In: its context; out: every operation, scheme and size with its time, shares and verdict.
//! Rows of one size run in turns, beside the bandwidth that they are compared with.
//! NOT here: the rules (verdict.rs).

use super::workload::{AppendCall, AttendCall, Size};
use super::{Context, SurveyError};
use crate::cost::Work;
use crate::memory::Reader;
use crate::report::{Arithmetic, Op, Row, tokens};
use crate::timer::{Contestant, Timing};
use crate::verdict::{self, Reruns, Shares, Verdict};
use kvant_kv::attend::{Split, TILE_KERNEL, TILE_VECTORS};
use kvant_kv::{Attention, Error, Scheme};
use std::cell::RefCell;
use std::hint::black_box;
use std::sync::Mutex;

/// Bytes of one timed read of cold memory: a run of about a millisecond, whatever the kernel's own size.
const COLD_READ_BYTES: usize = 32 << 20;
/// Bytes that one timed read of a hot working set moves at least, long beside the start of threads.
const HOT_READ_BYTES: usize = 64 << 20;
/// Shortest requests that a rerun cuts its bytes into.
const SHORTEST: usize = 256;
/// Requests that a rerun makes of one.
const CUT: usize = 4;

/// All rows.
pub(super) fn measure(c: &Context<'_>, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, SurveyError> {
    let mut rows = Vec::new();
    let asked = |op| c.settings.ops.contains(&op);
    for &kv_len in c.plan.attend.iter().filter(|_| asked(Op::Attend)) {
        progress(&format!("attention of one row over {} tokens", tokens(kv_len)));
        rows.extend(attend(c, kv_len)?);
    }
    for &(held, new_rows) in c.plan.prefill.iter().filter(|_| asked(Op::Prefill)) {
        progress(&format!("attention of {new_rows} rows over {} tokens", tokens(held + new_rows)));
        rows.extend(prefill(c, held, new_rows)?);
    }
    if asked(Op::Append) {
        progress("append");
        rows.extend(append(c)?);
    }
    // By operation, then scheme, then size: the order of tables.
    let place = |r: &Row| c.settings.schemes.iter().position(|s| s.to_string() == r.scheme);
    rows.sort_by_key(|r| (r.op, place(r)));
    Ok(rows)
}

/// A timed read of cold memory beside the kernels: the whole buffer, piece by piece, round by round.
pub(super) fn cold_reader(reader: &Reader, cold_bytes: usize) -> (usize, Contestant<'_, Error>) {
    let bytes = COLD_READ_BYTES.min(cold_bytes / 4);
    let contestant = Contestant::new(reader.pieces(bytes), move |piece| {
        black_box(reader.read(piece, bytes));
        Ok(())
    });
    (bytes, contestant)
}

/// A timed call.
pub(super) fn contestant<'a>(call: &'a AttendCall<'_>, attention: &'a Mutex<Attention>) -> Contestant<'a, Error> {
    let mut out = vec![0.0; call.out_len()];
    Contestant::new(call.copies(), move |copy| call.run(attention, copy, &mut out))
}

fn attend(c: &Context<'_>, kv_len: usize) -> Result<Vec<Row>, SurveyError> {
    let size = Size { batch: 1, kv_len, new_rows: 1 };
    let calls = calls(c, size, |bytes| c.copies(bytes))?;
    let reader = Reader::new(c.settings.threads, c.plan.cold_bytes)?;
    let (read_bytes, read) = cold_reader(&reader, c.plan.cold_bytes);
    let mut contestants = vec![read];
    contestants.extend(calls.iter().map(|call| contestant(call, &c.attention)));
    let timings = c.time(&mut contestants)?;
    drop(contestants);
    let read_gbps = read_bytes as f64 / timings[0].min_ns as f64;
    let mut rows = Vec::new();
    for (call, &timing) in calls.iter().zip(&timings[1..]) {
        let mut row = row(c, Op::Attend, call, timing, Ceiling { gbps: read_gbps, what: "read, cold".into() }, true);
        row.verdict = judge(c, call, &row)?;
        rows.push(row);
    }
    Ok(rows)
}

/// Runs a row again in other ways, in turns with itself.
fn explain(c: &Context<'_>, call: &AttendCall<'_>, row: &Row) -> Result<Verdict, SurveyError> {
    let decode = call.size.new_rows == 1;
    let more = match more_work(call.size) {
        Some(size) => Some(AttendCall::new(c.settings.shape, call.scheme, size, call.copies(), c.data)?),
        None => None,
    };
    let mut split = Attention::new(c.settings.threads, Some(&row.kernel))?;
    split.set_split(Split { ranges_per_unit: Some(1), ..Split::default() });
    let split = Mutex::new(split);
    let mut contestants = vec![contestant(call, &c.attention)];
    contestants.extend(more.iter().map(|more| contestant(more, &c.attention)));
    // Many query rows are never cut by key range (their tiles are work enough), and on one thread they take long.
    contestants.extend(decode.then(|| contestant(call, &split)));
    contestants.extend(decode.then(|| contestant(call, &c.one_thread_attention)));
    let timings = c.time(&mut contestants)?;
    drop(contestants);
    let speed = |t: &Timing, work: Work| work.ops as f64 / t.min_ns as f64;
    let base = speed(&timings[0], call.work);
    let cut = more.iter().zip(&timings[1..]).map(|(more, t)| speed(t, more.work) / base);
    let finer = decode.then(|| speed(&timings[timings.len() - 2], call.work) / base);
    let one = decode.then(|| speed(&timings[timings.len() - 1], call.work));
    let reruns = Reruns {
        more_work_in_flight: cut.chain(finer).reduce(f64::max),
        over_one_thread: one.filter(|_| c.settings.threads > 1).map(|one| base / one),
        hot_over_cold: hot_over_cold(c, call, row, timings[0].min_ns)?,
    };
    Ok(verdict::by_reruns(shares(row), reruns, row.threads))
}

/// A size with more independent work: one row's request cut into several at the same bytes, or many rows of one request as
/// rows of several that hold as much before them, at about the same operations. None where the pieces would be too short.
fn more_work(size: Size) -> Option<Size> {
    let Size { batch, kv_len, new_rows } = size;
    match new_rows {
        1 => (kv_len / CUT >= SHORTEST).then_some(Size { batch: batch * CUT, kv_len: kv_len / CUT, new_rows }),
        _ => {
            let rows = new_rows / CUT;
            (rows > 0).then_some(Size { batch: batch * CUT, kv_len: kv_len - new_rows + rows, new_rows: rows })
        }
    }
}

/// The same call over one copy again and again, for a cold row whose data can stay in the last-level cache.
fn hot_over_cold(c: &Context<'_>, call: &AttendCall<'_>, row: &Row, cold_ns: u64) -> Result<Option<f64>, SurveyError> {
    if !row.cold || c.last_cache_bytes.is_none_or(|bytes| call.work.bytes > bytes / 2) {
        return Ok(None);
    }
    let mut out = vec![0.0; call.out_len()];
    let hot = c.time(&mut [Contestant::new(1, |_| call.run(&c.attention, 0, &mut out))])?;
    Ok(Some(hot[0].min_ns as f64 / cold_ns as f64))
}

fn prefill(c: &Context<'_>, held: usize, new_rows: usize) -> Result<Vec<Row>, SurveyError> {
    let size = Size { batch: 1, kv_len: held + new_rows, new_rows };
    let calls = calls(c, size, |_| 1)?;
    let largest = calls.iter().map(|call| call.work.bytes).max().unwrap_or(0);
    let reader = Reader::new(c.settings.threads, largest)?;
    let mut contestants = Vec::new();
    for call in &calls {
        let (reader, bytes) = (&reader, call.work.bytes);
        contestants.push(contestant(call, &c.attention));
        contestants.push(Contestant::new(1, move |_| {
            black_box(reader.read_repeated(bytes, repeats(bytes)));
            Ok(())
        }));
    }
    let timings = c.time(&mut contestants)?;
    drop(contestants);
    let mut rows = Vec::new();
    for (call, timing) in calls.iter().zip(timings.chunks_exact(2)) {
        let bytes = call.work.bytes;
        let gbps = (bytes * repeats(bytes)) as f64 / timing[1].min_ns as f64;
        let what = format!("read, {} again and again", crate::report::bytes(bytes));
        let mut row = row(c, Op::Prefill, call, timing[0], Ceiling { gbps, what }, false);
        row.pct_of_matmul = Some(100.0 * row.gops / c.ceilings.matmul.gops);
        row.verdict = judge(c, call, &row)?;
        rows.push(row);
    }
    Ok(rows)
}

/// The verdict on a row of attention, with reruns where its shares do not explain it.
fn judge(c: &Context<'_>, call: &AttendCall<'_>, row: &Row) -> Result<Verdict, SurveyError> {
    match verdict::by_shares(shares(row)) {
        Some(verdict) => Ok(verdict),
        None => explain(c, call, row),
    }
}

fn append(c: &Context<'_>) -> Result<Vec<Row>, SurveyError> {
    let mut rows = Vec::new();
    for &scheme in &c.settings.schemes {
        let new =
            |batch, held, rows| AppendCall::new(c.settings.shape, scheme, batch, held, rows, c.data).map(RefCell::new);
        // First the smallest call there is, then the plan's.
        let mut calls = vec![new(1, 0, 1)?];
        for &(batch, held, new_rows) in c.plan.append {
            calls.push(new(batch, held, new_rows)?);
        }
        let contestants = calls.iter().map(|call| {
            Contestant::new(1, move |_| call.borrow_mut().run()).with_reset(move |_| call.borrow_mut().undo())
        });
        let timings = c.time(&mut contestants.collect::<Vec<_>>())?;
        for ((call, &timing), &(batch, held, new_rows)) in calls.iter().zip(&timings).skip(1).zip(c.plan.append) {
            let work = call.borrow().work;
            let gbps = c.one_thread.copy_at(work.bytes);
            let size = Size { batch, kv_len: held + new_rows, new_rows };
            let measured = Measured {
                op: Op::Append,
                scheme,
                size,
                work,
                timing,
                cold: false,
                // The cache quantizes and packs on the thread that calls it.
                threads: 1,
                kernel: kvant_kv::append::kernel().to_string(),
                floor_ns: timings[0].min_ns,
            };
            let what = format!("copy, {}, 1 thread", crate::report::bytes(work.bytes));
            let mut row = measured.row(c, Ceiling { gbps, what });
            let f16_bytes = batch * new_rows * 2 * c.settings.shape.row_len() * 2;
            row.input_gbps = Some(f16_bytes as f64 / timing.min_ns as f64);
            row.verdict = verdict::by_shares(shares(&row))
                .unwrap_or_else(|| verdict::by_reruns(shares(&row), Reruns::default(), 1));
            rows.push(row);
        }
    }
    Ok(rows)
}

/// One call per scheme; `copies` says how many copies so many bytes need.
fn calls<'a>(
    c: &Context<'a>,
    size: Size,
    copies: impl Fn(usize) -> usize + Sync,
) -> Result<Vec<AttendCall<'a>>, SurveyError> {
    let shape = c.settings.shape;
    let fill = |scheme: Scheme| {
        let bytes = Work::attend(shape, scheme, size.batch, size.kv_len, size.new_rows).bytes;
        AttendCall::new(shape, scheme, size, copies(bytes), c.data)
    };
    // Filling runs on one thread per cache, and takes longer than measuring: schemes are filled side by side.
    std::thread::scope(|scope| {
        let fill = &fill;
        let mut calls = Vec::new();
        for some in c.settings.schemes.chunks(c.settings.threads) {
            let threads: Vec<_> = some.iter().map(|&scheme| scope.spawn(move || fill(scheme))).collect();
            for thread in threads {
                calls.push(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            }
        }
        Ok(calls)
    })
}

/// Times that a hot working set is read in one run.
fn repeats(bytes: usize) -> usize {
    HOT_READ_BYTES.div_ceil(bytes.max(1)).max(1)
}

/// The bandwidth of a row's working set.
struct Ceiling {
    gbps: f64,
    what: String,
}

/// What was measured of a row.
struct Measured {
    op: Op,
    scheme: Scheme,
    size: Size,
    work: Work,
    timing: Timing,
    cold: bool,
    threads: usize,
    kernel: String,
    floor_ns: u64,
}

fn row(c: &Context<'_>, op: Op, call: &AttendCall<'_>, timing: Timing, ceiling: Ceiling, cold: bool) -> Row {
    let floor = c.floors.iter().find(|f| f.0 == call.scheme).map_or(u64::MAX, |f| f.1);
    let measured = Measured {
        op,
        scheme: call.scheme,
        size: call.size,
        work: call.work,
        timing,
        cold,
        threads: c.settings.threads,
        kernel: c.kernel(),
        floor_ns: floor,
    };
    measured.row(c, ceiling)
}

impl Measured {
    /// The row, its verdict still open.
    fn row(self, c: &Context<'_>, ceiling: Ceiling) -> Row {
        let ns = self.timing.min_ns as f64;
        let (gbps, gops) = (self.work.bytes as f64 / ns, self.work.ops as f64 / ns);
        let arithmetic = match self.op {
            // The quantizer's formula is f32, whatever its kernel is called.
            Op::Append => Arithmetic::Fma,
            Op::Attend | Op::Prefill => {
                let vectors = self.size.new_rows * c.settings.shape.gqa_ratio();
                arithmetic(&self.kernel, self.scheme, vectors)
            }
        };
        let ceilings = if self.threads == 1 { &c.one_thread } else { &c.ceilings };
        let peak_gops = match arithmetic {
            Arithmetic::Fma => ceilings.fma.gops,
            Arithmetic::Int8Dot => ceilings.int8_dot.gops,
            Arithmetic::Int8Tiles => ceilings.int8_tiles.as_ref().unwrap_or(&ceilings.int8_dot).gops,
        };
        Row {
            op: self.op,
            scheme: self.scheme.to_string(),
            kernel: self.kernel,
            threads: self.threads,
            batch: self.size.batch,
            kv_len: self.size.kv_len,
            new_rows: self.size.new_rows,
            cold: self.cold,
            min_ns: self.timing.min_ns,
            median_ns: self.timing.median_ns,
            rounds: self.timing.rounds,
            bytes: self.work.bytes,
            ops: self.work.ops,
            intensity: self.work.intensity(),
            gbps,
            gops,
            ceiling_gbps: ceiling.gbps,
            ceiling: ceiling.what,
            pct_of_bandwidth: 100.0 * gbps / ceiling.gbps,
            arithmetic,
            peak_gops,
            pct_of_compute: 100.0 * gops / peak_gops,
            pct_of_matmul: None,
            input_gbps: None,
            floor_ns: self.floor_ns,
            times_floor: ns / self.floor_ns as f64,
            verdict: Verdict { bound: verdict::Bound::Unexplained, why: "not judged".to_string() },
        }
    }
}

/// The peak that fits a kernel, `vectors` query vectors on a kv head: over packed codes every kernel of an instruction set
/// multiplies integers (of 8 bits, or of 16 in AVX2, which has no faster peak than this one), all else is f32.
fn arithmetic(kernel: &str, scheme: Scheme, vectors: usize) -> Arithmetic {
    match kernel {
        _ if scheme == Scheme::F16 => Arithmetic::Fma,
        "portable" => Arithmetic::Fma,
        TILE_KERNEL if vectors >= TILE_VECTORS => Arithmetic::Int8Tiles,
        _ => Arithmetic::Int8Dot,
    }
}

fn shares(row: &Row) -> Shares {
    Shares { pct_of_bandwidth: row.pct_of_bandwidth, pct_of_compute: row.pct_of_compute, times_floor: row.times_floor }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compared_with_the_peak_of_their_arithmetic() {
        let k4 = "k4v4g64".parse().unwrap();
        assert_eq!(arithmetic("avx512-amx", k4, 8), Arithmetic::Int8Tiles);
        assert_eq!(arithmetic("avx512-amx", k4, 4), Arithmetic::Int8Dot);
        assert_eq!(arithmetic("avx512-amx", Scheme::F16, 8), Arithmetic::Fma);
        assert_eq!(arithmetic("avx512-vnni", k4, 8), Arithmetic::Int8Dot);
        assert_eq!(arithmetic("avx512-vnni", Scheme::F16, 4), Arithmetic::Fma);
        assert_eq!(arithmetic("avx2", k4, 4), Arithmetic::Int8Dot);
        assert_eq!(arithmetic("avx2", Scheme::F16, 4), Arithmetic::Fma);
        assert_eq!(arithmetic("portable", k4, 8), Arithmetic::Fma);
    }

    #[test]
    fn reruns_have_more_independent_work_and_as_many_operations() {
        let size = |batch, kv_len, new_rows| Size { batch, kv_len, new_rows };
        let cut = more_work(size(1, 4096, 1)).unwrap();
        assert_eq!((cut.batch, cut.kv_len, cut.new_rows), (4, 1024, 1));
        assert!(more_work(size(1, 1023, 1)).is_none() && more_work(size(1, 1024, 1)).is_some());
        let many = more_work(size(1, 600, 64)).unwrap();
        assert_eq!((many.batch, many.kv_len, many.new_rows), (4, 552, 16));
        assert!(more_work(size(1, 600, 3)).is_none());
    }
}
