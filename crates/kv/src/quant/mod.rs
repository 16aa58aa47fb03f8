//! From numbers to codes and back. affine.rs: groups with scale and zero; fit.rs: scales by error; grid.rs: rows with one scale
//! (codebooks in levels.rs); codebook.rs: sub-vectors; pack.rs: codes into bits.
//! NOT here: where scales, zeros and codes lie in a record (cache/layout.rs).

pub(crate) mod affine;
pub mod codebook;
pub(crate) mod fit;
pub(crate) mod grid;
mod levels;
pub(crate) mod pack;
