//! Decode attention on the GPU: which configuration of attend.cu a card and a shape take, and its launch. In: device pointers
//! and numbers; out: one launch on the card's stream.
//! NOT here: the algorithm (attend.cu), how work is cut (plan.cuh), who owns the memory (cuda/).

#[cfg(test)]
mod parity;
pub(crate) mod prefill;

use crate::Error;
use crate::cache::cuda::layout::RecordShape;
use crate::cache::cuda::{HEADERS as LAID_OUT, Rule, record_defines};
use crate::device::cuda::{Gpu, Launch, Program, argument};
use cudarc::driver::{CudaFunction, DeviceRepr, sys};

/// Query heads that one pass takes: the columns of a matrix instruction.
pub(crate) const HEADS: usize = 8;

/// Headers of all kernels here.
pub(crate) const HEADERS: &[(&str, &str)] = &[
    LAID_OUT[0],
    LAID_OUT[1],
    LAID_OUT[2],
    ("plan.cuh", include_str!("plan.cuh")),
    ("attend.cuh", include_str!("attend.cuh")),
];

/// `Params` of attend.cu; pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Params {
    /// Records, pages of plain tiles, window, sinks.
    pub layer: [u64; 4],
    pub layer_stride: [u64; 4],
    pub q: u64,
    pub out: u64,
    pub sink_logits: u64,
    pub lens: u64,
    pub slots: u64,
    pub first_visible: u64,
    pub table: u64,
    pub plan: u64,
    pub partials: u64,
    pub counters: u64,
    pub rule: Rule,
    pub batch: u32,
    pub kv_heads: u32,
    pub ratio: u32,
    pub head_blocks: u32,
    pub table_len: u32,
    pub groups_log2: u32,
    pub tiles_log2: u32,
    pub window_tiles: u32,
    pub all_paged: u32,
    pub chunk: u32,
    pub scale: f32,
    pub softcap: f32,
    pub partial_stride: u32,
    pub pass: u32,
}
// SAFETY: plain numbers, laid out as C does.
unsafe impl DeviceRepr for Params {}

/// What a launch of attend.cu is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    pub warps: usize,
    /// Parts in a warp's ring.
    pub slots: usize,
    pub blocks_per_sm: usize,
    pub shared: usize,
}

/// Shared memory that every block has beside what it asks for.
const RESERVED: usize = 1024;

impl Config {
    /// For a card whose blocks can have `shared` bytes. `crowded`: there are more rows than multiprocessors, so that two smaller
    /// blocks of each hide each other's beginnings and ends.
    pub(crate) fn choose(record: &RecordShape, shared: usize, crowded: bool) -> Self {
        // Registers: heads of 256 channels need more than sixteen warps leave.
        let (warps, blocks_per_sm) = match (record.head_dim > 128, crowded) {
            (true, _) => (8, 1),
            (false, true) => (8, 2),
            (false, false) => (16, 1),
        };
        for (warps, blocks_per_sm) in [(warps, blocks_per_sm), (8, 1), (4, 1)] {
            let limit = (shared + RESERVED) / blocks_per_sm - RESERVED;
            for slots in (2..=6).rev() {
                let needed = shared_bytes(record, warps, slots);
                if needed <= limit {
                    return Self { warps, slots, blocks_per_sm, shared: needed };
                }
            }
        }
        let (warps, slots, blocks_per_sm) = (4, 1, 1);
        Self { warps, slots, blocks_per_sm, shared: shared_bytes(record, warps, slots) }
    }
}

/// SHARED_BYTES of attend.cu.
fn shared_bytes(record: &RecordShape, warps: usize, slots: usize) -> usize {
    let slot = match record.is_plain() {
        true => record.tile_half_bytes(),
        false => record.tile_half_bytes().max(record.k_param_bytes() + record.part_bytes()),
    };
    let state = (record.slices() * 4 + 4) * 32 * 4;
    let work = (warps * slots * slot).max((warps / 2 + 1) * state);
    let q_words = record.channels() / 2 + (40 - record.channels() / 2 % 32) % 32;
    // The last summand: Kept, an item of 10 words, a row of 10, one more.
    work + HEADS * q_words * 4 + warps * HEADS * 4 + warps * slots * 8 + 16 + 21 * 4
}

/// What is written where results go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutFormat {
    /// f32.
    F32,
    /// bf16.
    Bf16,
}

/// Attend.cu for this shape.
pub(crate) fn program(record: &RecordShape, config: &Config, softcap: bool, out: OutFormat) -> Program {
    let mut defines = record_defines(record);
    defines.extend([
        format!("WARPS={}", config.warps),
        format!("SLOTS={}", config.slots),
        format!("BLOCKS_PER_SM={}", config.blocks_per_sm),
        format!("SHARED={}", config.shared),
        format!("PARAMS_BYTES={}", size_of::<Params>()),
        format!("SOFTCAP={}", u8::from(softcap)),
        format!("OUT_BF16={}", u8::from(out == OutFormat::Bf16)),
    ]);
    let registers = (65536 / (config.warps * 32 * config.blocks_per_sm)).min(255) as u32;
    Program { name: "attend", source: include_str!("attend.cu"), headers: HEADERS, defines, registers, spills: 64 }
}

/// Plan.cu.
pub(crate) fn plan_program() -> Program {
    Program {
        name: "plan",
        source: include_str!("plan.cu"),
        headers: HEADERS,
        defines: Vec::new(),
        registers: 64,
        spills: 0,
    }
}

/// A configuration, loaded on a card.
pub(crate) struct Kernel {
    pub config: Config,
    function: CudaFunction,
}

impl Kernel {
    /// Compiles it, unless that was done before.
    pub(crate) fn load(
        gpu: &Gpu,
        record: &RecordShape,
        crowded: bool,
        softcap: bool,
        out: OutFormat,
    ) -> Result<Self, Error> {
        let config = Config::choose(record, gpu.shared_bytes(), crowded);
        let function = gpu.function(&program(record, &config, softcap, out), "attend")?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, config.shared as i32)?;
        Ok(Self { config, function })
    }

    /// Blocks of one layer.
    pub(crate) fn blocks(&self, gpu: &Gpu) -> usize {
        gpu.multiprocessors() * self.config.blocks_per_sm
    }

    /// Launches it for `layers` layers, `params.layer` being the first one's, on so many blocks each.
    pub(crate) fn launch(&self, gpu: &Gpu, params: &Params, layers: usize, blocks: usize) -> Result<(), Error> {
        let launch = Launch {
            grid: (blocks as u32, layers as u32),
            block: self.config.warps as u32 * 32,
            shared_bytes: self.config.shared as u32,
            early: true,
        };
        // SAFETY: the parameters have the layout that the kernel declares; what they point to is owned by the caller's cache, and
        // lives until the stream has done the work.
        unsafe { gpu.launch(&self.function, launch, &[argument(params)]) }?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of every shape fits the smallest cards that kernels run on (99 KB of shared memory), and sm_90's.
    #[test]
    fn every_shape_has_a_configuration() {
        for head_dim in crate::shape::HEAD_DIMS {
            let mut shapes = vec![RecordShape::plain(head_dim)];
            for group_len in crate::scheme::GROUP_LENS {
                for (k_bits, v_bits) in
                    crate::scheme::BITS.into_iter().flat_map(|k| crate::scheme::BITS.map(|v| (k, v)))
                {
                    shapes.push(RecordShape { head_dim, group_len, k_bits, v_bits });
                }
            }
            for (shape, shared, crowded) in shapes
                .iter()
                .flat_map(|s| [(s, 101_376, false), (s, 101_376, true), (s, 232_448, false), (s, 232_448, true)])
            {
                let config = Config::choose(shape, shared, crowded);
                assert!(config.slots >= 2, "{shape:?} {config:?}");
                assert!((config.shared + RESERVED) * config.blocks_per_sm <= shared + RESERVED, "{shape:?} {config:?}");
            }
        }
    }
}
