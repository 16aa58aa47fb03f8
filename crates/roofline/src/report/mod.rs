//! What a survey found. In: measured rows and ceilings; out: plain data that serializes, and pages made of it.
//! Rooms: html.rs one self-contained page; plot.rs the log-log plots in it; labels.rs places their labels; markdown.rs
//! tables for documents.
//! NOT here: measuring (survey/), files.

mod html;
pub mod labels;
mod markdown;
mod plot;

pub use html::html;
pub use markdown::markdown;
pub use plot::{colour, escape};

use crate::ceilings::Ceilings;
use crate::machine::Machine;
use crate::verdict::{Bound, Verdict};
use serde::Serialize;
use std::fmt;

/// Operations that are surveyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// One new row per request.
    Attend,
    /// Many new rows of one request.
    Prefill,
    /// Rows into the cache, whole groups packed.
    Append,
}

impl Op {
    /// Every operation, in the order of pages.
    pub const ALL: [Self; 3] = [Self::Attend, Self::Prefill, Self::Append];

    /// As it is named in JSON and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Op::Attend => "attend",
            Op::Prefill => "prefill",
            Op::Append => "append",
        }
    }

    /// Heading of its section.
    pub fn title(self) -> &'static str {
        match self {
            Self::Attend => "Decode attention",
            Self::Prefill => "Prefill attention",
            Self::Append => "Append (quantize and pack)",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Attend => "attend",
            Self::Prefill => "prefill",
            Self::Append => "append",
        })
    }
}

impl Op {
    /// Name of the column that only this operation's table has.
    pub fn own_column(self) -> Option<&'static str> {
        match self {
            Self::Attend => None,
            Self::Prefill => Some("% of matmul"),
            Self::Append => Some("GB/s as f16"),
        }
    }
}

/// Which peak a kernel's arithmetic has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arithmetic {
    /// f32 multiply-adds.
    Fma,
    /// 8-bit dot products.
    Int8Dot,
    /// Products of 8-bit matrices in tiles.
    Int8Tiles,
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fma => "f32 FMA",
            Self::Int8Dot => "int8 dot",
            Self::Int8Tiles => "int8 tiles",
        })
    }
}

/// One operation at one size under one scheme.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Operation.
    pub op: Op,
    /// Scheme, canonical text.
    pub scheme: String,
    /// Kernel that ran.
    pub kernel: String,
    /// Threads in use.
    pub threads: usize,
    /// Requests of one call.
    pub batch: usize,
    /// Tokens that each request holds after the call's rows.
    pub kv_len: usize,
    /// New rows of each request.
    pub new_rows: usize,
    /// Whether the data was outside the caches.
    pub cold: bool,
    /// Shortest round.
    pub min_ns: u64,
    /// Middle round.
    pub median_ns: u64,
    /// Rounds timed.
    pub rounds: usize,
    /// Compulsory bytes.
    pub bytes: usize,
    /// Operations.
    pub ops: usize,
    /// Operations per byte.
    pub intensity: f64,
    /// Compulsory bytes over the shortest time.
    pub gbps: f64,
    /// Operations over the shortest time.
    pub gops: f64,
    /// Bandwidth of its working set, same run.
    pub ceiling_gbps: f64,
    /// Which bandwidth that is.
    pub ceiling: String,
    /// Share of it.
    pub pct_of_bandwidth: f64,
    /// Which peak fits.
    pub arithmetic: Arithmetic,
    /// That peak for the threads in use.
    pub peak_gops: f64,
    /// Share of it.
    pub pct_of_compute: f64,
    /// Share of the matrix product's peak, for prefill.
    pub pct_of_matmul: Option<f64>,
    /// Append: what keys and values would be as f16, in GB per second: how fast a cache of that size fills.
    pub input_gbps: Option<f64>,
    /// The smallest call of this operation and scheme.
    pub floor_ns: u64,
    /// This call over the smallest.
    pub times_floor: f64,
    /// What bounds it.
    pub verdict: Verdict,
}

impl Row {
    /// What stands in [`Op::own_column`].
    pub fn own_figure(&self) -> Option<String> {
        self.pct_of_matmul.map(|p| format!("{p:.0}")).or(self.input_gbps.map(|g| format!("{g:.2}")))
    }

    /// Name that is unique in a report and fit for an HTML id.
    pub fn id(&self) -> String {
        format!("{}-{}-b{}-s{}-n{}", self.op, self.scheme, self.batch, self.kv_len, self.new_rows)
    }

    /// The size in few letters: what tells the rows of one operation and scheme apart.
    pub fn size(&self) -> String {
        let (n, kv) = (tokens(self.new_rows), tokens(self.kv_len));
        match self.op {
            Op::Attend if self.batch == 1 => kv,
            Op::Attend => format!("{} x {kv}", self.batch),
            Op::Prefill if self.new_rows == self.kv_len => format!("prompt {n}"),
            Op::Prefill => format!("{n} over {}", tokens(self.kv_len - self.new_rows)),
            Op::Append if self.batch == 1 => n,
            Op::Append => format!("{} x {n}", self.batch),
        }
    }

    /// Everything a reader of a plot may want to know of its point.
    pub fn sentence(&self) -> String {
        let matmul = self.pct_of_matmul.map_or(String::new(), |p| format!(", {p:.0} % of the matrix product's peak"));
        format!(
            "{} {} {} by {} on {}: {} for {} and {} operations, {:.1} GB/s ({:.0} % of {:.1}, {}), {:.1} Gop/s ({:.0} % of {:.0}, {}){matmul}: {}",
            self.op,
            self.scheme,
            self.size(),
            self.kernel,
            plural(self.threads, "thread"),
            time(self.min_ns),
            bytes(self.bytes),
            count(self.ops as f64),
            self.gbps,
            self.pct_of_bandwidth,
            self.ceiling_gbps,
            self.ceiling,
            self.gops,
            self.pct_of_compute,
            self.peak_gops,
            self.arithmetic,
            self.verdict.bound,
        )
    }
}

/// What starting work costs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Dispatch {
    /// One empty piece per thread of the attention operation, shortest.
    pub empty_min_ns: u64,
    /// The same, median.
    pub empty_median_ns: u64,
    /// Attention over one token, shortest, slowest scheme.
    pub one_token_ns: u64,
}

/// One way to cut or run the same bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SweepPoint {
    /// Scheme, canonical text.
    pub scheme: String,
    /// Threads in use.
    pub threads: usize,
    /// Requests of one call.
    pub batch: usize,
    /// Tokens of each.
    pub kv_len: usize,
    /// Key ranges of one unit of work; none: the product's rule.
    pub ranges_per_unit: Option<usize>,
    /// Shortest round.
    pub min_ns: u64,
    /// Compulsory bytes over it.
    pub gbps: f64,
    /// Reading of cold memory by as many threads, in the same rounds.
    pub read_gbps: f64,
}

impl SweepPoint {
    /// Share of the reading ceiling.
    pub fn pct_of_read(&self) -> f64 {
        100.0 * self.gbps / self.read_gbps
    }
}

/// The same bytes in other pieces.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Sweeps {
    /// By threads.
    pub threads: Vec<SweepPoint>,
    /// By requests: together they hold the same tokens.
    pub requests: Vec<SweepPoint>,
    /// By key ranges per unit of work.
    pub splits: Vec<SweepPoint>,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Version of the program.
    pub version: String,
    /// What the caller wants to be read with it, such as commit and command.
    pub note: Option<String>,
    /// The machine.
    pub machine: Machine,
    /// True: sizes and rounds so small that figures say nothing.
    pub quick: bool,
    /// Bytes that cold data rotates over.
    pub cold_bytes: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Threads in use.
    pub threads: usize,
    /// Attention kernel.
    pub kernel: String,
    /// Ceilings of these threads.
    pub ceilings: Ceilings,
    /// Ceilings of one thread, for operations that run on one; the same when one is in use.
    pub one_thread: Ceilings,
    /// What starting work costs.
    pub dispatch: Dispatch,
    /// The rows.
    pub rows: Vec<Row>,
    /// The same bytes in other pieces.
    pub sweeps: Sweeps,
}

impl Report {
    /// Operations that were looked at.
    pub fn ops(&self) -> impl Iterator<Item = Op> {
        Op::ALL.into_iter().filter(|&op| self.rows_of(op).next().is_some())
    }

    /// Rows of one operation.
    pub fn rows_of(&self, op: Op) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |r| r.op == op)
    }

    /// Schemes in the order of their rows, each once.
    pub fn schemes(&self) -> Vec<&str> {
        let mut schemes: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !schemes.contains(&row.scheme.as_str()) {
                schemes.push(&row.scheme);
            }
        }
        schemes
    }

    /// How many rows have a verdict.
    pub fn count(&self, bound: Bound) -> usize {
        self.rows.iter().filter(|r| r.verdict.bound == bound).count()
    }

    /// One sentence on what was run.
    pub fn subject(&self) -> String {
        format!(
            "{} q heads, {} kv heads, head_dim {}; kernel {}, {}; cold data rotates over {}",
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            self.kernel,
            plural(self.threads, "thread"),
            bytes(self.cold_bytes)
        )
    }
}

/// A count of tokens: `64`, `1k`, `64k`.
pub(crate) fn tokens(n: usize) -> String {
    if n >= 1024 && n.is_multiple_of(1024) { format!("{}k", n / 1024) } else { n.to_string() }
}

/// Bytes in the unit that keeps the number short.
pub fn bytes(n: usize) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut x, mut unit) = (n as f64, 0);
    while x >= 1024.0 && unit + 1 < UNITS.len() {
        x /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || x >= 100.0 || x.fract() == 0.0 { 0 } else { 1 };
    format!("{x:.digits$} {}", UNITS[unit])
}

/// A large count in the unit that keeps the number short.
pub(crate) fn count(x: f64) -> String {
    match x {
        x if x >= 1e9 => format!("{:.1} G", x / 1e9),
        x if x >= 1e6 => format!("{:.1} M", x / 1e6),
        x if x >= 1e3 => format!("{:.1} k", x / 1e3),
        x => format!("{x:.0}"),
    }
}

/// Nanoseconds in the unit that keeps the number short.
pub fn time(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// `1 thread`, `2 threads`.
pub(crate) fn plural(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ceilings::Bandwidth;
    use crate::peaks::Peak;

    /// A report with every operation and verdict, without measuring anything.
    pub(crate) fn example() -> Report {
        let peak = |gops| Peak { gops, by: "avx512f <fast>".into(), lower_bound: false };
        let curve = |top: f64| (0..7).map(move |i| Bandwidth { bytes: 1 << (18 + 2 * i), gbps: top / (i + 1) as f64 });
        let ceilings = Ceilings {
            threads: 2,
            read: curve(200.0).collect(),
            copy: curve(120.0).collect(),
            fma: peak(300.0),
            int8_dot: peak(1200.0),
            int8_tiles: Some(peak(9000.0)),
            matmul: peak(240.0),
        };
        let sizes = [
            (Op::Attend, vec![(1, 256, 1), (1, 1024, 1), (1, 4096, 1), (1, 16384, 1), (1, 65536, 1)]),
            (Op::Prefill, vec![(1, 1024, 1024), (1, 8704, 512), (1, 32832, 64)]),
            (Op::Append, vec![(16, 1025, 1), (1, 64, 64), (1, 512, 512), (1, 4096, 4096)]),
        ];
        let mut rows = Vec::new();
        for (op, sizes) in sizes {
            for (s, scheme) in ["f16", "k8v8g64", "k4v4g64", "k3v3g64", "k2v2g64"].into_iter().enumerate() {
                for (i, &(batch, kv_len, new_rows)) in sizes.iter().enumerate() {
                    let intensity = match op {
                        Op::Attend => [4.0, 7.5, 14.2, 18.2, 25.6][s],
                        Op::Prefill => [300.0, 500.0, 900.0, 1000.0, 1100.0][s] * (i + 1) as f64,
                        Op::Append => [0.2, 1.4, 1.5, 1.55, 1.6][s],
                    };
                    let gops = (20.0 + 3.0 * s as f64 + 2.0 * i as f64) * if op == Op::Append { 0.1 } else { 1.0 };
                    rows.push(Row {
                        op,
                        scheme: scheme.into(),
                        kernel: "avx512-vnni".into(),
                        threads: 2,
                        batch,
                        kv_len,
                        new_rows,
                        cold: op == Op::Attend,
                        min_ns: 1_000_000,
                        median_ns: 1_100_000,
                        rounds: 9,
                        bytes: (gops / intensity * 1e6) as usize,
                        ops: (gops * 1e6) as usize,
                        intensity,
                        gbps: gops / intensity,
                        gops,
                        ceiling_gbps: 25.0,
                        ceiling: "read, cold".into(),
                        pct_of_bandwidth: 4.0 * gops / intensity,
                        arithmetic: if s == 0 { Arithmetic::Fma } else { Arithmetic::Int8Dot },
                        peak_gops: 300.0,
                        pct_of_compute: gops / 3.0,
                        pct_of_matmul: (op == Op::Prefill).then_some(gops / 2.4),
                        input_gbps: (op == Op::Append).then_some(gops / 3.0),
                        floor_ns: 9_000,
                        times_floor: 111.1,
                        verdict: Verdict { bound: Bound::ALL[rows.len() % 5], why: "for this & that".into() },
                    });
                }
            }
        }
        let point = |threads, batch, ranges_per_unit| SweepPoint {
            scheme: "k4v4g64".into(),
            threads,
            batch,
            kv_len: 16384 / batch,
            ranges_per_unit,
            min_ns: 1_000_000,
            gbps: 20.0,
            read_gbps: 25.0,
        };
        Report {
            version: "0.0.0".into(),
            note: Some("commit <b>".into()),
            machine: Machine::example(),
            quick: false,
            cold_bytes: 600_000_000,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            threads: 2,
            kernel: "avx512-vnni".into(),
            one_thread: Ceilings { threads: 1, ..ceilings.clone() },
            ceilings,
            dispatch: Dispatch { empty_min_ns: 5_000, empty_median_ns: 7_000, one_token_ns: 9_000 },
            rows,
            sweeps: Sweeps {
                threads: vec![point(1, 1, None), point(2, 1, None)],
                requests: vec![point(2, 1, None), point(2, 4, None), point(2, 16, None)],
                splits: vec![point(2, 1, Some(1)), point(2, 1, Some(2)), point(2, 1, None)],
            },
        }
    }

    #[test]
    fn sizes_are_short_and_ids_unique() {
        let report = example();
        let sizes: Vec<_> = report.rows.iter().filter(|r| r.scheme == "f16").map(Row::size).collect();
        assert_eq!(
            sizes,
            ["256", "1k", "4k", "16k", "64k", "prompt 1k", "512 over 8k", "64 over 32k", "16 x 1", "64", "512", "4k"]
        );
        let mut ids: Vec<_> = report.rows.iter().map(Row::id).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), report.rows.len());
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(
            [bytes(512), bytes(256 << 10), bytes(600_000_000), bytes(3 << 29)],
            ["512 B", "256 KiB", "572 MiB", "1.5 GiB"]
        );
        assert_eq!(
            [time(900), time(1_500), time(2_500_000), time(3_000_000_000)],
            ["900 ns", "1.5 us", "2.50 ms", "3.00 s"]
        );
        assert_eq!([count(12.0), count(2.5e9)], ["12", "2.5 G"]);
        assert_eq!([tokens(1000), tokens(1024), tokens(0)], ["1000", "1k", "0"]);
        assert_eq!([plural(1, "thread"), plural(2, "thread")], ["1 thread", "2 threads"]);
    }
}
