//! The engine on a GPU: who enters the cache there, prompts in chunks, one token for everyone who decodes. In: requests; out: events
//! of each step.
//!
//! A request enters when a slot and pages for all its tokens are free: nobody is moved out. Every step decodes one token for those
//! that decode, then a chunk of the prompt that has waited longest. Prefixes are not shared.
//! NOT here: the model and the cache on the card (cuda/, kvant-kv), what a request does with a token (sequence.rs).

use super::{DecodeTime, Engine, EngineOptions};
use crate::Error;
use crate::cuda::{BUCKETS, CHUNK, Decoder, DecoderOptions, Weights, bucket};
use crate::loaded::LoadedModel;
use crate::request::Event;
use crate::sequence::Place;
use kvant_kv::cuda::{GpuCache, GpuOptions, OutFormat};
use kvant_kv::{Arm, CacheBytes, LayerConfig};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Requests at once when the limits name no number.
const SLOTS: usize = 64;
/// Of a cache's bytes, what windows of all places may take together: the others are for pages. In a cache of `k4v4g64w128` a
/// window is as large as the packed groups of some 700 tokens, so a fourth is theirs where requests have 2,000 to 3,000.
const WINDOWS: usize = 4;
/// Of the card's free memory that a decoder has no use for, what a cache takes when the limits name no number: room is left for
/// prompts' scratch.
const SHARE: f64 = 0.85;

/// What an engine has on a card.
pub(super) struct Card {
    decoder: Decoder<GpuCache>,
    routes: BTreeMap<String, u64>,
    layers: u64,
    arm: Arm,
}

impl Card {
    fn cache(&self) -> &GpuCache {
        self.decoder.cache()
    }

    /// Attention calls so far, by name.
    pub(super) fn routes(&self) -> &BTreeMap<String, u64> {
        &self.routes
    }

    pub(super) fn forget_routes(&mut self) {
        self.routes.clear();
    }

    pub(super) fn bytes(&self) -> CacheBytes {
        self.cache().bytes()
    }

    /// Frees a slot.
    pub(super) fn free(&mut self, slot: usize) -> Result<(), Error> {
        Ok(self.decoder.cache_mut().remove(slot)?)
    }

    /// Whether a request of so many tokens can ever enter.
    ///
    /// # Errors
    /// [`Error::NeverFits`].
    pub(super) fn check_fits(&self, request: usize, tokens: usize) -> Result<(), Error> {
        let (pages, all) = (GpuCache::pages_of(tokens), self.cache().pages());
        if pages <= all {
            return Ok(());
        }
        // Both with the one window that a request has.
        let bytes = |pages: usize| pages * self.cache().page_bytes() + self.cache().window_bytes();
        Err(Error::NeverFits { request, tokens, need: bytes(pages), budget: bytes(all) })
    }

    /// Bytes of a sequence's window.
    pub(super) fn window_bytes(&self) -> usize {
        self.cache().window_bytes()
    }

    /// Bytes of a sequence: its pages, and its window.
    pub(super) fn sequence_bytes(&self, slot: usize) -> usize {
        self.cache().sequence_bytes(slot).unwrap_or(0)
    }

    /// Pages that nobody has, and all.
    pub(super) fn pages(&self) -> (usize, usize) {
        (self.cache().free_pages(), self.cache().pages())
    }

    fn count(&mut self, what: &str) {
        *self.routes.entry(format!("cuda {} {what}", self.arm)).or_insert(0) += self.layers;
    }
}

impl Engine {
    /// An engine whose weights and cache are on a card. `options.limits`: `kv_memory` are bytes there (None: most of what is free),
    /// `max_running` slots (64 when it names no number), or as many as have their windows in a fourth of these bytes: the others wait
    /// ([`Engine::most_running`] says how many that are).
    ///
    /// # Errors
    /// [`Error::CpuOnly`] for what only the CPU computes; as [`Engine::new`]; [`Error::Kv`] for a GPU that refuses.
    pub fn on_card(loaded: Arc<LoadedModel>, weights: Weights, options: EngineOptions) -> Result<Self, Error> {
        let limits = options.limits.clone();
        let config = loaded.config().clone();
        if options.kernel.is_some() {
            return Err(Error::CpuOnly { what: "a choice of kernel".into() });
        }
        if limits.swap.is_some() {
            return Err(Error::CpuOnly { what: "a folder for requests that are moved out".into() });
        }
        let arm = options.arm;
        // The CPU's side stays empty; it checks schemes and knows their bases.
        let mut engine = Self::new(loaded, EngineOptions { threads: 1, ..options })?;
        engine.page_len = None;
        engine.limits.share_prefixes = false;
        let gpu = weights.gpu().clone();
        let layers: Vec<LayerConfig> = engine.layers.clone();
        let most = if limits.max_running == usize::MAX { SLOTS } else { limits.max_running };
        // A step's rows are padded to the next size that steps are prepared for.
        let why = || format!("the GPU decodes up to {CHUNK} requests at once, not {most}");
        let slots = bucket(most).ok_or_else(|| Error::Limit { option: "max_running", why: why() })?;
        if let Some(rows) = limits.step_tokens.filter(|&rows| rows > CHUNK) {
            let why = format!("the GPU computes up to {CHUNK} rows at once, not {rows}");
            return Err(Error::Limit { option: "step_tokens", why });
        }
        let free = gpu.memory()?.0;
        let bytes = |slots: usize| {
            let free = free.saturating_sub(Decoder::<GpuCache>::bytes_beside(&config, slots));
            limits.kv_memory.unwrap_or((free as f64 * SHARE) as usize)
        };
        let slots = slots_within(&layers, arm, slots, bytes(slots) / WINDOWS)?;
        // Fewer slots need less beside the cache.
        let bytes = bytes(slots);
        engine.limits.max_running = most.min(slots);
        let decoder_options = DecoderOptions { most_batch: slots, invariant: false };
        let cache_options = GpuOptions {
            slots,
            max_tokens: config.context,
            bytes,
            out: OutFormat::Bf16,
            softcap: None,
            invariant: false,
        };
        let cache = GpuCache::new(&gpu, &layers, arm, cache_options)?;
        engine.limits.kv_memory = Some(cache.capacity_bytes());
        let decoder = Decoder::new(weights, cache, &engine.bases, decoder_options)?;
        engine.card = Some(Card { decoder, routes: BTreeMap::new(), layers: layers.len() as u64, arm });
        Ok(engine)
    }

    /// Whether it can decode at all after an error of [`Engine::step`]: not on a card that takes no more work, as after an illegal
    /// address or when it fell off its bus; it never does again in this process.
    pub fn answers(&self) -> bool {
        self.card.as_ref().is_none_or(|card| card.cache().gpu().synchronize().is_ok())
    }

    /// One step on the card. After an error the cache is not to be used further; the caller clears it.
    pub(super) fn step_on_card(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let started = Instant::now();
        self.enter_card(events)?;
        let waits = |s: &&crate::sequence::Sequence| {
            s.slot().is_some() && s.stored + 1 < s.tokens.len().max(s.prompt_len() + 1)
        };
        let prompts = self.sequences.iter().any(|s| waits(&s));
        let decoded = if prompts && self.limits.prompts_first { 0 } else { self.decode_on_card(events)? };
        let next = self.sequences.iter().enumerate().filter(|(_, s)| waits(s)).min_by_key(|(_, s)| s.served);
        let prefilled = next.map(|(i, _)| i);
        if let Some(i) = prefilled {
            self.prefill_on_card(i, events)?;
        }
        self.totals.steps += u64::from(decoded > 0 || prefilled.is_some());
        if decoded > 0 && prefilled.is_none() {
            let DecodeTime { tokens, steps, time } = &mut self.decode;
            *tokens += decoded;
            *steps += 1;
            *time += started.elapsed();
        }
        self.set_finished_aside()
    }

    /// Requests enter in order while there are slots and pages.
    fn enter_card(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let context = self.loaded.config().context;
        let Some(card) = &mut self.card else { return Ok(()) };
        let mut failed = Vec::new();
        let running = self.sequences.iter().filter(|s| s.slot().is_some()).count();
        let mut left = self.limits.max_running.saturating_sub(running);
        for (i, s) in self.sequences.iter_mut().enumerate().filter(|(_, s)| matches!(s.place, Place::Waiting)) {
            if left == 0 {
                break;
            }
            let tokens = s.most_tokens(context);
            if let Err(e) = card.check_fits(s.request, tokens) {
                failed.push((i, e));
                continue;
            }
            match card.decoder.cache_mut().add(tokens) {
                Ok(slot) => {
                    (s.place, s.stored, s.served) = (Place::Slot(slot), 0, self.totals.steps);
                    left -= 1;
                    if s.enters() {
                        self.totals.prompt_tokens += s.prompt_len() as u64;
                    }
                }
                // Later ones wait too: nobody is overtaken.
                Err(kvant_kv::Error::OutOfBlocks { .. }) => break,
                Err(e) => return Err(e.into()),
            }
        }
        self.fail(failed, events)
    }

    /// One token for everyone who decodes; how many that are.
    fn decode_on_card(&mut self, events: &mut Vec<Event>) -> Result<usize, Error> {
        let decodes = |s: &crate::sequence::Sequence| s.stored >= s.prompt_len() && s.stored + 1 == s.tokens.len();
        let rows: Vec<(usize, usize, u32)> = self
            .sequences
            .iter()
            .enumerate()
            .filter(|(_, s)| decodes(s))
            .filter_map(|(i, s)| Some((i, s.slot()?, *s.tokens.last()?)))
            .collect();
        let Some(card) = self.card.as_mut().filter(|_| !rows.is_empty()) else { return Ok(0) };
        let batch: Vec<(usize, u32)> = rows.iter().map(|&(_, slot, token)| (slot, token)).collect();
        let outcomes = card.decoder.decode(&batch)?;
        card.count("decode");
        let mut failed = Vec::new();
        for (row, (&(i, ..), outcome)) in rows.iter().zip(outcomes).enumerate() {
            self.sequences[i].stored += 1;
            match outcome.and_then(|token| self.take_token(i, row, token, events)) {
                Ok(()) => {}
                // The card itself failed, which is nobody's fault.
                Err(e @ Error::Kv(kvant_kv::Error::Gpu { .. })) => return Err(e),
                Err(e) => failed.push((i, e)),
            }
        }
        self.fail(failed, events)?;
        Ok(rows.len())
    }

    /// A chunk of a prompt.
    fn prefill_on_card(&mut self, i: usize, events: &mut Vec<Event>) -> Result<(), Error> {
        let (step, step_tokens) = (self.totals.steps + 1, self.step_tokens());
        let s = &mut self.sequences[i];
        let (Some(card), Some(slot)) = (self.card.as_mut(), s.slot()) else { return Ok(()) };
        let end = s.tokens.len().min(s.stored + step_tokens);
        let outcome = card.decoder.prefill(slot, &s.tokens[s.stored..end]);
        card.count("prefill");
        s.served = step;
        let token = match outcome {
            Ok(token) => token,
            // Its own numbers, or no room for its rows: others go on.
            Err(
                e @ (Error::NanLogit { .. }
                | Error::Kv(kvant_kv::Error::NotFinite { .. } | kvant_kv::Error::GpuOutOfMemory { .. })),
            ) => {
                return self.fail(vec![(i, e)], events);
            }
            Err(e) => return Err(e),
        };
        s.stored = end;
        let (request, of) = (s.request, s.prompt_len());
        events.push(Event::Prefilled { request, tokens: end.min(of), of, cached: 0 });
        if end == s.tokens.len()
            && let Err(e) = self.take_token(i, 0, token, events)
        {
            return match e {
                Error::Kv(kvant_kv::Error::Gpu { .. }) => Err(e),
                e => self.fail(vec![(i, e)], events),
            };
        }
        Ok(())
    }

    /// Gives a request its next token: the likeliest, as the card chose it, or what its sampler draws from the row's logits.
    fn take_token(&mut self, i: usize, row: usize, token: u32, events: &mut Vec<Event>) -> Result<(), Error> {
        let context = self.loaded.config().context;
        let tokenizer = self.loaded.tokenizer().ok();
        let s = &mut self.sequences[i];
        let before = events.len();
        if s.takes_likeliest() {
            s.accept(token, None, tokenizer, context, events)?;
        } else {
            let Some(card) = &self.card else { return Ok(()) };
            let logits = card.decoder.logits(row)?;
            s.advance(&logits, tokenizer, context, events)?;
        }
        let chosen = events[before..].iter().filter(|e| matches!(e, Event::Token { .. }));
        self.totals.output_tokens += chosen.count() as u64;
        Ok(())
    }
}

/// Requests of so many tokens that an engine with `bytes` for the cache of these layers decodes at once on a card, given the best number of places.
///
/// # Errors
/// As [`GpuCache::bytes_of`].
pub fn requests_on_card(layers: &[LayerConfig], arm: Arm, bytes: usize, tokens: usize) -> Result<usize, Error> {
    let windows = GpuCache::bytes_of(layers, arm, 1, 0)?;
    let pages = (GpuCache::bytes_of(layers, arm, 1, tokens)? - windows).max(1);
    let most = slots_within(layers, arm, CHUNK, bytes / WINDOWS)?;
    let fit = |slots: usize| (bytes.saturating_sub(slots.saturating_mul(windows)) / pages).min(slots);
    Ok(BUCKETS.into_iter().take_while(|&slots| slots <= most).map(fit).max().unwrap_or(0))
}

/// The most slots, of the sizes that steps are prepared for and up to `most`, whose windows take no more than `bytes`; at least one.
fn slots_within(layers: &[LayerConfig], arm: Arm, most: usize, bytes: usize) -> Result<usize, Error> {
    let one = GpuCache::bytes_of(layers, arm, 1, 0)?;
    let fits = |size: &usize| *size <= most && size.saturating_mul(one) <= bytes;
    Ok(BUCKETS.into_iter().take_while(fits).last().unwrap_or(BUCKETS[0]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvant_kv::LayerShape;

    #[test]
    fn windows_take_a_fourth_at_most_and_a_plain_cache_has_none() {
        let shape = LayerShape { q_heads: 32, kv_heads: 8, head_dim: 128 };
        let layers = |scheme: &str| vec![LayerConfig { shape, scheme: scheme.parse().unwrap(), visible: None }; 36];
        let bytes = 40_000_000_000;
        let packed = layers("k4v4g64w128");
        let slots = slots_within(&packed, Arm::Fused, 1024, bytes / WINDOWS).unwrap();
        assert_eq!(slots, 256);
        // More requests of 4,000 tokens than with the windows of 1,024, and than a plain cache has room for.
        assert_eq!(requests_on_card(&packed, Arm::Fused, bytes, 4000).unwrap(), 192, "of 256 places or of 192");
        assert_eq!(requests_on_card(&layers("f16"), Arm::F16, bytes, 4000).unwrap(), 66);
        let fit = |layers: &[LayerConfig], arm, slots| {
            let left = bytes - GpuCache::bytes_of(layers, arm, slots, 0).unwrap();
            let pages =
                GpuCache::bytes_of(layers, arm, 1, 4000).unwrap() - GpuCache::bytes_of(layers, arm, 1, 0).unwrap();
            (left / pages).min(slots)
        };
        let plain = layers("f16");
        assert_eq!(slots_within(&plain, Arm::F16, 1024, bytes / WINDOWS).unwrap(), 1024);
        let (few, many, control) =
            (fit(&packed, Arm::Fused, 1024), fit(&packed, Arm::Fused, slots), fit(&plain, Arm::F16, 1024));
        println!("requests of 4,000 tokens in 40 GB: {many}; {few} with 1,024 windows, {control} plain");
        assert!(few < control && many > 2 * control, "{few} {many} {control}");
        // One is always there.
        assert_eq!(slots_within(&packed, Arm::Fused, 1024, 0).unwrap(), 1);
    }
}
