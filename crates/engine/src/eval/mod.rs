//! Accuracy of caches: what a model says when it follows a real text over one cache and over another. In: a model, tokens
//! and contestants (a scheme, or another program's codec imitated); out: per contestant perplexity, KL divergence from the
//! f16 cache, share of equal first choices, and bits.
//!
//! The text is cut into chunks of `ctx` tokens, without a start token; each is followed from an empty cache through the
//! engine's own prefill, where position decides which keys are packed, as it does in decoding. Scored are the positions
//! `ctx/2 ..= ctx-2` of each chunk, each by the token behind it (what llama-perplexity does), or all of them.
//! Chunks are the outer loop and contestants the inner one: the base's logits of one chunk serve all.
//! Rooms: score.rs (a row of logits against the base's, figures over rows), bits.rs (what a cache takes), imitation.rs (other
//! programs' codecs), gate.rs (bounds), retrieval.rs (a hidden fact).
//! NOT here: how texts are read and results are shown (the program), how tokens are packed (kvant-kv).

mod bits;
mod gate;
mod imitation;
mod retrieval;
mod score;

pub use bits::{LENGTHS, WholeBits};
pub use gate::{Exceeded, Gate};
pub use imitation::{HeadRotation, Imitation, LlamaBlocks, RIVALS};
pub use retrieval::{Cell, CellScore, Question, Retrieval, retrieve};
pub(crate) use score::Base;
pub use score::{Bucket, Figures};

use crate::engine::{Engine, EngineOptions};
use crate::forced::{Feed, Forced};
use crate::loaded::LoadedModel;
use crate::schemes::Schemes;
use crate::{Error, Limits, Pool};
use kvant_kv::{Arm, RowCodec, Scheme};
use score::RowScore;
use std::ops::Range;
use std::sync::Arc;

/// One cache to be judged.
#[derive(Clone)]
pub struct Contestant {
    /// What it is called.
    pub name: String,
    /// How each layer stores tokens; f16 where every row passes a codec.
    pub schemes: Schemes,
    /// How attention reads the packed part.
    pub arm: Arm,
    /// What stands in for packed groups; the arm is dequant-once then.
    pub groups: Option<Arc<dyn RowCodec>>,
    /// What every row passes before it is stored.
    pub every_row: Option<Arc<dyn RowCodec>>,
    /// What its cache takes.
    pub bits: WholeBits,
}

impl Contestant {
    /// A scheme of kvant, decoded as the product does.
    pub fn scheme(schemes: Schemes, head_dim: usize) -> Self {
        let plain = |scheme: Scheme| schemes.layers().iter().all(|s| *s == scheme);
        let arm = [Scheme::F16, Scheme::Bf16].into_iter().find(|s| plain(*s)).map_or(Arm::Fused, Arm::of);
        let bits = WholeBits::of_schemes(&schemes, head_dim);
        Self { name: schemes.to_string(), schemes, arm, groups: None, every_row: None, bits }
    }

    /// Another program's codec.
    pub fn imitation(imitation: &Imitation, layers: usize) -> Self {
        let codec = imitation.codec.clone();
        let (schemes, arm, groups, every_row) = match imitation.kept {
            Some(kept) => (Scheme::Packed(kept), Arm::DequantOnce, Some(codec), None),
            None => (Scheme::F16, Arm::F16, None, Some(codec)),
        };
        Self {
            name: imitation.name.clone(),
            schemes: Schemes::uniform(schemes, layers),
            arm,
            groups,
            every_row,
            bits: WholeBits::of_imitation(imitation),
        }
    }

    /// An engine whose cache is this one.
    ///
    /// # Errors
    /// Those of [`Engine::new`].
    pub fn engine(&self, model: &Arc<LoadedModel>, settings: &Settings) -> Result<Engine, Error> {
        let options = EngineOptions {
            threads: settings.threads,
            kernel: settings.kernel.clone(),
            arm: self.arm,
            schemes: self.schemes.clone(),
            limits: Limits::default(),
        };
        let mut engine = Engine::new(model.clone(), options)?;
        if let Some(codec) = &self.groups {
            engine.imitate(codec.clone())?;
        }
        if let Some(codec) = &self.every_row {
            engine.pass_every_row(codec.clone());
        }
        Ok(engine)
    }
}

/// Which positions of a chunk are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scored {
    /// From the middle on, as llama-perplexity does.
    #[default]
    SecondHalf,
    /// Every position that has a token behind it.
    All,
}

impl Scored {
    /// The positions of a chunk of `ctx` tokens (2 or more).
    pub fn positions(self, ctx: usize) -> Range<usize> {
        match self {
            Scored::SecondHalf => ctx / 2..ctx - 1,
            Scored::All => 0..ctx - 1,
        }
    }
}

/// How an evaluation runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Tokens of a chunk: 4 or more, and no more than the model's context.
    pub ctx: usize,
    /// Positions scored.
    pub scored: Scored,
    /// Threads of products, attention and scores.
    pub threads: usize,
    /// Attention kernel by name; None for the best this processor runs.
    pub kernel: Option<String>,
}

impl Settings {
    /// Bytes that logits take at the most: the base's of one chunk.
    pub fn logits_bytes(&self, vocabulary: usize) -> usize {
        self.scored.positions(self.ctx).len() * vocabulary * size_of::<f32>()
    }
}

/// What an evaluation found.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// The f16 cache's own figures; its divergences are 0.
    pub base: Figures,
    /// The contestants', in their order.
    pub rows: Vec<Figures>,
    /// Name of the attention kernel.
    pub kernel: String,
}

/// Follows `chunks` (each of `settings.ctx` tokens) under f16 and under every contestant. `progress(tokens, name)` is told
/// how many tokens have been followed so far, over all passes, and whose turn it is.
///
/// # Errors
/// Those of [`Engine::new`] and [`Engine::follow`].
pub fn evaluate(
    model: &Arc<LoadedModel>,
    chunks: &[&[u32]],
    contestants: &[Contestant],
    settings: &Settings,
    progress: &mut dyn FnMut(usize, &str),
) -> Result<Evaluation, Error> {
    let config = model.config();
    let pool = Pool::new(settings.threads)?;
    let f16 = Contestant::scheme(Schemes::uniform(Scheme::F16, config.layers), config.shape.head_dim);
    let positions = settings.scored.positions(settings.ctx);
    let mut base_rows: Vec<RowScore> = Vec::new();
    let mut rows: Vec<Vec<RowScore>> = vec![Vec::new(); contestants.len()];
    let mut kernel = String::new();
    let mut base = Base::new(config.vocabulary);
    let mut done = 0;
    for chunk in chunks {
        progress(done, &f16.name);
        base.clear();
        let mut engine = f16.engine(model, settings)?;
        kernel = engine.kernel().to_owned();
        base_rows.extend(follow(&mut engine, chunk, &positions, &mut |first, logits| {
            pool.run(|| base.keep(first, logits, chunk))
        })?);
        drop(engine);
        done += settings.ctx;
        for (contestant, rows) in contestants.iter().zip(&mut rows) {
            progress(done, &contestant.name);
            let mut engine = contestant.engine(model, settings)?;
            rows.extend(follow(&mut engine, chunk, &positions, &mut |first, logits| {
                pool.run(|| base.compare(first - positions.start, first, logits, chunk))
            })?);
            done += settings.ctx;
        }
    }
    progress(done, "");
    Ok(Evaluation {
        base: Figures::of(&base_rows, &base_rows),
        rows: rows.iter().map(|rows| Figures::of(rows, &base_rows)).collect(),
        kernel,
    })
}

/// Scores of a chunk's positions, block by block of the engine's steps.
fn follow(
    engine: &mut Engine,
    chunk: &[u32],
    positions: &Range<usize>,
    score: &mut dyn FnMut(usize, &[f32]) -> Vec<RowScore>,
) -> Result<Vec<RowScore>, Error> {
    let mut scores = Vec::with_capacity(positions.len());
    // The chunk's last token predicts nothing that is in the chunk. `prompt` counts the tokens up to the first that predicts.
    let text = Forced { tokens: &chunk[..positions.end], prompt: positions.start + 1 };
    engine.follow_blocks(&[text], Feed::Prefill, &mut |_, first, logits| {
        scores.extend(score(first, logits));
        Ok(())
    })?;
    engine.clear()?;
    Ok(scores)
}
