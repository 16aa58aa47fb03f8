//! The page at `/`: a chat box and live figures. In: nothing; out: one HTML file without outside assets.
//! NOT here: the figures (status.rs).

use axum::http::{HeaderName, header};
use axum::response::{Html, IntoResponse};

const PAGE: &str = include_str!("page/index.html");

/// Nothing but the page's own script and style runs, and it talks to this server alone.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page.
pub async fn page() -> impl IntoResponse {
    let policy: (HeaderName, &str) = (header::CONTENT_SECURITY_POLICY, POLICY);
    ([policy, (header::REFERRER_POLICY, "no-referrer"), (header::CACHE_CONTROL, "no-cache")], Html(PAGE))
}
