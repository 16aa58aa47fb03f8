//! Which scheme each layer uses. In: a scheme, or a scheme file; out: one scheme per layer.
//! NOT here: what a scheme means (kvant-kv).
//!
//! A scheme file is TOML. `default` is the scheme of every layer not named; `[layers]` names single layers (from 0) or
//! ranges, both ends included. A layer named twice, beyond the model, or without a scheme is an error that names file
//! and line. A byte order mark at the file's start is no part of it.
//!
//! ```toml
//! default = "k4v4g64w128s4p512"
//! [layers]
//! 0 = "k8v8g64w128s4p512"
//! "28-29" = "f16"
//! ```

use crate::Error;
use kvant_kv::Scheme;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use toml::Spanned;

/// One scheme per layer. Printed as the scheme when all layers share one, else as runs of layers, both ends included:
/// `0:k8v8g64,1-29:k4v4g64w128`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schemes {
    layers: Vec<Scheme>,
}

impl Schemes {
    /// The same scheme for every layer.
    pub fn uniform(scheme: Scheme, layers: usize) -> Self {
        Self { layers: vec![scheme; layers] }
    }

    /// One per layer.
    pub fn layers(&self) -> &[Scheme] {
        &self.layers
    }

    /// These schemes, the first layer's first.
    pub fn of_layers(layers: Vec<Scheme>) -> Self {
        Self { layers }
    }
}

impl fmt::Display for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = 0;
        for run in self.layers.chunk_by(|a, b| a == b) {
            let last = first + run.len() - 1;
            if first > 0 {
                f.write_str(",")?;
            }
            match run[0] {
                scheme if run.len() == self.layers.len() => write!(f, "{scheme}")?,
                scheme if first == last => write!(f, "{first}:{scheme}")?,
                scheme => write!(f, "{first}-{last}:{scheme}")?,
            }
            first = last + 1;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    default: Option<Spanned<String>>,
    #[serde(default)]
    layers: BTreeMap<String, Spanned<String>>,
}

/// Reads a scheme (`k4v4g64w128s4p512`, `f16`, `bf16`) or, when the text ends in `.toml`, a scheme file.
///
/// # Errors
/// [`Error::Kv`] for an unknown scheme in place of a file, [`Error::Read`] and [`Error::SchemeFile`] for a file.
pub fn load_schemes(text_or_path: &str, layers: usize) -> Result<Schemes, Error> {
    let path = Path::new(text_or_path);
    if path.extension().is_none_or(|e| e != "toml") {
        let scheme: Scheme = text_or_path.parse().map_err(kvant_kv::Error::from)?;
        return Ok(Schemes::uniform(scheme, layers));
    }
    let text = std::fs::read_to_string(path).map_err(|e| Error::Read { path: path.into(), why: e.to_string() })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    parse_file(text, layers).map(Schemes::of_layers).map_err(|why| Error::SchemeFile { path: path.into(), why })
}

/// One scheme per layer from the text of a scheme file; Err says what is wrong and in which line.
fn parse_file(text: &str, layers: usize) -> Result<Vec<Scheme>, String> {
    let line = |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1;
    let at_line = |at: usize, why: &dyn fmt::Display| format!("line {}: {why}", line(at));
    let file: File = toml::from_str(text).map_err(|e| match e.span() {
        Some(span) => at_line(span.start, &e.message()),
        None => e.message().to_owned(),
    })?;
    let parse = |text: &Spanned<String>| text.get_ref().parse::<Scheme>().map_err(|e| at_line(text.span().start, &e));
    let mut schemes: Vec<Option<Scheme>> = vec![None; layers];
    for (name, text) in &file.layers {
        let scheme = parse(text)?;
        let no = |why: String| at_line(text.span().start, &why);
        let (first, last) = name.split_once('-').unwrap_or((name, name));
        let number =
            |s: &str| s.trim().parse::<usize>().map_err(|_| no(format!("`{name}` is no layer or range of layers")));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(no(format!("the range `{name}` ends before it begins")));
        }
        if last >= layers {
            return Err(no(format!("layer {last} does not exist: the model has {layers} layers, from 0")));
        }
        for (layer, slot) in schemes.iter_mut().enumerate().take(last + 1).skip(first) {
            if slot.replace(scheme).is_some() {
                return Err(no(format!("layer {layer} is named twice")));
            }
        }
    }
    let default = file.default.as_ref().map(parse).transpose()?;
    schemes
        .into_iter()
        .enumerate()
        .map(|(layer, s)| s.or(default).ok_or_else(|| format!("layer {layer} has no scheme and there is no default")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_name_layers_and_ranges() {
        let text = "default = \"k4v4g64\"\n[layers]\n0 = \"f16\"\n\"2-3\" = \"k8v8g64\"\n";
        let texts: Vec<String> = parse_file(text, 5).unwrap().iter().map(|s| s.to_string()).collect();
        assert_eq!(texts, ["f16", "k4v4g64", "k8v8g64", "k8v8g64", "k4v4g64"]);
    }

    #[test]
    fn schemes_print_as_one_or_as_runs_of_layers() {
        let text = |file: &str| Schemes::of_layers(parse_file(file, 5).unwrap()).to_string();
        assert_eq!(text("default = \"k4v4g64w0\"\n[layers]\n2 = \"k4v4g64s0\""), "k4v4g64");
        let file = "default = \"k4v4g64\"\n[layers]\n0 = \"k8v8g64w128\"\n3 = \"f16\"\n4 = \"bf16\"";
        assert_eq!(text(file), "0:k8v8g64w128,1-2:k4v4g64,3:f16,4:bf16");
    }

    #[test]
    fn bad_files_say_what_is_wrong() {
        for (text, start, part) in [
            ("[layers]\n0 = \"f16\"", "layer 1 has no scheme", ""),
            ("\n\ndefault = \"k5v4g64\"", "line 3: unknown scheme `k5v4g64`", "key bits"),
            ("[layers]\n0 = \"f16\"\n1 = \"k4v4\"", "line 3: unknown scheme `k4v4`", ""),
            ("default = \"f16\"\n[layers]\n9 = \"f16\"", "line 3: layer 9 does not exist", ""),
            ("default = \"f16\"\n[layers]\n\"1-0\" = \"f16\"", "line 3: ", "ends before it begins"),
            ("default = \"f16\"\n[layers]\n\"0-1\" = \"f16\"\n1 = \"f16\"", "line 4: layer 1 is named twice", ""),
            ("default = \"f16\"\n[layers]\nx = \"f16\"", "line 3: `x` is no layer", ""),
            ("defualt = \"f16\"", "line 1: unknown field", "`defualt`"),
            ("default = 7", "line 1: invalid type", ""),
            ("# schemes\ndefault = ", "line 2: ", ""),
        ] {
            let e = parse_file(text, 2).unwrap_err();
            assert!(e.starts_with(start) && e.contains(part), "{text:?}: {e}");
        }
    }

    #[test]
    fn a_text_is_a_scheme_and_a_toml_name_a_file() {
        assert_eq!(load_schemes("k4v4g64w0", 3).unwrap().to_string(), "k4v4g64");
        assert!(matches!(load_schemes("k9v4g64", 3), Err(Error::Kv(_))));
        assert!(matches!(load_schemes("/nowhere/schemes.toml", 3), Err(Error::Read { .. })));
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        let name = file.path().to_str().unwrap();
        std::fs::write(file.path(), "\u{feff}default = \"k4v4g64\"\n").unwrap();
        assert_eq!(load_schemes(name, 3).unwrap().to_string(), "k4v4g64");
        std::fs::write(file.path(), "default = \"k4v4\"").unwrap();
        let e = load_schemes(name, 3).unwrap_err().to_string();
        assert!(e.contains(name) && e.contains("line 1"), "{e}");
    }
}
