//! Text to tokens and back. In: an open model file; out: tokens of a text, bytes of a token, text as tokens arrive.
//! NOT here: the chat template (chat.rs), what of a chat is its template's (specials.rs), which tokens are chosen
//! (sampler.rs).

use crate::Error;
use crate::gguf::Gguf;
use crate::specials::{Piece, Rendered, Specials};
use candle_core::quantized::gguf_file::Value;
use shimmytok::byte_encoder::unicode_to_bytes;
use shimmytok::{EncodeOptions, MAX_INPUT_SIZE, TokenType};

/// Pre-tokenizers that the tokenizer library knows by name; it would split texts of others, and of files that name none, in
/// a default way, silently.
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

/// Switches that the tokenizer library reads.
const SWITCHES: &[&str] = &[
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "clean_spaces",
    "remove_extra_whitespaces",
    "escape_whitespaces",
    "treat_whitespace_as_suffix",
];

/// Texts of control tokens that end a turn, besides those that the metadata name.
const END_TEXTS: &[&str] =
    &["<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "</s>", "<EOT>"];

/// The tokenizer of a model file.
pub struct Tokenizer {
    inner: shimmytok::Tokenizer,
    byte_pairs: bool,
    start: Option<u32>,
    ends: Vec<u32>,
    specials: Specials,
}

impl Tokenizer {
    /// Builds the tokenizer that the file describes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a split of texts that is not known by name, [`Error::Metadata`] for anything absent or
    /// of another type that the tokenizer library would do without, [`Error::Tokenizer`] for what it refuses.
    pub fn load(gguf: &Gguf) -> Result<Self, Error> {
        let kind = gguf
            .text("tokenizer.ggml.model")?
            .ok_or_else(|| Error::Metadata { key: "tokenizer.ggml.model".into(), why: "it is absent".into() })?;
        let byte_pairs = match kind {
            "gpt2" => true,
            "llama" => false,
            other => return Err(Error::Unsupported { what: format!("a tokenizer of type `{other}`") }),
        };
        match gguf.text("tokenizer.ggml.pre")? {
            Some(split) if byte_pairs && !BYTE_PAIR_SPLITS.contains(&split) => {
                return Err(Error::Unsupported { what: format!("a tokenizer that splits texts as `{split}`") });
            }
            None if byte_pairs => {
                let why = "it is absent, and texts could be split wrong".into();
                return Err(Error::Metadata { key: "tokenizer.ggml.pre".into(), why });
            }
            _ => {}
        }
        let vocabulary = check_lists(gguf, byte_pairs)?;
        let id = |name: &str| -> Result<Option<u32>, Error> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match gguf.count(&key)? {
                Some(id) if id >= vocabulary => {
                    Err(Error::Metadata { key, why: format!("token {id} is beyond the vocabulary of {vocabulary}") })
                }
                id => Ok(id.map(|id| id as u32)),
            }
        };
        // The library takes these on trust, and reads numbers of one type only.
        for name in SPECIAL {
            let key = format!("tokenizer.ggml.{name}_token_id");
            if id(name)?.is_some() && !matches!(gguf.get(&key), Some(Value::U32(_))) {
                return Err(Error::Metadata { key, why: "it is no 32-bit number without sign".into() });
            }
        }
        SWITCHES.iter().try_for_each(|name| gguf.flag(&format!("tokenizer.ggml.{name}")).map(drop))?;
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
        // Named by number, or marked as control tokens.
        let mut special = Vec::new();
        for name in SPECIAL {
            special.extend(id(name)?);
        }
        special.extend((0..vocabulary as u32).filter(|&id| inner.token_type(id) == TokenType::Control));
        let specials = Specials::new(special.into_iter().filter_map(|id| Some((inner.token_to_piece(id).ok()?, id))))?;
        Ok(Self { inner, byte_pairs, start, ends, specials })
    }

    /// Tokens of a raw prompt: no special token is read from the text; the start token comes first if the file asks
    /// for it.
    ///
    /// # Errors
    /// [`Error::PromptTooLarge`], [`Error::Tokenizer`] when the library refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.start.into_iter().chain(self.encode_text(text)?).collect())
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
        let tokens = self.inner.encode_with_options(text, &EncodeOptions::with_parse_special(false, false));
        let mut out = Vec::new();
        for token in tokens.map_err(refused)? {
            // A library that joins characters to whatever the vocabulary has can arrive at a control token.
            match self.inner.token_type(token) {
                TokenType::Control => self.spell(token, &mut out)?,
                _ => out.push(token),
            }
        }
        Ok(out)
    }

    /// A token's text by the tokens of its single characters, or of their bytes.
    fn spell(&self, token: u32, out: &mut Vec<u32>) -> Result<(), Error> {
        let piece = self.piece(token).unwrap_or_default();
        let plain =
            |text: &str| self.inner.get_token(text).filter(|&id| self.inner.token_type(id) != TokenType::Control);
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

/// Checks the lists that describe the tokens: the library would do without the optional ones, and read texts wrong.
/// Returns how many tokens there are.
fn check_lists(gguf: &Gguf, byte_pairs: bool) -> Result<usize, Error> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let no = |name: &str, why: &str| Error::Metadata { key: key(name), why: why.into() };
    let list = |name: &str| match gguf.get(&key(name)) {
        Some(Value::Array(list)) => Ok(list),
        Some(_) => Err(no(name, "it is no list")),
        None => Err(no(name, "it is absent")),
    };
    let tokens = list("tokens")?;
    if tokens.len() < 3 || !tokens.iter().all(|t| matches!(t, Value::String(_))) {
        return Err(no("tokens", "it is no list of three texts or more"));
    }
    let types = list("token_type")?;
    if types.len() != tokens.len() {
        return Err(no("token_type", &format!("it has {} entries for {} tokens", types.len(), tokens.len())));
    }
    if let Some(i) = types.iter().position(|t| !matches!(t, Value::I32(0..=6))) {
        return Err(no("token_type", &format!("entry {i} is {:?}, which is no type of token", types[i])));
    }
    let normal = |i: usize| matches!(types[i], Value::I32(NORMAL));
    if !(0..types.len()).any(normal) {
        return Err(no("token_type", "no token is a normal one"));
    }
    if byte_pairs {
        let merges = list("merges")?;
        let pair = |m: &Value| matches!(m, Value::String(m) if m.split(' ').count() == 2);
        if let Some(i) = merges.iter().position(|m| !pair(m)) {
            return Err(no("merges", &format!("entry {i} is no pair of tokens")));
        }
        let joined = |i: usize| matches!(&tokens[i], Value::String(t) if t.chars().nth(1).is_some());
        if merges.is_empty() && (0..tokens.len()).any(|i| normal(i) && joined(i)) {
            return Err(no("merges", "it is empty, and there are tokens of several characters"));
        }
    } else {
        let scores = list("scores")?;
        if scores.len() != tokens.len() || !scores.iter().all(|s| matches!(s, Value::F32(x) if !x.is_nan())) {
            return Err(no("scores", "it is no list of one number per token"));
        }
    }
    Ok(tokens.len())
}

/// Type of a token that is a piece of text, as files number it.
const NORMAL: i32 = 1;

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
