//! Texts that are followed or calibrated on. In: a path; out: UTF-8, tokens, a sha256 that names it.
//! NOT here: what is done with them (commands/eval.rs, commands/tune.rs).

use crate::failure::Failure;
use crate::{output, rss};
use kvant_engine::Products;
use kvant_engine::model::Config;
use kvant_engine::tokenizer::Tokenizer;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::Path;

/// Fewest tokens of a chunk: a half of it then has positions with a token behind them.
const SHORTEST: usize = 4;
/// Bytes of a text that are read: the tokenizer takes a million tokens, and few texts have less than 3 bytes a token.
const TEXT_BYTES: usize = 3 << 20;

/// A text as tokens.
pub struct Text {
    /// Of the whole file.
    pub sha256: String,
    /// Of its first 3 MiB.
    pub tokens: Vec<u32>,
    /// Whether there was more.
    pub cut: bool,
}

/// The text's bytes, which are UTF-8.
///
/// # Errors
/// [`Failure`] for a file that cannot be read or is something else.
pub fn read(path: &Path) -> Result<String, Failure> {
    let no = |why: String| {
        Failure::input(format!("cannot read the text {}: {why}", path.display()), "give --text a UTF-8 text file")
    };
    let bytes = std::fs::read(path).map_err(|e| no(e.to_string()))?;
    String::from_utf8(bytes).map_err(|e| no(format!("byte {} is not UTF-8", e.utf8_error().valid_up_to())))
}

/// Its tokens.
///
/// # Errors
/// Those of the tokenizer.
pub fn tokens(text: &str, tokenizer: &Tokenizer) -> Result<Text, Failure> {
    let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
    let cut = end < text.len();
    if cut {
        output::note("only the first 3 MiB of the text are read");
    }
    Ok(Text { sha256: sha256(text.as_bytes()), tokens: tokenizer.encode_text(&text[..end])?, cut })
}

/// A sha256 as people write it.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes).as_slice())
}

/// The sha256 of a file.
///
/// # Errors
/// [`Failure`] when it cannot be read.
pub fn sha256_of(path: &Path) -> Result<String, Failure> {
    let no = |e: std::io::Error| {
        Failure::input(format!("cannot read {}: {e}", path.display()), "check that you may read the file")
    };
    let mut file = std::fs::File::open(path).map_err(no)?;
    let (mut hasher, mut bytes) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut bytes).map_err(no)? {
            0 => return Ok(hex(hasher.finalize().as_slice())),
            n => hasher.update(&bytes[..n]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Whether chunks of so many tokens can be followed.
///
/// # Errors
/// [`Failure`] for too few or too many.
pub fn check_ctx(ctx: usize, config: &Config) -> Result<(), Failure> {
    if ctx > config.context {
        return Err(Failure::input(
            format!("--ctx {ctx} is over the context of this model, which holds {} tokens", config.context),
            "take a smaller --ctx",
        ));
    }
    if ctx < SHORTEST {
        return Err(Failure::input(format!("--ctx {ctx} is under {SHORTEST} tokens"), "take a larger --ctx"));
    }
    Ok(())
}

/// Refuses what would not fit, before anything is loaded. `held`: bytes of logits and rows that are kept; f32 weights are the rest.
///
/// # Errors
/// [`Failure`] says how much is needed and how much there is.
pub fn check_memory(held: usize, config: &Config, products: Products) -> Result<(), Failure> {
    let weights = match products {
        Products::Exact => {
            let per_layer = config.hidden
                * (2 * config.shape.q_heads * config.shape.head_dim + 2 * config.shape.row_len())
                + 3 * config.hidden * config.feed_forward;
            4 * (config.layers * per_layer + config.vocabulary * config.hidden)
        }
        Products::Quantized => 0,
    };
    rss::check((held + weights) as f64, "take a smaller --ctx (of eval also --score half, or --activations product)")
}
