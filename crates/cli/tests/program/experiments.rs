//! `kvant bench layers|stacking|requests|sharing|passes|splits` at tiny sizes: JSON whose rows hold what the question asks,
//! a verdict in words, the same rows in the table, and bad input refused. NOT here: figures (they say nothing at these sizes).

use crate::run::{Run, kvant};
use serde_json::Value;
use std::collections::BTreeSet;

/// Names of the experiments.
const EXPERIMENTS: [&str; 6] = ["layers", "stacking", "requests", "sharing", "passes", "splits"];

fn quick(name: &str, more: &[&str]) -> Run {
    let run = kvant(["bench", name, "--quick"].iter().chain(more));
    assert_eq!(run.code, Some(0), "{name}: {run:?}");
    run
}

/// The report of a quick run: its head is checked here, its rows by the tests.
fn report(name: &str, more: &[&str]) -> Value {
    let run = quick(name, &[more, &["--json", "--threads", "2"]].concat());
    let report: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{name}: {e}: {run:?}"));
    assert_eq!((&report["bench"], &report["threads"]), (&Value::from(name), &Value::from(2)), "{report}");
    assert_eq!((&report["quick"], &report["cold"]), (&Value::Bool(true), &Value::Bool(false)), "{report}");
    assert!(!report["verdict"].as_array().unwrap().is_empty(), "{name} has a verdict");
    for row in report["rows"].as_array().unwrap() {
        for (key, value) in row.as_object().unwrap() {
            assert!(!value.is_null(), "{name}: {key} is not a number: {row}");
            if key.ends_with("_ns") {
                assert!(value.as_u64().unwrap() > 0, "{name}: {key}: {row}");
            }
            if let Some(median) = key.strip_suffix("min_ns").map(|way| &row[format!("{way}median_ns")]) {
                assert!(value.as_u64() <= median.as_u64(), "{name}: {key}: {row}");
            }
        }
    }
    report
}

/// The different values of a number in some rows.
fn values(report: &Value, key: &str) -> BTreeSet<u64> {
    rows(report).iter().map(|r| r[key].as_u64().unwrap_or_else(|| panic!("{key}: {r}"))).collect()
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().unwrap()
}

fn verdict(report: &Value) -> String {
    report["verdict"].as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

#[test]
fn layers_compares_one_call_with_a_loop_to_the_bit() {
    let report = report("layers", &[]);
    // Two schemes, two lengths, two ratios, two layer counts.
    assert_eq!(rows(&report).len(), 16);
    assert_eq!(values(&report, "layers"), [2, 5].into());
    assert_eq!(values(&report, "gqa_ratio"), [1, 4].into());
    assert!(rows(&report).iter().all(|r| r["bit_identical"] == true));
    let f16 = &rows(&report)[0];
    let tokens = f16["layers"].as_u64().unwrap() * f16["kv_heads"].as_u64().unwrap() * f16["kv_len"].as_u64().unwrap();
    assert_eq!((&f16["scheme"], f16["bytes"].as_u64()), (&"f16".into(), Some(tokens * 2 * 128 * 2)));
    let words = verdict(&report);
    assert!(words.contains("the same to the bit in all 16 rows"), "{words}");
    assert!(words.contains("cannot speed up one request"), "{words}");
}

#[test]
fn stacking_adds_the_gathering_to_a_step() {
    let report = report("stacking", &[]);
    assert_eq!(rows(&report).len(), 8, "two schemes, two lengths, two layer counts");
    for row in rows(&report) {
        let ns = |key: &str| row[key].as_u64().unwrap() as f64;
        let expected = (ns("attend_min_ns") + ns("gather_min_ns")) / ns("attend_min_ns");
        assert!((row["step_vs_ours_min"].as_f64().unwrap() - expected).abs() < 1e-9 && expected > 1.0, "{row}");
    }
    assert!(verdict(&report).contains("gathers nothing"));
}

#[test]
fn requests_cuts_the_same_bytes_into_more_units() {
    let report = report("requests", &[]);
    for scheme in ["f16", "k4v4g64"] {
        let some: Vec<_> = rows(&report).iter().filter(|r| r["scheme"] == scheme).collect();
        let bytes: BTreeSet<_> = some.iter().map(|r| r["bytes"].as_u64().unwrap()).collect();
        assert_eq!(bytes.len(), 1, "{scheme}: all steps hold the same bytes");
        assert!(some.iter().any(|r| r["rule"] == true));
        for r in some {
            assert_eq!(r["units_per_thread"].as_f64().unwrap(), r["units"].as_f64().unwrap() / 2.0, "{r}");
        }
    }
    assert!(values(&report, "units").len() > 3);
    assert!(verdict(&report).contains("units in flight"));
}

#[test]
fn sharing_runs_every_ratio_and_scheme() {
    let report = report("sharing", &["--kv", "f16,k2v4g32"]);
    assert_eq!(values(&report, "gqa_ratio"), [3, 4].into());
    let schemes: Vec<_> = rows(&report).iter().map(|r| r["scheme"].as_str().unwrap()).collect();
    assert_eq!(schemes, ["f16", "f16", "k2v4g32", "k2v4g32"]);
    assert!(verdict(&report).contains("the same to the bit"));
}

#[test]
fn passes_says_where_they_cross() {
    let report = report("passes", &[]);
    assert_eq!((values(&report, "rows"), values(&report, "kv_len")), ([1, 40].into(), [200, 600].into()));
    for r in rows(&report) {
        let distance = r["distance"].as_f64().unwrap();
        assert!(distance > 0.0 && distance < 1e-2, "fused and two passes agree, and are not the same code: {r}");
    }
    let words = verdict(&report);
    assert!(words.contains("one query row: both passes take") && words.contains("several query rows"), "{words}");
}

#[test]
fn splits_marks_the_rule_once_per_step() {
    let report = report("splits", &["--kv", "k4v4g64"]);
    for batch in values(&report, "batch") {
        let step: Vec<_> = rows(&report).iter().filter(|r| r["batch"] == batch).collect();
        let rules: Vec<_> = step.iter().filter(|r| r["rule"] == true).collect();
        assert_eq!(rules.len(), 1, "{step:?}");
        assert_eq!(rules[0]["vs_rule"], 1.0, "{step:?}");
        assert!(step.iter().any(|r| r["ranges_per_unit"] == 1), "{step:?}");
    }
}

#[test]
fn text_has_table_verdict_and_a_warning_about_tiny_sizes() {
    for name in EXPERIMENTS {
        let run = quick(name, &["--kv", "k4v4g64", "--threads", "1"]);
        for part in ["1 threads", "figures say nothing", "k4v4g64", "\n- "] {
            assert!(run.stdout.contains(part), "{name}: {part}: {}", run.stdout);
        }
    }
}

#[test]
fn bad_input_is_refused() {
    for name in EXPERIMENTS {
        let refused = |flags: &[&str], error: &str| kvant(["bench", name].iter().chain(flags)).is_refused(error);
        refused(&["--quick", "--kv", "k5v5g64"], "unknown scheme");
        refused(&["--quick", "--kernel", "abacus"], "unknown kernel");
        refused(&["--quick", "--threads", "0"], "at least 1");
        refused(&["--rounds", "0"], "--rounds");
    }
    kvant(["bench", "passes", "--kv", "f16"]).is_refused("nothing to decode");
    kvant(["bench", "circles"]).is_refused("circles");
}
