//! From a program's text to machine code for one architecture, with NVRTC. In: source, headers by name, defines; out: the
//! cubin and what the assembler says of registers and spills.
//! NOT here: files (store.rs), devices (mod.rs). No GPU is needed: tests compile for all architectures.
//!
//! Headers are given by name with their text: no include path is searched, so no header of CUDA is available or needed.

use std::ffi::{CString, c_char};
use std::ptr;

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::{result, sys};

use super::broken;
use crate::Error;

/// One translation unit of kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// What errors, files and tests call it; with its defines it is unique.
    pub name: &'static str,
    /// Text of the `.cu` file.
    pub source: &'static str,
    /// Headers it includes: name as in `#include "name"`, text.
    pub headers: &'static [(&'static str, &'static str)],
    /// `NAME=value` definitions.
    pub defines: Vec<String>,
    /// Registers per thread that no kernel of it may exceed.
    pub registers: u32,
    /// Bytes that it may spill, of what a block keeps outside of its loops: such a spill takes no time.
    pub spills: u32,
}

impl Program {
    /// Compiles it for `architecture` and refuses code that spills or takes more registers than its budget: what tests ask of
    /// every program.
    ///
    /// Errors: those of [`compile`]; [`Error::Gpu`] that says how much it takes.
    pub fn check(&self, architecture: &str) -> Result<Compiled, Error> {
        let compiled = compile(self, architecture)?;
        let Compiled { registers, spill_bytes, log, .. } = &compiled;
        let title = self.title();
        if *registers == 0 || compiled.cubin.is_empty() {
            return Err(broken(format!(
                "{title} for {architecture}: no registers or no code in the assembler's log: {log}"
            )));
        }
        if *spill_bytes > self.spills {
            return Err(broken(format!("{title} for {architecture} spills {spill_bytes} bytes: {log}")));
        }
        if *registers > self.registers {
            let budget = self.registers;
            return Err(broken(format!(
                "{title} for {architecture} takes {registers} registers, its budget is {budget}: {log}"
            )));
        }
        Ok(compiled)
    }

    /// Name and definitions, as errors and tests show them.
    pub fn title(&self) -> String {
        [self.name].into_iter().chain(self.defines.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
    }
}

/// Machine code and what the assembler said about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code of one architecture.
    pub cubin: Vec<u8>,
    /// What compiler and assembler printed.
    pub log: String,
    /// Registers per thread of the kernel that uses most.
    pub registers: u32,
    /// Bytes of registers that spill to memory, stores and loads of all functions together.
    pub spill_bytes: u32,
    /// Bytes of the largest stack frame: arrays that are indexed at run time.
    pub stack_bytes: u32,
}

/// An error unless NVRTC can be opened.
pub(super) fn require_compiler() -> Result<(), Error> {
    // SAFETY: opens and closes a shared library, whose constructors are the vendor's.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(broken("the compiler of kernels (libnvrtc) cannot be opened: is the folder that has it in LD_LIBRARY_PATH?"))
}

/// NVRTC's version: major, minor.
///
/// Errors: [`Error::Gpu`] when NVRTC cannot be opened.
pub fn compiler_version() -> Result<(i32, i32), Error> {
    require_compiler()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there (checked above); both pointers are to live integers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(|e| failed("its version", e))?;
    Ok((major, minor))
}

/// The name of what to compile for on a card of `capability`: its own architecture, or the nearest older one of its
/// generation that this NVRTC knows, which such a card runs too.
pub(super) fn architecture(capability: (u32, u32)) -> Result<String, Error> {
    require_compiler()?;
    let mut count = 0;
    // SAFETY: the library is there; the pointer is to a live integer.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }.result().map_err(|e| failed("its architectures", e))?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the list has as many elements as NVRTC just said it writes.
    unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) }.result().map_err(|e| failed("its architectures", e))?;
    let known: Vec<u32> = known.into_iter().filter_map(|k| u32::try_from(k).ok()).collect();
    nearest(capability, &known).ok_or_else(|| {
        let (major, minor) = capability;
        broken(format!("this NVRTC knows no card of compute capability {major}.{minor}: a newer one may"))
    })
}

fn nearest((major, minor): (u32, u32), known: &[u32]) -> Option<String> {
    let best = known.iter().copied().filter(|k| k / 10 == major && k % 10 <= minor).max()?;
    // Hopper's own instructions (bulk copies, its matrix products) are in the architecture-specific set only.
    Some(if best == 90 { "sm_90a".to_string() } else { format!("sm_{best}") })
}

/// Machine code of `program` for `architecture` (`sm_90a`).
///
/// Errors: [`Error::Gpu`] when NVRTC cannot be opened, or with its log when the text does not compile.
pub fn compile(program: &Program, architecture: &str) -> Result<Compiled, Error> {
    require_compiler()?;
    let named = |s: &str| CString::new(s).map_err(|_| broken(format!("{} has a zero byte in its text", program.name)));
    let (source, name) = (named(program.source)?, named(&format!("{}.cu", program.name))?);
    let names = program.headers.iter().map(|(n, _)| named(n)).collect::<Result<Vec<_>, _>>()?;
    let texts = program.headers.iter().map(|(_, t)| named(t)).collect::<Result<Vec<_>, _>>()?;
    let pointers = |list: &[CString]| list.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
    let (name_pointers, text_pointers) = (pointers(&names), pointers(&texts));
    let headers = i32::try_from(names.len()).unwrap_or(i32::MAX);
    let mut handle = Handle(ptr::null_mut());
    // SAFETY: strings end in zero and outlive the handle, which is dropped before them; both lists have `headers` items.
    let made = unsafe {
        sys::nvrtcCreateProgram(
            &mut handle.0,
            source.as_ptr(),
            name.as_ptr(),
            headers,
            text_pointers.as_ptr(),
            name_pointers.as_ptr(),
        )
    };
    made.result().map_err(|e| failed(program.name, e))?;
    let mut options = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_string(),
        // Functions without a mark are the device's: constexpr ones of headers.
        "-default-device".to_string(),
        // Constants of a header that a kernel has no use for.
        "--diag-suppress=177".to_string(),
        "--ptxas-options=-v".to_string(),
        "--no-display-error-number".to_string(),
    ];
    if compiler_version()? >= (13, 0) {
        // Its own cache would keep the code and lose the log.
        options.push("--no-cache".to_string());
    }
    options.extend(program.defines.iter().map(|d| format!("-D{d}")));
    // SAFETY: the handle is of a program that was created above and is not destroyed yet.
    let outcome = unsafe { result::compile_program(handle.0, &options) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(handle.0) }.map_err(|e| failed(program.name, e))?;
    let log: Vec<u8> = log.into_iter().map(|c| c.cast_unsigned()).take_while(|&c| c != 0).collect();
    let log = String::from_utf8_lossy(&log).into_owned();
    outcome
        .map_err(|e| broken(format!("{} does not compile for {architecture} ({:?}): {log}", program.title(), e.0)))?;
    let mut bytes = 0;
    // SAFETY: the handle's program is compiled; the pointer is to a live integer.
    unsafe { sys::nvrtcGetCUBINSize(handle.0, &mut bytes) }.result().map_err(|e| failed(program.name, e))?;
    let mut cubin = vec![0u8; bytes];
    // SAFETY: as above; the list has as many bytes as NVRTC just said it writes.
    unsafe { sys::nvrtcGetCUBIN(handle.0, cubin.as_mut_ptr().cast()) }.result().map_err(|e| failed(program.name, e))?;
    let used = Used::read(&log);
    Ok(Compiled { cubin, registers: used.registers, spill_bytes: used.spill_bytes, stack_bytes: used.stack_bytes, log })
}

/// NVRTC's program, destroyed when dropped.
struct Handle(sys::nvrtcProgram);

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by nvrtcCreateProgram and destroyed here only. A failure leaves nothing to do.
            let _ = unsafe { result::destroy_program(self.0) };
        }
    }
}

fn failed(what: &str, e: NvrtcError) -> Error {
    broken(format!("NVRTC failed at {what}: {:?}", e.0))
}

/// What the assembler's log says, summed or at most over its functions.
#[derive(Debug, Default, PartialEq, Eq)]
struct Used {
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
}

impl Used {
    /// Reads lines such as `Used 32 registers, ...` and `256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads`.
    fn read(log: &str) -> Self {
        let mut used = Self::default();
        for part in log.lines().flat_map(|line| line.split(", ")) {
            let before = |end: &str| part.trim_end().strip_suffix(end)?.rsplit(' ').next()?.parse::<u32>().ok();
            used.registers = used.registers.max(before(" registers").unwrap_or(0));
            used.stack_bytes = used.stack_bytes.max(before(" bytes stack frame").unwrap_or(0));
            used.spill_bytes += before(" bytes spill stores").or_else(|| before(" bytes spill loads")).unwrap_or(0);
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_log_is_read() {
        let log = "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n\
                   ptxas         .     256 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 0 barriers, 256 bytes cumulative stack size\n\
                   ptxas         .     8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 40 registers\n";
        assert_eq!(Used::read(log), Used { registers: 40, spill_bytes: 32, stack_bytes: 256 });
        assert_eq!(Used::read(""), Used::default());
    }

    #[test]
    fn a_card_runs_the_nearest_older_of_its_generation() {
        let known = [75, 80, 86, 87, 89, 90, 100, 103, 120];
        assert_eq!(nearest((9, 0), &known).as_deref(), Some("sm_90a"));
        assert_eq!(nearest((8, 6), &known).as_deref(), Some("sm_86"));
        assert_eq!(nearest((8, 8), &known).as_deref(), Some("sm_87"));
        assert_eq!(nearest((12, 1), &known).as_deref(), Some("sm_120"));
        assert_eq!(nearest((13, 0), &known), None);
    }
}
