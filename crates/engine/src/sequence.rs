//! One request on its way. In: tokens as they are chosen; out: where it stands, text as it becomes whole.
//! NOT here: when it runs (scheduler.rs), its keys and values (kvant-kv).

use crate::Error;
use crate::prefixes::Chain;
use crate::request::{Event, FinishReason, Outcome, Request};
use crate::sampler::{Sampler, logprobs};
use crate::scheduler::{Phase, State};
use crate::swap::Swapped;
use crate::tokenizer::{TextStream, Tokenizer};
use kvant_kv::SeqId;
use std::time::{Duration, Instant};

/// Where the keys and values of a request are.
pub enum Place {
    /// Nowhere yet.
    Waiting,
    /// In the cache.
    Cache(SeqId),
    /// In this slot of the GPU's cache.
    Slot(usize),
    /// Moved out of it.
    Out(Swapped),
}

/// A request being decoded.
pub struct Sequence {
    /// Number of its request.
    pub request: usize,
    /// Where its keys and values are.
    pub place: Place,
    /// Prompt and what was produced. While decoding, the newest token is not in the cache yet.
    pub tokens: Vec<u32>,
    /// Tokens in the cache.
    pub stored: usize,
    /// The step that last gave it rows of its prompt.
    pub served: u64,
    /// The kept pages of its text, from the first on.
    pub chain: Chain,
    /// Pages that must stay for it: those of `chain`, and one that it left in the middle.
    pub uses: Chain,
    /// Tokens of its prompt that it did not compute.
    pub cached: usize,
    prompt: usize,
    max_tokens: usize,
    ignore_end: bool,
    logprobs: Option<usize>,
    sampler: Sampler,
    stream: TextStream,
    stops: Stops,
    text: String,
    started: Instant,
    queued: Option<Duration>,
    ttft: Option<Duration>,
    finished: Option<FinishReason>,
}

impl Sequence {
    /// A request whose prompt is not in the cache yet.
    ///
    /// # Errors
    /// [`Error::Sampling`].
    pub fn new(request: usize, asked: Request, started: Instant) -> Result<Self, Error> {
        Ok(Self {
            request,
            place: Place::Waiting,
            prompt: asked.prompt.len(),
            tokens: asked.prompt,
            stored: 0,
            served: 0,
            chain: Chain::new(),
            uses: Chain::new(),
            cached: 0,
            max_tokens: asked.max_tokens,
            ignore_end: asked.ignore_end,
            logprobs: asked.logprobs,
            sampler: Sampler::new(asked.sampling)?,
            stream: TextStream::default(),
            stops: Stops::new(asked.stop),
            text: String::new(),
            started,
            queued: None,
            ttft: None,
            finished: None,
        })
    }

    /// Where it stands, for the scheduler.
    pub fn state(&self) -> State {
        let phase = match self.place {
            Place::Waiting => Phase::Waiting,
            Place::Cache(_) | Place::Slot(_) => Phase::Running,
            Place::Out(_) => Phase::Swapped,
        };
        State { phase, tokens: self.tokens.len(), stored: self.stored, served: self.served }
    }

    /// Its place in the cache, if it is there.
    pub fn id(&self) -> Option<SeqId> {
        match self.place {
            Place::Cache(id) => Some(id),
            _ => None,
        }
    }

    /// Its slot in the GPU's cache, if it is there.
    pub fn slot(&self) -> Option<usize> {
        match self.place {
            Place::Slot(slot) => Some(slot),
            _ => None,
        }
    }

    /// Tokens that it stores at most: the newest one is chosen and not stored.
    pub fn most_tokens(&self, context: usize) -> usize {
        self.prompt.saturating_add(self.max_tokens - 1).min(context)
    }

    /// Whether its next token is the likeliest one, and nobody asks how likely.
    pub fn takes_likeliest(&self) -> bool {
        self.logprobs.is_none() && self.sampler.is_greedy()
    }

    /// It holds no kept page any more; returns those that it did.
    pub fn leave_pages(&mut self) -> Chain {
        self.chain.clear();
        std::mem::take(&mut self.uses)
    }

    /// Whether it has ended.
    pub fn finished(&self) -> bool {
        self.finished.is_some()
    }

    /// Tokens of its prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt
    }

    /// It enters the cache; returns whether for the first time.
    pub fn enters(&mut self) -> bool {
        let first = self.queued.is_none();
        self.queued.get_or_insert_with(|| self.started.elapsed());
        first
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
        self.accept(token, Some(logits), tokenizer, context, events)
    }

    /// Takes its next token, and ends if it is to end. `logits`: for those who ask how likely it was.
    ///
    /// # Errors
    /// None today.
    pub fn accept(
        &mut self,
        token: u32,
        logits: Option<&[f32]>,
        tokenizer: Option<&Tokenizer>,
        context: usize,
        events: &mut Vec<Event>,
    ) -> Result<(), Error> {
        self.ttft.get_or_insert_with(|| self.started.elapsed());
        let request = self.request;
        if !self.ignore_end && tokenizer.is_some_and(|t| t.is_end(token)) {
            self.finish(FinishReason::Stop, events);
            return Ok(());
        }
        let logprobs = self.logprobs.zip(logits).map(|(top, logits)| logprobs(logits, token, top));
        self.tokens.push(token);
        let whole = tokenizer.map_or_else(String::new, |t| self.stream.push(&t.bytes(token)));
        let (text, stopped) = self.stops.push(&whole);
        self.text.push_str(&text);
        events.push(Event::Token { request, token, text, logprobs });
        if stopped {
            self.finish(FinishReason::Stop, events);
        } else if self.tokens.len() - self.prompt >= self.max_tokens || self.stored >= context {
            // The newest token would be stored next: a full context has no place for it.
            self.finish(FinishReason::Length, events);
        }
        Ok(())
    }

    fn finish(&mut self, reason: FinishReason, events: &mut Vec<Event>) {
        let (mut text, mut reason) = (String::new(), reason);
        if !self.stops.found() {
            let (last, stopped) = self.stops.push(&self.stream.finish());
            text = last;
            if stopped {
                reason = FinishReason::Stop;
            } else {
                text.push_str(&self.stops.finish());
            }
        }
        self.text.push_str(&text);
        self.finished = Some(reason);
        events.push(Event::Finished { request: self.request, reason, text });
    }

    /// The outcome of a finished request.
    pub fn outcome(self) -> Option<Outcome> {
        Some(Outcome {
            prompt_tokens: self.prompt,
            cached_tokens: self.cached,
            reason: self.finished?,
            queued: self.queued?,
            ttft: self.ttft?,
            text: self.text,
            tokens: { self.tokens }.split_off(self.prompt),
        })
    }
}

/// Finds texts that end an answer, in text that arrives in pieces.
#[derive(Debug, Default)]
struct Stops {
    stops: Vec<String>,
    /// Text that could begin one of them.
    held: String,
    found: bool,
}

impl Stops {
    /// Empty texts are in every text: they stop nothing.
    fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), ..Self::default() }
    }

    /// Takes text; gives what is before the first stop and can be no part of one, and whether a stop was found.
    fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.found = true;
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let begins = |from: usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[from..]));
        let keep = self.held.char_indices().map(|(i, _)| i).find(|&i| begins(i)).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    fn found(&self) -> bool {
        self.found
    }

    /// What was held back when no more text comes.
    fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(stops: &[&str], text: &[&str]) -> (Vec<String>, bool, String) {
        let mut s = Stops::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = Vec::new();
        for piece in text {
            let (text, found) = s.push(piece);
            out.push(text);
            if found {
                return (out, true, String::new());
            }
        }
        let rest = s.finish();
        (out, false, rest)
    }

    #[test]
    fn text_that_could_begin_a_stop_is_held_back() {
        let own = |x: &[&str]| x.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        assert_eq!(pieces(&["\n\n"], &["a\n", "b\n", "\nc"]), (own(&["a", "\nb", ""]), true, String::new()));
        assert_eq!(pieces(&["abab"], &["xaba", "bab"]), (own(&["x", ""]), true, String::new()));
        assert_eq!(pieces(&["end"], &["the e", "n"]), (own(&["the ", ""]), false, "en".into()));
        assert_eq!(pieces(&["b", "ab"], &["xab"]), (own(&["x"]), true, String::new()), "the one that begins first");
        assert_eq!(pieces(&["€!"], &["5€", "?"]), (own(&["5", "€?"]), false, String::new()));
        assert_eq!(pieces(&["", "z"], &["abc"]), (own(&["abc"]), false, String::new()));
        assert_eq!(pieces(&[], &["a", "b"]), (own(&["a", "b"]), false, String::new()));
    }
}
