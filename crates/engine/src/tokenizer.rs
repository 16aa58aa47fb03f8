//! Text to tokens and back. In: an open model; out: tokens of a text, bytes of a token, text as tokens arrive.
//! NOT here: how a container describes its tokens (tokenizer/gguf.rs, tokenizer/json.rs), the chat template (chat.rs), what
//! of a chat is its template's (specials.rs), which tokens are chosen (sampler.rs).

mod gguf;
mod json;

use crate::Error;
use crate::specials::{Piece, Rendered, Specials};
use shimmytok::MAX_INPUT_SIZE;

/// Texts of control tokens that end a turn, besides those that the metadata name.
const END_TEXTS: &[&str] =
    &["<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>", "<EOT>"];

/// What containers describe in their own ways.
trait Vocabulary: Send + Sync {
    /// Tokens of a text; no special token is searched for in it, though one may arise where characters are joined.
    fn split(&self, text: &str) -> Result<Vec<u32>, Error>;
    /// The token of this spelling.
    fn id(&self, piece: &str) -> Option<u32>;
    /// A token's spelling.
    fn piece(&self, token: u32) -> Option<String>;
    /// Whether this token is none of a text.
    fn is_control(&self, token: u32) -> bool;
    /// Bytes that a token stands for.
    fn bytes(&self, token: u32) -> Vec<u8>;
    /// Tokens there are.
    fn len(&self) -> usize;
}

/// The tokenizer of a model.
pub struct Tokenizer {
    vocabulary: Box<dyn Vocabulary>,
    start: Vec<u32>,
    ends: Vec<u32>,
    specials: Specials,
}

impl Tokenizer {
    /// `ends`: tokens that end a text, besides control tokens whose spelling says so.
    fn new(
        vocabulary: Box<dyn Vocabulary>,
        start: Vec<u32>,
        mut ends: Vec<u32>,
        special: impl IntoIterator<Item = u32>,
    ) -> Result<Self, Error> {
        let by_text = END_TEXTS.iter().filter_map(|text| vocabulary.id(text));
        ends.extend(by_text.filter(|&id| vocabulary.is_control(id)));
        ends.sort_unstable();
        ends.dedup();
        let specials = Specials::new(special.into_iter().filter_map(|id| Some((vocabulary.piece(id)?, id))))?;
        Ok(Self { vocabulary, start, ends, specials })
    }

    /// Tokens of a raw prompt: no special token is read from the text; the start token comes first if the file asks
    /// for it.
    ///
    /// # Errors
    /// [`Error::PromptTooLarge`], [`Error::Tokenizer`] when the library refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok([self.start.as_slice(), &self.encode_text(text)?].concat())
    }

    /// Tokens of a rendered chat: special tokens are those that the template wrote, which says where a start token goes
    /// too. What a message spells stays text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, rendered: &Rendered) -> Result<Vec<u32>, Error> {
        let mut tokens = Vec::new();
        for piece in self.specials.pieces(rendered) {
            match piece {
                Piece::Special(id) => tokens.push(id),
                Piece::Text(text) => tokens.extend(self.encode_text(&text)?),
            }
        }
        Ok(tokens)
    }

    /// The special tokens that a template may write.
    pub fn specials(&self) -> &Specials {
        &self.specials
    }

    /// Tokens of a text, none of them a control token, and no start token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, Error> {
        if text.len() > MAX_INPUT_SIZE {
            return Err(Error::PromptTooLarge { bytes: text.len(), most: MAX_INPUT_SIZE });
        }
        let mut out = Vec::new();
        for token in self.vocabulary.split(text)? {
            // A library that joins characters to whatever the vocabulary has can arrive at a control token.
            match self.vocabulary.is_control(token) {
                true => self.spell(token, &mut out)?,
                false => out.push(token),
            }
        }
        Ok(out)
    }

    /// A token's text by the tokens of its single characters, or of their bytes.
    fn spell(&self, token: u32, out: &mut Vec<u32>) -> Result<(), Error> {
        let piece = self.piece(token).unwrap_or_default();
        let plain = |text: &str| self.vocabulary.id(text).filter(|&id| !self.vocabulary.is_control(id));
        for c in piece.chars().map(String::from) {
            let bytes = || c.bytes().map(|b| plain(&format!("<0x{b:02X}>"))).collect::<Option<Vec<_>>>();
            match plain(&c).map(|id| vec![id]).or_else(bytes) {
                Some(ids) => out.extend(ids),
                None => {
                    let why = format!("the text has `{piece}`, for which there is only a control token");
                    return Err(Error::Tokenizer { why });
                }
            }
        }
        Ok(())
    }

    /// Whether this token ends a text.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// Entries of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary.len()
    }

    /// Text of a token as the vocabulary spells it, if it exists.
    pub fn piece(&self, token: u32) -> Option<String> {
        self.vocabulary.piece(token)
    }

    /// Bytes that a token stands for: a part of a character for some, none for control tokens.
    pub fn bytes(&self, token: u32) -> Vec<u8> {
        self.vocabulary.bytes(token)
    }

    /// Text of tokens; bytes that form no character become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = TextStream::default();
        let mut text: String = tokens.iter().map(|&t| stream.push(&self.bytes(t))).collect();
        text.push_str(&stream.finish());
        text
    }
}

/// `<0x0A>` is byte 10.
fn byte_of_hex(piece: &str) -> Option<u8> {
    u8::from_str_radix(piece.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
}

/// Text from bytes that arrive in pieces: a character is given out when its last byte is there.
#[derive(Debug, Default)]
pub struct TextStream {
    pending: Vec<u8>,
}

impl TextStream {
    /// Takes bytes, gives the text that is complete. Bytes that can begin no character become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(all) => {
                    text.push_str(all);
                    self.pending.clear();
                    return text;
                }
                Err(e) => {
                    let valid = e.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[..valid]));
                    let Some(bad) = e.error_len() else {
                        self.pending.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.pending.drain(..valid + bad);
                }
            }
        }
    }

    /// What is left when no more bytes come: U+FFFD for a character that never became whole.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_character_is_held_back() {
        let mut stream = TextStream::default();
        let euro = "€".as_bytes();
        assert_eq!(stream.push(b"a"), "a");
        assert_eq!(stream.push(&euro[..1]), "");
        assert_eq!(stream.push(&euro[1..2]), "");
        assert_eq!(stream.push(&euro[2..]), "€");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn bytes_that_are_no_text_are_marked_and_what_follows_survives() {
        let mut stream = TextStream::default();
        assert_eq!(stream.push(&[0xff, b'x']), "\u{fffd}x");
        assert_eq!(stream.push(&[0xe2, 0x82]), "");
        assert_eq!(stream.push(b"y"), "\u{fffd}y");
        assert_eq!(stream.push(&[0xf0, 0x9f]), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn byte_tokens_are_hexadecimal() {
        assert_eq!([byte_of_hex("<0x0A>"), byte_of_hex("<0xZZ>"), byte_of_hex("0x0A")], [Some(10), None, None]);
    }
}
