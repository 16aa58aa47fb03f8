//! Memory of this process. In: nothing; out: bytes the kernel counted. NOT here: the cache's own count (kvant-kv).

use crate::failure::Failure;

/// Most bytes this process ever had in memory (`VmHWM`), or `None` where the system does not say.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    kib_of(&status, "VmHWM:").map(|kib| kib * 1024)
}

/// Bytes of this machine's memory that a new program could take, and of all of it.
pub fn machine_memory_bytes() -> Option<(u64, u64)> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some((kib_of(&info, "MemAvailable:")? * 1024, kib_of(&info, "MemTotal:")? * 1024))
}

/// An error when this machine has no such memory, in a sentence with this hint.
///
/// # Errors
/// [`Failure`] says what is needed and what there is.
pub fn check(need: f64, hint: &str) -> Result<(), Failure> {
    match machine_memory_bytes() {
        Some((available, _)) if need > available as f64 => {
            let (need, available) = (need / 1e9, available as f64 / 1e9);
            let what = format!("this needs about {need:.1} GB of memory, and {available:.1} GB are available");
            Err(Failure::input(what, hint))
        }
        _ => Ok(()),
    }
}

fn kib_of(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|l| l.strip_prefix(key))?;
    value.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_parse() {
        assert_eq!(kib_of("VmPeak:\t  9 kB\nVmHWM:\t  1234 kB\n", "VmHWM:"), Some(1234));
        assert_eq!(kib_of("VmHWM:\t  1234 kB\n", "VmRSS:"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_uses_memory() {
        assert!(peak_rss_bytes().is_some_and(|b| b > 100_000));
        assert!(machine_memory_bytes().is_some_and(|(free, all)| 0 < free && free <= all));
    }
}
