//! Routes. In: HTTP requests; out: JSON, server-sent events, text or the page. Each handler reads its body within bounds of
//! size, time and number, and says in `Log` what the log is to know.
//! NOT here: keys and log lines (access.rs), connections (serve.rs), decoding (worker.rs).

pub(crate) mod answer;
mod chat;
mod completions;
pub mod errors;
mod fields;
mod logprobs;
mod models;
mod parameters;
pub(crate) mod prompts;
mod stream;

use crate::access::{self, Log};
use crate::admission::{Admission, Places, Reading};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::page;
use crate::status::Shared;
use crate::worker::Worker;
use answer::Asked;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router, middleware};
use errors::ApiError;
use fields::Fields;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use kvant_engine::LoadedModel;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// What handlers share.
pub struct App {
    pub(crate) model: Arc<LoadedModel>,
    pub(crate) options: Options,
    pub(crate) worker: Worker,
    pub(crate) admission: Arc<Admission>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) draining: AtomicBool,
    /// Bytes of the model's longest token.
    pub(crate) longest_token: Option<usize>,
    /// When the model was loaded, in seconds since 1970.
    pub(crate) created: u64,
}

/// For fuzzing: reads a body as both kinds of request are read; whether either takes it.
#[doc(hidden)]
pub fn takes(body: &[u8]) -> bool {
    let (chat, completion) = (chat::check(body), completions::check(body));
    chat.is_ok() || completion.is_ok()
}

/// Every address there is, as logs and metrics name it.
pub(crate) const ROUTES: &[&str] = &[
    "/",
    "/health",
    "/metrics",
    "/status",
    "/v1/models",
    "/v1/models/{*model}",
    "/v1/completions",
    "/v1/chat/completions",
];

/// The routes over what they share.
pub fn router(app: Arc<App>) -> Router {
    let router: Router<Arc<App>> = Router::new()
        .route("/", get(page::page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .fallback(async |method: Method, uri: Uri| ApiError::no_route(method.as_str(), uri.path()))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| ApiError::no_method(method.as_str(), uri.path()));
    router.layer(middleware::from_fn_with_state(app.clone(), access::watch)).with_state(app)
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, word) = match (app.worker.alive(), app.draining.load(Ordering::Relaxed)) {
        (false, _) => (StatusCode::SERVICE_UNAVAILABLE, "failed"),
        (true, true) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        (true, false) => (StatusCode::OK, "ok"),
    };
    (status, Json(json!({ "status": word }))).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render(&app.shared))
}

async fn status(State(app): State<Arc<App>>) -> Json<Value> {
    let context = app.model.config().context;
    let draining = app.draining.load(Ordering::Relaxed);
    Json(app.shared.json(&app.options.model, &app.options.scheme, context, draining))
}

impl App {
    /// The object in a request's body.
    async fn fields(&self, body: Body) -> Result<Fields, ApiError> {
        let limit = self.options.max_body_bytes;
        // Refused before it is read where its length is known.
        if body.size_hint().lower() > limit as u64 {
            return Err(ApiError::too_large(limit));
        }
        let mut leave = self.admission.body()?;
        let read = tokio::time::timeout(self.options.body_timeout, bytes(body, limit, &mut leave)).await;
        let bytes = read.map_err(|_| ApiError::too_slow(self.options.body_timeout.as_secs()))??;
        Fields::parse(&bytes)
    }

    /// Places for `n` requests.
    fn enter(&self, n: usize, name: &str) -> Result<Places, ApiError> {
        if n > self.admission.places() {
            let most = self.admission.places();
            return Err(ApiError::field(name, format!("asks for {n} texts at once, this server takes {most} at most")));
        }
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::shutting_down());
        }
        Ok(self.admission.enter(n)?)
    }

    /// Whether the field `model` names this server's model.
    fn check_model(&self, asked: Option<String>) -> Result<(), ApiError> {
        match asked {
            None => Err(ApiError::field("model", format!("it is missing; this server has `{}`", self.options.model))),
            Some(asked) if asked != self.options.model => Err(ApiError::no_model(&asked, &self.options.model)),
            Some(_) => Ok(()),
        }
    }
}

/// The bytes of a body, and leave to hold them as they come.
async fn bytes(mut body: Body, limit: usize, leave: &mut Reading) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| ApiError::invalid(format!("the body broke off: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Err(ApiError::too_large(limit));
        }
        leave.grow(bytes.len() + data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// A request in a handler's hands.
struct Arrival {
    app: Arc<App>,
    log: Log,
    arrived: Instant,
    body: Body,
}

impl Arrival {
    fn new(app: Arc<App>, log: Log, request: Request) -> Self {
        Self { app, log, arrived: Instant::now(), body: request.into_body() }
    }

    /// Reads what the body asks for, and answers it.
    async fn answer(self, parse: impl FnOnce(Fields) -> Result<Asked, ApiError>) -> Result<Response, ApiError> {
        let Self { app, log, arrived, body } = self;
        let asked = parse(app.fields(body).await?)?;
        answer::answer(app, log, asked, arrived).await
    }
}

/// An answer, its error noted for the log.
fn logged(log: &Log, answer: Result<Response, ApiError>) -> Response {
    answer.unwrap_or_else(|error| {
        log.note(|n| n.error = Some(error.words_for_log()));
        error.into_response()
    })
}

type Logged = Extension<Log>;
