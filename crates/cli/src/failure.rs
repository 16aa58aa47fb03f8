//! How the program fails. In: what went wrong, or clap's error; out: one `error:` line, one `hint:` line, an exit code.
//! NOT here: checking anything; libraries and commands do that and bring their own words.

use crate::args::Cli;
use clap::CommandFactory;
use kvant_kv::RowFormat;
use std::fmt;

/// Exit code of anything the user can mend: a flag, a scheme, a file, a model, this machine.
pub const BAD_INPUT: u8 = 2;
/// Exit code of a proof that failed although the input was right, and of a server without its engine.
pub const PROOF_FAILED: u8 = 1;

/// A failure with its hint and exit code.
#[derive(Debug)]
pub struct Failure {
    /// One sentence that says what is wrong.
    pub what: String,
    /// What to do about it.
    pub hint: String,
    /// The program's exit code.
    pub code: u8,
}

impl Failure {
    /// Something the user can mend.
    pub fn input(what: impl fmt::Display, hint: impl fmt::Display) -> Self {
        Self { what: one_line(&what.to_string()), hint: one_line(&hint.to_string()), code: BAD_INPUT }
    }

    /// A proof that did not hold, or what else went wrong without a fault of the user.
    pub fn proof(what: impl fmt::Display, hint: impl fmt::Display) -> Self {
        Self { code: PROOF_FAILED, ..Self::input(what, hint) }
    }

    /// clap's message about these words, the program's name first, in this program's form.
    pub fn from_clap(error: &clap::Error, words: &[String]) -> Self {
        // clap writes the message, a blank line, then tips and usage. Lists under the message are indented.
        let text = error.render().to_string();
        let what = text.strip_prefix("error: ").unwrap_or(&text);
        let what = what.split("\n\n").next().unwrap_or(what);
        // Nobody who typed an unknown flag wants it taken for a value.
        let tips = text.lines().filter_map(|l| l.trim().strip_prefix("tip: "));
        let tip = tips.into_iter().find(|tip| !tip.starts_with("to pass "));
        let help = match command_of(words).as_str() {
            "kvant" => "`kvant --help` shows every command".to_string(),
            command => format!("`{command} --help` shows what it takes"),
        };
        Self::input(what, tip.map_or(help.clone(), |t| format!("{t}; {help}")))
    }
}

/// The command that the words name, down to the last subcommand that there is.
fn command_of(words: &[String]) -> String {
    let mut command = Cli::command();
    let mut name = command.get_name().to_string();
    for word in words.iter().skip(1) {
        let Some(subcommand) = command.find_subcommand(word).cloned() else { break };
        command = subcommand;
        name = format!("{name} {word}");
    }
    name
}

/// Line breaks and the spaces around them become one space: the contract is one line.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}\nhint: {}", self.what, self.hint)
    }
}

impl std::error::Error for Failure {}

impl From<kvant_kv::SchemeError> for Failure {
    fn from(e: kvant_kv::SchemeError) -> Self {
        Self::input(e, SCHEME_HINT)
    }
}

impl From<kvant_kv::Error> for Failure {
    fn from(e: kvant_kv::Error) -> Self {
        use kvant_kv::Error as E;
        let hint = match &e {
            E::Scheme(_) => SCHEME_HINT,
            E::Unsupported { kernel, .. } if kernel == "cuda" => "docs/cuda.md lists what the GPU reads",
            E::Unsupported { .. } => "`kvant info` lists the kernels and why each can or cannot run here",
            E::NotFinite { format: RowFormat::F16, value, .. } if value.is_finite() => {
                "the model's weights or the prompt give keys or values that f16 cannot hold; `--kv bf16` reaches further"
            }
            E::NotFinite { .. } => "the model's weights or the prompt give keys or values that no cache can hold",
            E::OutOfBlocks { .. } => "give the cache more memory, or ask for fewer tokens",
            E::Gpu { .. } => "docs/cuda.md says what `--device cuda` needs; without it the CPU does the work",
            E::GpuOutOfMemory { .. } => {
                "take fewer requests or tokens, a scheme of fewer bits, or a smaller --kv-memory where the command has it"
            }
            E::OutOfMemory { .. } => "`kvant info --memory SIZE --len TOKENS` says what fits",
            E::Threads { .. } => "give --threads a number from 1 to the cores of this machine",
            _ => "`kvant info` shows what this build supports",
        };
        Self::input(e, hint)
    }
}

impl From<kvant_engine::Error> for Failure {
    fn from(e: kvant_engine::Error) -> Self {
        use kvant_engine::Error as E;
        let hint = match e {
            E::Kv(e) => return e.into(),
            // The engine counts requests from 0, people count prompts and lines from 1.
            E::PromptTooLong { request, tokens, context } => {
                return Self::input(
                    format!("prompt {} has {tokens} tokens, the context of this model holds {context}", request + 1),
                    "shorten the prompt",
                );
            }
            E::EmptyPrompt { request } => {
                return Self::input(format!("prompt {} is empty", request + 1), "give at least one word");
            }
            E::Threads { .. } => "give --threads a number from 1 to the cores of this machine",
            E::Read { .. } => "check that the file is there, that it is a file, and that you may read it",
            E::PromptTooLarge { .. } => "shorten the prompt",
            E::Damaged { .. } => "fetch the file again, or name another model",
            E::NotGguf { .. } | E::DamagedGguf { .. } => {
                "give --model a complete .gguf file; `kvant pull` fetches one that is known to work"
            }
            E::ChatTemplate { .. } => "leave --chat out to give the model the raw prompt",
            E::Sampling { .. } => "`kvant generate --help` shows what each sampling flag takes",
            E::SchemeFile { .. } => {
                "a scheme file is TOML: default = \"k4v4g64w128s4p512\", then [layers] with entries such as \"0-3\" = \"k8v8g64\""
            }
            E::Loud { .. } => "`kvant tune` measures which channels are loud and writes a scheme file for --kv",
            E::NoCodebooks { ref scheme, .. } => {
                let hint = format!(
                    "`kvant tune --codebooks --kv {scheme} --text FILE --out vq.toml` learns them and writes a scheme file for --kv"
                );
                return Self::input(e, hint);
            }
            E::Codebooks { .. } => {
                "`kvant tune --codebooks` writes a scheme file and its codebooks, which belong together"
            }
            E::PromptCache { .. } => {
                "a file of --save-cache goes with the model and the --kv it was made with; make it again"
            }
            E::NeverFits { .. } => "give the cache more memory, or ask for fewer tokens",
            E::Limit { .. } => "`kvant serve --help` shows what each limit takes",
            E::Shape { .. } => {
                "a shape is TOML or JSON with the entries of docs/cuda.md, or a name: qwen3-4b, smollm2-135m"
            }
            E::Swap { .. } => "the folder of preempted requests must be writable and have room",
            E::NanLogit { .. } => "the model's weights are damaged or of a kind that this engine misreads",
            // What is left is about the model file: its architecture, metadata, tensors, tokenizer.
            _ => "give --model another .gguf file; `kvant pull` fetches one that is known to work",
        };
        Self::input(e, hint)
    }
}

/// What a scheme looks like, for every message about one.
pub const SCHEME_HINT: &str = "a scheme is safe, balanced, small, f16, bf16 or like k4v4g64w128s4p512: key bits (2, 3, 4, 8; 2 with l2, l4 or l8) \
     or a codec (tq1 to tq4, rvq11, rvq21, rvq22, sb1 to sb4, vq256x4), value bits or codec, group_len (32, 64, 128), then optionally window_len, sinks, page_len, then .mse or .ls, .rotk, .rotv";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_two_lines_whatever_it_was_given() {
        let f = Failure::input("a\n  b\n\nc", "d\ne");
        assert_eq!(f.to_string(), "error: a b c\nhint: d e");
        assert_eq!(f.code, 2);
        assert_eq!(Failure::proof("x", "y").code, 1);
    }

    #[test]
    fn hints_name_the_command_that_was_meant() {
        let of = |line: &str| command_of(&line.split(' ').map(String::from).collect::<Vec<_>>());
        assert_eq!(of("kvant"), "kvant");
        assert_eq!(of("kvant frobnicate"), "kvant");
        assert_eq!(of("kvant generate --prompt bench"), "kvant generate");
        assert_eq!(of("kvant bench attend --rounds x"), "kvant bench attend");
    }
}
