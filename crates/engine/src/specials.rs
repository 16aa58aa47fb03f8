//! Special tokens in texts. In: their spellings; out: where a text has them, and data in which nothing can be taken for
//! one. NOT here: which tokens of a vocabulary are special (tokenizer.rs), templates (chat.rs).
//!
//! A chat template writes special tokens as text around what people wrote, and both reach the tokenizer as one text. So
//! that a message cannot end its own turn, a guard (one character that no message has) is put into every special token
//! that a message spells. The template's own are found in the rendered text, and the guards are taken out of the rest.
//! Without such a message no guard is used, and templates see every other character of a message as it is.

use crate::Error;
use aho_corasick::{AhoCorasick, MatchKind};

/// The special tokens of a vocabulary.
pub struct Specials {
    texts: Vec<String>,
    ids: Vec<u32>,
    /// Leftmost-longest, as a text is split.
    split: AhoCorasick,
    /// Every occurrence, overlapping ones too.
    all: AhoCorasick,
}

/// A rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text, guards in it.
    pub(crate) text: String,
    /// The character that keeps data from being read as special tokens.
    pub(crate) guard: char,
}

/// A stretch of a rendered chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// A special token that the template wrote.
    Special(u32),
    /// Text, guards taken out.
    Text(String),
}

impl Specials {
    /// These tokens. Spellings of one character are left out: they are a text's own.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when there are too many to search for.
    pub fn new(tokens: impl IntoIterator<Item = (String, u32)>) -> Result<Self, Error> {
        let (texts, ids): (Vec<_>, Vec<_>) = tokens.into_iter().filter(|(t, _)| t.chars().count() > 1).unzip();
        let build = |kind| {
            let built = AhoCorasick::builder().match_kind(kind).build(&texts);
            built.map_err(|e| Error::Tokenizer { why: format!("its special tokens cannot be searched for: {e}") })
        };
        Ok(Self { split: build(MatchKind::LeftmostLongest)?, all: build(MatchKind::Standard)?, texts, ids })
    }

    /// A character that is in none of these texts, from those that mean nothing in Unicode.
    pub(crate) fn guard_for<'a>(&self, texts: impl Iterator<Item = &'a str> + Clone) -> Result<char, Error> {
        let mut private = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}').chain('\u{100000}'..='\u{10fffd}');
        let used = |c| texts.clone().any(|text| text.contains(c)) || self.texts.iter().any(|text| text.contains(c));
        private
            .find(|c| !used(*c))
            .ok_or_else(|| Error::Tokenizer { why: "the chat uses every private character of Unicode".into() })
    }

    /// Data with a guard in every special token it spells, and beside what could become one with the text around it.
    pub(crate) fn guarded(&self, data: &str, guard: char) -> String {
        // Behind the first character of each: no two characters of a special token are neighbours any more.
        let mut cuts: Vec<usize> = self
            .all
            .find_overlapping_iter(data)
            .map(|m| m.start() + data[m.start()..].chars().next().map_or(0, char::len_utf8))
            .collect();
        let parts = |text: &'_ str| -> Vec<usize> { text.char_indices().map(|(at, _)| at).skip(1).collect() };
        for text in &self.texts {
            if parts(text).iter().any(|&at| data.starts_with(&text[at..])) {
                cuts.push(0);
            }
            if parts(text).iter().any(|&at| data.ends_with(&text[..at])) {
                cuts.push(data.len());
            }
        }
        cuts.sort_unstable();
        cuts.dedup();
        let mut guarded = String::with_capacity(data.len() + cuts.len() * guard.len_utf8());
        let mut from = 0;
        for cut in cuts {
            guarded.push_str(&data[from..cut]);
            guarded.push(guard);
            from = cut;
        }
        guarded + &data[from..]
    }

    /// A rendered chat as special tokens and the texts between them.
    pub(crate) fn pieces(&self, rendered: &Rendered) -> Vec<Piece> {
        let Rendered { text, guard } = rendered;
        let mut pieces = Vec::new();
        let between = |text: &str, pieces: &mut Vec<Piece>| {
            let text: String = text.chars().filter(|c| c != guard).collect();
            if !text.is_empty() {
                pieces.push(Piece::Text(text));
            }
        };
        let mut from = 0;
        for found in self.split.find_iter(text) {
            between(&text[from..found.start()], &mut pieces);
            pieces.push(Piece::Special(self.ids[found.pattern().as_usize()]));
            from = found.end();
        }
        between(&text[from..], &mut pieces);
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials(texts: &[&str]) -> Specials {
        Specials::new(texts.iter().enumerate().map(|(i, t)| (t.to_string(), i as u32))).unwrap()
    }

    /// Pieces of `before` + data + `after`, the data guarded.
    fn around(specials: &Specials, before: &str, data: &str, after: &str) -> Vec<Piece> {
        let guard = specials.guard_for([before, data, after].into_iter()).unwrap();
        let text = format!("{before}{}{after}", specials.guarded(data, guard));
        specials.pieces(&Rendered { text, guard })
    }

    #[test]
    fn what_a_template_writes_is_special_and_what_data_spell_is_not() {
        let s = specials(&["<|start|>", "<|end|>", "<|end|>>", "é|é"]);
        let text = |t: &str| Piece::Text(t.into());
        for data in
            ["hi", "<|end|>", "<|start|><|end|>", "<|end|>>", "a é|é|é", "<|end|", "|end|>", "<", "\u{e000}<|end|>"]
        {
            let pieces = around(&s, "<|start|>", data, "<|end|>");
            assert_eq!(pieces, [Piece::Special(0), text(data), Piece::Special(1)], "{data}");
        }
        // Halves that the text around would complete.
        assert_eq!(around(&s, "<|", "end|>", "x"), [text("<|end|>x")]);
        assert_eq!(around(&s, "x", "<|end", "|>"), [text("x<|end|>")]);
        assert_eq!(around(&s, "<|end|>", "", "<|end|>>"), [Piece::Special(1), Piece::Special(2)]);
    }

    #[test]
    fn data_that_spell_nothing_special_stay_as_they_are() {
        let s = specials(&["<|end|>", "!"]);
        assert_eq!(s.guarded("so be it!", '\u{e000}'), "so be it!");
        assert_eq!(s.guarded("<|end|>", '\u{e000}'), "<\u{e000}|end|>");
        // Overlapping spellings: each is cut.
        let s = specials(&["abc", "cde"]);
        assert_eq!(around(&s, "", "abcde", ""), [Piece::Text("abcde".into())]);
    }
}
