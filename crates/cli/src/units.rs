//! Numbers for people. In: bytes, counts, text such as `8GiB`; out: aligned text or numbers. NOT here: tables (table.rs).

use std::num::IntErrorKind;

/// Bytes of one mebibyte.
const MIB: f64 = 1024.0 * 1024.0;

/// Bytes in MiB with as many digits as help: `0.84 MiB`, `12.3 MiB`, `1024 MiB`.
pub fn mib(bytes: usize) -> String {
    let m = bytes as f64 / MIB;
    let digits = match m {
        m if m < 10.0 => 2,
        m if m < 100.0 => 1,
        _ => 0,
    };
    format!("{m:.digits$} MiB")
}

/// Nanoseconds in the unit that keeps three digits before the point at most.
pub fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.3} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// Parses a size: a number with an optional unit (`B`, `KiB`, `MiB`, `GiB`, `TiB`, `kB`, `MB`, `GB`, `TB`).
///
/// # Errors
/// A sentence for anything else, for zero, and for sizes beyond this machine's integers.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    if text.trim_start().starts_with('-') {
        return Err("a size must be at least one byte".into());
    }
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor: f64 = match unit.trim() {
        "" | "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" | "K" => 1024.0,
        "MiB" | "M" => MIB,
        "GiB" | "G" => MIB * 1024.0,
        "TiB" | "T" => MIB * MIB,
        other => return Err(format!("`{other}` is no unit of size (take MiB, GiB, MB or GB)")),
    };
    let bytes = number.parse::<f64>().map_err(|_| "a size is a number and a unit, as in 8GiB".to_string())? * factor;
    // f64 counts bytes exactly up to 2^53, far beyond any memory.
    if (1.0..9e15).contains(&bytes) {
        Ok(bytes as usize)
    } else {
        Err("a size must be at least one byte and below 9 PB".into())
    }
}

/// Largest count that a flag takes: far beyond any context or memory, small enough that sums and products of a few of
/// them with sizes stay inside 64 bits.
const MAX_COUNT: usize = 1 << 40;

/// Parses a count of at least one.
///
/// # Errors
/// A sentence for zero and for what is no number.
pub fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("must be at least 1".into()),
        Ok(n) if n > MAX_COUNT => Err(format!("must be at most {MAX_COUNT}")),
        Ok(n) => Ok(n),
        Err(e) if *e.kind() == IntErrorKind::PosOverflow => Err(format!("must be at most {MAX_COUNT}")),
        Err(_) => Err("must be a whole number of at least 1".into()),
    }
}

/// Parses a whole number from 0 on, up to the largest there is.
///
/// # Errors
/// A sentence for anything else.
pub fn parse_whole(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_print() {
        assert_eq!(parse_bytes("8GiB"), Ok(8 << 30));
        assert_eq!(parse_bytes("1.5 MiB"), Ok(3 << 19));
        assert_eq!(parse_bytes("600MB"), Ok(600_000_000));
        assert_eq!(parse_bytes("17"), Ok(17));
        for bad in ["", "0", "GiB", "8 parsecs", "-1", "1e99GiB", "1.2.3", "99999999999999999999TiB"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
        assert_eq!(mib(3 << 19), "1.50 MiB");
        assert_eq!(mib(12 << 20), "12.0 MiB");
        assert_eq!(mib(4 << 30), "4096 MiB");
        assert_eq!(
            [time(12), time(1_500), time(2_500_000), time(3_000_000_000)],
            ["12 ns", "1.5 us", "2.500 ms", "3.00 s"]
        );
    }

    #[test]
    fn counts_are_whole_and_positive() {
        assert_eq!(parse_count("3"), Ok(3));
        for bad in ["0", "-1", "1.5", "many", "", "9999999999999999"] {
            assert!(parse_count(bad).is_err(), "{bad}");
        }
        assert!(parse_count("99999999999999999999").unwrap_err().contains("at most"));
        assert_eq!(parse_whole("0"), Ok(0));
        assert_eq!(parse_whole("18446744073709551615"), Ok(u64::MAX));
        for bad in ["-1", "18446744073709551616", "x", "1.0", ""] {
            assert!(parse_whole(bad).unwrap_err().contains("from 0 to 18446744073709551615"), "{bad}");
        }
    }
}
