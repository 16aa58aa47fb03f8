//! kvant-server: answers the OpenAI API over one engine.
//!
//! In: an engine, its model and options; out: HTTP on a listener until a shutdown was asked for and running requests
//! have ended. `worker` owns the engine and is the only one to step it; `api` turns JSON into its requests and its
//! events into JSON; `admission` says who may come in; `access` keeps the key and writes one line per request.
//! NOT here: flags, where logs go, signals of the process (the program); decoding (kvant-engine).

mod access;
mod admission;
mod api;
mod listen;
mod metrics;
mod options;
mod page;
mod serve;
mod status;
mod unread;
mod worker;

#[doc(hidden)]
pub use api::takes;
pub use listen::listen;
pub use options::Options;
pub use serve::{ServeError, Server};
