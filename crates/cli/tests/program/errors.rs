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
    (&["generate", "--prompt", "a", "--threads", "99999999"], "must be at most"),
    (&["generate", "--prompt", "a", "--threads", "two"], "must be a whole number"),
    (&["generate", "--prompt", "a", "--max-tokens", "0"], "must be at least 1"),
    (&["generate", "--prompt", "a", "--temperature", "NaN"], "must be a number"),
    (&["generate", "--prompt", "a", "--top-p", "0"], "must be a number"),
    (&["generate", "--prompt", "a", "--kv", "k5v4g64"], "unknown scheme `k5v4g64`: key bits"),
    (&["generate", "--prompt", "a", "--kv", ""], "unknown scheme"),
    (&["generate", "--prompt", "a", "--kv", "no-such-file.toml"], "no-such-file.toml"),
    (&["generate", "--prompt", "a", "--kv", "f16", "--arm", "fused"], "needs a packed scheme"),
    (&["generate", "--prompt", "a", "--kv", "k4v4g64", "--arm", "f16"], "would have no effect"),
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
    (&["bench", "decode", "--kv", "f16"], "packs nothing"),
    (&["bench", "decode", "--kv", "k4v4g64,k2v2g64"], "unknown scheme"),
    (&["bench", "decode", "--arms", "f16,f16"], "--arms has f16 twice"),
    (&["bench", "decode", "--batch", "1,0"], "must be at least 1"),
    (&["bench", "decode", "--prompt-len", "1024", "--steps", "96", "--kv", "k4v4g64w128"], "takes 128 steps"),
    (&["bench", "decode", "--batch", "99999"], "--batch 99999 is over"),
    (&["bench", "decode", "--prompt-len", "18446744073709551615"], "must be at most"),
    (&["info", "--shape", "layers=1000000000,q=1000000000,kv=1000000000,d=64"], "beyond any memory"),
    (&["info", "--memory", "8 parsecs"], "no unit of size"),
    (&["info", "--len", "0"], "must be at least 1"),
    (&["info", "--shape", "layers=1,q=1,kv=1,d=63"], "head_dim 63"),
    (&["info", "--model", "no/such.gguf"], "no model file"),
];

#[test]
fn bad_input_is_refused_with_a_hint() {
    for (args, error) in REFUSED {
        kvant(args.iter()).is_refused(error);
    }
}

#[test]
fn what_is_not_built_yet_says_so() {
    for args in [
        &["tune"][..],
        &["eval"],
        &["serve"],
        &["generate", "--prompt", "a", "--device", "cuda"],
        &["generate", "--prompt", "a", "--random-weights", "x.json"],
        &["info", "--device", "cuda"],
    ] {
        kvant(args).is_refused("is not built yet");
    }
}

#[test]
fn a_model_that_was_never_pulled_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    let run = finish(command().env("KVANT_MODELS", empty.path()).args(["generate", "--prompt", "a"]), "");
    run.is_refused("model smollm2-135m is not here");
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
    finish(command().args(["generate", "--prompt", "-"]), "\n").is_refused("prompt 1 is empty");
    kvant(["generate", "--prompt", ""]).is_refused("prompt 1 is empty");
}
