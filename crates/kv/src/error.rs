//! The one error type of this library. In: what went wrong; out: one clear sentence, with fields a caller can match on.
//! NOT here: hints that name command-line flags (the program adds those).

use crate::RowFormat;
use crate::scheme::SchemeError;

/// Everything that can go wrong at the border of an operation. Kernels cannot fail after these checks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text or a set of numbers that is no scheme.
    #[error(transparent)]
    Scheme(#[from] SchemeError),
    /// A slice or an axis has another length than the operation needs.
    #[error("{what}: expected {expected}, got {got}")]
    Shape {
        /// Which argument or axis.
        what: &'static str,
        /// The length it needs (elements or tokens, as `what` says).
        expected: usize,
        /// The length it has.
        got: usize,
    },
    /// A dimension outside the contract (head_dim, q_heads / kv_heads, group_len, ...).
    #[error("{what} {got} is not supported; supported: {supported}")]
    Dimension {
        /// The dimension's name.
        what: &'static str,
        /// The value asked for.
        got: usize,
        /// The values there are, in words.
        supported: &'static str,
    },
    /// NaN or infinity in K or V (after rounding to the format of the layer's plain rows) or in a query (as it is); nothing of
    /// the call was stored.
    #[error(
        "{tensor} has a value that {format} cannot hold ({value}) at layer {layer}, head {head}, token {token}; nothing of the call was stored"
    )]
    NotFinite {
        /// `"K"`, `"V"` or `"Q"`.
        tensor: &'static str,
        /// What the layer's rows are rounded to.
        format: RowFormat,
        /// Layer of the cache.
        layer: usize,
        /// kv head.
        head: usize,
        /// Position of the token in its sequence.
        token: usize,
        /// The offending value, as given.
        value: f32,
        /// Whose token it is; None: of an operation without sequences.
        seq: Option<crate::SeqId>,
    },
    /// An option of an operation that is no usable number.
    #[error("{what} is {value}; it must be {allowed}")]
    Number {
        /// The option's name.
        what: &'static str,
        /// Its value.
        value: f32,
        /// What it may be.
        allowed: &'static str,
    },
    /// A sequence that is not (or no longer) in the cache.
    #[error("sequence {id} is not in this cache")]
    NoSuchSequence {
        /// The handle's number.
        id: usize,
    },
    /// A layer index beyond the cache's layers.
    #[error("layer {layer} does not exist: the cache has {layers} layers")]
    NoSuchLayer {
        /// Index asked for.
        layer: usize,
        /// Layers there are.
        layers: usize,
    },
    /// A trim that would need f16 rows which are already packed.
    #[error("cannot trim to {to} of {len} tokens: tokens up to {packed} are packed and their f16 rows are gone")]
    TrimPacked {
        /// Tokens asked to remain.
        to: usize,
        /// Tokens held.
        len: usize,
        /// Tokens whose f16 rows are gone.
        packed: usize,
    },
    /// The same sequence appears twice in one call.
    #[error("sequence {id} appears twice in one call")]
    DuplicateSequence {
        /// The handle's number.
        id: usize,
    },
    /// A kernel that this machine or this shape cannot run.
    #[error("kernel {kernel} cannot run here: {why}")]
    Unsupported {
        /// Name as in the VARIANTS table.
        kernel: String,
        /// The missing instruction set, or that there is no such kernel.
        why: String,
    },
    /// The budget of the cache has no room for a block; nothing of the call was stored.
    #[error("the cache's memory is used up: {need} more bytes are needed and {free} are free")]
    OutOfBlocks {
        /// Bytes of the block.
        need: usize,
        /// Bytes left of the budget.
        free: usize,
    },
    /// A page that is not (or no longer) held.
    #[error("page {id} is not in this cache")]
    NoSuchPage {
        /// The handle's number.
        id: usize,
    },
    /// Codebooks that a layer cannot have.
    #[error("codebooks of layer {layer}: {why}")]
    Codebook {
        /// Which layer.
        layer: usize,
        /// What is wrong with them.
        why: String,
    },
    /// A sequence that cannot be saved, or bytes that are no saved sequence of this cache.
    #[error("the saved cache cannot be used: {why}")]
    Saved {
        /// What does not fit.
        why: String,
    },
    /// The operating system refused memory.
    #[error("out of memory: could not map {bytes} bytes for the cache")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// The GPU, its driver or its libraries cannot do what was asked.
    #[error("the GPU cannot be used: {why}")]
    Gpu {
        /// What is missing or failed.
        why: String,
    },
    /// The GPU's memory is used up.
    #[error("the GPU is out of memory: {bytes} bytes were asked for and {free} are free")]
    GpuOutOfMemory {
        /// Bytes asked for at once.
        bytes: usize,
        /// Bytes that were free.
        free: usize,
    },
    /// A thread count of zero, or a pool that could not start.
    #[error("cannot run on {threads} threads: {why}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// Why not.
        why: String,
    },
}
