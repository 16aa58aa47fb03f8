//! Codecs: how one tensor of a layer, its keys or its values, becomes codes. In: text such as `4`, `2l4`, `tq3`, `rvq22`, `sb1`,
//! `vq256x4`; out: a checked [`Codec`], its canonical text, its bytes.
//! docs/codecs.md has the formula of each and its paper.
//! NOT here: the formulas (quant/), where bytes lie (cache/layout.rs), which tokens are packed (scheme.rs).

use crate::scheme::{BITS, LOUD, LOUD_STEP};
use std::fmt;

/// Bits that a code of a rotated codebook or of sign bits may have.
pub const GRID_BITS: [u32; 4] = [1, 2, 3, 4];
/// Bits of the two stages of a residual codebook.
pub const STAGES: [(u32, u32); 3] = [(1, 1), (2, 1), (2, 2)];
/// Centroids of a sub-vector.
pub const CENTROIDS: [usize; 2] = [16, 256];
/// Channels of a sub-vector.
pub const SUB_LENS: [usize; 2] = [4, 8];

/// How one tensor becomes codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Groups of numbers share a scale and a zero.
    Affine {
        /// Bits of a code: 2, 3, 4 or 8.
        bits: u32,
        /// One channel in so many is loud (keys of 2 bits only; 0: none).
        loud: usize,
    },
    /// Rotated scalar codebooks (TurboQuant): a row's root mean square, and for each channel the nearest centroid of the
    /// normal distribution.
    Turbo {
        /// Bits of a code: 1 to 4.
        bits: u32,
    },
    /// The same with a codebook in two stages, the second for what the first leaves (RVQ).
    Residual {
        /// Bits of the first stage.
        first: u32,
        /// Bits of the second.
        second: u32,
    },
    /// Sign bits and their extension to more (RaBitQ): a grid of equal steps, and a factor that makes products unbiased.
    Sign {
        /// Bits of a code: 1 to 4.
        bits: u32,
    },
    /// Product quantization (VecInfer): sub-vectors of channels, each the nearest of its centroids.
    Vector {
        /// Centroids of a sub-vector: 16 or 256.
        centroids: usize,
        /// Channels of a sub-vector: 4 or 8.
        sub_len: usize,
    },
}

impl Codec {
    /// Codes of groups with scale and zero.
    pub const fn affine(bits: u32) -> Self {
        Codec::Affine { bits, loud: 0 }
    }

    /// Reads the codec of the tensor `letter` from the start of a text; the rest of it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn read(letter: char, text: &str) -> Result<(Self, &str), String> {
        let name = ["tq", "sb", "rvq", "vq"].into_iter().find(|name| text.starts_with(name));
        let letters = text.len() - text.trim_start_matches(|c: char| c.is_ascii_lowercase()).len();
        let name = name.unwrap_or(&text[..letters]);
        let mut rest = &text[name.len()..];
        let no_number = |letter: char| format!("expected a number after `{letter}`");
        let codec = match name {
            "" => {
                let bits = number(&mut rest).ok_or_else(|| no_number(letter))?;
                let bits = u32::try_from(bits).unwrap_or(u32::MAX);
                let mut loud = 0;
                if let Some(tail) = rest.strip_prefix('l') {
                    rest = tail;
                    loud = number(&mut rest).ok_or_else(|| no_number('l'))?;
                }
                Codec::Affine { bits, loud }
            }
            "tq" | "sb" => {
                let bits = number(&mut rest).and_then(|n| GRID_BITS.into_iter().find(|&bits| bits as usize == n));
                let bits = bits.ok_or_else(|| format!("`{name}` has 1, 2, 3 or 4 bits"))?;
                if name == "tq" { Codec::Turbo { bits } } else { Codec::Sign { bits } }
            }
            "rvq" => {
                let n = number(&mut rest);
                let stages = STAGES.into_iter().find(|&(a, b)| n == Some((10 * a + b) as usize));
                let (first, second) = stages.ok_or("`rvq` has stages of 1+1, 2+1 or 2+2 bits: rvq11, rvq21, rvq22")?;
                Codec::Residual { first, second }
            }
            "vq" => {
                let what = "`vq` has 16 or 256 centroids and sub-vectors of 4 or 8 channels: vq256x4";
                let centroids = number(&mut rest).filter(|n| CENTROIDS.contains(n)).ok_or(what)?;
                rest = rest.strip_prefix('x').ok_or(what)?;
                let sub_len = number(&mut rest).filter(|n| SUB_LENS.contains(n)).ok_or(what)?;
                Codec::Vector { centroids, sub_len }
            }
            _ => return Err(format!("`{name}` is no codec (bits alone, or tq, rvq, sb, vq)")),
        };
        Ok((codec, rest))
    }

    /// Keys of groups with another share of loud channels.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn with_loud(self, one_in: usize) -> Result<Self, String> {
        let codec = match self {
            Codec::Affine { bits, .. } => Codec::Affine { bits, loud: one_in },
            other if one_in == 0 => other,
            other => return Err(format!("loud key channels (l) go with 2-bit keys, got {other}")),
        };
        codec.check("key").map(|()| codec)
    }

    /// Whether it is one for this tensor.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn check(&self, name: &str) -> Result<(), String> {
        let Codec::Affine { bits, loud } = *self else { return Ok(()) };
        if !BITS.contains(&bits) {
            return Err(format!("{name} bits must be 2, 3, 4 or 8, got {bits}"));
        }
        if !LOUD.contains(&loud) {
            return Err(format!("one loud key channel in 2, 4 or 8 (l) is possible, got {loud}"));
        }
        if loud > 0 && (bits != 2 || name != "key") {
            return Err(format!("loud key channels (l) go with 2-bit keys, got {name} bits {bits}"));
        }
        Ok(())
    }

    /// Bits of a code and 1 in how many channels is loud, where groups have scale and zero.
    pub fn as_affine(&self) -> Option<(u32, usize)> {
        match *self {
            Codec::Affine { bits, loud } => Some((bits, loud)),
            _ => None,
        }
    }

    /// Whether it codes rows well only where a rotation with random signs has made all channels alike: whoever writes keys and
    /// queries, or values, rotates them first (the engine's bases do).
    pub fn wants_rotation(&self) -> bool {
        matches!(self, Codec::Turbo { .. } | Codec::Residual { .. } | Codec::Sign { .. })
    }

    /// Whether it needs centroids from calibration ([`crate::Cache::set_codebooks`]).
    pub fn wants_codebooks(&self) -> bool {
        matches!(self, Codec::Vector { .. })
    }

    /// Bytes of the keys of a record: parameters and codes.
    pub fn key_bytes(&self, head_dim: usize, group_len: usize) -> usize {
        match *self {
            Codec::Affine { bits, loud } => {
                let channels = head_dim + loud_channels(loud, head_dim);
                AFFINE_BYTES * head_dim + group_len * channels * bits as usize / 8
            }
            _ => self.row_bytes(head_dim, group_len),
        }
    }

    /// Bytes of the values of a record: parameters and codes.
    pub fn value_bytes(&self, head_dim: usize, group_len: usize) -> usize {
        match *self {
            Codec::Affine { bits, .. } => {
                let groups = head_dim.div_ceil(group_len.min(head_dim));
                group_len * (AFFINE_BYTES * groups + head_dim * bits as usize / 8)
            }
            _ => self.row_bytes(head_dim, group_len),
        }
    }

    /// Bytes of a record's half where parameters, if any, are a number per token.
    fn row_bytes(&self, head_dim: usize, group_len: usize) -> usize {
        match *self {
            Codec::Affine { .. } => unreachable!("the callers ask for others"),
            Codec::Turbo { bits } | Codec::Sign { bits } => group_len * (F16_BYTES + head_dim * bits as usize / 8),
            Codec::Residual { first, second } => group_len * (F16_BYTES + head_dim * (first + second) as usize / 8),
            Codec::Vector { centroids, sub_len } => {
                (group_len * head_dim / sub_len * centroids.ilog2() as usize / 8).next_multiple_of(LINE_BYTES)
            }
        }
    }
}

/// Takes the digits that a text begins with off it; None when there are none, or too many.
pub(crate) fn number(rest: &mut &str) -> Option<usize> {
    let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, tail) = rest.split_at(digits);
    *rest = tail;
    number.parse().ok()
}

/// Scale and zero.
const AFFINE_BYTES: usize = 2 * F16_BYTES;
const F16_BYTES: usize = 2;
/// Halves of records are whole lines.
const LINE_BYTES: usize = 64;

/// Loud channels of a head when one in `one_in` is (0: none): rounded up to whole lines of codes.
pub(crate) fn loud_channels(one_in: usize, head_dim: usize) -> usize {
    head_dim.checked_div(one_in).map_or(0, |n| n.next_multiple_of(LOUD_STEP))
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Codec::Affine { bits, loud: 0 } => write!(f, "{bits}"),
            Codec::Affine { bits, loud } => write!(f, "{bits}l{loud}"),
            Codec::Turbo { bits } => write!(f, "tq{bits}"),
            Codec::Residual { first, second } => write!(f, "rvq{first}{second}"),
            Codec::Sign { bits } => write!(f, "sb{bits}"),
            Codec::Vector { centroids, sub_len } => write!(f, "vq{centroids}x{sub_len}"),
        }
    }
}
