//! The command line of `kvant serve`. In: words; out: checked values. NOT here: what schemes and models are (the command).

use super::{CacheArgs, Machine};
use crate::models;
use crate::units::{parse_bytes, parse_count, parse_whole};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One object per line
    Json,
}

/// `kvant serve`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant serve --kv balanced --kv-memory 2GiB
  kvant serve --model ./model.gguf --kv k4v4g64w128s4p512 --port 9000 --max-requests 16
  KVANT_API_KEY=secret kvant serve --host 0.0.0.0
  curl http://127.0.0.1:8080/v1/models

A page to try it is at http://HOST:PORT/, figures at /metrics and /status. SIGTERM lets running requests end first.
docs/serving.md is the operator's guide.")]
pub struct ServeArgs {
    /// Model: a name (see `kvant pull`; also OWNER/NAME of the hub), or a path to a .gguf file or a model folder
    #[arg(long, value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// How tokens are stored and read.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Address to listen on; 0.0.0.0 is every address of this machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: String,
    /// Port to listen on (0: one that is free)
    #[arg(long, allow_negative_numbers = true, value_name = "PORT", default_value_t = 8080, value_parser = parse_port, help_heading = "Network")]
    pub port: u16,
    /// Key that clients must send [default: the environment's KVANT_API_KEY, which other users of this machine cannot see; else none]
    #[arg(long, value_name = "KEY", help_heading = "Network")]
    pub api_key: Option<String>,
    /// Name that clients may call this server by, besides localhost and addresses; again for each. Without it any name does where a key is needed or --host is no loopback address
    #[arg(long, value_name = "NAME", value_parser = parse_host, help_heading = "Network")]
    pub allowed_host: Vec<String>,
    /// Largest body of a request
    #[arg(long, allow_negative_numbers = true, value_name = "SIZE", default_value = "4MiB", value_parser = parse_bytes, help_heading = "Network")]
    pub max_body: usize,
    /// Memory of the cache, without the model's weights: a hard bound [default: half of what is available now]
    #[arg(long, allow_negative_numbers = true, value_name = "SIZE", value_parser = parse_bytes, help_heading = "Limits")]
    pub kv_memory: Option<usize>,
    /// Requests that hold cache at once
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 64, value_parser = parse_places, help_heading = "Limits")]
    pub max_requests: usize,
    /// Requests that may wait beyond those; more are answered 429
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 256, value_parser = parse_waiting, help_heading = "Limits")]
    pub max_waiting: usize,
    /// Rows of one step: chunks of prompts and one row for each request that decodes [default: 256; 2048, the most, on a GPU]
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = parse_count, help_heading = "Limits")]
    pub step_tokens: Option<usize>,
    /// Compute every prompt whole, even where another one began alike
    #[arg(long, help_heading = "Limits")]
    pub no_prefix_sharing: bool,
    /// Folder for requests that had to give up their memory [default: they are kept in main memory]
    #[arg(long, value_name = "FOLDER", help_heading = "Limits")]
    pub swap_dir: Option<PathBuf>,
    /// How long running requests may go on after SIGTERM or SIGINT
    #[arg(long, allow_negative_numbers = true, value_name = "SECONDS", default_value_t = 30, value_parser = parse_drain, help_heading = "Limits")]
    pub drain_seconds: u64,
    /// Form of the log, on stderr
    #[arg(long, value_name = "FORM", default_value = "text", help_heading = "Log")]
    pub log_format: LogFormat,
    /// Write prompts into the log
    #[arg(long, help_heading = "Log")]
    pub log_prompts: bool,
    /// Attention kernel [default: the best this processor runs; see `kvant info`]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub kernel: Option<String>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
}

/// Most requests that run or wait: each has a channel and a prompt in memory.
const MOST_PLACES: usize = 65_536;

fn at_most(n: usize, most: usize) -> Result<usize, String> {
    if n > most { Err(format!("must be at most {most}")) } else { Ok(n) }
}

fn parse_places(text: &str) -> Result<usize, String> {
    at_most(parse_count(text)?, MOST_PLACES)
}

fn parse_waiting(text: &str) -> Result<usize, String> {
    let n = parse_whole(text).map_err(|_| format!("must be a whole number from 0 to {MOST_PLACES}"))?;
    at_most(usize::try_from(n).unwrap_or(usize::MAX), MOST_PLACES)
}

fn parse_port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "must be a whole number from 0 to 65535".to_string())
}

fn parse_host(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => Ok(text.to_string()),
        false => Err("must be a name of letters, digits, dots and hyphens, without a port".into()),
    }
}

/// A day: who waits longer for a shutdown has other means.
const LONGEST_DRAIN: u64 = 86_400;

fn parse_drain(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(seconds) if seconds <= LONGEST_DRAIN => Ok(seconds),
        _ => Err(format!("must be a whole number from 0 to {LONGEST_DRAIN}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(parse_port("65536").is_err() && parse_port("-1").is_err() && parse_port("0") == Ok(0));
        assert!(parse_places("0").is_err() && parse_places("65537").is_err() && parse_places("1") == Ok(1));
        assert!(parse_waiting("-1").is_err() && parse_waiting("65537").is_err() && parse_waiting("0") == Ok(0));
        assert!(parse_host("").is_err() && parse_host("a:80").is_err() && parse_host("http://a").is_err());
        assert_eq!(parse_host("kvant.lan").as_deref(), Ok("kvant.lan"));
        assert!(parse_drain("x").is_err() && parse_drain("86401").is_err() && parse_drain("0") == Ok(0));
    }
}
