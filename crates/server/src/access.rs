//! What every request passes on its way in and out. In: requests; out: the same with a number of their own, or a refusal
//! (no key, a page of another site, a name that is not this server's); one log line and one count per request, when its answer has been sent or its client
//! is gone. NOT here: what is answered.

use crate::api::App;
use crate::api::errors::ApiError;
use crate::metrics::Metrics;
use axum::body::{Body, Bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

/// Status of requests whose client went away before the answer was whole, as web servers write it.
const CLIENT_GONE: u16 = 499;

/// What a handler adds to its request's log line.
#[derive(Debug, Default, Clone)]
pub struct Notes {
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Of these, taken from shared pages.
    pub cached_tokens: usize,
    /// Tokens produced.
    pub completion_tokens: usize,
    /// From arrival to the step that started the prompt.
    pub queue: Option<Duration>,
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// Why it ended.
    pub finish_reason: Option<&'static str>,
    /// Why it failed.
    pub error: Option<String>,
    /// The prompt, where the operator asked for it.
    pub prompt: Option<String>,
}

/// The notes of one request, shared with its handler.
#[derive(Debug, Clone, Default)]
pub struct Log {
    notes: Arc<Mutex<Notes>>,
    /// Its number, as answers repeat it.
    pub id: u64,
}

impl Log {
    /// Changes the notes.
    pub fn note(&self, change: impl FnOnce(&mut Notes)) {
        change(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Writes the line when it goes.
struct Line {
    log: Log,
    metrics: Arc<Metrics>,
    method: String,
    route: &'static str,
    began: Instant,
    /// None until there is an answer.
    status: Option<u16>,
    whole: bool,
}

impl Drop for Line {
    fn drop(&mut self) {
        let status = self.status.filter(|_| self.whole).unwrap_or(CLIENT_GONE);
        self.metrics.answered(self.route, status);
        let n = self.log.notes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let ms = |d: Duration| d.as_micros() as f64 / 1e3;
        // Whoever looks every second is not to fill the log.
        if !self.route.starts_with("/v1/") && status < 400 {
            return;
        }
        tracing::info!(
            id = self.log.id,
            method = %self.method,
            route = self.route,
            status,
            prompt_tokens = n.prompt_tokens,
            completion_tokens = n.completion_tokens,
            cached_tokens = n.cached_tokens,
            queue_ms = n.queue.map(ms),
            ttft_ms = n.ttft.map(ms),
            duration_ms = ms(self.began.elapsed()),
            finish_reason = n.finish_reason,
            error = n.error,
            prompt = n.prompt,
            "request"
        );
    }
}

/// A body that knows when it has been sent.
struct Watched {
    body: Body,
    line: Line,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(context);
        // A body of known length is not asked again after its last frame.
        this.line.whole |= matches!(frame, Poll::Ready(None)) || this.body.is_end_stream();
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Names of routes: metrics have one series per route, and unknown addresses are one of them.
fn route_of(request: &Request) -> &'static str {
    let matched = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    let known = crate::api::ROUTES.iter().find(|r| **r == matched);
    known.copied().unwrap_or("other")
}

/// Numbers, logs, counts, and lets in.
pub async fn watch(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let log = Log { id: NEXT.fetch_add(1, Ordering::Relaxed), ..Log::default() };
    let route = route_of(&request);
    let mut line = Line {
        log: log.clone(),
        metrics: app.metrics.clone(),
        // Any word may stand there.
        method: request.method().as_str().chars().take(16).collect(),
        route,
        began: Instant::now(),
        status: None,
        whole: false,
    };
    request.extensions_mut().insert(log.clone());
    let mut response = match check(&app, route, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            log.note(|n| n.error = Some(error.words_for_log()));
            error.into_response()
        }
    };
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&format!("req-{}", log.id)) {
        headers.insert("x-request-id", id);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    line.status = Some(response.status().as_u16());
    response.map(|body| {
        line.whole = body.is_end_stream();
        Body::new(Watched { body, line })
    })
}

/// Addresses that answer without a key: they say nothing of requests.
const OPEN: &[&str] = &["/", "/health"];

/// Whether a `Host` header means this server: `localhost`, an address, or a name of these. A page may be of a site whose
/// name leads here, and then its browser sees one site; the name is what tells.
fn is_ours(host: &[u8], names: &[String]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    if let Some(address) = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let known = |n: &str| n.eq_ignore_ascii_case(name);
    name.parse::<Ipv4Addr>().is_ok() || known("localhost") || names.iter().any(|n| known(n))
}

fn check(app: &App, route: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    // Browsers always name the host.
    if let Some(names) = &app.options.hosts
        && let Some(other) = headers.get_all(header::HOST).iter().find(|host| !is_ours(host.as_bytes(), names))
    {
        return Err(ApiError::foreign_host(&String::from_utf8_lossy(other.as_bytes())));
    }
    // A browser names the page that asks. Programs send no such header.
    if let Some(origin) = headers.get(header::ORIGIN) {
        let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
        let from = origin.as_bytes();
        let from = from.strip_prefix(b"http://").or(from.strip_prefix(b"https://"));
        if from.is_none() || from != host {
            return Err(ApiError::foreign_page(&String::from_utf8_lossy(origin.as_bytes())));
        }
    }
    let Some(key) = &app.options.api_key else { return Ok(()) };
    if OPEN.contains(&route) {
        return Ok(());
    }
    let sent = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let Some(sent) = sent.and_then(|s| s.split_at_checked(7)) else { return Err(ApiError::no_key(false)) };
    // Compared in a time that does not tell how much of it was right.
    let right = sent.0.eq_ignore_ascii_case(b"bearer ") && bool::from(sent.1.ct_eq(key.as_bytes()));
    if right { Ok(()) } else { Err(ApiError::no_key(true)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_localhost_addresses_and_names_that_were_given() {
        let names = ["kvant.lan".to_string()];
        for ours in ["localhost", "LOCALHOST:80", "127.0.0.1", "10.0.0.7:8080", "[::1]", "[::1]:8080", "Kvant.LAN:1"] {
            assert!(is_ours(ours.as_bytes(), &names), "{ours}");
        }
        for other in
            ["", "evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "kvant", "[evil]", "::1:x"]
        {
            assert!(!is_ours(other.as_bytes(), &names), "{other}");
        }
        assert!(!is_ours(b"\xff", &names));
    }
}
