//! What a step asks of a cache on the card. In: keys, values and queries of a layer; out: attention's rows.
//! NOT here: how tokens are stored (kvant-kv; plain.rs has the control of tests).

use half::{bf16, f16};
use kvant_kv::Error;
use kvant_kv::cuda::cudarc::driver::{CudaSlice, CudaView};

/// A cache of all layers of a model, for sequences that are known by the slot they are in.
///
/// Between `begin_decode` and `end_decode` (and the same of a prompt's chunk) a step calls the methods that take a layer, each
/// layer once, in order. These only put kernels on the card's stream: those of decoding are captured into a graph, which is
/// replayed for every batch of as many rows; all that differs between batches is uploaded by `begin_decode`.
pub trait StepCache {
    /// Tokens that a slot holds.
    fn len(&self, slot: usize) -> usize;

    /// Whether a slot holds none.
    fn is_empty(&self, slot: usize) -> bool {
        self.len(slot) == 0
    }

    /// One more token for each of these slots; rows up to `bucket` are padding.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] and others that leave the cache as it was.
    fn begin_decode(&mut self, slots: &[usize], bucket: usize) -> Result<(), Error>;

    /// u32 `[bucket]`: where each row's token stands in its sequence; `u32::MAX` for padding.
    fn positions(&self) -> CudaView<'_, u32>;

    /// Packs what is due before this step.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn pack_due(&self) -> Result<(), Error>;

    /// Stores f16 `[bucket][kv_heads][head_dim]`.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn append_decode(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error>;

    /// Queries f16 `[bucket][q_heads][head_dim]` over what each row sees, into bf16 of the same shape.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn attend_decode(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<bf16>,
        scale: f32,
    ) -> Result<(), Error>;

    /// The step's tokens are stored.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn end_decode(&mut self) -> Result<(), Error>;

    /// The next `rows` tokens of one slot.
    ///
    /// # Errors
    /// As [`StepCache::begin_decode`].
    fn begin_prefill(&mut self, slot: usize, rows: usize) -> Result<(), Error>;

    /// Stores f16 `[rows][kv_heads][head_dim]`.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn append_prefill(&self, layer: usize, k: &CudaSlice<f16>, v: &CudaSlice<f16>) -> Result<(), Error>;

    /// Queries f16 `[rows][q_heads][head_dim]`, each over what its position sees, into bf16 of the same shape.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn attend_prefill(
        &self,
        layer: usize,
        q: &CudaSlice<f16>,
        out: &mut CudaSlice<bf16>,
        scale: f32,
    ) -> Result<(), Error>;

    /// The chunk's tokens are stored.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    fn end_prefill(&mut self) -> Result<(), Error>;
}
