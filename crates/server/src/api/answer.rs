//! From requests to an answer. In: a job and its places; out: one JSON object when all of it is done, or a stream of events
//! (stream.rs). The receiver of the worker's replies lives in the answer: a client that goes away takes it along, and the
//! worker cancels. NOT here: reading bodies, decoding.

use super::App;
use super::errors::ApiError;
use super::logprobs::{self, Lists};
use super::parameters::Parameters;
use super::stream;
use crate::access::Log;
use crate::admission::Places;
use crate::worker::{Failed, Reply};
use axum::Json;
use axum::response::{IntoResponse, Response};
use kvant_engine::TokenLogprobs;
use serde_json::{Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::UnboundedReceiver;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Text that goes on.
    Completion,
    /// The assistant's next message.
    Chat,
}

/// Prompts as tokens, and how to answer them.
#[derive(Debug)]
pub struct Job {
    kind: Kind,
    /// Field that holds the prompts, for errors.
    field: &'static str,
    prompts: Vec<Vec<u32>>,
    default_most: usize,
    logprobs: Option<usize>,
    parameters: Parameters,
}

impl Job {
    /// A job; `default_most` tokens where the parameters have no number.
    pub fn new(
        kind: Kind,
        field: &'static str,
        prompts: Vec<Vec<u32>>,
        default_most: usize,
        logprobs: Option<usize>,
        parameters: Parameters,
    ) -> Self {
        Self { kind, field, prompts, default_most, logprobs, parameters }
    }
}

/// What every object of one answer repeats, and what it has counted.
pub struct Answer {
    pub(super) app: Arc<App>,
    pub(super) log: Log,
    pub(super) kind: Kind,
    pub(super) id: String,
    created: u64,
    arrived: Instant,
    per_prompt: usize,
    prompt_tokens: usize,
    cached_tokens: usize,
    completion_tokens: usize,
    /// Choices that have not ended.
    pub(super) left: usize,
}

/// Hands the job to the worker and waits until it is taken, then for the answer or its stream.
///
/// # Errors
/// [`ApiError`] for what the engine refuses, and for an engine that fails before the answer begins.
pub async fn answer(app: Arc<App>, log: Log, job: Job, places: Places, arrived: Instant) -> Result<Response, ApiError> {
    let Job { kind, field, prompts, default_most, logprobs, parameters } = job;
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    log.note(|n| n.prompt_tokens = prompt_tokens);
    let context = app.model.config().context;
    let requests: Vec<_> =
        prompts.iter().flat_map(|p| parameters.requests(p, context, default_most, logprobs)).collect();
    let choices = requests.len();
    // The API's own default is a number too.
    let exact = parameters.max_tokens.is_some() || kind == Kind::Completion;
    let mut replies = app.worker.submit(requests, exact, places, arrived).map_err(|_| engine_gone())?;
    match replies.recv().await {
        Some(Reply::Accepted) => {}
        Some(Reply::Refused(error)) => return Err(ApiError::of_engine(&error, field)),
        Some(Reply::Failed(why)) => return Err(failed(&why)),
        _ => return Err(engine_gone()),
    }
    let prefix = match kind {
        Kind::Completion => "cmpl",
        Kind::Chat => "chatcmpl",
    };
    let answer = Answer {
        id: format!("{prefix}-{:016x}", RandomState::new().build_hasher().finish()),
        created: now(),
        per_prompt: parameters.n,
        prompt_tokens,
        cached_tokens: 0,
        completion_tokens: 0,
        left: choices,
        app,
        log,
        kind,
        arrived,
    };
    if parameters.stream {
        Ok(stream::response(answer, replies, choices, parameters.include_usage))
    } else {
        answer.whole(replies, choices).await
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The worker is not there: nobody answers.
pub fn engine_gone() -> ApiError {
    ApiError::internal("the engine has ended; this server answers no more")
}

/// A request that was under way and does not end.
pub fn failed(why: &Failed) -> ApiError {
    match why {
        Failed::Engine(words) => ApiError::internal(format!("the engine failed: {words}")),
        Failed::ShuttingDown => ApiError::shutting_down(),
    }
}

/// One text in the making.
#[derive(Default)]
struct Choice {
    text: String,
    reason: &'static str,
    chat: Vec<Value>,
    lists: Lists,
    with_logprobs: bool,
}

impl Answer {
    /// Counts a reply, for usage and log.
    pub fn count(&mut self, reply: &Reply) {
        match reply {
            Reply::Started { choice, cached, queued } => {
                // The choices of one prompt share it; it is counted once.
                if choice.is_multiple_of(self.per_prompt) {
                    self.cached_tokens += cached;
                }
                let (cached, queued) = (self.cached_tokens, *queued);
                self.log.note(|n| {
                    n.cached_tokens = cached;
                    n.queue.get_or_insert(queued);
                });
            }
            Reply::Token { .. } => {
                self.completion_tokens += 1;
                let (tokens, took) = (self.completion_tokens, self.arrived.elapsed());
                self.log.note(|n| {
                    n.completion_tokens = tokens;
                    n.ttft.get_or_insert(took);
                });
            }
            Reply::Finished { reason, .. } => {
                self.left -= 1;
                self.log.note(|n| n.finish_reason = Some(reason.as_str()));
            }
            Reply::Failed(why) => self.note(&failed(why)),
            Reply::Accepted | Reply::Refused(_) => {}
        }
    }

    /// Notes an error that comes when the status line has been sent.
    pub fn note(&self, error: &ApiError) {
        self.log.note(|n| n.error = Some(error.words_for_log()));
    }

    /// Tokens in and out.
    pub fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": { "cached_tokens": self.cached_tokens },
        })
    }

    /// An object of this answer, whole or a part.
    pub fn object(&self, part: bool, choices: Vec<Value>) -> Value {
        let object = match (self.kind, part) {
            (Kind::Completion, _) => "text_completion",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.app.options.model,
            "system_fingerprint": concat!("kvant-", env!("CARGO_PKG_VERSION")), "choices": choices,
        })
    }

    /// Log probabilities of one token of a chat.
    pub fn chat_logprobs(&self, token: u32, logprobs: &TokenLogprobs) -> Value {
        logprobs::chat(&self.app.model, token, logprobs)
    }

    async fn whole(mut self, mut replies: UnboundedReceiver<Reply>, choices: usize) -> Result<Response, ApiError> {
        let mut made: Vec<Choice> = std::iter::repeat_with(Choice::default).take(choices).collect();
        while self.left > 0 {
            let Some(reply) = replies.recv().await else { return Err(engine_gone()) };
            self.count(&reply);
            match reply {
                Reply::Token { choice, token, text, logprobs } => {
                    let c = &mut made[choice];
                    c.text.push_str(&text);
                    if let Some(l) = logprobs {
                        c.with_logprobs = true;
                        match self.kind {
                            Kind::Chat => c.chat.push(self.chat_logprobs(token, &l)),
                            Kind::Completion => c.lists.push(&self.app.model, token, &l),
                        }
                    }
                }
                Reply::Finished { choice, reason, text } => {
                    made[choice].text.push_str(&text);
                    made[choice].reason = reason.as_str();
                }
                Reply::Failed(why) => return Err(failed(&why)),
                Reply::Started { .. } | Reply::Accepted | Reply::Refused(_) => {}
            }
        }
        let kind = self.kind;
        let one = |(index, mut c): (usize, Choice)| match kind {
            Kind::Chat => json!({
                "index": index, "finish_reason": c.reason,
                "message": { "role": "assistant", "content": c.text, "refusal": null },
                "logprobs": c.with_logprobs.then(|| json!({ "content": c.chat, "refusal": null })),
            }),
            Kind::Completion => json!({
                "index": index, "finish_reason": c.reason, "text": c.text,
                "logprobs": c.with_logprobs.then(|| c.lists.take()),
            }),
        };
        let mut object = self.object(false, made.into_iter().enumerate().map(one).collect());
        object["usage"] = self.usage();
        Ok(Json(object).into_response())
    }
}
