//! The server from outside: a tiny made-up model behind a real listener on 127.0.0.1, asked over plain sockets. In: bytes;
//! out: verdicts. NOT here: the program (crates/cli/tests), real models.

mod answers;
mod errors;
mod failures;
mod figures;
mod leaving;
mod memory;
mod site;
mod streams;
#[path = "../../../engine/tests/tiny_model/mod.rs"]
mod tiny_model;
