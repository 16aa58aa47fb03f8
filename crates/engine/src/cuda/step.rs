//! Whole steps on the card. In: tokens of sequences in a cache; out: the tokens that are likeliest to follow, and logits for
//! those who ask.
//! NOT here: kernels (kernels.rs), which way a product takes (products.rs), who runs when (scheduler.rs), sampling (sampler.rs).
//!
//! A decode step is captured into a graph once per number of rows and replayed: the host uploads tokens and what the cache
//! needs, and waits once, for one small copy of outcomes. A prompt goes in chunks, launch by launch.

use super::buckets::{CHUNK, bucket};
use super::buffers::Buffers;
use super::cache::StepCache;
use super::kernels::{HeadBuffers, LOST, NAN_LOGIT, OUTCOME_WORDS, Outcome, at};
use super::library::WORKSPACE_BYTES;
use super::products::{Choice, Product, Products, Size, captured};
use super::weights::Weights;
use crate::Error;
use crate::model::{Basis, Config};
use kvant_kv::cuda::cudarc::driver::{CudaGraph, DevicePtr, DriverError};
use kvant_kv::{Error as KvError, RowFormat};
use std::collections::HashMap;

/// A captured step. CUDA's graphs are bound to no thread; they want one caller at a time.
struct Graph(CudaGraph);

// SAFETY: a decoder owns its graphs and launches them through `&mut self` only: one caller at a time, from any thread.
unsafe impl Send for Graph {}

/// What a [`Decoder`] is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecoderOptions {
    /// Most rows of a batch.
    pub most_batch: usize,
    /// A row's logits do not depend on the rows beside it, if its attention does not (the cache's side of the promise): products
    /// of batches are few.cu's alone, eight rows at a time. More rows than eight then read the weights more than once.
    pub invariant: bool,
}

/// A model on the card together with the cache that it decodes over.
pub struct Decoder<C> {
    weights: Weights,
    bases: Vec<Basis>,
    cache: C,
    products: Products,
    buffers: Buffers,
    options: DecoderOptions,
    graphs: HashMap<usize, Graph>,
}

/// What the model says of one row: the likeliest next token, or why there is none.
pub type RowOutcome = Result<u32, Error>;

impl<C: StepCache> Decoder<C> {
    /// Joins a model and a cache whose layers have these bases.
    ///
    /// # Errors
    /// [`Error::CpuOnly`] for bases that the card does not compute, [`Error::Limit`] for a batch larger than any, [`Error::Kv`]
    /// for a GPU that refuses or has too little memory.
    pub fn new(weights: Weights, cache: C, bases: &[Basis], options: DecoderOptions) -> Result<Self, Error> {
        super::check_bases(bases)?;
        let most = options.most_batch.max(1);
        let Some(most_batch) = bucket(most) else {
            return Err(Error::Limit { option: "batch", why: format!("the GPU takes up to {CHUNK} rows, not {most}") });
        };
        weights.take_bases(bases)?;
        let gpu = weights.gpu.clone();
        let buffers = Buffers::new(&gpu, &weights.config, CHUNK, most_batch)?;
        let products = Products::new(&gpu)?;
        let bases = bases.to_vec();
        Ok(Self {
            weights,
            bases,
            cache,
            products,
            buffers,
            options: DecoderOptions { most_batch, ..options },
            graphs: HashMap::new(),
        })
    }

    /// Bytes on the card that a decoder of `most_batch` rows takes beside weights and cache.
    pub(crate) fn bytes_beside(config: &Config, most_batch: usize) -> usize {
        Buffers::bytes(config, CHUNK, most_batch) + WORKSPACE_BYTES
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.weights.config
    }

    /// The cache: to add and remove sequences between steps.
    pub fn cache(&self) -> &C {
        &self.cache
    }

    /// The cache: to add and remove sequences between steps.
    pub fn cache_mut(&mut self) -> &mut C {
        &mut self.cache
    }

    /// Bytes of the weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }

    /// Most rows of a batch.
    pub fn most_batch(&self) -> usize {
        self.options.most_batch
    }

    /// Which way products took so far, and their times.
    pub fn choices(&self) -> &[Choice] {
        self.products.choices()
    }

    /// Chooses products and captures nothing yet: what the first step of a number of rows would else take time for.
    ///
    /// # Errors
    /// [`Error::Kv`] for a GPU that refuses.
    pub fn prepare(&mut self, rows: usize) -> Result<(), Error> {
        let size = Size { rows: self.bucket_of(rows)?, invariant: self.options.invariant };
        self.products.prepare(&self.weights, &self.buffers, size, size.rows.min(self.options.most_batch))
    }

    /// One token for each of some slots: `(slot, token)`. An outcome per row; a row whose keys or values f16 cannot hold, or
    /// whose logits have a NaN, has an error of its own, and its sequence is not to be used further.
    ///
    /// # Errors
    /// [`Error::NoSuchToken`], [`Error::Limit`] for too many rows, those of the cache; [`Error::Kv`] for a GPU that failed, after
    /// which nothing is to be used further.
    pub fn decode(&mut self, rows: &[(usize, u32)]) -> Result<Vec<RowOutcome>, Error> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        if rows.len() > self.options.most_batch {
            let why = format!("{} rows, and at most {} were asked for", rows.len(), self.options.most_batch);
            return Err(Error::Limit { option: "batch", why });
        }
        let size = self.bucket_of(rows.len())?;
        let tokens: Vec<u32> = rows.iter().map(|&(_, token)| token).collect();
        self.check_tokens(&tokens)?;
        let invariant = self.options.invariant;
        self.products.prepare(&self.weights, &self.buffers, Size { rows: size, invariant }, size)?;
        let slots: Vec<usize> = rows.iter().map(|&(slot, _)| slot).collect();
        self.cache.begin_decode(&slots, size)?;
        self.upload_tokens(&tokens, size)?;
        if !self.graphs.contains_key(&size) {
            let gpu = self.weights.gpu.clone();
            let graph = captured(&gpu, || self.decode_layers(size))?;
            self.graphs.insert(size, Graph(graph));
        }
        self.graphs[&size].0.launch().map_err(driver)?;
        let positions: Vec<usize> = slots.iter().map(|&slot| self.cache.len(slot)).collect();
        let outcomes = self.outcomes(rows.len())?;
        self.cache.end_decode()?;
        Ok(outcomes.into_iter().zip(positions).map(|(o, position)| outcome(o, position)).collect())
    }

    /// The next tokens of a slot, in chunks; the likeliest token behind them. The logits of the last one are row 0 afterwards.
    ///
    /// # Errors
    /// As [`Decoder::decode`], and what is wrong with the sequence's own rows.
    pub fn prefill(&mut self, slot: usize, tokens: &[u32]) -> Result<u32, Error> {
        self.check_tokens(tokens)?;
        let mut last = Err(Error::EmptyPrompt { request: slot });
        for chunk in tokens.chunks(CHUNK) {
            last = Ok(self.prefill_chunk(slot, chunk)?);
        }
        last
    }

    /// Logits of a row of the last step, f32 `[vocabulary]`.
    ///
    /// # Errors
    /// [`Error::Limit`] for a row beyond the batch, [`Error::Kv`] for a GPU that failed.
    pub fn logits(&self, row: usize) -> Result<Vec<f32>, Error> {
        let vocabulary = self.weights.config.vocabulary;
        let range = row * vocabulary..(row + 1) * vocabulary;
        let Some(view) = self.buffers.logits.try_slice(range) else {
            return Err(Error::Limit { option: "batch", why: format!("there are no logits of row {row}") });
        };
        let logits = self.weights.gpu.stream().clone_dtoh(&view).map_err(driver)?;
        self.weights.gpu.synchronize()?;
        Ok(logits)
    }

    fn bucket_of(&self, rows: usize) -> Result<usize, Error> {
        bucket(rows).ok_or_else(|| Error::Limit { option: "batch", why: format!("{rows} rows are more than {CHUNK}") })
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let vocabulary = self.weights.config.vocabulary;
        match tokens.iter().find(|&&t| t as usize >= vocabulary) {
            Some(&token) => Err(Error::NoSuchToken { token, vocabulary }),
            None => Ok(()),
        }
    }

    /// Rows behind the tokens are padding: token 0.
    fn upload_tokens(&mut self, tokens: &[u32], size: usize) -> Result<(), Error> {
        let b = &mut self.buffers;
        let host = b.host_tokens.as_mut_slice().map_err(driver)?;
        host[..tokens.len()].copy_from_slice(tokens);
        host[tokens.len()..size].fill(0);
        self.weights.gpu.stream().memcpy_htod(&host[..size], &mut b.tokens).map_err(driver)
    }

    /// Waits for the step and reads its first outcomes.
    fn outcomes(&mut self, rows: usize) -> Result<Vec<Outcome>, Error> {
        let (gpu, b) = (&self.weights.gpu, &mut self.buffers);
        let view = b.outcomes.slice(..rows * OUTCOME_WORDS);
        let words = &mut b.host_outcomes.as_mut_slice().map_err(driver)?[..rows * OUTCOME_WORDS];
        gpu.stream().memcpy_dtoh(&view, words).map_err(driver)?;
        gpu.synchronize()?;
        let read = |w: &[u32; OUTCOME_WORDS]| Outcome { token: w[0], error: w[1], detail: w[2], unused: w[3] };
        Ok(words.as_chunks::<OUTCOME_WORDS>().0.iter().take(rows).map(read).collect())
    }

    fn embed(&self, rows: usize) -> Result<(), Error> {
        let (w, b) = (&self.weights, &self.buffers);
        let [tokens, outcomes] = [&b.tokens, &b.outcomes].map(|buffer| at(&w.gpu, buffer));
        w.kernels.embed(tokens, at(&w.gpu, &w.embedding), at(&w.gpu, &b.stream), outcomes, rows, w.config.hidden)
    }

    /// What a layer does in front of the cache: queries, keys and values of `rows` rows (products of `size`).
    fn heads(&self, layer: usize, positions: u64, rows: usize, size: Size) -> Result<(), Error> {
        let (w, b) = (&self.weights, &self.buffers);
        self.products.run(w, b, Product::Qkv, layer, (0, size))?;
        let [q, k, v] = [&b.q, &b.k, &b.v].map(|buffer| at(&w.gpu, buffer));
        let buffers = HeadBuffers {
            qkv: at(&w.gpu, &b.qkv),
            turns: at(&w.gpu, &b.turns),
            positions,
            q,
            k,
            v,
            outcomes: at(&w.gpu, &b.outcomes),
            rows,
            layer,
            weights: &w.layers[layer],
        };
        w.kernels.heads(&w.config, &self.bases[layer], &buffers)
    }

    /// What a layer does behind the cache.
    fn feed_forward(&self, layer: usize, size: Size) -> Result<(), Error> {
        for product in [Product::Output, Product::GateUp, Product::Down] {
            self.products.run(&self.weights, &self.buffers, product, layer, (0, size))?;
        }
        Ok(())
    }

    /// Logits of rows `first..` into rows `0..` of the logits, and their likeliest tokens.
    fn choose(&self, first: usize, size: Size) -> Result<(), Error> {
        let (w, b, rows) = (&self.weights, &self.buffers, size.rows);
        self.products.run(w, b, Product::Head, 0, (first, size))?;
        let parts = [at(&w.gpu, &b.part_logits), at(&w.gpu, &b.part_tokens)];
        let outcomes = at(&w.gpu, &b.outcomes);
        w.kernels.likeliest(at(&w.gpu, &b.logits), parts, outcomes, (first, rows), w.config.vocabulary)
    }

    fn decode_layers(&mut self, rows: usize) -> Result<(), Error> {
        let size = Size { rows, invariant: self.options.invariant };
        self.embed(rows)?;
        self.cache.pack_due()?;
        for layer in 0..self.weights.layers.len() {
            let positions = self.cache.positions().device_ptr(self.weights.gpu.stream()).0;
            self.heads(layer, positions, rows, size)?;
            let (b, scale) = (&mut self.buffers, self.weights.config.score_scale);
            self.cache.append_decode(layer, &b.k, &b.v)?;
            self.cache.attend_decode(layer, &b.q, &mut b.attended, scale)?;
            self.feed_forward(layer, size)?;
        }
        self.choose(0, size)
    }

    fn prefill_chunk(&mut self, slot: usize, tokens: &[u32]) -> Result<u32, Error> {
        let rows = tokens.len();
        let size = self.bucket_of(rows)?;
        self.products.prepare(&self.weights, &self.buffers, Size { rows: size, invariant: false }, 1)?;
        let first = self.cache.len(slot);
        self.cache.begin_prefill(slot, rows)?;
        self.upload_tokens(tokens, size)?;
        let positions: Vec<u32> = (first..first + rows).map(|p| p as u32).collect();
        self.weights.gpu.stream().memcpy_htod(&positions, &mut self.buffers.positions).map_err(driver)?;
        self.embed(size)?;
        let size = Size { rows: size, invariant: false };
        for layer in 0..self.weights.layers.len() {
            let positions = at(&self.weights.gpu, &self.buffers.positions);
            self.heads(layer, positions, rows, size)?;
            let (b, scale) = (&mut self.buffers, self.weights.config.score_scale);
            self.cache.append_prefill(layer, &b.k, &b.v)?;
            self.cache.attend_prefill(layer, &b.q, &mut b.attended, scale)?;
            self.feed_forward(layer, size)?;
        }
        self.choose(rows - 1, Size { rows: 1, ..size })?;
        let outcomes = self.outcomes(rows)?;
        self.cache.end_prefill()?;
        let mut last = 0;
        for (row, of_row) in outcomes.into_iter().enumerate() {
            last = outcome(of_row, first + row)?;
        }
        Ok(last)
    }
}

fn driver(e: DriverError) -> Error {
    KvError::from(e).into()
}

/// What the card says of a row, in words.
fn outcome(o: Outcome, position: usize) -> RowOutcome {
    match o.error {
        0 => Ok(o.token),
        NAN_LOGIT => Err(Error::NanLogit { token: o.detail as usize, position }),
        error => Err(KvError::NotFinite {
            tensor: if error & 1 == 1 { "V" } else { "K" },
            format: RowFormat::F16,
            layer: ((error & !LOST) >> 16) as usize,
            head: (error >> 1 & 0x7fff) as usize,
            token: position,
            value: f32::from_bits(o.detail),
            seq: None,
        }
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_in_words() {
        assert_eq!(outcome(Outcome { token: 7, ..Outcome::default() }, 3).unwrap(), 7);
        let nan = outcome(Outcome { error: NAN_LOGIT, detail: 9, ..Outcome::default() }, 3);
        assert!(matches!(nan, Err(Error::NanLogit { token: 9, position: 3 })));
        let error = LOST | 35 << 16 | 7 << 1 | 1;
        let lost = outcome(Outcome { error, detail: f32::INFINITY.to_bits(), ..Outcome::default() }, 3).unwrap_err();
        let said = lost.to_string();
        assert!(said.contains("V has a value") && said.contains("layer 35, head 7, token 3"), "{said}");
    }
}
