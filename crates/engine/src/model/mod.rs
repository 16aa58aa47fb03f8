//! The model: llama and its relatives (config.rs says how they differ). In: tokens at positions, and a cache; out: logits of the rows
//! asked for.
//! NOT here: which requests run together (scheduler.rs), sampling (sampler.rs), cache formats (kvant-kv).
//!
//! A row's result depends on its own tokens only: every product, norm and rotation is per row, and attention is per
//! request by contract.

pub mod attention;
mod basis;
mod config;
pub mod linear;
mod matmul;
pub mod rope;

pub use basis::{Basis, Turn, order_with_first};
pub(crate) use basis::{SIGNS, rotate_heads};
pub use config::{ARCHITECTURES, Activation, Architecture, AttentionFacts, Config, Windows};

use crate::Error;
use crate::forced::StoredRows;
use crate::source::Source;
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};
use kvant_kv::{Attention, Cache, Rows};
use linear::{Linear, WeightRows};
use rayon::prelude::*;
use rope::Rotation;

/// How weight matrices are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Products {
    /// Weights of 4 or 8 bits, as the file has them (any other type rounded to 8), times activations of 15 bits per block
    /// of 32, in the best kernel that this processor runs ([`product_kernels`]).
    #[default]
    Quantized,
    /// f32 weights and f32 products: slow; the reference that the fast way's accuracy is measured against.
    Exact,
}

/// Kernels of [`Products::Quantized`] in this build, best first, with the reason when this processor cannot run one.
pub fn product_kernels() -> Vec<(&'static str, Result<(), String>)> {
    matmul::kernels()
}

/// Weights of a model.
pub struct Model {
    config: Config,
    products: Products,
    embedding: QTensor,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Linear,
}

struct Layer {
    attention_norm: Vec<f32>,
    qkv: Linear,
    /// Added to q, k and v.
    biases: Option<[Vec<f32>; 3]>,
    /// Of each head of q and of k.
    head_norms: Option<[Vec<f32>; 2]>,
    output: Linear,
    feed_forward_norm: Vec<f32>,
    gate_up: Linear,
    down: Linear,
    /// Of what attention and the feed-forward part add.
    post_norms: Option<[Vec<f32>; 2]>,
}

/// Angles of a step's rows, in layers without a window and in those with one.
struct Rotations {
    global: Rotation,
    windowed: Option<Rotation>,
}

/// One step of a batch: which tokens at which positions, and whose logits are wanted.
pub struct Step<'a> {
    /// Sequences and how many rows each has in this step.
    pub batch: &'a [Rows],
    /// Tokens, batch entries one after another.
    pub tokens: &'a [u32],
    /// Position of each token in its sequence.
    pub positions: &'a [usize],
    /// Rows whose logits are wanted, ascending.
    pub wanted: &'a [usize],
    /// What each layer's keys and values are turned into before they are stored.
    pub bases: &'a [Basis],
}

/// Buffers of a step, kept between steps.
#[derive(Default)]
struct Buffers {
    normed: Vec<f32>,
    qkv: Vec<Vec<f32>>,
    attended: Vec<f32>,
    added: Vec<Vec<f32>>,
    gate_up: Vec<Vec<f32>>,
}

impl Model {
    /// Reads all weights of a model, converting them for `threads` threads; `progress(done, all)` counts weights.
    /// Call it on the engine's pool.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::TensorShape`], [`Error::Unsupported`] for tensors that such a model has no
    /// use for, and those of [`Source::config`].
    pub fn load(
        source: &Source,
        threads: usize,
        products: Products,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let config = source.config()?;
        let (hidden, forward, shape) = (config.hidden, config.feed_forward, config.shape);
        let (q_len, kv_len) = (shape.q_heads * shape.head_dim, shape.row_len());
        let exact = products == Products::Exact;
        // Every shape is checked before the first weight is converted, so that a bad file fails at once.
        let checked =
            (0..config.layers).map(|i| LayerTensors::find(source, &config, i)).collect::<Result<Vec<_>, _>>()?;
        let norm = source.vector("output_norm.weight", hidden)?;
        let embedding = source.table("token_embd.weight", config.vocabulary, hidden)?;
        let name = if source.has_head() { "output.weight" } else { "token_embd.weight" };
        let head = source.matrix(name, config.vocabulary, hidden)?;
        source.check_all_taken(&config)?;
        // Every tensor lies within the file, so these products are counts of real values.
        let per_layer = (hidden * (2 * q_len + 2 * kv_len + 3 * forward)) as u64;
        let all = per_layer * config.layers as u64 + (hidden * config.vocabulary) as u64;
        let mut layers = Vec::with_capacity(config.layers);
        for (i, tensors) in checked.into_iter().enumerate() {
            layers.push(tensors.convert(&config, threads, exact)?);
            progress(per_layer * (i as u64 + 1), all);
        }
        let head = Linear::new(hidden, &[head.as_ref()], threads, exact)?;
        progress(all, all);
        Ok(Self { config, products, embedding, layers, norm, head })
    }

    /// The numbers of this model.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Name of the kernel that multiplies with the weights; `f32` for [`Products::Exact`].
    pub fn products(&self) -> &'static str {
        match self.products {
            Products::Quantized => matmul::kernel(),
            Products::Exact => "f32",
        }
    }

    /// Runs one step; `logits` becomes f32 `[wanted][vocabulary]`. `stored` sees the keys and values before they are
    /// stored, or puts its own in their place. Call it on the engine's pool.
    ///
    /// # Errors
    /// [`Error::NoSuchToken`], and those of the cache and attention. After an error the cache of the step's sequences
    /// is not to be used further: some layers may have stored the step, others not.
    pub fn forward(
        &self,
        step: &Step<'_>,
        cache: &mut Cache,
        attention: &mut Attention,
        stored: Option<&mut (dyn StoredRows + '_)>,
        logits: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let mut stream = self.embed(step.tokens)?;
        self.run_layers(0..self.layers.len(), step, &mut stream, cache, attention, stored)?;
        self.head(&stream, logits)
    }

    /// Runs some layers of a step. `stream`: what enters the first of them, f32 `[rows][hidden]` ([`Model::embed`] gives it for
    /// layer 0); becomes what leaves the last one. Behind the model's last layer only the wanted rows are left.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn run_layers(
        &self,
        range: std::ops::Range<usize>,
        step: &Step<'_>,
        stream: &mut Vec<f32>,
        cache: &mut Cache,
        attention: &mut Attention,
        mut stored: Option<&mut (dyn StoredRows + '_)>,
    ) -> Result<(), Error> {
        let (hidden, shape) = (self.config.hidden, self.config.shape);
        let mut buffers = Buffers::default();
        buffers.qkv.resize(3, Vec::new());
        buffers.added.resize(1, Vec::new());
        buffers.gate_up.resize(2, Vec::new());
        let rotations = self.rotations(step.positions);
        buffers.attended.resize(step.tokens.len() * shape.q_heads * shape.head_dim, 0.0);
        let last = self.layers.len() - 1;
        for i in range {
            let layer = &self.layers[i];
            self.project(i, stream, &rotations, &mut buffers)?;
            let [q, k, v] = &mut buffers.qkv[..] else { unreachable!("three outputs") };
            step.bases[i].enter(&shape, q, k, v);
            if let Some(stored) = &mut stored {
                stored.pass(cache.layer_config(i)?.scheme.row_format(), &shape, k, v);
            }
            let scale = self.config.score_scale;
            attention::attend_step(cache, attention, i, step.batch, scale, (q, k, v), &mut buffers.attended)?;
            step.bases[i].leave(&shape, &mut buffers.attended);
            if i == last {
                // Behind the last attention each row goes its own way: rows without wanted logits end here.
                keep_rows(stream, hidden, step.wanted);
                keep_rows(&mut buffers.attended, shape.q_heads * shape.head_dim, step.wanted);
            }
            let epsilon = self.config.norm_epsilon;
            let post = |i: usize, added: &mut [f32]| {
                if let Some(norms) = &layer.post_norms {
                    normalize_in_place(added, &norms[i], epsilon);
                }
            };
            layer.output.forward(&buffers.attended, &mut buffers.added)?;
            post(0, &mut buffers.added[0]);
            add(stream, &buffers.added[0]);
            normalize(stream, &layer.feed_forward_norm, epsilon, &mut buffers.normed);
            layer.gate_up.forward(&buffers.normed, &mut buffers.gate_up)?;
            let [gate, up] = &mut buffers.gate_up[..] else { unreachable!("two outputs") };
            match self.config.architecture.activation() {
                Activation::Silu => gated(gate, up, silu),
                Activation::Gelu => gated(gate, up, gelu),
            }
            layer.down.forward(gate, &mut buffers.added)?;
            post(1, &mut buffers.added[0]);
            add(stream, &buffers.added[0]);
        }
        Ok(())
    }

    fn rotations(&self, positions: &[usize]) -> Rotations {
        let Config { shape, rope, pairing, windows, .. } = &self.config;
        let of = |rope: &_| Rotation::new(positions, shape.head_dim, rope, *pairing);
        Rotations { global: of(rope), windowed: windows.as_ref().map(|w| of(&w.rope)) }
    }

    /// Queries, keys and values of a layer's rows, rotated by their positions, into `buffers.qkv`.
    fn project(&self, i: usize, stream: &[f32], rotations: &Rotations, buffers: &mut Buffers) -> Result<(), Error> {
        let (layer, shape) = (&self.layers[i], self.config.shape);
        normalize(stream, &layer.attention_norm, self.config.norm_epsilon, &mut buffers.normed);
        layer.qkv.forward(&buffers.normed, &mut buffers.qkv)?;
        for (rows, bias) in buffers.qkv.iter_mut().zip(layer.biases.iter().flatten()) {
            each_row(rows, bias.len(), |_, row| add(row, bias));
        }
        let [q, k, _] = &mut buffers.qkv[..] else { unreachable!("three outputs") };
        if let Some([of_q, of_k]) = &layer.head_norms {
            normalize_in_place(q, of_q, self.config.norm_epsilon);
            normalize_in_place(k, of_k, self.config.norm_epsilon);
        }
        let windowed = rotations.windowed.as_ref().filter(|_| self.config.attention(i).visible.is_some());
        let rotation = windowed.unwrap_or(&rotations.global);
        rotate(rotation, q, shape.q_heads * shape.head_dim);
        rotate(rotation, k, shape.row_len());
        Ok(())
    }

    /// What a layer would store and ask: queries f32 `[rows][q_heads][head_dim]` and keys `[rows][kv_heads][head_dim]` of the
    /// rows of `stream` at these positions, after RoPE.
    ///
    /// # Errors
    /// None today, as [`Linear::forward`].
    pub fn queries_and_keys(
        &self,
        layer: usize,
        stream: &[f32],
        positions: &[usize],
    ) -> Result<(Vec<f32>, Vec<f32>), Error> {
        let rotations = self.rotations(positions);
        let mut buffers = Buffers::default();
        buffers.qkv.resize(3, Vec::new());
        self.project(layer, stream, &rotations, &mut buffers)?;
        let mut qkv = buffers.qkv.into_iter();
        Ok((qkv.next().unwrap_or_default(), qkv.next().unwrap_or_default()))
    }

    /// Logits f32 `[rows][vocabulary]` of rows that have left the last layer.
    ///
    /// # Errors
    /// None today, as [`Linear::forward`].
    pub fn head(&self, stream: &[f32], logits: &mut Vec<f32>) -> Result<(), Error> {
        let mut normed = Vec::new();
        normalize(stream, &self.norm, self.config.norm_epsilon, &mut normed);
        let mut out = [std::mem::take(logits)];
        self.head.forward(&normed, &mut out)?;
        let [out] = out;
        *logits = out;
        Ok(())
    }

    /// The rows that enter layer 0, f32 `[rows][hidden]`.
    ///
    /// # Errors
    /// [`Error::NoSuchToken`].
    pub fn embed(&self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let vocabulary = self.config.vocabulary;
        if let Some(&token) = tokens.iter().find(|&&t| t as usize >= vocabulary) {
            return Err(Error::NoSuchToken { token, vocabulary });
        }
        let rows = self.embedding.embedding(&Tensor::new(tokens, &Device::Cpu)?)?;
        let mut rows = rows.flatten_all()?.to_vec1()?;
        if self.config.embedding_scale != 1.0 {
            rows.iter_mut().for_each(|x| *x *= self.config.embedding_scale);
        }
        Ok(rows)
    }
}

/// The tensors of one layer, found and of the right shape.
pub(crate) struct LayerTensors<'a> {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) qkv: [Box<dyn WeightRows + 'a>; 3],
    pub(crate) biases: Option<[Vec<f32>; 3]>,
    pub(crate) head_norms: Option<[Vec<f32>; 2]>,
    pub(crate) output: Box<dyn WeightRows + 'a>,
    pub(crate) feed_forward_norm: Vec<f32>,
    pub(crate) gate_up: [Box<dyn WeightRows + 'a>; 2],
    pub(crate) down: Box<dyn WeightRows + 'a>,
    pub(crate) post_norms: Option<[Vec<f32>; 2]>,
}

impl<'a> LayerTensors<'a> {
    pub(crate) fn find(source: &'a Source, config: &Config, layer: usize) -> Result<Self, Error> {
        let of = |name: &str| format!("blk.{layer}.{name}.weight");
        let (hidden, forward) = (config.hidden, config.feed_forward);
        let (q_len, kv_len) = (config.shape.q_heads * config.shape.head_dim, config.shape.row_len());
        let bias = |name: &str, len: usize| source.vector(&format!("blk.{layer}.{name}.bias"), len);
        let norms = |first: &str, second: &str, len: usize| -> Result<_, Error> {
            Ok(Some([source.vector(&of(first), len)?, source.vector(&of(second), len)?]))
        };
        let built = config.architecture;
        Ok(Self {
            biases: match built.has_biases() {
                true => Some([bias("attn_q", q_len)?, bias("attn_k", kv_len)?, bias("attn_v", kv_len)?]),
                false => None,
            },
            head_norms: match built.has_head_norms() {
                true => norms("attn_q_norm", "attn_k_norm", config.shape.head_dim)?,
                false => None,
            },
            post_norms: match built.has_post_norms() {
                true => norms("post_attention_norm", "post_ffw_norm", hidden)?,
                false => None,
            },
            attention_norm: source.vector(&of("attn_norm"), hidden)?,
            qkv: [
                source.matrix(&of("attn_q"), q_len, hidden)?,
                source.matrix(&of("attn_k"), kv_len, hidden)?,
                source.matrix(&of("attn_v"), kv_len, hidden)?,
            ],
            output: source.matrix(&of("attn_output"), hidden, q_len)?,
            feed_forward_norm: source.vector(&of("ffn_norm"), hidden)?,
            gate_up: [source.matrix(&of("ffn_gate"), forward, hidden)?, source.matrix(&of("ffn_up"), forward, hidden)?],
            down: source.matrix(&of("ffn_down"), hidden, forward)?,
        })
    }

    fn convert(self, config: &Config, threads: usize, exact: bool) -> Result<Layer, Error> {
        let rows = |m: &[&dyn WeightRows], k: usize| Linear::new(k, m, threads, exact);
        let ([q, k, v], [gate, up]) = (&self.qkv, &self.gate_up);
        Ok(Layer {
            qkv: rows(&[q.as_ref(), k.as_ref(), v.as_ref()], config.hidden)?,
            output: rows(&[self.output.as_ref()], config.shape.q_heads * config.shape.head_dim)?,
            gate_up: rows(&[gate.as_ref(), up.as_ref()], config.hidden)?,
            down: rows(&[self.down.as_ref()], config.feed_forward)?,
            biases: self.biases,
            head_norms: self.head_norms,
            post_norms: self.post_norms,
            attention_norm: self.attention_norm,
            feed_forward_norm: self.feed_forward_norm,
        })
    }
}

/// Elements below which splitting an elementwise loop over threads costs more than it saves.
const SERIAL: usize = 1 << 14;

/// Runs `each(i, values)` over chunks of `width` (the last may be short), on all threads when there is enough to do.
fn each_row(values: &mut [f32], width: usize, each: impl Fn(usize, &mut [f32]) + Sync) {
    if values.len() < SERIAL {
        values.chunks_mut(width).enumerate().for_each(|(i, row)| each(i, row));
    } else {
        values.par_chunks_mut(width).enumerate().for_each(|(i, row)| each(i, row));
    }
}

/// RMS norm: `x / sqrt(mean(x^2) + epsilon) * weight`.
fn normalize(x: &[f32], weight: &[f32], epsilon: f32, out: &mut Vec<f32>) {
    out.clear();
    out.extend_from_slice(x);
    normalize_in_place(out, weight, epsilon);
}

/// The same in place, of rows as long as `weight`.
fn normalize_in_place(values: &mut [f32], weight: &[f32], epsilon: f32) {
    each_row(values, weight.len(), |_, row| {
        let squares: f64 = row.iter().map(|x| f64::from(x * x)).sum();
        let scale = (squares / row.len() as f64 + f64::from(epsilon)).sqrt().recip() as f32;
        row.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
    });
}

fn rotate(rotation: &Rotation, rows: &mut [f32], width: usize) {
    each_row(rows, width, |r, row| rotation.apply(r, row));
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f32) -> f32 {
    let root = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    0.5 * x * (1.0 + (root * (x + 0.044_715 * x * x * x)).tanh())
}

/// `gate = bend(gate) * up`.
fn gated(gate: &mut [f32], up: &[f32], bend: impl Fn(f32) -> f32 + Sync) {
    const CHUNK: usize = 512;
    each_row(gate, CHUNK, |i, gate| {
        for (g, u) in gate.iter_mut().zip(&up[i * CHUNK..]) {
            *g = bend(*g) * u;
        }
    });
}

fn add(stream: &mut [f32], added: &[f32]) {
    for (s, a) in stream.iter_mut().zip(added) {
        *s += a;
    }
}

/// Keeps only these rows (ascending), in place.
fn keep_rows(values: &mut Vec<f32>, width: usize, rows: &[usize]) {
    for (to, &from) in rows.iter().enumerate() {
        values.copy_within(from * width..(from + 1) * width, to * width);
    }
    values.truncate(rows.len() * width);
}
