//! Weights on the card. In: an open model, or a shape and a seed; out: matrices in bf16 and vectors in f32.
//! NOT here: what is computed with them (step.rs).

use super::kernels::{Kernels, at};
use super::shapes::Shape;
use crate::Error;
use crate::model::linear::WeightRows;
use crate::model::{Basis, Config, LayerTensors, Turn};
use crate::source::Source;
use half::bf16;
use kvant_kv::cuda::Gpu;
use kvant_kv::cuda::cudarc::driver::CudaSlice;
use rayon::prelude::*;
use std::sync::Arc;

/// Numbers that are converted at a time while a matrix is read.
const READ_AT_ONCE: usize = 1 << 24;

/// One layer's weights; matrices have one row per output.
pub(super) struct LayerWeights {
    pub attention_norm: CudaSlice<f32>,
    /// bf16 `[q_len + 2 kv_len][hidden]`.
    pub qkv: CudaSlice<bf16>,
    /// f32 `[q_len + 2 kv_len]`.
    pub biases: Option<CudaSlice<f32>>,
    /// f32 `[2][head_dim]`: of q, of k.
    pub head_norms: Option<CudaSlice<f32>>,
    /// bf16 `[hidden][q_len]`; takes heads in the basis that the layer's values are stored in.
    pub output: CudaSlice<bf16>,
    pub feed_forward_norm: CudaSlice<f32>,
    /// bf16 `[2 feed_forward][hidden]`: gates, then ups.
    pub gate_up: CudaSlice<bf16>,
    /// bf16 `[hidden][feed_forward]`.
    pub down: CudaSlice<bf16>,
}

/// A model's weights on the card.
pub struct Weights {
    pub(super) gpu: Arc<Gpu>,
    pub(super) kernels: Kernels,
    pub(super) config: Config,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: CudaSlice<f32>,
    /// bf16 `[vocabulary][hidden]`.
    pub(super) embedding: CudaSlice<bf16>,
    /// None: the embedding.
    pub(super) head: Option<CudaSlice<bf16>>,
}

impl Weights {
    /// Reads a model's weights and rounds them to bf16; `progress(done, all)` counts layers.
    ///
    /// # Errors
    /// Those of [`crate::model::Model::load`]; [`Error::CpuOnly`]; [`Error::Kv`] for a GPU that refuses or has too little memory.
    pub fn load(gpu: &Arc<Gpu>, source: &Source, progress: &dyn Fn(u64, u64)) -> Result<Self, Error> {
        let config = source.config()?;
        super::check_config(&config)?;
        let (hidden, forward, shape) = (config.hidden, config.feed_forward, config.shape);
        let found =
            (0..config.layers).map(|i| LayerTensors::find(source, &config, i)).collect::<Result<Vec<_>, _>>()?;
        let norm = source.vector("output_norm.weight", hidden)?;
        let embedding = source.matrix("token_embd.weight", config.vocabulary, hidden)?;
        let head = match source.has_head() {
            true => Some(source.matrix("output.weight", config.vocabulary, hidden)?),
            false => None,
        };
        source.check_all_taken(&config)?;
        let matrix = |parts: &[&dyn WeightRows], k: usize| upload(gpu, parts, k);
        let vector = |values: &[f32]| gpu.upload(values);
        let mut layers = Vec::with_capacity(config.layers);
        for t in found {
            let ([q, k, v], [gate, up]) = (&t.qkv, &t.gate_up);
            layers.push(LayerWeights {
                attention_norm: vector(&t.attention_norm)?,
                qkv: matrix(&[q.as_ref(), k.as_ref(), v.as_ref()], hidden)?,
                biases: t.biases.map(|b| vector(&b.concat())).transpose()?,
                head_norms: t.head_norms.map(|n| vector(&n.concat())).transpose()?,
                output: matrix(&[t.output.as_ref()], shape.q_heads * shape.head_dim)?,
                feed_forward_norm: vector(&t.feed_forward_norm)?,
                gate_up: matrix(&[gate.as_ref(), up.as_ref()], hidden)?,
                down: matrix(&[t.down.as_ref()], forward)?,
            });
            progress(layers.len() as u64, config.layers as u64);
        }
        let norm = vector(&norm)?;
        let embedding = matrix(&[embedding.as_ref()], hidden)?;
        let head = head.map(|head| matrix(&[head.as_ref()], hidden)).transpose()?;
        gpu.synchronize()?;
        Ok(Self { gpu: gpu.clone(), kernels: Kernels::load(gpu)?, config, layers, norm, embedding, head })
    }

    /// Random weights of a shape: about normal, of deviation `1/sqrt(inputs)`; norms are 1. Same seed, same weights.
    ///
    /// # Errors
    /// [`Error::Kv`] for a GPU that refuses or has too little memory.
    pub fn random(gpu: &Arc<Gpu>, shape: &Shape, seed: u64) -> Result<Self, Error> {
        let config = shape.config.clone();
        super::check_config(&config)?;
        let kernels = Kernels::load(gpu)?;
        let (hidden, forward, heads) = (config.hidden, config.feed_forward, config.shape);
        let (q_len, kv_len) = (heads.q_heads * heads.head_dim, heads.row_len());
        let mut made = 0u64;
        let mut matrix = |rows: usize, k: usize| -> Result<CudaSlice<bf16>, Error> {
            let buffer = gpu.zeros(rows * k)?;
            made += 1;
            // Far apart, so that no two matrices share their numbers.
            kernels.random_fill(at(gpu, &buffer), rows * k, seed ^ made << 40, (k as f32).sqrt().recip())?;
            Ok(buffer)
        };
        let ones = |n: usize| gpu.upload(&vec![1f32; n]);
        let architecture = config.architecture;
        let mut layers = Vec::with_capacity(config.layers);
        for _ in 0..config.layers {
            layers.push(LayerWeights {
                attention_norm: ones(hidden)?,
                qkv: matrix(q_len + 2 * kv_len, hidden)?,
                biases: architecture.has_biases().then(|| gpu.zeros(q_len + 2 * kv_len)).transpose()?,
                head_norms: architecture.has_head_norms().then(|| ones(2 * heads.head_dim)).transpose()?,
                output: matrix(hidden, q_len)?,
                feed_forward_norm: ones(hidden)?,
                gate_up: matrix(2 * forward, hidden)?,
                down: matrix(hidden, forward)?,
            });
        }
        let embedding = matrix(config.vocabulary, hidden)?;
        let head = (!shape.tied).then(|| matrix(config.vocabulary, hidden)).transpose()?;
        let norm = ones(hidden)?;
        gpu.synchronize()?;
        Ok(Self { gpu: gpu.clone(), kernels, config, layers, norm, embedding, head })
    }

    /// The card that they are on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes that the matrices take.
    pub fn bytes(&self) -> usize {
        let of = |l: &LayerWeights| l.qkv.len() + l.output.len() + l.gate_up.len() + l.down.len();
        let all = self.layers.iter().map(of).sum::<usize>() + self.embedding.len();
        (all + self.head.as_ref().map_or(0, CudaSlice::len)) * size_of::<bf16>()
    }

    /// Makes each layer's output projection take heads as its basis stores values: nothing then has to turn attention's rows
    /// back. Once per loaded model. Costs one more rounding of that projection to bf16.
    pub(super) fn take_bases(&self, bases: &[Basis]) -> Result<(), Error> {
        let heads = self.config.shape;
        for (layer, basis) in self.layers.iter().zip(bases).filter(|(_, basis)| basis.values != Turn::None) {
            let output = at(&self.gpu, &layer.output);
            self.kernels.turn_weights(output, self.config.hidden, heads.q_heads, heads.head_dim, basis.values)?;
        }
        Ok(self.gpu.synchronize()?)
    }
}

/// Reads matrices of `k` columns one behind the other and rounds them to bf16.
fn upload(gpu: &Gpu, matrices: &[&dyn WeightRows], k: usize) -> Result<CudaSlice<bf16>, Error> {
    let rows: usize = matrices.iter().map(|m| m.rows()).sum();
    let mut buffer = gpu.zeros::<bf16>(rows * k)?;
    let at_once = (READ_AT_ONCE / k).max(1);
    let (mut values, mut rounded) = (Vec::new(), Vec::new());
    let mut done = 0;
    for matrix in matrices {
        for first in (0..matrix.rows()).step_by(at_once) {
            let part = first..matrix.rows().min(first + at_once);
            values.resize(part.len() * k, 0f32);
            matrix.read(part, &mut values)?;
            values.par_iter().map(|&x| bf16::from_f32(x)).collect_into_vec(&mut rounded);
            let mut to = buffer.slice_mut(done..done + rounded.len());
            gpu.stream().memcpy_htod(&rounded, &mut to).map_err(kvant_kv::Error::from)?;
            done += rounded.len();
        }
    }
    Ok(buffer)
}
