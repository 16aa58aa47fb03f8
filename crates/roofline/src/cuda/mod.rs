//! A GPU's clock and its read ceiling. In: launches; out: their times, interleaved, on the card's own clock.
//! NOT here: what is launched (kvant-kv), counts of bytes (cost.rs).
//!
//! A contestant is captured once as a graph of many launches, each over another copy of its data so that none finds it in the
//! second-level cache; a round replays every contestant's graph once, and an event before and behind it reads the card's clock.

pub mod survey;

use crate::Timing;
use kvant_kv::Error;
use kvant_kv::cuda::cudarc::driver::{CudaFunction, CudaGraph, CudaSlice, DevicePtr, LaunchConfig, PushKernelArg, sys};
use kvant_kv::cuda::{Gpu, reading};
use std::sync::Arc;

/// Launches of one graph: enough that starting it is far shorter than it runs.
pub const LAUNCHES: usize = 24;

/// Launches, captured.
pub struct Captured {
    gpu: Arc<Gpu>,
    graph: CudaGraph,
    launches: usize,
}

impl Captured {
    /// Runs `launch` for 0, 1, .. once, then captures `launches` of them.
    ///
    /// # Errors
    /// Those of the launches; [`Error::Gpu`] when nothing was captured.
    pub fn new(
        gpu: &Arc<Gpu>,
        launches: usize,
        mut launch: impl FnMut(usize) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let stream = gpu.stream();
        launch(0)?;
        stream.synchronize()?;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        let launched = (0..launches).try_for_each(&mut launch);
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags)?;
        launched?;
        let graph = graph.ok_or(Error::Gpu { why: "nothing was captured".into() })?;
        graph.upload()?;
        Ok(Self { gpu: gpu.clone(), graph, launches })
    }

    /// Nanoseconds of one launch, averaged over one replay.
    ///
    /// # Errors
    /// [`Error::Gpu`] for launches that failed.
    pub fn replay(&self) -> Result<f64, Error> {
        let stream = self.gpu.stream();
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = stream.record_event(timed)?;
        self.graph.launch()?;
        let end = stream.record_event(timed)?;
        Ok(f64::from(start.elapsed_ms(&end)?) * 1e6 / self.launches as f64)
    }
}

/// Replays all in turns, `rounds` times after two warm-up rounds; of each its minimum and median.
///
/// # Errors
/// As [`Captured::replay`].
pub fn interleave(contestants: &[&Captured], rounds: usize) -> Result<Vec<Timing>, Error> {
    let mut times = vec![Vec::with_capacity(rounds); contestants.len()];
    for round in 0..rounds + 2 {
        for i in 0..contestants.len() {
            // Who is first changes.
            let i = (i + round) % contestants.len();
            let ns = contestants[i].replay()?;
            if round >= 2 {
                times[i].push(ns.round() as u64);
            }
        }
    }
    Ok(times.into_iter().map(|t| Timing::of(t).expect("a round at least")).collect())
}

/// Reads device memory as fast as the card can.
pub struct GpuReader {
    gpu: Arc<Gpu>,
    function: CudaFunction,
    data: CudaSlice<u8>,
    out: CudaSlice<u32>,
}

impl GpuReader {
    /// Over a buffer of so many bytes of its own.
    ///
    /// # Errors
    /// [`Error::GpuOutOfMemory`], [`Error::Gpu`].
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, Error> {
        let function = gpu.function(&reading(), "read_all")?;
        Ok(Self { gpu: gpu.clone(), function, data: gpu.zeros(bytes.next_multiple_of(16))?, out: gpu.zeros(1)? })
    }

    /// Reads `bytes` of its buffer from `start` on, both rounded to 16.
    ///
    /// # Errors
    /// [`Error::Shape`] beyond the buffer.
    pub fn launch(&self, start: usize, bytes: usize) -> Result<(), Error> {
        let (start, bytes) = (start / 16 * 16, bytes / 16 * 16);
        if start + bytes > self.data.len() {
            return Err(Error::Shape { what: "bytes of a buffer", expected: self.data.len(), got: start + bytes });
        }
        let stream = self.gpu.stream();
        let data = self.data.device_ptr(stream).0 + start as u64;
        let out = self.out.device_ptr(stream).0;
        let count = (bytes / 16) as u64;
        let blocks = (4 * self.gpu.multiprocessors()) as u32;
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (512, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those that the kernel declares, and `count` words of 16 bytes lie within the buffer.
        unsafe { stream.launch_builder(&self.function).arg(&data).arg(&count).arg(&out).launch(config) }?;
        Ok(())
    }
}
