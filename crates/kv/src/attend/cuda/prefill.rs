//! Attention of prompts on the GPU: which configuration of prefill.cu a card and a shape take, how a prompt's rows are cut, and the
//! launch. In: device pointers and numbers; out: one launch on the card's stream.
//! NOT here: the algorithm (prefill.cu), who owns the memory (cuda/).

use super::{HEADERS, OutFormat};
use crate::Error;
use crate::cache::cuda::layout::RecordShape;
use crate::cache::cuda::{Rule, record_defines};
use crate::device::cuda::{Gpu, Program};
use cudarc::driver::{CudaFunction, DeviceRepr, LaunchConfig, PushKernelArg, ValidAsZeroBits, sys};

/// Warps that feed, beside those that multiply.
const FEEDERS: usize = 4;
/// Keys of a stage that a split's beginning and end cost as much as, in stages: measured on an H200.
const SPLIT_COST: usize = 6;
/// Most splits of a row tile.
const SPLITS: usize = 32;

/// `RowTile` of prefill.cuh: rows of one edge.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RowTile {
    pub first: u32,
    pub tokens: u32,
}
// SAFETY: plain numbers, laid out as C does.
unsafe impl DeviceRepr for RowTile {}
// SAFETY: numbers, for which zero bits are zeros.
unsafe impl ValidAsZeroBits for RowTile {}

/// `Params` of prefill.cuh; pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Params {
    pub records: u64,
    pub pages: u64,
    pub scratch: u64,
    pub sinks: u64,
    pub q: u64,
    pub out: u64,
    pub sink_logits: u64,
    pub tiles: u64,
    pub table: u64,
    pub partials: u64,
    pub counters: u64,
    pub rule: Rule,
    pub row_tiles: u32,
    pub kv_heads: u32,
    pub ratio: u32,
    pub splits: u32,
    pub begin: u32,
    pub first_visible: u32,
    pub slot: u32,
    pub table_len: u32,
    pub groups_of_page: u32,
    pub tiles_of_page: u32,
    pub scratch_first: u32,
    pub scratch_tiles: u32,
    pub scale: f32,
    pub softcap: f32,
}
// SAFETY: plain numbers, laid out as C does.
unsafe impl DeviceRepr for Params {}

/// What a launch of prefill.cu is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Config {
    /// The matrix instructions of warp groups, which only sm_90a has.
    wgmma: bool,
    /// Warps that multiply, 16 rows each.
    warps: usize,
    /// Keys of a stage.
    stage: usize,
    /// Stages in flight.
    slots: usize,
    shared: usize,
}

impl Config {
    pub(crate) fn choose(record: &RecordShape, architecture: &str) -> Self {
        let wgmma = architecture == "sm_90a";
        let (warps, stage) = if !wgmma && record.head_dim > 128 { (4, 32) } else { (8, 64) };
        let mut config = Self { wgmma, warps, stage, slots: 2, shared: 0 };
        config.shared = config.shared_bytes(record);
        config
    }

    /// SHARED_BYTES of prefill.cuh.
    fn shared_bytes(&self, record: &RecordShape) -> usize {
        let channels = record.channels();
        let keys = channels / 8 * (self.stage * 16 + 32);
        let values = self.stage / 8 * (channels * 16 + 32);
        let q_shared = channels > if self.wgmma { 128 } else { 96 };
        let q = if q_shared { self.warps * 16 * channels * 2 } else { 0 };
        self.slots * (keys + values) + q + self.warps * 128 + self.slots * 32 + 16
    }

    /// Numbers of a partial result.
    fn partial(&self, record: &RecordShape) -> usize {
        self.warps * 32 * (record.channels() / 2 + 4)
    }
}

/// Headers of prefill.cu.
const PREFILL_HEADERS: &[(&str, &str)] = &[
    HEADERS[0],
    HEADERS[1],
    HEADERS[2],
    HEADERS[3],
    ("prefill.cuh", include_str!("prefill.cuh")),
    ("warpgroup.cuh", include_str!("warpgroup.cuh")),
];

/// Prefill.cu for this shape.
pub(crate) fn program(record: &RecordShape, config: &Config, softcap: bool, out: OutFormat) -> Program {
    let mut defines = record_defines(record);
    defines.extend([
        format!("WGMMA={}", u8::from(config.wgmma)),
        format!("WARPS={}", config.warps),
        format!("STAGE={}", config.stage),
        format!("SLOTS={}", config.slots),
        format!("SOFTCAP={}", u8::from(softcap)),
        format!("OUT_BF16={}", u8::from(out == OutFormat::Bf16)),
        format!("PARAMS_BYTES={}", size_of::<Params>()),
        format!("SHARED={}", config.shared),
    ]);
    Program {
        name: "prefill",
        source: include_str!("prefill.cu"),
        headers: PREFILL_HEADERS,
        defines,
        registers: 255,
        // Most where head_dim is 256 and the bits of keys and values differ.
        spills: 24,
    }
}

/// How a prompt's rows are cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    pub tiles: Vec<RowTile>,
    pub splits: usize,
}

/// A configuration, loaded on a card.
pub(crate) struct Kernel {
    config: Config,
    function: CudaFunction,
}

impl Kernel {
    /// Compiles it, unless that was done before.
    pub(crate) fn load(gpu: &Gpu, record: &RecordShape, softcap: bool, out: OutFormat) -> Result<Self, Error> {
        let config = Config::choose(record, gpu.architecture());
        let function = gpu.function(&program(record, &config, softcap, out), "prefill")?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, config.shared as i32)?;
        Ok(Self { config, function })
    }

    /// Cuts rows at positions `first..end` into tiles of one edge, and each tile's keys into as many splits as let the card work.
    pub(crate) fn cut(
        &self,
        gpu: &Gpu,
        edge: impl Fn(usize) -> usize,
        (first, end): (usize, usize),
        (kv_heads, ratio): (usize, usize),
    ) -> Cut {
        let most = self.config.warps * 16 / ratio;
        let mut tiles: Vec<RowTile> = Vec::new();
        let mut last_edge = None;
        for position in first..end {
            match tiles.last_mut() {
                Some(tile) if last_edge == Some(edge(position)) && (tile.tokens as usize) < most => tile.tokens += 1,
                _ => {
                    last_edge = Some(edge(position));
                    tiles.push(RowTile { first: position as u32, tokens: 1 });
                }
            }
        }
        let splits = splits(tiles.len() * kv_heads, end.div_ceil(self.config.stage), gpu.multiprocessors());
        Cut { tiles, splits }
    }

    /// f32 numbers of workspace, and counters.
    pub(crate) fn workspace(&self, record: &RecordShape, cut: &Cut, kv_heads: usize) -> (usize, usize) {
        let pieces = cut.tiles.len() * kv_heads;
        let partials = if cut.splits > 1 { pieces * cut.splits * self.config.partial(record) } else { 1 };
        (partials, pieces)
    }

    /// Launches it.
    pub(crate) fn launch(&self, gpu: &Gpu, params: &Params) -> Result<(), Error> {
        let config = LaunchConfig {
            grid_dim: (params.row_tiles * params.kv_heads * params.splits, 1, 1),
            block_dim: ((self.config.warps + FEEDERS) as u32 * 32, 1, 1),
            shared_mem_bytes: self.config.shared as u32,
        };
        // SAFETY: the parameters have the layout that the kernel declares; what they point to is owned by the caller's cache, and
        // lives until the stream has done the work.
        unsafe { gpu.stream().launch_builder(&self.function).arg(params).launch(config) }?;
        Ok(())
    }
}

/// Into how many splits each of `pieces` is cut, of `stages` stages at most: the number that is done soonest.
fn splits(pieces: usize, stages: usize, multiprocessors: usize) -> usize {
    if pieces >= 4 * multiprocessors {
        return 1;
    }
    let time = |s: usize| {
        let one = if s == 1 { stages + 1 } else { stages / s + SPLIT_COST };
        (pieces * s).div_ceil(multiprocessors) * one
    };
    (1..=SPLITS.min(stages.max(1))).min_by_key(|&s| time(s)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_over_many_keys_are_split() {
        assert_eq!(splits(2000, 128, 132), 1);
        assert_eq!(splits(16, 1, 132), 1);
        let s = splits(16, 512, 132);
        assert!((6..=16).contains(&s), "{s}");
    }

    #[test]
    fn every_shape_fits_its_card() {
        for head_dim in crate::shape::HEAD_DIMS {
            let record = RecordShape { head_dim, group_len: 64, k_bits: 4, v_bits: 4 };
            assert!(Config::choose(&record, "sm_90a").shared <= 232_448);
            assert!(Config::choose(&record, "sm_86").shared <= 101_376);
        }
    }
}
