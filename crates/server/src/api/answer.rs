//! From requests to an answer. In: what a body asks for; out: one JSON object when all of it is done, or a stream of events
//! (stream.rs). The receiver of the worker's replies lives in the answer: a client that goes away takes it along, and the
//! worker cancels. NOT here: reading bodies, decoding.

use super::App;
use super::errors::ApiError;
use super::logprobs::{self, Lists};
use super::parameters::Parameters;
use super::prompts::Prompt;
use super::stream;
use crate::access::Log;
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

/// What a body asks for.
pub struct Asked {
    /// Which of the API's two.
    pub kind: Kind,
    /// Field that holds the prompts, for errors.
    pub field: &'static str,
    /// The model's name.
    pub model: Option<String>,
    /// Each is answered.
    pub prompts: Vec<Prompt>,
    /// Tokens where the parameters have no number.
    pub default_most: usize,
    /// Most likely tokens to name beside each token.
    pub logprobs: Option<usize>,
    /// How to answer.
    pub parameters: Parameters,
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

/// Checks what is asked for, makes tokens of the prompts, hands them to the worker and waits until they are taken, then for
/// the answer or its stream.
///
/// # Errors
/// [`ApiError`] for what cannot be answered, and for an engine that fails before the answer begins.
pub async fn answer(app: Arc<App>, log: Log, asked: Asked, arrived: Instant) -> Result<Response, ApiError> {
    let Asked { kind, field, model, prompts, default_most, logprobs, parameters } = asked;
    app.check_model(model)?;
    let context = app.model.config().context;
    let places = app.enter(prompts.len() * parameters.n, if prompts.len() > 1 { field } else { "n" })?;
    prompts.iter().try_for_each(|prompt| prompt.check(field, context, app.longest_token))?;
    if app.options.log_prompts {
        let words = prompts.iter().map(Prompt::words).collect::<Vec<_>>().join("\n---\n");
        log.note(|n| n.prompt = Some(words));
    }
    let model = app.model.clone();
    // Splitting a long text takes a while: other connections are not to wait for it.
    let tokens = move || prompts.into_iter().map(|prompt| prompt.tokens(&model)).collect::<Result<Vec<_>, _>>();
    let prompts = tokio::task::spawn_blocking(tokens)
        .await
        // A panic's words may quote the text.
        .map_err(|_| ApiError::internal("the tokenizer failed"))?
        .map_err(|e| ApiError::of_engine(&e, field))?;
    if let Some(long) = prompts.iter().find(|prompt| prompt.len() > context) {
        // Before every choice has a copy of it.
        return Err(ApiError::too_many_tokens(field, long.len(), context));
    }
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    log.note(|n| n.prompt_tokens = prompt_tokens);
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
