//! Every program of this library, with every set of definitions it is compiled with: what tests compile for all
//! architectures. In: nothing; out: the list.
//! NOT here: kernels. A program is listed here by one line that asks its own module.

use super::Program;

/// All programs. One that is used but not listed is not checked for spills: list it.
pub fn programs() -> Vec<Program> {
    vec![reading()]
}

/// Reads a buffer as fast as the card can: the ceiling that other kernels are measured against.
pub fn reading() -> Program {
    Program { name: "read", source: include_str!("read.cu"), headers: &[], defines: Vec::new(), registers: 40 }
}
