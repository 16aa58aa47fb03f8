//! `--device cuda` around its kernels, on any machine: a stand-in for CUDA's libraries (../stand_in/cuda.rs) whose card has what
//! a test says, and whose kernels do nothing. In: command lines; out: errors, and what the host's side counts.
//! NOT here: results of kernels: those are tested on cards (crates/kv/src/attend/cuda/parity.rs, engine/src/cuda/on_card.rs).

use crate::run::{Run, command, finish};
use crate::serving::{Served, rest};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const LIBRARIES: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libcublasLt.so"];

/// The folder of the libraries, compiled once.
fn libraries() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stand-in");
        std::fs::create_dir_all(&folder).unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in/cuda.rs");
        let [first, others @ ..] = LIBRARIES.map(|name| folder.join(name));
        let outcome = Command::new("rustc")
            .args(["--edition", "2024", "--crate-type", "cdylib", "-C", "panic=abort", "-O", "-o"])
            .args([first.as_os_str(), source.as_ref()])
            .output()
            .expect("rustc runs, as it built this test");
        assert!(outcome.status.success(), "{}", String::from_utf8_lossy(&outcome.stderr));
        for other in others {
            std::fs::copy(&first, other).unwrap();
        }
        folder
    })
}

/// The program on a card of these settings.
fn on_card(settings: &[(&str, &str)]) -> Command {
    let mut command = command();
    command.env("LD_LIBRARY_PATH", libraries()).env("KVANT_KERNEL_CACHE", libraries().join("kernels"));
    command.envs(settings.iter().map(|(name, value)| (format!("STAND_IN_{name}"), value)));
    command
}

fn run(settings: &[(&str, &str)], args: &[&str]) -> Run {
    finish(on_card(settings).args(args), "")
}

const GENERATE: &[&str] = &["generate", "--device", "cuda", "--prompt", "hello", "--max-tokens", "4"];

#[test]
fn what_a_card_or_its_driver_lacks_is_one_sentence() {
    for (setting, error) in [
        (("START", "no"), "the driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (("DEVICES", "0"), "there is no device 0: the driver has 0"),
        (("CAPABILITY", "75"), "unsupported card: Stand-in has compute capability 7.5, kernels need 8.0"),
        (("CAPABILITY", "130"), "this NVRTC knows no card of compute capability 13.0"),
    ] {
        for args in [&["info", "--device", "cuda"], GENERATE, &["bench", "attend", "--device", "cuda"]] {
            let run = run(&[setting], args);
            run.is_refused(&format!("the GPU cannot be used: {error}"));
            assert!(run.stderr.contains("docs/cuda.md"), "{run:?}");
        }
    }
}

#[test]
fn a_library_that_is_missing_is_named() {
    if Path::new("/usr/local/cuda").exists() {
        println!("skipped: this machine has libraries of CUDA");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (library, missing) in LIBRARIES.into_iter().zip(["libnvrtc", "libcublasLt", ""]) {
        std::fs::copy(libraries().join(library), folder.path().join(library)).unwrap();
        let run = finish(on_card(&[]).env("LD_LIBRARY_PATH", folder.path()).args(GENERATE), "");
        if missing.is_empty() {
            assert_eq!(run.code, Some(0), "{run:?}");
        } else {
            run.is_refused(&format!("({missing}) cannot be opened: is the folder that has it in LD_LIBRARY_PATH?"));
        }
    }
}

#[test]
fn a_card_without_room_is_one_sentence() {
    // No room for the weights, for all of them, for a cache beside what a step needs.
    for (memory, what) in
        [("5000000", "the GPU is"), ("100000000", "the GPU is"), ("290000000", "the cache's memory is used up")]
    {
        run(&[("MEMORY", memory)], GENERATE).is_refused(what);
    }
    // Enough for all of that is enough for a cache too.
    assert_eq!(run(&[("MEMORY", "500000000")], GENERATE).code, Some(0));
    // None for a page.
    run(&[], &["serve", "--device", "cuda", "--port", "0", "--kv-memory", "1MiB"])
        .is_refused("the cache's memory is used up: ");
    let attend = run(&[("MEMORY", "500000000")], &["bench", "attend", "--device", "cuda"]);
    attend.is_refused("bytes were asked for and 500000000 are free");
}

#[test]
fn limits_beyond_a_card_are_refused() {
    let serve = |limit: &[&str]| run(&[], &[&["serve", "--device", "cuda", "--port", "0"], limit].concat());
    serve(&["--step-tokens", "2049"]).is_refused("--step-tokens 2049 is more than the 2048 rows");
    serve(&["--max-requests", "2049"]).is_refused("--max-requests 2049 is more than the 2048 rows");
    let bench = |args: &[&str]| run(&[], &[&["bench"], args].concat());
    let decode =
        ["decode", "--device", "cuda", "--random-weights", "smollm2-135m", "--kv", "k4v4g64", "--steps", "130"];
    bench(&[&decode[..], &["--batch", "3000"]].concat()).is_refused("--batch 3000 is more than the 2048 rows");
    bench(&["attend", "--device", "cuda", "--shape", "b=65535,q=1,kv=1,d=64,s=999999999"])
        .is_refused("GB of memory, and");
    let folder = tempfile::tempdir().unwrap();
    let shape = folder.path().join("shape.json");
    let heads = 1u64 << 60;
    let text = json!({ "architecture": "llama", "layers": 2, "hidden": 64, "q_heads": heads, "kv_heads": heads, "head_dim": 64,
                       "feed_forward": 96, "vocabulary": 300, "context": 4096 });
    std::fs::write(&shape, text.to_string()).unwrap();
    let mut decode = decode;
    decode[4] = shape.to_str().unwrap();
    bench(&decode).is_refused("is no shape of a model: `q_heads` is 1152921504606846976");
}

#[test]
fn the_bytes_of_requests_that_end_apart_are_all_counted() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.txt");
    let one = "hello ".repeat(500).trim_end().to_string() + "\n";
    std::fs::write(&prompts, one.repeat(6)).unwrap();
    // Prompts are computed one after another, and each answer is one token: they end in steps of their own.
    let of = |kv: &str| -> Value {
        let args = ["generate", "--device", "cuda", "--max-tokens", "1", "--json", "--kv", kv, "--prompts"];
        let run = run(&[], &[&args[..], &[prompts.to_str().unwrap()]].concat());
        let json: Value = serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"));
        json["cache"].clone()
    };
    let number = |cache: &Value, key: &str| cache[key].as_u64().unwrap();
    let plain = of("f16");
    let (held, tokens) = (number(&plain, "window_bytes"), number(&plain, "f16_bytes_equivalent"));
    assert!(tokens >= 6 * 500 * 23_040 && held >= tokens && held < tokens + tokens / 4, "{plain}");
    // Each with a window of its own: 30 layers and 3 kv heads, 13 tiles and one of sinks, of 16 tokens in f16.
    let packed = of("k4v4g64w128s4p512");
    assert_eq!(number(&packed, "window_bytes"), 6 * 30 * 3 * (13 + 1) * 16 * 2 * 64 * 2, "{packed}");
    assert_eq!(number(&packed, "f16_bytes_equivalent"), tokens);
}

#[test]
fn a_kernel_that_computes_nothing_is_not_timed() {
    let run = run(&[], &["bench", "attend", "--device", "cuda", "--shape", "b=1,q=4,kv=2,d=64,s=256"]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{run:?}");
    assert!(run.stderr.contains("error: the GPU's kernel is wrong on f16"), "{run:?}");
}

#[test]
fn info_is_about_the_card() {
    let of = |args: &[&str]| -> Value {
        let run = run(&[("MEMORY", "3000000000")], &[&["info", "--device", "cuda", "--json"], args].concat());
        serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"))
    };
    let info = of(&[]);
    assert!(info["devices"][1].as_str().unwrap().starts_with("cuda: Stand-in, sm_90a, "), "{info}");
    assert_eq!(info["fits"]["memory_bytes"], 3_000_000_000u64);
    assert!(info["fits"]["rows"].as_array().unwrap().iter().all(|r| r["requests"].as_u64() > Some(0)), "{info}");
    assert_eq!(of(&["--memory", "1GB"])["fits"]["memory_bytes"], 1_000_000_000u64);
    run(&[], &["info", "--device", "cuda", "--kv", "ktq4vtq4g64"]).is_refused("ktq4vtq4g64 is read on the CPU only");
}

/// What comes before long; fails after a time that no machine needs.
#[track_caller]
fn soon<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{what} does not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A request whose answer has this many tokens, whatever they are.
fn ask(max_tokens: usize) -> Value {
    json!({ "model": "smollm2-135m", "prompt": "hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true })
}

#[test]
fn requests_beyond_the_windows_that_have_room_wait_and_are_told() {
    let served = Served::by(on_card(&[]), &["--device", "cuda", "--max-requests", "500", "--max-waiting", "1"]);
    let asked: Vec<_> = (0..40).map(|_| served.send("/v1/completions", &ask(50))).collect();
    for stream in asked {
        let answer = rest(stream);
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"completion_tokens\":50"), "{answer}");
    }
    let status = || -> Value {
        let answer = rest(served.send("/status", &Value::Null));
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    // Sampled, so that it takes long enough to be seen among the figures; once more if it was not.
    let mut sampled = ask(8000);
    sampled["temperature"] = json!(1);
    let bytes = soon("figures of a request", || {
        let _running = served.send("/v1/completions", &sampled);
        let look = |_| {
            std::thread::sleep(Duration::from_millis(2));
            status()["requests"][0]["bytes"].as_u64().filter(|&bytes| bytes > 0)
        };
        (0..500).find_map(look)
    });
    // 32 pages of 256 tokens, and a window.
    assert!((32 * 256 * 6_000..80 << 20).contains(&(bytes as usize)), "{bytes}");
    let status = soon("an empty server", || Some(status()).filter(|s| s["requests"] == json!([])));
    assert!(status["budget_bytes"].as_u64().is_some_and(|b| 0 < b && b <= 256 << 20), "{status}");
    assert_eq!(status["blocks"]["used"], 0, "{status}");
    assert!(status["output_tokens"].as_u64() >= Some(40 * 50), "{status}");
    served.signal("-TERM");
    let (code, log) = served.ended();
    assert!(code == Some(0) && log.contains("warning: of 500 requests "), "{log}");
}

#[test]
fn a_server_whose_card_died_says_so_and_ends() {
    let served = Served::by(on_card(&[("LAUNCHES", "2000")]), &["--device", "cuda"]);
    let answer = soon("an answer that is an error", || {
        Some(rest(served.send("/v1/completions", &ask(20)))).filter(|answer| !answer.starts_with("HTTP/1.1 200"))
    });
    assert!(answer.starts_with("HTTP/1.1 500") && answer.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{answer}");
    let (code, log) = served.ended();
    assert_eq!(code, Some(1), "{log}");
    assert!(log.contains("the device does not answer any more"), "{log}");
    assert!(log.contains("the engine's thread ended unexpectedly") && !log.contains("panicked"), "{log}");
}
