//! The command line. In: words; out: checked values per command. NOT here: what a scheme, model or kernel is: those stay
//! text here and are resolved by the command, which knows the better hint.

mod accuracy;
mod serve;

pub use accuracy::{Activations, EvalArgs, ScoreName, TuneArgs};
pub use serve::{LogFormat, ServeArgs};

use crate::commands::roofline;
use crate::models;
use crate::units::{parse_bytes, parse_count, parse_whole};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvant_kv::Arm;
use std::path::PathBuf;

/// Default of `--kv` everywhere.
pub const DEFAULT_SCHEME: &str = kvant_engine::presets::DEFAULT;

/// Decode many requests over a low-bit KV cache.
#[derive(Debug, Parser)]
#[command(
    name = "kvant",
    version,
    max_term_width = 100,
    arg_required_else_help = false,
    disable_help_subcommand = true
)]
#[command(after_help = "Examples:
  kvant pull                                    fetch SmolLM2-135M-Instruct into models/
  kvant generate --chat --prompt 'What is a key-value cache?'
  kvant generate --prompts prompts.txt --kv k2v2g32w128s4p512 --json
  kvant serve --kv-memory 2GiB                  an OpenAI API on http://127.0.0.1:8080
  kvant bench attend --shape b=1,q=32,kv=8,d=128,s=16384 --kv k4v4g64,k2v2g32
  kvant eval --text book.txt --kv k4v4g64w128s4p512   what a cache costs in accuracy
  kvant roofline --html roofline.html           what bounds each kernel on this machine
  kvant info --memory 8GiB --len 4096           what fits, per scheme")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands there are.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Fetch a model into models/ (or KVANT_MODELS), check it, print its path
    Pull(PullArgs),
    /// Decode one prompt, or several together in one batch
    Generate(GenerateArgs),
    /// Answer the OpenAI API: many requests together, over one cache
    Serve(ServeArgs),
    /// Measure attention, decoding as a whole, or what an experiment asks
    Bench(BenchArgs),
    /// Measure this machine's ceilings and say of each kernel what bounds it
    Roofline(RooflineArgs),
    /// Measure what a cache costs in accuracy, against f16, over a real text
    Eval(EvalArgs),
    /// Choose bits by layer and loud channels under a budget, and write a scheme file
    Tune(TuneArgs),
    /// Say what this machine and build can do, and how many requests fit a memory, per scheme
    Info(InfoArgs),
    /// Decode four prompts under four schemes and compare size, speed and text
    Demo(DemoArgs),
}

/// Where to run.
#[derive(Debug, Clone, Args)]
pub struct Machine {
    /// Device to run on: cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "cpu", help_heading = "Machine")]
    pub device: String,
    /// Threads [default: every core this process may use]
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = parse_threads, help_heading = "Machine")]
    pub threads: Option<usize>,
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Most threads `--threads` takes. Threads that share a core wait for each other: with 2 cores, 16 threads decode as fast as
/// 2, 64 at half the speed, 128 at an eighth, and 1000 look like a program that hangs.
fn most_threads(cores: usize) -> usize {
    (4 * cores).max(16)
}

fn parse_threads(text: &str) -> Result<usize, String> {
    let cores = cores();
    let most = most_threads(cores);
    match parse_count(text)? {
        n if n > most => Err(format!(
            "must be at most {most} here: four for each core ({cores} on this machine), and no fewer than 16; more only wait \
             for each other"
        )),
        n => Ok(n),
    }
}

/// Most rounds of a bench: each leaves its time in memory, and this many answer any question.
const MAX_ROUNDS: usize = 100_000;

fn parse_rounds(text: &str) -> Result<usize, String> {
    match parse_count(text)? {
        n if n > MAX_ROUNDS => Err(format!("must be at most {MAX_ROUNDS}")),
        n => Ok(n),
    }
}

fn parse_top_k(text: &str) -> Result<usize, String> {
    // Beyond any vocabulary it keeps all tokens, however much beyond.
    parse_whole(text).map(|k| usize::try_from(k).unwrap_or(usize::MAX))
}

/// `kvant pull`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant pull
  KVANT_MODELS=/srv/models kvant pull smollm2-135m
  kvant pull hf:Qwen/Qwen3-0.6B

From the hub (HF_ENDPOINT names another one, HF_TOKEN opens gated models) come config.json, safetensors, tokenizer and chat \
template into OWNER--NAME; --model takes hf:OWNER/NAME or OWNER/NAME then. A folder that is there is not fetched anew.

A pull that was killed leaves a folder .pull-* beside the models; the next pull removes it.
--device and --threads are taken, as by every command, and change nothing here.")]
pub struct PullArgs {
    /// Name of the model, or hf:OWNER/NAME of the Hugging Face hub, with @REVISION or /FILE.gguf behind it
    #[arg(value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
}

/// `kvant generate`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant generate --prompt 'The capital of France is' --max-tokens 16
  kvant generate --chat --prompt 'Write a haiku about rain.' --temperature 0.7 --top-p 0.9 --seed 7
  cat report.txt | kvant generate --prompt - --kv k2v2g32w128s4p512
  kvant generate --prompts prompts.txt --json > out.json")]
pub struct GenerateArgs {
    /// Model: a name (see `kvant pull`) or a path to a .gguf file or a model folder
    #[arg(long, value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// How tokens are stored and read.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Prompt, or - to read it from stdin
    #[arg(
        long,
        allow_negative_numbers = true,
        value_name = "TEXT",
        required_unless_present = "prompts",
        conflicts_with = "prompts"
    )]
    pub prompt: Option<String>,
    /// File of prompts, one per line, decoded together
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Put each prompt into the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// Most tokens to generate per prompt
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 128, value_parser = parse_count)]
    pub max_tokens: usize,
    /// Compute the prompt, keep its cache in this file for --restore-cache, then generate
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompts", "restore_cache"])]
    pub save_cache: Option<PathBuf>,
    /// Go on from a file of --save-cache (same model and --kv): what the prompt shares with it is not computed again
    #[arg(long, value_name = "FILE", conflicts_with = "prompts")]
    pub restore_cache: Option<PathBuf>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Attention kernel [default: the best this processor runs; see `kvant info`]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub kernel: Option<String>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout instead of the text (decode_tok_s is null when there was no decode step, as with
    /// --max-tokens 1: a prompt's first token comes from its prefill)
    #[arg(long)]
    pub json: bool,
}

/// How tokens are stored and read: a command that decodes with one scheme.
#[derive(Debug, Clone, Args)]
pub struct CacheArgs {
    /// How the cache stores tokens: a scheme, a preset (safe, balanced, small) or a scheme file [default: balanced; f16 or bf16 with that --arm]
    #[arg(long, value_name = "SCHEME")]
    pub kv: Option<String>,
    /// Way to decode [default: fused; f16 or bf16 with that --kv]
    #[arg(long, value_name = "ARM")]
    pub arm: Option<ArmName>,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub struct SamplingArgs {
    /// 0 takes the likeliest token; higher is more varied
    #[arg(long, allow_negative_numbers = true, value_name = "T", default_value_t = 0.0, value_parser = parse_temperature, help_heading = "Sampling")]
    pub temperature: f32,
    /// Keep the K likeliest tokens (0: all)
    #[arg(long, allow_negative_numbers = true, value_name = "K", default_value_t = 0, value_parser = parse_top_k, help_heading = "Sampling")]
    pub top_k: usize,
    /// Keep the likeliest tokens that together reach this probability
    #[arg(long, allow_negative_numbers = true, value_name = "P", default_value_t = 1.0, value_parser = parse_top_p, help_heading = "Sampling")]
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the likeliest
    #[arg(long, allow_negative_numbers = true, value_name = "P", default_value_t = 0.0, value_parser = parse_min_p, help_heading = "Sampling")]
    pub min_p: f32,
    /// Seed of the choice
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 0, value_parser = parse_whole, help_heading = "Sampling")]
    pub seed: u64,
}

fn parse_f32(text: &str, ok: impl Fn(f32) -> bool, range: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if ok(x) => Ok(x),
        _ => Err(format!("must be a number {range}")),
    }
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    parse_f32(text, |x| (0.0..=100.0).contains(&x), "from 0 to 100")
}

fn parse_top_p(text: &str) -> Result<f32, String> {
    parse_f32(text, |x| x > 0.0 && x <= 1.0, "above 0 and at most 1")
}

fn parse_min_p(text: &str) -> Result<f32, String> {
    parse_f32(text, |x| (0.0..=1.0).contains(&x), "from 0 to 1")
}

/// Arms by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ArmName {
    /// Plain f16 cache
    F16,
    /// Plain bf16 cache (not in `bench decode`, whose control is f16)
    Bf16,
    /// Attention reads the packed codes
    Fused,
    /// Packed, dequantized once into an f16 copy
    DequantOnce,
    /// The whole packed part dequantized on every step
    DequantStep,
}

impl ArmName {
    /// The library's arm.
    pub fn arm(self) -> Arm {
        match self {
            Self::F16 => Arm::F16,
            Self::Bf16 => Arm::Bf16,
            Self::Fused => Arm::Fused,
            Self::DequantOnce => Arm::DequantOnce,
            Self::DequantStep => Arm::DequantStep,
        }
    }

    /// As on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fused => "fused",
            Self::DequantOnce => "dequant-once",
            Self::DequantStep => "dequant-step",
        }
    }
}

/// `kvant bench`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  kvant bench attend --shape b=1,q=32,kv=8,d=128,s=16384 --kv k8v8g64,k4v4g64,k2v2g32
  kvant bench decode --batch 1,4,16 --prompt-len 1024 --steps 96
  kvant bench layers --kv k4v4g64
  kvant bench --test                            every bench once, tiny: does it run?")]
pub struct BenchArgs {
    /// Run every bench once at a tiny size
    #[arg(long)]
    pub test: bool,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// What to measure.
    #[command(subcommand)]
    pub bench: Option<Bench>,
}

/// The benches there are.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Time one attention call per scheme against an f16 cache and the machine's read bandwidth
    Attend(AttendArgs),
    /// Prove that the arms agree, then time decoding of whole batches
    Decode(DecodeArgs),
    /// One call over all layers against a loop of calls
    #[command(after_help = "Examples:
  kvant bench layers
  kvant bench layers --kv k4v4g64 --threads 1 --json")]
    Layers(ExperimentArgs),
    /// Gathering per-layer caches into one buffer on every step, against storage that needs none
    #[command(after_help = "Examples:
  kvant bench stacking
  kvant bench stacking --kv f16,k2v2g64 --json")]
    Stacking(ExperimentArgs),
    /// Units of work in flight against bandwidth, the bytes being the same
    #[command(after_help = "Examples:
  kvant bench requests
  kvant bench requests --threads 1 --json")]
    Requests(ExperimentArgs),
    /// One unpack for the query heads of a kv head against one per head
    #[command(after_help = "Examples:
  kvant bench sharing
  kvant bench sharing --hot --kv k4v4g64")]
    Sharing(ExperimentArgs),
    /// Fused attention against decoding to f16 first, with the crossover length
    #[command(after_help = "Examples:
  kvant bench passes
  kvant bench passes --kv k4v4g64 --json")]
    Passes(ExperimentArgs),
    /// Key ranges per unit of work, and the rule the product uses
    #[command(after_help = "Examples:
  kvant bench splits
  kvant bench splits --kv k2v2g64 --kernel avx2")]
    Splits(ExperimentArgs),
}

/// `kvant bench attend`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant bench attend --shape b=1,q=32,kv=8,d=128,s=16384 --kv k4v4g64,k2v2g32 --json
  kvant bench attend --shape b=16,q=9,kv=3,d=64,s=1024 --hot --threads 1

Cold by default: every scheme and the read-bandwidth ceiling rotate over copies of at least 600 MB.")]
pub struct AttendArgs {
    /// Batch, query heads, kv heads, head_dim, kv_len
    #[arg(long, value_name = "SHAPE", default_value = "b=1,q=32,kv=8,d=128,s=16384")]
    pub shape: String,
    /// Schemes, comma-separated; f16 always runs as the control
    #[arg(long, value_name = "S1,S2,..", default_value = "k8v8g64,k4v4g64,k3v3g64,k2v2g64")]
    pub kv: String,
    /// Attention kernel [default: the best this processor runs]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub kernel: Option<String>,
    /// One copy, so that data may stay in the processor's caches
    #[arg(long)]
    pub hot: bool,
    /// GPU: lengths spread evenly over 0.5 to 1.5 of s
    #[arg(long)]
    pub ragged: bool,
    /// GPU: the mode in which a request's result does not depend on the batch
    #[arg(long)]
    pub invariant: bool,
    /// Rounds to time [default: about two seconds per scheme, on a GPU 20]
    #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = parse_rounds)]
    pub rounds: Option<usize>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// `kvant bench decode`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant bench decode --batch 1,4,16 --prompt-len 1024 --steps 96 --json
  kvant bench decode --kv k2v2g32w128s4p512 --arms f16,fused --batch 1

First the arms are proved to agree (teacher-forced divergence and greedy tokens), then they are timed in turns.")]
pub struct DecodeArgs {
    /// Model: a name or a path to a .gguf file or a model folder
    #[arg(long, value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// GPU: random weights in place of a model: qwen3-4b, smollm2-135m, or a file with a shape
    #[arg(long, value_name = "CONFIG", conflicts_with = "model")]
    pub random_weights: Option<String>,
    /// Requests decoded together, comma-separated
    #[arg(long, allow_negative_numbers = true, value_name = "N1,N2,..", default_value = "1,4,16", value_delimiter = ',', value_parser = parse_count)]
    pub batch: Vec<usize>,
    /// Tokens of each prompt
    #[arg(long, allow_negative_numbers = true, value_name = "TOKENS", default_value_t = 1024, value_parser = parse_count)]
    pub prompt_len: usize,
    /// Tokens decoded per request; must cross two flushes of a group
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 96, value_parser = parse_count)]
    pub steps: usize,
    /// Packed scheme of all arms but f16
    #[arg(long, value_name = "SCHEME", default_value = DEFAULT_SCHEME)]
    pub kv: String,
    /// Ways to decode, comma-separated
    #[arg(long, value_name = "A1,A2,..", default_value = "f16,fused,dequant-once,dequant-step", value_delimiter = ',')]
    pub arms: Vec<ArmName>,
    /// Attention kernel [default: the best this processor runs]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub kernel: Option<String>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
    /// Be the process of one arm: what the bench starts, so that arms do not share memory
    #[arg(long, hide = true)]
    pub arm_process: bool,
}

/// `kvant bench layers`, `stacking`, `requests`, `sharing`, `passes`, `splits`
#[derive(Debug, Args)]
pub struct ExperimentArgs {
    /// Schemes, comma-separated [default: those that the question is about]
    #[arg(long, value_name = "S1,S2,..")]
    pub kv: Option<String>,
    /// Attention kernel [default: the best this processor runs]
    #[arg(long, value_name = "NAME", help_heading = "Machine")]
    pub kernel: Option<String>,
    /// One copy, so that data may stay in the processor's caches
    #[arg(long)]
    pub hot: bool,
    /// Tiny sizes and one round: does it run? Figures of these sizes say nothing
    #[arg(long)]
    pub quick: bool,
    /// Rounds to time [default: as many as about 0.3 seconds per way take, 5 to 60]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub rounds: Option<usize>,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// `kvant roofline`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant roofline
  kvant roofline --html roofline.html --threads 1
  kvant roofline --quick --json

A full run takes up to three minutes on two cores and about 6 GB of memory.")]
pub struct RooflineArgs {
    /// Query heads, kv heads, head_dim
    #[arg(long, value_name = "q=Q,kv=KV,d=D", default_value = "q=32,kv=8,d=128")]
    pub shape: String,
    /// Schemes, comma-separated
    #[arg(long, value_name = "S1,S2,..", default_value = roofline::DEFAULT_SCHEMES)]
    pub kv: String,
    /// Operations to look at: attend, prefill, append, comma-separated [default: all]
    #[arg(long, value_name = "OP,..")]
    pub only: Option<String>,
    /// Tiny sizes and few rounds: does it run? Figures of these sizes say nothing
    #[arg(long)]
    pub quick: bool,
    /// Write one self-contained page with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// A line for the report, such as the commit
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,
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

/// `kvant info`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant info
  kvant info --memory 8GiB --len 4096
  kvant info --memory 80GiB --len 32768 --shape layers=32,q=32,kv=8,d=128 --kv f16,k4v4g64w128s4p512 --json")]
pub struct InfoArgs {
    /// Memory for the cache alone, without the model's weights [default: what is available now]
    #[arg(long, allow_negative_numbers = true, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<usize>,
    /// Tokens of each request [default: 4096, or the model's context where that is smaller]
    #[arg(long, allow_negative_numbers = true, value_name = "TOKENS", value_parser = parse_count)]
    pub len: Option<usize>,
    /// Model whose layers count: a name or a path to a .gguf file or a model folder [default: smollm2-135m]
    #[arg(long, value_name = "MODEL", conflicts_with = "shape")]
    pub model: Option<String>,
    /// Layers, query heads, kv heads and head_dim in place of a model
    #[arg(long, value_name = "layers=L,q=Q,kv=KV,d=D")]
    pub shape: Option<String>,
    /// Schemes, comma-separated
    #[arg(
        long,
        value_name = "S1,S2,..",
        default_value = "f16,k8v8g64w128s4p512,k4v4g64w128s4p512,k3v3g64w128s4p512,k2v2g32w128s4p512"
    )]
    pub kv: String,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
    /// Print one JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// `kvant demo`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kvant demo
  kvant demo --max-tokens 32 --threads 1")]
pub struct DemoArgs {
    /// Model: a name (fetched if it is not there) or a path to a .gguf file or a model folder
    #[arg(long, value_name = "MODEL", default_value = models::DEFAULT)]
    pub model: String,
    /// Tokens to generate per prompt
    #[arg(long, allow_negative_numbers = true, value_name = "N", default_value_t = 96, value_parser = parse_count)]
    pub max_tokens: usize,
    /// Where to run.
    #[command(flatten)]
    pub machine: Machine,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(parse_threads("0").is_err() && parse_threads("1000000").is_err() && parse_threads("8").is_ok());
        assert_eq!([1, 2, 4, 5, 128].map(most_threads), [16, 16, 16, 20, 512]);
        assert!(parse_rounds("100001").is_err() && parse_rounds("100000").is_ok());
        assert_eq!(parse_top_k("18446744073709551615"), Ok(usize::MAX));
        for bad in ["-0.1", "NaN", "inf", "x", "101"] {
            assert!(parse_temperature(bad).is_err(), "{bad}");
        }
        assert!(parse_top_p("0").is_err() && parse_top_p("1").is_ok() && parse_top_p("1.1").is_err());
        assert!(parse_min_p("0").is_ok() && parse_min_p("-1").is_err());
    }
}
