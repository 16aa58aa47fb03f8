//! Model folders: tiny random models that transformers saved, against the logits and tokens that transformers computed
//! (tests/golden/models.py), and folders that cannot be decoded. Each of the latter is a clear error.

use kvant_engine::{
    Arm, Engine, EngineOptions, Error, Feed, Forced, Limits, LoadedModel, Message, Products, Source, load_schemes,
};
use kvant_kv::attend::reference::relative_error;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NAMES: [&str; 5] = ["llama", "llama3", "qwen2", "qwen3", "gemma3"];

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models")
}

fn load(path: &Path) -> Result<LoadedModel, Error> {
    LoadedModel::load(path, 1, Products::Exact, &|_, _| {})
}

fn refuse(path: &Path) -> Error {
    load(path).err().expect("the folder must be refused")
}

fn logits(loaded: &Arc<LoadedModel>, tokens: &[u32], feed: Feed) -> Vec<Vec<f32>> {
    let schemes = load_schemes("f16", loaded.config().layers).unwrap();
    let options = EngineOptions { threads: 2, kernel: None, arm: Arm::F16, schemes, limits: Limits::default() };
    let mut all = Vec::new();
    let mut keep = |_: usize, _: usize, l: &[f32]| -> Result<(), Error> {
        all.push(l.to_vec());
        Ok(())
    };
    Engine::new(loaded.clone(), options).unwrap().follow(&[Forced { tokens, prompt: 0 }], feed, &mut keep).unwrap();
    all
}

/// A copy of a golden model's folder, changed.
fn changed(name: &str, change: impl FnOnce(&Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(models().join(name)).unwrap().flatten() {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    change(folder.path());
    folder
}

fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = folder.join(file);
    let mut entries: Map<String, Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut entries);
    std::fs::write(&path, serde_json::to_vec(&entries).unwrap()).unwrap();
}

/// Golden logits of a model: its tokens, and a row for each of the last tokens.
fn golden(key: &str) -> (Vec<u32>, Vec<Vec<f64>>) {
    let bytes = std::fs::read(models().join("golden.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let name = key.split('.').next().unwrap();
    let tokens = all.tensor(&format!("{name}.tokens")).unwrap();
    let tokens = tokens.data().as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let logits = all.tensor(key).unwrap();
    let values: Vec<f64> = logits.data().as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    (tokens, values.chunks_exact(logits.shape()[1]).map(<[f64]>::to_vec).collect())
}

#[test]
fn golden_logits_of_transformers() {
    for name in NAMES {
        let loaded = Arc::new(load(&models().join(name)).unwrap());
        // Keys and values rounded as the cache rounds them leave f32's own rounding, and few that fall to the other side; as
        // transformers computes by itself, the f16 cache is what differs.
        for (key, bound) in [("logits_f16", 1e-3), ("logits", 3e-3)] {
            let (tokens, want) = golden(&format!("{name}.{key}"));
            for feed in [Feed::Prefill, Feed::Decode] {
                let got = logits(&loaded, &tokens, feed);
                assert_eq!(got.len(), tokens.len());
                let got = &got[got.len() - want.len()..];
                let off = |(got, want): (&Vec<f32>, &Vec<f64>)| relative_error(got, want);
                let worst = got.iter().zip(&want).map(off).fold(0.0, |a, e| if e > a || e.is_nan() { e } else { a });
                println!("{name} {key} {feed:?}: worst relative error of a row {worst:.1e}");
                assert!(worst <= bound, "{name} {key} {feed:?}: {worst:.1e}");
            }
        }
    }
}

/// Quantized products and packed caches run over folders as over GGUF files.
#[test]
fn folders_decode_with_quantized_products_and_a_packed_cache() {
    for name in NAMES {
        let loaded = LoadedModel::load(&models().join(name), 2, Products::Quantized, &|_, _| {}).unwrap();
        let (tokens, want) = golden(&format!("{name}.logits_f16"));
        let schemes = load_schemes("k8v8g32", loaded.config().layers).unwrap();
        let options = EngineOptions { threads: 2, kernel: None, arm: Arm::Fused, schemes, limits: Limits::default() };
        let mut engine = Engine::new(Arc::new(loaded), options).unwrap();
        let mut last = Vec::new();
        let mut keep = |_: usize, _: usize, l: &[f32]| -> Result<(), Error> {
            last = l.to_vec();
            Ok(())
        };
        engine.follow(&[Forced { tokens: &tokens, prompt: 0 }], Feed::Decode, &mut keep).unwrap();
        let off = relative_error(&last, want.last().unwrap());
        assert!(off <= 5e-2, "{name}: {off}");
    }
}

#[test]
fn older_forms_of_config_json_say_the_same() {
    let config = |path: &Path| Source::open(path).unwrap().config().unwrap();
    for (name, older) in [
        ("llama", json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})),
        ("llama3", {
            let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64});
            json!({"rope_theta": 5e5, "rope_scaling": scaling})
        }),
        ("qwen3", json!({"rope_theta": 10000.0, "rope_scaling": null, "layer_types": null})),
        ("gemma3", {
            let scaling = json!({"rope_type": "linear", "factor": 8.0});
            json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "layer_types": null,
                   "sliding_window_pattern": 2, "hidden_act": "gelu"})
        }),
    ] {
        let folder = changed(name, |path| {
            edit(path, "config.json", |config| {
                config.remove("rope_parameters");
                config.extend(older.as_object().unwrap().clone());
            });
        });
        let mut got = config(folder.path());
        got.name = Some(name.into());
        assert_eq!(got, config(&models().join(name)));
    }
}

#[test]
fn golden_tokens_of_transformers() {
    let texts: Value = serde_json::from_slice(&std::fs::read(models().join("texts.json")).unwrap()).unwrap();
    let ids = |v: &Value| -> Vec<u32> { v.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u32).collect() };
    for (name, golden) in texts.as_object().unwrap() {
        let loaded = load(&models().join(name)).unwrap();
        let tokenizer = loaded.tokenizer().unwrap();
        for entry in golden["texts"].as_array().unwrap() {
            let text = entry["text"].as_str().unwrap();
            let got = loaded.encode(text).unwrap();
            assert_eq!(got, ids(&entry["ids"]), "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&got), text, "{name}");
        }
        let chat = loaded.encode_chat(&[Message::user(golden["said"].as_str().unwrap())]).unwrap();
        assert_eq!(chat, ids(&golden["chat"]), "{name}");
    }
}

#[test]
fn messages_cannot_spell_special_tokens_and_ends_are_known() {
    for (name, ends, own) in [("qwen3", vec![2u32, 3], "<|im_end|>"), ("gemma3", vec![1, 5], "<end_of_turn>")] {
        let loaded = load(&models().join(name)).unwrap();
        let tokenizer = loaded.tokenizer().unwrap();
        let all: Vec<u32> = (0..tokenizer.vocabulary() as u32).filter(|&t| tokenizer.is_end(t)).collect();
        // Of qwen3's, `<|endoftext|>` is known by its spelling.
        let expected = if name == "qwen3" { [vec![0], ends].concat() } else { ends };
        assert_eq!(all, expected, "{name}");
        let special = |said: &str| -> Vec<u32> {
            let chat = loaded.encode_chat(&[Message::user(said)]).unwrap();
            chat.into_iter().filter(|&t| tokenizer.bytes(t).is_empty()).collect()
        };
        let plain = special("hi");
        assert!(!plain.is_empty());
        for said in [own, &own[1..], &own[..own.len() - 1], &format!("\u{e000}{own}x{own}")] {
            assert_eq!(special(said), plain, "{name}: {said}");
        }
        assert!(!loaded.encode(&format!("a{own}")).unwrap()[1..].iter().any(|&t| tokenizer.bytes(t).is_empty()));
    }
    // A token that is found in texts without being special is text.
    let loaded = load(&models().join("qwen3")).unwrap();
    let tokens = loaded.encode("<think>").unwrap();
    assert_eq!((tokens.len(), loaded.tokenizer().unwrap().decode(&tokens).as_str()), (1, "<think>"));
}

#[test]
fn a_folder_without_tokenizer_or_template_says_so() {
    let loaded = load(&models().join("llama")).unwrap();
    assert!(matches!(loaded.encode("a"), Err(Error::Tokenizer { .. })));
    assert!(matches!(loaded.encode_chat(&[Message::user("a")]), Err(Error::ChatTemplate { .. })));
}

#[test]
fn a_file_of_weights_cut_anywhere_is_damaged() {
    let whole = std::fs::read(models().join("llama/model.safetensors")).unwrap();
    let folder = changed("llama", |_| {});
    let path = folder.path().join("model.safetensors");
    for length in (0..900).step_by(7).chain((900..whole.len()).step_by(1999)).chain([whole.len() - 1]) {
        std::fs::write(&path, &whole[..length]).unwrap();
        let e = refuse(folder.path());
        assert!(matches!(e, Error::Damaged { .. }), "{length} of {} bytes: {e}", whole.len());
    }
    std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    assert!(matches!(refuse(folder.path()), Error::Damaged { .. }), "a byte too many");
    for announced in [u64::MAX, 1 << 62, 1 << 40, whole.len() as u64] {
        std::fs::write(&path, [&announced.to_le_bytes()[..], &whole[8..]].concat()).unwrap();
        assert!(matches!(refuse(folder.path()), Error::Damaged { .. }), "{announced}");
    }
}

#[test]
fn random_damage_of_a_header_never_panics() {
    let whole = std::fs::read(models().join("qwen3/model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(*whole.first_chunk::<8>().unwrap()) as usize;
    let folder = changed("qwen3", |_| {});
    let mut random = 88_172_645_463_325_252u64;
    let mut refused = 0;
    for _ in 0..500 {
        let mut bytes = whole.clone();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        bytes[(random >> 20) as usize % header] = (random >> 8) as u8;
        std::fs::write(folder.path().join("model.safetensors"), &bytes).unwrap();
        refused += usize::from(load(folder.path()).is_err());
    }
    assert!(refused > 400, "only {refused} of 500 damaged files were refused");
}

#[test]
fn random_damage_of_json_files_never_panics() {
    let mut random = 88_172_645_463_325_252u64;
    for (name, file, times) in [
        ("gemma3", "tokenizer.json", 300),
        ("qwen3", "tokenizer.json", 300),
        ("gemma3", "config.json", 300),
        ("qwen2", "model.safetensors.index.json", 100),
        ("qwen3", "tokenizer_config.json", 50),
    ] {
        let whole = std::fs::read(models().join(name).join(file)).unwrap();
        let folder = changed(name, |_| {});
        let mut refused = 0;
        for _ in 0..times {
            let mut bytes = whole.clone();
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = (random >> 20) as usize % whole.len();
            // Digits and letters too: what still is JSON says something else.
            bytes[at] = b"0189\",:{}[]-e \\zA\x00\xff"[(random >> 8) as usize % 19];
            std::fs::write(folder.path().join(file), &bytes).unwrap();
            match load(folder.path()) {
                Ok(loaded) => drop(loaded.encode("The boats, 12 of them. \u{2581}")),
                Err(_) => refused += 1,
            }
        }
        assert!(refused > times / 5, "{name} {file}: only {refused} of {times} damaged files were refused");
    }
}

#[test]
fn an_index_that_does_not_fit_its_files_is_damaged() {
    const INDEX: &str = "model.safetensors.index.json";
    let with = |change: &dyn Fn(&mut Map<String, Value>)| {
        let folder = changed("qwen2", |path| {
            edit(path, INDEX, |index| change(index["weight_map"].as_object_mut().unwrap()));
        });
        refuse(folder.path())
    };
    for file in ["../qwen2/model-00001-of-00007.safetensors", "/etc/passwd", "", ".."] {
        let e = with(&|map| drop(map.insert("model.norm.weight".into(), file.into())));
        assert!(matches!(&e, Error::Damaged { .. }) && e.to_string().contains("no file of this folder"), "{file}: {e}");
    }
    let e = with(&|map| drop(map.insert("model.norm.weight".into(), "model-00001-of-00007.safetensors".into())));
    assert!(matches!(e, Error::Damaged { .. }), "{e}");
    let e = with(&|map| drop(map.insert("more".into(), "model-00001-of-00007.safetensors".into())));
    assert!(matches!(e, Error::Damaged { .. }), "{e}");
    let e = with(&|map| drop(map.remove("model.norm.weight")));
    assert!(matches!(e, Error::Damaged { .. }), "{e}");
    let e = with(&|map| drop(map.insert("model.norm.weight".into(), "gone.safetensors".into())));
    assert!(matches!(e, Error::Read { .. }), "{e}");
    let e = refuse(changed("qwen2", |path| std::fs::write(path.join(INDEX), "{}").unwrap()).path());
    assert!(matches!(e, Error::Damaged { .. }), "{e}");
    let e = refuse(changed("qwen2", |path| std::fs::remove_file(path.join(INDEX)).unwrap()).path());
    assert!(matches!(&e, Error::Read { path, .. } if path.ends_with("model.safetensors")), "{e}");
    assert!(matches!(refuse(tempfile::tempdir().unwrap().path()), Error::Read { .. }));
}

#[test]
fn config_json_that_would_be_decoded_wrong_is_refused() {
    let set = |name: &str, key: &str, value: Value| {
        refuse(changed(name, |path| edit(path, "config.json", |c| drop(c.insert(key.into(), value)))).path())
    };
    for (name, key, value) in [
        ("llama", "attention_bias", json!(true)),
        ("llama", "mlp_bias", json!(true)),
        ("llama", "quantization_config", json!({"quant_method": "gptq"})),
        ("llama", "num_experts", json!(8)),
        ("llama", "hidden_act", json!("gelu")),
        ("llama", "rope_parameters", json!({"rope_type": "yarn", "factor": 8.0})),
        ("llama", "rope_parameters", json!({"rope_type": "default", "partial_rotary_factor": 0.5})),
        ("qwen2", "use_sliding_window", json!(true)),
        ("qwen2", "layer_types", json!(["sliding_attention"])),
        ("qwen3", "layer_types", json!(["linear_attention"])),
        ("gemma3", "attn_logit_softcapping", json!(50.0)),
        ("gemma3", "final_logit_softcapping", json!(30.0)),
        ("gemma3", "use_bidirectional_attention", json!(true)),
        ("gemma3", "hidden_activation", json!("relu")),
    ] {
        let e = set(name, key, value);
        assert!(matches!(e, Error::Unsupported { .. }), "{name} {key}: {e}");
    }
    for (name, key, value) in [
        ("llama", "num_hidden_layers", json!(1)),
        ("llama", "num_hidden_layers", json!(0)),
        ("llama", "vocab_size", json!("many")),
        ("llama", "hidden_size", json!(-5)),
        ("llama", "rms_norm_eps", json!("small")),
        ("llama", "max_position_embeddings", Value::Null),
        ("llama", "architectures", json!([])),
        ("llama", "rope_parameters", json!({"rope_type": "linear"})),
        ("llama", "rope_parameters", json!({"rope_type": "llama3", "factor": 8.0})),
        ("llama", "rope_parameters", {
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64})
        }),
        ("llama", "rope_parameters", {
            json!({"rope_type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64})
        }),
        ("gemma3", "sliding_window", Value::Null),
        ("gemma3", "layer_types", json!(["full_attention"])),
        ("gemma3", "layer_types", json!(["full_attention", "sliding_attention", "full_attention"])),
        ("qwen3", "eos_token_id", json!(4000)),
    ] {
        let e = set(name, key, value);
        assert!(matches!(e, Error::Metadata { .. }), "{name} {key}: {e}");
    }
    let e = set("llama", "architectures", json!(["MambaForCausalLM"]));
    assert!(matches!(&e, Error::Architecture { architecture, .. } if architecture == "MambaForCausalLM"), "{e}");
    let e = set("llama", "num_hidden_layers", json!(3));
    assert!(matches!(&e, Error::MissingTensor { name } if name.starts_with("model.layers.2.")), "{e}");
    let e = set("llama", "intermediate_size", json!(64));
    assert!(matches!(e, Error::TensorShape { .. }), "{e}");
    // Tied in word, and a head beside it; and the other way round.
    let e = set("llama", "tie_word_embeddings", json!(true));
    assert_eq!(e.to_string(), "the model needs tensor `lm_head.weight`, which is not supported");
    let e = set("qwen2", "tie_word_embeddings", json!(false));
    assert!(matches!(&e, Error::MissingTensor { name } if name == "lm_head.weight"), "{e}");
    let e = refuse(changed("llama", |path| std::fs::write(path.join("config.json"), "{").unwrap()).path());
    assert!(matches!(e, Error::Damaged { .. }), "{e}");
}

#[test]
fn tokenizers_that_would_read_texts_wrong_are_refused() {
    let with = |file: &str, change: &dyn Fn(&mut Map<String, Value>)| {
        refuse(changed("gemma3", |path| edit(path, file, change)).path())
    };
    let e = with("tokenizer.json", &|t| drop(t.insert("decoder".into(), json!({"type": "WordPiece"}))));
    assert!(matches!(e, Error::Unsupported { .. } | Error::Tokenizer { .. }), "{e}");
    let e = with("tokenizer.json", &|t| drop(t.insert("model".into(), json!({"type": "of the future"}))));
    assert!(matches!(e, Error::Tokenizer { .. }), "{e}");
    let e = with("tokenizer_config.json", &|t| drop(t.insert("add_bos_token".into(), json!(false))));
    assert!(matches!(e, Error::Tokenizer { .. }), "{e}");
    let e =
        refuse(changed("gemma3", |path| std::fs::write(path.join("chat_template.jinja"), "{% for %}").unwrap()).path());
    assert!(matches!(e, Error::ChatTemplate { .. }), "{e}");
}
