//! Appending on the GPU: launches of append.cu. In: device pointers and numbers; out: launches on the card's stream.
//! NOT here: the formulas (append.cu), who owns the memory and what is due (cuda/).

use crate::Error;
use crate::cache::cuda::layout::RecordShape;
use crate::cache::cuda::{HEADERS, Rule, record_defines};
use crate::device::cuda::{Gpu, Launch, Program, argument};
use cudarc::driver::{CudaFunction, DeviceRepr, LaunchConfig, PushKernelArg, sys};

/// Threads of a block of append.cu.
const THREADS: u32 = 256;

/// `Tiles` of append.cu: where plain tiles of a sequence lie.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tiles {
    pub base: u64,
    pub slot_stride: u64,
    pub layer_stride: u64,
    pub ring: u32,
    pub first: u32,
}

/// `Paged` of append.cu: records or tiles in pages.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Paged {
    pub base: u64,
    pub layer_stride: u64,
    pub log2: u32,
}

/// `RowsParams` of append.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsParams {
    pub k: u64,
    pub v: u64,
    pub lens: u64,
    pub slots: u64,
    pub table: u64,
    pub table_len: u32,
    pub kv_heads: u32,
    pub layer: u32,
    pub first: u32,
    pub slot: u32,
    /// The layer as faults name it.
    pub named: u32,
    pub sinks: u32,
    pub paged: u32,
    pub tiles: Tiles,
    pub sink_tiles: Tiles,
    pub pages: Paged,
    pub fault: u64,
}

/// `MoveParams` of append.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct MoveParams {
    pub from: Tiles,
    pub to: Tiles,
    pub kv_heads: u32,
    pub layer: u32,
    pub from_slot: u32,
    pub to_slot: u32,
    pub first: u32,
    pub count: u32,
}

/// `PackParams` of append.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackParams {
    pub rule: Rule,
    pub lens: u64,
    pub slots: u64,
    pub table: u64,
    pub table_len: u32,
    pub kv_heads: u32,
    pub layer: u32,
    pub first_group: u32,
    pub slot: u32,
    pub tiles: Tiles,
    pub records: Paged,
    pub copies: Paged,
    pub first_layer: u32,
}

// SAFETY: plain numbers, laid out as C does.
unsafe impl DeviceRepr for RowsParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for MoveParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for PackParams {}

/// Append.cu for this shape.
pub(crate) fn program(record: &RecordShape) -> Program {
    let mut defines = record_defines(record);
    defines.extend([
        format!("ROWS_BYTES={}", size_of::<RowsParams>()),
        format!("PACK_BYTES={}", size_of::<PackParams>()),
        format!("PACK_SHARED_BYTES={}", pack_shared(record)),
    ]);
    // Exact division is a subroutine, around which registers are kept: most where head_dim is 96, on sm_80.
    Program { name: "append", source: include_str!("append.cu"), headers: HEADERS, defines, registers: 128, spills: 72 }
}

/// Shared memory of packing: codes of a group, and scales and zeros of its keys or values in f32.
fn pack_shared(record: &RecordShape) -> usize {
    let params = (2 * record.channels()).max(2 * record.group_len * record.v_groups());
    record.group_len * record.channels() + 4 * params
}

/// Append.cu, loaded on a card.
pub(crate) struct Kernels {
    write_rows: CudaFunction,
    move_tiles: CudaFunction,
    /// Pack, dequantize: of packed shapes.
    packing: Option<(CudaFunction, CudaFunction)>,
    pack_shared: usize,
}

impl Kernels {
    pub(crate) fn load(gpu: &Gpu, record: &RecordShape) -> Result<Self, Error> {
        let program = program(record);
        let function = |entry| gpu.function(&program, entry);
        let pack_shared = pack_shared(record);
        let packing = match record.is_plain() {
            true => None,
            false => Some((function("pack_due")?, function("dequantize_all")?)),
        };
        if let Some((pack, _)) = &packing {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            pack.set_attribute(attribute, pack_shared as i32)?;
        }
        Ok(Self { write_rows: function("write_rows")?, move_tiles: function("move_tiles")?, packing, pack_shared })
    }

    /// Writes `rows` rows into plain tiles.
    pub(crate) fn write_rows(&self, gpu: &Gpu, params: &RowsParams, rows: usize) -> Result<(), Error> {
        let launch = Launch { grid: (rows as u32, 1), block: THREADS, shared_bytes: 0, early: true };
        // SAFETY: as in `launch` below.
        unsafe { gpu.launch(&self.write_rows, launch, &[argument(params)]) }
    }

    /// Copies tiles.
    pub(crate) fn move_tiles(&self, gpu: &Gpu, params: &MoveParams) -> Result<(), Error> {
        if params.count == 0 {
            return Ok(());
        }
        launch(gpu, &self.move_tiles, params, (params.count as usize, params.kv_heads as usize, 1), 0)
    }

    /// Packs groups: `n` requests or groups, of `layers` layers.
    pub(crate) fn pack(&self, gpu: &Gpu, params: &PackParams, n: usize, layers: usize) -> Result<(), Error> {
        match &self.packing {
            Some((pack, _)) if n > 0 => {
                launch(gpu, pack, params, (params.kv_heads as usize, n, layers), self.pack_shared)
            }
            _ => Ok(()),
        }
    }

    /// Dequantizes all packed groups of `n` requests.
    pub(crate) fn dequantize(&self, gpu: &Gpu, params: &PackParams, n: usize) -> Result<(), Error> {
        let Some((_, dequantize)) = &self.packing else { return Ok(()) };
        // As many runs of groups as keep every multiprocessor busy.
        let runs = (16 * gpu.multiprocessors()).div_ceil(n * params.kv_heads as usize).clamp(1, 512);
        launch(gpu, dequantize, params, (params.kv_heads as usize, n, runs), 0)
    }
}

fn launch<P: DeviceRepr>(
    gpu: &Gpu,
    function: &CudaFunction,
    params: &P,
    (x, y, z): (usize, usize, usize),
    shared: usize,
) -> Result<(), Error> {
    let config = LaunchConfig {
        grid_dim: (x as u32, y as u32, z as u32),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: shared as u32,
    };
    // SAFETY: the parameters have the layout that the kernel declares; what they point to is owned by the caller's cache, and lives
    // until the stream has done the work.
    unsafe { gpu.stream().launch_builder(function).arg(params).launch(config) }?;
    Ok(())
}
