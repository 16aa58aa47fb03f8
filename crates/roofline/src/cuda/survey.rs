//! The roofline of a GPU: its ceilings, and decode attention, packing and attention of prompts beside them. In: a card, a shape,
//! schemes; out: rows, each with its share of both ceilings and what bounds it.
//! NOT here: the clock (mod.rs), counts of bytes and operations (cost.rs), printing.

use super::{Captured, GpuReader, LAUNCHES, interleave};
use crate::cost::{Cost, Work};
use crate::timer::COLD_BYTES;
use half::{bf16, f16};
use kvant_kv::cuda::cudarc::cublaslt::{self, CudaBlasLT, Matmul, MatmulConfig};
use kvant_kv::cuda::cudarc::driver::CudaSlice;
use kvant_kv::cuda::{Gpu, GpuCache, GpuOptions, OutFormat};
use kvant_kv::{Arm, Error, LayerConfig, LayerShape, Scheme};
use serde::Serialize;
use std::sync::Arc;

/// What bounds a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The card's memory: at least 85 % of what a plain read of as many bytes reaches.
    Memory,
    /// Its matrix units: at least 85 % of a large product of bf16.
    Matrix,
    /// Beginnings and ends of launches: it takes no more than four times an empty launch and a read of its bytes together.
    Launch,
    /// Software: neither ceiling is near, so instructions or waiting are what takes the time.
    Software,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Limit::Memory => "memory",
            Limit::Matrix => "matrix units",
            Limit::Launch => "launch",
            Limit::Software => "software",
        })
    }
}

/// One operation of one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// `attend`, `append` or `prefill`.
    pub op: &'static str,
    /// Canonical text.
    pub scheme: String,
    /// Sequences.
    pub batch: usize,
    /// Tokens of each, the rows of the call included.
    pub kv_len: usize,
    /// New tokens of each.
    pub rows: usize,
    /// Fewest bytes that it must move.
    pub bytes: usize,
    /// Operations that it must do.
    pub ops: usize,
    /// Fastest and middle time of a launch.
    pub min_ns: u64,
    /// Middle one.
    pub median_ns: u64,
    /// Of the read ceiling at as many bytes, in percent.
    pub pct_of_read: f64,
    /// Of the matrix units' peak, in percent.
    pub pct_of_matrix: f64,
    /// What bounds it.
    pub limit: Limit,
}

/// Ceilings and rows of a card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Survey {
    /// Its name.
    pub card: String,
    /// Heads of every row.
    pub q_heads: usize,
    /// See above.
    pub kv_heads: usize,
    /// See above.
    pub head_dim: usize,
    /// Bytes per nanosecond of a plain read, by size in bytes.
    pub read: Vec<(usize, f64)>,
    /// Operations per nanosecond of a product of bf16, 8192 x 8192 x 8192, over numbers of all sizes.
    pub matrix_gops: f64,
    /// An empty launch within a graph.
    pub launch_ns: u64,
    /// Operations beside them.
    pub rows: Vec<Row>,
    /// Sizes are tiny: it runs, and its figures say nothing.
    pub quick: bool,
}

/// What a survey looks at.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSettings {
    /// Heads.
    pub shape: LayerShape,
    /// Schemes.
    pub schemes: Vec<Scheme>,
    /// Tiny sizes, few rounds.
    pub quick: bool,
}

/// Rounds of every row.
const ROUNDS: usize = 20;
/// Shares of a ceiling that count as reaching it.
const REACHED: f64 = 85.0;

/// Measures a card. `progress` hears what comes next.
///
/// # Errors
/// Those of the operations; [`Error::Gpu`] without cublasLt.
pub fn survey(gpu: &Arc<Gpu>, settings: &GpuSettings, progress: &mut dyn FnMut(&str)) -> Result<Survey, Error> {
    let rounds = if settings.quick { 3 } else { ROUNDS };
    progress("the card's ceilings");
    let sizes: &[usize] =
        if settings.quick { &[1 << 22] } else { &[1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 32] };
    let largest = sizes[sizes.len() - 1].max(if settings.quick { 1 << 24 } else { COLD_BYTES });
    let reader = GpuReader::new(gpu, largest)?;
    let mut read = Vec::new();
    for &bytes in sizes {
        read.push((bytes, bytes as f64 / read_ns(gpu, &reader, largest, bytes, rounds)?));
    }
    let launch_ns = read_ns(gpu, &reader, largest, 16, rounds)?.round() as u64;
    let matrix_gops = matrix_gops(gpu, if settings.quick { 512 } else { 8192 }, rounds)?;
    let shape = settings.shape;
    let mut survey = Survey {
        card: gpu.name().to_string(),
        q_heads: shape.q_heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        read,
        matrix_gops,
        launch_ns,
        rows: Vec::new(),
        quick: settings.quick,
    };
    // (operation, batch, tokens before, new tokens)
    let calls: &[(&str, usize, usize, usize)] = match settings.quick {
        true => &[("attend", 1, 400, 1), ("append", 1, 256, 128), ("prefill", 1, 256, 64)],
        false => &[
            ("attend", 1, 4095, 1),
            ("attend", 1, 65_535, 1),
            ("attend", 32, 4095, 1),
            ("attend", 64, 16_383, 1),
            ("append", 1, 4096, 2048),
            ("prefill", 1, 0, 2048),
            ("prefill", 1, 6144, 2048),
            ("prefill", 1, 32_768, 64),
            ("prefill", 1, 32_768, 1024),
        ],
    };
    for &scheme in &settings.schemes {
        for &(op, batch, before, rows) in calls {
            progress(&format!("{op} {scheme}, {batch} x {}", before + rows));
            let (timing, work) = match op {
                "attend" => decode(gpu, shape, scheme, (batch, before + 1), rounds)?,
                _ => prompt(gpu, shape, scheme, (before, rows), op == "append", rounds)?,
            };
            let floor = read_ns(gpu, &reader, largest, work.bytes.min(largest), rounds)?;
            let ns = timing.median_ns as f64;
            let pct_of_read = (100.0 * floor / ns).min(100.0);
            let pct_of_matrix = 100.0 * work.ops as f64 / ns / matrix_gops;
            let limit = match () {
                () if pct_of_read >= REACHED => Limit::Memory,
                () if pct_of_matrix >= REACHED => Limit::Matrix,
                () if ns <= 4.0 * (launch_ns as f64 + floor) && ns < 20_000.0 => Limit::Launch,
                () => Limit::Software,
            };
            let scheme = scheme.to_string();
            let (min_ns, median_ns) = (timing.min_ns, timing.median_ns);
            let Work { bytes, ops } = work;
            let kv_len = before + rows;
            let row = Row {
                op,
                scheme,
                batch,
                kv_len,
                rows,
                bytes,
                ops,
                min_ns,
                median_ns,
                pct_of_read,
                pct_of_matrix,
                limit,
            };
            survey.rows.push(row);
        }
    }
    Ok(survey)
}

/// Nanoseconds of a plain read of so many bytes.
fn read_ns(gpu: &Arc<Gpu>, reader: &GpuReader, buffer: usize, bytes: usize, rounds: usize) -> Result<f64, Error> {
    let places = (buffer / bytes.max(16)).max(1);
    let read = Captured::new(gpu, LAUNCHES, |i| reader.launch(i % places * bytes, bytes))?;
    Ok(interleave(&[&read], rounds)?[0].median_ns as f64)
}

/// Operations per nanosecond of a large product.
fn matrix_gops(gpu: &Arc<Gpu>, n: usize, rounds: usize) -> Result<f64, Error> {
    let failed = |e: cublaslt::result::CublasError| Error::Gpu { why: format!("cublasLt: {e}") };
    // SAFETY: opens and closes a shared library, whose constructors are the vendor's.
    if !unsafe { cublaslt::sys::is_culib_present() } {
        return Err(Error::Gpu {
            why: "libcublasLt cannot be opened: is the folder that has it in LD_LIBRARY_PATH?".into(),
        });
    }
    let library = CudaBlasLT::new(gpu.stream().clone()).map_err(failed)?;
    // Products of zeros run faster than those of numbers.
    let numbers = |salt: f32| -> Vec<bf16> {
        (0..n * n).map(|i| bf16::from_f32(((i as f32 * 0.618_034 + salt) % 2.0) - 1.0)).collect()
    };
    let (a, b) = (gpu.upload(&numbers(0.0))?, gpu.upload(&numbers(0.7))?);
    let mut c = gpu.zeros::<bf16>(n * n)?;
    let side = n as u64;
    let config = || MatmulConfig {
        transa: true,
        transb: false,
        transc: false,
        m: side,
        n: side,
        k: side,
        alpha: 1.0,
        lda: side as i64,
        ldb: side as i64,
        beta: 0.0,
        ldc: side as i64,
        stride_a: None,
        stride_b: None,
        stride_c: None,
        stride_bias: None,
        batch_size: None,
    };
    let product = Captured::new(gpu, 4, |_| {
        // SAFETY: all three are `n * n` numbers.
        unsafe { library.matmul(config(), &a, &b, &mut c, None, None) }.map_err(failed)
    })?;
    let ns = interleave(&[&product], rounds)?[0].median_ns as f64;
    Ok(2.0 * (n as f64).powi(3) / ns)
}

fn cache(
    gpu: &Arc<Gpu>,
    shape: LayerShape,
    scheme: Scheme,
    (slots, tokens, layers): (usize, usize, usize),
) -> Result<GpuCache, Error> {
    let config = LayerConfig { shape, scheme, visible: None };
    let options = GpuOptions {
        slots,
        max_tokens: tokens,
        bytes: usize::MAX,
        out: OutFormat::Bf16,
        softcap: None,
        invariant: false,
    };
    GpuCache::new(gpu, &vec![config; layers], Arm::of(scheme), options)
}

/// Numbers about as large as keys and values are.
fn numbers(gpu: &Gpu, count: usize) -> Result<CudaSlice<f16>, Error> {
    let of = |i: usize| f16::from_f32((i as f32 * 0.7317).sin() * 1.5);
    gpu.upload(&(0..count).map(of).collect::<Vec<_>>())
}

/// A decode step's attention.
fn decode(
    gpu: &Arc<Gpu>,
    shape: LayerShape,
    scheme: Scheme,
    (batch, kv_len): (usize, usize),
    rounds: usize,
) -> Result<(crate::Timing, Work), Error> {
    let bytes = batch * Cost::of(shape, scheme, kv_len).bytes();
    let layers = COLD_BYTES.div_ceil(bytes).clamp(1, 96);
    let mut cache = cache(gpu, shape, scheme, (batch, kv_len, layers))?;
    let slots = (0..batch).map(|_| cache.add(kv_len)).collect::<Result<Vec<_>, _>>()?;
    let filled = (kv_len - 1).min(2048);
    let rows = numbers(gpu, filled * shape.row_len())?;
    cache.begin_prefill(slots[0], filled)?;
    cache.append_prefill(0, &rows, &rows)?;
    cache.end_prefill();
    cache.spread(slots[0], true)?;
    slots.iter().try_for_each(|&slot| cache.set_len(slot, kv_len - 1))?;
    cache.begin_decode(&slots, batch)?;
    cache.pack_due()?;
    let n = batch * shape.q_heads * shape.head_dim;
    let (q, mut out) = (numbers(gpu, n)?, gpu.zeros::<bf16>(n)?);
    let scale = (shape.head_dim as f32).powf(-0.5);
    let launches = LAUNCHES.max(layers);
    let captured = Captured::new(gpu, launches, |i| cache.attend(i % layers, &q, &mut out, scale))?;
    let work = Work::attend(shape, scheme, batch, kv_len, 1);
    // Queries are f16 and results bf16 here, not f32.
    let narrow = Work { bytes: work.bytes - 4 * n, ..work };
    Ok((interleave(&[&captured], rounds)?[0], narrow))
}

/// A prompt's part behind `before` tokens: its attention, or storing it.
fn prompt(
    gpu: &Arc<Gpu>,
    shape: LayerShape,
    scheme: Scheme,
    (before, rows): (usize, usize),
    append: bool,
    rounds: usize,
) -> Result<(crate::Timing, Work), Error> {
    let kv_len = before + rows;
    let mut cache = cache(gpu, shape, scheme, (1, kv_len, 1))?;
    let slot = cache.add(kv_len)?;
    let first = before.min(2048);
    if before > 0 {
        let held = numbers(gpu, first * shape.row_len())?;
        cache.begin_prefill(slot, first)?;
        cache.append_prefill(0, &held, &held)?;
        cache.end_prefill();
        cache.spread(slot, true)?;
        cache.set_len(slot, before)?;
    }
    let x = numbers(gpu, rows * shape.row_len())?;
    let n = rows * shape.q_heads * shape.head_dim;
    let (q, mut out) = (numbers(gpu, n)?, gpu.zeros::<bf16>(n)?);
    cache.begin_prefill(slot, rows)?;
    cache.append_prefill(0, &x, &x)?;
    let scale = (shape.head_dim as f32).powf(-0.5);
    let captured = match append {
        true => Captured::new(gpu, 4, |_| cache.append_prefill(0, &x, &x))?,
        false => Captured::new(gpu, 4, |_| cache.attend_prefill(0, &q, &mut out, scale))?,
    };
    let timing = interleave(&[&captured], rounds)?[0];
    let work = match append {
        // Rows are f16 here, not f32.
        true => {
            let work = Work::append(shape, scheme, 1, before, rows);
            Work { bytes: work.bytes - 2 * 2 * rows * shape.row_len(), ..work }
        }
        false => {
            let work = Work::attend(shape, scheme, 1, kv_len, rows);
            Work { bytes: work.bytes - 4 * n, ..work }
        }
    };
    Ok((timing, work))
}
