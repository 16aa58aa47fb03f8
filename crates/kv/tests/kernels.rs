//! Every CUDA program compiles for every architecture, spills nothing and keeps its register budget. In: the table of
//! programs; out: a line per program and architecture. No GPU is needed, only NVRTC: without it this says that it skips,
//! and fails if REQUIRE_NVRTC is set.
//! NOT here: what kernels compute.

use kvant_kv::cuda::{ARCHITECTURES, Program, all_programs, attention_programs, compiler_version, programs};
use rayon::prelude::*;

/// False, and said so, where NVRTC is absent.
fn compiler() -> bool {
    match compiler_version() {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set, and {e}");
            println!("skipped: compiling kernels: {e}");
            false
        }
    }
}

#[test]
fn every_program_compiles_for_every_architecture_within_its_registers() {
    if !compiler() {
        return;
    }
    // The usual shapes for all architectures, decode attention of all kinds of shapes for one; with KVANT_ALL_KERNELS everything.
    let of = |a: &'static str| match (std::env::var_os("KVANT_ALL_KERNELS").is_some(), a) {
        (true, _) => all_programs(a),
        (false, "sm_90a") => programs(a).into_iter().chain(attention_programs(a)).collect(),
        _ => programs(a),
    };
    let cases: Vec<_> = ARCHITECTURES.into_iter().flat_map(|a| of(a).into_iter().map(move |p| (p, a))).collect();
    let wrong: Vec<String> =
        cases.par_iter().filter_map(|(program, architecture)| check(program, architecture)).collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
    println!("{} programs compiled, for {}", cases.len(), ARCHITECTURES.join(" "));
}

/// What is wrong with one program on one architecture.
fn check(program: &Program, architecture: &str) -> Option<String> {
    match program.check(architecture) {
        Ok(c) => {
            println!("{} {architecture}: {} registers, {} bytes of stack", program.title(), c.registers, c.stack_bytes);
            None
        }
        Err(e) => Some(e.to_string()),
    }
}

#[test]
fn a_spill_and_an_error_are_seen() {
    if !compiler() {
        return;
    }
    let source = "extern \"C\" __global__ void __launch_bounds__(1024, 2) k(float* x) { float a[96];\n\
        for (int i = 0; i < 96; i++) a[i] = x[i * 1024 + threadIdx.x]; __syncthreads();\n\
        for (int i = 0; i < 96; i++) for (int j = 0; j < 96; j++) a[j] = a[j] * a[i] + 1.f; __syncthreads();\n\
        for (int i = 0; i < 96; i++) x[i * 1024 + threadIdx.x] = a[i]; }";
    let program = Program { name: "spilling", source, headers: &[], defines: Vec::new(), registers: 255, spills: 0 };
    assert!(check(&program, "sm_90a").is_some_and(|wrong| wrong.contains("spills")));
    let program = Program { source: "#include \"there.h\"\nbroken", ..program };
    assert!(check(&program, "sm_80").is_some_and(|wrong| wrong.contains("there.h")));
    let program = Program {
        headers: &[("there.h", "#define broken extern \"C\" __global__ void f(int* x) { *x = N; }")],
        ..program
    };
    assert!(check(&program, "sm_80").is_some_and(|wrong| wrong.contains('N')));
    assert_eq!(check(&Program { defines: vec!["N=1".to_string()], ..program }, "sm_80"), None);
}
