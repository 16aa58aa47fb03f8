//! Operation 1: write tokens. In: f32 rows; out: f16 blocks and packed records.
//! cpu/: rows into blocks and whole groups into records, the VARIANTS table; rows.rs: sink rows; train.rs: codebooks of sub-vectors; record.rs: records from
//! given codes, and back to numbers; reference.rs: the plain formula; parity.rs: every variant against it.
//! NOT here: which tokens are packed when (cache/), the formula (quant/).

pub(crate) mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
pub(crate) mod parity;
pub(crate) mod record;
#[cfg(test)]
pub(crate) mod reference;
pub(crate) mod rows;
mod train;

/// Name of the kernel that appends on this processor.
pub fn kernel() -> &'static str {
    cpu::best().name
}
