//! Which scheme each layer uses. In: a scheme, or a scheme file; out: one scheme per layer.
//! NOT here: what a scheme means (kvant-kv).
//!
//! A scheme file is TOML. `default` is the scheme of every layer not named; `[layers]` names single layers (from 0) or
//! ranges, both ends included. A layer named twice, beyond the model, or without a scheme is an error that names file
//! and line. A byte order mark at the file's start is no part of it.
//!
//! ```toml
//! default = "k4v4g64w128s4p512"
//! codebooks = "NAME.safetensors"
//! [layers]
//! 0 = "k8v8g64w128s4p512"
//! 1 = "k2l8v3g64w128s4p512.mse.rotv"
//! "28-29" = "f16"
//! [loud]
//! 1 = [[3, 8, 9, 20, 21, 40, 52, 63], [0, 1, 2, 3, 30, 31, 62, 63]]
//! ```
//!
//! Behind a packed scheme's own text `.rotk` rotates keys and queries, `.rotv` values (model/basis.rs). `[loud]` names, for a
//! layer of a scheme with loud channels, which these are: one list per kv head. Codecs that want a rotation (tq, rvq, sb) bring
//! their own, with random signs, and keys of sub-vectors (vq) theirs; it is no part of the text, and `.rotk` or `.rotv` behind
//! such a tensor is an error, as is `.rotv` behind values of sub-vectors, which are not turned. `codebooks` names a file,
//! relative to this one, with the centroids of sub-vectors (codebooks.rs). `kvant tune` writes such files.

use crate::Error;
use crate::codebooks::{self, LayerBooks};
use crate::model::{Basis, Turn, order_with_first};
use crate::presets;
use kvant_kv::{Cache, Codec, LayerShape, Scheme};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use toml::Spanned;

/// One scheme and basis per layer. Printed as the scheme when all layers share one, else as runs of layers, both ends
/// included: `0:k8v8g64,1-29:k4v4g64w128`.
#[derive(Debug, Clone, PartialEq)]
pub struct Schemes {
    layers: Vec<Scheme>,
    bases: Vec<Basis>,
    /// Of layers with sub-vectors, where somebody learned them.
    books: Vec<Option<Arc<LayerBooks>>>,
}

impl Schemes {
    /// The same scheme for every layer.
    pub fn uniform(scheme: Scheme, layers: usize) -> Self {
        Self::of_layers(vec![scheme; layers])
    }

    /// These schemes, the first layer's first, each in the basis that its codecs want.
    pub fn of_layers(layers: Vec<Scheme>) -> Self {
        Self::of_parts(layers.into_iter().map(|scheme| (scheme, implied(&scheme))).collect())
    }

    /// These schemes and bases, the first layer's first.
    pub fn of_parts(parts: Vec<(Scheme, Basis)>) -> Self {
        let books = vec![None; parts.len()];
        let (layers, bases) = parts.into_iter().unzip();
        Self { layers, bases, books }
    }

    /// The same with codebooks, the first layer's first, and with the smoothing that they were learned under.
    pub fn with_codebooks(mut self, books: Vec<Option<Arc<LayerBooks>>>) -> Self {
        for (basis, books) in self.bases.iter_mut().zip(&books) {
            basis.smooth = books.as_ref().filter(|b| !b.smooth.is_empty()).map(|b| b.smooth.clone().into());
        }
        self.books = books;
        self.books.resize(self.layers.len(), None);
        self
    }

    /// One per layer: its codebooks, where it has any.
    pub fn codebooks(&self) -> &[Option<Arc<LayerBooks>>] {
        &self.books
    }

    /// One per layer.
    pub fn layers(&self) -> &[Scheme] {
        &self.layers
    }

    /// One per layer: what its keys and values are turned into before they are stored.
    pub fn bases(&self) -> &[Basis] {
        &self.bases
    }

    /// A layer as a scheme's text, with its rotations.
    pub fn text(&self, layer: usize) -> String {
        text_of(&self.layers[layer], &self.bases[layer])
    }

    /// Whether a model whose layers have this shape can decode with them: loud channels are named, codebooks are there.
    ///
    /// # Errors
    /// [`Error::Loud`] and [`Error::NoCodebooks`] name the first layer where they are not.
    pub fn check(&self, shape: &LayerShape) -> Result<(), Error> {
        self.check_loud(shape)?;
        for (layer, scheme) in self.layers.iter().enumerate() {
            let Some(packed) = scheme.packed().filter(|p| [p.k(), p.v()].iter().any(Codec::wants_codebooks)) else {
                continue;
            };
            let none = || "nothing says what the centroids of its sub-vectors are".to_string();
            let checked = self.books[layer].as_ref().ok_or_else(none).and_then(|books| books.check(packed, shape));
            checked.map_err(|why| Error::NoCodebooks { layer, scheme: self.text(layer), why })?;
        }
        Ok(())
    }

    /// Gives a new cache of these schemes its codebooks.
    pub(crate) fn give_codebooks(&self, cache: &mut Cache) -> Result<(), Error> {
        for (layer, books) in self.books.iter().enumerate() {
            if let Some(books) = books {
                cache.set_codebooks(layer, books.keys.clone(), books.values.clone())?;
            }
        }
        Ok(())
    }

    /// Whether loud channels are named where there are any, as many as each scheme has, for layers of this shape.
    ///
    /// # Errors
    /// [`Error::Loud`] names the first layer where they are not.
    pub fn check_loud(&self, shape: &LayerShape) -> Result<(), Error> {
        for (layer, (scheme, basis)) in self.layers.iter().zip(&self.bases).enumerate() {
            let no = |why: String| Err(Error::Loud { layer, scheme: self.text(layer), why });
            let expected = scheme.packed().map_or(0, |p| p.loud_channels(shape.head_dim));
            match &basis.key_order {
                None if expected > 0 => {
                    return no(format!("nothing says which {expected} channels of each head are loud"));
                }
                Some(orders) if orders.len() != shape.kv_heads => {
                    return no(format!("there are {} lists of channels for {} kv heads", orders.len(), shape.kv_heads));
                }
                Some(orders) => {
                    if let Some(order) = orders.iter().find(|order| order.len() != expected) {
                        return no(format!("{} channels are listed, the scheme has {expected}", order.len()));
                    }
                    if let Some(channel) = orders.iter().flatten().find(|&&c| usize::from(c) >= shape.head_dim) {
                        return no(format!("there is no channel {channel} of {}", shape.head_dim));
                    }
                }
                None => {}
            }
        }
        Ok(())
    }

    /// The bases for layers of this shape: lists of loud channels completed to orders of all channels. Checked before.
    pub fn complete_bases(&self, shape: &LayerShape) -> Vec<Basis> {
        let complete = |basis: &Basis| {
            let orders = basis.key_order.as_ref().map(|orders| {
                orders.iter().map(|first| order_with_first(first, shape.head_dim)).collect::<Vec<_>>().into()
            });
            Basis { key_order: orders, ..basis.clone() }
        };
        self.bases.iter().map(complete).collect()
    }
}

/// A scheme's text with its rotations, but for those that its codecs bring.
fn text_of(scheme: &Scheme, basis: &Basis) -> String {
    let own = implied(scheme);
    let rotations = [(basis.keys, own.keys, ROTATE_K), (basis.values, own.values, ROTATE_V)];
    let named =
        rotations.into_iter().filter(|(turn, own, _)| *turn == Turn::Plain && turn != own).map(|(.., name)| name);
    std::iter::once(scheme.to_string()).chain(named.map(str::to_string)).collect()
}

/// The basis that a scheme's codecs want.
fn implied(scheme: &Scheme) -> Basis {
    let Some(packed) = scheme.packed() else { return Basis::default() };
    let turn = |codec: Codec| if codec.wants_rotation() { Turn::Signed } else { Turn::None };
    // Channels of smoothed keys are mixed by the rotation that their centroids were learned under; values have no outliers to
    // spread.
    let keys = if packed.k().wants_codebooks() { Turn::Plain } else { turn(packed.k()) };
    Basis { keys, values: turn(packed.v()), ..Basis::default() }
}

/// What follows a scheme's text when keys and queries are rotated.
const ROTATE_K: &str = ".rotk";
/// What follows it when values are.
const ROTATE_V: &str = ".rotv";

/// A scheme and its rotations from text such as `k4v4g64w128s4.mse.rotk.rotv`, or a preset's name.
///
/// # Errors
/// [`kvant_kv::SchemeError`].
pub fn parse_layer(text: &str) -> Result<(Scheme, Basis), kvant_kv::SchemeError> {
    let text = presets::find(text).map_or(text, |preset| preset.scheme);
    let (rest, rotate_v) = text.strip_suffix(ROTATE_V).map_or((text, false), |rest| (rest, true));
    let (rest, rotate_k) = rest.strip_suffix(ROTATE_K).map_or((rest, false), |rest| (rest, true));
    let named = |e: kvant_kv::SchemeError| kvant_kv::SchemeError { text: text.to_string(), ..e };
    let no = |why: String| Err(kvant_kv::SchemeError { text: text.to_string(), why });
    let scheme: Scheme = rest.parse().map_err(named)?;
    let mut basis = implied(&scheme);
    let Some(packed) = scheme.packed() else {
        return match rotate_k || rotate_v {
            true => no(format!("{scheme} packs nothing, so there is nothing to rotate it for")),
            false => Ok((scheme, basis)),
        };
    };
    for (asked, suffix, name, codec, turn) in [
        (rotate_k, ROTATE_K, "keys", packed.k(), &mut basis.keys),
        (rotate_v, ROTATE_V, "values", packed.v(), &mut basis.values),
    ] {
        if asked && codec.as_affine().is_none() {
            let how = if *turn == Turn::None { "are never rotated" } else { "are rotated anyway" };
            return no(format!("{name} of {codec} {how}, so leave {suffix} out"));
        }
        if asked {
            *turn = Turn::Plain;
        }
    }
    Ok((scheme, basis))
}

impl fmt::Display for Schemes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = (0..self.layers.len()).map(|layer| self.text(layer)).collect();
        let mut first = 0;
        for run in texts.chunk_by(|a, b| a == b) {
            let last = first + run.len() - 1;
            if first > 0 {
                f.write_str(",")?;
            }
            match &run[0] {
                scheme if run.len() == texts.len() => write!(f, "{scheme}")?,
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
    codebooks: Option<Spanned<PathBuf>>,
    #[serde(default)]
    layers: BTreeMap<String, Spanned<String>>,
    #[serde(default)]
    loud: BTreeMap<String, Spanned<Vec<Vec<u16>>>>,
}

/// Reads a scheme (`k4v4g64w128s4p512`, `k4v4g64.mse.rotv`, `f16`, `bf16`), a preset (`balanced`) or, when the text ends in
/// `.toml`, a scheme file.
///
/// # Errors
/// [`Error::Kv`] for an unknown scheme in place of a file, [`Error::Read`] and [`Error::SchemeFile`] for a file,
/// [`Error::Codebooks`] for that of its codebooks.
pub fn load_schemes(text_or_path: &str, layers: usize) -> Result<Schemes, Error> {
    if !is_file(text_or_path) {
        let layer = parse_layer(text_or_path).map_err(kvant_kv::Error::from)?;
        return Ok(Schemes::of_parts(vec![layer; layers]));
    }
    let path = Path::new(text_or_path);
    let text = read(path)?;
    let (parts, books) = parse_file(&text, layers).map_err(|why| Error::SchemeFile { path: path.into(), why })?;
    let schemes = Schemes::of_parts(parts);
    let Some(books) = books else { return Ok(schemes) };
    let folder = path.parent().unwrap_or(Path::new(""));
    let books = codebooks::read(&folder.join(books), schemes.layers())?;
    Ok(schemes.with_codebooks(books))
}

/// Files that a scheme on the command line is read from: a scheme file, and the codebooks it names. None for other texts; a file
/// that cannot be read names nothing.
pub fn files_of(text_or_path: &str) -> Vec<PathBuf> {
    if !is_file(text_or_path) {
        return Vec::new();
    }
    let path = Path::new(text_or_path);
    let named = read(path).ok().and_then(|text| toml::from_str::<File>(&text).ok()).and_then(|file| file.codebooks);
    let folder = path.parent().unwrap_or(Path::new(""));
    std::iter::once(path.into()).chain(named.map(|books| folder.join(books.into_inner()))).collect()
}

/// Whether what was given names a scheme file.
pub fn is_file(text_or_path: &str) -> bool {
    Path::new(text_or_path).extension().is_some_and(|e| e == "toml")
}

/// Layers that a scheme file without `default` names: as many as the model it was written for has.
///
/// # Errors
/// [`Error::Read`] and [`Error::SchemeFile`], also when it names none, or has a default for who knows how many.
pub fn layers_named(path: &Path) -> Result<usize, Error> {
    let no = |why: String| Error::SchemeFile { path: path.into(), why };
    let file: File = toml::from_str(&read(path)?).map_err(|e| no(e.message().to_owned()))?;
    let last = file.layers.keys().filter_map(|name| name.rsplit('-').next()?.trim().parse::<usize>().ok()).max();
    if file.default.is_some() {
        return Err(no("it has a `default`, so nothing says how many layers there are: name each".into()));
    }
    match last {
        None => Err(no("it names no layers, so nothing says how many there are".into())),
        Some(last) if last >= MOST_LAYERS => {
            Err(no(format!("it names layer {last}, and no model has more than {MOST_LAYERS} layers")))
        }
        Some(last) => Ok(last + 1),
    }
}

/// More layers than any model has: a number beyond is a typing error, and would be memory.
const MOST_LAYERS: usize = 1024;

/// Bytes of a scheme file, at most: a line for each of 1,024 layers and lists of loud channels take far less.
const MOST_BYTES: u64 = 16 << 20;

fn read(path: &Path) -> Result<String, Error> {
    let no = |why: String| Error::Read { path: path.into(), why };
    // Opening a pipe would wait for whoever writes it.
    let kind = std::fs::metadata(path).map_err(|e| no(e.to_string()))?;
    if !kind.is_file() {
        return Err(no("it is not a regular file".into()));
    }
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|e| no(e.to_string()))?;
    file.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(|e| no(e.to_string()))?;
    if text.len() as u64 > MOST_BYTES {
        return Err(no(format!("it is larger than {} MiB, and no scheme file is", MOST_BYTES >> 20)));
    }
    Ok(text.strip_prefix('\u{feff}').unwrap_or(&text).to_owned())
}

/// How a layer stores tokens, and what it turns them into before.
type Layer = (Scheme, Basis);

/// One of these per layer from the text of a scheme file, and where its codebooks lie; Err says what is wrong and in which
/// line.
fn parse_file(text: &str, layers: usize) -> Result<(Vec<Layer>, Option<PathBuf>), String> {
    let line = |at: usize| text.as_bytes()[..at.min(text.len())].iter().filter(|&&b| b == b'\n').count() + 1;
    let at_line = |at: usize, why: &dyn fmt::Display| format!("line {}: {why}", line(at));
    let file: File = toml::from_str(text).map_err(|e| match e.span() {
        Some(span) => at_line(span.start, &e.message()),
        None => e.message().to_owned(),
    })?;
    let parse = |text: &Spanned<String>| parse_layer(text.get_ref()).map_err(|e| at_line(text.span().start, &e));
    let mut schemes: Vec<Option<Layer>> = vec![None; layers];
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
            if slot.replace(scheme.clone()).is_some() {
                return Err(no(format!("layer {layer} is named twice")));
            }
        }
    }
    let default = file.default.as_ref().map(parse).transpose()?;
    let mut schemes = schemes
        .into_iter()
        .enumerate()
        .map(|(layer, s)| {
            s.or(default.clone()).ok_or_else(|| format!("layer {layer} has no scheme and there is no default"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let vectors =
        |(scheme, _): &Layer| scheme.packed().is_some_and(|p| [p.k(), p.v()].iter().any(Codec::wants_codebooks));
    if let Some(books) = file.codebooks.as_ref().filter(|_| !schemes.iter().any(vectors)) {
        return Err(at_line(books.span().start, &"codebooks are named, and no layer has sub-vectors (vq)"));
    }
    for (name, lists) in file.loud {
        let no = |why: String| at_line(lists.span().start, &why);
        let layer = name.trim().parse::<usize>().map_err(|_| no(format!("`{name}` is no layer")))?;
        let Some((scheme, basis)) = schemes.get_mut(layer) else {
            return Err(no(format!("layer {layer} does not exist: the model has {layers} layers, from 0")));
        };
        if scheme.packed().is_none_or(|p| p.loud() == 0) {
            return Err(no(format!("layer {layer} has scheme {scheme}, which has no loud channels")));
        }
        for list in lists.get_ref() {
            let mut seen = std::collections::BTreeSet::new();
            if let Some(twice) = list.iter().find(|&&channel| !seen.insert(channel)) {
                return Err(no(format!("channel {twice} of layer {layer} is listed twice")));
            }
        }
        if basis.key_order.replace(lists.get_ref().clone().into()).is_some() {
            return Err(no(format!("layer {layer} is named twice")));
        }
    }
    Ok((schemes, file.codebooks.map(Spanned::into_inner)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str, layers: usize) -> Vec<(Scheme, Basis)> {
        parse_file(text, layers).unwrap().0
    }

    #[test]
    fn files_name_layers_and_ranges() {
        let text = "default = \"k4v4g64\"\n[layers]\n0 = \"f16\"\n\"2-3\" = \"k8v8g64\"\n";
        let texts: Vec<String> = parts(text, 5).iter().map(|(s, _)| s.to_string()).collect();
        assert_eq!(texts, ["f16", "k4v4g64", "k8v8g64", "k8v8g64", "k4v4g64"]);
    }

    #[test]
    fn schemes_print_as_one_or_as_runs_of_layers() {
        let text = |file: &str| Schemes::of_parts(parts(file, 5)).to_string();
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
            ("default = \"f16.rotv\"", "line 1: unknown scheme `f16.rotv`", "nothing to rotate"),
            ("default = \"k4v4g64.rotv.rotk\"", "line 1: unknown scheme `k4v4g64.rotv.rotk`", "`.rotv`"),
            ("default = \"k4v4g64\"\ncodebooks = \"x\"", "line 2: codebooks are named", "no layer has sub-vectors"),
            ("default = \"k4v4g64\"\n[loud]\n0 = [[1]]", "line 3: layer 0 has scheme k4v4g64, which has no", ""),
            ("default = \"k2l8v2g64\"\n[loud]\n0 = [[1]]\n\"00\" = [[2]]", "line 4: layer 0 is named twice", ""),
            ("default = \"k2l8v2g64\"\n[loud]\n2 = [[1]]", "line 3: layer 2 does not exist", ""),
            ("default = \"k2l8v2g64\"\n[loud]\n1 = [[1, 2, 1]]", "line 3: channel 1 of layer 1 is listed twice", ""),
        ] {
            let e = parse_file(text, 2).unwrap_err();
            assert!(e.starts_with(start) && e.contains(part), "{text:?}: {e}");
        }
    }

    #[test]
    fn codecs_bring_their_rotations_and_text_does_not_show_them() {
        use Turn::{None, Plain, Signed};
        for (text, keys, values) in [
            ("ktq3vtq2g64w128s4p512", Signed, Signed),
            ("krvq22v4g64", Signed, None),
            ("krvq22v4g64.rotv", Signed, Plain),
            ("k4vsb1g64", None, Signed),
            ("k4vsb1g64.rotk", Plain, Signed),
            ("kvq256x4vvq16x8g64", Plain, None),
            ("k4v4g64.mse.rotk.rotv", Plain, Plain),
            ("k4v4g64", None, None),
        ] {
            let (scheme, basis) = parse_layer(text).unwrap();
            assert_eq!((basis.keys, basis.values), (keys, values), "{text}");
            assert_eq!(text_of(&scheme, &basis), text);
            if !text.contains(".rot") {
                assert_eq!(Schemes::uniform(scheme, 1).bases()[0], basis, "{text}");
            }
        }
        for (text, part) in [
            ("ktq3v4g64.rotk", "keys of tq3 are rotated anyway, so leave .rotk out"),
            ("k4vrvq11g64.rotk.rotv", "values of rvq11 are rotated anyway"),
            ("kvq16x4v4g64.rotk", "keys of vq16x4 are rotated anyway"),
            ("k4vvq16x4g64.rotv", "values of vq16x4 are never rotated, so leave .rotv out"),
        ] {
            let e = parse_layer(text).unwrap_err().to_string();
            assert!(e.contains(part) && e.contains(text), "{e}");
        }
    }

    #[test]
    fn sub_vectors_without_codebooks_are_no_scheme_to_decode_with() {
        let shape = LayerShape::new(4, 2, 64).unwrap();
        let schemes = Schemes::of_parts(parts("default = \"k4v4g64\"\n[layers]\n1 = \"k4vvq16x8g64\"", 2));
        let e = schemes.check(&shape).unwrap_err();
        assert!(matches!(e, Error::NoCodebooks { layer: 1, .. }), "{e}");
        assert!(e.to_string().contains("layer 1 has scheme k4vvq16x8g64: nothing says"), "{e}");
        let folder = tempfile::tempdir().unwrap();
        let (file, books) = (folder.path().join("a.toml"), folder.path().join("b.safetensors"));
        std::fs::write(&file, "codebooks = \"b.safetensors\"\n[layers]\n0 = \"k4v4g64\"\n1 = \"k4vvq16x8g64\"\n")
            .unwrap();
        let load = || load_schemes(file.to_str().unwrap(), 2);
        let e = load().unwrap_err().to_string();
        assert!(e.contains(books.to_str().unwrap()), "{e}");
        let rows: Vec<f32> = (0..64 * 64).map(|i| (i as f32 * 0.71).sin()).collect();
        let book = kvant_kv::Codebook::train(64, 16, 8, &rows, 3, 1).unwrap();
        let of_heads = |n| Arc::new(LayerBooks { values: vec![book.clone(); n], ..LayerBooks::default() });
        for (heads, fits) in [(2, true), (1, false)] {
            std::fs::write(&books, codebooks::file_bytes(&[None, Some(of_heads(heads))]).unwrap()).unwrap();
            let schemes = load().unwrap();
            assert_eq!(schemes.codebooks()[1], Some(of_heads(heads)));
            assert_eq!(schemes.check(&shape).is_ok(), fits);
        }
    }

    #[test]
    fn loud_channels_are_as_many_as_the_scheme_has() {
        let shape = LayerShape::new(4, 2, 64).unwrap();
        let check = |text: &str| Schemes::of_parts(parts(text, 2)).check_loud(&shape);
        let of = |lists: &str| format!("default = \"k2l8v2g64.rotv\"\n[loud]\n0 = {lists}\n1 = {lists}\n");
        let eight = "[0, 9, 2, 3, 4, 5, 6, 63]";
        let file = of(&format!("[{eight}, {eight}]"));
        check(&file).unwrap();
        let schemes = Schemes::of_parts(parts(&file, 2));
        let order = schemes.complete_bases(&shape)[1].key_order.clone().unwrap();
        assert_eq!((&order[1][..9], order[1].len()), (&[0, 2, 3, 4, 5, 6, 9, 63, 1][..], 64));
        assert_eq!(schemes.to_string(), "k2l8v2g64.rotv");
        for (file, part) in [
            ("default = \"k2l8v2g64.rotv\"".to_string(), "nothing says which 8 channels"),
            (of(&format!("[{eight}]")), "1 lists of channels for 2 kv heads"),
            (of("[[0, 1], [2, 3]]"), "2 channels are listed, the scheme has 8"),
            (of(&format!("[{eight}, [0, 1, 2, 3, 4, 5, 6, 64]]")), "no channel 64 of 64"),
        ] {
            let e = check(&file).unwrap_err().to_string();
            assert!(e.contains(part) && e.contains("layer 0") && e.contains("k2l8v2g64.rotv"), "{e}");
        }
    }

    #[test]
    fn a_text_is_a_scheme_and_a_toml_name_a_file() {
        assert_eq!(load_schemes("k4v4g64w0", 3).unwrap().to_string(), "k4v4g64");
        assert_eq!(load_schemes("k4v4g64.ls.rotk.rotv", 3).unwrap().to_string(), "k4v4g64.ls.rotk.rotv");
        assert!(matches!(load_schemes("k9v4g64", 3), Err(Error::Kv(_))));
        for (last, said) in
            [("3", "3 layers"), ("99999999999", "no model has"), ("18446744073709551615", "no model has")]
        {
            let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
            std::fs::write(file.path(), format!("[layers]\n\"0-{last}\" = \"k4v4g64\"\n")).unwrap();
            match layers_named(file.path()) {
                Ok(layers) => assert_eq!((layers, said), (4, "3 layers")),
                Err(e) => assert!(e.to_string().contains(said), "{e}"),
            }
        }
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
