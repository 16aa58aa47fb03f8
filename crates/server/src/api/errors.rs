//! Errors as the OpenAI API has them. In: what is wrong; out: a status code and
//! `{"error": {"message", "type", "param", "code"}}`. NOT here: checking anything.

use crate::admission::Full;
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use kvant_engine::Error;
use serde_json::{Value, json};

/// A request that is answered with an error.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// One clear sentence.
    pub message: String,
    /// Class of the error, as clients match on it.
    pub kind: &'static str,
    /// The field that is wrong.
    pub param: Option<String>,
    /// The same for the log, where what a client made up has no place.
    pub for_log: Option<Box<str>>,
    /// Finer than the class.
    pub code: Option<&'static str>,
    /// Seconds after which the same request may be tried again.
    pub retry_after_s: Option<u64>,
}

const INVALID: &str = "invalid_request_error";

/// Longest name of a client's that a message repeats, in characters.
const LONGEST_NAME: usize = 80;
/// Longest reason, which may quote a value.
const LONGEST_WHY: usize = 400;

/// The beginning of a text: what a client sent comes back to be recognized, and not whole.
fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_string(),
        Some((end, _)) => format!("{}..", &text[..end]),
    }
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind, param: None, for_log: None, code: None, retry_after_s: None }
    }

    /// A request that cannot be read, or whose parts do not go together.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, message)
    }

    /// A field with a value that it does not take; the sentence begins with its name.
    pub fn field(name: &str, why: impl std::fmt::Display) -> Self {
        let why = short(&why.to_string(), LONGEST_WHY);
        let (param, for_log) = (Some(name.to_string()), Some(name.into()));
        Self { param, for_log, ..Self::invalid(format!("{name}: {why}")) }
    }

    /// A field that nobody knows, `at` some place with its separator: its name is the client's own words.
    pub fn unknown(at: &str, name: &str, why: impl std::fmt::Display) -> Self {
        let full = format!("{at}{}", short(name, LONGEST_NAME));
        Self { for_log: Some(format!("{at}unknown").into()), ..Self::field(&full, why) }
    }

    /// A prompt of more tokens than a context holds.
    pub fn too_many_tokens(prompt: &str, tokens: usize, context: usize) -> Self {
        let why = format!("{tokens} tokens are more than the {context} that this model's context holds");
        Self::field(prompt, why).coded("context_length_exceeded")
    }

    /// A prompt that is too long whatever its tokens are.
    pub fn too_many_bytes(prompt: &str, bytes: usize, context: usize) -> Self {
        let why = format!("{bytes} bytes are more than {context} tokens, this model's context, can hold");
        Self::field(prompt, why).coded("context_length_exceeded")
    }

    /// A field that this server does not have, and that would change the answer.
    pub fn unsupported(name: &str, why: impl std::fmt::Display) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::field(name, why) }
    }

    /// The same with a code.
    pub fn coded(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// No such model.
    pub fn no_model(asked: &str, there: &str) -> Self {
        let asked = short(asked, LONGEST_NAME);
        let message = format!("model: there is no model `{asked}` here; this server has `{there}`");
        let e = Self::new(StatusCode::NOT_FOUND, INVALID, message).coded("model_not_found");
        Self { param: Some("model".into()), for_log: Some("model".into()), ..e }
    }

    /// No such address.
    pub fn no_route(method: &str, path: &str) -> Self {
        let (method, path) = (short(method, LONGEST_NAME), short(path, LONGEST_NAME));
        let message = format!(
            "there is no {method} {path} here; GET /v1/models, POST /v1/completions and /v1/chat/completions are"
        );
        Self::new(StatusCode::NOT_FOUND, INVALID, message).coded("unknown_url")
    }

    /// The address takes other methods.
    pub fn no_method(method: &str, path: &str) -> Self {
        let (method, path) = (short(method, LONGEST_NAME), short(path, LONGEST_NAME));
        let message = format!("{path} does not take the method {method}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, message).coded("method_not_allowed")
    }

    /// No key, or another one.
    pub fn no_key(sent: bool) -> Self {
        let message = match sent {
            true => "the API key is not the one of this server",
            false => "this server needs an API key: send the header `Authorization: Bearer KEY`",
        };
        Self::new(StatusCode::UNAUTHORIZED, INVALID, message).coded("invalid_api_key")
    }

    /// A page of another site asks through a browser.
    pub fn foreign_page(origin: &str) -> Self {
        let origin = short(origin, LONGEST_NAME);
        let message = format!("requests from pages of another site ({origin}) are not answered");
        Self::new(StatusCode::FORBIDDEN, INVALID, message).coded("cross_origin")
    }

    /// A name for this server that it was not told of: an address of somebody's site may lead here.
    pub fn foreign_host(host: &str) -> Self {
        let host = short(host, LONGEST_NAME);
        let message =
            format!("this server is not called {host}; ask for localhost or its address, or let it know the name");
        Self::new(StatusCode::FORBIDDEN, INVALID, message).coded("host_not_allowed")
    }

    /// A body over the limit.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the body is larger than {limit} bytes, the most this server reads");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, message).coded("request_too_large")
    }

    /// A body that does not come.
    pub fn too_slow(seconds: u64) -> Self {
        let message = format!("the body did not arrive within {seconds} seconds");
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, message).coded("request_timeout")
    }

    /// Something failed that is not the client's doing.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).coded("internal_error")
    }

    /// The server is going away.
    pub fn shutting_down() -> Self {
        let message = "the server is shutting down";
        let e = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message).coded("shutting_down");
        Self { retry_after_s: Some(5), ..e }
    }

    /// What the engine says of a request, or of a step.
    pub fn of_engine(error: &Error, prompt: &str) -> Self {
        match error {
            Error::PromptTooLong { tokens, context, .. } => Self::too_many_tokens(prompt, *tokens, *context),
            Error::PromptTooLarge { .. } => Self::field(prompt, error).coded("context_length_exceeded"),
            Error::NeverFits { tokens, need, budget, .. } => {
                let why = format!(
                    "with the answer, {tokens} tokens take up to {need} bytes of cache, and this server has {budget}"
                );
                Self::field(prompt, why).coded("memory_exceeded")
            }
            Error::EmptyPrompt { .. } => Self::field(prompt, "it is empty: at least one token is needed"),
            Error::NoSuchToken { .. } | Error::Tokenizer { .. } | Error::ChatTemplate { .. } => {
                Self::field(prompt, error)
            }
            Error::Sampling { option, allowed, got } => Self::field(option, format!("must be {allowed}, got {got}")),
            other => Self::internal(other.to_string()),
        }
    }

    /// What the log says of it. Sentences about a request quote what it says, which may be somebody's prompt: of those the
    /// log has the field, where it is one that this server knows, and the code.
    pub fn words_for_log(&self) -> String {
        if self.status.is_server_error() {
            return self.message.clone();
        }
        [self.for_log.as_deref(), self.code].into_iter().flatten().collect::<Vec<_>>().join(" ")
    }

    /// The body, which is also what a stream sends when it fails midway.
    pub fn body(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.param, "code": self.code } })
    }
}

impl From<Full> for ApiError {
    fn from(full: Full) -> Self {
        let message = "the server is busy: every place for running and waiting requests is taken; try again later";
        let e = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message).coded("server_busy");
        Self { retry_after_s: Some(full.retry_after_s), ..e }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            // A client that has to wait is not to keep a connection from others.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_of_a_client_are_shortened_and_its_own_names_are_not_logged() {
        let long = "secret ".repeat(100_000);
        for e in [
            ApiError::unknown("messages[0].", &long, "there is no such field here"),
            ApiError::field("seed", format!("must be a whole number, got {long}")),
            ApiError::no_model(&long, "tiny"),
            ApiError::no_route("GET", &long),
            ApiError::no_method(&long, "/"),
            ApiError::foreign_page(&long),
            ApiError::foreign_host(&long),
        ] {
            assert!(e.body().to_string().len() < 1200, "{}", e.body());
            assert!(!e.words_for_log().contains("secret"), "{}", e.words_for_log());
        }
        assert_eq!(ApiError::unknown("messages[0].", "x", "no").words_for_log(), "messages[0].unknown");
        assert_eq!(short("\u{e4}\u{f6}\u{fc}", 2), "\u{e4}\u{f6}..");
    }
}
