//! Models that are a shape alone, to be filled with random weights. In: a name or a text in TOML or JSON; out: checked numbers.
//! NOT here: weights (weights.rs), files of real models (source.rs).

use crate::Error;
use crate::model::rope::{Pairing, Rope};
use crate::model::{Architecture, Config};
use kvant_kv::LayerShape;
use serde::Deserialize;
use std::path::Path;

/// Shapes that have a name.
pub const PRESETS: [(&str, &str); 2] = [
    (
        "qwen3-4b",
        "architecture = 'qwen3'\nlayers = 36\nhidden = 2560\nq_heads = 32\nkv_heads = 8\nhead_dim = 128\n\
         feed_forward = 9728\nvocabulary = 151936\ntied = true\ncontext = 40960\nrope_base = 1e6\n",
    ),
    (
        "smollm2-135m",
        "architecture = 'llama'\nlayers = 30\nhidden = 576\nq_heads = 9\nkv_heads = 3\nhead_dim = 64\n\
         feed_forward = 1536\nvocabulary = 49152\ntied = true\ncontext = 8192\nrope_base = 1e5\n",
    ),
];

/// A model's numbers, and whether its head is its embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// The numbers.
    pub config: Config,
    /// Whether the head has no weights of its own.
    pub tied: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    architecture: String,
    layers: usize,
    hidden: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    feed_forward: usize,
    vocabulary: usize,
    #[serde(default = "yes")]
    tied: bool,
    #[serde(default = "context")]
    context: usize,
    #[serde(default = "rope_base")]
    rope_base: f64,
    #[serde(default = "norm_epsilon")]
    norm_epsilon: f32,
}

fn yes() -> bool {
    true
}

fn context() -> usize {
    32_768
}

fn rope_base() -> f64 {
    10_000.0
}

fn norm_epsilon() -> f32 {
    1e-6
}

/// No model has more of anything; products of these do not overflow.
const MOST: usize = 1 << 24;

impl Shape {
    /// Reads a shape: a name of [`PRESETS`], or a file in TOML or JSON.
    ///
    /// # Errors
    /// [`Error::Read`] for a file that is not there, those of [`Shape::parse`].
    pub fn load(name: &str) -> Result<Self, Error> {
        if let Some((name, text)) = PRESETS.iter().find(|(preset, _)| *preset == name) {
            return Self::parse(text, name);
        }
        let path = Path::new(name);
        let text = std::fs::read_to_string(path).map_err(|e| {
            let names = PRESETS.map(|(name, _)| name).join(", ");
            Error::Read { path: path.into(), why: format!("{e}; shapes with a name: {names}") }
        })?;
        Self::parse(&text, name)
    }

    /// Reads a shape from a text in TOML or JSON; `name` is what errors call it.
    ///
    /// # Errors
    /// [`Error::Shape`] for a text or a number that is none, [`Error::Architecture`], [`Error::CpuOnly`], [`Error::Kv`] for
    /// heads outside the attention's contract.
    pub fn parse(text: &str, name: &str) -> Result<Self, Error> {
        let no = |why: String| Error::Shape { name: name.into(), why: why.lines().next().unwrap_or_default().into() };
        let t: Text = if text.trim_start().starts_with('{') {
            serde_json::from_str(text).map_err(|e| no(e.to_string()))?
        } else {
            toml::from_str(text).map_err(|e| no(e.message().to_string()))?
        };
        let counts = [
            ("layers", t.layers),
            ("hidden", t.hidden),
            ("q_heads", t.q_heads),
            ("kv_heads", t.kv_heads),
            ("feed_forward", t.feed_forward),
            ("vocabulary", t.vocabulary),
            ("context", t.context),
        ];
        if let Some((key, n)) = counts.into_iter().find(|(_, n)| !(1..=MOST).contains(n)) {
            return Err(no(format!("`{key}` is {n}; it must be 1 to {MOST}")));
        }
        if !(t.rope_base.is_finite() && t.rope_base > 0.0 && t.norm_epsilon.is_finite() && t.norm_epsilon >= 0.0) {
            return Err(no("`rope_base` must be above 0, `norm_epsilon` 0 or more".into()));
        }
        let architecture = Architecture::of(&t.architecture).ok_or_else(|| {
            let supported = crate::model::ARCHITECTURES;
            Error::Architecture { architecture: t.architecture.clone(), supported }
        })?;
        let shape = LayerShape::new(t.q_heads, t.kv_heads, t.head_dim)?;
        let config = Config {
            architecture,
            name: Some(name.into()),
            layers: t.layers,
            hidden: t.hidden,
            feed_forward: t.feed_forward,
            shape,
            vocabulary: t.vocabulary,
            context: t.context,
            norm_epsilon: t.norm_epsilon,
            rope: Rope::of_base(t.rope_base),
            pairing: if architecture == Architecture::Llama { Pairing::Neighbours } else { Pairing::Halves },
            windows: None,
            score_scale: (t.head_dim as f32).sqrt().recip(),
            embedding_scale: 1.0,
        };
        super::check_config(&config)?;
        Ok(Self { config, tied: t.tied })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "architecture = 'qwen2'\nlayers = 2\nhidden = 64\nq_heads = 2\nkv_heads = 1\nhead_dim = 64\n\
                         feed_forward = 96\nvocabulary = 300\n";

    #[test]
    fn presets_and_both_forms_are_read() {
        for (name, _) in PRESETS {
            assert_eq!(Shape::load(name).unwrap().config.name.as_deref(), Some(name));
        }
        let qwen = Shape::load("qwen3-4b").unwrap();
        assert_eq!((qwen.config.layers, qwen.config.shape.q_heads, qwen.config.vocabulary), (36, 32, 151_936));
        assert!(qwen.tied && qwen.config.architecture.has_head_norms());
        let toml = Shape::parse(SMALL, "small").unwrap();
        let fields: Vec<String> = SMALL
            .lines()
            .map(|l| l.split_once(" = ").unwrap())
            .map(|(k, v)| format!("\"{k}\": {}", v.replace('\'', "\"")))
            .collect();
        assert_eq!(Shape::parse(&format!(" {{{}}}", fields.join(",")), "small").unwrap(), toml);
        assert_eq!(toml.config.pairing, Pairing::Halves);
    }

    #[test]
    fn what_is_no_shape_is_refused() {
        let refused =
            |change: &dyn Fn(String) -> String| Shape::parse(&change(SMALL.into()), "small").unwrap_err().to_string();
        for (from, to, said) in [
            ("layers = 2", "layers = 0", "`layers` is 0"),
            ("vocabulary = 300", "vocabulary = 99999999999", "`vocabulary`"),
            ("hidden = 64", "width = 64", "width"),
            ("head_dim = 64", "head_dim = 65", "head_dim"),
            ("qwen2", "mamba", "mamba"),
            ("qwen2", "gemma3", "CPU only"),
            ("layers = 2", "layers = -2", "invalid"),
        ] {
            let why = refused(&|text| text.replace(from, to));
            assert!(why.contains(said), "{to}: {why}");
        }
        assert!(refused(&|_| "{".into()).contains("small"));
        assert!(refused(&|text| text + "rope_base = -1.0\n").contains("rope_base"));
        assert!(Shape::load("nothing-of-this-name").unwrap_err().to_string().contains("qwen3-4b"));
    }
}
