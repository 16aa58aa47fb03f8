//! Every program of this library, with the definitions it is compiled with: what tests compile for all architectures. In:
//! nothing; out: the list.
//! NOT here: kernels. A program is listed here by one line that asks its own module.

use crate::append;
use crate::attend::cuda::{self as attend, Config, OutFormat};
use crate::cache::cuda::layout::RecordShape;
use crate::device::cuda::Program;
use crate::scheme::{BITS, GROUP_LENS};
use crate::shape::HEAD_DIMS;

/// Shared memory of a block on the smallest cards that kernels run on (sm_86, sm_89, sm_120), and on sm_80 and sm_90.
const SHARED: [usize; 2] = [101_376, 232_448];

/// Programs of the usual shapes. One that is used but not listed is not checked for spills: list it.
pub fn programs(architecture: &str) -> Vec<Program> {
    let mut shapes: Vec<_> = [(64, 4, 4), (128, 4, 4), (128, 2, 2), (256, 4, 4)]
        .map(|(head_dim, k_bits, v_bits)| RecordShape { head_dim, group_len: 64, k_bits, v_bits })
        .into();
    shapes.push(RecordShape::plain(128));
    of_shapes(&shapes, architecture)
}

/// Programs of every shape but for combinations that differ in nothing new: all pairs of bits with the commonest head_dim and
/// group_len; every head_dim and every group_len with that of the other and equal bits.
pub fn all_programs(architecture: &str) -> Vec<Program> {
    let mut shapes: Vec<_> = HEAD_DIMS.map(RecordShape::plain).into();
    for (k_bits, v_bits) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
        for (head_dim, group_len) in HEAD_DIMS.into_iter().flat_map(|d| GROUP_LENS.map(|g| (d, g))) {
            let common = (head_dim == 128, group_len == 64);
            if common == (true, true) || (k_bits == v_bits && (common.0 || common.1)) {
                shapes.push(RecordShape { head_dim, group_len, k_bits, v_bits });
            }
        }
    }
    of_shapes(&shapes, architecture)
}

fn of_shapes(shapes: &[RecordShape], architecture: &str) -> Vec<Program> {
    let shared = SHARED[usize::from(["sm_80", "sm_90a"].contains(&architecture))];
    let mut programs = vec![reading(), attend::plan_program()];
    for shape in shapes {
        programs.push(append::cuda::program(shape));
        for crowded in [false, true] {
            let config = Config::choose(shape, shared, crowded);
            programs.push(attend::program(shape, &config, false, OutFormat::Bf16));
        }
        let prefill = attend::prefill::Config::choose(shape, architecture);
        programs.push(attend::prefill::program(shape, &prefill, false, OutFormat::Bf16));
        if (shape.head_dim, shape.group_len) == (128, 64) {
            programs.push(attend::program(shape, &Config::choose(shape, shared, true), true, OutFormat::F32));
        }
    }
    programs.sort_by_key(|p| p.title());
    programs.dedup();
    programs
}

/// Reads a buffer as fast as the card can: the ceiling that other kernels are measured against.
pub fn reading() -> Program {
    Program {
        name: "read",
        source: include_str!("../device/cuda/read.cu"),
        headers: &[],
        defines: Vec::new(),
        registers: 64,
        spills: 0,
    }
}
