//! `/v1/completions`. In: prompts as text or tokens, several of them or one; out: their continuations.
//! NOT here: shared fields (parameters.rs), waiting for the engine (answer.rs, stream.rs).

use super::answer::{Asked, Kind};
use super::errors::ApiError;
use super::fields::{Fields, empty};
use super::parameters::{MOST_LOGPROBS, Parameters};
use super::prompts::Prompt;
use super::{App, Arrival, Logged, logged};
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::Value;
use std::sync::Arc;

/// Tokens of a completion that names no number, as the API has it.
const DEFAULT_MOST: usize = 16;

/// `POST /v1/completions`
pub async fn handle(State(app): State<Arc<App>>, Extension(log): Logged, request: Request) -> Response {
    let arrival = Arrival::new(app, log.clone(), request);
    logged(&log, arrival.answer(parse).await)
}

fn parse(mut fields: Fields) -> Result<Asked, ApiError> {
    let model = fields.take("model")?;
    let prompts = prompts(fields.take::<Value>("prompt")?)?;
    let parameters = Parameters::take(&mut fields, &["max_tokens"])?;
    let logprobs = fields.whole("logprobs", 0, MOST_LOGPROBS)?.map(|n| n as usize);
    fields.refuse("echo", empty)?;
    fields.refuse("suffix", |v| v.as_str() == Some(""))?;
    fields.refuse("best_of", |v| v.as_u64() == Some(parameters.n as u64))?;
    fields.end()?;
    let (kind, field) = (Kind::Completion, "prompt");
    Ok(Asked { kind, field, model, prompts, default_most: DEFAULT_MOST, logprobs, parameters })
}

/// Whether a body is a request that could be answered.
pub(super) fn check(body: &[u8]) -> Result<(), ApiError> {
    parse(Fields::parse(body)?).map(drop)
}

fn prompts(value: Option<Value>) -> Result<Vec<Prompt>, ApiError> {
    const WANTED: &str = "must be a text, a list of texts, a list of tokens, or a list of such lists";
    let token = |v: &Value| v.as_u64().and_then(|t| u32::try_from(t).ok());
    let tokens = |list: &[Value]| list.iter().map(token).collect::<Option<Vec<u32>>>();
    let list = match value {
        None => return Err(ApiError::field("prompt", "it is missing")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(ApiError::field("prompt", "it is empty")),
        Some(_) => return Err(ApiError::field("prompt", WANTED)),
    };
    if list[0].is_number() {
        let one = tokens(&list).ok_or_else(|| ApiError::field("prompt", WANTED))?;
        return Ok(vec![Prompt::Tokens(one)]);
    }
    let each = list.into_iter().enumerate().map(|(i, v)| match v {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => match tokens(&list) {
            Some(list) => Ok(Prompt::Tokens(list)),
            None => Err(ApiError::field(&format!("prompt[{i}]"), "must hold tokens, which are whole numbers")),
        },
        _ => Err(ApiError::field(&format!("prompt[{i}]"), "must be a text or a list of tokens")),
    });
    each.collect()
}
