//! Log probabilities as the API writes them. In: those of tokens, and the tokenizer; out: JSON for chats and for completions.
//! NOT here: computing them (kvant-engine).

use kvant_engine::{LoadedModel, TokenLogprobs};
use serde_json::{Map, Value, json};

/// What JSON, which has no infinity, gets for a probability of zero; the API's own number for very unlikely tokens.
const NEVER: f32 = -9999.0;

fn number(logprob: f32) -> f32 {
    logprob.max(NEVER)
}

fn bytes(model: &LoadedModel, token: u32) -> Vec<u8> {
    model.tokenizer().map_or_else(|_| Vec::new(), |t| t.bytes(token))
}

fn text(model: &LoadedModel, token: u32) -> String {
    String::from_utf8_lossy(&bytes(model, token)).into_owned()
}

/// An entry of `choices[].logprobs.content`.
pub fn chat(model: &LoadedModel, token: u32, logprobs: &TokenLogprobs) -> Value {
    let one = |token: u32, logprob: f32| json!({ "token": text(model, token), "logprob": number(logprob), "bytes": bytes(model, token) });
    let mut entry = one(token, logprobs.logprob);
    entry["top_logprobs"] = logprobs.top.iter().map(|&(t, l)| one(t, l)).collect();
    entry
}

/// `choices[].logprobs` of completions, gathered token by token.
#[derive(Debug, Default, Clone)]
pub struct Lists {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
    /// Characters of the tokens so far, over the whole answer.
    at: usize,
}

impl Lists {
    /// Adds a token.
    pub fn push(&mut self, model: &LoadedModel, token: u32, logprobs: &TokenLogprobs) {
        let text_of = text(model, token);
        self.text_offset.push(self.at);
        self.at += text_of.chars().count();
        self.tokens.push(text_of);
        self.token_logprobs.push(number(logprobs.logprob));
        let top: Map<String, Value> = logprobs.top.iter().map(|&(t, l)| (text(model, t), json!(number(l)))).collect();
        self.top_logprobs.push(top.into());
    }

    /// What was gathered since the last call.
    pub fn take(&mut self) -> Value {
        let Self { tokens, token_logprobs, top_logprobs, text_offset, .. } = self;
        let value = json!({ "tokens": tokens, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs,
            "text_offset": text_offset });
        *self = Self { at: self.at, ..Self::default() };
        value
    }
}
