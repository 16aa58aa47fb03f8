//! Products with weight matrices. In: f32 rows; out: f32 rows, one slice of them per matrix.
//! NOT here: reading weights from a file (gguf.rs), arithmetic of 16 columns (matmul/).
//!
//! Formula: `out[r][j] = sum_i w_hat[j][i] * x[r][i]`. Q4_0, Q4_1 and Q8_0 weights are held as the file has them
//! (`w_hat = w`); any other type is rounded to Q8_0 (8 bits, one f16 scale per 32).
//!
//! A row's result depends on that row only: each output is one sum in an order fixed by `k`, whatever the number of
//! rows or threads.

use super::matmul::{Activations, BLOCK, CodedBlock, Format, TILE, Weights, f32_products, multiply_tile};
use crate::Error;
use half::f16;
use rayon::prelude::*;
use std::ops::Range;

/// Up to this many rows are split over threads by columns: each thread then reads its own weights only. More rows are
/// split by rows, each thread rounding its own: by then arithmetic counts, not reading.
const SPLIT_BY_COLUMNS: usize = 64;
/// Rows of one work item when rows are split: enough for a tile of weights to be used many times.
const ROWS_PER_ITEM: usize = 64;

/// One or more weight matrices that read the same rows.
pub struct Linear {
    k: usize,
    outputs: Vec<usize>,
    weights: Vec<Weights>,
    split: usize,
    exact: Option<Vec<Vec<f32>>>,
}

/// Which blocks a matrix has in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// 32 values: f16 scale, 16 bytes of 4-bit codes; `w = scale*(code - 8)`.
    Q4_0,
    /// 32 values: f16 scale, f16 min, 16 bytes of 4-bit codes; `w = scale*code + min`.
    Q4_1,
    /// 32 values: f16 scale, 32 signed bytes.
    Q8_0,
    /// Anything else: read as f32.
    Other,
}

impl BlockKind {
    /// Bytes of a block of 32 values; 0 for other kinds.
    fn bytes(self) -> usize {
        match self {
            BlockKind::Q4_0 => 18,
            BlockKind::Q4_1 => 20,
            BlockKind::Q8_0 => 34,
            BlockKind::Other => 0,
        }
    }

    /// Reads one block of the file.
    fn decode(self, bytes: &[u8]) -> CodedBlock {
        let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let nibbles = |at: usize| -> [u8; BLOCK] {
            std::array::from_fn(|i| if i < 16 { bytes[at + i] & 15 } else { bytes[at + i - 16] >> 4 })
        };
        match self {
            BlockKind::Q4_0 => CodedBlock { scale: half(0), min: times(half(0), -8.0), codes: nibbles(2) },
            BlockKind::Q4_1 => CodedBlock { scale: half(0), min: half(2), codes: nibbles(4) },
            _ => {
                let codes = std::array::from_fn(|i| bytes[2 + i].wrapping_add(128));
                CodedBlock { scale: half(0), min: times(half(0), -128.0), codes }
            }
        }
    }
}

/// A power of two times an f16 number: exact while neither overflows nor turns subnormal.
fn times(x: f16, factor: f32) -> f16 {
    f16::from_f32(x.to_f32() * factor)
}

/// Rounds 32 numbers to Q8_0. A block that f16 scales cannot hold (or with a NaN in it) gets a scale that makes every
/// result with it NaN or infinite, as f32 products would.
fn quantize(values: &[f32]) -> CodedBlock {
    let largest = values.iter().fold(0.0f32, |m, v| if v.is_nan() || v.abs() > m { v.abs() } else { m });
    let scale = f16::from_f32(largest / 127.0);
    let mut codes = [128; BLOCK];
    if scale.to_f32() > 0.0 {
        for (code, v) in codes.iter_mut().zip(values) {
            *code = ((v / scale.to_f32()).round().clamp(-127.0, 127.0) + 128.0) as u8;
        }
    }
    CodedBlock { scale, min: times(scale, -128.0), codes }
}

/// Rows of one matrix to be multiplied with.
pub trait WeightRows: Sync {
    /// Rows (outputs) there are.
    fn rows(&self) -> usize;
    /// Writes the rows as f32, `k` values each.
    ///
    /// # Errors
    /// Those of reading.
    fn read(&self, rows: Range<usize>, out: &mut [f32]) -> Result<(), Error>;
    /// What [`WeightRows::read_blocks`] gives; [`BlockKind::Other`] when only numbers can be had.
    fn kind(&self) -> BlockKind {
        BlockKind::Other
    }
    /// The rows' blocks as the file has them; empty for [`BlockKind::Other`].
    ///
    /// # Errors
    /// Those of reading.
    fn read_blocks(&self, _rows: Range<usize>) -> Result<Vec<u8>, Error> {
        Ok(Vec::new())
    }
}

impl Linear {
    /// Lays out matrices of `k` inputs; `split`: how many threads will share few rows. `exact` keeps the weights as
    /// f32 and multiplies in f32 (matmul/exact.rs): the reference that accuracy is measured against.
    ///
    /// # Errors
    /// Those of reading the rows.
    pub fn new(k: usize, matrices: &[&dyn WeightRows], split: usize, exact: bool) -> Result<Self, Error> {
        let outputs: Vec<usize> = matrices.iter().map(|m| m.rows()).collect();
        if exact {
            let read = |m: &&dyn WeightRows| {
                let mut w = vec![0.0; m.rows() * k];
                m.read(0..m.rows(), &mut w).map(|()| w)
            };
            let exact = Some(matrices.iter().map(read).collect::<Result<_, _>>()?);
            return Ok(Self { k, outputs, weights: Vec::new(), split, exact });
        }
        let weights = matrices.iter().map(|m| lay_out(k, *m)).collect::<Result<_, _>>()?;
        Ok(Self { k, outputs, weights, split, exact: None })
    }

    /// Inputs of a row.
    pub fn inputs(&self) -> usize {
        self.k
    }

    /// Bytes that the weights take in memory.
    pub fn held_bytes(&self) -> usize {
        let exact = self.exact.iter().flatten().map(|w| size_of_val(w.as_slice())).sum::<usize>();
        exact + self.weights.iter().map(Weights::held_bytes).sum::<usize>()
    }

    /// Multiplies `x` (f32 `[rows][k]`) into one `[rows][outputs]` per matrix. Call it on the engine's pool.
    ///
    /// # Errors
    /// None today; the signature leaves room for products that can fail.
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
                f32_products(x, w, self.k, *n, out);
            }
        } else if rows <= SPLIT_BY_COLUMNS {
            self.by_columns(x, out);
        } else {
            self.by_rows(x, out);
        }
        Ok(())
    }

    fn by_columns(&self, x: &[f32], out: &mut [Vec<f32>]) {
        let x = Activations::new(x, self.k);
        let rows = x.rows();
        // Tiles of all matrices in one row, so that threads share them evenly.
        let tiles: Vec<(usize, usize)> =
            self.weights.iter().enumerate().flat_map(|(m, w)| (0..w.tiles()).map(move |t| (m, t))).collect();
        let products = |tiles: &[(usize, usize)]| {
            let mut products = vec![[0.0f32; TILE]; tiles.len() * rows];
            for (&(m, tile), out) in tiles.iter().zip(products.chunks_exact_mut(rows)) {
                multiply_tile(&self.weights[m], tile, &x, out);
            }
            products
        };
        let share = tiles.len().div_ceil(self.split);
        let products: Vec<_> = tiles.par_chunks(share).with_max_len(1).map(products).collect();
        for (tiles, products) in tiles.chunks(share).zip(products) {
            for (&(m, tile), products) in tiles.iter().zip(products.chunks_exact(rows)) {
                let (columns, n) = (self.weights[m].columns(tile), self.outputs[m]);
                for (to, from) in out[m].chunks_exact_mut(n).zip(products) {
                    to[columns.clone()].copy_from_slice(&from[..columns.len()]);
                }
            }
        }
    }

    fn by_rows(&self, x: &[f32], out: &mut [Vec<f32>]) {
        let rows = x.len() / self.k;
        let per_item = rows.div_ceil(self.split).min(ROWS_PER_ITEM);
        let mut items: Vec<(&[f32], Vec<&mut [f32]>)> =
            x.chunks(per_item * self.k).map(|x| (x, Vec::with_capacity(self.outputs.len()))).collect();
        for (out, n) in out.iter_mut().zip(&self.outputs) {
            for (item, out) in items.iter_mut().zip(out.chunks_mut(per_item * n)) {
                item.1.push(out);
            }
        }
        items.into_par_iter().with_max_len(1).for_each(|(x, mut out)| {
            let x = Activations::new(x, self.k);
            let mut products = vec![[0.0f32; TILE]; x.rows()];
            for (m, weights) in self.weights.iter().enumerate() {
                for tile in 0..weights.tiles() {
                    multiply_tile(weights, tile, &x, &mut products);
                    let columns = weights.columns(tile);
                    for (to, from) in out[m].chunks_exact_mut(weights.n()).zip(&products) {
                        to[columns.clone()].copy_from_slice(&from[..columns.len()]);
                    }
                }
            }
        });
    }
}

/// Reads a matrix into the kernels' layout.
fn lay_out(k: usize, matrix: &dyn WeightRows) -> Result<Weights, Error> {
    let (kind, blocks) = (matrix.kind(), k.div_ceil(BLOCK));
    let format = if matches!(kind, BlockKind::Q4_0 | BlockKind::Q4_1) { Format::Affine4 } else { Format::Offset8 };
    Weights::new(matrix.rows(), blocks, format, |rows| {
        if kind != BlockKind::Other {
            let bytes = matrix.read_blocks(rows)?;
            return Ok(bytes.chunks_exact(kind.bytes()).map(|b| kind.decode(b)).collect());
        }
        let mut values = vec![0.0f32; rows.len() * k];
        matrix.read(rows, &mut values)?;
        Ok(values.chunks_exact(k).flat_map(|row| row.chunks(BLOCK).map(quantize)).collect())
    })
}
