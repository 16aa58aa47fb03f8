//! Model files that cannot be decoded: each is a clear error, none a panic or a large allocation.

mod tiny_model;

use candle_core::quantized::gguf_file::Value;
use kvant_engine::{Error, LoadedModel, Products};
use std::path::Path;
use tiny_model::{Parts, Tiny, VOCABULARY};

fn load(path: &Path) -> Result<LoadedModel, Error> {
    LoadedModel::load(path, 1, Products::Quantized, &|_, _| {})
}

fn refuse(path: &Path) -> Error {
    load(path).err().expect("the file must be refused")
}

fn tiny() -> Tiny {
    Tiny { layers: 1, ..Tiny::default() }
}

/// The error for a tiny model after a change.
fn changed(change: impl FnOnce(&mut Parts)) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let mut parts = tiny().parts();
    change(&mut parts);
    refuse(&parts.write(folder.path(), "changed.gguf"))
}

#[test]
fn files_that_are_not_there_or_no_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    assert!(matches!(refuse(&path), Error::Read { .. }));
    assert!(matches!(refuse(folder.path()), Error::Read { .. }));
    for bytes in [&b""[..], b"GG", b"PK\x03\x04 something else", b"gguf\x03\0\0\0"] {
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(refuse(&path), Error::NotGguf { .. }), "{bytes:?}");
    }
}

#[test]
fn a_file_cut_anywhere_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(tiny().parts().write(folder.path(), "whole.gguf")).unwrap();
    let path = folder.path().join("cut.gguf");
    // Every length of the header's first part, then steps through all of it; the last 31 bytes may be padding.
    let lengths = (4..600).chain((600..whole.len() - 32).step_by(997)).chain([whole.len() - 32]);
    for length in lengths {
        std::fs::write(&path, &whole[..length]).unwrap();
        let e = refuse(&path);
        assert!(matches!(e, Error::DamagedGguf { .. }), "{length} of {} bytes: {e}", whole.len());
    }
}

/// A header by hand: version 3 and these bytes.
fn by_hand(bytes: &[&[u8]]) -> Error {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.gguf");
    std::fs::write(&path, [b"GGUF\x03\0\0\0", &bytes.concat()[..]].concat()).unwrap();
    refuse(&path)
}

fn u64s(n: u64) -> [u8; 8] {
    n.to_le_bytes()
}

fn u32s(n: u32) -> [u8; 4] {
    n.to_le_bytes()
}

#[test]
fn headers_that_announce_too_much_allocate_nothing() {
    let padding = vec![0u8; 4096];
    let key = |name: &str| [&u64s(name.len() as u64)[..], name.as_bytes()].concat();
    let huge = [u64::MAX, u64::MAX / 2, 1 << 62, 1 << 40, 1 << 31];
    for n in huge {
        for bytes in [
            vec![u64s(n).to_vec(), u64s(0).to_vec()],
            vec![u64s(0).to_vec(), u64s(n).to_vec()],
            // A key, a text, an array of bytes and an array of texts of that length.
            vec![u64s(0).to_vec(), u64s(1).to_vec(), u64s(n).to_vec()],
            vec![u64s(0).to_vec(), u64s(1).to_vec(), key("a"), u32s(8).to_vec(), u64s(n).to_vec()],
            vec![u64s(0).to_vec(), u64s(1).to_vec(), key("a"), u32s(9).to_vec(), u32s(0).to_vec(), u64s(n).to_vec()],
            vec![u64s(0).to_vec(), u64s(1).to_vec(), key("a"), u32s(9).to_vec(), u32s(8).to_vec(), u64s(n).to_vec()],
        ] {
            let mut parts: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
            parts.push(&padding);
            let e = by_hand(&parts);
            assert!(matches!(e, Error::DamagedGguf { .. }), "{n}: {e}");
        }
        // A tensor of that many values, and one that far away.
        for (dims, offset) in [([n, 1], 0), ([n, n], 0), ([32, n], 0), ([32, 1], n)] {
            let e = by_hand(&[
                &u64s(1),
                &u64s(0),
                &key("t"),
                &u32s(2),
                &u64s(dims[0]),
                &u64s(dims[1]),
                &u32s(0),
                &u64s(offset),
                &padding,
            ]);
            assert!(matches!(e, Error::DamagedGguf { .. }), "{dims:?} at {offset}: {e}");
        }
    }
    for alignment in [0u32, u32::MAX] {
        let e = by_hand(&[&u64s(0), &u64s(1), &key("general.alignment"), &u32s(4), &u32s(alignment), &padding]);
        assert!(e.to_string().contains("alignment"), "{e}");
    }
    // Arrays within arrays within arrays.
    let nested = [u32s(9).to_vec(), u64s(1).to_vec()].concat().repeat(300);
    let e = by_hand(&[&u64s(0), &u64s(1), &key("a"), &u32s(9), &nested]);
    assert!(matches!(e, Error::DamagedGguf { .. }), "{e}");
    assert!(matches!(by_hand(&[&u64s(0), &u64s(1), &key("a"), &u32s(77), &padding]), Error::DamagedGguf { .. }));
}

#[test]
fn random_damage_of_the_header_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(tiny().parts().write(folder.path(), "whole.gguf")).unwrap();
    let header = whole.windows(16).position(|w| w == b"token_embd.weigh").unwrap() + 40;
    let path = folder.path().join("damaged.gguf");
    let mut random = 88_172_645_463_325_252u64;
    let mut refused = 0;
    for _ in 0..1500 {
        let mut bytes = whole.clone();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = 4 + (random >> 20) as usize % (header - 4);
        bytes[at] = (random >> 8) as u8;
        std::fs::write(&path, &bytes).unwrap();
        refused += usize::from(load(&path).is_err());
    }
    assert!(refused > 100, "only {refused} of 1500 damaged files were refused");
}

#[test]
fn other_architectures_are_named() {
    let text = |s: &str| Value::String(s.into());
    let e = changed(|p| drop(p.metadata.insert("general.architecture".into(), text("mamba"))));
    assert_eq!(
        e.to_string(),
        "models of architecture `mamba` are not supported; supported: llama, qwen2, qwen3, gemma3"
    );
    let e = changed(|p| {
        p.metadata.insert("general.architecture".into(), text("deepseek2"));
        p.metadata.insert("deepseek2.attention.kv_lora_rank".into(), Value::U32(512));
    });
    assert!(e.to_string().contains("MLA"), "{e}");
    let e = changed(|p| drop(p.metadata.remove("general.architecture")));
    assert!(matches!(e, Error::Metadata { .. }), "{e}");
}

#[test]
fn metadata_that_do_not_fit_are_named() {
    let set = |key: &str, value: Value| changed(|p| drop(p.metadata.insert(key.into(), value)));
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        let e = changed(|p| drop(p.metadata.remove(key)));
        assert!(matches!(&e, Error::Metadata { key: k, .. } if k == key), "{key}: {e}");
        let e = set(key, Value::String("many".into()));
        assert!(matches!(&e, Error::Metadata { key: k, .. } if k == key), "{key}: {e}");
    }
    for (key, value) in [
        ("llama.block_count", Value::U32(0)),
        ("llama.block_count", Value::I32(-1)),
        ("llama.context_length", Value::U64(u64::MAX)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
        ("llama.rope.freq_base", Value::F32(-1.0)),
        ("tokenizer.ggml.eos_token_id", Value::U32(1 << 20)),
        ("tokenizer.ggml.add_bos_token", Value::U32(1)),
    ] {
        let e = set(key, value);
        assert!(matches!(e, Error::Metadata { .. }), "{key}: {e}");
    }
    for (key, value) in [
        ("llama.rope.scaling.type", Value::String("yarn".into())),
        ("llama.rope.scaling.factor", Value::F32(8.0)),
        ("llama.attn_logit_softcapping", Value::F32(50.0)),
        ("llama.rope.dimension_count", Value::U32(32)),
        ("llama.attention.value_length", Value::U32(32)),
        ("llama.expert_count", Value::U32(8)),
        ("tokenizer.ggml.model", Value::String("rwkv".into())),
        ("tokenizer.ggml.pre", Value::String("of-the-future".into())),
    ] {
        let e = set(key, value);
        assert!(matches!(e, Error::Unsupported { .. }), "{key}: {e}");
    }
    let e = set("llama.attention.key_length", Value::U32(48));
    assert!(matches!(e, Error::Unsupported { .. } | Error::Kv(_)), "{e}");
    let e = set("llama.attention.head_count_kv", Value::U32(3));
    assert!(matches!(e, Error::Kv(kvant_kv::Error::Dimension { .. })), "{e}");
    let e = set("tokenizer.chat_template", Value::String("{% for %}".into()));
    assert!(matches!(e, Error::ChatTemplate { .. }), "{e}");
}

#[test]
fn tokenizers_that_would_read_texts_wrong_are_named() {
    let texts = |n: usize| Value::Array((0..n).map(|i| Value::String(format!("t{i}"))).collect());
    let types = |kind: i32| Value::Array(vec![Value::I32(kind); VOCABULARY]);
    let [merges, split, kinds] = ["merges", "pre", "token_type"].map(|name| format!("tokenizer.ggml.{name}"));
    for (key, value, why) in [
        (&merges, None, "it is absent"),
        (&merges, Some(Value::String("a b".into())), "it is no list"),
        (&merges, Some(texts(3)), "entry 0 is no pair of tokens"),
        (&split, None, "it is absent"),
        (&kinds, None, "it is absent"),
        (&kinds, Some(types(3)), "no token is a normal one"),
        (&kinds, Some(types(77)), "no type of token"),
        (&kinds, Some(Value::Array(vec![Value::U32(1); VOCABULARY])), "no type of token"),
        (&kinds, Some(Value::Array(vec![Value::I32(1); 9])), "it has 9 entries for 260 tokens"),
    ] {
        let e = changed(|p| match value {
            Some(value) => drop(p.metadata.insert(key.clone(), value)),
            None => drop(p.metadata.remove(key)),
        });
        assert!(matches!(&e, Error::Metadata { key: k, .. } if k == key) && e.to_string().contains(why), "{key}: {e}");
    }
    // Tokens of several characters that nothing can be joined to.
    let e = changed(|p| {
        p.metadata.insert("tokenizer.ggml.tokens".into(), texts(VOCABULARY));
        p.metadata.insert(merges.clone(), Value::Array(vec![]));
    });
    assert!(matches!(&e, Error::Metadata { key, .. } if *key == merges), "{e}");
    // A switch and a number that the library would read as absent.
    for (key, value) in [("add_space_prefix", Value::U32(0)), ("unknown_token_id", Value::I32(256))] {
        let key = format!("tokenizer.ggml.{key}");
        let e = changed(|p| drop(p.metadata.insert(key.clone(), value)));
        assert!(matches!(&e, Error::Metadata { key: k, .. } if *k == key), "{e}");
    }
}

/// A tokenizer of the other kind: pieces with scores, which can join characters to a control token.
fn scored_pieces(parts: &mut Parts) {
    let mut tokens =
        ["<unk>", "<s>", "</s>", "\u{2581}", "<", "/", "s", ">", "a", "</", "</s"].map(String::from).to_vec();
    tokens.extend((tokens.len()..VOCABULARY).map(|i| format!("t{i}")));
    let kind = |i: usize| [2, 3, 3].get(i).copied().unwrap_or(1);
    let number = |name: &str, n: u32| (format!("tokenizer.ggml.{name}_token_id"), Value::U32(n));
    parts.metadata.extend([
        ("tokenizer.ggml.model".into(), Value::String("llama".into())),
        ("tokenizer.ggml.tokens".into(), Value::Array(tokens.into_iter().map(Value::String).collect())),
        ("tokenizer.ggml.token_type".into(), Value::Array((0..VOCABULARY).map(|i| Value::I32(kind(i))).collect())),
        ("tokenizer.ggml.scores".into(), Value::Array(vec![Value::F32(-1.0); VOCABULARY])),
        number("unknown", 0),
        number("bos", 1),
        number("eos", 2),
    ]);
}

#[test]
fn a_raw_prompt_never_becomes_a_control_token() {
    let folder = tempfile::tempdir().unwrap();
    let mut parts = tiny().parts();
    scored_pieces(&mut parts);
    let loaded = load(&parts.write(folder.path(), "pieces.gguf")).unwrap();
    let tokens = loaded.encode("a</s>").unwrap();
    assert!(tokens.ends_with(&[8, 4, 5, 6, 7]), "{tokens:?}");

    parts.metadata.remove("tokenizer.ggml.scores");
    let e = refuse(&parts.write(folder.path(), "scores.gguf"));
    assert!(matches!(&e, Error::Metadata { key, .. } if key == "tokenizer.ggml.scores"), "{e}");
}

/// Tokens that their maker added (runs of spaces, tags) are found before a text is split, the longest first.
#[test]
fn tokens_that_were_added_are_found_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut parts = tiny().parts();
    scored_pieces(&mut parts);
    let mut set = |name: &str, at: usize, value: Value| {
        let Some(Value::Array(list)) = parts.metadata.get_mut(&format!("tokenizer.ggml.{name}")) else { panic!() };
        list[at] = value;
    };
    for (id, text) in [(20, "  "), (21, "   "), (22, "<a>")] {
        set("tokens", id, Value::String(text.into()));
        set("token_type", id, Value::I32(4));
    }
    parts.metadata.insert("tokenizer.ggml.add_space_prefix".into(), Value::Bool(false));
    let loaded = load(&parts.write(folder.path(), "added.gguf")).unwrap();
    for (text, tokens) in [
        ("a  a", vec![8, 20, 8]),
        ("   a ", vec![21, 8, 3]),
        ("    ", vec![21, 3]),
        ("<a><a", vec![22, 4, 8]),
        ("  ", vec![20]),
        ("a\u{2581} a", vec![8, 20, 8]),
    ] {
        assert_eq!(loaded.tokenizer().unwrap().encode_text(text).unwrap(), tokens, "{text:?}");
    }
    assert_eq!(loaded.tokenizer().unwrap().decode(&[22, 8, 21]), "<a>a   ");
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    for name in ["token_embd.weight", "output_norm.weight", "blk.0.attn_k.weight", "blk.0.ffn_norm.weight"] {
        let e = changed(|p| drop(p.tensors.remove(name)));
        assert!(matches!(&e, Error::MissingTensor { name: n } if n == name), "{name}: {e}");
        let e = changed(|p| p.replace(name, &[3, 64], vec![0.0; 192]));
        assert!(matches!(&e, Error::TensorShape { name: n, .. } if n == name), "{name}: {e}");
    }
    let e = changed(|p| p.replace("blk.0.attn_q.bias", &[256], vec![0.0; 256]));
    assert!(e.to_string().contains("blk.0.attn_q.bias"), "{e}");
    assert_eq!(e.to_string(), "the model needs tensor `blk.0.attn_q.bias`, which is not supported");
    for (len, first, error) in [
        (32, 0.0, "`rope_freqs.weight`: it divides frequencies by 0"),
        (32, f32::NAN, "`rope_freqs.weight`: it divides frequencies by NaN"),
        (31, 1.0, "rope_freqs.weight"),
    ] {
        let divisors = (0..len).map(|i| if i == 0 { first } else { 1.0 }).collect();
        let e = changed(|p| p.replace("rope_freqs.weight", &[len], divisors)).to_string();
        assert!(e.contains(error), "{e}");
    }
    let layer = |p: &mut Parts| p.replace("blk.1.attn_norm.weight", &[128], vec![0.0; 128]);
    let e = changed(layer).to_string();
    assert!(e.contains("`llama.block_count`: it is 1, and there is a tensor `blk.1.attn_norm.weight`"), "{e}");
    let e = changed(|p| drop(p.metadata.insert("llama.rope.freq_base".into(), Value::F32(0.0)))).to_string();
    assert!(e.contains("it is 0, not above 0"), "{e}");
    let e = changed(|p| drop(p.metadata.insert("llama.block_count".into(), Value::U32(1 << 31))));
    assert!(matches!(&e, Error::MissingTensor { name } if name == "blk.1.attn_norm.weight"), "{e}");
}

#[test]
fn zero_threads_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny().parts().write(folder.path(), "whole.gguf");
    let e = LoadedModel::load(&path, 0, Products::Quantized, &|_, _| {}).err().unwrap();
    assert!(matches!(e, Error::Threads { threads: 0, .. }), "{e}");
}
