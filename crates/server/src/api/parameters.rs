//! Fields that completions and chats share. In: the fields of a body; out: how to sample, when to stop, how to answer; or
//! an error that names the field. NOT here: prompts and messages (completions.rs, chat.rs).

use super::errors::ApiError;
use super::fields::{Fields, empty};
use kvant_engine::{Request, Sampling};
use serde::Deserialize;
use serde_json::Value;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Most answers to one prompt.
const MOST_CHOICES: usize = 128;
/// Most texts that end an answer.
const MOST_STOPS: usize = 16;
/// Most bytes of such a text.
const LONGEST_STOP: usize = 1024;
/// Most likely tokens to name beside each token.
pub const MOST_LOGPROBS: usize = 20;

/// Fields that change nothing in an answer of this server.
const HARMLESS: &[&str] =
    &["user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"];

/// How to answer.
#[derive(Debug, Clone)]
pub struct Parameters {
    /// Most tokens; None where the field is absent.
    pub max_tokens: Option<usize>,
    /// Of the first choice.
    pub sampling: Sampling,
    /// Texts that end an answer.
    pub stop: Vec<String>,
    /// Answers to each prompt.
    pub n: usize,
    /// Goes on behind an end token.
    pub ignore_end: bool,
    /// Whether the answer is sent as it is made.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl Parameters {
    /// Takes the shared fields, and refuses those that this server does not have.
    ///
    /// # Errors
    /// [`ApiError`] names the first field that is wrong.
    pub fn take(fields: &mut Fields, names_of_most: &[&str]) -> Result<Self, ApiError> {
        fields.ignore(HARMLESS);
        for name in ["frequency_penalty", "presence_penalty", "logit_bias"] {
            fields.refuse(name, empty)?;
        }
        fields.refuse("repetition_penalty", |v| v.as_f64() == Some(1.0))?;
        let mut max_tokens = None;
        for name in names_of_most {
            let value = fields.whole(name, 1, usize::MAX)?.and_then(|n| usize::try_from(n).ok());
            match (max_tokens, value) {
                (Some(a), Some(b)) if a != b => {
                    return Err(ApiError::field(name, format!("{b} contradicts {}, which is {a}", names_of_most[0])));
                }
                _ => max_tokens = max_tokens.or(value),
            }
        }
        let n = fields.whole("n", 1, MOST_CHOICES)?.map_or(1, |n| n as usize);
        let stream = fields.take("stream")?.unwrap_or(false);
        let include_usage = stream_options(fields, stream)?;
        Ok(Self {
            max_tokens,
            sampling: sampling(fields)?,
            stop: stops(fields)?,
            n,
            ignore_end: fields.take("ignore_eos")?.unwrap_or(false),
            stream,
            include_usage,
        })
    }

    /// The requests of one prompt: choice by choice the next seed.
    pub fn requests(
        &self,
        prompt: &[u32],
        context: usize,
        default_most: usize,
        logprobs: Option<usize>,
    ) -> Vec<Request> {
        // The context ends an answer anyway.
        let room = (context + 1).saturating_sub(prompt.len()).max(1);
        let max_tokens = self.max_tokens.unwrap_or(default_most).min(room);
        let one = |choice: usize| Request {
            prompt: prompt.to_vec(),
            max_tokens,
            sampling: Sampling { seed: self.sampling.seed.wrapping_add(choice as u64), ..self.sampling },
            ignore_end: self.ignore_end,
            stop: self.stop.clone(),
            logprobs,
        };
        (0..self.n).map(one).collect()
    }
}

fn sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    // The API's defaults: the model's own distribution, whole.
    let temperature = fields.number("temperature", 0.0, 2.0)?.unwrap_or(1.0) as f32;
    let top_p = fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0) as f32;
    let min_p = fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0) as f32;
    // Some clients write -1 for all.
    let top_k = fields.whole("top_k", -1, usize::MAX)?.map_or(0, |k| usize::try_from(k).unwrap_or(0));
    // Any whole number of 64 bits, with a sign or without.
    let seed = match fields.take::<Value>("seed")? {
        None => RandomState::new().build_hasher().finish(),
        Some(v) => v
            .as_u64()
            .or(v.as_i64().map(|s| s as u64))
            .ok_or_else(|| ApiError::field("seed", format!("must be a whole number of 64 bits, got {v}")))?,
    };
    // The fewest likeliest tokens that reach nothing together: the likeliest one.
    let top_p = if top_p == 0.0 { f32::MIN_POSITIVE } else { top_p };
    Ok(Sampling { temperature, top_k, top_p, min_p, seed })
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stop = match fields.take::<Value>("stop")? {
        None => return Ok(Vec::new()),
        Some(value) => {
            serde_json::from_value(value).map_err(|_| ApiError::field("stop", "must be a text or a list of texts"))?
        }
    };
    let stops = match stop {
        OneOrMore::One(text) => vec![text],
        OneOrMore::More(texts) => texts,
    };
    if stops.len() > MOST_STOPS {
        return Err(ApiError::field("stop", format!("must be at most {MOST_STOPS} texts, got {}", stops.len())));
    }
    match stops.iter().position(|s| s.is_empty() || s.len() > LONGEST_STOP) {
        Some(i) => Err(ApiError::field(&format!("stop[{i}]"), format!("must have 1 to {LONGEST_STOP} bytes"))),
        None => Ok(stops),
    }
}

fn stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.take::<Value>("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(ApiError::field("stream_options", "is for streams: send `stream: true` with it"));
    }
    let Value::Object(mut options) = options else {
        return Err(ApiError::field("stream_options", "must be an object"));
    };
    options.remove("include_obfuscation");
    let usage = match options.remove("include_usage") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(usage)) => usage,
        Some(other) => {
            return Err(ApiError::field("stream_options.include_usage", format!("must be true or false, got {other}")));
        }
    };
    match options.keys().next() {
        None => Ok(usage),
        Some(name) => Err(ApiError::unknown("stream_options.", name, "there is no such field here")),
    }
}
