//! The model's kernels as functions. In: buffers on the card and numbers; out: work on its stream.
//! NOT here: attention and caches (kvant-kv, plain.rs), products of many rows (library.rs), in which order they run (step.rs).
//!
//! All are launched early: each waits for the one in front before it touches what that wrote (device.cuh).

use super::weights::LayerWeights;
use crate::Error;
use crate::model::rope::Pairing;
use crate::model::{Basis, Config, SIGNS, Turn};
use kvant_kv::cuda::cudarc::driver::sys::CUfunction_attribute;
use kvant_kv::cuda::cudarc::driver::{CudaFunction, CudaSlice, DevicePtr};
use kvant_kv::cuda::{Gpu, Launch, Program, argument};
use std::sync::Arc;

const HEADERS: &[(&str, &str)] = &[("device.cuh", include_str!("device.cuh"))];

/// Every program of this crate: what tests compile for all architectures.
pub fn programs() -> Vec<Program> {
    vec![small(), few(), plain()]
}

fn small() -> Program {
    let source = include_str!("kernels.cu");
    Program { name: "kernels", source, headers: HEADERS, defines: Vec::new(), registers: 48, spills: 0 }
}

/// Two blocks of 256 threads on a multiprocessor.
fn few() -> Program {
    Program {
        name: "few",
        source: include_str!("few.cu"),
        headers: HEADERS,
        defines: Vec::new(),
        registers: 128,
        spills: 0,
    }
}

pub(super) fn plain() -> Program {
    Program {
        name: "plain",
        source: include_str!("plain.cu"),
        headers: HEADERS,
        defines: Vec::new(),
        registers: 56,
        spills: 0,
    }
}

/// Rows that few.cu multiplies at once.
pub(super) const FEW_ROWS: usize = 8;
const FEW_THREADS: u32 = 256;
const FEW_WARPS: usize = 8;
/// Outputs of a tile of few.cu, and inputs that a warp takes at a time.
const FEW_TILE: usize = 8;
const FEW_INPUTS: usize = 64;
/// Parts that a row of logits is searched in.
pub(super) const PARTS: u32 = 16;

/// What a step says of one row, as the card writes it (device.cuh).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub token: u32,
    pub error: u32,
    pub detail: u32,
    pub unused: u32,
}

/// Outcomes in a buffer of u32.
pub(super) const OUTCOME_WORDS: usize = 4;
/// `Outcome::error` of a key or value that f16 cannot hold, with where it is; of a NaN among the logits.
pub(super) const LOST: u32 = 1 << 31;
pub(super) const NAN_LOGIT: u32 = LOST - 1;

/// The signs of the basis as kernels take them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Signs([u32; 8]);

fn signs() -> Signs {
    let bit = |w: usize, b: usize| u32::from(SIGNS[w * 32 + b] < 0.0) << b;
    Signs(std::array::from_fn(|w| (0..32).map(|b| bit(w, b)).sum()))
}

fn turn(turn: Turn) -> u32 {
    match turn {
        Turn::None => 0,
        Turn::Plain => 1,
        Turn::Signed => 2,
    }
}

/// Arguments of `split_heads` in kernels.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Heads {
    qkv: u64,
    biases: u64,
    norms: u64,
    turns: u64,
    positions: u64,
    q: u64,
    k: u64,
    v: u64,
    outcomes: u64,
    signs: Signs,
    rows: u32,
    q_heads: u32,
    kv_heads: u32,
    d: u32,
    layer: u32,
    neighbours: u32,
    turn_keys: u32,
    turn_values: u32,
    epsilon: f32,
}

/// Arguments of few.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Few {
    x: u64,
    norm: u64,
    w: u64,
    out: u64,
    rows: u32,
    n: u32,
    k: u32,
    stride: u32,
    epsilon: f32,
    first: u32,
}

/// What few.cu does with its rows and sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FewKind {
    /// f32 rows, normalized; bf16 sums.
    NormedStore,
    /// bf16 rows; sums are added to f32.
    PlainAdd,
    /// f32 rows, normalized; gates times ups.
    NormedGated,
    /// f32 rows, normalized; f32 sums.
    NormedLogits,
}

impl FewKind {
    /// Bytes of one result.
    pub fn out_bytes(self) -> usize {
        if matches!(self, Self::NormedStore | Self::NormedGated) { 2 } else { 4 }
    }

    fn matrices(self) -> usize {
        if self == Self::NormedGated { 2 } else { 1 }
    }
}

/// A product of few rows.
pub(super) struct FewProduct {
    pub kind: FewKind,
    pub x: u64,
    pub norm: u64,
    pub w: u64,
    pub out: u64,
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub epsilon: f32,
    pub first: usize,
    /// Blocks.
    pub grid: u32,
}

/// The address of a buffer. It is good as long as the buffer lives.
pub(super) fn at<T>(gpu: &Gpu, buffer: &CudaSlice<T>) -> u64 {
    buffer.device_ptr(gpu.stream()).0
}

/// The loaded functions.
pub(super) struct Kernels {
    gpu: Arc<Gpu>,
    embed: CudaFunction,
    norm: CudaFunction,
    gate: CudaFunction,
    heads: CudaFunction,
    likeliest_of_parts: CudaFunction,
    likeliest: CudaFunction,
    random_fill: CudaFunction,
    turn_weights: CudaFunction,
    few: [CudaFunction; 4],
}

/// Buffers of a step that the head kernel reads and writes.
pub(super) struct HeadBuffers<'a> {
    pub qkv: u64,
    pub turns: u64,
    pub positions: u64,
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub outcomes: u64,
    pub rows: usize,
    pub layer: usize,
    pub weights: &'a LayerWeights,
}

impl Kernels {
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self, Error> {
        gpu.prepare(&[small(), few()])?;
        let small = small();
        let of = |entry: &str| gpu.function(&small, entry);
        let few_of = |entry: &str| -> Result<CudaFunction, Error> {
            let function = gpu.function(&few(), entry)?;
            let most = gpu.shared_bytes() as i32;
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, most).map_err(kvant_kv::Error::from)?;
            Ok(function)
        };
        Ok(Self {
            embed: of("embed")?,
            norm: of("rms_norm")?,
            gate: of("gate")?,
            heads: of("split_heads")?,
            likeliest_of_parts: of("likeliest_of_parts")?,
            likeliest: of("likeliest")?,
            random_fill: of("random_fill")?,
            turn_weights: of("turn_weights")?,
            few: [
                few_of("few_normed_store")?,
                few_of("few_plain_add")?,
                few_of("few_normed_gated")?,
                few_of("few_normed_logits")?,
            ],
            gpu: gpu.clone(),
        })
    }

    fn launch(&self, f: &CudaFunction, launch: Launch, arguments: &[*mut std::ffi::c_void]) -> Result<(), Error> {
        // SAFETY: the methods below pass what each kernel declares; buffers are those of step.rs and weights.rs, which are as
        // long as the shapes in the kernels' comments for the rows of a bucket, and live as long as the model.
        Ok(unsafe { self.gpu.launch(f, launch, arguments) }?)
    }

    /// `first` of a chain of kernels: behind a copy nothing can start early.
    pub fn embed(
        &self,
        tokens: u64,
        table: u64,
        stream: u64,
        outcomes: u64,
        rows: usize,
        hidden: usize,
    ) -> Result<(), Error> {
        let hidden = hidden as u32;
        let launch = Launch { grid: (rows as u32, 1), block: 256, shared_bytes: 0, early: false };
        let (t, b, s, o) = (argument(&tokens), argument(&table), argument(&stream), argument(&outcomes));
        self.launch(&self.embed, launch, &[t, b, s, o, argument(&hidden)])
    }

    pub fn norm(
        &self,
        x: u64,
        weight: u64,
        out: u64,
        (first, rows): (usize, usize),
        config: &Config,
    ) -> Result<(), Error> {
        let (hidden, epsilon, first) = (config.hidden as u32, config.norm_epsilon, first as u32);
        let launch = Launch { grid: (rows as u32, 1), block: 256, shared_bytes: 0, early: true };
        let numbers = [argument(&hidden), argument(&epsilon), argument(&first)];
        self.launch(&self.norm, launch, &[&[argument(&x), argument(&weight), argument(&out)][..], &numbers].concat())
    }

    pub fn gate(&self, gate_up: u64, out: u64, rows: usize, width: usize) -> Result<(), Error> {
        let width = width as u32;
        let launch = Launch { grid: (width.div_ceil(256), rows as u32), block: 256, shared_bytes: 0, early: true };
        self.launch(&self.gate, launch, &[argument(&gate_up), argument(&out), argument(&width)])
    }

    pub fn heads(&self, config: &Config, basis: &Basis, b: &HeadBuffers<'_>) -> Result<(), Error> {
        let shape = config.shape;
        let optional = |buffer: &Option<CudaSlice<f32>>| buffer.as_ref().map_or(0, |buffer| at(&self.gpu, buffer));
        let arguments = Heads {
            qkv: b.qkv,
            biases: optional(&b.weights.biases),
            norms: optional(&b.weights.head_norms),
            turns: b.turns,
            positions: b.positions,
            q: b.q,
            k: b.k,
            v: b.v,
            outcomes: b.outcomes,
            signs: signs(),
            rows: b.rows as u32,
            q_heads: shape.q_heads as u32,
            kv_heads: shape.kv_heads as u32,
            d: shape.head_dim as u32,
            layer: b.layer as u32,
            neighbours: u32::from(config.pairing == Pairing::Neighbours),
            turn_keys: turn(basis.keys),
            turn_values: turn(basis.values),
            epsilon: config.norm_epsilon,
        };
        const WARPS: u32 = 4;
        let all = (shape.q_heads + 2 * shape.kv_heads) as u32;
        let grid = (all.div_ceil(WARPS), b.rows as u32);
        let launch = Launch { grid, block: WARPS * 32, shared_bytes: WARPS * 4 * shape.head_dim as u32, early: true };
        self.launch(&self.heads, launch, &[argument(&arguments)])
    }

    /// The likeliest token of each row of logits into outcomes `first..`.
    pub fn likeliest(
        &self,
        logits: u64,
        parts: [u64; 2],
        outcomes: u64,
        (first, rows): (usize, usize),
        vocabulary: usize,
    ) -> Result<(), Error> {
        let (vocabulary, first) = (vocabulary as u32, first as u32);
        let [found, tokens] = parts;
        let launch = Launch { grid: (PARTS, rows as u32), block: 512, shared_bytes: 0, early: true };
        let (f, t) = (argument(&found), argument(&tokens));
        self.launch(&self.likeliest_of_parts, launch, &[argument(&logits), f, t, argument(&vocabulary)])?;
        let launch = Launch { grid: (rows as u32, 1), block: 32, ..launch };
        self.launch(&self.likeliest, launch, &[f, t, argument(&outcomes), argument(&PARTS), argument(&first)])
    }

    /// Fills a matrix with numbers of this deviation that depend on `seed` alone.
    pub fn random_fill(&self, out: u64, count: usize, seed: u64, deviation: f32) -> Result<(), Error> {
        let count = count as u64;
        let launch =
            Launch { grid: (8 * self.gpu.multiprocessors() as u32, 1), block: 256, shared_bytes: 0, early: false };
        self.launch(
            &self.random_fill,
            launch,
            &[argument(&out), argument(&count), argument(&seed), argument(&deviation)],
        )
    }

    /// Rotates each head of an output projection's rows.
    pub fn turn_weights(&self, weights: u64, rows: usize, heads: usize, d: usize, by: Turn) -> Result<(), Error> {
        let (signs, d, by) = (signs(), d as u32, turn(by));
        // A grid has at most 65,535 rows.
        const ROWS: usize = 32_768;
        for first in (0..rows).step_by(ROWS) {
            let part = weights + (first * heads * d as usize * 2) as u64;
            let grid = (heads as u32, ROWS.min(rows - first) as u32);
            let launch = Launch { grid, block: 32, shared_bytes: 4 * d, early: false };
            self.launch(&self.turn_weights, launch, &[argument(&part), argument(&signs), argument(&d), argument(&by)])?;
        }
        Ok(())
    }

    /// Shared memory that few.cu needs; None when it cannot do this product.
    pub fn few_bytes(&self, kind: FewKind, rows: usize, n: usize, k: usize) -> Option<u32> {
        let bytes = rows * few_stride(k) + (2 * kind.matrices() * FEW_WARPS * 64 + 33) * 4;
        let fits = rows <= FEW_ROWS && k.is_multiple_of(FEW_INPUTS) && n.is_multiple_of(FEW_TILE);
        (fits && bytes <= self.gpu.shared_bytes()).then_some(bytes as u32)
    }

    /// Numbers of blocks worth trying: one per tile, and as many as have room at once, with equal shares.
    pub fn few_grids(&self, n: usize) -> Vec<u32> {
        let tiles = (n / FEW_TILE) as u32;
        let mut grids = vec![tiles];
        for per_multiprocessor in [1, 2] {
            let room = per_multiprocessor * self.gpu.multiprocessors() as u32;
            grids.push(tiles.div_ceil(tiles.div_ceil(room)));
        }
        grids.sort_unstable();
        grids.dedup();
        grids
    }

    pub fn few(&self, p: &FewProduct) -> Result<(), Error> {
        let Some(shared_bytes) = self.few_bytes(p.kind, p.rows, p.n, p.k) else {
            return Err(Error::Unsupported { what: format!("a product of {} x {} in few.cu", p.n, p.k) });
        };
        let function = &self.few[p.kind as usize];
        let arguments = Few {
            x: p.x,
            norm: p.norm,
            w: p.w,
            out: p.out,
            rows: p.rows as u32,
            n: p.n as u32,
            k: p.k as u32,
            stride: few_stride(p.k) as u32,
            epsilon: p.epsilon,
            first: p.first as u32,
        };
        let launch = Launch { grid: (p.grid, 1), block: FEW_THREADS, shared_bytes, early: true };
        self.launch(function, launch, &[argument(&arguments)])
    }
}

/// Bytes between rows in shared memory: half a turn of the banks apart, so that two rows are read at once.
fn few_stride(k: usize) -> usize {
    2 * k + if (2 * k).is_multiple_of(128) { 64 } else { 0 }
}
