//! Schemes: how a cache stores tokens. In: text such as `k4v2g64w128s4p512`, `k2l4v2g64w128s4.mse`, `ktq3vtq2g64`, `f16` or
//! `bf16`; out: a checked [`Scheme`], its canonical text, its bits per element, and [`Scheme::edge`], the rule that decides
//! which keys a query sees packed.
//! NOT here: codecs (codec.rs), scheme files and presets (the engine reads those), byte offsets (cache/layout.rs).

use crate::RowFormat;
use crate::codec::{Codec, loud_channels, number};
use std::fmt;
use std::str::FromStr;

/// Bits a code may have.
pub const BITS: [u32; 4] = [2, 3, 4, 8];
/// Tokens a group may have.
pub const GROUP_LENS: [usize; 3] = [32, 64, 128];
/// Shares of loud key channels there are: one channel in so many; 0 is none.
pub const LOUD: [usize; 4] = [0, 2, 4, 8];
/// Loud channels come in whole lines of codes (quant/pack.rs): so many at once.
pub(crate) const LOUD_STEP: usize = 8;
/// Most first tokens that can be kept in f16.
pub const MAX_SINKS: usize = 16;

/// Why a text or a set of numbers is no scheme.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown scheme `{text}`: {why}")]
pub struct SchemeError {
    /// The text as given.
    pub text: String,
    /// What is wrong with it.
    pub why: String,
}

/// How the tokens of one layer are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Every token in f16: the control of every measurement.
    F16,
    /// Every token in bf16: as large as f16, with the range of f32 and 8 bits of precision.
    Bf16,
    /// Whole groups of tokens packed, the newest and the first ones in f16.
    Packed(PackedScheme),
}

/// How scale and zero of a group are chosen when it is packed. The record's format, and so what reads it, is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Fit {
    /// The group's range: no value is clipped.
    #[default]
    MinMax,
    /// The range, shrunk about its middle, of the least squared error among a few: with 2 or 3 bits a clipped outlier costs
    /// less than coarser steps for all others. 8-bit codes take the range.
    Mse,
    /// As [`Fit::Mse`], then scale and zero of least squares for the codes so found, while that helps.
    Ls,
}

impl Fit {
    /// Every way, with the name that a scheme's text has for it.
    pub const ALL: [(Fit, &str); 3] = [(Fit::MinMax, "minmax"), (Fit::Mse, "mse"), (Fit::Ls, "ls")];
}

/// The numbers of a packed scheme. Build it with [`PackedScheme::new`] or by parsing, which check them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedScheme {
    k: Codec,
    v: Codec,
    group_len: usize,
    window_len: usize,
    sinks: usize,
    page_len: usize,
    fit: Fit,
}

impl PackedScheme {
    /// A checked scheme of groups with scale and zero.
    ///
    /// # Errors
    /// [`SchemeError`] for bits outside {2,3,4,8}, and as [`PackedScheme::of_codecs`].
    pub fn new(
        k_bits: u32,
        v_bits: u32,
        group_len: usize,
        window_len: usize,
        sinks: usize,
        page_len: usize,
    ) -> Result<Self, SchemeError> {
        Self::of_codecs(Codec::affine(k_bits), Codec::affine(v_bits), group_len, window_len, sinks, page_len)
    }

    /// A checked scheme.
    ///
    /// # Errors
    /// [`SchemeError`] for a codec that is none of its tensor, group_len outside {32,64,128}, more than 16 sinks, or a page_len
    /// that is no multiple of group_len.
    pub fn of_codecs(
        k: Codec,
        v: Codec,
        group_len: usize,
        window_len: usize,
        sinks: usize,
        page_len: usize,
    ) -> Result<Self, SchemeError> {
        let scheme = Self { k, v, group_len, window_len, sinks, page_len, fit: Fit::MinMax };
        let no = |why: String| Err(SchemeError { text: scheme.to_string(), why });
        for (name, codec) in [("key", k), ("value", v)] {
            if let Err(why) = codec.check(name) {
                return no(why);
            }
        }
        if !GROUP_LENS.contains(&group_len) {
            return no(format!("group_len (g) must be 32, 64 or 128, got {group_len}"));
        }
        if sinks > MAX_SINKS {
            return no(format!("sinks (s) must be 0 to {MAX_SINKS}, got {sinks}"));
        }
        if !page_len.is_multiple_of(group_len) {
            return no(format!("page_len (p) must be a multiple of group_len {group_len}, got {page_len}"));
        }
        if window_len > MAX_LEN || page_len > MAX_LEN {
            return no(format!("window_len (w) and page_len (p) must be at most {MAX_LEN}"));
        }
        Ok(scheme)
    }

    /// The same with the first of every `one_in` key channels of a head loud: 4 bits, in two planes of 2. 0: none. Which
    /// channels are the first is up to who writes keys and queries: any order does that both share.
    ///
    /// # Errors
    /// [`SchemeError`] for a share outside {0,2,4,8}, and for keys of other than 2 bits.
    pub fn with_loud(mut self, one_in: usize) -> Result<Self, SchemeError> {
        match self.k.with_loud(one_in) {
            Ok(k) => self.k = k,
            Err(why) => return Err(SchemeError { text: self.to_string(), why }),
        }
        Ok(self)
    }

    /// The same with scales and zeros chosen so.
    pub fn with_fit(self, fit: Fit) -> Self {
        Self { fit, ..self }
    }

    /// The codec of keys.
    pub fn k(&self) -> Codec {
        self.k
    }
    /// The codec of values.
    pub fn v(&self) -> Codec {
        self.v
    }
    /// One key channel in so many is loud (0: none).
    pub fn loud(&self) -> usize {
        self.k.as_affine().map_or(0, |(_, loud)| loud)
    }
    /// Loud channels of a head, its first ones: its share, rounded up to a multiple of 8.
    pub fn loud_channels(&self, head_dim: usize) -> usize {
        loud_channels(self.loud(), head_dim)
    }
    /// How scales and zeros are chosen.
    pub fn fit(&self) -> Fit {
        self.fit
    }
    /// Bytes of one head's record: keys, and values.
    pub fn record_bytes(&self, head_dim: usize) -> (usize, usize) {
        (self.k.key_bytes(head_dim, self.group_len), self.v.value_bytes(head_dim, self.group_len))
    }
    /// Tokens of a group.
    pub fn group_len(&self) -> usize {
        self.group_len
    }
    /// Newest tokens kept f16.
    pub fn window_len(&self) -> usize {
        self.window_len
    }
    /// First tokens kept f16.
    pub fn sinks(&self) -> usize {
        self.sinks
    }
    /// Tokens of a page (0: no pages).
    pub fn page_len(&self) -> usize {
        self.page_len
    }
    /// Channels that share one value scale where values have groups: `min(group_len, head_dim)`.
    pub fn v_group_len(&self, head_dim: usize) -> usize {
        self.group_len.min(head_dim)
    }

    /// Keys before this position (sinks excepted) are packed for a query at `position`; a multiple of group_len.
    ///
    /// Formula: `max(floor(max(0, position+1-window_len)/group_len)*group_len, floor(position/page_len)*page_len)`,
    /// the second term only when there are pages.
    pub fn edge(&self, position: usize) -> usize {
        let by_window = (position + 1).saturating_sub(self.window_len) / self.group_len * self.group_len;
        let by_page = position.checked_div(self.page_len).map_or(0, |page| page * self.page_len);
        by_window.max(by_page)
    }

    /// Effective bits of one packed element, keys and values averaged, parameters included.
    pub fn bits_per_element(&self, head_dim: usize) -> f64 {
        let (k, v) = self.record_bytes(head_dim);
        8.0 * (k + v) as f64 / (2 * head_dim * self.group_len) as f64
    }
}

/// Bits of a code of `bits`, averaged over the channels of a head of which one in `one_in` (0: none) has twice as many; scale and
/// zero not included.
pub fn code_bits(bits: u32, one_in: usize, head_dim: usize) -> f64 {
    bits as f64 * (1.0 + loud_channels(one_in, head_dim) as f64 / head_dim as f64)
}

/// Largest window_len or page_len (tokens): far above any model's context, small enough that sums cannot overflow.
const MAX_LEN: usize = 1 << 30;

impl Scheme {
    /// See [`PackedScheme::edge`]; 0 for f16 and bf16 (nothing is ever packed).
    pub fn edge(&self, position: usize) -> usize {
        match self {
            Scheme::F16 | Scheme::Bf16 => 0,
            Scheme::Packed(p) => p.edge(position),
        }
    }

    /// First position a cache of `len` tokens keeps plain behind its packed groups: `edge(len-1)`, 0 when empty.
    pub fn packed_len(&self, len: usize) -> usize {
        len.checked_sub(1).map_or(0, |newest| self.edge(newest))
    }

    /// Effective bits of one packed element (16 for f16 and bf16).
    pub fn bits_per_element(&self, head_dim: usize) -> f64 {
        match self {
            Scheme::F16 | Scheme::Bf16 => 16.0,
            Scheme::Packed(p) => p.bits_per_element(head_dim),
        }
    }

    /// The packed scheme, when it is one.
    pub fn packed(&self) -> Option<&PackedScheme> {
        match self {
            Scheme::F16 | Scheme::Bf16 => None,
            Scheme::Packed(p) => Some(p),
        }
    }

    /// What its plain rows are made of: all of them, or window and sinks of a packed scheme, which are f16.
    pub fn row_format(&self) -> RowFormat {
        match self {
            Scheme::Bf16 => RowFormat::Bf16,
            Scheme::F16 | Scheme::Packed(_) => RowFormat::F16,
        }
    }
}

impl fmt::Display for PackedScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k{}v{}g{}", self.k, self.v, self.group_len)?;
        for (letter, n) in [('w', self.window_len), ('s', self.sinks), ('p', self.page_len)] {
            if n > 0 {
                write!(f, "{letter}{n}")?;
            }
        }
        match Fit::ALL.iter().find(|(fit, _)| *fit == self.fit) {
            Some((fit, name)) if *fit != Fit::MinMax => write!(f, ".{name}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::F16 => f.write_str("f16"),
            Scheme::Bf16 => f.write_str("bf16"),
            Scheme::Packed(p) => p.fmt(f),
        }
    }
}

impl FromStr for Scheme {
    type Err = SchemeError;

    /// Parses `f16`, `bf16` or `k<codec>v<codec>g<tokens>[w<tokens>][s<tokens>][p<tokens>][.<fit>]`, parts in that order. A
    /// codec is `<bits>`, of keys also `2l<one in>`, `tq<bits>`, `rvq<bits><bits>`, `sb<bits>` or `vq<centroids>x<channels>`.
    fn from_str(text: &str) -> Result<Self, SchemeError> {
        match text {
            "f16" => return Ok(Scheme::F16),
            "bf16" => return Ok(Scheme::Bf16),
            _ => {}
        }
        let no = |why: String| SchemeError { text: text.to_string(), why };
        let (numbers, fit) = text.split_once('.').map_or((text, None), |(numbers, fit)| (numbers, Some(fit)));
        let fit = match fit {
            None => Fit::MinMax,
            Some(name) => match Fit::ALL.iter().find(|(_, n)| *n == name) {
                Some((fit, _)) => *fit,
                None => {
                    return Err(no(format!(
                        "`.{name}` is no fit (minmax, mse, ls); rotations stand behind it, .rotk before .rotv"
                    )));
                }
            },
        };
        let mut rest = numbers;
        let mut codec = |letter: char| -> Result<Codec, SchemeError> {
            let tail = rest.strip_prefix(letter);
            let tail = tail.ok_or_else(|| no(format!("expected `{letter}` and a codec, as in k4v4g64w128s4p512")))?;
            let (codec, tail) = Codec::read(letter, tail).map_err(no)?;
            rest = tail;
            Ok(codec)
        };
        let (k, v) = (codec('k')?, codec('v')?);
        let mut part = |letter: char, required: bool| -> Result<usize, SchemeError> {
            let Some(tail) = rest.strip_prefix(letter) else {
                return if required {
                    Err(no(format!("expected `{letter}` and a number, as in k4v4g64w128s4p512")))
                } else {
                    Ok(0)
                };
            };
            rest = tail;
            number(&mut rest).ok_or_else(|| no(format!("expected a number after `{letter}`")))
        };
        let g = part('g', true)?;
        let (w, s, p) = (part('w', false)?, part('s', false)?, part('p', false)?);
        if !rest.is_empty() {
            return Err(no(format!("`{rest}` is not a part of a scheme (order: k v g w s p, then .fit)")));
        }
        let scheme = PackedScheme::of_codecs(k, v, g, w, s, p).map_err(|e| no(e.why))?;
        if fit != Fit::MinMax && [k, v].iter().all(|codec| codec.as_affine().is_none()) {
            return Err(no("a fit chooses scales and zeros, which neither codec has".into()));
        }
        Ok(Scheme::Packed(scheme.with_fit(fit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_leaves_zero_parts_out() {
        for text in [
            "f16",
            "bf16",
            "k4v2g64",
            "k4v2g64w128s4p512",
            "k8v8g32s16",
            "k2v3g128p1024",
            "k2l4v2g64",
            "k2l8v3g64w128s4p512.mse",
            "k4v4g64.ls",
            "ktq3vtq1g64w128s4p512",
            "ksb1v4g64.mse",
            "krvq21vvq256x8g32",
            "kvq16x4v2g64p512",
        ] {
            assert_eq!(text.parse::<Scheme>().unwrap().to_string(), text);
        }
        assert_eq!("k4v4g64w0s0p0".parse::<Scheme>().unwrap().to_string(), "k4v4g64");
        assert_eq!("k4l0v4g64.minmax".parse::<Scheme>().unwrap().to_string(), "k4v4g64");
    }

    #[test]
    fn bad_texts_say_what_is_wrong() {
        for (text, part) in [
            ("k5v4g64", "key bits"),
            ("k4v1g64", "value bits"),
            ("k4v4g48", "group_len"),
            ("k4v4g64s17", "sinks"),
            ("k4v4g64p100", "page_len"),
            ("k4v4", "`g`"),
            ("k4v4g64x", "`x`"),
            ("k4v4g64s4w128", "`w128`"),
            ("k99999999999999999999v4g64", "number after `k`"),
            ("", "`k`"),
            ("F16", "`k`"),
            ("BF16", "`k`"),
            ("bf16w128", "`k`"),
            ("k4v4g64w99999999999", "at most"),
            ("k4l4v4g64", "2-bit keys"),
            ("k2l3v4g64", "2, 4 or 8"),
            ("k2v4l4g64", "got value bits 4"),
            ("ktq5vtq4g64", "1, 2, 3 or 4 bits"),
            ("krvq12v4g64", "rvq11, rvq21, rvq22"),
            ("kvq32x4v4g64", "16 or 256"),
            ("kvq16v4g64", "16 or 256"),
            ("kzz4v4g64", "`zz` is no codec"),
            ("ktq4vtq4g64.mse", "neither codec"),
            ("ktq99999999999999999999v4g64", "1, 2, 3 or 4 bits"),
            ("k4v4g64.best", "`.best` is no fit"),
            ("k4v4g64.", "`.`"),
        ] {
            let e = text.parse::<Scheme>().unwrap_err();
            assert!(e.why.contains(part), "{text}: {}", e.why);
            assert_eq!(e.text, text);
        }
    }

    #[test]
    fn bits_per_element_count_scale_and_zero() {
        let bits = |s: &str, d| s.parse::<Scheme>().unwrap().bits_per_element(d);
        assert_eq!((bits("f16", 64), bits("bf16", 80)), (16.0, 16.0));
        assert_eq!(bits("k4v4g64", 128), 4.5);
        assert_eq!(bits("k2v2g32", 64), 3.0);
        // An eighth of 64 channels has 2 bits more, of 80 channels 16.
        assert_eq!((bits("k2l8v2g64", 64), bits("k2l4v2g64", 128)), (2.625, 2.75));
        assert!((bits("k2l8v2g64", 80) - (2.4 + 0.5 + 2.0 + 0.8) / 2.0).abs() < 1e-12);
        // head_dim 80, group 64: value groups of 64 and 16 channels.
        assert_eq!(bits("k4v4g64", 80), (4.5 + 4.0 + 0.8) / 2.0);
    }

    #[test]
    fn edge_moves_by_window_and_by_page() {
        let s: Scheme = "k4v4g32w64p128".parse().unwrap();
        assert_eq!(
            [0, 94, 95, 126, 127, 128, 254, 255, 256].map(|i| s.edge(i)),
            [0, 0, 32, 32, 64, 128, 160, 192, 256]
        );
        assert_eq!(s.packed_len(0), 0);
        assert_eq!(s.packed_len(129), 128);
        assert_eq!((Scheme::F16.packed_len(129), Scheme::Bf16.packed_len(129)), (0, 0));
    }
}
