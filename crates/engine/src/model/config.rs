//! What the metadata of a model say. In: an open file; out: checked numbers.
//! NOT here: tensors (mod.rs reads those), config.json (config/json.rs).

mod json;

use super::rope::{Pairing, Rope};
use crate::Error;
use crate::gguf::Gguf;
use kvant_kv::{LayerConfig, LayerShape, Scheme};
use std::sync::Arc;

/// Architectures that this engine decodes.
pub const ARCHITECTURES: &str = "llama, qwen2, qwen3, gemma3";

/// What a model is built like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// No biases; the rotary pairs of a head are neighbours (its GGUF files are permuted so).
    Llama,
    /// As llama with biases of q, k and v; the rotary pairs are channels of the two halves of a head.
    Qwen2,
    /// Rotary pairs as qwen2, no biases; each head of q and k is normalized before its rotation.
    Qwen3,
    /// As qwen3, with norms behind attention and feed-forward part too, GELU in place of SiLU, a scaled embedding, and most
    /// layers with a window and a rotary base of their own.
    Gemma3,
}

impl Architecture {
    /// As files name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    pub(crate) fn of(name: &str) -> Option<Self> {
        [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3].into_iter().find(|a| a.name() == name)
    }

    /// As config.json names it.
    pub(crate) fn of_class(name: &str) -> Option<Self> {
        match name {
            "LlamaForCausalLM" => Some(Self::Llama),
            "Qwen2ForCausalLM" => Some(Self::Qwen2),
            "Qwen3ForCausalLM" => Some(Self::Qwen3),
            "Gemma3ForCausalLM" => Some(Self::Gemma3),
            _ => None,
        }
    }

    /// Whether q, k and v have biases.
    pub fn has_biases(self) -> bool {
        self == Self::Qwen2
    }

    /// Whether each head of q and k is normalized before its rotation.
    pub fn has_head_norms(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Gemma3)
    }

    /// Whether what attention and the feed-forward part add is normalized too.
    pub fn has_post_norms(self) -> bool {
        self == Self::Gemma3
    }

    /// How gates of the feed-forward part are bent.
    pub fn activation(self) -> Activation {
        if self == Self::Gemma3 { Activation::Gelu } else { Activation::Silu }
    }
}

/// How a gate of the feed-forward part is bent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`.
    Gelu,
}

/// Layers with a window, among others without.
#[derive(Debug, Clone, PartialEq)]
pub struct Windows {
    /// Keys that a query of such a layer sees, itself included.
    pub visible: usize,
    /// Their rotary embedding.
    pub rope: Rope,
    /// Each layer of this number (the sixth, the twelfth, ..) has no window.
    pub global_every: usize,
}

/// What sets the attention of one layer apart.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionFacts {
    /// Keys that a query sees; None: all.
    pub visible: Option<usize>,
    /// Its rotary embedding.
    pub rope: Rope,
}

/// The numbers of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// What it is built like.
    pub architecture: Architecture,
    /// Name in the file, if any.
    pub name: Option<String>,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward part.
    pub feed_forward: usize,
    /// Heads of every layer.
    pub shape: LayerShape,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// Tokens the model was trained to hold.
    pub context: usize,
    /// Added to the mean square before its root.
    pub norm_epsilon: f32,
    /// Rotary embedding of layers without a window.
    pub rope: Rope,
    /// Which channels of a head turn together.
    pub pairing: Pairing,
    /// Layers with a window; None: no layer has one.
    pub windows: Option<Windows>,
    /// Factor of every attention score.
    pub score_scale: f32,
    /// Factor of the embedding.
    pub embedding_scale: f32,
}

impl Config {
    /// Reads and checks the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Architecture`], [`Error::Metadata`], [`Error::Unsupported`], [`Error::Kv`] for heads outside the
    /// attention's contract.
    pub fn of_gguf(gguf: &Gguf) -> Result<Self, Error> {
        let architecture = gguf.text("general.architecture")?.ok_or_else(|| absent("general.architecture"))?;
        let of = |key: &str| format!("{architecture}.{key}");
        if gguf.get(&of("attention.kv_lora_rank")).is_some() {
            let what = format!("one latent as K and V (MLA, architecture `{architecture}`)");
            return Err(Error::Unsupported { what });
        }
        let Some(built) = Architecture::of(architecture) else {
            return Err(Error::Architecture { architecture: architecture.into(), supported: ARCHITECTURES });
        };
        let count = |key: &str| {
            let key = of(key);
            match gguf.count(&key)? {
                Some(0) => Err(Error::Metadata { key, why: "it is 0".into() }),
                Some(n) => Ok(n),
                None => Err(absent(&key)),
            }
        };
        if gguf.count(&of("expert_count"))?.is_some_and(|n| n > 0) {
            return Err(Error::Unsupported { what: "a mixture of experts".into() });
        }
        let linear = match gguf.text(&of("rope.scaling.type"))? {
            None | Some("none") => false,
            Some("linear") => true,
            Some(kind) => return Err(Error::Unsupported { what: format!("rotary scaling of type `{kind}`") }),
        };
        let factor = gguf.real(&of("rope.scaling.factor"))?;
        for (key, unknown) in [
            ("rope.scale_linear", gguf.real(&of("rope.scale_linear"))?),
            ("rope.scaling.factor", factor.filter(|_| !linear)),
        ] {
            if unknown.is_some_and(|factor| factor != 1.0) {
                return Err(Error::Unsupported { what: format!("rotary scaling (`{}`)", of(key)) });
            }
        }
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if gguf.real(&of(key))?.is_some_and(|cap| cap != 0.0) {
                return Err(Error::Unsupported { what: format!("a cap of scores (`{}`)", of(key)) });
            }
        }
        let (hidden, q_heads) = (count("embedding_length")?, count("attention.head_count")?);
        let kv_heads = gguf.count(&of("attention.head_count_kv"))?.unwrap_or(q_heads);
        let head_dim = match gguf.count(&of("attention.key_length"))? {
            Some(n) => n,
            None if hidden.is_multiple_of(q_heads) => hidden / q_heads,
            None => {
                let why = format!("{q_heads} heads do not divide {hidden} channels");
                return Err(Error::Metadata { key: of("attention.head_count"), why });
            }
        };
        for (key, what) in [
            ("attention.value_length", "values of another length than keys"),
            ("rope.dimension_count", "rotary embedding of a part of each head"),
        ] {
            if let Some(n) = gguf.count(&of(key))?.filter(|&n| n != head_dim) {
                return Err(Error::Unsupported { what: format!("{what} ({n} of {head_dim})") });
            }
        }
        let shape = LayerShape::new(q_heads, kv_heads, head_dim)?;
        let above_0 = |key: &str, value: Option<f64>, otherwise: f64| match value {
            Some(n) if n <= 0.0 => Err(Error::Metadata { key: of(key), why: format!("it is {n}, not above 0") }),
            n => Ok(n.unwrap_or(otherwise)),
        };
        let base = |key: &str| above_0(key, gguf.real(&of(key))?, 10_000.0);
        let stretch = if linear { above_0("rope.scaling.factor", factor, 1.0)? } else { 1.0 };
        let rope = Rope { base: base("rope.freq_base")?, stretch, divisors: divisors(gguf, built, head_dim)? };
        let layers = count("block_count")?;
        let windows = match built {
            Architecture::Gemma3 => Some(Windows {
                visible: count("attention.sliding_window")?,
                rope: Rope::of_base(base("rope.freq_base_swa")?),
                global_every: match gguf.get(&of("attention.sliding_window_pattern")) {
                    None => GEMMA3_GLOBAL_EVERY,
                    Some(_) => count("attention.sliding_window_pattern")?,
                },
            }),
            _ => None,
        };
        // The largest model of the family has its own scale of scores, which its files do not say.
        let largest = built == Architecture::Gemma3 && layers == GEMMA3_27B_LAYERS;
        let score_dim = if largest { hidden / q_heads } else { head_dim };
        let epsilon = of("attention.layer_norm_rms_epsilon");
        let norm_epsilon = gguf.real(&epsilon)?.ok_or_else(|| absent(&epsilon))? as f32;
        if norm_epsilon < 0.0 {
            return Err(Error::Metadata { key: epsilon, why: format!("it is {norm_epsilon}, below 0") });
        }
        let vocabulary = match gguf.get("tokenizer.ggml.tokens") {
            Some(candle_core::quantized::gguf_file::Value::Array(tokens)) if !tokens.is_empty() => tokens.len(),
            _ => count("vocab_size")?,
        };
        Ok(Self {
            architecture: built,
            name: gguf.text("general.name")?.map(str::to_owned),
            layers,
            hidden,
            feed_forward: count("feed_forward_length")?,
            shape,
            vocabulary,
            context: count("context_length")?,
            norm_epsilon,
            rope,
            // Files of the llama architecture are permuted so.
            pairing: if built == Architecture::Llama { Pairing::Neighbours } else { Pairing::Halves },
            windows,
            score_scale: (score_dim as f32).sqrt().recip(),
            embedding_scale: built.embedding_scale(hidden),
        })
    }

    /// A layer as the cache is to hold it.
    pub fn layer(&self, layer: usize, scheme: Scheme) -> LayerConfig {
        LayerConfig { shape: self.shape, scheme, visible: self.attention(layer).visible }
    }

    /// What sets the attention of a layer apart.
    pub fn attention(&self, layer: usize) -> AttentionFacts {
        match &self.windows {
            Some(w) if !(layer + 1).is_multiple_of(w.global_every) => {
                AttentionFacts { visible: Some(w.visible), rope: w.rope.clone() }
            }
            _ => AttentionFacts { visible: None, rope: self.rope.clone() },
        }
    }
}

/// Of the gemma3 models each sixth layer has no window; their files do not say so.
const GEMMA3_GLOBAL_EVERY: usize = 6;
const GEMMA3_27B_LAYERS: usize = 62;

impl Architecture {
    fn embedding_scale(self, hidden: usize) -> f32 {
        if self == Self::Gemma3 { (hidden as f32).sqrt() } else { 1.0 }
    }
}

/// Llama 3's files have what frequencies are divided by as a tensor. In those of other architectures it would be a part that this
/// engine does not know: it is left to be found there.
fn divisors(gguf: &Gguf, architecture: Architecture, head_dim: usize) -> Result<Option<Arc<[f64]>>, Error> {
    const NAME: &str = "rope_freqs.weight";
    if architecture != Architecture::Llama || !gguf.has(NAME) {
        return Ok(None);
    }
    let divisors = gguf.vector(NAME, head_dim / 2)?;
    match divisors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
        Some(x) => Err(Error::Metadata { key: NAME.into(), why: format!("it divides frequencies by {x}") }),
        None => Ok(Some(divisors.into_iter().map(f64::from).collect())),
    }
}

fn absent(key: &str) -> Error {
    Error::Metadata { key: key.into(), why: "it is absent".into() }
}
