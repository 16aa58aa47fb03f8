//! Products with weight matrices. In: f32 rows; out: f32 rows, one slice of them per matrix.
//! NOT here: reading weights from a file (gguf.rs), threads (threads.rs).
//!
//! Formula: `out[r][j] = sum_i w_hat[j][i] * x[r][i]`, with `w_hat` the weight as Q8_0 (8 bits, one f16 scale per 32).
//!
//! Way: candle-core's product of Q8_0 weights. On x86-64 with VNNI it is fast only when `k` is a multiple of 256 and
//! `n` of 16, so matrices are padded with zeros. That path rounds every 256 activations to 8 bits, which alone costs a
//! KL divergence of .020 on SmolLM2-135M. So each row goes in twice: once rounded to what 8 bits hold exactly, once as
//! the rounding error, itself rounded to 8 bits; the two results are added. That is about 16 bits per activation.
//! Where the fast path is absent, candle rounds per 32 activations, and so does the split here.
//!
//! A row's result depends on that row only: each output is one sum in an order fixed by `k`, whatever the number of
//! rows or threads.

use crate::Error;
use candle_core::quantized::k_quants::{BlockQ8_0, GgmlType};
use candle_core::quantized::{QStorage, QTensor};
use candle_core::{CustomOp1, Device, Storage, Tensor};
use rayon::prelude::*;
use std::ops::Range;

/// Values that candle's fast path rounds together, and the multiple `k` is padded to.
const K_BLOCK: usize = 256;
/// Values of one Q8_0 block.
const Q8_BLOCK: usize = 32;
/// Columns of one tile of candle's fast path, and the multiple `n` is padded to.
const N_TILE: usize = 16;
/// Rows of one work item when rows are split over threads: its two stacked copies of k = 768 stay in a 48 KiB L1
/// beside a tile of weights.
const ROWS_PER_ITEM: usize = 16;

/// One or more weight matrices that read the same rows.
pub struct Linear {
    k: usize,
    k_padded: usize,
    outputs: Vec<usize>,
    slices: Vec<Vec<Part>>,
    exact: Option<Vec<Vec<f32>>>,
    block: usize,
}

/// Consecutive outputs of one matrix, computed by one thread when there are few rows.
struct Part {
    output: usize,
    columns: Range<usize>,
    weights: QTensor,
    /// Columns whose weights hold a NaN or an infinity: their results are NaN, as f32 products would give.
    broken: Vec<usize>,
}

/// Rows of one matrix to be multiplied with.
pub trait WeightRows: Sync {
    /// Rows (outputs) there are.
    fn rows(&self) -> usize;
    /// Writes the rows as f32, `k` values each.
    fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), Error>;
}

impl Linear {
    /// Converts matrices of `k` inputs; `split`: how many threads will share few rows. `exact` keeps the weights as
    /// f32 and multiplies in f32: slow, the reference that accuracy is measured against.
    ///
    /// # Errors
    /// Those of reading the rows.
    pub fn new(k: usize, matrices: &[&dyn WeightRows], split: usize, exact: bool) -> Result<Self, Error> {
        let outputs: Vec<usize> = matrices.iter().map(|m| m.rows()).collect();
        let k_padded = k.next_multiple_of(K_BLOCK);
        let block = if fast_path() { K_BLOCK } else { Q8_BLOCK };
        if exact {
            let read = |m: &&dyn WeightRows| {
                let mut w = vec![0.0; m.rows() * k];
                m.read(0..m.rows(), &mut w).map(|()| w)
            };
            let exact = Some(matrices.iter().map(read).collect::<Result<_, _>>()?);
            return Ok(Self { k, k_padded, outputs, slices: Vec::new(), exact, block });
        }
        let mut slices: Vec<Vec<Part>> = (0..split).map(|_| Vec::new()).collect();
        for (output, matrix) in matrices.iter().enumerate() {
            let tiles = outputs[output].div_ceil(N_TILE);
            for (i, slice) in slices.iter_mut().enumerate() {
                let columns = tiles * i / split * N_TILE..(tiles * (i + 1) / split * N_TILE).min(outputs[output]);
                if !columns.is_empty() {
                    slice.push(Part::new(output, columns, *matrix, k, k_padded)?);
                }
            }
        }
        slices.retain(|s| !s.is_empty());
        let linear = Self { k, k_padded, outputs, slices, exact: None, block };
        // The first product of a matrix lays its weights out for the fast path: part of loading, not of a first token.
        let zeros = Tensor::zeros((2, k_padded), candle_core::DType::F32, &Device::Cpu)?;
        linear.slices.par_iter().flatten().try_for_each(|part| multiply(&[part], &zeros).map(drop))?;
        Ok(linear)
    }

    /// Inputs of a row.
    pub fn inputs(&self) -> usize {
        self.k
    }

    /// Multiplies `x` (f32 `[rows][k]`) into one `[rows][outputs]` per matrix. Call it on the engine's pool.
    ///
    /// # Errors
    /// Those of the tensor library.
    pub fn forward(&self, x: &[f32], out: &mut [Vec<f32>]) -> Result<(), Error> {
        let rows = x.len() / self.k;
        for (out, n) in out.iter_mut().zip(&self.outputs) {
            out.resize(rows * n, 0.0);
        }
        if rows == 0 {
            return Ok(());
        }
        if let Some(weights) = &self.exact {
            for ((out, w), n) in out.iter_mut().zip(weights).zip(&self.outputs) {
                exact_products(x, w, self.k, *n, out);
            }
            return Ok(());
        }
        // Few rows: bound by reading weights, so each thread reads its own columns once. Many rows: bound by
        // arithmetic, so each thread rounds and multiplies its own rows.
        if rows < 2 * self.slices.len() {
            let stacked = Stacked::new(x, self.k, self.k_padded, self.block)?;
            let results = self
                .slices
                .par_iter()
                .with_max_len(1)
                .map(|slice| {
                    let parts: Vec<&Part> = slice.iter().collect();
                    multiply(&parts, &stacked.rows).map(|products| stacked.add(&parts, &products))
                })
                .collect::<Result<Vec<_>, Error>>()?;
            for (slice, results) in self.slices.iter().zip(results) {
                for (part, sums) in slice.iter().zip(results) {
                    let (n, width) = (self.outputs[part.output], part.columns.len());
                    for (to, from) in out[part.output].chunks_exact_mut(n).zip(sums.chunks_exact(width)) {
                        to[part.columns.clone()].copy_from_slice(from);
                    }
                }
            }
            return Ok(());
        }
        let per_item = rows.div_ceil(rayon::current_num_threads()).min(ROWS_PER_ITEM);
        let mut items: Vec<(&[f32], Vec<&mut [f32]>)> =
            x.chunks(per_item * self.k).map(|x| (x, Vec::with_capacity(self.outputs.len()))).collect();
        for (out, n) in out.iter_mut().zip(&self.outputs) {
            for (item, out) in items.iter_mut().zip(out.chunks_mut(per_item * n)) {
                item.1.push(out);
            }
        }
        items.into_par_iter().with_max_len(1).try_for_each(|(x, mut out)| {
            let stacked = Stacked::new(x, self.k, self.k_padded, self.block)?;
            // All parts in one call: candle rounds the rows once for all of them.
            let parts: Vec<&Part> = self.slices.iter().flatten().collect();
            let products = multiply(&parts, &stacked.rows)?;
            for (part, sums) in parts.iter().zip(stacked.add(&parts, &products)) {
                let n = self.outputs[part.output];
                for (to, from) in out[part.output].chunks_exact_mut(n).zip(sums.chunks_exact(part.columns.len())) {
                    to[part.columns.clone()].copy_from_slice(from);
                }
            }
            Ok(())
        })
    }
}

impl Part {
    fn new(
        output: usize,
        columns: Range<usize>,
        matrix: &dyn WeightRows,
        k: usize,
        k_padded: usize,
    ) -> Result<Self, Error> {
        let padded = columns.len().next_multiple_of(N_TILE);
        let blocks_per_row = k_padded / Q8_BLOCK;
        let mut blocks = vec![BlockQ8_0::zeros(); padded * blocks_per_row];
        let broken = blocks
            .par_chunks_mut(N_TILE * blocks_per_row)
            .enumerate()
            .map(|(tile, blocks)| {
                let first = columns.start + tile * N_TILE;
                let last = (first + N_TILE).min(columns.end);
                let mut rows = vec![0.0f32; (last - first) * k];
                matrix.read(first..last, &mut rows)?;
                let mut broken = Vec::new();
                let mut row = vec![0.0f32; k_padded];
                for (i, values) in rows.chunks_exact(k).enumerate() {
                    row[..k].copy_from_slice(values);
                    // The largest weight of a block must fit its f16 scale too.
                    if values.iter().any(|v| v.is_nan() || v.abs() > 127.0 * 65504.0) {
                        broken.push(first + i - columns.start);
                        continue;
                    }
                    BlockQ8_0::from_float(&row, &mut blocks[i * blocks_per_row..(i + 1) * blocks_per_row]);
                }
                Ok(broken)
            })
            .collect::<Result<Vec<_>, Error>>()?
            .concat();
        let weights = QTensor::new(QStorage::Cpu(Box::new(blocks)), (padded, k_padded))?;
        Ok(Self { output, columns, weights, broken })
    }
}

/// Each row twice: what 8 bits hold exactly, and the rest.
struct Stacked {
    /// f32 `[2 * rows][k_padded]`.
    rows: Tensor,
    /// Rows with a NaN or an infinity: integers cannot carry them, so their results are set.
    broken: Vec<usize>,
}

impl Stacked {
    fn new(x: &[f32], k: usize, k_padded: usize, block: usize) -> Result<Self, Error> {
        let rows = x.len() / k;
        let mut stacked = vec![0.0f32; 2 * rows * k_padded];
        let mut broken = Vec::new();
        for (r, (x, pair)) in x.chunks_exact(k).zip(stacked.chunks_exact_mut(2 * k_padded)).enumerate() {
            let (high, low) = pair.split_at_mut(k_padded);
            let mut finite = true;
            for ((x, high), low) in x.chunks(block).zip(high.chunks_mut(block)).zip(low.chunks_mut(block)) {
                finite &= split_block(x, high, low);
            }
            if !finite {
                broken.push(r);
                pair.fill(0.0);
            }
        }
        Ok(Self { rows: Tensor::from_vec(stacked, (2 * rows, k_padded), &Device::Cpu)?, broken })
    }

    /// Adds the two products of each row, drops padding, and marks what is no number. Per part: `[rows][columns]`.
    fn add(&self, parts: &[&Part], products: &[Tensor]) -> Vec<Vec<f32>> {
        let add = |(part, product): (&&Part, &Tensor)| {
            let width = part.columns.len();
            let padded = width.next_multiple_of(N_TILE);
            let (storage, _) = product.storage_and_layout();
            let Storage::Cpu(cpu) = &*storage else { unreachable!("products are computed on the CPU") };
            let products = cpu.as_slice::<f32>().expect("products are f32");
            let mut sums = Vec::with_capacity(products.len() / 2);
            for pair in products.chunks_exact(2 * padded) {
                let (high, low) = pair.split_at(padded);
                sums.extend(high[..width].iter().zip(low).map(|(h, l)| h + l));
            }
            for &r in &self.broken {
                sums[r * width..(r + 1) * width].fill(f32::NAN);
            }
            for &column in &part.broken {
                sums.iter_mut().skip(column).step_by(width).for_each(|s| *s = f32::NAN);
            }
            sums
        };
        parts.iter().zip(products).map(add).collect()
    }
}

/// Splits one block into what 8 bits hold exactly (`high`) and the rest (`low`); false when a value is not finite.
fn split_block(x: &[f32], high: &mut [f32], low: &mut [f32]) -> bool {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, without a call per value.
    const ROUND: f32 = 12_582_912.0;
    let largest = x.iter().fold(0.0f32, |m, v| if v.abs() > m { v.abs() } else { m });
    // 0 * x is 0 for every finite x and NaN otherwise, and a sum keeps a NaN.
    let poison: f32 = x.iter().map(|v| v * 0.0).sum();
    if poison != 0.0 || poison.is_nan() {
        return false;
    }
    let (scale, inverse) = (largest / 127.0, 127.0 / largest);
    if !inverse.is_finite() {
        // All zero, or so small that 127/largest overflows: such values vanish in any sum of f32.
        return true;
    }
    for ((x, high), low) in x.iter().zip(high).zip(low) {
        let code = (x * inverse + ROUND) - ROUND;
        *high = code * scale;
        *low = x - *high;
    }
    true
}

/// Products of stacked rows with each of these parts.
fn multiply(parts: &[&Part], rows: &Tensor) -> Result<Vec<Tensor>, Error> {
    let weights: Vec<&QTensor> = parts.iter().map(|p| &p.weights).collect();
    if let Some(products) = QTensor::gemv_fused_shared_lhs(&weights, rows)? {
        return Ok(products);
    }
    weights
        .iter()
        .map(|w| {
            let (storage, layout) = rows.storage_and_layout();
            let Storage::Cpu(cpu) = &*storage else { unreachable!("rows are on the CPU") };
            let (product, shape) = w.cpu_fwd(cpu, layout)?;
            Ok(Tensor::from_vec(product.as_slice::<f32>()?.to_vec(), shape, &Device::Cpu)?)
        })
        .collect()
}

/// Whether candle multiplies Q8_0 weights on the path that rounds 256 activations together.
fn fast_path() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni"))
            || (is_x86_feature_detected!("avxvnni") && is_x86_feature_detected!("avx2"))
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// f32 weights, f32 products, sums of 16 lanes: the reference.
fn exact_products(x: &[f32], w: &[f32], k: usize, n: usize, out: &mut [f32]) {
    out.par_chunks_mut(n).zip(x.par_chunks(k)).for_each(|(out, x)| {
        for (out, w) in out.iter_mut().zip(w.chunks_exact(k)) {
            let mut lanes = [0.0f32; 16];
            let (xs, ws) = (x.chunks_exact(16), w.chunks_exact(16));
            let tail: f32 = xs.remainder().iter().zip(ws.remainder()).map(|(a, b)| a * b).sum();
            for (x, w) in xs.zip(ws) {
                for i in 0..16 {
                    lanes[i] += x[i] * w[i];
                }
            }
            *out = lanes.iter().sum::<f32>() + tail;
        }
    });
}
