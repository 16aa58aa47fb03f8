//! The thread that owns the engine. In: groups of requests and words to stop, over a bounded channel; out: events of each
//! group over a channel of its own (its requests' `max_tokens` bound it), and figures after every step.
//!
//! A group whose receiver is gone is cancelled before the next step. An engine's error fails every request that it
//! dropped, and the thread goes on.
//! NOT here: HTTP, JSON, who may come in (admission.rs).

use crate::admission::{Admission, Places};
use crate::metrics::Metrics;
use crate::status::{Figures, Shared};
use kvant_engine::{Engine, Error, Event, FinishReason, Request, TokenLogprobs};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender, error::TryRecvError};

/// What happens to a group of requests. `choice` is a request's place in its group.
#[derive(Debug)]
pub enum Reply {
    /// The engine took every request of the group.
    Accepted,
    /// It took none of them.
    Refused(Error),
    /// The first rows of a request's prompt are in the cache.
    Started {
        /// Which request.
        choice: usize,
        /// Prompt tokens taken from shared pages.
        cached: usize,
        /// From its arrival to the step that started it.
        queued: Duration,
    },
    /// A token was produced.
    Token {
        /// Which request.
        choice: usize,
        /// The token.
        token: u32,
        /// Text that became certain with it.
        text: String,
        /// Its log probabilities, when asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A request ended.
    Finished {
        /// Which request.
        choice: usize,
        /// Why.
        reason: FinishReason,
        /// Text that was held back.
        text: String,
    },
    /// The engine failed, or the server goes away; every request of the group is gone.
    Failed(Failed),
}

/// Why requests that had begun do not end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failed {
    /// The engine's words.
    Engine(String),
    /// The time for running requests is over.
    ShuttingDown,
}

struct Submission {
    requests: Vec<Request>,
    /// Whether `max_tokens` is the client's number, and not as many as there is room for.
    exact: bool,
    replies: UnboundedSender<Reply>,
    places: Places,
    arrived: Instant,
}

enum Command {
    Add(Submission),
    Stop,
}

/// Where handlers reach the worker.
#[derive(Clone)]
pub struct Worker {
    commands: mpsc::Sender<Command>,
}

/// The worker takes no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gone;

impl Worker {
    /// Starts the thread. It ends when it is told to stop or when nobody can reach it.
    ///
    /// # Errors
    /// Those of the system when it gives no thread.
    pub fn start(
        engine: Engine,
        admission: Arc<Admission>,
        metrics: Arc<Metrics>,
        shared: Arc<Shared>,
    ) -> std::io::Result<(Self, std::thread::JoinHandle<()>)> {
        // A group holds one place at least, so this many groups at most are on their way; one more word is to stop.
        let (commands, received) = mpsc::channel(admission.places() + 2);
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || Loop { engine, live: HashMap::new(), admission, metrics, shared }.run(received))?;
        Ok((Self { commands }, thread))
    }

    /// Hands over a group of requests; `exact` when their `max_tokens` are the client's numbers.
    ///
    /// # Errors
    /// [`Gone`].
    pub fn submit(
        &self,
        requests: Vec<Request>,
        exact: bool,
        places: Places,
        arrived: Instant,
    ) -> Result<UnboundedReceiver<Reply>, Gone> {
        let (replies, events) = mpsc::unbounded_channel();
        let submission = Submission { requests, exact, replies, places, arrived };
        self.commands.try_send(Command::Add(submission)).map_err(|_| Gone)?;
        Ok(events)
    }

    /// Fails what is still running and ends the thread.
    pub fn stop(&self) {
        let _ = self.commands.try_send(Command::Stop);
    }

    /// Whether the thread is there.
    pub fn alive(&self) -> bool {
        !self.commands.is_closed()
    }
}

/// What the requests of one HTTP request share: the last of them gives the places back.
struct Group {
    replies: UnboundedSender<Reply>,
    _places: Places,
    arrived: Instant,
}

/// A request in the engine.
struct Live {
    group: Arc<Group>,
    choice: usize,
    started: bool,
    newest: Option<Instant>,
}

impl Live {
    fn send(&self, reply: Reply) {
        // A receiver that has gone is noticed before the next step.
        let _ = self.group.replies.send(reply);
    }
}

/// An answer that does not fit is made shorter by one part of so many, again and again.
const SHORTER: usize = 16;

/// How long an engine that has requests but nothing to do for them is left alone.
const PAUSE: Duration = Duration::from_millis(5);

struct Loop {
    engine: Engine,
    live: HashMap<usize, Live>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
}

impl Loop {
    fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        loop {
            if self.live.is_empty() {
                match commands.blocking_recv() {
                    Some(Command::Add(submission)) => self.add(submission),
                    Some(Command::Stop) | None => return,
                }
            }
            loop {
                match commands.try_recv() {
                    Ok(Command::Add(submission)) => self.add(submission),
                    Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return self.fail_all(&Failed::ShuttingDown),
                    Err(TryRecvError::Empty) => break,
                }
            }
            self.cancel_those_nobody_waits_for();
            if !self.live.is_empty() {
                self.step();
            }
        }
    }

    /// Adds all requests of a group or none.
    fn add(&mut self, submission: Submission) {
        let Submission { requests, exact, replies, places, arrived } = submission;
        if replies.is_closed() {
            return self.metrics.cancelled();
        }
        let group = Arc::new(Group { replies, _places: places, arrived });
        let mut numbers = Vec::with_capacity(requests.len());
        for request in requests {
            match self.add_one(request, exact) {
                Ok(number) => numbers.push(number),
                Err(error) => {
                    for number in numbers {
                        self.cancel(number);
                    }
                    let _ = group.replies.send(Reply::Refused(error));
                    return;
                }
            }
        }
        let _ = group.replies.send(Reply::Accepted);
        for (choice, number) in numbers.into_iter().enumerate() {
            self.live.insert(number, Live { group: group.clone(), choice, started: false, newest: None });
        }
    }

    /// Adds a request. One that leaves the length of its answer to the server gets as many tokens as the memory has room for.
    fn add_one(&mut self, mut request: Request, exact: bool) -> Result<usize, Error> {
        loop {
            match self.engine.add(request.clone()) {
                Err(Error::NeverFits { .. }) if !exact && request.max_tokens > 1 => {
                    // What tokens take is the engine's to say: a little less, until it agrees.
                    request.max_tokens -= request.max_tokens.div_ceil(SHORTER);
                }
                other => return other,
            }
        }
    }

    fn cancel(&mut self, number: usize) {
        if let Err(error) = self.engine.cancel(number) {
            tracing::error!(%error, "a request could not be cancelled; every request is dropped");
            let _ = self.engine.clear();
            self.fail_all(&Failed::Engine(error.to_string()));
        }
    }

    fn cancel_those_nobody_waits_for(&mut self) {
        let gone = |live: &Live| live.group.replies.is_closed();
        let numbers: Vec<usize> = self.live.iter().filter(|(_, live)| gone(live)).map(|(n, _)| *n).collect();
        if numbers.is_empty() {
            return;
        }
        for number in numbers {
            self.live.remove(&number);
            self.metrics.cancelled();
            self.cancel(number);
        }
        self.publish(0);
    }

    fn step(&mut self) {
        let began = Instant::now();
        match self.engine.step() {
            Ok(events) => {
                let idle = events.is_empty();
                let tokens = events.iter().filter(|e| matches!(e, Event::Token { .. })).count();
                // Outcomes repeat what the events say; taking them frees what the cache holds.
                if let Err(error) = self.engine.take_finished() {
                    return self.failed(&error);
                }
                // Whoever has an answer finds it in the figures.
                self.publish(tokens);
                events.into_iter().for_each(|event| self.tell(event, began));
                if idle {
                    std::thread::sleep(PAUSE);
                }
            }
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&mut self, error: &Error) {
        tracing::error!(%error, requests = self.live.len(), "the engine failed; its requests are answered with an error");
        self.fail_all(&Failed::Engine(error.to_string()));
        self.publish(0);
    }

    fn fail_all(&mut self, why: &Failed) {
        for (_, live) in self.live.drain() {
            live.send(Reply::Failed(why.clone()));
        }
    }

    /// Passes an event on to whoever waits for it.
    fn tell(&mut self, event: Event, began: Instant) {
        match event {
            Event::Prefilled { request, cached, .. } => {
                let Some(live) = self.live.get_mut(&request) else { return };
                if !std::mem::replace(&mut live.started, true) {
                    let queued = began.saturating_duration_since(live.group.arrived);
                    self.metrics.queued(queued);
                    live.send(Reply::Started { choice: live.choice, cached, queued });
                }
            }
            Event::Token { request, token, text, logprobs } => {
                let Some(live) = self.live.get_mut(&request) else { return };
                let now = Instant::now();
                match live.newest.replace(now) {
                    None => self.metrics.first_token(now.saturating_duration_since(live.group.arrived)),
                    Some(before) => self.metrics.next_token(now.saturating_duration_since(before)),
                }
                live.send(Reply::Token { choice: live.choice, token, text, logprobs });
            }
            Event::Failed { request, why } => {
                let Some(live) = self.live.remove(&request) else { return };
                tracing::error!(why, "a request failed");
                live.send(Reply::Failed(Failed::Engine(why)));
            }
            Event::Finished { request, reason, text } => {
                let Some(live) = self.live.remove(&request) else { return };
                self.metrics.finished(reason);
                self.admission.ended(live.group.arrived.elapsed());
                live.send(Reply::Finished { choice: live.choice, reason, text });
            }
        }
    }

    fn publish(&self, tokens: usize) {
        self.shared.publish(Figures::of(&self.engine), tokens);
    }
}
