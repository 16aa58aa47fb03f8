//! What is asked of the engine and what comes back. In and out: plain data.
//! NOT here: progress of a request (sequence.rs).

use crate::Sampling;
use std::time::Duration;

/// One text to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Most tokens to produce (1 or more).
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Goes on behind an end token: for measurements that need a fixed number of steps.
    pub ignore_end: bool,
    /// The text ends before the first of these. Text that could begin one is held back until it is clear.
    pub stop: Vec<String>,
    /// With each token its log probability, and those of so many likeliest ones.
    pub logprobs: Option<usize>,
}

impl Request {
    /// A greedy request.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Self {
        let (sampling, ignore_end, stop, logprobs) = (Sampling::default(), false, Vec::new(), None);
        Self { prompt, max_tokens, sampling, ignore_end, stop, logprobs }
    }
}

/// How likely a token was, by the model's own probabilities: before temperature and cuts.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens and theirs, likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model produced an end token (which is not among the tokens), or a text that the request stops at.
    Stop,
    /// `max_tokens` were produced, or the model's context is full.
    Length,
}

impl FinishReason {
    /// `stop` or `length`.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Something that happened in a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A part of a prompt is in the cache.
    Prefilled {
        /// Number of the request, in the order given.
        request: usize,
        /// Tokens of the prompt done.
        tokens: usize,
        /// Tokens of the prompt.
        of: usize,
        /// Of them taken from shared pages or a kept session.
        cached: usize,
    },
    /// A token was produced.
    Token {
        /// Number of the request.
        request: usize,
        /// The token.
        token: u32,
        /// Text that became complete with it: whole characters, empty for a part of one.
        text: String,
        /// When the request asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// A request cannot go on. The others do.
    Failed {
        /// Number of the request.
        request: usize,
        /// Why, in a sentence.
        why: String,
    },
    /// A request ended.
    Finished {
        /// Number of the request.
        request: usize,
        /// Why.
        reason: FinishReason,
        /// What was held back of a character that never became whole.
        text: String,
    },
}

/// A finished request.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of them taken from shared pages or a kept session.
    pub cached_tokens: usize,
    /// Tokens produced, without the end token.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// From the call that added the request until it entered the cache.
    pub queued: Duration,
    /// From the call that added the request to its first token.
    pub ttft: Duration,
}

impl Outcome {
    /// Tokens that the cache held when it ended. A request that ended for its length did not store its newest token, whose
    /// successor nobody wanted; one that the model ended had stored all it produced.
    pub fn stored_tokens(&self) -> usize {
        self.prompt_tokens + self.tokens.len() - usize::from(self.reason == FinishReason::Length)
    }
}
