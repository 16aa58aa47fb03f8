//! Tidy: what ARCHITECTURE.md says may not be somewhere, is not. In: the text of every crate of the workspace; out: a
//! failure that names file, line and rule. Text only: it sees names, not meaning.
//! NOT here: formatting and lints (rustfmt, clippy).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Words that files under a path may not contain.
struct Rule {
    /// Prefix of paths from the root of the workspace.
    under: &'static str,
    /// Prefixes inside `under` that the rule leaves out.
    but: &'static [&'static str],
    forbidden: &'static [&'static str],
    why: &'static str,
}

const RULES: &[Rule] = &[
    Rule {
        under: "crates/kv/src/",
        but: &[],
        forbidden: &["kvant_engine", "kvant_roofline", "kvant_cli", "candle", "std::net", "async fn"],
        why: "the library knows no model, engine, program, network",
    },
    Rule {
        under: "crates/kv/src/",
        but: &[
            "crates/kv/src/golden",
            "crates/kv/src/append/parity.rs",
            "crates/kv/src/attend/parity.rs",
            "crates/kv/src/attend/cuda/parity.rs",
            "crates/kv/src/cache/tests",
            "crates/kv/src/device/cuda/store.rs",
        ],
        forbidden: &["println!", "std::fs"],
        why: "the library neither prints nor reads files; only tests do, and kernels compiled once are kept",
    },
    Rule {
        under: "crates/kv/src/quant/",
        but: &[],
        forbidden: &["crate::cache", "crate::append", "crate::attend", "crate::device", "crate::Cache"],
        why: "quant/ knows numbers and bits, not where they lie",
    },
    Rule {
        under: "crates/kv/src/device/",
        but: &[],
        forbidden: &["crate::cache", "crate::append", "crate::attend", "crate::quant", "crate::scheme", "crate::shape"],
        why: "device/ knows no operation and no meaning of bytes",
    },
    Rule {
        under: "crates/kv/src/cache/layout.rs",
        but: &[],
        forbidden: &["crate::append", "crate::attend", "crate::device", "super::store", "cache::store"],
        why: "offsets follow from shape and scheme alone",
    },
    Rule {
        under: "crates/kv/src/cache/",
        but: &[],
        forbidden: &["crate::attend", "Attention::"],
        why: "the cache does not know who reads it",
    },
    Rule {
        under: "crates/kv/src/append/",
        // Launches go to the card.
        but: &["crates/kv/src/append/cuda/"],
        forbidden: &["cache::store", "crate::Cache", "crate::attend", "crate::device"],
        why: "append/ writes bytes it is given; which tokens and when is the cache's business",
    },
    Rule {
        under: "crates/kv/src/attend/cpu/",
        but: &[],
        forbidden: &["cache::store", "crate::Cache", "crate::append", "crate::device", "SeqView", "rayon"],
        why: "kernels see one range of keys: no cache, sequences, threads",
    },
    Rule {
        under: "crates/kv/src/attend/plan.rs",
        but: &[],
        forbidden: &["cache::store", "crate::Cache", "SeqView", "std::arch"],
        why: "the plan splits work by position; it knows neither the cache nor instructions",
    },
    Rule {
        under: "crates/kv/src/attend/softmax.rs",
        but: &[],
        forbidden: &["crate::", "super::cpu"],
        why: "the algebra of partial states stands alone",
    },
    Rule {
        under: "crates/kv/src/",
        but: &[
            "crates/kv/src/quant/",
            "crates/kv/src/codec.rs",
            "crates/kv/src/cache/layout.rs",
            "crates/kv/src/cache/cuda/layout.rs",
            "crates/kv/src/cache/tests/",
            "crates/kv/src/append/record.rs",
            "crates/kv/src/append/reference.rs",
            "crates/kv/src/attend/dense.rs",
            "crates/kv/src/golden",
        ],
        forbidden: &["Affine", "quant::affine"],
        why: "that a code is affine is known where records are written and read, nowhere else",
    },
    Rule {
        under: "crates/",
        but: &[
            "crates/kv/src/attend/cpu/",
            "crates/kv/src/append/cpu/",
            "crates/kv/src/device/cuda/",
            "crates/kv/src/attend/cuda/",
            "crates/kv/src/append/cuda/",
            "crates/kv/src/cache/cuda/mod.rs",
            "crates/kv/src/cuda/kind.rs",
            "crates/roofline/src/cuda/",
            "crates/engine/src/model/matmul/",
            "crates/engine/src/cuda/",
            "crates/roofline/src/peaks/",
            "crates/kv/tests/tidy.rs",
            // A stand-in for libraries in C.
            "crates/cli/tests/stand_in/",
        ],
        forbidden: &[
            "std::arch::x86_64",
            "std::arch::aarch64",
            "unsafe {",
            "unsafe fn",
            "unsafe impl",
            "#[target_feature",
        ],
        why: "instructions and unsafe live in the kernel files",
    },
    Rule {
        under: "crates/roofline/src/",
        but: &[],
        forbidden: &["kvant_engine", "println!"],
        why: "the roofline measures kernels, not models, and returns numbers",
    },
    Rule {
        under: "crates/engine/src/",
        // Tests that say what they skip.
        but: &["crates/engine/src/cuda/on_card.rs"],
        forbidden: &["kvant_roofline", "clap", "println!"],
        why: "the engine has no flags and prints nothing",
    },
    Rule {
        under: "crates/engine/src/scheduler.rs",
        but: &[],
        forbidden: &["kvant_kv", "candle", "std::time", "Instant"],
        why: "the scheduler is pure",
    },
    Rule {
        under: "crates/engine/src/",
        but: &["crates/engine/src/model/attention.rs"],
        forbidden: &["cache.append(", "cache.commit(", ".attend(", ".attend_layers("],
        why: "the model meets the cache in one place: append, attend, commit",
    },
    Rule {
        under: "crates/engine/src/cuda/",
        but: &[
            "crates/engine/src/cuda/step.rs",
            "crates/engine/src/cuda/cache.rs",
            "crates/engine/src/cuda/packed.rs",
            "crates/engine/src/cuda/plain.rs",
        ],
        forbidden: &["append_decode", "attend_decode", "append_prefill", "attend_prefill"],
        why: "the model on a card meets its cache in one place too",
    },
    Rule {
        under: "crates/server/src/",
        but: &[],
        forbidden: &["clap", "print!", "println!", "candle", "std::process", "kvant_kv::", "kvant_roofline"],
        why: "the server has no flags, ends no process and knows the engine alone",
    },
    Rule {
        under: "crates/server/src/",
        but: &["crates/server/src/worker.rs", "crates/server/src/serve.rs", "crates/server/src/status.rs"],
        forbidden: &["Engine,", "Engine}", "Engine::", ": Engine"],
        why: "the worker alone has the engine",
    },
    Rule {
        under: "crates/server/src/worker.rs",
        but: &[],
        forbidden: &["axum", "serde_json", "hyper"],
        why: "the worker knows no HTTP and no JSON",
    },
    Rule {
        under: "crates/cli/src/",
        but: &[],
        forbidden: &["print!", "println!"],
        why: "they panic when the stream takes nothing: the program writes through output.rs",
    },
    Rule {
        under: "crates/cli/src/",
        but: &[],
        forbidden: &["candle"],
        why: "the program reaches models through the engine",
    },
];

/// Crates of the workspace that each crate may build on.
const ARROWS: &[(&str, &[&str])] = &[
    ("kv", &[]),
    ("roofline", &["kvant-kv"]),
    ("engine", &["kvant-kv"]),
    ("server", &["kvant-engine"]),
    ("cli", &["kvant-kv", "kvant-roofline", "kvant-engine", "kvant-server"]),
];

const LONGEST: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every Rust file of the crates: path from the root, text.
fn sources() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec!["crates".to_string()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{folder}/{}", entry.file_name().to_str().expect("names are text"));
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if path.ends_with(".rs") {
                found.insert(path.clone(), read(&path));
            }
        }
    }
    assert!(found.len() > 30, "the walk found the workspace");
    found
}

fn fail_if_any(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn nothing_is_where_it_may_not_be() {
    let sources = sources();
    let mut wrong = Vec::new();
    for rule in RULES {
        let files = sources.iter().filter(|(path, _)| path.starts_with(rule.under));
        let files: Vec<_> = files.filter(|(path, _)| !rule.but.iter().any(|b| path.starts_with(b))).collect();
        assert!(!files.is_empty(), "rule about {}: there is no such file", rule.under);
        for (path, text) in files {
            // Unit tests at a file's foot may look further than its code.
            let code = text.split("#[cfg(test)]\nmod tests {").next().expect("split gives one part at least");
            for (i, line) in code.lines().enumerate().filter(|(_, l)| !l.trim_start().starts_with("//")) {
                for word in rule.forbidden.iter().filter(|w| line.contains(**w)) {
                    wrong.push(format!("{path}:{}: `{word}`: {}", i + 1, rule.why));
                }
            }
        }
    }
    fail_if_any(wrong);
}

#[test]
fn crates_build_on_those_below_them_only() {
    for (name, allowed) in ARROWS {
        let manifest = read(&format!("crates/{name}/Cargo.toml"));
        let dependencies = manifest.split("[dependencies]").nth(1).expect("a crate has dependencies");
        let dependencies = dependencies.split("\n[").next().expect("split gives one part at least");
        for line in dependencies.lines().filter(|l| l.starts_with("kvant-")) {
            let crate_name = line.split(['.', ' ', '=']).next().expect("as above");
            assert!(allowed.contains(&crate_name), "crates/{name} may not build on {crate_name}");
        }
    }
}

#[test]
fn every_file_says_what_it_is_and_long_ones_why() {
    let mut wrong = Vec::new();
    for (path, text) in sources() {
        let head: String = text.lines().take_while(|l| l.starts_with("//!")).collect();
        let lines = text.lines().count();
        if head.is_empty() {
            wrong.push(format!("{path}: does not begin with `//!`"));
        }
        if lines > LONGEST && !head.contains("600 lines") {
            wrong.push(format!("{path}: {lines} lines; split it, or say in its head why it is over 600 lines"));
        }
        let name = path.rsplit('/').next().expect("a path has a name");
        let vague = ["utils.rs", "util.rs", "helpers.rs", "helper.rs", "common.rs", "misc.rs"];
        if vague.contains(&name) || ["_fast.rs", "_new.rs", "_v2.rs"].iter().any(|end| name.ends_with(end)) {
            wrong.push(format!("{path}: name it after what it holds"));
        }
    }
    fail_if_any(wrong);
}

/// Paths that the pages name exist.
#[test]
fn pages_name_files_that_exist() {
    let mut wrong = Vec::new();
    let mut seen = 0;
    let mut pages: Vec<String> =
        ["ARCHITECTURE.md", "CONTRIBUTING.md", "AGENTS.md", "README.md", "CHANGELOG.md"].map(String::from).to_vec();
    for folder in ["docs", "docs/decisions"] {
        let entries = std::fs::read_dir(root().join(folder)).unwrap().map(|e| e.unwrap().file_name());
        let names = entries.map(|n| format!("{folder}/{}", n.to_str().expect("names are text")));
        pages.extend(names.filter(|n| n.ends_with(".md")));
    }
    for page in &pages {
        let text = read(page);
        for path in text.split('`').skip(1).step_by(2).filter(|p| p.starts_with("crates/") || p.starts_with("docs/")) {
            seen += 1;
            if !path.contains(['*', '<', ' ']) && !root().join(path).exists() {
                wrong.push(format!("{page} names `{path}`, which does not exist"));
            }
        }
    }
    assert!(seen > 10, "pages name files");
    fail_if_any(wrong);
    assert!(read("AGENTS.md").lines().count() <= 25, "AGENTS.md has at most 25 lines");
}
