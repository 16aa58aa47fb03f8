//! One request on its way. In: tokens as they are chosen; out: where it stands, text as it becomes whole.
//! NOT here: when it runs (scheduler.rs), its keys and values (kvant-kv).

use crate::Error;
use crate::request::{Event, FinishReason, Outcome, Request};
use crate::sampler::Sampler;
use crate::scheduler::State;
use crate::tokenizer::{TextStream, Tokenizer};
use kvant_kv::SeqId;
use std::time::{Duration, Instant};

/// A request being decoded.
pub struct Sequence {
    /// Number of its request.
    pub request: usize,
    /// Its place in the cache.
    pub id: SeqId,
    /// Prompt and what was produced. While decoding, the newest token is not in the cache yet.
    pub tokens: Vec<u32>,
    /// Tokens in the cache.
    pub stored: usize,
    prompt: usize,
    max_tokens: usize,
    ignore_end: bool,
    sampler: Sampler,
    stream: TextStream,
    text: String,
    started: Instant,
    ttft: Option<Duration>,
    finished: Option<FinishReason>,
}

impl Sequence {
    /// A request whose prompt is not in the cache yet.
    ///
    /// # Errors
    /// [`Error::Sampling`].
    pub fn new(request: usize, id: SeqId, asked: Request, started: Instant) -> Result<Self, Error> {
        Ok(Self {
            request,
            id,
            prompt: asked.prompt.len(),
            tokens: asked.prompt,
            stored: 0,
            max_tokens: asked.max_tokens,
            ignore_end: asked.ignore_end,
            sampler: Sampler::new(asked.sampling)?,
            stream: TextStream::default(),
            text: String::new(),
            started,
            ttft: None,
            finished: None,
        })
    }

    /// Where it stands, for the scheduler.
    pub fn state(&self) -> State {
        State { prompt: self.prompt, stored: self.stored, finished: self.finished.is_some() }
    }

    /// Tokens of its prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt
    }

    /// Chooses the next token from the logits of the newest stored one, and ends the request if it is to end.
    ///
    /// # Errors
    /// [`Error::NanLogit`].
    pub fn advance(
        &mut self,
        logits: &[f32],
        tokenizer: Option<&Tokenizer>,
        context: usize,
        events: &mut Vec<Event>,
    ) -> Result<(), Error> {
        let token = self.sampler.choose(logits, self.stored - 1)?;
        self.ttft.get_or_insert_with(|| self.started.elapsed());
        let request = self.request;
        if !self.ignore_end && tokenizer.is_some_and(|t| t.is_end(token)) {
            self.finish(FinishReason::Stop, events);
            return Ok(());
        }
        self.tokens.push(token);
        let text = tokenizer.map_or_else(String::new, |t| self.stream.push(&t.bytes(token)));
        self.text.push_str(&text);
        events.push(Event::Token { request, token, text });
        // The newest token would be stored next: a full context has no place for it.
        if self.tokens.len() - self.prompt >= self.max_tokens || self.stored >= context {
            self.finish(FinishReason::Length, events);
        }
        Ok(())
    }

    fn finish(&mut self, reason: FinishReason, events: &mut Vec<Event>) {
        let text = self.stream.finish();
        self.text.push_str(&text);
        self.finished = Some(reason);
        events.push(Event::Finished { request: self.request, reason, text });
    }

    /// The outcome of a finished request.
    pub fn outcome(self) -> Option<Outcome> {
        Some(Outcome {
            prompt_tokens: self.prompt,
            reason: self.finished?,
            ttft: self.ttft?,
            text: self.text,
            tokens: { self.tokens }.split_off(self.prompt),
        })
    }
}
