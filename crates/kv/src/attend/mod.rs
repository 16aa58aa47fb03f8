//! Attention over the cache: contract, validation, kernel selection.

use crate::{Cache, Error, cache::Rows};
use std::collections::BTreeMap;

/// Options of one attention call.
#[derive(Debug, Clone, Copy)]
pub struct AttendOptions<'a> {
    /// Factor of every score, usually `head_dim^-0.5`.
    pub sm_scale: f32,
    /// `score = c * tanh(score / c)`.
    pub softcap: Option<f32>,
    /// One more term `exp(sink_logit)` per query head in the denominator only. Shape `[q_heads]`.
    pub sink_logits: Option<&'a [f32]>,
    /// Keys before this position are not seen; one per batch entry, or empty for "all seen".
    pub first_visible: &'a [usize],
}

/// The attention operation: a chosen kernel, its threads and its counters.
pub struct Attention {}

impl Attention {
    /// `threads` >= 1; `kernel`: a name of the VARIANTS table, or None for the best this processor runs.
    pub fn new(_threads: usize, _kernel: Option<&str>) -> Result<Self, Error> {
        todo!()
    }
    /// Attends the newest `rows` tokens of each batch entry (already appended to `layer`) over everything they see.
    ///
    /// Shapes: `q`, `out`: f32 `[sum of rows][q_heads][head_dim]`.
    pub fn attend(
        &mut self,
        _cache: &Cache,
        _layer: usize,
        _batch: &[Rows],
        _q: &[f32],
        _out: &mut [f32],
        _options: &AttendOptions<'_>,
    ) -> Result<(), Error> {
        todo!()
    }
    /// Name of the kernel in use, as in the VARIANTS table.
    pub fn kernel(&self) -> &'static str {
        todo!()
    }
    /// Threads in use.
    pub fn threads(&self) -> usize {
        todo!()
    }
    /// Attention calls by route since the last reset.
    pub fn routes(&self) -> &BTreeMap<String, u64> {
        todo!()
    }
    /// Sets every route counter to zero (forgets them).
    pub fn reset_routes(&mut self) {
        todo!()
    }
}

/// Kernel names of this build, best first, with the reason when this processor cannot run one.
pub fn kernels() -> Vec<(&'static str, Result<(), String>)> {
    todo!()
}
