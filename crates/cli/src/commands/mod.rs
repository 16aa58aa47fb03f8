//! One file per command. In: checked arguments; out: what the command prints. NOT here: parsing, failing, printing itself.

pub mod bench;
pub mod bench_attend;
pub mod bench_decode;
pub mod bench_experiments;
pub mod demo;
pub mod eval;
pub mod generate;
pub mod info;
pub mod pull;
pub mod roofline;
pub mod serve;
pub mod tune;

use crate::args::{ArmName, Machine, cores};
use crate::failure::Failure;
use clap::ValueEnum;
use kvant_kv::Arm;

impl Machine {
    /// Threads to use, once the device is one that this build has.
    ///
    /// # Errors
    /// [`Failure`] for any device but the CPU.
    pub fn threads(&self) -> Result<usize, Failure> {
        match self.device.as_str() {
            "cpu" => {}
            "cuda" => return Err(Failure::not_built("--device cuda")),
            other => return Err(Failure::input(format!("unknown device `{other}`"), "--device takes cpu")),
        }
        Ok(self.threads.unwrap_or_else(cores))
    }
}

/// An arm as the command line and JSON call it.
pub fn arm_name(arm: Arm) -> &'static str {
    ArmName::value_variants().iter().find(|n| n.arm() == arm).map_or("unknown", |n| n.name())
}

/// Checks a kernel's name before anything slow happens.
///
/// # Errors
/// [`Failure`] for a name that is not in the table and for a kernel that this processor cannot run.
pub fn check_kernel(name: Option<&str>) -> Result<(), Failure> {
    let Some(name) = name else { return Ok(()) };
    let kernels = kvant_kv::attend::kernels();
    let names = kernels.iter().map(|(n, _)| *n).collect::<Vec<_>>().join(", ");
    match kernels.iter().find(|(n, _)| *n == name) {
        None => Err(Failure::input(format!("unknown kernel `{name}`"), format!("kernels of this build: {names}"))),
        Some((_, Err(why))) => Err(Failure::input(
            format!("kernel {name} cannot run here: {why}"),
            "`kvant info` lists the kernels and why each can or cannot run here",
        )),
        Some((_, Ok(()))) => Ok(()),
    }
}
