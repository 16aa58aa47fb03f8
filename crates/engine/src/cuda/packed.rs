//! kvant-kv's cache on the card, as a step asks for it.
//! NOT here: anything but names: what the calls mean is cache.rs, what they do kvant-kv.

use super::cache::StepCache;
use half::{bf16, f16};
use kvant_kv::Error;
use kvant_kv::cuda::GpuCache;
use kvant_kv::cuda::cudarc::driver::{CudaSlice, CudaView};

impl StepCache for GpuCache {
    fn len(&self, slot: usize) -> usize {
        GpuCache::len(self, slot).unwrap_or(0)
    }

    fn begin_decode(&mut self, slots: &[usize], bucket: usize) -> Result<(), Error> {
        GpuCache::begin_decode(self, slots, bucket)
    }

    fn positions(&self) -> CudaView<'_, u32> {
        GpuCache::positions(self)
    }

    fn pack_due(&self) -> Result<(), Error> {
        GpuCache::pack_due(self)
    }

    fn append_decode(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        GpuCache::append_decode(self, layer, k, v)
    }

    fn attend_decode(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<bf16>,
        scale: f32,
    ) -> Result<(), Error> {
        GpuCache::attend(self, layer, q, out, scale)
    }

    fn end_decode(&mut self) -> Result<(), Error> {
        GpuCache::end_decode(self);
        Ok(())
    }

    fn begin_prefill(&mut self, slot: usize, rows: usize) -> Result<(), Error> {
        GpuCache::begin_prefill(self, slot, rows)
    }

    fn append_prefill(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error> {
        GpuCache::append_prefill(self, layer, k, v)
    }

    fn attend_prefill(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<bf16>,
        scale: f32,
    ) -> Result<(), Error> {
        GpuCache::attend_prefill(self, layer, q, out, scale)
    }

    fn end_prefill(&mut self) -> Result<(), Error> {
        GpuCache::end_prefill(self);
        Ok(())
    }
}
