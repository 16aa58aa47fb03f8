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

/// Every program of the usual shapes. One that is used but not listed is not checked for spills: list it.
pub fn programs(architecture: &str) -> Vec<Program> {
    let mut shapes: Vec<_> = [(64, 4, 4), (128, 4, 4), (128, 2, 2), (256, 4, 4)]
        .map(|(head_dim, k_bits, v_bits)| RecordShape { head_dim, group_len: 64, k_bits, v_bits })
        .into();
    shapes.push(RecordShape::plain(128));
    let mut programs = vec![reading(), attend::plan_program()];
    shapes.iter().for_each(|shape| programs.extend(of_shape(shape, architecture)));
    unique(programs)
}

/// Decode attention of the shapes that differ most: all pairs of bits with the commonest head_dim and group_len, every head_dim and
/// every group_len with that of the other and equal bits.
pub fn attention_programs(architecture: &str) -> Vec<Program> {
    let common = |s: &RecordShape| (s.head_dim == 128, s.group_len == 64);
    let wanted = |s: &RecordShape| match common(s) {
        (true, true) => true,
        (false, false) => false,
        _ => s.k_bits == s.v_bits,
    };
    let of = |shape: RecordShape| {
        let config = Config::choose(&shape, shared(architecture), true);
        attend::program(&shape, &config, false, OutFormat::Bf16)
    };
    unique(all_shapes().into_iter().filter(|s| s.is_plain() || wanted(s)).map(of).collect())
}

/// Every program of every shape: hours of a small machine.
pub fn all_programs(architecture: &str) -> Vec<Program> {
    let mut programs = programs(architecture);
    all_shapes().iter().for_each(|shape| programs.extend(of_shape(shape, architecture)));
    unique(programs)
}

fn all_shapes() -> Vec<RecordShape> {
    let mut shapes: Vec<_> = HEAD_DIMS.map(RecordShape::plain).into();
    for (k_bits, v_bits) in BITS.into_iter().flat_map(|k| BITS.map(|v| (k, v))) {
        for (head_dim, group_len) in HEAD_DIMS.into_iter().flat_map(|d| GROUP_LENS.map(|g| (d, g))) {
            shapes.push(RecordShape { head_dim, group_len, k_bits, v_bits });
        }
    }
    shapes
}

fn shared(architecture: &str) -> usize {
    SHARED[usize::from(["sm_80", "sm_90a"].contains(&architecture))]
}

fn of_shape(shape: &RecordShape, architecture: &str) -> Vec<Program> {
    let shared = shared(architecture);
    let mut programs = vec![append::cuda::program(shape)];
    for crowded in [false, true] {
        let config = Config::choose(shape, shared, crowded);
        programs.push(attend::program(shape, &config, false, OutFormat::Bf16));
    }
    let prefill = attend::prefill::Config::choose(shape, architecture);
    programs.push(attend::prefill::program(shape, &prefill, false, OutFormat::Bf16));
    if (shape.head_dim, shape.group_len) == (128, 64) {
        programs.push(attend::program(shape, &Config::choose(shape, shared, true), true, OutFormat::F32));
    }
    programs
}

fn unique(mut programs: Vec<Program>) -> Vec<Program> {
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
