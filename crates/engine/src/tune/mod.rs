//! Bits by layer. In: a model, a text to calibrate on, a budget; out: which layers get how many key and value bits, and which
//! of their key channels are loud.
//!
//! Sensitivity: the text is followed once with an f16 cache; what enters each layer is kept. Then for each layer and each
//! form of its keys (bits, share of loud channels) or values (bits), this layer alone stores that form, all layers behind it
//! run again, and the KL divergence of the predictions from f16's says what the form costs there.
//! Allocation: divergences of layers add up nearly enough that a greedy choice by divergence saved per bit is good
//! (the files in schemes/ carry the sum, docs/accuracy.md what each really costs).
//! Loud channels of a head: the largest `rms(q) * range(k)` over the calibration text, the bound of what their rounding does to
//! a score.
//! Beside that, codebooks of sub-vectors: centroids and smoothing of key channels, from rows that a calibration text makes.
//! Rooms: forms.rs (what a layer may store), session.rs (measuring), allocate.rs (choosing), centroids.rs (codebooks).
//! NOT here: files of schemes (schemes.rs reads them, the program writes them), scores (eval/score.rs).

mod allocate;
pub mod centroids;
mod forms;
mod session;

pub use allocate::{Allocation, allocate};
pub use forms::{FORMS, Form, QUICK_FORMS, Template, Tensor, complete};
pub use session::Session;

use std::collections::BTreeMap;

/// KL divergence of each measured form, by layer.
pub type Sensitivity = BTreeMap<(usize, Form), f64>;
