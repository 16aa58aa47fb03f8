//! What an operator chooses. In and out: plain data. NOT here: flags (the program), what the engine takes on (its limits).

use std::time::Duration;

/// How a server behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// What `/v1/models` and the field `model` call the model.
    pub model: String,
    /// How the cache stores tokens, in words, for the status page.
    pub scheme: String,
    /// Requests that the engine holds cache for at once, as its limits say.
    pub max_running: usize,
    /// Requests beyond those that may wait; more are answered 429.
    pub max_waiting: usize,
    /// Key that clients must send as `Authorization: Bearer KEY`; None lets everyone in.
    pub api_key: Option<String>,
    /// How long running requests may go on once a shutdown was asked for.
    pub drain: Duration,
    /// Largest body of a request.
    pub max_body_bytes: usize,
    /// Bytes of all bodies that are being read at once; who sends more is answered 429.
    pub max_bodies_bytes: usize,
    /// How long a client may take to send its body.
    pub body_timeout: Duration,
    /// How long a client may leave what it is sent unread before its connection is closed.
    pub unread_timeout: Duration,
    /// Names for this server that requests may have in `Host`, besides `localhost` and addresses; None: any. Keeps pages of
    /// sites whose name leads here from asking in the name of whoever looks at them.
    pub hosts: Option<Vec<String>>,
    /// Whether prompts are written to the log.
    pub log_prompts: bool,
}

impl Options {
    /// The defaults for a model of this name.
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            scheme: String::new(),
            max_running: 64,
            max_waiting: 256,
            api_key: None,
            drain: Duration::from_secs(30),
            max_body_bytes: 4 << 20,
            max_bodies_bytes: 256 << 20,
            body_timeout: Duration::from_secs(30),
            unread_timeout: Duration::from_secs(60),
            hosts: Some(Vec::new()),
            log_prompts: false,
        }
    }

    /// Requests that may be inside at once: running and waiting.
    pub fn places(&self) -> usize {
        self.max_running.saturating_add(self.max_waiting)
    }
}
