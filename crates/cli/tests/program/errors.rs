//! Every bad input is refused with exit code 2, one line that says what, and a hint.

use crate::run::{finish, kvant, model};
use crate::{run, run::command};
use std::fs;
use std::path::{Path, PathBuf};

/// Commands that must be refused, and what the error line must contain.
const REFUSED: &[(&[&str], &str)] = &[
    (&[], "requires a subcommand"),
    (&["frobnicate"], "unrecognized subcommand 'frobnicate'"),
    (&["bench"], "what to measure"),
    (&["bench", "frobnicate"], "unrecognized subcommand"),
    (&["pull", "gpt-17"], "unknown model `gpt-17`"),
    (&["generate"], "--prompt"),
    (&["generate", "--prompt", "a", "--prompts", "b"], "cannot be used with"),
    (&["generate", "--prompt", "a", "--nonsense"], "unexpected argument '--nonsense'"),
    (&["generate", "--prompt", "a", "--threads", "0"], "must be at least 1"),
    (&["generate", "--prompt", "a", "--threads", "99999999"], "for each core"),
    (&["generate", "--prompt", "a", "--threads", "-2"], "must be a whole number of at least 1"),
    (&["generate", "--prompt", "a", "--max-tokens", "-1"], "must be a whole number of at least 1"),
    (&["generate", "--prompt", "a", "--temperature", "-1"], "must be a number from 0 to 100"),
    (&["generate", "--prompt", "a", "--top-k", "x"], "must be a whole number from 0 to"),
    (&["generate", "--prompt", "a", "--seed", "18446744073709551616"], "must be a whole number from 0 to"),
    (&["generate", "--prompt", "a", "--model", "/"], "is a folder without config.json"),
    (&["pull", "--device", "tpu"], "unknown device `tpu`"),
    (&["pull", "--json"], "unexpected argument '--json'"),
    (&["bench", "--test", "--device", "tpu"], "unknown device `tpu`"),
    (&["generate", "--prompt", "a", "--threads", "two"], "must be a whole number"),
    (&["generate", "--prompt", "a", "--max-tokens", "0"], "must be at least 1"),
    (&["generate", "--prompt", "a", "--temperature", "NaN"], "must be a number"),
    (&["generate", "--prompt", "a", "--top-p", "0"], "must be a number"),
    (&["generate", "--prompt", "a", "--kv", "k5v4g64"], "unknown scheme `k5v4g64`: key bits"),
    (&["generate", "--prompt", "a", "--kv", ""], "unknown scheme"),
    (&["generate", "--prompt", "a", "--kv", "no-such-file.toml"], "no-such-file.toml"),
    (&["generate", "--prompt", "a", "--kv", "f16", "--arm", "fused"], "needs a packed scheme"),
    (&["generate", "--prompt", "a", "--kv", "k4v4g64", "--arm", "f16"], "would have no effect"),
    (&["generate", "--prompt", "a", "--kv", "bf16", "--arm", "dequant-once"], "--kv bf16 packs nothing"),
    (&["generate", "--prompt", "a", "--kv", "f16", "--arm", "bf16"], "--arm bf16 keeps a plain bf16 cache"),
    (&["generate", "--prompt", "a", "--kv", "bf16", "--arm", "f16"], "--arm f16 keeps a plain f16 cache"),
    (&["generate", "--prompt", "a", "--kv", "bf16w128"], "unknown scheme `bf16w128`"),
    (&["generate", "--prompt", "a", "--arm", "turbo"], "invalid value 'turbo'"),
    (&["generate", "--prompt", "a", "--kernel", "warp9"], "unknown kernel `warp9`"),
    (&["generate", "--prompt", "a", "--device", "tpu"], "unknown device `tpu`"),
    (&["generate", "--prompt", "a", "--model", "gpt-17"], "unknown model `gpt-17`"),
    (&["generate", "--prompt", "a", "--model", "no/such.gguf"], "no model file no/such.gguf"),
    (&["generate", "--prompts", "no-such-file.txt"], "no-such-file.txt"),
    (&["bench", "attend", "--shape", "b=1"], "`q` is missing"),
    (&["bench", "attend", "--shape", "b=1,q=9,kv=2,d=64,s=8"], "q_heads 9 is not supported"),
    (&["bench", "attend", "--shape", "b=1,q=2,kv=2,d=72,s=8"], "head_dim 72 is not supported"),
    (&["bench", "attend", "--shape", "b=9,q=8,kv=8,d=128,s=1000000000"], "GB of memory"),
    (&["bench", "attend", "--kv", "k4v4g64,k4v4g64"], "appears twice"),
    (&["bench", "attend", "--kernel", "warp9"], "unknown kernel `warp9`"),
    (&["bench", "attend", "--rounds", "1099511627776"], "must be at most 100000"),
    // 26 GB of tokens, in a block of 8 KiB for each.
    (&["bench", "attend", "--hot", "--shape", "b=100000000,q=1,kv=1,d=64,s=1"], "GB of memory"),
    (&["bench", "decode", "--kv", "k4v4g64w1073741824"], "until the context of this model (8192 tokens) is full"),
    (&["bench", "decode", "--prompt-len", "8000", "--steps", "193"], "do not fit"),
    (&["bench", "decode", "--kv", "f16"], "packs nothing"),
    (&["bench", "decode", "--kv", "bf16"], "packs nothing"),
    (&["bench", "decode", "--arms", "bf16,fused"], "one control, the f16 arm"),
    (&["bench", "passes", "--kv", "bf16"], "--kv bf16 has nothing to decode"),
    (&["roofline", "--quick", "--kv", "f16,bf16"], "the roofline judges f16 and packed schemes only"),
    (&["bench", "decode", "--kv", "k4v4g64,k2v2g64"], "unknown scheme"),
    (&["bench", "decode", "--arms", "f16,f16"], "--arms has f16 twice"),
    (&["bench", "decode", "--batch", "1,0"], "must be at least 1"),
    (&["bench", "decode", "--prompt-len", "1024", "--steps", "96", "--kv", "k4v4g64w128"], "takes 128 steps"),
    (&["bench", "decode", "--batch", "99999"], "--batch 99999 is over"),
    (&["bench", "decode", "--prompt-len", "18446744073709551615"], "must be at most"),
    (&["info", "--shape", "layers=1000000000,q=1000000000,kv=1000000000,d=64"], "beyond any memory"),
    (&["info", "--memory", "8 parsecs"], "no unit of size"),
    (&["info", "--len", "0"], "must be at least 1"),
    (&["info", "--len", "8193"], "its context holds 8192"),
    (&["info", "--shape", "layers=1,q=1,kv=1,d=63"], "head_dim 63"),
    (&["info", "--model", "no/such.gguf"], "no model file"),
];

#[test]
fn bad_input_is_refused_with_a_hint() {
    for (args, error) in REFUSED {
        let run = kvant(args.iter());
        run.is_refused(error);
        // All of these are seen before anything slow begins, or is said to.
        assert_eq!(run.stderr.lines().count(), 2, "{run:?}");
    }
}

#[test]
fn hints_are_about_what_is_wrong() {
    for (args, hint) in [
        (&["frobnicate"][..], "`kvant --help`"),
        (&["generate", "--prompt", "a", "--threads", "two"], "`kvant generate --help` shows"),
        (&["bench", "attend", "--rounds", "x"], "`kvant bench attend --help` shows"),
        (&["bench", "attend", "--nonsense"], "`kvant bench attend --help` shows"),
        (&["pull", "--json"], "hint: `kvant pull --help` shows"),
        (&["generate", "--prompts", "no-such-file.txt"], "one prompt per line"),
        (&["generate", "--prompt", "a", "--kv", "no-such-file.toml"], "check that the file is there"),
    ] {
        let run = kvant(args);
        assert!(run.stderr.contains(hint), "{run:?}");
        assert!(!run.stderr.contains("as a value"), "{run:?}");
    }
}

#[test]
fn scheme_files_are_refused_by_name_and_line_before_the_model_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    for (text, error) in [
        ("default = \"k4v4g64\"\n[layers]\n30 = \"f16\"\n", "line 3: layer 30 does not exist"),
        ("\ndefault = \"k5v4g64\"\n", "line 2: unknown scheme `k5v4g64`: key bits"),
        ("defualt = \"f16\"\n", "line 1: unknown field"),
    ] {
        fs::write(&file, text).unwrap();
        let run = kvant(["generate", "--prompt", "a", "--kv", file.to_str().unwrap()]);
        run.is_refused(error);
        run.is_refused(&format!("scheme file {}", file.display()));
        assert!(run.stderr.contains("hint: a scheme file is TOML") && run.stderr.lines().count() == 2, "{run:?}");
    }
}

#[test]
fn a_gpu_that_is_not_there_is_one_sentence() {
    for args in [
        &["eval", "--text", "x.txt", "--device", "cuda"][..],
        &["tune", "--text", "x.txt", "--budget-bits", "3", "--device", "cuda"],
    ] {
        kvant(args).is_refused("runs on the CPU only");
    }
    kvant(["bench", "attend", "--device", "tpu"]).is_refused("unknown device `tpu`");
    kvant(["bench", "attend", "--ragged"]).is_refused("--ragged is of the GPU's kernels");
    kvant(["bench", "decode", "--random-weights", "qwen3-4b"]).is_refused("--random-weights fills a model on a GPU");
    kvant(["generate", "--prompt", "a", "--device", "cuda", "--threads", "2"])
        .is_refused("--threads is of the CPU's kernels");
    kvant(["bench", "attend", "--device", "cuda", "--hot"]).is_refused("--hot is of the CPU's kernels");
    if kvant_kv::cuda::Gpu::open(0).is_ok() {
        println!("skipped: this machine has a GPU");
        return;
    }
    for args in [
        &["info", "--device", "cuda"][..],
        &["bench", "attend", "--device", "cuda"],
        &["bench", "layers", "--device", "cuda"],
        &["bench", "decode", "--device", "cuda", "--random-weights", "qwen3-4b", "--kv", "k4v4g64", "--steps", "130"],
        &["roofline", "--device", "cuda"],
    ] {
        let run = kvant(args);
        run.is_refused("the GPU cannot be used: ");
        assert!(run.stderr.contains("docs/cuda.md"), "{run:?}");
    }
}

#[test]
fn a_model_that_was_never_pulled_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    let run = finish(command().env("KVANT_MODELS", empty.path()).args(["generate", "--prompt", "a"]), "");
    run.is_refused("model smollm2-135m is not here");
    assert_eq!(run.stderr.lines().count(), 2, "nothing was announced: {run:?}");
    assert!(run.stderr.contains("hint: fetch it with `kvant pull smollm2-135m`"), "{run:?}");
}

#[test]
fn prompt_files_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, error) in [
        ("empty.txt", &b""[..], "has no prompt in it"),
        ("gap.txt", b"one\n\nthree\n", "line 2 of"),
        ("latin1.txt", b"caf\xe9\n", "cannot read the prompts"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        kvant(["generate".as_ref(), "--prompts".as_ref(), path.as_os_str()]).is_refused(error);
    }
}

/// A damaged copy of the model.
fn damaged(folder: &Path, name: &str, damage: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = fs::read(model()).unwrap();
    damage(&mut bytes);
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn generate_with(model: &Path) -> run::Run {
    kvant([
        "generate".as_ref(),
        "--prompt".as_ref(),
        "Once upon a time".as_ref(),
        "--model".as_ref(),
        model.as_os_str(),
    ])
}

#[test]
fn damaged_model_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (name, keep) in [("empty.gguf", 0), ("magic.gguf", 4), ("header.gguf", 1000), ("half.gguf", 49_000_000)] {
        let path = damaged(folder.path(), name, |bytes| bytes.truncate(keep));
        generate_with(&path).is_refused(name);
    }
    let path = damaged(folder.path(), "short.gguf", |bytes| bytes.truncate(bytes.len() - 1));
    generate_with(&path).is_refused("short.gguf");
    let path = damaged(folder.path(), "text.gguf", |bytes| *bytes = b"This is no model.\n".to_vec());
    generate_with(&path).is_refused("text.gguf");
}

#[test]
fn the_tensor_library_says_what_is_wrong_without_its_backtrace() {
    let folder = tempfile::tempdir().unwrap();
    let path = damaged(folder.path(), "kind.gguf", |bytes| {
        bytes.truncate(4_000_000);
        // In a GGUF header: the tensor's name, its dimensions (4 bytes for how many, 8 for each), its type.
        let name = b"blk.0.attn_k.weight";
        let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
        assert_eq!(bytes[at..at + 4], [2, 0, 0, 0]);
        bytes[at + 20..at + 24].copy_from_slice(&119u32.to_le_bytes());
    });
    let args = ["generate", "--prompt", "a", "--model", path.to_str().unwrap()];
    let run = finish(command().env("RUST_BACKTRACE", "1").args(args), "");
    run.is_refused("kind.gguf is a damaged or truncated GGUF: ");
    assert!(run.stderr.contains("119") && run.stderr.len() < 400, "{run:?}");
}

#[test]
fn a_prompt_too_large_for_the_tokenizer_is_refused() {
    let text = "word ".repeat(3 << 20);
    let run = finish(command().args(["generate", "--prompt", "-"]), &text);
    run.is_refused("a prompt of 15728640 bytes is too large");
    assert!(run.stderr.contains("hint: shorten the prompt"), "{run:?}");
}

#[test]
fn a_model_of_another_architecture_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = damaged(folder.path(), "mamba.gguf", |bytes| {
        // In a GGUF header: the key, the value's type (4 bytes), its length (8 bytes), the value.
        let key = b"general.architecture";
        let at = bytes.windows(key.len()).position(|w| w == key).unwrap() + key.len() + 12;
        assert_eq!(&bytes[at..at + 5], b"llama");
        bytes[at..at + 5].copy_from_slice(b"mamba");
    });
    generate_with(&path).is_refused("architecture `mamba`");
}

#[test]
fn weights_that_give_nan_in_k_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = damaged(folder.path(), "nan.gguf", |bytes| {
        let content = candle_core::quantized::gguf_file::Content::read(&mut std::io::Cursor::new(&*bytes)).unwrap();
        let k = &content.tensor_infos["blk.3.attn_k.weight"];
        let at = usize::try_from(content.tensor_data_offset + k.offset).unwrap();
        // A block of Q4_1 begins with its scale, an f16: NaN.
        bytes[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    });
    generate_with(&path).is_refused("K has a value that f16 cannot hold (NaN) at layer 3, head 0, token 0");
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let text = "word ".repeat(9000);
    let run = finish(command().args(["generate", "--prompt", "-"]), &text);
    run.is_refused("the context of this model holds 8192");
}

#[test]
fn empty_prompts_are_refused() {
    for run in [finish(command().args(["generate", "--prompt", "-"]), "\n"), kvant(["generate", "--prompt", ""])] {
        run.is_refused("prompt 1 is empty");
        assert_eq!(run.stderr.lines().count(), 2, "before the model is loaded: {run:?}");
    }
}
