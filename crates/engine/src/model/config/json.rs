//! What config.json says. In: an open folder; out: checked numbers, or what of it this engine does not do.
//! Both forms are read: rotary embedding as `rope_parameters`, and as `rope_theta` and `rope_scaling` before that.
//! NOT here: tensors (folder.rs), GGUF metadata (../config.rs).

use super::{Activation, Architecture, Config, GEMMA3_GLOBAL_EVERY, Windows};
use crate::Error;
use crate::folder::Folder;
use crate::model::rope::{Llama3, Pairing, Rope};
use kvant_kv::LayerShape;
use serde_json::{Map, Value};

/// Entries of a JSON object; null counts as absent.
struct Entries<'a>(&'a Map<String, Value>);

impl<'a> Entries<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    fn wrong(key: &str, wanted: &str, got: &Value) -> Error {
        let got: String = got.to_string().chars().take(60).collect();
        Error::Metadata { key: key.into(), why: format!("expected {wanted}, got {got}") }
    }

    /// A whole number from 1 to 2^31, when there is one.
    fn count(&self, key: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if (1..=1 << 31).contains(&n) => Ok(Some(n as usize)),
            _ => Err(Self::wrong(key, "a whole number from 1 to 2^31", value)),
        }
    }

    fn needed(&self, key: &str) -> Result<usize, Error> {
        self.count(key)?.ok_or_else(|| super::absent(key))
    }

    /// A number above 0, or this one.
    fn above_0(&self, key: &str, otherwise: f64) -> Result<f64, Error> {
        match self.get(key) {
            None => Ok(otherwise),
            Some(v) => {
                v.as_f64().filter(|x| x.is_finite() && *x > 0.0).ok_or_else(|| Self::wrong(key, "a number above 0", v))
            }
        }
    }

    fn flag(&self, key: &str) -> Result<bool, Error> {
        match self.get(key) {
            None => Ok(false),
            Some(v) => v.as_bool().ok_or_else(|| Self::wrong(key, "true or false", v)),
        }
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| Self::wrong(key, "text", v)),
        }
    }

    fn object(&self, key: &str) -> Result<Option<Entries<'a>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(o)) => Ok(Some(Entries(o))),
            Some(v) => Err(Self::wrong(key, "an object", v)),
        }
    }

    /// A number above 0 that has to be there.
    fn needed_above_0(&self, key: &str) -> Result<f64, Error> {
        if self.get(key).is_none() { Err(super::absent(key)) } else { self.above_0(key, 1.0) }
    }

    /// The rotary embedding that this object describes.
    fn rope(&self, base: f64, head_dim: usize) -> Result<Rope, Error> {
        let base = self.above_0("rope_theta", base)?;
        if self.above_0("partial_rotary_factor", 1.0)? != 1.0 {
            return Err(unsupported("rotary embedding of a part of each head (`partial_rotary_factor`)"));
        }
        match self.text("rope_type")?.or(self.text("type")?) {
            None | Some("default") => Ok(Rope::of_base(base)),
            Some("linear") => Ok(Rope { stretch: self.needed_above_0("factor")?, ..Rope::of_base(base) }),
            Some("llama3") => {
                let by = Llama3 {
                    factor: self.needed_above_0("factor")?,
                    low: self.needed_above_0("low_freq_factor")?,
                    high: self.needed_above_0("high_freq_factor")?,
                    trained: self.needed("original_max_position_embeddings")? as f64,
                };
                if by.low >= by.high {
                    let why = format!("it is {}, not above `low_freq_factor` ({})", by.high, by.low);
                    return Err(Error::Metadata { key: "high_freq_factor".into(), why });
                }
                Ok(Rope::llama3(base, head_dim, by))
            }
            Some(kind) => Err(unsupported(&format!("rotary scaling of type `{kind}`"))),
        }
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported { what: what.into() }
}

/// Switches that change what a model computes, when they are on.
const SWITCHES: [(&str, &str); 4] = [
    ("mlp_bias", "biases of the feed-forward part"),
    ("use_sliding_window", "a window of keys in some layers"),
    ("use_bidirectional_attention", "attention to later tokens"),
    ("attention_bias", "biases of attention"),
];
/// Entries that change what a model computes, when they are there.
const PRESENT: [(&str, &str); 4] = [
    ("attn_logit_softcapping", "a cap of attention scores"),
    ("final_logit_softcapping", "a cap of logits"),
    ("quantization_config", "quantized weights"),
    ("num_experts", "a mixture of experts"),
];

impl Config {
    /// Reads and checks config.json.
    ///
    /// # Errors
    /// [`Error::Metadata`], [`Error::Unsupported`] for anything that would be decoded wrong, [`Error::Kv`] for heads outside
    /// the attention's contract.
    pub fn of_folder(folder: &Folder) -> Result<Self, Error> {
        let (all, built) = (Entries(folder.config()), folder.architecture());
        let gemma = built == Architecture::Gemma3;
        for (key, what) in SWITCHES {
            if all.flag(key)? && !(key == "attention_bias" && built.has_biases()) {
                return Err(unsupported(&format!("{what} (`{key}`)")));
            }
        }
        for (key, what) in PRESENT {
            if all.get(key).is_some() {
                return Err(unsupported(&format!("{what} (`{key}`)")));
            }
        }
        let bends = match built.activation() {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu_pytorch_tanh",
        };
        for key in ["hidden_act", "hidden_activation"] {
            // gemma3's older files have both, and only the second one counts.
            if let Some(other) = all.text(key)?.filter(|&a| a != bends && !(gemma && key == "hidden_act")) {
                return Err(unsupported(&format!("activation `{other}` (`{key}`)")));
            }
        }
        let (hidden, q_heads) = (all.needed("hidden_size")?, all.needed("num_attention_heads")?);
        let head_dim = match (all.count("head_dim")?, built) {
            (Some(n), _) => n,
            (None, Architecture::Qwen3) => 128,
            (None, Architecture::Gemma3) => 256,
            (None, _) if hidden.is_multiple_of(q_heads) => hidden / q_heads,
            (None, _) => {
                let why = format!("{q_heads} heads do not divide {hidden} channels");
                return Err(Error::Metadata { key: "num_attention_heads".into(), why });
            }
        };
        let shape = LayerShape::new(q_heads, all.count("num_key_value_heads")?.unwrap_or(q_heads), head_dim)?;
        let layers = all.needed("num_hidden_layers")?;
        let (global_base, local_base) = if gemma { (1e6, 10_000.0) } else { (10_000.0, 10_000.0) };
        // Rotary embeddings of layers without and with a window.
        let (rope, local_rope) = match all.object("rope_parameters")? {
            Some(kinds) if gemma => {
                let of = |kind: &str, base: f64| {
                    kinds.object(kind)?.map_or(Entries(&Map::new()).rope(base, head_dim), |k| k.rope(base, head_dim))
                };
                (of("full_attention", global_base)?, of("sliding_attention", local_base)?)
            }
            Some(rope) => (rope.rope(global_base, head_dim)?, Rope::of_base(local_base)),
            None => {
                let base = all.above_0("rope_theta", global_base)?;
                let local = Rope::of_base(all.above_0("rope_local_base_freq", local_base)?);
                match all.object("rope_scaling")? {
                    Some(scaling) => (scaling.rope(base, head_dim)?, local),
                    None => (all.rope(base, head_dim)?, local),
                }
            }
        };
        let windows = match gemma {
            true => windows(&all, layers, local_rope)?,
            false if layer_kinds(&all, layers)?.is_some_and(|kinds| kinds.contains(&true)) => {
                return Err(unsupported("a window of keys in some layers (`layer_types`)"));
            }
            false => None,
        };
        let score_dim = if gemma { all.above_0("query_pre_attn_scalar", 256.0)? } else { head_dim as f64 };
        Ok(Self {
            architecture: built,
            name: folder.path().file_name().map(|n| n.to_string_lossy().into_owned()),
            layers,
            hidden,
            feed_forward: all.needed("intermediate_size")?,
            shape,
            vocabulary: all.needed("vocab_size")?,
            context: all.needed("max_position_embeddings")?,
            norm_epsilon: all.above_0("rms_norm_eps", 1e-6)? as f32,
            rope,
            pairing: Pairing::Halves,
            windows,
            score_scale: score_dim.sqrt().recip() as f32,
            embedding_scale: built.embedding_scale(hidden),
        })
    }
}

/// Of each layer whether it has a window, when the file lists them.
fn layer_kinds(all: &Entries<'_>, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    const KEY: &str = "layer_types";
    let Some(list) = all.get(KEY) else { return Ok(None) };
    let kinds = list.as_array().filter(|kinds| kinds.len() == layers);
    let kinds = kinds.ok_or_else(|| Entries::wrong(KEY, "one entry per layer", list))?;
    let kind = |kind: &Value| match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(unsupported(&format!("a layer of type {kind} (`{KEY}`)"))),
    };
    kinds.iter().map(kind).collect::<Result<_, _>>().map(Some)
}

fn windows(all: &Entries<'_>, layers: usize, rope: Rope) -> Result<Option<Windows>, Error> {
    let visible = all.needed("sliding_window")?;
    let global_every = match layer_kinds(all, layers)? {
        None => match all.count("sliding_window_pattern")? {
            Some(every) => every,
            None => all.count("_sliding_window_pattern")?.unwrap_or(GEMMA3_GLOBAL_EVERY),
        },
        Some(kinds) => {
            // Without a layer that sees everything, any number beyond the layers says so.
            let every = kinds.iter().position(|windowed| !windowed).map_or(layers + 1, |first| first + 1);
            if let Some(i) = (0..layers).find(|&i| kinds[i] == (i + 1).is_multiple_of(every)) {
                let why = format!("layer {i} breaks the pattern that each layer of number {every} sees all keys");
                return Err(Error::Metadata { key: "layer_types".into(), why });
            }
            every
        }
    };
    Ok(Some(Windows { visible, rope, global_every }))
}
