//! Learning codebooks. In: a model, a calibration text, a scheme with sub-vectors; out: the scheme in every layer with
//! codebooks of each kv head, and the smoothing of key channels that they were learned under.
//!
//! The text is followed in chunks with an f16 cache. Rows of keys (behind RoPE) and values are taken as they would be stored,
//! but for those of sinks, which are never packed; of more than [`ROWS`] per head, evenly spaced ones. Key channels of a kv
//! head are divided by the root of their largest magnitude over all rows (VecInfer, arXiv 2510.06175) and rotated as the basis
//! will rotate them; values stay as they are. Then each head's sub-vectors go through k-means, heads and layers in parallel.
//! NOT here: k-means (kvant-kv), the file (codebooks.rs), what the codebooks cost (eval/).

use crate::codebooks::{self, LayerBooks};
use crate::forced::StoredRows;
use crate::limits::STEP_TOKENS;
use crate::model::{Basis, Step, rotate_heads};
use crate::schemes::Schemes;
use crate::{Error, LoadedModel, Pool};
use half::f16;
use kvant_kv::{Arm, Attention, Cache, Codebook, LayerShape, PackedScheme, RowFormat, Rows, Scheme};
use rayon::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a head that are kept to learn from, at most: two bytes a number, so 32 layers of 8 heads of 128 channels are 1 GB.
pub const ROWS: usize = 8192;
/// Iterations of k-means.
const ITERATIONS: usize = 16;
/// The magnitude that channels are smoothed by at the least: a channel that is silent here must not become infinite elsewhere.
const QUIET: f32 = 1e-4;

/// What was learned.
#[derive(Debug, Clone)]
pub struct Learned {
    /// The scheme in every layer, with codebooks.
    pub schemes: Schemes,
    /// Rows of each head that they were learned from.
    pub rows: usize,
}

/// Bytes of rows that [`learn`] keeps of so many tokens.
pub fn kept_bytes(layers: usize, shape: &LayerShape, tokens: usize) -> usize {
    layers * 2 * shape.row_len() * tokens.min(ROWS) * size_of::<f16>()
}

/// Learns codebooks from `tokens`, followed in chunks of `ctx`. `progress(what, done, all)` hears tokens that were followed,
/// then heads that were learned.
///
/// # Errors
/// Those of the model and the cache; [`Error::Kv`] when fewer than 16 rows are left behind the sinks.
pub fn learn(
    model: &LoadedModel,
    tokens: &[u32],
    ctx: usize,
    scheme: PackedScheme,
    threads: usize,
    progress: &(dyn Fn(Progress, usize, usize) + Sync),
) -> Result<Learned, Error> {
    crate::engine::check_tokens(0, &tokens[..tokens.len().min(ctx)], model.config())?;
    let (layers, shape) = (model.config().layers, model.config().shape);
    let pool = Pool::new(threads)?;
    let seen = tokens.chunks(ctx).map(|chunk| chunk.len().saturating_sub(scheme.sinks())).sum();
    let mut taken = Taken::new(layers, &shape, scheme, seen);
    follow(model, tokens, ctx, threads, &pool, &mut taken, progress)?;

    // One task per head and tensor.
    let tasks: Vec<(usize, bool, usize)> = (0..layers)
        .flat_map(|layer| [true, false].map(|of_keys| (layer, of_keys)))
        .filter(|&(_, of_keys)| codebooks::sizes(if of_keys { scheme.k() } else { scheme.v() }).is_some())
        .flat_map(|(layer, of_keys)| (0..shape.kv_heads).map(move |head| (layer, of_keys, head)))
        .collect();
    let done = AtomicUsize::new(0);
    let learned = pool.run(|| {
        let one = |&(layer, of_keys, head): &(usize, bool, usize)| {
            let book = taken.layers[layer].book(
                &scheme,
                shape.head_dim,
                of_keys,
                head,
                (layer * shape.kv_heads + head) as u64,
            );
            progress(Progress::Learned, done.fetch_add(1, Ordering::Relaxed) + 1, tasks.len());
            book
        };
        tasks.par_iter().map(one).collect::<Result<Vec<_>, kvant_kv::Error>>()
    })?;
    let mut books = vec![LayerBooks::default(); layers];
    for (&(layer, of_keys, _), book) in tasks.iter().zip(learned) {
        if of_keys { books[layer].keys.push(book) } else { books[layer].values.push(book) }
    }
    for (books, taken) in books.iter_mut().zip(&taken.layers) {
        if !books.keys.is_empty() {
            books.smooth = taken.factors();
        }
    }
    let schemes = Schemes::uniform(Scheme::Packed(scheme), layers);
    let schemes = schemes.with_codebooks(books.into_iter().map(|books| Some(Arc::new(books))).collect());
    Ok(Learned { schemes, rows: seen.min(ROWS) })
}

/// What [`learn`] has done so much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Tokens of the text.
    Followed,
    /// Heads of keys and of values.
    Learned,
}

/// Runs the text through the model; `taken` sees every layer's rows.
fn follow(
    model: &LoadedModel,
    tokens: &[u32],
    ctx: usize,
    threads: usize,
    pool: &Pool,
    taken: &mut Taken,
    progress: &(dyn Fn(Progress, usize, usize) + Sync),
) -> Result<(), Error> {
    let config = model.config();
    let configs: Vec<_> = (0..config.layers).map(|i| config.layer(i, Scheme::F16)).collect();
    let bases = vec![Basis::default(); config.layers];
    let mut attention = Attention::new(threads, None)?;
    let (mut done, all) = (0, tokens.len());
    for chunk in tokens.chunks(ctx) {
        let mut cache = Cache::new(&configs, Arm::F16)?;
        let seq = cache.add_sequence();
        for (step, tokens) in chunk.chunks(STEP_TOKENS).enumerate() {
            let start = step * STEP_TOKENS;
            let positions: Vec<usize> = (start..start + tokens.len()).collect();
            let batch = [Rows { seq, rows: tokens.len() }];
            let step = Step { batch: &batch, tokens, positions: &positions, wanted: &[], bases: &bases };
            taken.begin(start);
            pool.run(|| model.model()?.forward(&step, &mut cache, &mut attention, Some(&mut *taken), &mut Vec::new()))?;
            done += tokens.len();
            progress(Progress::Followed, done, all);
        }
    }
    Ok(())
}

/// Rows of all layers.
struct Taken {
    layers: Vec<LayerRows>,
    scheme: PackedScheme,
    /// Rows behind sinks that there will be, and that there were before this step.
    all: usize,
    before: usize,
    /// The step's first position, and the layer whose rows come next.
    start: usize,
    next: usize,
    /// Rows of the step behind sinks.
    of_step: usize,
}

/// Rows of a layer.
struct LayerRows {
    /// Per kv head `[rows][head_dim]`; empty for a tensor without sub-vectors.
    keys: Vec<Vec<f16>>,
    values: Vec<Vec<f16>>,
    /// Largest magnitude of each key channel, over all rows: `[kv_heads][head_dim]`
    largest: Vec<f32>,
}

impl Taken {
    fn new(layers: usize, shape: &LayerShape, scheme: PackedScheme, all: usize) -> Self {
        let layer = |_| LayerRows {
            keys: vec![Vec::new(); shape.kv_heads],
            values: vec![Vec::new(); shape.kv_heads],
            largest: vec![0.0; shape.row_len()],
        };
        Self { layers: (0..layers).map(layer).collect(), scheme, all, before: 0, start: 0, next: 0, of_step: 0 }
    }

    /// A step begins at this position of its chunk.
    fn begin(&mut self, start: usize) {
        self.before += self.of_step;
        (self.start, self.next, self.of_step) = (start, 0, 0);
    }
}

impl StoredRows for Taken {
    fn pass(&mut self, _format: RowFormat, shape: &LayerShape, k: &mut [f32], v: &mut [f32]) {
        let (d, row_len) = (shape.head_dim, shape.row_len());
        let layer = &mut self.layers[self.next];
        self.next += 1;
        let sinks = self.scheme.sinks().saturating_sub(self.start);
        let rows = k.chunks_exact(row_len).zip(v.chunks_exact(row_len)).skip(sinks);
        self.of_step = rows.len();
        for (i, (k, v)) in (self.before..).zip(rows) {
            layer.largest.iter_mut().zip(k).for_each(|(most, x)| *most = most.max(x.abs()));
            // Evenly spaced rows, ROWS of all.
            if self.all > ROWS && (i + 1) * ROWS / self.all == i * ROWS / self.all {
                continue;
            }
            for (row, codec, heads) in [(k, self.scheme.k(), &mut layer.keys), (v, self.scheme.v(), &mut layer.values)]
            {
                if codec.wants_codebooks() {
                    let heads = heads.iter_mut().zip(row.chunks_exact(d));
                    heads.for_each(|(kept, row)| kept.extend(row.iter().map(|&x| f16::from_f32(x))));
                }
            }
        }
    }
}

impl LayerRows {
    /// What key channels are divided by.
    fn factors(&self) -> Vec<f32> {
        self.largest.iter().map(|most| most.max(QUIET).sqrt()).collect()
    }

    /// The codebook of one head.
    fn book(
        &self,
        scheme: &PackedScheme,
        head_dim: usize,
        of_keys: bool,
        head: usize,
        seed: u64,
    ) -> Result<Codebook, kvant_kv::Error> {
        let (codec, rows) = if of_keys { (scheme.k(), &self.keys[head]) } else { (scheme.v(), &self.values[head]) };
        let (centroids, sub_len) = codebooks::sizes(codec).unwrap_or_default();
        let mut rows: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
        if of_keys {
            let factors = &self.factors()[head * head_dim..][..head_dim];
            for row in rows.chunks_exact_mut(head_dim) {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x /= factor);
                rotate_heads(row, head_dim);
                row.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32());
            }
        }
        Codebook::train(head_dim, centroids, sub_len, &rows, ITERATIONS, seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_sinks_are_left_out_and_of_many_rows_even_ones_are_kept() {
        let shape = LayerShape::new(2, 1, 64).unwrap();
        let Scheme::Packed(scheme) = "kvq16x4v4g32s4".parse().unwrap() else { panic!("packed") };
        let all = 2 * ROWS;
        let mut taken = Taken::new(1, &shape, scheme, all);
        // Two chunks; a row's numbers are its place in the text, those of sinks far larger.
        for chunk in 0..2 {
            for start in (0..ROWS + 4).step_by(256) {
                let end = (start + 256).min(ROWS + 4);
                let number = |i: usize| if i < 4 { 30000.0 } else { (chunk * ROWS + i - 4) as f32 / 8.0 };
                let mut k: Vec<f32> = (start..end).flat_map(|i| vec![number(i); 64]).collect();
                let mut v = k.clone();
                taken.begin(start);
                taken.pass(RowFormat::F16, &shape, &mut k, &mut v);
            }
        }
        let layer = &taken.layers[0];
        assert_eq!(layer.keys[0].len(), ROWS * 64);
        assert!(layer.values[0].is_empty(), "values of 4 bits need no codebook");
        let firsts: Vec<f32> = layer.keys[0].chunks_exact(64).map(|row| row[0].to_f32() * 8.0).collect();
        assert!(firsts.iter().enumerate().all(|(i, x)| (x - 2.0 * i as f32).abs() <= 1.0 + x / 1024.0));
        assert_eq!(layer.factors()[63], ((all - 1) as f32 / 8.0).sqrt());
    }

    #[test]
    fn a_channel_that_is_silent_divides_by_no_zero() {
        let rows = LayerRows { keys: vec![], values: vec![], largest: vec![0.0, 4.0] };
        assert_eq!(rows.factors(), [QUIET.sqrt(), 2.0]);
    }
}
