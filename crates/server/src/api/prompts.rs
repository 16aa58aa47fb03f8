//! Prompts before they are tokens. In: texts, tokens or messages; out: their tokens, or an error that names the field. What
//! cannot fit the model's context is refused before work is spent on it.
//! NOT here: reading them out of a body (completions.rs, chat.rs).

use super::errors::ApiError;
use kvant_engine::{Error, LoadedModel, Message};

/// What is to be gone on with.
pub enum Prompt {
    /// A text.
    Text(String),
    /// Tokens as the client has them.
    Tokens(Vec<u32>),
    /// The messages of a chat.
    Chat(Vec<Message>),
}

impl Prompt {
    /// Its words, for a log that is to have them.
    pub fn words(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Tokens(tokens) => format!("{tokens:?}"),
            Self::Chat(messages) => {
                messages.iter().map(|m| format!("{}: {}", m.role, m.content)).collect::<Vec<_>>().join("\n")
            }
        }
    }

    /// Refuses what is over the context for certain: texts cost time to split, and tokens memory for every choice.
    /// `longest` is the number of bytes of the longest token, where the model has a tokenizer.
    ///
    /// # Errors
    /// [`ApiError`] that names `field`.
    pub fn check(&self, field: &str, context: usize, longest: Option<usize>) -> Result<(), ApiError> {
        let bytes = match self {
            Self::Tokens(tokens) if tokens.len() > context => {
                return Err(ApiError::too_many_tokens(field, tokens.len(), context));
            }
            Self::Tokens(_) => return Ok(()),
            Self::Text(text) => text.len(),
            Self::Chat(messages) => messages.iter().map(|m| m.content.len()).sum(),
        };
        match longest {
            Some(longest) if bytes > context.saturating_mul(longest) => {
                Err(ApiError::too_many_bytes(field, bytes, context))
            }
            _ => Ok(()),
        }
    }

    /// Its tokens.
    ///
    /// # Errors
    /// Those of the tokenizer and the chat template.
    pub fn tokens(self, model: &LoadedModel) -> Result<Vec<u32>, Error> {
        match self {
            Self::Text(text) => model.encode(&text),
            Self::Tokens(tokens) => Ok(tokens),
            Self::Chat(messages) => model.encode_chat(&messages),
        }
    }
}

/// Bytes of a model's longest token; None when it has no tokenizer.
pub fn longest_token(model: &LoadedModel) -> Option<usize> {
    let tokenizer = model.tokenizer().ok()?;
    let tokens = 0..u32::try_from(tokenizer.vocabulary()).unwrap_or(u32::MAX);
    tokens.map(|token| tokenizer.bytes(token).len()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_the_context_for_certain_is_refused_and_nothing_else() {
        let text = |n: usize| Prompt::Text("x".repeat(n));
        let chat = |n: usize| {
            let message = || Message { role: "user".into(), content: "x".repeat(n) };
            Prompt::Chat(vec![message(), message()])
        };
        for (fits, over) in
            [(text(40), text(41)), (chat(20), chat(21)), (Prompt::Tokens(vec![1; 10]), Prompt::Tokens(vec![1; 11]))]
        {
            fits.check("prompt", 10, Some(4)).unwrap();
            let error = over.check("prompt", 10, Some(4)).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (400, Some("context_length_exceeded")));
            assert!(error.message.starts_with("prompt: ") && error.message.contains("10"), "{}", error.message);
        }
        text(1000).check("prompt", 10, None).unwrap();
    }
}
