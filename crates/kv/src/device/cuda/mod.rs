//! A CUDA device: its context, its one stream, its memory and the kernels loaded on it. In: an ordinal and programs; out:
//! functions to launch and buffers, or one clear sentence about what is missing (library, driver, card, memory).
//! NOT here: what any kernel computes, and how programs become machine code (compile.rs) or lie on a disk (store.rs).
//!
//! Libraries of CUDA are opened at run time: nothing of it is needed to build, and a machine without it answers with an
//! error. One process has one stream per device, so cudarc's events between streams are off: work is ordered by the
//! stream, and the stream can be captured into graphs.

mod compile;
mod launch;
mod store;

pub use compile::{Compiled, Program, compile, compiler_version};
pub use cudarc;
pub use launch::{Launch, argument};

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DeviceRepr, DriverError, PinnedHostSlice,
    ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;
use rayon::prelude::*;

use crate::Error;

/// Architectures that every kernel is compiled for in tests; others of the same generations run these or are compiled
/// for when met.
pub const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"];

/// The oldest card that kernels run on: bf16 products and asynchronous copies begin here.
const OLDEST: (u32, u32) = (8, 0);

/// One CUDA device, ready for work.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    name: String,
    capability: (u32, u32),
    architecture: String,
    multiprocessors: usize,
    shared_bytes: usize,
    l2_bytes: usize,
    modules: Mutex<HashMap<store::Key, Arc<CudaModule>>>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({}, {})", self.name, self.architecture)
    }
}

impl Gpu {
    /// Opens device `ordinal`.
    ///
    /// Errors: [`Error::Gpu`] when the driver's library or NVRTC cannot be opened, the driver does not start, there is no
    /// such device, or the card is older than compute capability 8.0.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, Error> {
        // SAFETY: opens and closes a shared library, whose constructors are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            return Err(broken("the driver's library (libcuda) cannot be opened: is an NVIDIA driver installed?"));
        }
        compile::require_compiler()?;
        let devices =
            CudaContext::device_count().map_err(|e| broken(format!("the driver does not start: {}", text(e))))?;
        if ordinal >= usize::try_from(devices).unwrap_or(0) {
            return Err(broken(format!("there is no device {ordinal}: the driver has {devices}")));
        }
        let context = CudaContext::new(ordinal)?;
        // SAFETY: all work of this process goes through one stream, which alone allocates, uses and frees buffers.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        let of = |attribute| context.attribute(attribute).map(|v| usize::try_from(v).unwrap_or(0));
        let (major, minor) = context.compute_capability()?;
        let capability = (u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0));
        let name = context.name()?;
        if capability < OLDEST {
            let (major, minor) = capability;
            return Err(broken(format!(
                "unsupported card: {name} has compute capability {major}.{minor}, kernels need {}.{}",
                OLDEST.0, OLDEST.1
            )));
        }
        Ok(Arc::new(Self {
            architecture: compile::architecture(capability)?,
            multiprocessors: of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: of(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: of(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            modules: Mutex::default(),
            name,
            capability,
            context,
            stream,
        }))
    }

    /// The driver's context, for what this type does not offer.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The stream of all work; never the default one, since graphs are captured on it.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The card's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability: major, minor.
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// What kernels are compiled for, such as `sm_90a`.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Multiprocessors of the card.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Bytes of shared memory that one block can ask for.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// Bytes of the second-level cache.
    pub fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// Bytes of the card's memory: free, total.
    pub fn memory(&self) -> Result<(usize, usize), Error> {
        Ok(self.context.mem_get_info()?)
    }

    /// Waits until all work given so far is done; failures of earlier launches surface here.
    pub fn synchronize(&self) -> Result<(), Error> {
        Ok(self.stream.synchronize()?)
    }

    /// `len` zeroed elements in the card's memory.
    ///
    /// Errors: [`Error::GpuOutOfMemory`] with the bytes asked for and free.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(&self, len: usize) -> Result<CudaSlice<T>, Error> {
        self.stream.alloc_zeros(len).map_err(|e| self.allocation(e, len.saturating_mul(size_of::<T>())))
    }

    /// A copy of `values` in the card's memory.
    ///
    /// Errors: [`Error::GpuOutOfMemory`] with the bytes asked for and free.
    pub fn upload<T: DeviceRepr>(&self, values: &[T]) -> Result<CudaSlice<T>, Error> {
        self.stream.clone_htod(values).map_err(|e| self.allocation(e, size_of_val(values)))
    }

    /// `len` zeroed elements of the machine's memory that the card copies from and to without a detour. Nothing waits by itself:
    /// read and write them only while no copy of them is under way ([`Gpu::synchronize`]).
    pub fn pinned<T: DeviceRepr + ValidAsZeroBits + Copy>(&self, len: usize) -> Result<PinnedHostSlice<T>, Error> {
        // Not write-combined: the host reads these too.
        // SAFETY: the memory is unset; it is zeroed below, and zero bits are a value of T.
        let mut slice = unsafe { self.context.alloc_pinned_with_flags::<T>(len, 0) }?;
        let start = slice.as_mut_ptr()?;
        // SAFETY: `start` points to `len` elements that this call just allocated and nobody else knows.
        unsafe { std::ptr::write_bytes(start, 0, len) };
        Ok(slice)
    }

    /// The function `entry` of `program`, compiled for this card unless that was done before: once per process, and once
    /// per machine where a folder for compiled kernels can be written (`KVANT_KERNEL_CACHE`, else below `XDG_CACHE_HOME`
    /// or `~/.cache`).
    pub fn function(&self, program: &Program, entry: &str) -> Result<CudaFunction, Error> {
        let module = self.module(program)?;
        let why = |e| broken(format!("{} of {} cannot be loaded: {}", entry, program.name, text(e)));
        module.load_function(entry).map_err(why)
    }

    /// Compiles several programs at once, on as many threads as there are: the first start on a machine takes less time.
    pub fn prepare(&self, programs: &[Program]) -> Result<(), Error> {
        programs.par_iter().try_for_each(|program| self.module(program).map(|_| ()))
    }

    fn module(&self, program: &Program) -> Result<Arc<CudaModule>, Error> {
        let key = store::Key::of(program, &self.architecture)?;
        if let Some(module) = self.modules.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(module.clone());
        }
        let cubin = store::cubin(program, &self.architecture, &key)?;
        let why = |e| broken(format!("{} cannot be loaded: {}", program.name, text(e)));
        let module = self.context.load_module(Ptx::from_binary(cubin)).map_err(why)?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(modules.entry(key).or_insert(module).clone())
    }

    fn allocation(&self, e: DriverError, bytes: usize) -> Error {
        if e.0 != sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return e.into();
        }
        Error::GpuOutOfMemory { bytes, free: self.memory().map_or(0, |(free, _)| free) }
    }
}

/// What a driver's error says, in its own words.
fn text(e: DriverError) -> String {
    match (e.error_name(), e.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("{:?}", e.0),
    }
}

fn broken(why: impl Into<String>) -> Error {
    Error::Gpu { why: why.into() }
}

impl From<DriverError> for Error {
    fn from(e: DriverError) -> Self {
        broken(text(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_one_clear_sentence() {
        // With or without a GPU: no machine has device 4096.
        let why = Gpu::open(4096).expect_err("there are not so many").to_string();
        assert!(why.starts_with("the GPU cannot be used: "), "{why}");
        assert!(["driver", "device", "libnvrtc"].iter().any(|word| why.contains(word)), "{why}");
    }
}
