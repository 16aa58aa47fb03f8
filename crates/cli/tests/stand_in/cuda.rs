//! A stand-in for the libraries of CUDA (driver, NVRTC, cublasLt), so that what the host does around kernels is tested without
//! a GPU: compiled to a shared library and put in front of the others by tests/program/stand_in.rs. In: calls; out: success.
//! Memory of the "card" is memory of the machine, copies happen at once, kernels and products do nothing (all they would have
//! written stays zero). The environment says what is wrong with the card:
//! - `STAND_IN_START=no`: the driver does not start; `STAND_IN_DEVICES`: how many there are (1);
//! - `STAND_IN_CAPABILITY`: its compute capability (90); `STAND_IN_MEMORY`: its bytes (8 GiB);
//! - `STAND_IN_LAUNCHES`: the launch of this number fails, and with it everything after, as after an illegal address.
//! NOT here: results of any kernel, and what each function means (the vendor's reference).

#![allow(non_snake_case)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

type Result = c_int;
const SUCCESS: Result = 0;
const OUT_OF_MEMORY: Result = 2;
const ILLEGAL_ADDRESS: Result = 700;
const SYSTEM_DRIVER_MISMATCH: Result = 803;

/// Something to point to where a handle is asked for.
const HANDLE: usize = 0x10;
/// Bytes of a block that is better not touched.
const LARGE: usize = 1 << 20;
/// As CUDA aligns memory.
const ALIGN: usize = 512;

fn setting(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// Everything fails once a launch did.
fn health() -> Result {
    let wrong = setting("STAND_IN_LAUNCHES", usize::MAX);
    if LAUNCHES.load(Ordering::Relaxed) >= wrong { ILLEGAL_ADDRESS } else { SUCCESS }
}

static LAUNCHES: AtomicUsize = AtomicUsize::new(0);

fn launched() -> Result {
    LAUNCHES.fetch_add(1, Ordering::Relaxed);
    // A launch returns before its kernel fails: the next call that looks is told.
    SUCCESS
}

static BLOCKS: Mutex<Option<HashMap<usize, usize>>> = Mutex::new(None);

fn with_blocks<T>(f: impl FnOnce(&mut HashMap<usize, usize>) -> T) -> T {
    f(BLOCKS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

fn taken() -> usize {
    with_blocks(|blocks| blocks.values().sum())
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), ALIGN).expect("a size")
}

unsafe fn allocate(at: *mut usize, bytes: usize) -> Result {
    if taken() + bytes > setting("STAND_IN_MEMORY", 8 << 30) {
        return OUT_OF_MEMORY;
    }
    let block = unsafe { alloc_zeroed(layout(bytes)) } as usize;
    if block == 0 {
        return OUT_OF_MEMORY;
    }
    with_blocks(|blocks| blocks.insert(block, bytes));
    unsafe { *at = block };
    health()
}

unsafe fn free(block: usize) -> Result {
    if let Some(bytes) = with_blocks(|blocks| blocks.remove(&block)) {
        unsafe { dealloc(block as *mut u8, layout(bytes)) };
    }
    health()
}

/// Functions that give a handle, and those that only succeed.
macro_rules! handles {
    ($($name:ident($($at:ident: $type:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(handle: *mut usize, $(_: $type),*) -> Result { unsafe { *handle = HANDLE }; health() }
    )* };
}
macro_rules! succeed {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Result { health() }
    )* };
}

handles! {
    cuStreamCreate(flags: c_uint);
    cuModuleLoadData(image: *const c_void);
    cuModuleGetFunction(module: usize, name: *const c_char);
    cuGraphInstantiateWithFlags(graph: usize, flags: u64);
    cuEventCreate(flags: c_uint);
    cuDevicePrimaryCtxRetain(device: c_int);
    cuCtxGetCurrent();
}

succeed! {
    cuStreamDestroy_v2 cuStreamSynchronize cuStreamBeginCapture_v2 cuStreamWaitEvent cuModuleUnload cuGraphExecDestroy
    cuGraphDestroy cuGraphUpload cuEventRecord cuEventSynchronize cuEventDestroy_v2 cuCtxSetCurrent cuCtxSynchronize
    cuFuncSetAttribute cuDevicePrimaryCtxRelease_v2
}

/// Those of libraries whose numbers for errors are their own: what they do not know there is no value of cudarc's types.
macro_rules! library {
    ($failed:literal: $($name:ident)*; $($making:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> Result { if health() == SUCCESS { SUCCESS } else { $failed } }
        )*
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $making(handle: *mut usize) -> Result {
                unsafe { *handle = HANDLE };
                if health() == SUCCESS { SUCCESS } else { $failed }
            }
        )*
    };
}

library! {
    11: nvrtcDestroyProgram nvrtcCompileProgram; nvrtcCreateProgram
}

library! {
    13: cublasLtDestroy cublasLtMatrixLayoutDestroy cublasLtMatmulDescSetAttribute cublasLtMatmulDescDestroy
    cublasLtMatmulPreferenceSetAttribute cublasLtMatmulPreferenceDestroy;
    cublasLtCreate cublasLtMatrixLayoutCreate cublasLtMatmulDescCreate cublasLtMatmulPreferenceCreate
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> Result {
    if std::env::var("STAND_IN_START").as_deref() == Ok("no") { SYSTEM_DRIVER_MISMATCH } else { SUCCESS }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Result {
    unsafe { *count = setting("STAND_IN_DEVICES", 1) as c_int };
    cuInit(0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Result {
    unsafe { *device = ordinal };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _: c_int) -> Result {
    unsafe { text(name, len as usize, "Stand-in") }
}

unsafe fn text(into: *mut c_char, len: usize, words: &str) -> Result {
    let n = words.len().min(len.saturating_sub(1));
    unsafe {
        ptr::copy_nonoverlapping(words.as_ptr(), into.cast(), n);
        *into.add(n) = 0;
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _: c_int) -> Result {
    let capability = setting("STAND_IN_CAPABILITY", 90) as c_int;
    unsafe {
        *value = match attribute {
            16 => 132,             // multiprocessors
            38 => 50 << 20,        // bytes of L2
            75 => capability / 10, // compute capability, major
            76 => capability % 10, // and minor
            97 => 227 << 10,       // shared memory of a block that asks for it
            115 => 1,              // memory pools
            _ => 1,
        }
    };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> Result {
    let words = match error {
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        SYSTEM_DRIVER_MISMATCH => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    unsafe { *name = words.as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_: c_int, name: *mut *const c_char) -> Result {
    unsafe { *name = c"as the stand-in was told".as_ptr() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Result {
    let all = setting("STAND_IN_MEMORY", 8 << 30);
    unsafe { (*free, *total) = (all.saturating_sub(taken()), all) };
    health()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocAsync(at: *mut usize, bytes: usize, _: usize) -> Result {
    unsafe { allocate(at, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(at: *mut usize, bytes: usize) -> Result {
    unsafe { allocate(at, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeAsync(at: usize, _: usize) -> Result {
    unsafe { free(at) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: usize) -> Result {
    unsafe { free(at) }
}

/// Memory of the machine counts as the card's here too: nobody is told how much of that there is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(at: *mut usize, bytes: usize, _: c_uint) -> Result {
    unsafe { allocate(at, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(at: usize) -> Result {
    unsafe { free(at) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(at: usize, value: u8, bytes: usize, _: usize) -> Result {
    // A whole large block is zeroed when it is new, and then it is zero; what nobody touches takes no memory.
    let new = bytes >= LARGE && with_blocks(|blocks| blocks.get(&at) == Some(&bytes));
    if !(new && value == 0) {
        unsafe { ptr::write_bytes(at as *mut u8, value, bytes) };
    }
    health()
}

unsafe fn copy(to: usize, from: usize, bytes: usize) -> Result {
    unsafe { ptr::copy(from as *const u8, to as *mut u8, bytes) };
    health()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, _: usize) -> Result {
    unsafe { copy(to, from, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, _: usize) -> Result {
    unsafe { copy(to, from, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, _: usize) -> Result {
    unsafe { copy(to, from, bytes) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, _: c_int, _: usize) -> Result {
    unsafe { *value = 0 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    _: usize,
    _: c_int,
    _: usize,
) -> Result {
    unsafe { *blocks = 2 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(ms: *mut f32, _: usize, _: usize) -> Result {
    unsafe { *ms = 1.0 };
    health()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel() -> Result {
    launched()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernelEx() -> Result {
    launched()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch() -> Result {
    launched()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(_: usize, graph: *mut usize) -> Result {
    unsafe { *graph = HANDLE };
    health()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(_: usize, status: *mut c_int) -> Result {
    unsafe { *status = 0 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Result {
    unsafe { (*major, *minor) = (13, 99) };
    SUCCESS
}

const ARCHITECTURES: [c_int; 6] = [75, 80, 86, 89, 90, 120];

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> Result {
    unsafe { *count = ARCHITECTURES.len() as c_int };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetSupportedArchs(list: *mut c_int) -> Result {
    unsafe { ptr::copy_nonoverlapping(ARCHITECTURES.as_ptr(), list, ARCHITECTURES.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(_: usize, bytes: *mut usize) -> Result {
    unsafe { *bytes = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(_: usize, log: *mut c_char) -> Result {
    unsafe { text(log, 1, "") }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(_: usize, bytes: *mut usize) -> Result {
    unsafe { *bytes = 1 };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(_: usize, code: *mut u8) -> Result {
    unsafe { *code = 1 };
    SUCCESS
}

/// Bytes of what describes a way.
const WAY_BYTES: usize = 96;

/// One way to compute a product.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _: usize,
    _: usize,
    _: usize,
    _: usize,
    _: usize,
    _: usize,
    _: usize,
    _: c_int,
    way: *mut u8,
    count: *mut c_int,
) -> Result {
    unsafe {
        ptr::write_bytes(way, 0, WAY_BYTES);
        *count = 1;
    }
    if health() == SUCCESS { SUCCESS } else { 13 }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtMatmul() -> Result {
    launched()
}
