//! Logits of given texts: nothing is chosen, each token is followed by the next one of the text.
//! In: token sequences; out: logits of each position. For agreement of arms, accuracy and perplexity.
//! NOT here: what is computed from the logits.

use crate::Error;
use crate::engine::{Engine, check_tokens};
use crate::limits::STEP_TOKENS;
use half::{bf16, f16};
use kvant_kv::{LayerShape, RowCodec, RowFormat, Rows, SeqId};
use std::sync::Arc;

/// A text to be followed.
#[derive(Debug, Clone, Copy)]
pub struct Forced<'a> {
    /// All its tokens (1 or more).
    pub tokens: &'a [u32],
    /// Tokens that are prefilled without logits, except those of the last one. 0: logits of every position.
    pub prompt: usize,
}

/// How tokens behind the prompt reach the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feed {
    /// One per step, all texts together, as in decoding.
    Decode,
    /// In chunks, one text after another, as in prefill.
    Prefill,
}

/// Keys and values as one pass stored them, rounded as its cache does first (to f16, of bf16 layers to bf16), call by call.
/// Another pass over the same texts that stores these in place of its own differs in attention alone: without that, one key next to a rounding
/// boundary would change what all later layers and tokens store (docs/decisions/0006-agreement-over-one-cache.md).
#[derive(Debug, Default)]
pub struct Tape {
    /// Bits of K and V, and what they are.
    stored: Vec<(RowFormat, [Vec<u16>; 2])>,
    /// Next call to play; None while recording.
    next: Option<usize>,
}

impl Tape {
    /// Bytes of the tape for one token of a model.
    pub fn token_bytes(layers: usize, row_len: usize) -> usize {
        layers * 2 * row_len * size_of::<u16>()
    }

    /// From now on the tape plays, from its start.
    pub fn rewind(&mut self) {
        self.next = Some(0);
    }

    /// Notes the rows of one layer's call as a cache of that format rounds them, or replaces them.
    pub(crate) fn pass(&mut self, format: RowFormat, k: &mut [f32], v: &mut [f32]) {
        let round = |&x: &f32| match format {
            RowFormat::F16 => f16::from_f32(x).to_bits(),
            RowFormat::Bf16 => bf16::from_f32(x).to_bits(),
        };
        let widen = |format: RowFormat, bits: u16| match format {
            RowFormat::F16 => f16::from_bits(bits).to_f32(),
            RowFormat::Bf16 => bf16::from_bits(bits).to_f32(),
        };
        match &mut self.next {
            None => self.stored.push((format, [&*k, &*v].map(|x| x.iter().map(round).collect()))),
            Some(next) => {
                let (format, stored) = &self.stored[*next];
                for (rows, stored) in [k, v].into_iter().zip(stored) {
                    assert_eq!(rows.len(), stored.len(), "a tape plays to the texts that it recorded");
                    rows.iter_mut().zip(stored).for_each(|(x, &bits)| *x = widen(*format, bits));
                }
                *next += 1;
            }
        }
    }
}

/// Sees the keys and values of each layer's call before they are stored, and may put others in their place.
pub trait StoredRows: Send {
    /// Shapes: `k`, `v`: f32 `[rows][kv_heads][head_dim]` of a layer of `shape`; `format`: of its plain rows.
    fn pass(&mut self, format: RowFormat, shape: &LayerShape, k: &mut [f32], v: &mut [f32]);
}

impl StoredRows for Tape {
    fn pass(&mut self, format: RowFormat, _shape: &LayerShape, k: &mut [f32], v: &mut [f32]) {
        Tape::pass(self, format, k, v);
    }
}

/// Every row passes a codec before it is stored: a cache in that codec's format, without window or sinks.
pub struct EveryRow(pub Arc<dyn RowCodec>);

impl StoredRows for EveryRow {
    fn pass(&mut self, _format: RowFormat, shape: &LayerShape, k: &mut [f32], v: &mut [f32]) {
        let (d, row_len) = (shape.head_dim, shape.row_len());
        for head in 0..shape.kv_heads {
            let channels = head * d..(head + 1) * d;
            let of_head = |x: &[f32]| -> Vec<f32> {
                let rows = x.chunks_exact(row_len).flat_map(|row| &row[channels.clone()]);
                // As the cache would have stored them: with or without a window, a codec sees the same numbers.
                rows.map(|&x| f16::from_f32(x).to_f32()).collect()
            };
            let (mut k_rows, mut v_rows) = (of_head(k), of_head(v));
            self.0.round_trip(d, &mut k_rows, &mut v_rows);
            for (x, rows) in [(&mut *k, k_rows), (&mut *v, v_rows)] {
                for (row, from) in x.chunks_exact_mut(row_len).zip(rows.chunks_exact(d)) {
                    row[channels.clone()].copy_from_slice(from);
                }
            }
        }
    }
}

/// Takes the number of a text, the position of the first row, and f32 logits `[rows][vocabulary]` of that and the following
/// positions; an error of it ends the pass.
pub type OnBlock<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<(), Error> + 'a;

/// Takes the number of a text, a position in it, and f32 logits `[vocabulary]`; an error of it ends the pass.
pub type OnLogits<'a> = dyn FnMut(usize, usize, &[f32]) -> Result<(), Error> + 'a;

impl Engine {
    /// Calls `each(text, position, logits)` for positions `prompt - 1 ..` of every text (from 0 when `prompt` is 0).
    /// `logits` is f32 `[vocabulary]` and predicts the token at `position + 1`. What was being decoded is dropped.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::PromptTooLong`], [`Error::NoSuchToken`], those of the cache, and those of
    /// `each`.
    pub fn follow(&mut self, texts: &[Forced<'_>], feed: Feed, each: &mut OnLogits<'_>) -> Result<(), Error> {
        let vocabulary = self.model().config().vocabulary;
        self.follow_blocks(texts, feed, &mut |text, first, logits| {
            logits.chunks_exact(vocabulary).enumerate().try_for_each(|(row, logits)| each(text, first + row, logits))
        })
    }

    /// [`Engine::follow`] with the logits of all rows of a step at once, so that they can be worked on in parallel.
    ///
    /// # Errors
    /// Those of [`Engine::follow`].
    pub fn follow_blocks(&mut self, texts: &[Forced<'_>], feed: Feed, each: &mut OnBlock<'_>) -> Result<(), Error> {
        for (i, text) in texts.iter().enumerate() {
            check_tokens(i, text.tokens, self.model().config())?;
        }
        self.clear()?;
        let ids: Vec<SeqId> = texts.iter().map(|_| self.cache_mut().add_sequence()).collect();
        let result = self.follow_checked(texts, &ids, feed, each);
        if result.is_err() {
            self.clear()?;
        }
        result
    }

    /// [`Engine::follow`] with a tape of what is stored: recorded, or after [`Tape::rewind`] played. Texts and `feed` must
    /// be those of the recording.
    ///
    /// # Errors
    /// Those of [`Engine::follow`].
    pub fn follow_with(
        &mut self,
        tape: &mut Tape,
        texts: &[Forced<'_>],
        feed: Feed,
        each: &mut OnLogits<'_>,
    ) -> Result<(), Error> {
        self.tape = Some(std::mem::take(tape));
        let result = self.follow(texts, feed, each);
        *tape = self.tape.take().unwrap_or_default();
        result
    }

    fn follow_checked(
        &mut self,
        texts: &[Forced<'_>],
        ids: &[SeqId],
        feed: Feed,
        each: &mut OnBlock<'_>,
    ) -> Result<(), Error> {
        let vocabulary = self.model().config().vocabulary;
        let prompt = |text: &Forced<'_>| text.prompt.min(text.tokens.len());
        for (i, text) in texts.iter().enumerate() {
            let end = if feed == Feed::Prefill { text.tokens.len() } else { prompt(text) };
            let first_wanted = prompt(text).saturating_sub(1);
            let mut start = 0;
            while start < end {
                let rows = STEP_TOKENS.min(end - start);
                let positions: Vec<usize> = (start..start + rows).collect();
                let wanted: Vec<usize> = (0..rows).filter(|r| start + r >= first_wanted).collect();
                let batch = [Rows { seq: ids[i], rows }];
                let logits = self.forward(&batch, &text.tokens[start..start + rows], &positions, &wanted)?;
                if let Some(first) = wanted.first() {
                    each(i, start + first, logits)?;
                }
                start += rows;
            }
        }
        if feed == Feed::Prefill {
            return Ok(());
        }
        for step in 0.. {
            let running: Vec<usize> =
                (0..texts.len()).filter(|&i| prompt(&texts[i]) + step < texts[i].tokens.len()).collect();
            if running.is_empty() {
                break;
            }
            let batch: Vec<Rows> = running.iter().map(|&i| Rows { seq: ids[i], rows: 1 }).collect();
            let positions: Vec<usize> = running.iter().map(|&i| prompt(&texts[i]) + step).collect();
            let tokens: Vec<u32> = running.iter().zip(&positions).map(|(&i, &p)| texts[i].tokens[p]).collect();
            let wanted: Vec<usize> = (0..running.len()).collect();
            let logits = self.forward(&batch, &tokens, &positions, &wanted)?;
            for ((&i, &position), logits) in running.iter().zip(&positions).zip(logits.chunks_exact(vocabulary)) {
                each(i, position, logits)?;
            }
        }
        Ok(())
    }
}
