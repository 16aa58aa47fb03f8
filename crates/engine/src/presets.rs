//! Schemes with a name. In: nothing; out: name, scheme text, what it is for. What each costs is in docs/accuracy.md, measured.
//! NOT here: what the parts of a scheme mean (kvant-kv, schemes.rs).

/// One preset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preset {
    /// What `--kv` calls it.
    pub name: &'static str,
    /// The scheme that it stands for, for any model.
    pub scheme: &'static str,
    /// For whom.
    pub what: &'static str,
}

/// Name of the preset that is used where nothing is said.
pub const DEFAULT: &str = PRESETS[1].name;

/// Every preset, the most exact first. All keep 4 sinks, a window of 128 and pages of 512. None rotates keys: what helps a model
/// a little ruins another (docs/decisions/0012-schemes-by-error.md).
pub const PRESETS: [Preset; 3] = [
    Preset { name: "safe", scheme: "k8v8g64w128s4p512", what: "answers as with f16 in half the memory" },
    Preset {
        name: "balanced",
        scheme: "k4v4g64w128s4p512.rotv",
        what: "less than a third of the memory, hardly a different answer",
    },
    Preset {
        name: "small",
        scheme: "k3v2g64w128s4p512.ls.rotv",
        what: "about a fifth of the memory, answers that differ; a tuned scheme file of the same size differs less",
    },
];

/// The preset of that name.
pub fn find(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schemes::parse_layer;

    #[test]
    fn presets_are_schemes_with_sinks_and_pages() {
        for preset in PRESETS {
            let (scheme, _) = parse_layer(preset.scheme).unwrap();
            let packed = scheme.packed().unwrap();
            assert!(packed.sinks() == 4 && packed.page_len() == 512, "{preset:?}");
            assert_eq!(parse_layer(preset.name).unwrap(), parse_layer(preset.scheme).unwrap());
        }
        assert_eq!(DEFAULT, "balanced");
    }
}
