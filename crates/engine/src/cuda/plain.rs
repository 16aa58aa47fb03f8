//! The simplest cache on the card: every token in f16, one slow kernel of attention. The control that tests of the model run
//! over, so that what they see is the model's own error.
//! NOT here: packed caches and fast attention (kvant-kv).

use super::cache::StepCache;
use super::kernels::{at, plain};
use half::{bf16, f16};
use kvant_kv::cuda::cudarc::driver::{CudaFunction, CudaSlice, CudaView};
use kvant_kv::cuda::{Gpu, Launch, argument};
use kvant_kv::{Error, LayerShape};
use std::sync::Arc;

/// Arguments of plain.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Plain {
    k: u64,
    v: u64,
    positions: u64,
    slots: u64,
    max_tokens: u32,
    q_heads: u32,
    kv_heads: u32,
    d: u32,
    scale: f32,
}

/// f16 `[layer][k, v][slot][max_tokens][kv_heads][head_dim]`.
pub struct PlainCache {
    gpu: Arc<Gpu>,
    shape: LayerShape,
    layers: Vec<[CudaSlice<f16>; 2]>,
    max_tokens: usize,
    lens: Vec<usize>,
    append: CudaFunction,
    attend: CudaFunction,
    positions: CudaSlice<u32>,
    slots: CudaSlice<u32>,
    /// Slots of the step under way, and rows of it.
    batch: Vec<usize>,
    rows: usize,
    added: usize,
}

impl PlainCache {
    /// An empty cache; steps have up to `most_rows` rows.
    ///
    /// # Errors
    /// [`Error::GpuOutOfMemory`], [`Error::Gpu`].
    pub fn new(
        gpu: &Arc<Gpu>,
        layers: usize,
        shape: LayerShape,
        (slots, max_tokens): (usize, usize),
        most_rows: usize,
    ) -> Result<Self, Error> {
        let len = slots * max_tokens * shape.row_len();
        let layers = (0..layers).map(|_| Ok([gpu.zeros(len)?, gpu.zeros(len)?])).collect::<Result<_, Error>>()?;
        Ok(Self {
            append: gpu.function(&plain(), "plain_append")?,
            attend: gpu.function(&plain(), "plain_attend")?,
            positions: gpu.zeros(most_rows)?,
            slots: gpu.zeros(most_rows)?,
            lens: vec![0; slots],
            batch: Vec::new(),
            rows: 0,
            added: 0,
            gpu: gpu.clone(),
            shape,
            layers,
            max_tokens,
        })
    }

    /// Forgets what a slot holds.
    pub fn clear(&mut self, slot: usize) {
        self.lens[slot] = 0;
    }

    fn begin(&mut self, slots: Vec<u32>, positions: Vec<u32>, batch: &[usize], added: usize) -> Result<(), Error> {
        if let Some(&slot) = batch.iter().find(|&&s| s >= self.lens.len()) {
            return Err(Error::NoSuchSequence { id: slot });
        }
        let most = batch.iter().map(|&s| self.lens[s] + added).max().unwrap_or(0);
        if most > self.max_tokens {
            return Err(Error::OutOfBlocks { need: most, free: self.max_tokens });
        }
        (self.batch, self.rows, self.added) = (batch.to_vec(), slots.len(), added);
        self.gpu.stream().memcpy_htod(&slots, &mut self.slots)?;
        Ok(self.gpu.stream().memcpy_htod(&positions, &mut self.positions)?)
    }

    fn end(&mut self) {
        for slot in self.batch.drain(..) {
            self.lens[slot] += self.added;
        }
    }

    fn arguments(&self, layer: usize, scale: f32) -> Plain {
        let [k, v] = &self.layers[layer];
        Plain {
            k: at(&self.gpu, k),
            v: at(&self.gpu, v),
            positions: at(&self.gpu, &self.positions),
            slots: at(&self.gpu, &self.slots),
            max_tokens: self.max_tokens as u32,
            q_heads: self.shape.q_heads as u32,
            kv_heads: self.shape.kv_heads as u32,
            d: self.shape.head_dim as u32,
            scale,
        }
    }

    fn store_rows(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        let (p, k, v) = (self.arguments(layer, 0.0), at(&self.gpu, k), at(&self.gpu, v));
        let launch = Launch { grid: (self.rows as u32, 1), block: 128, shared_bytes: 0, early: false };
        // SAFETY: arguments as plain.cu declares them; `begin` checked that slots and positions lie in the cache, and a step's
        // buffers have room for its rows.
        unsafe { self.gpu.launch(&self.append, launch, &[argument(&p), argument(&k), argument(&v)]) }
    }

    fn weigh_rows(&self, layer: usize, q: &CudaSlice<f16>, out: &mut CudaSlice<bf16>, scale: f32) -> Result<(), Error> {
        let (p, q, out) = (self.arguments(layer, scale), at(&self.gpu, q), at(&self.gpu, out));
        let grid = (self.shape.q_heads as u32, self.rows as u32);
        let launch = Launch { grid, block: 32, shared_bytes: 0, early: false };
        // SAFETY: as above.
        unsafe { self.gpu.launch(&self.attend, launch, &[argument(&p), argument(&q), argument(&out)]) }
    }
}

impl StepCache for PlainCache {
    fn len(&self, slot: usize) -> usize {
        self.lens[slot]
    }

    fn begin_decode(&mut self, slots: &[usize], bucket: usize) -> Result<(), Error> {
        let mut positions = vec![u32::MAX; bucket];
        for (position, &slot) in positions.iter_mut().zip(slots) {
            *position = self.lens.get(slot).copied().unwrap_or(0) as u32;
        }
        let mut padded: Vec<u32> = slots.iter().map(|&s| s as u32).collect();
        padded.resize(bucket, 0);
        self.begin(padded, positions, slots, 1)
    }

    fn positions(&self) -> CudaView<'_, u32> {
        self.positions.slice(..)
    }

    fn pack_due(&self) -> Result<(), Error> {
        Ok(())
    }

    fn append_decode(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        self.store_rows(layer, k, v)
    }

    fn attend_decode(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<bf16>,
        scale: f32,
    ) -> Result<(), Error> {
        self.weigh_rows(layer, q, out, scale)
    }

    fn end_decode(&mut self) -> Result<(), Error> {
        self.end();
        Ok(())
    }

    fn begin_prefill(&mut self, slot: usize, rows: usize) -> Result<(), Error> {
        let first = self.lens.get(slot).copied().unwrap_or(0);
        let positions = (first..first + rows).map(|p| p as u32).collect();
        self.begin(vec![slot as u32; rows], positions, &[slot], rows)
    }

    fn append_prefill(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        self.store_rows(layer, k, v)
    }

    fn attend_prefill(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<bf16>,
        scale: f32,
    ) -> Result<(), Error> {
        self.weigh_rows(layer, q, out, scale)
    }

    fn end_prefill(&mut self) -> Result<(), Error> {
        self.end();
        Ok(())
    }
}
