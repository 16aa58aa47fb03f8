//! CPU kernels: the VARIANTS table, best first. A new variant is one file and one line here; selection, `--kernel`,
//! logs, parity tests and benches read this table.
//! NOT here: the attention loop (generic.rs), validation and threads (attend/mod.rs, plan.rs).

/// Gives a proof type the loop, compiled for its instructions: the generic code is inlined into a function that has the
/// features.
#[cfg(target_arch = "x86_64")]
macro_rules! entry_point {
    ($proof:ident, $features:literal) => {
        impl $proof {
            pub(crate) fn attend_range(self, task: &Task<'_>, scratch: &mut Scratch, states: &mut States) {
                #[target_feature(enable = $features)]
                fn entry(kernel: $proof, task: &Task<'_>, scratch: &mut Scratch, states: &mut States) {
                    attend_range(kernel, task, scratch, states);
                }
                // SAFETY: self proves the features.
                unsafe { entry(self, task, scratch, states) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avxvnni;
mod coded;
#[macro_use]
mod expand;
#[cfg(target_arch = "x86_64")]
mod expand256;
#[cfg(target_arch = "x86_64")]
mod expand512;
#[cfg(target_arch = "x86_64")]
mod fold512;
pub(crate) mod generic;
mod kernel;
mod portable;

use super::softmax::States;
use generic::{Scratch, Task, attend_range};
use kernel::Kernel;

/// One way to attend a range of keys.
pub(crate) struct Variant {
    pub name: &'static str,
    /// Whether this processor can run it, or what it lacks.
    pub available: fn() -> Result<(), String>,
    /// Attends one range for the task's query vectors and merges the results into their states. Panics when not available.
    pub run: fn(&Task<'_>, &mut Scratch, &mut States),
    /// Query vectors that share one pass over the codes.
    pub vectors: usize,
    /// Largest relative L2 error over packed records, against the f64 reference.
    pub packed_tolerance: f64,
    /// The same over plain rows, f16 or bf16.
    pub plain_tolerance: f64,
}

/// Name of the variant that multiplies with matrix tiles.
pub const TILE_KERNEL: &str = "avx512-amx";
/// Query vectors on a kv head from which on it does.
pub const TILE_VECTORS: usize = 8;

/// Every variant of this build, best first.
pub(crate) const VARIANTS: &[Variant] = &[
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: TILE_KERNEL,
        available: || available(amx::Amx::new(), amx::NEEDS),
        run: |task, scratch, states| proof(amx::Amx::new()).attend_range(task, scratch, states),
        vectors: amx::Amx::VECTORS,
        packed_tolerance: 3e-3,
        plain_tolerance: 1e-4,
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx512-vnni",
        available: || available(avx512::Avx512Vnni::new(), avx512::NEEDS),
        run: |task, scratch, states| proof(avx512::Avx512Vnni::new()).attend_range(task, scratch, states),
        vectors: avx512::Avx512Vnni::VECTORS,
        packed_tolerance: 3e-3,
        plain_tolerance: 1e-4,
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx-vnni",
        available: || available(avxvnni::AvxVnni::new(), avxvnni::NEEDS),
        run: |task, scratch, states| proof(avxvnni::AvxVnni::new()).attend_range(task, scratch, states),
        vectors: avxvnni::AvxVnni::VECTORS,
        packed_tolerance: 3e-3,
        plain_tolerance: 1e-4,
    },
    #[cfg(target_arch = "x86_64")]
    Variant {
        name: "avx2",
        available: || available(avx2::Avx2::new(), avx2::NEEDS),
        run: |task, scratch, states| proof(avx2::Avx2::new()).attend_range(task, scratch, states),
        vectors: avx2::Avx2::VECTORS,
        packed_tolerance: 3e-3,
        plain_tolerance: 1e-4,
    },
    Variant {
        name: "portable",
        available: || Ok(()),
        run: |task, scratch, states| attend_range(portable::Portable, task, scratch, states),
        vectors: portable::Portable::VECTORS,
        packed_tolerance: 1e-4,
        plain_tolerance: 1e-4,
    },
];

#[cfg(target_arch = "x86_64")]
fn available<T>(proof: Option<T>, needs: &str) -> Result<(), String> {
    proof.map(|_| ()).ok_or_else(|| format!("this processor or system lacks one of {needs}"))
}

#[cfg(target_arch = "x86_64")]
fn proof<T>(proof: Option<T>) -> T {
    proof.expect("checked by available")
}
