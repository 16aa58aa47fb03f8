//! `/v1/models`. In: nothing, or a name; out: the one model there is. NOT here: loading it.

use super::App;
use super::errors::ApiError;
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

fn model(app: &App) -> Value {
    json!({ "id": app.options.model, "object": "model", "created": app.created, "owned_by": "kvant",
        "context_length": app.model.config().context })
}

/// `GET /v1/models`
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model(&app)] }))
}

/// `GET /v1/models/{model}`; a name may have slashes
pub async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(name))?;
    Ok(Json(model(&app)))
}
