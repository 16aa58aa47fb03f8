//! Tokens as GGUF files describe them, through the shimmytok library. In: an open file; out: a tokenizer.
//! NOT here: what tokenizers have in common (../tokenizer.rs).

use super::{Tokenizer, Vocabulary, byte_of_hex};
use crate::Error;
use crate::gguf::Gguf;
use aho_corasick::{AhoCorasick, MatchKind};
use candle_core::quantized::gguf_file::Value;
use shimmytok::byte_encoder::unicode_to_bytes;
use shimmytok::{EncodeOptions, TokenType};

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

struct GgufVocabulary {
    inner: shimmytok::Tokenizer,
    byte_pairs: bool,
    /// Tokens that a text has whole wherever it spells them (runs of spaces, tags), which the library does not look for.
    whole: AhoCorasick,
    whole_ids: Vec<u32>,
}

impl GgufVocabulary {
    fn new(inner: shimmytok::Tokenizer, byte_pairs: bool) -> Result<Self, Error> {
        let ids = (0..inner.vocab_size() as u32).filter(|&id| inner.token_type(id) == TokenType::UserDefined);
        let (whole_ids, texts): (Vec<_>, Vec<_>) =
            ids.filter_map(|id| Some((id, inner.token_to_piece(id).ok().filter(|text| !text.is_empty())?))).unzip();
        let whole = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&texts);
        let no = |e| Error::Tokenizer { why: format!("its tokens cannot be searched for: {e}") };
        Ok(Self { inner, byte_pairs, whole: whole.map_err(no)?, whole_ids })
    }

    /// Adds the tokens of a stretch of text between whole tokens.
    fn between(&self, text: &str, out: &mut Vec<u32>) -> Result<(), Error> {
        if !text.is_empty() {
            let options = EncodeOptions::with_parse_special(false, false);
            out.extend(self.inner.encode_with_options(text, &options).map_err(refused)?);
        }
        Ok(())
    }
}

impl Vocabulary for GgufVocabulary {
    fn split(&self, text: &str) -> Result<Vec<u32>, Error> {
        // Pieces spell a space so, and a text that has the sign itself reads as one with a space.
        let spaced = (!self.byte_pairs).then(|| text.replace('\u{2581}', " "));
        let text = spaced.as_deref().unwrap_or(text);
        let (mut out, mut from) = (Vec::new(), 0);
        for found in self.whole.find_iter(text) {
            self.between(&text[from..found.start()], &mut out)?;
            out.push(self.whole_ids[found.pattern().as_usize()]);
            from = found.end();
        }
        self.between(&text[from..], &mut out)?;
        Ok(out)
    }

    fn id(&self, piece: &str) -> Option<u32> {
        self.inner.get_token(piece)
    }

    fn piece(&self, token: u32) -> Option<String> {
        self.inner.token_to_piece(token).ok()
    }

    fn is_control(&self, token: u32) -> bool {
        self.inner.token_type(token) == TokenType::Control
    }

    fn bytes(&self, token: u32) -> Vec<u8> {
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

    fn len(&self) -> usize {
        self.inner.vocab_size()
    }
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a split of texts that is not known by name, [`Error::Metadata`] for anything absent or
    /// of another type that the tokenizer library would do without, [`Error::Tokenizer`] for what it refuses.
    pub fn of_gguf(gguf: &Gguf) -> Result<Self, Error> {
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
        let ends = [id("eos")?, id("eot")?, id("eom")?].into_iter().flatten().collect();
        // Named by number, or marked as control tokens.
        let mut special = Vec::new();
        for name in SPECIAL {
            special.extend(id(name)?);
        }
        special.extend((0..vocabulary as u32).filter(|&id| inner.token_type(id) == TokenType::Control));
        Self::new(Box::new(GgufVocabulary::new(inner, byte_pairs)?), start.into_iter().collect(), ends, special)
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

fn refused(e: shimmytok::Error) -> Error {
    Error::Tokenizer { why: e.to_string() }
}
