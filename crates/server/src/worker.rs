//! The thread that owns the engine. In: groups of requests and words to stop, over a bounded channel; out: events of each
//! group over a channel of its own (its requests' `max_tokens` bound it), and figures: some times a second, and whenever a
//! request ended.
//!
//! A group whose receiver is gone is cancelled before the next step. An engine's error fails every request that it
//! dropped, a panic fails all there are, and the thread goes on, unless the engine's device answers no more.
//! NOT here: HTTP, JSON, who may come in (admission.rs).

use crate::admission::{Admission, Places};
use crate::metrics::Metrics;
use crate::status::{Figures, Shared};
use kvant_engine::{Engine, Error, Event, FinishReason, Request, TokenLogprobs};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let published = Published { at: Instant::now(), tokens: 0 };
            Loop { engine, live: HashMap::new(), admission, metrics, shared, published, gone: false }.run(received);
        })?;
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

    /// Waits until the thread is not there any more.
    pub async fn gone(&self) {
        self.commands.closed().await;
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

/// An answer that does not fit is made shorter by one part of so many at least.
const SHORTER: usize = 16;
/// Times that it is made shorter before it gets one token.
const TRIES: usize = 12;

/// How often figures are published while nothing ends: they cost a look at every layer of every request.
const FIGURES: Duration = Duration::from_millis(100);

/// What the client reads when the engine panics. The words of a panic may quote a prompt.
const PANICKED: &str = "it came to a state that it does not know";

/// How long an engine that has requests but nothing to do for them is left alone.
const PAUSE: Duration = Duration::from_millis(5);

struct Loop {
    engine: Engine,
    live: HashMap<usize, Live>,
    admission: Arc<Admission>,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
    published: Published,
    /// The engine's device does not answer any more.
    gone: bool,
}

/// When figures were published, and tokens since.
struct Published {
    at: Instant,
    tokens: usize,
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
            if self.gone {
                // Whoever is on the way finds nobody (`Gone`), and the server ends.
                return;
            }
        }
    }

    /// Adds all requests of a group or none.
    fn add(&mut self, submission: Submission) {
        let Submission { mut requests, exact, replies, places, arrived } = submission;
        if replies.is_closed() {
            return self.metrics.cancelled();
        }
        let group = Arc::new(Group { replies, _places: places, arrived });
        let mut numbers = Vec::with_capacity(requests.len());
        if !exact {
            numbers.extend(self.fit(&mut requests));
        }
        for request in requests.into_iter().skip(numbers.len()) {
            match self.engine.add(request) {
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

    /// Makes the answers of a group, all to one prompt, as long as there is memory for. The number of the first, if the
    /// engine took it.
    fn fit(&mut self, requests: &mut [Request]) -> Option<usize> {
        let first = requests.first()?;
        let (mut number, longest) = (None, first.max_tokens);
        let max_tokens = shorten(longest, |max_tokens| {
            match self.engine.add(Request { max_tokens, ..first.clone() }) {
                Err(Error::NeverFits { tokens, need, budget, .. }) => Some(Refused { tokens, need, budget }),
                // What is wrong besides is said when it is added.
                taken => {
                    number = taken.ok();
                    None
                }
            }
        });
        requests.iter_mut().for_each(|request| request.max_tokens = max_tokens);
        number
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
        self.publish();
    }

    fn step(&mut self) {
        let began = Instant::now();
        let step = || {
            let events = self.engine.step()?;
            // Outcomes repeat what the events say; taking them frees what the cache holds.
            self.engine.take_finished()?;
            Ok::<_, Error>(events)
        };
        // After a panic nothing that the engine holds is looked at again: `panicked` drops it all.
        let events = match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return self.failed(&error.to_string()),
            Err(_) => return self.panicked(),
        };
        self.published.tokens += events.iter().filter(|e| matches!(e, Event::Token { .. })).count();
        let ended = |e: &Event| matches!(e, Event::Finished { .. } | Event::Failed { .. });
        // Whoever has an answer finds it in the figures.
        if events.iter().any(ended) || self.published.at.elapsed() >= FIGURES {
            self.publish();
        }
        let idle = events.is_empty();
        events.into_iter().for_each(|event| self.tell(event, began));
        if idle {
            std::thread::sleep(PAUSE);
        }
    }

    fn failed(&mut self, error: &str) {
        tracing::error!(
            error,
            requests = self.live.len(),
            "the engine failed; its requests are answered with an error"
        );
        // Before anyone is told: whoever has an answer finds it in the figures.
        self.publish();
        self.fail_all(&Failed::Engine(error.into()));
        self.gone = !self.engine.answers();
        if self.gone {
            tracing::error!("the device does not answer any more; the server ends, so that a new one can be started");
        }
    }

    fn panicked(&mut self) {
        match self.engine.clear() {
            Ok(()) => self.failed(PANICKED),
            Err(error) => self.failed(&error.to_string()),
        }
    }

    fn fail_all(&mut self, why: &Failed) {
        for (_, live) in self.live.drain() {
            self.metrics.failed();
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
                self.metrics.failed();
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

    fn publish(&mut self) {
        self.shared.publish(Figures::of(&self.engine), self.published.tokens);
        self.published = Published { at: Instant::now(), tokens: 0 };
    }
}

/// Tokens of an answer that `fits` does not refuse for want of memory, `most` or not much fewer than there could be; 1 where
/// none are found. Each look costs as much as a prompt, so there are few.
fn shorten(mut most: usize, mut fits: impl FnMut(usize) -> Option<Refused>) -> usize {
    let mut before: Option<Refused> = None;
    for _ in 0..TRIES {
        let Some(now) = fits(most) else { return most };
        let Refused { tokens, need, budget } = now;
        let prompt = (tokens + 1).saturating_sub(most);
        let over = need.saturating_sub(budget) as f64;
        // On the line through the two newest looks, or through nothing. What tokens take is the engine's to say, and blocks
        // make steps in it: so a little less each time, until it agrees.
        let fewer = match before {
            Some(b) if b.tokens > tokens && b.need > need => over * (b.tokens - tokens) as f64 / (b.need - need) as f64,
            _ => over * tokens as f64 / need.max(1) as f64,
        };
        let left = tokens.saturating_sub(fewer as usize);
        most = (left + 1).saturating_sub(prompt).min(most - most.div_ceil(SHORTER)).max(1);
        if most == 1 {
            break;
        }
        before = Some(now);
    }
    1
}

/// What the engine says of tokens that never fit.
struct Refused {
    tokens: usize,
    need: usize,
    budget: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_shortened_in_few_looks_and_not_by_much() {
        // Bytes as caches take them: something that is always there, and blocks of tokens.
        for (fixed, per_block, prompt) in [(0, 1000, 10), (200_000, 1000, 10), (64_000, 4000, 3000), (0, 7, 8191)] {
            let need = |most: usize| fixed + (prompt + most - 1).div_ceil(32) * per_block;
            for budget in [need(1), need(1) + 100 * per_block, need(4000), need(4000) + 1] {
                let mut looks = 0;
                let most = shorten(8192, |most| {
                    looks += 1;
                    let (tokens, need) = (prompt + most - 1, need(most));
                    (need > budget).then_some(Refused { tokens, need, budget })
                });
                let best = (1..=8192).rev().find(|&most| need(most) <= budget).unwrap_or(1);
                assert!(looks <= TRIES && most <= best, "{looks} looks: {most} of {best}");
                // A block of 32 tokens and its neighbour.
                assert!(
                    most * 4 >= best || best <= 64,
                    "{most} of {best} tokens, {fixed} {per_block} {prompt} {budget}"
                );
            }
        }
        // What never fits is the engine's to refuse.
        assert_eq!(shorten(8192, |most| Some(Refused { tokens: most, need: 2, budget: 1 })), 1);
    }
}
