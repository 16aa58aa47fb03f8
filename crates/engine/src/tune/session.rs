//! Measuring what a form costs in a layer. In: a model and a calibration text; out: KL divergences, loud channels.
//! NOT here: what forms there are (forms.rs), what is made of the costs (allocate.rs).

use super::{Form, Template};
use crate::eval::{Base, Scored};
use crate::limits::STEP_TOKENS;
use crate::model::{Basis, Step};
use crate::schemes::Schemes;
use crate::{Error, LoadedModel, Pool};
use kvant_kv::{Arm, Attention, Cache, LayerShape, Rows, Scheme};
use std::ops::Range;
use std::sync::Arc;

/// The calibration text, followed once with an f16 cache.
pub struct Session {
    model: Arc<LoadedModel>,
    pool: Pool,
    attention: Attention,
    tokens: Vec<u32>,
    /// Positions whose predictions are compared.
    scored: Range<usize>,
    /// What enters each layer: f32 `[layers][tokens][hidden]`.
    entering: Vec<Vec<f32>>,
    base: Base,
    /// Per layer and kv head all key channels, the loudest first.
    ranked: Vec<Vec<Vec<u16>>>,
}

impl Session {
    /// Follows `tokens` (4 or more; their second half is compared) with an f16 cache.
    ///
    /// # Errors
    /// Those of the model and the cache.
    pub fn new(model: Arc<LoadedModel>, tokens: Vec<u32>, threads: usize) -> Result<Self, Error> {
        crate::engine::check_tokens(0, &tokens, model.config())?;
        let pool = Pool::new(threads)?;
        let attention = Attention::new(threads, None)?;
        let config = model.config();
        let (layers, vocabulary) = (config.layers, config.vocabulary);
        let scored = Scored::SecondHalf.positions(tokens.len());
        let mut session = Self {
            model,
            pool,
            attention,
            tokens,
            scored,
            entering: vec![Vec::new(); layers],
            base: Base::new(vocabulary),
            ranked: Vec::new(),
        };
        let bases = vec![Basis::default(); layers];
        let mut loudness = vec![Loudness::new(&session.model.config().shape); layers];
        session.run(0, None, &vec![Scheme::F16; layers], &bases, Some(&mut loudness))?;
        session.ranked = loudness.iter().map(Loudness::ranked).collect();
        Ok(session)
    }

    /// Per layer and kv head all key channels, the loudest first.
    pub fn ranked(&self) -> &[Vec<Vec<u16>>] {
        &self.ranked
    }

    /// Mean KL divergence from f16 when this layer alone stores this form.
    ///
    /// # Errors
    /// Those of the model and the cache.
    pub fn measure(&mut self, layer: usize, form: Form, template: &Template) -> Result<f64, Error> {
        let layers = self.entering.len();
        let (scheme, basis) = template.alone(form, &self.ranked[layer]).map_err(kvant_kv::Error::from)?;
        let mut parts = vec![(Scheme::F16, Basis::default()); layers];
        parts[layer] = (scheme, basis);
        let schemes = Schemes::of_parts(parts);
        let shape = self.model.config().shape;
        schemes.check(&shape)?;
        let mut divergences = Vec::new();
        let bases = schemes.complete_bases(&shape);
        self.run(layer, Some(&mut divergences), schemes.layers(), &bases, None)?;
        Ok(divergences.iter().sum::<f64>() / divergences.len() as f64)
    }

    /// Runs the layers from `first` on over the whole text. Without `divergences` it is the base that runs, and is kept.
    fn run(
        &mut self,
        first: usize,
        mut divergences: Option<&mut Vec<f64>>,
        schemes: &[Scheme],
        bases: &[Basis],
        mut loudness: Option<&mut Vec<Loudness>>,
    ) -> Result<(), Error> {
        let Self { model, pool, attention, tokens, scored, entering, base, .. } = self;
        let model = model.model()?;
        let (layers, hidden, shape) = (schemes.len(), model.config().hidden, model.config().shape);
        let configs: Vec<_> = schemes.iter().enumerate().map(|(i, &scheme)| model.config().layer(i, scheme)).collect();
        let mut cache = Cache::new(&configs, Arm::Fused)?;
        let seq = cache.add_sequence();
        let mut logits = Vec::new();
        // The last token predicts nothing that is in the text.
        for start in (0..scored.end).step_by(STEP_TOKENS) {
            let end = (start + STEP_TOKENS).min(scored.end);
            let positions: Vec<usize> = (start..end).collect();
            let wanted: Vec<usize> = (0..end - start).filter(|row| scored.contains(&(start + row))).collect();
            let batch = [Rows { seq, rows: end - start }];
            let step =
                Step { batch: &batch, tokens: &tokens[start..end], positions: &positions, wanted: &wanted, bases };
            let scores = pool.run(|| -> Result<Vec<f64>, Error> {
                let mut stream = match divergences {
                    Some(_) => entering[first][start * hidden..end * hidden].to_vec(),
                    None => model.embed(step.tokens)?,
                };
                for layer in first..layers {
                    if divergences.is_none() {
                        entering[layer].extend_from_slice(&stream);
                    }
                    if let Some(loudness) = &mut loudness {
                        let (q, k) = model.queries_and_keys(layer, &stream, step.positions)?;
                        loudness[layer].see(&shape, &q, &k);
                    }
                    model.run_layers(layer..layer + 1, &step, &mut stream, &mut cache, attention, None)?;
                }
                if wanted.is_empty() {
                    return Ok(Vec::new());
                }
                model.head(&stream, &mut logits)?;
                let position = start + wanted[0];
                let rows = match divergences {
                    Some(_) => base.compare(position - scored.start, position, &logits, tokens),
                    None => base.keep(position, &logits, tokens),
                };
                Ok(rows.iter().map(|row| row.kld).collect())
            })?;
            if let Some(divergences) = &mut divergences {
                divergences.extend(scores);
            }
        }
        Ok(())
    }
}

/// How loud the key channels of a layer are.
#[derive(Debug, Clone)]
struct Loudness {
    /// Per kv head and channel: sum of squared queries, smallest and largest key.
    heads: Vec<Vec<(f64, f32, f32)>>,
}

impl Loudness {
    fn new(shape: &LayerShape) -> Self {
        Self { heads: vec![vec![(0.0, f32::INFINITY, f32::NEG_INFINITY); shape.head_dim]; shape.kv_heads] }
    }

    /// Sees rows: queries `[rows][q_heads][head_dim]`, keys `[rows][kv_heads][head_dim]`.
    fn see(&mut self, shape: &LayerShape, q: &[f32], k: &[f32]) {
        let (d, ratio) = (shape.head_dim, shape.q_heads / shape.kv_heads);
        for row in q.chunks_exact(shape.q_heads * d) {
            for (at, x) in row.iter().enumerate() {
                self.heads[at / d / ratio][at % d].0 += f64::from(x * x);
            }
        }
        for row in k.chunks_exact(shape.row_len()) {
            for (at, &x) in row.iter().enumerate() {
                let (_, low, high) = &mut self.heads[at / d][at % d];
                (*low, *high) = (low.min(x), high.max(x));
            }
        }
    }

    /// Channels of each head by `rms(q) * range(k)`, the loudest first.
    fn ranked(&self) -> Vec<Vec<u16>> {
        let ranked = |head: &Vec<(f64, f32, f32)>| {
            let loud = |c: u16| {
                let (squares, low, high) = head[usize::from(c)];
                squares.sqrt() * f64::from(high - low)
            };
            let mut channels: Vec<u16> = (0..head.len() as u16).collect();
            channels.sort_by(|&a, &b| loud(b).total_cmp(&loud(a)).then(a.cmp(&b)));
            channels
        };
        self.heads.iter().map(ranked).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_is_loud_by_its_queries_and_the_range_of_its_keys() {
        let shape = LayerShape::new(2, 1, 64).unwrap();
        let mut loudness = Loudness::new(&shape);
        // Channel 5: loud queries; 9: a wide range; 11: a large but constant key.
        let q = |c: usize| if c == 5 { 10.0 } else { 1.0 };
        for token in [-1.0f32, 1.0] {
            let queries: Vec<f32> = (0..128).map(|i| q(i % 64)).collect();
            let keys: Vec<f32> = (0..64)
                .map(|c| match c {
                    9 => 20.0 * token,
                    11 => 100.0,
                    _ => token,
                })
                .collect();
            loudness.see(&shape, &queries, &keys);
        }
        let ranked = &loudness.ranked()[0];
        assert_eq!((ranked[0], ranked[1], ranked[63]), (9, 5, 11));
    }
}
