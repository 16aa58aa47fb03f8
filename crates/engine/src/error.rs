//! The one error type of this crate. In: what went wrong; out: one clear sentence, with fields a caller can match on.
//! NOT here: hints that name command-line flags (the program adds those).

use std::path::PathBuf;

/// Everything that can go wrong between a model file and its text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The cache or the attention refused.
    #[error(transparent)]
    Kv(#[from] kvant_kv::Error),
    /// The file is not there or cannot be read.
    #[error("cannot read {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        why: String,
    },
    /// The file does not start as a GGUF does.
    #[error("{} is not a GGUF file: {why}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it starts with instead.
        why: String,
    },
    /// The file starts as a GGUF but its header contradicts itself or the file's length.
    #[error("{} is a damaged or truncated GGUF: {why}", path.display())]
    DamagedGguf {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// A file of a model folder that contradicts itself, its length or another file.
    #[error("{} is damaged or truncated: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// A model of another architecture.
    #[error("models of architecture `{architecture}` are not supported; supported: {supported}")]
    Architecture {
        /// As the file names it.
        architecture: String,
        /// Those there are.
        supported: &'static str,
    },
    /// A text that describes no shape of a model.
    #[error("`{name}` is no shape of a model: {why}")]
    Shape {
        /// Its name or file.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// A metadata entry that the model needs is absent or of another type.
    #[error("the model file has no usable metadata `{key}`: {why}")]
    Metadata {
        /// Its name.
        key: String,
        /// Absent, wrong type or wrong value.
        why: String,
    },
    /// The model uses something that this engine does not do.
    #[error("the model needs {what}, which is not supported")]
    Unsupported {
        /// What, in words.
        what: String,
    },
    /// Something that the engine does, but not on a GPU.
    #[error("{what} runs on the CPU only")]
    CpuOnly {
        /// What, in words.
        what: String,
    },
    /// A tensor that the model needs is absent.
    #[error("the model file has no tensor `{name}`")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor of another shape than the metadata say.
    #[error("tensor `{name}` has shape {got:?}, expected {expected:?}")]
    TensorShape {
        /// Its name.
        name: String,
        /// Rows first.
        expected: Vec<usize>,
        /// Rows first.
        got: Vec<usize>,
    },
    /// The tensor library refused.
    #[error("tensor library: {why}")]
    Tensor {
        /// What it said.
        why: String,
    },
    /// The tokenizer of the model file could not be built, or refused a text.
    #[error("tokenizer: {why}")]
    Tokenizer {
        /// What it said.
        why: String,
    },
    /// Questions about a text that cannot be made.
    #[error("{why}")]
    Retrieval {
        /// What is missing.
        why: String,
    },
    /// A prompt too large to be split into tokens.
    #[error("a prompt of {bytes} bytes is too large: the tokenizer takes {most} at most")]
    PromptTooLarge {
        /// Bytes of its text, the chat template's included.
        bytes: usize,
        /// Bytes that the tokenizer takes.
        most: usize,
    },
    /// The chat template of the model file is absent or failed.
    #[error("chat template: {why}")]
    ChatTemplate {
        /// What failed.
        why: String,
    },
    /// A scheme with loud channels and no (or no fitting) word on which they are.
    #[error("layer {layer} has scheme {scheme}: {why}")]
    Loud {
        /// The first such layer.
        layer: usize,
        /// Its scheme.
        scheme: String,
        /// What is missing or does not fit.
        why: String,
    },
    /// A file of codebooks that cannot be used.
    #[error("codebooks {}: {why}", path.display())]
    Codebooks {
        /// The file.
        path: PathBuf,
        /// What does not fit, with the tensor's name.
        why: String,
    },
    /// A scheme of sub-vectors without codebooks, or with those of other layers' shapes.
    #[error("layer {layer} has scheme {scheme}: {why}")]
    NoCodebooks {
        /// The first such layer.
        layer: usize,
        /// Its scheme.
        scheme: String,
        /// What is missing or does not fit.
        why: String,
    },
    /// A prompt without tokens.
    #[error("prompt {request} is empty: at least one token is needed")]
    EmptyPrompt {
        /// Its place among the prompts given, from 0.
        request: usize,
    },
    /// A prompt longer than the model's context.
    #[error("prompt {request} has {tokens} tokens, the context of this model holds {context}")]
    PromptTooLong {
        /// Its place among the prompts given, from 0.
        request: usize,
        /// Tokens it has.
        tokens: usize,
        /// Tokens the model can hold.
        context: usize,
    },
    /// A token that is not in the vocabulary.
    #[error("token {token} does not exist: the vocabulary has {vocabulary}")]
    NoSuchToken {
        /// Its number.
        token: u32,
        /// Tokens there are.
        vocabulary: usize,
    },
    /// Sampling options that contradict themselves.
    #[error("{option} must be {allowed}, got {got}")]
    Sampling {
        /// Its name.
        option: &'static str,
        /// The values allowed, in words.
        allowed: &'static str,
        /// The value given.
        got: String,
    },
    /// The model produced a score that is no number.
    #[error("the model produced a NaN logit (token {token}) at position {position}")]
    NanLogit {
        /// The first vocabulary entry with a NaN.
        token: usize,
        /// Position in the sequence.
        position: usize,
    },
    /// A scheme file that cannot be used.
    #[error("scheme file {}: {why}", path.display())]
    SchemeFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and in which line.
        why: String,
    },
    /// A limit of the engine that cannot be kept.
    #[error("{option}: {why}")]
    Limit {
        /// Its name.
        option: &'static str,
        /// Why not.
        why: String,
    },
    /// A request whose tokens take more memory than the cache may have, even alone.
    #[error(
        "request {request} can never fit: {tokens} tokens take up to {need} bytes of cache, and it may have {budget}"
    )]
    NeverFits {
        /// Its number.
        request: usize,
        /// Tokens of its prompt and of the longest answer.
        tokens: usize,
        /// Bytes it takes at most, alone.
        need: usize,
        /// Bytes the cache may have.
        budget: usize,
    },
    /// What was moved out of the cache could not be written or read back.
    #[error("the request's saved cache could not be {what}: {why}")]
    Swap {
        /// `written` or `read back`.
        what: &'static str,
        /// What the operating system or the cache said.
        why: String,
    },
    /// A prompt's cache in a file that cannot be used.
    #[error("prompt cache {}: {why}", path.display())]
    PromptCache {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// Whoever listened to the events of a generation asked for no more.
    #[error("the caller stopped the generation")]
    Stopped,
    /// Zero threads, or threads that could not start.
    #[error("cannot run on {threads} threads: {why}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// Why not.
        why: String,
    },
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        Self::Tensor { why: said(e) }
    }
}

/// What the tensor library has to say, in one line: without the backtrace that it carries when `RUST_BACKTRACE` is set.
pub(crate) fn said(e: candle_core::Error) -> String {
    use candle_core::Error as E;
    match e {
        E::WithBacktrace { inner, .. } | E::WithPath { inner, .. } => said(*inner),
        E::Context { inner, context } => format!("{context}: {}", said(*inner)),
        E::WrappedContext { wrapped, context } => format!("{context}: {}", first_line(&wrapped.to_string())),
        e => first_line(&e.to_string()),
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_backtrace_of_the_tensor_library_gets_into_a_sentence() {
        use candle_core::Error as E;
        let backtrace = || Box::new(std::backtrace::Backtrace::force_capture());
        let inner = E::Msg("the reason\nand more".into());
        let inner = E::WithBacktrace { inner: Box::new(inner), backtrace: backtrace() };
        let outer = E::WithBacktrace { inner: Box::new(inner.context("reading")), backtrace: backtrace() };
        assert_eq!(Error::from(outer).to_string(), "tensor library: reading: the reason");
    }
}
