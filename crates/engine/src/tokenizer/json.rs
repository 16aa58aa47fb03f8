//! Tokens as tokenizer.json describes them, through the tokenizers library. In: an open folder; out: a tokenizer.
//! NOT here: what tokenizers have in common (../tokenizer.rs), chat templates (chat.rs).

use super::{Tokenizer, Vocabulary, byte_of_hex};
use crate::Error;
use crate::folder::Folder;
use serde_json::{Map, Value};
use shimmytok::byte_encoder::unicode_to_bytes;
use std::collections::BTreeMap;

const FILE: &str = "tokenizer.json";

/// How a token's spelling becomes bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// Each byte is a character.
    Bytes,
    /// U+2581 is a space, `<0x0A>` a byte.
    Pieces,
}

struct JsonVocabulary {
    inner: tokenizers::Tokenizer,
    spelling: Spelling,
    /// Tokens that are found in a text before it is split, and whether they are special.
    added: BTreeMap<u32, bool>,
}

impl Vocabulary for JsonVocabulary {
    fn split(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.inner.encode_fast(text, false).map_err(refused)?.get_ids().to_vec())
    }

    fn id(&self, piece: &str) -> Option<u32> {
        self.inner.token_to_id(piece)
    }

    fn piece(&self, token: u32) -> Option<String> {
        self.inner.id_to_token(token)
    }

    fn is_control(&self, token: u32) -> bool {
        self.added.get(&token) == Some(&true)
    }

    fn bytes(&self, token: u32) -> Vec<u8> {
        let Some(piece) = self.piece(token) else { return Vec::new() };
        match (self.added.get(&token), self.spelling) {
            (Some(true), _) => Vec::new(),
            (Some(false), _) => piece.into_bytes(),
            (None, Spelling::Bytes) => {
                let bytes = unicode_to_bytes();
                piece.chars().filter_map(|c| bytes.get(&c).copied()).collect()
            }
            (None, Spelling::Pieces) => match byte_of_hex(&piece) {
                Some(byte) => vec![byte],
                None => piece.replace('\u{2581}', " ").into_bytes(),
            },
        }
    }

    fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }
}

impl Tokenizer {
    /// Builds the tokenizer that a folder describes; None without a tokenizer.json.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for what the tokenizer library refuses and for files that contradict each other,
    /// [`Error::Unsupported`] for tokens whose bytes are not known, [`Error::Metadata`] for end tokens that do not exist;
    /// those of reading.
    pub fn of_folder(folder: &Folder) -> Result<Option<Self>, Error> {
        let Some(bytes) = folder.bytes(FILE)? else { return Ok(None) };
        let described = folder.json(FILE)?.unwrap_or_default();
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(refused)?;
        // Whoever trained the model may have cut or filled texts: a prompt is taken as it is.
        inner.with_truncation(None).map_err(refused)?;
        inner.with_padding(None);
        // What people write is data: special tokens in it are text.
        inner.set_encode_special_tokens(true);
        let spelling = spelling(&described)?;
        let added: BTreeMap<u32, bool> =
            inner.get_added_tokens_decoder().into_iter().map(|(id, token)| (id, token.special)).collect();
        let start = start(&inner)?;
        let config = folder.json("tokenizer_config.json")?.unwrap_or_default();
        if let Some(wanted) = config.get("add_bos_token").and_then(Value::as_bool)
            && wanted == start.is_empty()
        {
            let why = format!("tokenizer_config.json has `add_bos_token` {wanted}, and {FILE} does otherwise");
            return Err(Error::Tokenizer { why });
        }
        let generation = folder.json("generation_config.json")?.unwrap_or_default();
        let mut ends = ends(&generation, &inner)?;
        ends.extend(self::ends(folder.config(), &inner)?);
        let special: Vec<u32> = added.iter().filter(|(_, special)| **special).map(|(id, _)| *id).collect();
        Self::new(Box::new(JsonVocabulary { inner, spelling, added }), start, ends, special).map(Some)
    }
}

/// How this file's decoder reads a token.
fn spelling(described: &Map<String, Value>) -> Result<Spelling, Error> {
    let decoder = described.get("decoder").unwrap_or(&Value::Null);
    let kind = |v: &Value| v.get("type").and_then(Value::as_str).unwrap_or("none").to_owned();
    let kinds: Vec<String> = match decoder.get("decoders").and_then(Value::as_array) {
        Some(steps) => steps.iter().map(kind).collect(),
        None => vec![kind(decoder)],
    };
    let has = |name: &str| kinds.iter().any(|kind| kind == name);
    match (has("ByteLevel"), has("ByteFallback") || has("Metaspace")) {
        (true, false) => Ok(Spelling::Bytes),
        (false, true) => Ok(Spelling::Pieces),
        _ => Err(Error::Unsupported { what: format!("a tokenizer that decodes by {}", kinds.join(", ")) }),
    }
}

/// The tokens that the file puts before every text.
fn start(inner: &tokenizers::Tokenizer) -> Result<Vec<u32>, Error> {
    let ids = |special| inner.encode_fast("a", special).map(|e| e.get_ids().to_vec()).map_err(refused);
    let (with, without) = (ids(true)?, ids(false)?);
    match with.strip_suffix(without.as_slice()) {
        Some(start) => Ok(start.to_vec()),
        None => Err(Error::Unsupported { what: format!("a tokenizer that adds tokens behind a text ({FILE})") }),
    }
}

/// The end tokens that a file of the folder names: a number or a list of them.
fn ends(file: &Map<String, Value>, inner: &tokenizers::Tokenizer) -> Result<Vec<u32>, Error> {
    const KEY: &str = "eos_token_id";
    let named = match file.get(KEY) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list.clone(),
        Some(one) => vec![one.clone()],
    };
    let id = |v: &Value| {
        let id = v.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| inner.id_to_token(id).is_some());
        id.ok_or_else(|| Error::Metadata { key: KEY.into(), why: format!("{v} is no token of {FILE}") })
    };
    named.iter().map(id).collect()
}

fn refused(e: tokenizers::Error) -> Error {
    Error::Tokenizer { why: format!("{FILE}: {e}") }
}
