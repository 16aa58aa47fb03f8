//! Tiny models, written as GGUF files by the tests themselves. In: dimensions; out: a file, and its weights as
//! f64 for a plain forward pass. NOT here: what is asserted.
#![allow(dead_code)] // each test file uses a part

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Dimensions of a tiny model.
#[derive(Debug, Clone)]
pub struct Tiny {
    pub layers: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    pub forward: usize,
    pub context: usize,
    pub dtype: GgmlDType,
    pub tied: bool,
    pub architecture: &'static str,
    pub seed: u64,
}

impl Default for Tiny {
    fn default() -> Self {
        Self {
            layers: 2,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 64,
            hidden: 128,
            forward: 96,
            context: 700,
            dtype: GgmlDType::Q8_0,
            tied: true,
            architecture: "llama",
            seed: 1,
        }
    }
}

/// 256 byte tokens and the special ones.
pub const VOCABULARY: usize = 260;
pub const IM_START: u32 = 257;
pub const IM_END: u32 = 258;
pub const EPSILON: f32 = 1e-5;
pub const ROPE_BASE: f32 = 10_000.0;
/// Of gemma3's layers without a window.
pub const GLOBAL_BASE: f32 = 1e6;
/// What positions are divided by in those.
pub const STRETCH: f32 = 4.0;
/// Keys that a query of gemma3's other layers sees.
pub const VISIBLE: usize = 24;

/// A model in the making: metadata and tensors can be changed before it is written.
pub struct Parts {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, QTensor>,
}

impl Tiny {
    pub fn parts(&self) -> Parts {
        let mut random = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut tensor = |shape: &[usize], dtype: GgmlDType, scale: f32, shift: f32| {
            let values: Vec<f32> = (0..shape.iter().product())
                .map(|_| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    ((random >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 2.0 * scale + shift
                })
                .collect();
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            QTensor::quantize(&tensor, dtype).unwrap()
        };
        let mut tensors = BTreeMap::new();
        let (q, kv) = (self.q_heads * self.head_dim, self.kv_heads * self.head_dim);
        let (hidden, forward) = (self.hidden, self.forward);
        let root = |k: usize| 1.7 / (k as f32).sqrt();
        for i in 0..self.layers {
            let mut matrix = |name: &str, n: usize, k: usize, gain: f32| {
                tensors.insert(format!("blk.{i}.{name}.weight"), tensor(&[n, k], self.dtype, gain * root(k), 0.0));
            };
            // Queries and keys larger, so that attention is not a plain mean.
            matrix("attn_q", q, hidden, 2.0);
            matrix("attn_k", kv, hidden, 2.0);
            matrix("attn_v", kv, hidden, 1.0);
            matrix("attn_output", hidden, q, 1.0);
            matrix("ffn_gate", forward, hidden, 1.0);
            matrix("ffn_up", forward, hidden, 1.0);
            matrix("ffn_down", hidden, forward, 1.0);
            if self.architecture == "qwen2" {
                for (name, n) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
                    tensors.insert(format!("blk.{i}.{name}.bias"), tensor(&[n], GgmlDType::F32, 1.5, 0.2));
                }
            }
            if ["qwen3", "gemma3"].contains(&self.architecture) {
                for name in ["attn_q_norm", "attn_k_norm"] {
                    let norm = tensor(&[self.head_dim], GgmlDType::F32, 0.4, 1.2);
                    tensors.insert(format!("blk.{i}.{name}.weight"), norm);
                }
            }
            let behind: &[&str] =
                if self.architecture == "gemma3" { &["post_attention_norm", "post_ffw_norm"] } else { &[] };
            for name in ["attn_norm", "ffn_norm"].iter().chain(behind) {
                tensors.insert(format!("blk.{i}.{name}.weight"), tensor(&[hidden], GgmlDType::F32, 0.3, 1.0));
            }
        }
        tensors.insert("output_norm.weight".into(), tensor(&[hidden], GgmlDType::F32, 0.3, 1.0));
        tensors.insert("token_embd.weight".into(), tensor(&[VOCABULARY, hidden], self.dtype, 1.0, 0.0));
        if !self.tied {
            tensors.insert("output.weight".into(), tensor(&[VOCABULARY, hidden], self.dtype, 0.5, 0.0));
        }
        Parts { metadata: self.metadata(), tensors }
    }

    fn metadata(&self) -> BTreeMap<String, Value> {
        let n = |n: usize| Value::U32(n as u32);
        let text = |s: &str| Value::String(s.into());
        let mut bytes: Vec<(u8, char)> =
            shimmytok::byte_encoder::bytes_to_unicode().iter().map(|(&b, &c)| (b, c)).collect();
        bytes.sort_unstable();
        let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"];
        let tokens = bytes.iter().map(|(_, c)| c.to_string()).chain(specials.map(String::from));
        let types = (0..VOCABULARY).map(|i| Value::I32(if i < 256 { 1 } else { 3 })).collect();
        let template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}\
                        {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
        let gemma = (self.architecture == "gemma3").then(|| {
            [
                ("llama.attention.sliding_window", n(VISIBLE)),
                ("llama.rope.freq_base", Value::F32(GLOBAL_BASE)),
                ("llama.rope.scaling.type", text("linear")),
                ("llama.rope.scaling.factor", Value::F32(STRETCH)),
            ]
        });
        [
            ("general.architecture", text("llama")),
            ("general.name", text("tiny")),
            ("llama.block_count", n(self.layers)),
            ("llama.context_length", n(self.context)),
            ("llama.embedding_length", n(self.hidden)),
            ("llama.feed_forward_length", n(self.forward)),
            ("llama.attention.head_count", n(self.q_heads)),
            ("llama.attention.head_count_kv", n(self.kv_heads)),
            ("llama.attention.key_length", n(self.head_dim)),
            ("llama.attention.value_length", n(self.head_dim)),
            ("llama.rope.freq_base", Value::F32(ROPE_BASE)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(EPSILON)),
            ("tokenizer.ggml.model", text("gpt2")),
            ("tokenizer.ggml.pre", text("smollm")),
            ("tokenizer.ggml.tokens", Value::Array(tokens.map(Value::String).collect())),
            ("tokenizer.ggml.token_type", Value::Array(types)),
            ("tokenizer.ggml.merges", Value::Array(vec![])),
            ("tokenizer.ggml.bos_token_id", Value::U32(IM_START)),
            ("tokenizer.ggml.eos_token_id", Value::U32(IM_END)),
            ("tokenizer.ggml.unknown_token_id", Value::U32(256)),
            ("tokenizer.chat_template", text(template)),
        ]
        .into_iter()
        .chain(gemma.into_iter().flatten())
        .map(|(k, v)| match k.strip_prefix("llama.") {
            Some(rest) => (format!("{}.{rest}", self.architecture), v),
            None if k == "general.architecture" => (k.to_owned(), text(self.architecture)),
            None => (k.to_owned(), v),
        })
        .collect()
    }
}

impl Parts {
    /// Writes the file into `folder`.
    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        let metadata: Vec<(&str, &Value)> = self.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<(&str, &QTensor)> = self.tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        path
    }

    /// Replaces a tensor by f32 values.
    pub fn replace(&mut self, name: &str, shape: &[usize], values: Vec<f32>) {
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        self.tensors.insert(name.into(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap());
    }

    /// A tensor as the file holds it, as f32.
    pub fn values(&self, name: &str) -> Vec<f32> {
        self.tensors[name].dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }
}

/// What Llama 3's files call what the frequencies of rotary pairs are divided by.
pub const ROPE_FREQS: &str = "rope_freqs.weight";

/// Logits of every position by a plain f64 forward pass; K and V are rounded to f16 as the cache does.
pub fn reference(tiny: &Tiny, parts: &Parts, tokens: &[u32]) -> Vec<Vec<f64>> {
    reference_rounding(tiny, parts, tokens, |x| half::f16::from_f64(x).to_f64())
}

/// The same with another rounding of K and V.
pub fn reference_rounding(tiny: &Tiny, parts: &Parts, tokens: &[u32], round: fn(f64) -> f64) -> Vec<Vec<f64>> {
    let weights = |name: &str| -> Vec<f64> { parts.values(name).into_iter().map(f64::from).collect() };
    let product = |w: &[f64], x: &[f64]| -> Vec<f64> {
        w.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter().zip(w).map(|(x, w)| x / (mean + f64::from(EPSILON)).sqrt() * w).collect()
    };
    let gemma = tiny.architecture == "gemma3";
    let divisors = parts.tensors.contains_key(ROPE_FREQS).then(|| weights(ROPE_FREQS));
    let turn = |row: &mut [f64], position: usize, global: bool| {
        let (base, stretch) = if gemma && global { (GLOBAL_BASE, STRETCH) } else { (ROPE_BASE, 1.0) };
        for head in row.chunks_exact_mut(tiny.head_dim) {
            for i in 0..tiny.head_dim / 2 {
                let angle =
                    position as f64 / f64::from(stretch) * f64::from(base).powf(-2.0 * i as f64 / tiny.head_dim as f64);
                let angle = angle / divisors.as_ref().map_or(1.0, |divisors| divisors[i]);
                let (first, second) = match tiny.architecture {
                    "llama" => (2 * i, 2 * i + 1),
                    _ => (i, i + tiny.head_dim / 2),
                };
                let (a, b) = (head[first], head[second]);
                head[first] = a * angle.cos() - b * angle.sin();
                head[second] = a * angle.sin() + b * angle.cos();
            }
        }
    };
    let stored = |row: Vec<f64>| -> Vec<f64> { row.into_iter().map(round).collect() };
    let embedding = weights("token_embd.weight");
    let mut stream: Vec<Vec<f64>> =
        tokens.iter().map(|&t| embedding[t as usize * tiny.hidden..][..tiny.hidden].to_vec()).collect();
    if gemma {
        stream.iter_mut().flatten().for_each(|x| *x *= (tiny.hidden as f64).sqrt());
    }
    let each_head = |x: &mut [f64], weight: &[f64]| {
        for head in x.chunks_exact_mut(weight.len()) {
            let normed = norm(head, weight);
            head.copy_from_slice(&normed);
        }
    };
    for layer in 0..tiny.layers {
        let of = |name: &str| weights(&format!("blk.{layer}.{name}.weight"));
        let (wq, wk, wv, wo) = (of("attn_q"), of("attn_k"), of("attn_v"), of("attn_output"));
        let biased = |name: &str, x: Vec<f64>| -> Vec<f64> {
            let bias = if tiny.architecture == "qwen2" {
                weights(&format!("blk.{layer}.{name}.bias"))
            } else {
                vec![0.0; x.len()]
            };
            x.iter().zip(bias).map(|(x, b)| x + b).collect()
        };
        let (gate, up, down) = (of("ffn_gate"), of("ffn_up"), of("ffn_down"));
        let global = !gemma || (layer + 1) % 6 == 0;
        let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (vec![], vec![]);
        for (position, x) in stream.iter_mut().enumerate() {
            let normed = norm(x, &of("attn_norm"));
            let (mut q, mut k) = (biased("attn_q", product(&wq, &normed)), biased("attn_k", product(&wk, &normed)));
            if ["qwen3", "gemma3"].contains(&tiny.architecture) {
                each_head(&mut q, &of("attn_q_norm"));
                each_head(&mut k, &of("attn_k_norm"));
            }
            turn(&mut q, position, global);
            turn(&mut k, position, global);
            keys.push(stored(k));
            values.push(stored(biased("attn_v", product(&wv, &normed))));
            let mut attended = vec![];
            for (h, q) in q.chunks_exact(tiny.head_dim).enumerate() {
                let at = h / (tiny.q_heads / tiny.kv_heads) * tiny.head_dim;
                let first = if global { 0 } else { (position + 1).saturating_sub(VISIBLE) };
                let (keys, values) = (&keys[first..], &values[first..]);
                let scores: Vec<f64> = keys
                    .iter()
                    .map(|k| q.iter().zip(&k[at..]).map(|(q, k)| q * k).sum::<f64>() / (tiny.head_dim as f64).sqrt())
                    .collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = p.iter().sum();
                attended.extend(
                    (0..tiny.head_dim).map(|d| p.iter().zip(values).map(|(p, v)| p * v[at + d]).sum::<f64>() / total),
                );
            }
            let behind = |name: &str, y: Vec<f64>| if gemma { norm(&y, &of(name)) } else { y };
            let bend = |g: f64| match gemma {
                true => 0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh()),
                false => g / (1.0 + (-g).exp()),
            };
            let added = behind("post_attention_norm", product(&wo, &attended));
            x.iter_mut().zip(added).for_each(|(x, y)| *x += y);
            let normed = norm(x, &of("ffn_norm"));
            let inner: Vec<f64> =
                product(&gate, &normed).iter().zip(product(&up, &normed)).map(|(g, u)| bend(*g) * u).collect();
            let added = behind("post_ffw_norm", product(&down, &inner));
            x.iter_mut().zip(added).for_each(|(x, y)| *x += y);
        }
    }
    let head = weights(if tiny.tied { "token_embd.weight" } else { "output.weight" });
    stream.iter().map(|x| product(&head, &norm(x, &weights("output_norm.weight")))).collect()
}
