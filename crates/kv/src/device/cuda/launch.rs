//! Launches that cudarc's builder does not offer: kernels that may begin before the one in front of them has finished.
//! In: a function, its grid, its arguments; out: work on the stream.
//! NOT here: what runs.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::CudaFunction;
use cudarc::driver::sys;

use super::Gpu;
use crate::Error;

/// How a kernel is laid over the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: (u32, u32),
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Whether its first blocks may start while the last ones of the kernel in front still run, on cards that can
    /// (compute capability 9.0). Such a kernel executes `griddepcontrol.wait` before it touches what others write.
    pub early: bool,
}

/// One argument of a kernel: a number, a device address, or a `repr(C)` struct of these.
pub fn argument<T: Copy>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

impl Gpu {
    /// Puts one kernel on the stream.
    ///
    /// # Safety
    /// `arguments` are those that the kernel declares, in order and of its types; addresses among them are of buffers on this
    /// device, large enough for what the kernel does over this grid, and not freed before it has run.
    pub unsafe fn launch(
        &self,
        function: &CudaFunction,
        launch: Launch,
        arguments: &[*mut c_void],
    ) -> Result<(), Error> {
        self.context.bind_to_thread()?;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid.0,
            gridDimY: launch.grid.1,
            gridDimZ: 1,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream.cu_stream(),
            attrs: &mut early,
            numAttrs: u32::from(launch.early && self.capability >= (9, 0)),
        };
        let mut arguments = arguments.to_vec();
        // SAFETY: the caller's contract; configuration, attribute and arguments live until the call returns, which copies them.
        let outcome =
            unsafe { sys::cuLaunchKernelEx(&config, function.cu_function(), arguments.as_mut_ptr(), ptr::null_mut()) };
        Ok(outcome.result()?)
    }
}
