//! Buffers of a step. In: a model's numbers and the most rows of a step; out: memory on the card, and beside it what is copied.
//! NOT here: weights, caches.

use super::kernels::{OUTCOME_WORDS, PARTS};
use crate::Error;
use crate::model::Config;
use half::{bf16, f16};
use kvant_kv::cuda::Gpu;
use kvant_kv::cuda::cudarc::driver::{CudaSlice, PinnedHostSlice};

/// Rows `[rows]` of everything between two layers, `[wanted]` of logits.
pub(super) struct Buffers {
    pub tokens: CudaSlice<u32>,
    /// Of a prompt's chunk; those of a batch are the cache's.
    pub positions: CudaSlice<u32>,
    /// f64 `[head_dim / 2]`: full turns per position.
    pub turns: CudaSlice<f64>,
    /// The residual stream.
    pub stream: CudaSlice<f32>,
    pub normed: CudaSlice<bf16>,
    pub qkv: CudaSlice<bf16>,
    pub q: CudaSlice<f16>,
    pub k: CudaSlice<f16>,
    pub v: CudaSlice<f16>,
    pub attended: CudaSlice<bf16>,
    pub gate_up: CudaSlice<bf16>,
    pub gated: CudaSlice<bf16>,
    pub logits: CudaSlice<f32>,
    pub part_logits: CudaSlice<f32>,
    pub part_tokens: CudaSlice<u32>,
    pub outcomes: CudaSlice<u32>,
    /// On the host; read and written only while the stream is idle.
    pub host_tokens: PinnedHostSlice<u32>,
    pub host_outcomes: PinnedHostSlice<u32>,
}

impl Buffers {
    /// Bytes of [`Buffers::new`] on the card.
    pub fn bytes(config: &Config, rows: usize, wanted: usize) -> usize {
        let shape = config.shape;
        let (q_len, kv_len) = (shape.q_heads * shape.head_dim, shape.row_len());
        let row = 8 // tokens and positions
            + size_of::<f32>() * config.hidden
            + size_of::<bf16>() * (config.hidden + q_len + 2 * kv_len + q_len + 3 * config.feed_forward)
            + size_of::<f16>() * (q_len + 2 * kv_len)
            + size_of::<u32>() * OUTCOME_WORDS;
        let logits = size_of::<f32>() * config.vocabulary + 2 * size_of::<u32>() * PARTS as usize;
        rows * row + wanted * logits + shape.head_dim / 2 * size_of::<f64>()
    }

    /// Room for chunks of `rows` rows and batches of `wanted`.
    pub fn new(gpu: &Gpu, config: &Config, rows: usize, wanted: usize) -> Result<Self, Error> {
        let (hidden, forward, shape) = (config.hidden, config.feed_forward, config.shape);
        let (q_len, kv_len) = (shape.q_heads * shape.head_dim, shape.row_len());
        let frequencies = config.rope.frequencies(shape.head_dim);
        let turns: Vec<f64> = frequencies.into_iter().map(|f| f / std::f64::consts::TAU).collect();
        Ok(Self {
            tokens: gpu.zeros(rows)?,
            positions: gpu.zeros(rows)?,
            turns: gpu.upload(&turns)?,
            stream: gpu.zeros(rows * hidden)?,
            normed: gpu.zeros(rows * hidden)?,
            qkv: gpu.zeros(rows * (q_len + 2 * kv_len))?,
            q: gpu.zeros(rows * q_len)?,
            k: gpu.zeros(rows * kv_len)?,
            v: gpu.zeros(rows * kv_len)?,
            attended: gpu.zeros(rows * q_len)?,
            gate_up: gpu.zeros(rows * 2 * forward)?,
            gated: gpu.zeros(rows * forward)?,
            logits: gpu.zeros(wanted * config.vocabulary)?,
            part_logits: gpu.zeros(wanted * PARTS as usize)?,
            part_tokens: gpu.zeros(wanted * PARTS as usize)?,
            outcomes: gpu.zeros(rows * OUTCOME_WORDS)?,
            host_tokens: gpu.pinned(rows)?,
            host_outcomes: gpu.pinned(rows * OUTCOME_WORDS)?,
        })
    }
}
