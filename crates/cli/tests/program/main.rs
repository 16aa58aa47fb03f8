//! The program from outside: exit codes, what goes to stdout and what to stderr, help texts. In: command lines; out: verdicts.
//! Tests that decode need the pulled model (`make test` pulls it first). NOT here: the numbers that commands compute
//! (unit tests beside them).

mod accuracy;
mod decoding;
mod errors;
mod experiments;
mod help;
mod hub;
mod pulling;
mod roofline;
mod run;
mod serving;
mod stand_in;
mod streams;
mod tuning;
