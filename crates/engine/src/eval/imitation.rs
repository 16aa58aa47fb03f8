//! Formats of other programs, as what they give back: keys and values are rounded as the format would round them and kept as
//! numbers. In: a name such as `llama.cpp:q4_0r+w128s4`; out: a codec, its bits, and which tokens it leaves in f16.
//!
//! Without a suffix every row passes the codec before it is stored, which is what llama.cpp does. With one, positions,
//! window and sinks are kvant's (groups of 32 tokens): the same treatment for both, so that formats alone are compared.
//! What is given back is rounded to f16 once more: a relative 2^-11 beside steps of 1/8 or 1/127 of a block's largest value.
//! NOT here: kvant's own schemes, which run their real kernels; speed, which an imitation says nothing about.

use crate::model::rotate_heads;
use half::f16;
use kvant_kv::{PackedScheme, RowCodec, Scheme, SchemeError};
use std::sync::Arc;

/// Channels that share a scale in llama.cpp's block formats.
const BLOCK: usize = 32;

/// What names of imitations begin with.
const PREFIX: &str = "llama.cpp:";

/// Names of all imitations, without suffix.
pub const RIVALS: [&str; 4] = ["llama.cpp:q8_0", "llama.cpp:q8_0r", "llama.cpp:q4_0", "llama.cpp:q4_0r"];

/// A format of another program.
#[derive(Clone)]
pub struct Imitation {
    /// As it was asked for.
    pub name: String,
    /// Bits of an element, scales included.
    pub bits: f64,
    /// Window, sinks and pages of kvant's that it is given; None for its own way, which leaves nothing in f16.
    pub kept: Option<PackedScheme>,
    /// What it gives back.
    pub codec: Arc<dyn RowCodec>,
}

impl Imitation {
    /// Reads `llama.cpp:FORMAT[+w<tokens>[s<tokens>][p<tokens>]]`; None for a text that names no other program.
    ///
    /// # Errors
    /// [`SchemeError`] for an unknown format or a bad suffix.
    pub fn parse(text: &str) -> Option<Result<Self, SchemeError>> {
        let (format, kept) = match text.strip_prefix(PREFIX)?.split_once('+') {
            Some((format, kept)) => (format, Some(kept)),
            None => (text.strip_prefix(PREFIX)?, None),
        };
        Some(Self::of(text, format, kept).map_err(|why| SchemeError { text: text.to_owned(), why }))
    }

    fn of(name: &str, format: &str, kept: Option<&str>) -> Result<Self, String> {
        let (bits, codec): (f64, Arc<dyn RowCodec>) = match format {
            "q8_0" => (8.5, Arc::new(LlamaBlocks::Q8_0)),
            "q8_0r" => (8.5, Arc::new(HeadRotation(LlamaBlocks::Q8_0))),
            "q4_0" => (4.5, Arc::new(LlamaBlocks::Q4_0)),
            "q4_0r" => (4.5, Arc::new(HeadRotation(LlamaBlocks::Q4_0))),
            _ => return Err(format!("formats that can be imitated: {}", RIVALS.join(", "))),
        };
        let kept = match kept {
            None => None,
            // The bits of this scheme's records count for nothing: what they give back is replaced.
            Some(kept) => match format!("k4v4g{BLOCK}{kept}").parse() {
                // A fit would be ignored.
                Ok(Scheme::Packed(packed)) if !kept.is_empty() && !kept.contains('.') => Some(packed),
                _ => return Err("behind the + stand window_len, sinks and page_len, as in +w128s4".into()),
            },
        };
        Ok(Self { name: name.to_owned(), bits, kept, codec })
    }
}

/// llama.cpp's formats: blocks of 32 channels of one token and head with one f16 scale d.
///
/// Formulas (`quantize_row_q8_0_ref`, `quantize_row_q4_0_ref` and their `dequantize_row` in ggml/src/ggml-quants.c):
/// - Q8_0, 34 bytes: `d = max|x| / 127`, `code = round(x/d)` (half away from zero), `x_hat = code * f16(d)`.
/// - Q4_0, 18 bytes: `m` = the x of largest magnitude with its sign, `d = m / -8`, `code = min(15, trunc(x/d + 8.5))`,
///   `x_hat = (code - 8) * f16(d)`.
///
/// Codes are chosen against the f32 scale, as there. Accuracy: bit for bit up to `x/d` by division or reciprocal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LlamaBlocks {
    /// 8 bits and a scale.
    Q8_0,
    /// 4 bits and a scale.
    Q4_0,
}

impl LlamaBlocks {
    fn block(self, x: &mut [f32]) {
        let largest = x.iter().copied().fold(0.0f32, |m, v| if v.abs() > m.abs() { v } else { m });
        let scale = match self {
            LlamaBlocks::Q8_0 => largest.abs() / 127.0,
            LlamaBlocks::Q4_0 => largest / -8.0,
        };
        let reciprocal = if scale == 0.0 { 0.0 } else { scale.recip() };
        let stored = f16::from_f32(scale).to_f32();
        for x in x {
            let code = match self {
                LlamaBlocks::Q8_0 => (*x * reciprocal).round(),
                LlamaBlocks::Q4_0 => (*x * reciprocal + 8.5).trunc().min(15.0) - 8.0,
            };
            *x = code * stored;
        }
    }
}

impl RowCodec for LlamaBlocks {
    fn round_trip(&self, head_dim: usize, k: &mut [f32], v: &mut [f32]) {
        for x in [k, v] {
            x.chunks_exact_mut(head_dim).flat_map(|row| row.chunks_mut(BLOCK)).for_each(|block| self.block(block));
        }
    }
}

/// A codec behind a rotation: rows are multiplied by a Hadamard matrix, pass the codec, and are multiplied back.
///
/// Formula: `H` of order n has entries `(-1)^popcount(i & j) / sqrt(n)`, and `H H = 1`; n is the largest power of two that divides
/// head_dim. llama.cpp rotates queries and keys alike and the output of attention back, which is the same in exact
/// arithmetic.
#[derive(Debug, Clone, Copy)]
pub struct HeadRotation<C>(pub C);

impl<C: RowCodec> RowCodec for HeadRotation<C> {
    fn round_trip(&self, head_dim: usize, k: &mut [f32], v: &mut [f32]) {
        rotate_heads(k, head_dim);
        rotate_heads(v, head_dim);
        self.0.round_trip(head_dim, k, v);
        rotate_heads(k, head_dim);
        rotate_heads(v, head_dim);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Imitation, SchemeError> {
        Imitation::parse(text).expect("it names llama.cpp")
    }

    #[test]
    fn names_are_formats_with_or_without_a_window() {
        for name in RIVALS {
            assert!(parse(name).unwrap().kept.is_none());
            let kept = parse(&format!("{name}+w128s4")).unwrap().kept.unwrap();
            assert_eq!((kept.group_len(), kept.window_len(), kept.sinks(), kept.page_len()), (32, 128, 4, 0));
        }
        assert!(Imitation::parse("k4v4g64").is_none() && Imitation::parse("model.toml").is_none());
        for (bad, why) in [
            ("llama.cpp:q5_1", "formats that can be imitated: llama.cpp:q8_0"),
            ("llama.cpp:", "formats"),
            ("llama.cpp:q4_0+", "behind the +"),
            ("llama.cpp:q4_0+128", "behind the +"),
            ("llama.cpp:q4_0+w128.mse", "behind the +"),
            ("llama.cpp:q4_0+w128s99", "behind the +"),
        ] {
            let e = parse(bad).err().unwrap();
            assert!(e.text == bad && e.why.contains(why), "{bad}: {e}");
        }
    }

    #[test]
    fn blocks_round_as_the_formulas_say() {
        let mut k: Vec<f32> = (0..64).map(|i| i as f32 - 20.0).collect();
        let mut v = vec![0.0; 64];
        LlamaBlocks::Q4_0.round_trip(64, &mut k, &mut v);
        // First block -20..=11: m = -20, d = 2.5. -20/2.5 + 8.5 = 0.5: code 0. 11/2.5 + 8.5 = 12.9: code 12.
        assert_eq!((k[0], k[31]), (-20.0, 10.0));
        // Second block 12..=43: d = -5.375 (an f16 number). 43: code 0 is -8 times d. 12: 12/d + 8.5 = 6.27: code 6.
        assert_eq!((k[63], k[32]), (43.0, 10.75));
        assert!(v.iter().all(|v| *v == 0.0));
        let mut k: Vec<f32> = (0..32).map(|i| (i as f32 - 15.0) * 0.37).collect();
        let before = k.clone();
        LlamaBlocks::Q8_0.round_trip(32, &mut k, &mut []);
        // Half a step, and 127 times what f16 loses of the scale.
        let step = 16.0 * 0.37 / 127.0;
        let most = (0.5 + 127.0 / 2048.0) * step;
        assert!(before.iter().zip(&k).all(|(a, b)| (a - b).abs() <= most), "{k:?}");
    }

    /// Gives back what it was given.
    struct Nothing;
    impl RowCodec for Nothing {
        fn round_trip(&self, _: usize, _: &mut [f32], _: &mut [f32]) {}
    }

    #[test]
    fn the_rotation_is_its_own_inverse_and_spreads_one_channel_over_all() {
        let mut one = vec![0.0; 64];
        one[5] = 8.0;
        rotate_heads(&mut one, 64);
        assert!(one.iter().all(|x| (x.abs() - 1.0).abs() < 1e-6));
        for d in [64, 80, 96, 128] {
            let before: Vec<f32> = (0..2 * d).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
            let (mut k, mut v) = (before.clone(), before.clone());
            HeadRotation(Nothing).round_trip(d, &mut k, &mut v);
            assert!(before.iter().zip(k.iter().chain(&v)).all(|(a, b)| (a - b).abs() < 1e-4));
        }
    }
}
