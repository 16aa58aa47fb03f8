//! Connections. In: a listener and a future that says when to stop; out: nothing, when every connection has ended or the
//! time for that is over. Headers that do not come, answers that are not read (unread.rs) and connections beyond a number are
//! not waited for.
//! NOT here: routes (api/), signals (the program).

use crate::admission::Admission;
use crate::api::{self, App};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::status::{Figures, Shared};
use crate::unread::Unread;
use crate::worker::Worker;
use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kvant_engine::{Engine, LoadedModel};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Connections beyond the number of places: for clients that ask for figures, or are told to come back later.
const CONNECTIONS_BESIDE: usize = 256;
/// How long headers may take, and how long a connection may stay without a request.
const HEADERS: Duration = Duration::from_secs(60);
/// How long a stream may take to hear that the server is going away.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How often histograms are tidied where nobody asks for them.
const UPKEEP: Duration = Duration::from_secs(5);
/// How long to wait when the system gives no connection (too many open files).
const NO_CONNECTION: Duration = Duration::from_millis(100);

/// Why a server ended that nobody had asked to end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The system gave no thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
    /// The thread of the engine ended.
    #[error("the engine's thread ended unexpectedly; the log says why")]
    EngineGone,
}

/// A server over one engine.
pub struct Server {
    app: Arc<App>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the engine's thread.
    ///
    /// # Errors
    /// [`ServeError::Thread`].
    pub fn new(engine: Engine, model: Arc<LoadedModel>, options: Options) -> Result<Self, ServeError> {
        // The largest body is always read.
        let bodies = options.max_bodies_bytes.max(options.max_body_bytes);
        let admission = Arc::new(Admission::new(options.max_running, options.max_waiting, bodies));
        let (metrics, shared) = (Arc::new(Metrics::new()), Arc::new(Shared::new(Figures::of(&engine))));
        let (worker, thread) =
            Worker::start(engine, admission.clone(), metrics.clone(), shared.clone()).map_err(ServeError::Thread)?;
        let (draining, created) = (AtomicBool::new(false), api::answer::now());
        let longest_token = api::prompts::longest_token(&model);
        let app = App { model, options, worker, admission, metrics, shared, draining, longest_token, created };
        Ok(Self { app: Arc::new(app), thread: Some(thread) })
    }

    /// Its routes, for a caller that has connections of its own.
    pub fn router(&self) -> Router {
        api::router(self.app.clone())
    }

    /// Answers until `stop` is there; then takes no new connection, lets running requests end for the time that the
    /// options give, and fails the rest.
    ///
    /// # Errors
    /// [`ServeError::EngineGone`].
    pub async fn run(mut self, listener: TcpListener, stop: impl Future<Output = ()>) -> Result<(), ServeError> {
        let router = self.router();
        let connections = Arc::new(Semaphore::new(self.app.admission.places() + CONNECTIONS_BESIDE));
        let graceful = GracefulShutdown::new();
        let mut upkeep = tokio::time::interval(UPKEEP);
        let mut stop = std::pin::pin!(stop);
        let mut http = hyper::server::conn::http1::Builder::new();
        let unread = self.app.options.unread_timeout;
        http.timer(TokioTimer::new()).header_read_timeout(HEADERS);
        let accept = async || {
            let permit = connections.clone().acquire_owned().await;
            (listener.accept().await, permit)
        };
        let mut ended = Ok(());
        loop {
            tokio::select! {
                (accepted, permit) = accept() => match accepted {
                    Ok((stream, _)) => {
                        // Small frames of a stream are sent when they are there.
                        let _ = stream.set_nodelay(true);
                        let service = TowerToHyperService::new(router.clone());
                        let connection = graceful.watch(http.serve_connection(TokioIo::new(Unread::new(stream, unread)), service));
                        tokio::spawn(async move {
                            // What a connection ends with is its client's business.
                            let _ = connection.await;
                            drop(permit);
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "no connection");
                        tokio::time::sleep(NO_CONNECTION).await;
                    }
                },
                _ = upkeep.tick() => self.app.metrics.upkeep(),
                () = self.app.worker.gone() => {
                    ended = Err(ServeError::EngineGone);
                    break;
                }
                () = &mut stop => break,
            }
        }
        drop(listener);
        self.app.draining.store(true, Ordering::Relaxed);
        let running = self.app.shared.figures().engine;
        let seconds = self.app.options.drain.as_secs_f64();
        tracing::info!(running = running.running, waiting = running.waiting, seconds, "going: no new connections");
        let mut closed = std::pin::pin!(graceful.shutdown());
        let drained = tokio::time::timeout(self.app.options.drain, &mut closed).await;
        if !self.app.worker.alive() {
            ended = Err(ServeError::EngineGone);
        }
        if drained.is_err() {
            tracing::warn!("the time for running requests is over; the rest is ended");
            self.app.worker.stop();
            let _ = tokio::time::timeout(LAST_WORDS, &mut closed).await;
        }
        self.app.worker.stop();
        if let Some(thread) = self.thread.take() {
            // A step that is under way is not waited for longer than the last words.
            let joined = tokio::task::spawn_blocking(move || thread.join());
            if let Ok(Ok(Err(_))) = tokio::time::timeout(LAST_WORDS, joined).await {
                ended = Err(ServeError::EngineGone);
            }
        }
        tracing::info!("gone");
        ended
    }
}
