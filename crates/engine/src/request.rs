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
}

impl Request {
    /// A greedy request.
    pub fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self { prompt, max_tokens, sampling: Sampling::default(), ignore_end: false }
    }
}

/// Why a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model produced an end token (which is not among the tokens).
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
    },
    /// A token was produced.
    Token {
        /// Number of the request.
        request: usize,
        /// The token.
        token: u32,
        /// Text that became complete with it: whole characters, empty for a part of one.
        text: String,
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
    /// Tokens produced, without the end token.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
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
