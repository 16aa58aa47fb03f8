//! What the metadata of a model say. In: an open file; out: checked numbers.
//! NOT here: tensors (mod.rs reads those).

use crate::Error;
use crate::gguf::Gguf;
use kvant_kv::LayerShape;

/// Architectures that this engine decodes.
pub const ARCHITECTURES: &str = "llama, qwen2";

/// What a model is built like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// No biases; the rotary pairs of a head are neighbours (its GGUF files are permuted so).
    Llama,
    /// As llama with biases of q, k and v; the rotary pairs are channels of the two halves of a head.
    Qwen2,
}

impl Architecture {
    /// As files name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        }
    }

    fn of(name: &str) -> Option<Self> {
        [Self::Llama, Self::Qwen2].into_iter().find(|a| a.name() == name)
    }
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
    /// Base of the rotary frequencies.
    pub rope_base: f64,
}

impl Config {
    /// Reads and checks the metadata.
    ///
    /// # Errors
    /// [`Error::Architecture`], [`Error::Metadata`], [`Error::Unsupported`], [`Error::Kv`] for heads outside the
    /// attention's contract.
    pub fn read(gguf: &Gguf) -> Result<Self, Error> {
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
        match gguf.text(&of("rope.scaling.type"))? {
            None | Some("none") => {}
            Some(kind) => return Err(Error::Unsupported { what: format!("rotary scaling of type `{kind}`") }),
        }
        for key in ["rope.scale_linear", "rope.scaling.factor"] {
            if gguf.real(&of(key))?.is_some_and(|factor| factor != 1.0) {
                return Err(Error::Unsupported { what: format!("rotary scaling (`{}`)", of(key)) });
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
        let rope_base = gguf.real(&of("rope.freq_base"))?.unwrap_or(10_000.0);
        let epsilon = of("attention.layer_norm_rms_epsilon");
        let norm_epsilon = gguf.real(&epsilon)?.ok_or_else(|| absent(&epsilon))? as f32;
        if rope_base <= 0.0 {
            return Err(Error::Metadata { key: of("rope.freq_base"), why: format!("it is {rope_base}, not above 0") });
        }
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
            layers: count("block_count")?,
            hidden,
            feed_forward: count("feed_forward_length")?,
            shape,
            vocabulary,
            context: count("context_length")?,
            norm_epsilon,
            rope_base,
        })
    }
}

fn absent(key: &str) -> Error {
    Error::Metadata { key: key.into(), why: "it is absent".into() }
}
