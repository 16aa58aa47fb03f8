//! From numbers to codes and back. affine.rs: the formula; fit.rs: scales by error; pack.rs: codes into bits.
//! NOT here: where scales, zeros and codes lie in a record (cache/layout.rs).

pub(crate) mod affine;
pub(crate) mod fit;
pub(crate) mod pack;
