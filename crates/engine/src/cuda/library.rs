//! Products of the vendor's library (cublasLt). In: a shape; out: the ways it offers, each ready to run.
//! NOT here: which of them is fastest (products.rs).
//!
//! y [rows][n] = x [rows][k] * w^T, w [n][k], all row by row; the library counts columns first, so it is asked for
//! y^T = w * x^T. bf16 in, f32 sums; out bf16, or f32, which can be added to.

use crate::Error;
use kvant_kv::cuda::Gpu;
use kvant_kv::cuda::cudarc::cublaslt::result::{self, CublasError};
use kvant_kv::cuda::cudarc::cublaslt::sys;
use kvant_kv::cuda::cudarc::driver::CudaSlice;
use std::ffi::c_void;
use std::sync::Arc;

/// Ways that the library is asked for.
const WAYS: usize = 8;
/// What the vendor recommends: 32 MiB from Hopper on.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// A product's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub rows: usize,
    pub n: usize,
    pub k: usize,
    pub sums: Sums,
}

/// What becomes of sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Sums {
    /// Stored as bf16.
    Bf16,
    /// Stored as f32.
    F32,
    /// Added to f32.
    Added,
}

/// The opened library, with room for what its kernels leave in memory.
pub(super) struct Library {
    gpu: Arc<Gpu>,
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
}

// SAFETY: a handle may be used from any thread, one at a time: methods that use it run on the one stream of a model, which
// nobody shares.
unsafe impl Send for Library {}

/// One way to compute a product.
pub(super) struct Way {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    sums: Sums,
}

// SAFETY: descriptions are plain memory that only this owns; they are read, and freed when dropped.
unsafe impl Send for Way {}

impl Library {
    pub fn open(gpu: &Arc<Gpu>) -> Result<Self, Error> {
        // SAFETY: opens and closes a shared library, whose constructors are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            let why =
                "the library of products (libcublasLt) cannot be opened: is the folder that has it in LD_LIBRARY_PATH?";
            return Err(kvant_kv::Error::Gpu { why: why.into() }.into());
        }
        gpu.context().bind_to_thread().map_err(kvant_kv::Error::from)?;
        let workspace = gpu.zeros(WORKSPACE_BYTES)?;
        Ok(Self { gpu: gpu.clone(), handle: result::create_handle().map_err(failed)?, workspace })
    }

    /// The ways that the library offers, the one that it thinks best first.
    pub fn ways(&self, form: Form) -> Result<Vec<Way>, Error> {
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; WAYS] =
            // SAFETY: plain numbers, for which zeros are values.
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        let asked = Way::new(form, None)?;
        let preference = result::create_matmul_pref().map_err(failed)?;
        let bytes = WORKSPACE_BYTES;
        let limit = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let [w, x, y] = asked.layouts;
        // SAFETY: all descriptions were made above and are alive; the attribute is a size; the list has room for WAYS.
        let outcome = unsafe {
            let set =
                result::set_matmul_pref_attribute(preference, limit, (&raw const bytes).cast(), size_of::<usize>());
            let outcome = set.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    asked.description,
                    w,
                    x,
                    y,
                    y,
                    preference,
                    WAYS as i32,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            });
            outcome.and(result::destroy_matmul_pref(preference))
        };
        if outcome == Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) {
            return Ok(Vec::new());
        }
        outcome.map_err(failed)?;
        let good = found.iter().take(usize::try_from(count).unwrap_or(0)).filter(|f| f.state.result().is_ok());
        good.map(|f| Way::new(form, Some(f.algo))).collect()
    }

    /// Computes `y` from `x` and `w` (addresses).
    ///
    /// # Safety
    /// Buffers are as long as the way's form says.
    pub unsafe fn run(&self, way: &Way, x: u64, w: u64, y: u64) -> Result<(), Error> {
        let (one, zero) = (1f32, 0f32);
        let beta = if way.sums == Sums::Added { one } else { zero };
        let [of_w, of_x, of_y] = way.layouts;
        let pointer = |at: u64| at as *const c_void;
        let workspace = super::kernels::at(&self.gpu, &self.workspace);
        // SAFETY: buffers by the caller's contract; descriptions are alive and of one form.
        let outcome = unsafe {
            result::matmul(
                self.handle,
                way.description,
                (&raw const one).cast(),
                (&raw const beta).cast(),
                pointer(w),
                of_w,
                pointer(x),
                of_x,
                pointer(y),
                of_y,
                y as *mut c_void,
                of_y,
                &way.algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                self.gpu.stream().cu_stream().cast(),
            )
        };
        outcome.map_err(failed)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: made by `open`, destroyed here only. A failure leaves nothing to do.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl Way {
    fn new(form: Form, algorithm: Option<sys::cublasLtMatmulAlgo_t>) -> Result<Self, Error> {
        let Form { rows, n, k, sums } = form;
        let numbers = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let bf16 = sys::cudaDataType_t::CUDA_R_16BF;
        let out = if sums == Sums::Bf16 { bf16 } else { sys::cudaDataType_t::CUDA_R_32F };
        let description = result::create_matmul_desc(numbers, sys::cudaDataType_t::CUDA_R_32F).map_err(failed)?;
        let mut way = Self {
            description,
            layouts: [std::ptr::null_mut(); 3],
            // SAFETY: plain numbers, for which zeros are values; never run without a real one.
            algorithm: algorithm.unwrap_or_else(|| unsafe { std::mem::zeroed() }),
            sums,
        };
        let layout = |kind, rows: usize, columns: usize| {
            result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64).map_err(failed)
        };
        way.layouts[0] = layout(bf16, k, n)?;
        way.layouts[1] = layout(bf16, k, rows)?;
        way.layouts[2] = layout(out, n, rows)?;
        let turned = 1i32;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the description is alive, and the attribute a 32-bit number.
        let set = unsafe {
            result::set_matmul_desc_attribute(description, attribute, (&raw const turned).cast(), size_of::<i32>())
        };
        set.map_err(failed)?;
        Ok(way)
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
            // SAFETY: made by `new`, destroyed here only. A failure leaves nothing to do.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_desc(self.description) };
    }
}

fn failed(e: CublasError) -> Error {
    kvant_kv::Error::Gpu { why: format!("the library of products failed: {:?}", e.0) }.into()
}
