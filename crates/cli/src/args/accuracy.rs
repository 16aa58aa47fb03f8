//! The command lines of `kvant eval` and `kvant tune`. In: words; out: checked values. NOT here: what lists of caches mean (the
//! commands).

use super::{DEFAULT_SCHEME, Machine};
use crate::models;
use crate::units::{parse_count, parse_whole};
use clap::{Args, ValueEnum};
use kvant_engine::Products;
use kvant_engine::eval::Scored;
use std::path::PathBuf;

/// Which positions of a chunk `kvant eval` scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScoreName {
    /// The second half of each chunk, as llama-perplexity does
    Half,
    /// Every position
    All,
}

impl ScoreName {
    /// The engine's word for it.
    pub fn scored(self) -> Scored {
        match self {
            Self::Half => Scored::SecondHalf,
            Self::All => Scored::All,
        }
    }
}

/// How `kvant eval` multiplies with weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Activations {
    /// Weights as f32 and f32 products, so that the cache is the only difference
    Exact,
    /// The product's own way: low-bit weights times activations of 15 bits
    Product,
}

impl Activations {
    /// The engine's word for it.
    pub fn products(self) -> Products {
        match self {
            Self::Exact => Products::Exact,
            Self::Product => Products::Quantized,
        }
    }
}

/// Percent of a text at which a fact can be hidden.
fn parse_depth(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|d| *d <= 100).ok_or_else(|| "must be a whole number from 0 to 100".into())
}

fn parse_bound(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x: &f64| x.is_finite() && *x >= 0.0)
        .ok_or_else(|| "must be a number of at least 0".into())
}

/// `kvant eval`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant eval --text book.txt --kv k8v8g64w128s4p512,k4v4g64w128s4p512 --chunks 2
  kvant eval --text book.txt --kv k4v4g64w128s4p512,llama.cpp:q4_0r,llama.cpp:q4_0r+w128s4 --html accuracy.html
  kvant eval --text book.txt --kv tuned.toml --max-kld 0.015 --max-ppl-ratio 1.012
  kvant eval --text book.txt --retrieval --lengths 1024 --kv k2v2g32w128s4p512

--kv takes schemes, presets, scheme files, and formats of llama.cpp that are imitated: llama.cpp:q8_0, llama.cpp:q4_0,
rotated llama.cpp:q8_0r and llama.cpp:q4_0r, each also with our window and sinks, as in llama.cpp:q8_0+w128s4. f16 always runs as the base.
The bounds hold for what is kvant's own; a bound that is not kept ends the program with exit code 1.")]
pub struct EvalArgs {
    /// Model: a name or a path to a .gguf file or a model folder
    #[arg(long, value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// Text to follow, UTF-8
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Caches to judge, comma-separated
    #[arg(long, value_name = "S1,S2,..", default_value = DEFAULT_SCHEME)]
    pub kv: String,
    /// Tokens of a chunk
    #[arg(long, allow_negative_numbers = true, value_name = "TOKENS", default_value_t = 2048, value_parser = parse_count)]
    pub ctx: usize,
    /// Chunks to follow
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 8, value_parser = parse_count)]
    pub chunks: usize,
    /// Chunks at the text's start to leave out
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 0, value_parser = parse_skip)]
    pub skip_chunks: usize,
    /// Positions that are scored
    #[arg(long, value_name = "WHICH", default_value = "half")]
    pub score: ScoreName,
    /// Products with the weights
    #[arg(long, value_name = "HOW", default_value = "exact")]
    pub activations: Activations,
    /// Fail when a scheme's mean KL divergence from f16 is larger
    #[arg(long, allow_negative_numbers = true, value_name = "NATS", value_parser = parse_bound, conflicts_with = "retrieval")]
    pub max_kld: Option<f64>,
    /// Fail when a scheme's ratio of perplexity to f16 is larger
    #[arg(long, allow_negative_numbers = true, value_name = "RATIO", value_parser = parse_bound, conflicts_with = "retrieval")]
    pub max_ppl_ratio: Option<f64>,
    /// Write one line per scheme
    #[arg(long, value_name = "FILE", conflicts_with = "retrieval")]
    pub csv: Option<PathBuf>,
    /// Write one self-contained page with a picture
    #[arg(long, value_name = "FILE", conflicts_with = "retrieval")]
    pub html: Option<PathBuf>,
    /// Ask for facts hidden in the text instead of scoring it
    #[arg(long)]
    pub retrieval: bool,
    /// Depths of the facts in percent, comma-separated
    #[arg(long, allow_negative_numbers = true, value_name = "D1,D2,..", default_value = "10,30,50,70,90", value_delimiter = ',', value_parser = parse_depth, requires = "retrieval", help_heading = "Retrieval")]
    pub depths: Vec<usize>,
    /// Tokens of a question, comma-separated
    #[arg(long, allow_negative_numbers = true, value_name = "L1,L2,..", default_value = "1024,4096,8192", value_delimiter = ',', value_parser = parse_count, requires = "retrieval", help_heading = "Retrieval")]
    pub lengths: Vec<usize>,
    /// Questions of each length and depth
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 5, value_parser = parse_count, requires = "retrieval", help_heading = "Retrieval")]
    pub per_cell: usize,
    /// Seed of the questions
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 1, value_parser = parse_whole, requires = "retrieval", help_heading = "Retrieval")]
    pub seed: u64,
    /// Attention kernel [default: the best this processor runs]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub kernel: Option<String>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

fn parse_skip(text: &str) -> Result<usize, String> {
    if text == "0" { Ok(0) } else { parse_count(text) }
}

/// `kvant tune`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant tune --text book.txt --budget-bits 3.0
  kvant tune --text book.txt --budget-bits 2.65,2.75,3.0,3.5 --out smollm2.toml    writes smollm2-2.65.toml and so on
  kvant tune --text book.txt --budget-bits 2.75 --quick
  kvant tune --text book.txt --uniform --kv k2l4v2g64w128s4.mse.rotv --out loud.toml
  kvant tune --text book.txt --codebooks --kv kvq256x4vvq256x4g64w128s4p512        writes tuned.safetensors too
  kvant eval --text other.txt --kv tuned.toml                                      what the file really costs

What was measured is kept in a state file after every layer; the same command goes on from there. Another budget costs
nothing more. Score a tuned file on another text than it was calibrated on.")]
pub struct TuneArgs {
    /// Model: a name or a path to a .gguf file or a model folder
    #[arg(long, value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// Text to calibrate on, UTF-8
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// Bits of a packed element at most, scales and zeros included; several, comma-separated
    #[arg(long, allow_negative_numbers = true, value_name = "B1,B2,..", required_unless_present_any = ["uniform", "codebooks"], value_delimiter = ',', value_parser = parse_bits)]
    pub budget_bits: Vec<f64>,
    /// Scheme file to write
    #[arg(long, value_name = "FILE", default_value = "tuned.toml")]
    pub out: PathBuf,
    /// Everything but the bits: group_len, window, sinks, pages, fit and rotations of this scheme
    #[arg(long, value_name = "SCHEME", default_value = "k2v2g64w128s4p512.ls.rotv")]
    pub kv: String,
    /// Choose no bits: the scheme of --kv in every layer, and only which of its key channels are loud
    #[arg(long, conflicts_with_all = ["budget_bits", "quick"])]
    pub uniform: bool,
    /// Choose no bits: learn the centroids of --kv's sub-vectors (vq), and write them beside --out
    #[arg(long, conflicts_with_all = ["budget_bits", "quick", "uniform", "skip_chunks", "state"])]
    pub codebooks: bool,
    /// Tokens to learn centroids from; of each head 8192 rows at most are kept [default: 8192, or all that the text has]
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = parse_count, requires = "codebooks", conflicts_with_all = ["uniform", "budget_bits"])]
    pub tokens: Option<usize>,
    /// Measure fewer forms over fewer tokens and derive the others
    #[arg(long)]
    pub quick: bool,
    /// Tokens to calibrate on [default: 1024, or 512 with --quick]; with --codebooks those of a chunk [default: 2048]
    #[arg(long, allow_negative_numbers = true, value_name = "TOKENS", value_parser = parse_count)]
    pub ctx: Option<usize>,
    /// Chunks of so many tokens at the text's start to leave out
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 0, value_parser = parse_skip)]
    pub skip_chunks: usize,
    /// File that keeps what was measured [default: beside --out]
    #[arg(long, value_name = "FILE")]
    pub state: Option<PathBuf>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

fn parse_bits(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (1.0..=16.0).contains(&x) => Ok(x),
        _ => Err("must be a number from 1 to 16".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(parse_depth("100").is_ok() && parse_depth("101").is_err() && parse_depth("-1").is_err());
        assert_eq!((parse_skip("0"), parse_skip("7")), (Ok(0), Ok(7)));
        assert!(parse_bound("0").is_ok() && parse_bound("1e-4").is_ok());
        for bad in ["NaN", "inf", "-1", "x", ""] {
            assert!(parse_bound(bad).is_err(), "{bad}");
        }
    }
}
