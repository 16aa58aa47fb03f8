//! `/v1/chat/completions`. In: messages; out: the assistant's next one. The model's own chat template puts them together.
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
use kvant_engine::Message;
use serde_json::{Map, Value};
use std::sync::Arc;

/// `POST /v1/chat/completions`
pub async fn handle(State(app): State<Arc<App>>, Extension(log): Logged, request: Request) -> Response {
    let arrival = Arrival::new(app, log.clone(), request);
    logged(&log, arrival.answer(parse).await)
}

fn parse(mut fields: Fields) -> Result<Asked, ApiError> {
    let model = fields.take("model")?;
    let messages = messages(fields.take::<Value>("messages")?)?;
    let parameters = Parameters::take(&mut fields, &["max_completion_tokens", "max_tokens"])?;
    let logprobs = logprobs(&mut fields)?;
    refuse(&mut fields)?;
    fields.end()?;
    Ok(Asked {
        kind: Kind::Chat,
        field: "messages",
        model,
        prompts: vec![Prompt::Chat(messages)],
        // As many as there is room for.
        default_most: usize::MAX,
        logprobs,
        parameters,
    })
}

/// Whether a body is a request that could be answered.
pub(super) fn check(body: &[u8]) -> Result<(), ApiError> {
    parse(Fields::parse(body)?).map(drop)
}

fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs", 0, MOST_LOGPROBS)?;
    match (wanted, top) {
        (false, Some(n)) if n > 0 => Err(ApiError::field("top_logprobs", "needs `logprobs: true`")),
        (false, _) => Ok(None),
        (true, n) => Ok(Some(n.unwrap_or(0) as usize)),
    }
}

/// What this server does not do. Values that ask for nothing pass.
fn refuse(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["tools", "functions"] {
        fields.refuse(name, empty)?;
    }
    let choices = |v: &Value| matches!(v.as_str(), Some("none" | "auto"));
    fields.refuse("tool_choice", choices)?;
    fields.refuse("function_call", choices)?;
    fields.ignore(&["parallel_tool_calls"]);
    fields.refuse("response_format", |v| v.get("type").and_then(Value::as_str) == Some("text"))?;
    fields.refuse("modalities", |v| v.as_array().is_some_and(|a| a.iter().all(|m| m.as_str() == Some("text"))))?;
    for name in ["audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"] {
        fields.refuse(name, |_| false)?;
    }
    Ok(())
}

fn messages(value: Option<Value>) -> Result<Vec<Message>, ApiError> {
    let list = match value {
        None => return Err(ApiError::field("messages", "it is missing")),
        Some(Value::Array(list)) if list.is_empty() => {
            return Err(ApiError::field("messages", "it is empty: at least one message is needed"));
        }
        Some(Value::Array(list)) => list,
        Some(_) => return Err(ApiError::field("messages", "must be a list of messages")),
    };
    list.into_iter().enumerate().map(|(i, value)| message(&format!("messages[{i}]"), value)).collect()
}

fn message(at: &str, value: Value) -> Result<Message, ApiError> {
    let Value::Object(mut message) = value else {
        return Err(ApiError::field(at, "must be an object with role and content"));
    };
    let role = match message.remove("role") {
        Some(Value::String(role)) => role,
        Some(_) => return Err(ApiError::field(&format!("{at}.role"), "must be a text")),
        None => return Err(ApiError::field(&format!("{at}.role"), "it is missing")),
    };
    let role = match role.as_str() {
        "system" | "user" | "assistant" => role,
        // The API's newer word for the same.
        "developer" => "system".to_string(),
        other => {
            let why = format!("`{other}` is not supported: it takes system, developer, user and assistant");
            return Err(ApiError::field(&format!("{at}.role"), why));
        }
    };
    let content = content(&format!("{at}.content"), message.remove("content"))?;
    // Whose message it is: part of the API, and of no template here.
    match message.remove("name") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(_) => return Err(ApiError::field(&format!("{at}.name"), "must be a text")),
    }
    end(at, &message)?;
    Ok(Message { role, content })
}

/// Text, or parts that are texts.
fn content(at: &str, value: Option<Value>) -> Result<String, ApiError> {
    let parts = match value {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        None | Some(Value::Null) => return Err(ApiError::field(at, "it is missing")),
        Some(_) => return Err(ApiError::field(at, "must be a text or a list of parts")),
    };
    let mut text = String::new();
    for (i, part) in parts.iter().enumerate() {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(t)) => text.push_str(t),
            (Some("text"), None) => return Err(ApiError::field(&format!("{at}[{i}].text"), "must be a text")),
            (Some(other), _) => {
                let why = format!("parts of type `{other}` are not supported: this server reads text");
                return Err(ApiError::unsupported(&format!("{at}[{i}]"), why));
            }
            (None, _) => return Err(ApiError::field(&format!("{at}[{i}].type"), "it is missing")),
        }
    }
    Ok(text)
}

/// Whatever else a message has must ask for nothing.
fn end(at: &str, rest: &Map<String, Value>) -> Result<(), ApiError> {
    match rest.iter().find(|(_, v)| !empty(v)) {
        None => Ok(()),
        Some((name, _)) => {
            let error = ApiError::unknown(&format!("{at}."), name, "this server does not support it");
            Err(error.coded("unsupported_parameter"))
        }
    }
}
