//! A fact hidden in a long text. In: a tokenizer, tokens of a filler text, lengths, depths and a seed; out: questions, and
//! for each contestant how it ranks the true answer among 20.
//!
//! A question is `length` tokens: filler, at `depth` percent of it a sentence such as "The access code of the harbour
//! warehouse is lemon.", filler, and at the end the question up to the word that answers it. Every choice is one token, so
//! one row of logits has the likelihood of each; the rank of the true one is 1 plus how many of the other 19 are likelier
//! or equal. Chance gives a mean rank of 10.5 and first places of 5 %: a small model can do this, and a cache that lost the
//! fact falls to chance.
//! NOT here: reading the text, showing results (the program).

use super::{Contestant, Settings};
use crate::forced::{Feed, Forced};
use crate::tokenizer::Tokenizer;
use crate::{Error, LoadedModel};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use std::sync::Arc;

/// Answers that are offered.
pub const CHOICES: usize = 20;

/// Words that may be answers: those that the tokenizer has as one token each are used.
const WORDS: [&str; 40] = [
    "apple", "river", "silver", "garden", "winter", "orange", "stone", "bridge", "music", "paper", "coffee", "forest",
    "summer", "window", "yellow", "castle", "butter", "market", "planet", "engine", "cotton", "island", "copper",
    "doctor", "rabbit", "salt", "thunder", "violet", "wheat", "glass", "horse", "lemon", "mirror", "ocean", "pepper",
    "queen", "rice", "sugar", "tiger", "valley",
];

/// What has an access code.
const PLACES: [&str; 8] = [
    "harbour warehouse",
    "old observatory",
    "north gate",
    "museum archive",
    "river station",
    "bank vault",
    "mountain hotel",
    "city library",
];

/// What is asked.
#[derive(Debug, Clone)]
pub struct Retrieval {
    /// Tokens of a question.
    pub lengths: Vec<usize>,
    /// Where the fact stands, in percent of the filler.
    pub depths: Vec<usize>,
    /// Questions of each length and depth.
    pub per_cell: usize,
    /// Seed of places, answers, choices and filler.
    pub seed: u64,
}

/// One question.
#[derive(Debug, Clone)]
pub struct Question {
    length: usize,
    depth: usize,
    tokens: Vec<u32>,
    /// The true answer is the first.
    choices: Vec<u32>,
}

/// One answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CellScore {
    length: usize,
    depth: usize,
    rank: usize,
}

/// Answers to the questions of one length and depth.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    /// Tokens.
    pub length: usize,
    /// Percent.
    pub depth: usize,
    /// How many.
    pub questions: usize,
    /// Share of them where the true answer is the likeliest.
    pub first: f64,
    /// Mean rank of the true answer, 1 to 20.
    pub mean_rank: f64,
}

impl Retrieval {
    /// The questions, the same for the same seed, tokenizer and filler.
    ///
    /// # Errors
    /// [`Error::Retrieval`] when the tokenizer has fewer than 20 of the words as single tokens, or a length leaves no room
    /// for fact and question.
    pub fn questions(&self, tokenizer: &Tokenizer, filler: &[u32]) -> Result<Vec<Question>, Error> {
        let mut words = Vec::new();
        for word in WORDS {
            if let [token] = tokenizer.encode_text(&format!(" {word}"))?[..] {
                words.push(token);
            }
        }
        if words.len() < CHOICES {
            let why =
                format!("{} of the answers are single tokens of this tokenizer, and {CHOICES} are needed", words.len());
            return Err(Error::Retrieval { why });
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let mut questions = Vec::new();
        for &length in &self.lengths {
            for &depth in &self.depths {
                for _ in 0..self.per_cell {
                    let place = PLACES[rng.random_range(0..PLACES.len())];
                    // A random order of the first 20 is enough: the first of them is the answer.
                    for i in 0..CHOICES {
                        let other = rng.random_range(i..words.len());
                        words.swap(i, other);
                    }
                    let choices = words[..CHOICES].to_vec();
                    let mut fact = tokenizer.encode_text(&format!(" The access code of the {place} is"))?;
                    fact.push(choices[0]);
                    fact.extend(tokenizer.encode_text(".")?);
                    let ask = format!(
                        "\n\nQuestion: What is the access code of the {place}?\nAnswer: The access code of the {place} is"
                    );
                    let ask = tokenizer.encode_text(&ask)?;
                    let room = length.checked_sub(fact.len() + ask.len() + 1).filter(|room| *room <= filler.len());
                    let Some(room) = room else {
                        let why = format!(
                            "a question of {length} tokens takes {} for fact and question, and the text has {} more",
                            fact.len() + ask.len(),
                            filler.len()
                        );
                        return Err(Error::Retrieval { why });
                    };
                    let start = rng.random_range(0..=filler.len() - room);
                    let (before, behind) = filler[start..start + room].split_at(room * depth / 100);
                    let tokens = [before, &fact, behind, &ask].concat();
                    questions.push(Question { length, depth, tokens, choices });
                }
            }
        }
        Ok(questions)
    }
}

/// Asks every contestant every question. `progress(tokens, name)` as in [`super::evaluate`].
///
/// # Errors
/// As [`super::evaluate`].
pub fn retrieve(
    model: &Arc<LoadedModel>,
    questions: &[Question],
    contestants: &[Contestant],
    settings: &Settings,
    progress: &mut dyn FnMut(usize, &str),
) -> Result<Vec<Vec<Cell>>, Error> {
    let mut done = 0;
    let mut all = Vec::new();
    for contestant in contestants {
        let mut engine = contestant.engine(model, settings)?;
        let mut scores = Vec::new();
        for question in questions {
            progress(done, &contestant.name);
            let text = Forced { tokens: &question.tokens, prompt: question.tokens.len() };
            engine.follow_blocks(&[text], Feed::Prefill, &mut |_, _, logits| {
                let of = |token: u32| logits[token as usize];
                let [answer, others @ ..] = &question.choices[..] else { unreachable!("twenty choices") };
                // A NaN is never below the answer, nor is anything below a NaN.
                let likelier =
                    others.iter().filter(|o| of(**o).is_nan() || of(*answer).is_nan() || of(**o) >= of(*answer));
                let (length, depth) = (question.length, question.depth);
                scores.push(CellScore { length, depth, rank: 1 + likelier.count() });
                Ok(())
            })?;
            done += question.tokens.len();
        }
        all.push(cells(&scores));
    }
    progress(done, "");
    Ok(all)
}

/// Answers by length and depth, in the order of the first of each.
fn cells(scores: &[CellScore]) -> Vec<Cell> {
    scores
        .chunk_by(|a, b| (a.length, a.depth) == (b.length, b.depth))
        .map(|scores| {
            let n = scores.len() as f64;
            Cell {
                length: scores[0].length,
                depth: scores[0].depth,
                questions: scores.len(),
                first: scores.iter().filter(|s| s.rank == 1).count() as f64 / n,
                mean_rank: scores.iter().map(|s| s.rank as f64).sum::<f64>() / n,
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_gathered_by_length_and_depth() {
        let score = |length, depth, rank| CellScore { length, depth, rank };
        let found = cells(&[score(64, 10, 1), score(64, 10, 4), score(64, 90, 1), score(128, 90, 20)]);
        assert_eq!(found.len(), 3);
        assert_eq!((found[0].questions, found[0].first, found[0].mean_rank), (2, 0.5, 2.5));
        assert_eq!((found[2].length, found[2].first, found[2].mean_rank), (128, 0.0, 20.0));
    }
}
