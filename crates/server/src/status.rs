//! Figures of the server at one moment. In: what the worker saw after one of its newest steps; out: the JSON of `/status`, which
//! the page shows, and the numbers that `/metrics` renders. NOT here: histograms and totals (metrics.rs).

use kvant_engine::{Engine, Status};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the engine says.
#[derive(Debug, Clone)]
pub struct Figures {
    /// Its own figures.
    pub engine: Status,
    /// Attention calls by route.
    pub routes: BTreeMap<String, u64>,
}

impl Figures {
    /// Those of an engine.
    pub fn of(engine: &Engine) -> Self {
        Self { engine: engine.status(), routes: engine.routes().clone() }
    }
}

/// Time over which tokens per second are counted.
const SPAN: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Newest {
    figures: Figures,
    produced: VecDeque<(Instant, usize)>,
}

/// The newest figures, written by the worker and read by handlers.
#[derive(Debug)]
pub struct Shared {
    newest: Mutex<Newest>,
    started: Instant,
}

impl Shared {
    /// With the figures of an engine that has done nothing yet.
    pub fn new(figures: Figures) -> Self {
        Self { newest: Mutex::new(Newest { figures, produced: VecDeque::new() }), started: Instant::now() }
    }

    fn lock(&self) -> MutexGuard<'_, Newest> {
        // Nothing is left half done under this lock.
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the figures; `tokens` were produced since the last call.
    pub fn publish(&self, figures: Figures, tokens: usize) {
        let mut newest = self.lock();
        newest.figures = figures;
        let now = Instant::now();
        if tokens > 0 {
            newest.produced.push_back((now, tokens));
        }
        while newest.produced.front().is_some_and(|(at, _)| now.duration_since(*at) > SPAN) {
            newest.produced.pop_front();
        }
    }

    /// The newest figures.
    pub fn figures(&self) -> Figures {
        self.lock().figures.clone()
    }

    /// Tokens per second, all requests together, over the newest seconds.
    pub fn tok_s(&self) -> f64 {
        let newest = self.lock();
        let now = Instant::now();
        let recent = newest.produced.iter().filter(|(at, _)| now.duration_since(*at) <= SPAN);
        // A server that began a moment ago has not had the whole span.
        let span = self.started.elapsed().min(SPAN).max(Duration::from_millis(1));
        recent.map(|(_, tokens)| tokens).sum::<usize>() as f64 / span.as_secs_f64()
    }

    /// The JSON of `/status`.
    pub fn json(&self, model: &str, scheme: &str, context: usize, draining: bool) -> Value {
        let Figures { engine: e, routes } = self.figures();
        let requests: Vec<Value> = e
            .requests
            .iter()
            .map(|r| {
                json!({ "number": r.number, "state": format!("{:?}", r.phase).to_lowercase(), "tokens": r.stored,
                    "prompt_tokens": r.prompt_tokens, "bytes": r.bytes })
            })
            .collect();
        json!({
            "model": model, "scheme": scheme, "context": context, "draining": draining,
            "uptime_s": self.started.elapsed().as_secs_f64(),
            "waiting": e.waiting, "running": e.running, "swapped": e.swapped, "requests": requests,
            "budget_bytes": e.budget_bytes, "held_bytes": held_bytes(&e), "kept_bytes": e.kept_bytes, "packed_bytes": e.bytes.packed_bytes,
            "window_bytes": e.bytes.window_bytes, "copy_bytes": e.bytes.copy_bytes,
            "f16_bytes_equivalent": e.bytes.f16_bytes_equivalent, "swapped_bytes": e.swapped_bytes,
            "blocks": { "used": e.blocks_used, "free": e.blocks_free, "shared": e.blocks_shared },
            "pages": e.pages, "sessions": e.sessions,
            "prompt_tokens": e.totals.prompt_tokens, "cached_tokens": e.totals.cached_tokens,
            "output_tokens": e.totals.output_tokens, "prefix_hit_rate": hit_rate(&e),
            "preemptions": e.totals.preemptions, "evictions": e.totals.evictions, "steps": e.totals.steps,
            "tok_s": self.tok_s(), "routes": routes,
        })
    }
}

/// All that the cache holds.
pub fn held_bytes(status: &Status) -> usize {
    status.bytes.packed_bytes + status.bytes.window_bytes + status.bytes.copy_bytes
}

/// Part of all prompt tokens that shared pages or kept sessions had already; 0 before the first prompt.
pub fn hit_rate(status: &Status) -> f64 {
    let totals = status.totals;
    if totals.prompt_tokens == 0 { 0.0 } else { totals.cached_tokens as f64 / totals.prompt_tokens as f64 }
}
