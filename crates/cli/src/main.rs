//! kvant
fn main() {}
