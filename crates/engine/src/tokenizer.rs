//! Text to tokens and back. In: an open model file; out: tokens of a text, bytes of a token, text as tokens arrive.
//! NOT here: the chat template (chat.rs), which tokens are chosen (sampler.rs).

use crate::Error;
use crate::gguf::Gguf;
use candle_core::quantized::gguf_file::Value;
use shimmytok::byte_encoder::unicode_to_bytes;
use shimmytok::{EncodeOptions, TokenType};

/// Pre-tokenizers that the tokenizer library knows by name; it would split texts of others in a default way, silently.
const BYTE_PAIR_SPLITS: &[&str] = &[
    "default",
    "llama3",
    "llama-v3",
    "llama-bpe",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "deepseek-r1-qwen",
    "falcon",
    "starcoder",
    "refact",
    "command-r",
    "smollm",
    "codeshell",
    "exaone",
    "minerva",
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "mpt",
    "olmo",
    "jais",
    "trillion",
    "qwen2",
    "stablelm2",
    "hunyuan",
    "megrez",
    "chatglm4",
    "glm4",
    "chatglm-bpe",
    "dbrx",
    "smaug-bpe",
    "tekken",
    "gpt-4o",
    "llama4",
];

/// Tokens that metadata name by number.
const SPECIAL: &[&str] =
    &["bos", "eos", "unknown", "padding", "eot", "eog", "sep", "nl", "fim_pre", "fim_suf", "fim_mid", "mask"];

/// Texts of control tokens that end a turn, besides those that the metadata name.
const END_TEXTS: &[&str] =
    &["<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>", "<EOT>"];

/// The tokenizer of a model file.
pub struct Tokenizer {
    inner: shimmytok::Tokenizer,
    byte_pairs: bool,
    start: Option<u32>,
    ends: Vec<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer that the file describes.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], [`Error::Unsupported`] for a split of texts that is not known by name.
    pub fn load(gguf: &Gguf) -> Result<Self, Error> {
        let kind = gguf
            .text("tokenizer.ggml.model")?
            .ok_or_else(|| Error::Metadata { key: "tokenizer.ggml.model".into(), why: "it is absent".into() })?;
        let byte_pairs = match kind {
            "gpt2" => true,
            "llama" => false,
            other => return Err(Error::Unsupported { what: format!("a tokenizer of type `{other}`") }),
        };
        if let Some(split) = gguf.text("tokenizer.ggml.pre")?
            && byte_pairs
            && !BYTE_PAIR_SPLITS.contains(&split)
        {
            return Err(Error::Unsupported { what: format!("a tokenizer that splits texts as `{split}`") });
        }
        let vocabulary = match gguf.get("tokenizer.ggml.tokens") {
            Some(Value::Array(tokens)) if tokens.len() > 2 => tokens.len(),
            _ => {
                let why = "it is no list of three tokens or more".into();
                return Err(Error::Metadata { key: "tokenizer.ggml.tokens".into(), why });
            }
        };
        let id = |name: &str| -> Result<Option<u32>, Error> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match gguf.count(&key)? {
                Some(id) if id >= vocabulary => {
                    Err(Error::Metadata { key, why: format!("token {id} is beyond the vocabulary of {vocabulary}") })
                }
                id => Ok(id.map(|id| id as u32)),
            }
        };
        // The library takes these on trust.
        SPECIAL.iter().try_for_each(|name| id(name).map(drop))?;
        let inner = shimmytok::Tokenizer::from_gguf_file(gguf.path()).map_err(refused)?;
        let wants_start = gguf.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(false);
        let start = if wants_start { id("bos")? } else { None };
        let named = [id("eos")?, id("eot")?, id("eom")?];
        let by_text = END_TEXTS.iter().filter_map(|text| inner.get_token(text));
        let mut ends: Vec<u32> = named
            .into_iter()
            .flatten()
            .chain(by_text.filter(|&id| inner.token_type(id) == TokenType::Control))
            .collect();
        ends.sort_unstable();
        ends.dedup();
        Ok(Self { inner, byte_pairs, start, ends })
    }

    /// Tokens of a raw prompt: no special token is read from the text; the start token comes first if the file asks
    /// for it.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the text is too long for the library (10 MiB).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let tokens = self.inner.encode_with_options(text, &EncodeOptions::with_parse_special(false, false));
        Ok(self.start.into_iter().chain(tokens.map_err(refused)?).collect())
    }

    /// Tokens of a rendered chat: special tokens are read from the text, the template says where a start token goes.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, Error> {
        self.inner.encode_with_options(rendered, &EncodeOptions::with_parse_special(false, true)).map_err(refused)
    }

    /// Whether this token ends a text.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// Entries of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.inner.vocab_size()
    }

    /// Text of a token as the vocabulary spells it, if it exists.
    pub fn piece(&self, token: u32) -> Option<String> {
        self.inner.token_to_piece(token).ok()
    }

    /// Bytes that a token stands for: a part of a character for some, none for control tokens.
    pub fn bytes(&self, token: u32) -> Vec<u8> {
        let Some(piece) = self.piece(token) else { return Vec::new() };
        match self.inner.token_type(token) {
            TokenType::Control | TokenType::Unused | TokenType::Undefined => Vec::new(),
            TokenType::UserDefined => piece.into_bytes(),
            TokenType::Byte => byte_of_hex(&piece).map_or(Vec::new(), |b| vec![b]),
            TokenType::Normal | TokenType::Unknown if self.byte_pairs => {
                let bytes = unicode_to_bytes();
                piece.chars().filter_map(|c| bytes.get(&c).copied()).collect()
            }
            TokenType::Normal | TokenType::Unknown => piece.replace('\u{2581}', " ").into_bytes(),
        }
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

fn refused(e: shimmytok::Error) -> Error {
    Error::Tokenizer { why: e.to_string() }
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
