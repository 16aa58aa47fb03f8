//! The machine's facts, as its system tells them. In: nothing; out: plain data. NOT here: anything measured
//! (ceilings.rs), and anything from a data sheet.

use serde::Serialize;
use std::fs;
use std::path::Path;

/// One level of the processor's caches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CacheLevel {
    /// As in `L2`, `L1 data`.
    pub name: String,
    /// Bytes of one instance.
    pub bytes: usize,
    /// Processors that share one instance, in the system's notation.
    pub shared_by: String,
}

/// What a reader must know to compare figures.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Processor's name, family, model and stepping.
    pub cpu: String,
    /// Architecture.
    pub arch: String,
    /// Operating system and its kernel's release.
    pub os: String,
    /// Processors this process may use.
    pub cores: usize,
    /// Bytes of memory, where the system says.
    pub memory_bytes: Option<usize>,
    /// Data caches, nearest first.
    pub caches: Vec<CacheLevel>,
    /// Whether the system hands out huge pages, where it says.
    pub huge_pages: Option<String>,
    /// Date of the run, UTC.
    pub date: String,
}

impl Machine {
    /// This machine, now.
    pub fn here() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |key: &str| {
            let line = cpuinfo.lines().find(|l| l.split(':').next().is_some_and(|k| k.trim() == key));
            line.and_then(|l| l.split_once(':')).map(|(_, v)| v.trim().to_string())
        };
        let cpu = match (field("model name"), field("cpu family"), field("model"), field("stepping")) {
            (Some(name), Some(family), Some(model), Some(stepping)) => {
                format!("{name}, family {family} model {model} stepping {stepping}")
            }
            (Some(name), ..) => name,
            _ => "unknown processor".to_string(),
        };
        // The version alone: what follows it names a build.
        let release =
            line_of("/proc/sys/kernel/osrelease").map(|r| r.split('-').next().unwrap_or_default().to_string());
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"));
        Self {
            cpu,
            arch: std::env::consts::ARCH.to_string(),
            os: format!("{} {}", std::env::consts::OS, release.unwrap_or_default()).trim().to_string(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory_bytes: memory.and_then(|kib| kib.trim().parse::<usize>().ok()).map(|kib| kib * 1024),
            caches: caches(Path::new("/sys/devices/system/cpu/cpu0/cache")),
            huge_pages: line_of("/sys/kernel/mm/transparent_hugepage/enabled").and_then(|l| chosen(&l)),
            date: date(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())),
        }
    }
}

fn line_of(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_string())
}

/// The word in brackets of a list such as `always [madvise] never`.
fn chosen(list: &str) -> Option<String> {
    let (_, rest) = list.split_once('[')?;
    rest.split_once(']').map(|(word, _)| word.to_string())
}

/// Data and unified caches under a folder of the system's.
fn caches(folder: &Path) -> Vec<CacheLevel> {
    let read = |index: usize, name: &str| {
        let text = fs::read_to_string(folder.join(format!("index{index}")).join(name)).ok()?;
        Some(text.trim().to_string())
    };
    let mut found = Vec::new();
    for index in 0.. {
        let Some(level) = read(index, "level") else { break };
        let kind = read(index, "type").unwrap_or_default();
        let bytes = read(index, "size").and_then(|s| kib(&s));
        let (Some(bytes), "Data" | "Unified") = (bytes, kind.as_str()) else { continue };
        let name = if kind == "Data" { format!("L{level} data") } else { format!("L{level}") };
        found.push(CacheLevel { name, bytes, shared_by: read(index, "shared_cpu_list").unwrap_or_default() });
    }
    found
}

/// Bytes of a text such as `2048K`.
fn kib(text: &str) -> Option<usize> {
    let (number, factor) = match text.strip_suffix('K') {
        Some(number) => (number, 1 << 10),
        None => (text.strip_suffix('M')?, 1 << 20),
    };
    number.parse::<usize>().ok().map(|n| n * factor)
}

/// Day of a number of seconds since 1970-01-01 UTC, by the proleptic Gregorian calendar.
fn date(seconds: u64) -> String {
    // Days are counted from 0000-03-01, so that a leap day is the last day of its year.
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Machine {
        pub(crate) fn example() -> Self {
            Self {
                cpu: "Example <CPU>".into(),
                arch: "x86_64".into(),
                os: "linux".into(),
                cores: 2,
                memory_bytes: Some(8 << 30),
                caches: vec![CacheLevel { name: "L2".into(), bytes: 2 << 20, shared_by: "0".into() }],
                huge_pages: Some("madvise".into()),
                date: "2001-02-03".into(),
            }
        }
    }

    #[test]
    fn texts_of_the_system_parse() {
        assert_eq!(kib("2048K"), Some(2 << 20));
        assert_eq!(kib("3M"), Some(3 << 20));
        assert_eq!(kib("big"), None);
        assert_eq!(chosen("always [madvise] never").as_deref(), Some("madvise"));
        assert_eq!(chosen("always"), None);
        assert!(caches(Path::new("/nonexistent")).is_empty());
    }

    #[test]
    fn days_follow_the_calendar() {
        let day = |days: u64| date(days * 86_400 + 86_399);
        assert_eq!([day(0), day(58), day(59)], ["1970-01-01", "1970-02-28", "1970-03-01"]);
        assert_eq!([day(11_016), day(11_017)], ["2000-02-29", "2000-03-01"]);
        assert_eq!(day(20_453), "2025-12-31");
        assert_eq!(day(47_540), "2100-02-28");
        assert_eq!(day(47_541), "2100-03-01");
    }

    #[test]
    fn this_machine_has_a_processor() {
        let here = Machine::here();
        assert!(here.cores >= 1 && !here.cpu.is_empty() && here.date.len() == 10);
    }
}
