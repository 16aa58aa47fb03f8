//! Figures for Prometheus. In: what happened, as it happens, and the newest figures when they are asked for; out: the text
//! of `/metrics`. Every server has a recorder of its own: nothing here is global.
//! NOT here: the figures of one moment (status.rs).

use crate::status::{Figures, Shared, held_bytes, hit_rate};
use kvant_engine::FinishReason;
use metrics::{Counter, Histogram, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use std::time::Duration;

/// Bounds of time histograms in seconds: from one small step to requests that wait for minutes.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];

/// Counters and histograms of one server.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    cancelled: Counter,
    failed: Counter,
    queue: Histogram,
    first: Histogram,
    next: Histogram,
}

impl Metrics {
    /// A recorder with nothing in it.
    pub fn new() -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
            .expect("there are bounds")
            .build_recorder();
        let handle = recorder.handle();
        let [cancelled, failed] = metrics::with_local_recorder(&recorder, || {
            describe_counter!("kvant_http_requests_total", "Requests by route and status; 499: the client went away.");
            describe_counter!("kvant_requests_finished_total", "Requests that ended, by reason.");
            describe_counter!("kvant_prompt_tokens_total", "Tokens of prompts that were started.");
            describe_counter!("kvant_completion_tokens_total", "Tokens chosen.");
            describe_counter!("kvant_prompt_tokens_cached_total", "Prompt tokens taken from shared pages.");
            describe_counter!("kvant_preemptions_total", "Times a running request gave its memory to another.");
            describe_counter!("kvant_evictions_total", "Kept pages and sessions given up for want of memory.");
            describe_counter!("kvant_steps_total", "Model steps.");
            describe_counter!("kvant_attention_calls_total", "Attention calls by route.");
            describe_histogram!("kvant_queue_seconds", "From arrival to the step that started the prompt.");
            describe_histogram!("kvant_first_token_seconds", "From arrival to the first token.");
            describe_histogram!("kvant_inter_token_seconds", "From one token of a request to its next.");
            describe_gauge!("kvant_requests", "Requests by state.");
            describe_gauge!("kvant_kv_blocks", "Blocks of the cache by state.");
            describe_gauge!("kvant_kv_bytes", "Bytes of the cache by kind; swapped ones are outside of it.");
            describe_gauge!("kvant_kv_held_bytes", "All bytes that the cache holds.");
            describe_gauge!("kvant_kv_kept_bytes", "Bytes of them kept for requests to come, which no request needs.");
            describe_gauge!("kvant_kv_budget_bytes", "Most bytes the cache may hold.");
            describe_gauge!("kvant_kv_kept", "Pages and finished sessions that are kept for requests to come.");
            describe_gauge!("kvant_prefix_hit_rate", "Part of all prompt tokens that shared pages had already.");
            describe_gauge!("kvant_tokens_per_second", "Tokens per second over the newest five seconds.");
            // So that their series are there, at zero, before the first request.
            for reason in [FinishReason::Stop.as_str(), FinishReason::Length.as_str(), CANCELLED, FAILED] {
                counter!("kvant_requests_finished_total", "reason" => reason).increment(0);
            }
            [CANCELLED, FAILED].map(|reason| counter!("kvant_requests_finished_total", "reason" => reason))
        });
        let [queue, first, next] = metrics::with_local_recorder(&recorder, || {
            [
                histogram!("kvant_queue_seconds"),
                histogram!("kvant_first_token_seconds"),
                histogram!("kvant_inter_token_seconds"),
            ]
        });
        Self { recorder, handle, cancelled, failed, queue, first, next }
    }

    /// An HTTP request was answered, or its client went away.
    pub fn answered(&self, route: &'static str, status: u16) {
        metrics::with_local_recorder(&self.recorder, || {
            counter!("kvant_http_requests_total", "route" => route, "status" => status.to_string()).increment(1);
        });
    }

    /// A request's prompt was started after this time.
    pub fn queued(&self, time: Duration) {
        self.queue.record(time);
    }

    /// A request had its first token after this time.
    pub fn first_token(&self, time: Duration) {
        self.first.record(time);
    }

    /// A request had its next token after this time.
    pub fn next_token(&self, time: Duration) {
        self.next.record(time);
    }

    /// A request ended.
    pub fn finished(&self, reason: FinishReason) {
        metrics::with_local_recorder(&self.recorder, || {
            counter!("kvant_requests_finished_total", "reason" => reason.as_str()).increment(1);
        });
    }

    /// A client went away.
    pub fn cancelled(&self) {
        self.cancelled.increment(1);
    }

    /// A request was under way and does not end: the engine failed, or the server goes away.
    pub fn failed(&self) {
        self.failed.increment(1);
    }

    /// Moves what histograms gathered into their buckets: it would pile up where nobody asks for it.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// The text of `/metrics`.
    pub fn render(&self, shared: &Shared) -> String {
        let Figures { engine: e, routes } = shared.figures();
        metrics::with_local_recorder(&self.recorder, || {
            for (state, n) in [("waiting", e.waiting), ("running", e.running), ("swapped", e.swapped)] {
                gauge!("kvant_requests", "state" => state).set(n as f64);
            }
            gauge!("kvant_kv_blocks", "state" => "used").set(e.blocks_used as f64);
            gauge!("kvant_kv_blocks", "state" => "shared").set(e.blocks_shared as f64);
            if let Some(free) = e.blocks_free {
                gauge!("kvant_kv_blocks", "state" => "free").set(free as f64);
            }
            let bytes = e.bytes;
            for (kind, n) in [
                ("packed", bytes.packed_bytes),
                ("window", bytes.window_bytes),
                ("copy", bytes.copy_bytes),
                ("swapped", e.swapped_bytes),
            ] {
                gauge!("kvant_kv_bytes", "kind" => kind).set(n as f64);
            }
            gauge!("kvant_kv_held_bytes").set(held_bytes(&e) as f64);
            gauge!("kvant_kv_kept_bytes").set(e.kept_bytes as f64);
            if let Some(budget) = e.budget_bytes {
                gauge!("kvant_kv_budget_bytes").set(budget as f64);
            }
            gauge!("kvant_kv_kept", "kind" => "pages").set(e.pages as f64);
            gauge!("kvant_kv_kept", "kind" => "sessions").set(e.sessions as f64);
            gauge!("kvant_prefix_hit_rate").set(hit_rate(&e));
            gauge!("kvant_tokens_per_second").set(shared.tok_s());
            let totals = e.totals;
            counter!("kvant_prompt_tokens_total").absolute(totals.prompt_tokens);
            counter!("kvant_prompt_tokens_cached_total").absolute(totals.cached_tokens);
            counter!("kvant_completion_tokens_total").absolute(totals.output_tokens);
            counter!("kvant_preemptions_total").absolute(totals.preemptions);
            counter!("kvant_evictions_total").absolute(totals.evictions);
            counter!("kvant_steps_total").absolute(totals.steps);
            for (route, calls) in routes {
                counter!("kvant_attention_calls_total", "route" => route).absolute(calls);
            }
        });
        self.handle.render()
    }
}

/// Reason of requests whose client went away.
const CANCELLED: &str = "cancelled";
/// Reason of requests that were given up for an error.
const FAILED: &str = "failed";
