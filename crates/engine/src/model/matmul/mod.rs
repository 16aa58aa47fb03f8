//! Products of low-bit weights with f32 rows. In: weights `[n][k]` as 4-bit affine or 8-bit blocks of 32, rows `[m][k]`;
//! out: f32 `[m][n]`, 16 columns at a time.
//!
//! Formula: `w = scale*code + min` per block of 32 (Q4_0, Q4_1 and Q8_0 are held exactly as the file has them);
//! activations are rounded to 15 bits per block of 32 (`x = step * integer`, `|integer| <= 16256`), so that
//! `out = sum over blocks of scale*step*sum(code*integer) + min*step*sum(integer)`.
//! Accuracy: activations are off by at most 1/32512 of their block's largest; integer sums are exact; blocks are added in
//! order in f32. A row's result depends on that row only, not on the other rows or on threads.
//! Why not candle's product: docs/decisions/0004-own-weight-products.md.
//! NOT here: which threads compute which part (linear.rs), files (gguf.rs).

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod exact;
mod portable;

pub(crate) use exact::f32_products;

use half::f16;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::OnceLock;

/// Values that share a scale: along k, of one weight row or one activation row.
pub(crate) const BLOCK: usize = 32;
/// Columns (weight rows) of a tile: the lanes of a 512-bit vector.
pub(crate) const TILE: usize = 16;
/// Largest magnitude of an activation's integer: two signed 8-bit limbs, `128*127 + 0`.
const TOP: f32 = 16256.0;

/// 64 bytes on their own cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line([u8; 64]);

/// Scales and mins of one block of one tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Params {
    scale: [f16; TILE],
    min: [f16; TILE],
}

/// How weights are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// Codes 0..=15. Line i of a block has, for column c and j < 4, at byte `4c+j`: code of `k = 4i+j` in the low four
    /// bits, of `k = 16+4i+j` in the high ones.
    Affine4,
    /// Codes 0..=255, which stand for -128..=127 (`min = -128*scale`). Line i has code `k = 4i+j` at byte `4c+j`.
    Offset8,
}

impl Format {
    fn lines(self) -> usize {
        match self {
            Format::Affine4 => 4,
            Format::Offset8 => 8,
        }
    }
}

/// A weight matrix, laid out for the kernels: tile by tile, block by block.
pub(crate) struct Weights {
    n: usize,
    blocks: usize,
    format: Format,
    lines: Vec<Line>,
    params: Vec<Params>,
}

/// One block of 32 weights of one row, as codes.
pub(crate) struct CodedBlock {
    pub scale: f16,
    pub min: f16,
    pub codes: [u8; BLOCK],
}

impl Weights {
    /// `n` rows of `blocks` blocks; `coded(rows)` gives the blocks of these rows, row by row.
    ///
    /// # Errors
    /// Those of `coded`.
    pub(crate) fn new<E: Send>(
        n: usize,
        blocks: usize,
        format: Format,
        coded: impl Fn(Range<usize>) -> Result<Vec<CodedBlock>, E> + Sync,
    ) -> Result<Self, E> {
        let tiles = n.div_ceil(TILE);
        let mut lines = vec![Line([0; 64]); tiles * blocks * format.lines()];
        let mut params = vec![Params { scale: [f16::ZERO; TILE], min: [f16::ZERO; TILE] }; tiles * blocks];
        let parts = lines.par_chunks_mut(blocks * format.lines()).zip(params.par_chunks_mut(blocks));
        parts.enumerate().try_for_each(|(tile, (lines, params))| {
            let rows = tile * TILE..((tile + 1) * TILE).min(n);
            for (i, coded) in coded(rows)?.iter().enumerate() {
                let (column, block) = (i / blocks, i % blocks);
                params[block].scale[column] = coded.scale;
                params[block].min[column] = coded.min;
                let lines = &mut lines[block * format.lines()..][..format.lines()];
                for (k, &code) in coded.codes.iter().enumerate() {
                    let (line, shift) = match format {
                        Format::Affine4 => (k % 16 / 4, k / 16 * 4),
                        Format::Offset8 => (k / 4, 0),
                    };
                    lines[line].0[4 * column + k % 4] |= code << shift;
                }
            }
            Ok(())
        })?;
        Ok(Self { n, blocks, format, lines, params })
    }

    /// Rows of the matrix.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Bytes that codes and parameters take.
    pub(crate) fn held_bytes(&self) -> usize {
        size_of_val(self.lines.as_slice()) + size_of_val(self.params.as_slice())
    }

    /// Tiles of 16 columns; the last may be short.
    pub(crate) fn tiles(&self) -> usize {
        self.n.div_ceil(TILE)
    }

    /// Columns of a tile.
    pub(crate) fn columns(&self, tile: usize) -> Range<usize> {
        tile * TILE..((tile + 1) * TILE).min(self.n)
    }

    fn tile(&self, tile: usize) -> Tile<'_> {
        let params = &self.params[tile * self.blocks..][..self.blocks];
        let n = self.blocks * self.format.lines();
        Tile { format: self.format, lines: &self.lines[tile * n..][..n], params }
    }
}

/// Weights of 16 columns.
pub(crate) struct Tile<'a> {
    format: Format,
    lines: &'a [Line],
    params: &'a [Params],
}

/// Rows rounded to 15 bits, for one kernel.
pub(crate) struct Activations {
    kernel: &'static Kernel,
    blocks: usize,
    /// `[rows][blocks]`: 32 integers as the kernel wants them.
    integers: Vec<Line>,
    /// `[rows][blocks]`: what one unit is worth.
    steps: Vec<f32>,
    /// `[rows][blocks]`: step times the sum of the integers.
    sums: Vec<f32>,
    /// Rows with a NaN or an infinity: integers cannot carry them, so their results are NaN.
    broken: Vec<usize>,
}

impl Activations {
    /// Rounds rows of `k` values, for the best kernel.
    pub(crate) fn new(x: &[f32], k: usize) -> Self {
        Self::for_kernel(best(), x, k)
    }

    fn for_kernel(kernel: &'static Kernel, x: &[f32], k: usize) -> Self {
        let (rows, blocks) = (x.len() / k, k.div_ceil(BLOCK));
        let mut integers = vec![Line([0; 64]); rows * blocks];
        let (mut steps, mut sums) = (vec![0.0; rows * blocks], vec![0.0; rows * blocks]);
        let mut broken = Vec::new();
        for (r, x) in x.chunks_exact(k).enumerate() {
            // 0 * x is 0 for every finite x and NaN otherwise, and a sum keeps a NaN.
            if x.iter().map(|v| v * 0.0).sum::<f32>().is_nan() {
                broken.push(r);
                continue;
            }
            for (b, x) in x.chunks(BLOCK).enumerate() {
                let at = r * blocks + b;
                let mut block = [0.0; BLOCK];
                block[..x.len()].copy_from_slice(x);
                let (step, rounded) = round(&block);
                steps[at] = step;
                sums[at] = step * rounded.iter().map(|&i| i as i32).sum::<i32>() as f32;
                (kernel.store)(&rounded, &mut integers[at]);
            }
        }
        Self { kernel, blocks, integers, steps, sums, broken }
    }

    /// Rows there are.
    pub(crate) fn rows(&self) -> usize {
        self.integers.len() / self.blocks
    }
}

/// Rounds one block to integers of at most [`TOP`], ties to even, and says what one unit is worth.
fn round(x: &[f32; BLOCK]) -> (f32, [i16; BLOCK]) {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, without a call per value.
    const ROUND: f32 = 12_582_912.0;
    let mut largest = [0.0f32; 16];
    for (i, x) in x.iter().enumerate() {
        let x = x.abs();
        largest[i % 16] = if x > largest[i % 16] { x } else { largest[i % 16] };
    }
    let largest = largest.into_iter().fold(0.0, f32::max);
    let factor = TOP / largest;
    if !factor.is_finite() {
        // All zero, or so small that its products vanish in any f32 sum.
        return (0.0, [0; BLOCK]);
    }
    (largest / TOP, std::array::from_fn(|i| ((x[i] * factor + ROUND) - ROUND) as i16))
}

/// Products of every row with one tile: `out[row][column]`. The tile's columns past n are zero.
pub(crate) fn multiply_tile(weights: &Weights, tile: usize, x: &Activations, out: &mut [[f32; TILE]]) {
    assert_eq!((out.len(), weights.blocks), (x.rows(), x.blocks));
    (x.kernel.multiply)(&weights.tile(tile), x, out);
    x.broken.iter().for_each(|&r| out[r] = [f32::NAN; TILE]);
}

/// One way to multiply.
struct Kernel {
    name: &'static str,
    /// Whether this processor can run it, or what it lacks.
    available: fn() -> Result<(), String>,
    /// Stores 32 integers as `multiply` wants them.
    store: fn(&[i16; BLOCK], &mut Line),
    multiply: fn(&Tile<'_>, &Activations, &mut [[f32; TILE]]),
}

/// Every kernel of this build, best first.
const KERNELS: &[Kernel] = &[
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "avx512-vnni",
        available: || available(avx512::Avx512Vnni::new(), avx512::NEEDS),
        store: avx512::store,
        multiply: |tile, x, out| avx512::Avx512Vnni::new().expect("checked by available").multiply(tile, x, out),
    },
    #[cfg(target_arch = "x86_64")]
    Kernel {
        name: "avx2",
        available: || available(avx2::Avx2::new(), avx2::NEEDS),
        store: portable::store,
        multiply: |tile, x, out| avx2::Avx2::new().expect("checked by available").multiply(tile, x, out),
    },
    Kernel { name: "portable", available: || Ok(()), store: portable::store, multiply: portable::multiply },
];

#[cfg(target_arch = "x86_64")]
fn available<T>(proof: Option<T>, needs: &str) -> Result<(), String> {
    proof.map(|_| ()).ok_or_else(|| format!("this processor lacks one of {needs}"))
}

/// The best kernel that this processor runs. Looked up once: every tile of every product asks.
fn best() -> &'static Kernel {
    static BEST: OnceLock<&Kernel> = OnceLock::new();
    BEST.get_or_init(|| KERNELS.iter().find(|k| (k.available)().is_ok()).expect("the portable kernel always runs"))
}

/// Name of the kernel in use: the best that this processor runs.
pub(crate) fn kernel() -> &'static str {
    best().name
}

/// Names of this build's kernels, best first, with the reason when this processor cannot run one.
pub(crate) fn kernels() -> Vec<(&'static str, Result<(), String>)> {
    KERNELS.iter().map(|k| (k.name, (k.available)())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: &mut u64) -> u32 {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        (*seed >> 32) as u32
    }

    fn matrix(n: usize, blocks: usize, format: Format) -> (Weights, Vec<f64>) {
        let coded = |row: usize, block: usize| {
            let mut seed = (row as u64 * 1000 + block as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let top = if format == Format::Affine4 { 15 } else { 255 };
            let codes = std::array::from_fn(|_| (random(&mut seed) % (top + 1)) as u8);
            let scale = f16::from_f32(0.001 + (random(&mut seed) % 1000) as f32 * 1e-5);
            let min = match format {
                Format::Affine4 => f16::from_f32((random(&mut seed) % 1000) as f32 * -1e-4),
                Format::Offset8 => f16::from_f32(-128.0 * scale.to_f32()),
            };
            CodedBlock { scale, min, codes }
        };
        let numbers = (0..n * blocks)
            .flat_map(|i| {
                let c = coded(i / blocks, i % blocks);
                c.codes.map(|code| c.scale.to_f64() * code as f64 + c.min.to_f64())
            })
            .collect();
        let rows = |rows: Range<usize>| Ok(rows.flat_map(|r| (0..blocks).map(move |b| coded(r, b))).collect());
        let weights: Result<_, std::convert::Infallible> = Weights::new(n, blocks, format, rows);
        (weights.unwrap(), numbers)
    }

    /// The kernels that run here. Says which do not and why. `REQUIRE_KERNELS=a,b` fails when one of them is in this table
    /// and cannot run; names of other tables' kernels are theirs to check (kvant-kv refuses names that no kernel has).
    fn kernels_here() -> Vec<&'static Kernel> {
        let required = std::env::var("REQUIRE_KERNELS").unwrap_or_default();
        let (run, skip): (Vec<_>, Vec<_>) = KERNELS.iter().partition(|k| (k.available)().is_ok());
        for k in skip {
            let why = (k.available)().unwrap_err();
            println!("skipped {}: {why}", k.name);
            let named = required.split(',').any(|name| name.trim() == k.name);
            assert!(!named, "REQUIRE_KERNELS={required} needs the product {}, which did not run: {why}", k.name);
        }
        assert_eq!(run[0].name, kernel(), "the first that runs is the one in use");
        run
    }

    fn products(weights: &Weights, tile: usize, x: &Activations) -> Vec<[f32; TILE]> {
        let mut out = vec![[f32::NAN; TILE]; x.rows()];
        multiply_tile(weights, tile, x, &mut out);
        out
    }

    #[test]
    fn every_kernel_multiplies() {
        for format in [Format::Affine4, Format::Offset8] {
            for (n, blocks, rows) in [(16, 1, 1), (40, 18, 3), (17, 3, 9)] {
                let (weights, numbers) = matrix(n, blocks, format);
                let k = blocks * BLOCK;
                let mut seed = 7;
                let x: Vec<f32> = (0..rows * k)
                    .map(|i| (random(&mut seed) % 2001) as f32 / 1000.0 - 1.0 + if i % 61 == 0 { 40.0 } else { 0.0 })
                    .collect();
                for kernel in kernels_here() {
                    let a = Activations::for_kernel(kernel, &x, k);
                    for tile in 0..weights.tiles() {
                        for (r, out) in products(&weights, tile, &a).iter().enumerate() {
                            for (c, column) in weights.columns(tile).enumerate() {
                                let terms = (0..k).map(|i| numbers[column * k + i] * x[r * k + i] as f64);
                                // Each activation off by half a unit of its block, and the sum in f32.
                                let unit = |i: usize| {
                                    let block = &x[r * k + i / BLOCK * BLOCK..][..BLOCK];
                                    block.iter().fold(0.0, |m: f32, v| m.max(v.abs())) as f64 / TOP as f64
                                };
                                let bound: f64 = (0..k)
                                    .map(|i| {
                                        numbers[column * k + i].abs()
                                            * (0.5001 * unit(i) + 1e-6 * x[r * k + i].abs() as f64)
                                    })
                                    .sum();
                                let err = (out[c] as f64 - terms.sum::<f64>()).abs();
                                assert!(err <= bound, "{} {format:?} n {n} row {r} column {column}", kernel.name);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_is_the_same_alone_and_among_others() {
        let k = 18 * BLOCK;
        let mut seed = 3;
        let x: Vec<f32> = (0..67 * k).map(|_| (random(&mut seed) % 2001) as f32 / 1000.0 - 1.0).collect();
        for format in [Format::Affine4, Format::Offset8] {
            let (weights, _) = matrix(48, 18, format);
            for kernel in kernels_here() {
                for tile in 0..weights.tiles() {
                    let one = |x: &[f32]| products(&weights, tile, &Activations::for_kernel(kernel, x, k))[0];
                    let alone: Vec<_> = x.chunks_exact(k).map(one).collect();
                    for rows in [1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 67] {
                        let all = Activations::for_kernel(kernel, &x[..rows * k], k);
                        for (r, together) in products(&weights, tile, &all).iter().enumerate() {
                            assert_eq!(&alone[r], together, "{} {format:?} row {r} of {rows}", kernel.name);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_that_are_no_numbers_give_nan_and_others_do_not() {
        let (weights, _) = matrix(16, 2, Format::Offset8);
        let mut x = vec![1.0; 3 * 64];
        x[70] = f32::INFINITY;
        for kernel in kernels_here() {
            let out = products(&weights, 0, &Activations::for_kernel(kernel, &x, 64));
            assert!(out[1].iter().all(|v| v.is_nan()), "{}", kernel.name);
            assert!(out[0] == out[2] && out[0].iter().all(|v| v.is_finite()), "{}", kernel.name);
        }
    }

    #[test]
    fn tiny_and_zero_blocks_round_to_zero() {
        assert_eq!(round(&[0.0; BLOCK]), (0.0, [0; BLOCK]));
        assert_eq!(round(&[1e-39; BLOCK]).1, [0; BLOCK]);
        let (step, rounded) = round(&std::array::from_fn(|i| if i == 3 { -2.0 } else { 1.0 }));
        assert_eq!((rounded[3], rounded[0]), (-16256, 8128));
        assert!((step * 16256.0 - 2.0).abs() < 1e-6);
    }
}
