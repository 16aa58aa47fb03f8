//! Answers as server-sent events. In: the worker's replies as they come; out: `data:` lines of chunks, the usage where it
//! was asked for, and `[DONE]`; or an error in their midst, after which nothing comes.
//! NOT here: what chunks have in common with whole answers (answer.rs).

use super::answer::{Answer, Kind, engine_gone, failed};
use super::errors::ApiError;
use super::logprobs::Lists;
use crate::worker::Reply;
use axum::http::{HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

/// A comment is sent after this much silence: proxies keep the connection, and a client that is gone is noticed.
const SILENCE: Duration = Duration::from_secs(10);

struct State {
    answer: Answer,
    replies: UnboundedReceiver<Reply>,
    include_usage: bool,
    lists: Vec<Lists>,
    /// Events to be sent before the next reply is looked at.
    ready: VecDeque<Event>,
    ended: bool,
}

/// The response of a stream.
pub fn response(answer: Answer, replies: UnboundedReceiver<Reply>, choices: usize, include_usage: bool) -> Response {
    let lists = vec![Lists::default(); choices];
    let mut state = State { answer, replies, include_usage, lists, ready: VecDeque::new(), ended: false };
    if state.answer.kind == Kind::Chat {
        for index in 0..choices {
            state.push(index, json!({ "role": "assistant", "content": "" }), Value::Null, Value::Null);
        }
    }
    let events = futures_util::stream::unfold(state, async |mut state| {
        state.next().await.map(|event| (Ok::<_, Infallible>(event), state))
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(SILENCE)).into_response();
    // Proxies are not to gather what is sent.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl State {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            match self.replies.recv().await {
                Some(reply) => self.reply(reply),
                None => self.fail(&engine_gone()),
            }
        }
    }

    fn reply(&mut self, reply: Reply) {
        self.answer.count(&reply);
        match reply {
            Reply::Token { choice, token, text, logprobs } => {
                let logprobs = match (&logprobs, self.answer.kind) {
                    (None, _) => Value::Null,
                    (Some(l), Kind::Chat) => {
                        json!({ "content": [self.answer.chat_logprobs(token, l)], "refusal": null })
                    }
                    (Some(l), Kind::Completion) => {
                        let lists = &mut self.lists[choice];
                        lists.push(&self.answer.app.model, token, l);
                        lists.take()
                    }
                };
                // A part of a character has no text yet.
                if !text.is_empty() || !logprobs.is_null() {
                    self.push(choice, json!({ "content": text }), Value::Null, logprobs);
                }
            }
            Reply::Finished { choice, reason, text } => {
                if !text.is_empty() {
                    self.push(choice, json!({ "content": text }), Value::Null, Value::Null);
                }
                self.push(choice, json!({}), reason.as_str().into(), Value::Null);
                if self.answer.left == 0 {
                    self.done();
                }
            }
            Reply::Failed(why) => self.fail(&failed(&why)),
            Reply::Started { .. } | Reply::Accepted | Reply::Refused(_) => {}
        }
    }

    /// A chunk of one choice. A completion's chunk has the delta's content as its text.
    fn push(&mut self, index: usize, delta: Value, reason: Value, logprobs: Value) {
        let choice = match self.answer.kind {
            Kind::Chat => json!({ "index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs }),
            Kind::Completion => {
                let text = delta["content"].as_str().unwrap_or_default();
                json!({ "index": index, "text": text, "finish_reason": reason, "logprobs": logprobs })
            }
        };
        let mut chunk = self.answer.object(true, vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.send(&chunk);
    }

    fn send(&mut self, value: &Value) {
        self.ready.push_back(Event::default().data(value.to_string()));
    }

    fn done(&mut self) {
        if self.include_usage {
            let mut chunk = self.answer.object(true, vec![]);
            chunk["usage"] = self.answer.usage();
            self.send(&chunk);
        }
        self.ready.push_back(Event::default().data("[DONE]"));
        self.ended = true;
    }

    fn fail(&mut self, error: &ApiError) {
        self.answer.note(error);
        self.send(&error.body());
        self.ended = true;
    }
}
