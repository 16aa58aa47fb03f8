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
    /// Whether the GPU is asked for.
    ///
    /// # Errors
    /// [`Failure`] for a device that there is none of, and for threads where a GPU does the work.
    pub fn on_gpu(&self) -> Result<bool, Failure> {
        match self.device.as_str() {
            "cpu" => Ok(false),
            "cuda" if self.threads.is_some() => {
                Err(Failure::input("--threads is of the CPU's kernels", "leave it out with --device cuda"))
            }
            "cuda" => Ok(true),
            other => Err(Failure::input(format!("unknown device `{other}`"), "--device takes cpu or cuda")),
        }
    }

    /// Threads of a command that runs on the CPU only.
    ///
    /// # Errors
    /// [`Failure`] for any other device.
    pub fn threads(&self) -> Result<usize, Failure> {
        if self.on_gpu()? {
            let what = "this command runs on the CPU only";
            return Err(Failure::input(what, "leave --device cuda out"));
        }
        Ok(self.host_threads())
    }

    /// Threads of the host, whichever device does the work.
    pub fn host_threads(&self) -> usize {
        self.threads.unwrap_or_else(cores)
    }
}

/// An arm as the command line and JSON call it.
pub fn arm_name(arm: Arm) -> &'static str {
    ArmName::value_variants().iter().find(|n| n.arm() == arm).map_or("unknown", |n| n.name())
}

/// Most rows of a step on a GPU, and so requests that decode at once there.
pub const MOST_ON_GPU: usize = kvant_engine::cuda::CHUNK;

/// Checks a number of rows or requests of a step on a GPU.
///
/// # Errors
/// [`Failure`] for more than there may be.
pub fn check_rows(flag: &str, rows: usize) -> Result<(), Failure> {
    if rows > MOST_ON_GPU {
        let what = format!("{flag} {rows} is more than the {MOST_ON_GPU} rows that the GPU computes at once");
        return Err(Failure::input(what, format!("take {MOST_ON_GPU} or less with --device cuda")));
    }
    Ok(())
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
