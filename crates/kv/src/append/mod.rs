//! Operation 1: write tokens. In: rows rounded to f16; out: f16 blocks and packed records.
//! rows.rs: f16 rows into blocks; record.rs: a whole group into a record and back.
//! NOT here: which tokens are packed when (cache/), the formula (quant/).

pub(crate) mod record;
pub(crate) mod rows;
