//! Decodes requests together. In: requests; out: events of each step, and outcomes.
//! Rooms: steps.rs (schedule, run the model, choose tokens), room.rs (memory).
//! NOT here: the rules of each part (scheduler.rs, model/, sampler.rs, kvant-kv).

mod card;
mod room;
mod steps;

use crate::forced::{EveryRow, StoredRows, Tape};
use crate::loaded::LoadedModel;
use crate::model::{Basis, Config, Step};
use crate::prefixes::Prefixes;
use crate::request::{Event, Outcome, Request};
use crate::schemes::Schemes;
use crate::sequence::{Place, Sequence};
use crate::status::{RequestStatus, Status, Totals};
use crate::{Error, Limits, Pool};
pub use card::requests_on_card;
use kvant_kv::{Arm, Attention, Cache, CacheBytes, LayerConfig, RowCodec, Rows, SeqId};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How an engine decodes.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Threads of products and attention.
    pub threads: usize,
    /// Attention kernel by name; None for the best this processor runs.
    pub kernel: Option<String>,
    /// How attention reads the packed part.
    pub arm: Arm,
    /// How each layer stores tokens. The arms `f16` and `bf16` store everything so, whatever this says.
    pub schemes: Schemes,
    /// What it may use.
    pub limits: Limits,
}

/// Decodes requests over one cache.
pub struct Engine {
    loaded: Arc<LoadedModel>,
    pool: Pool,
    layers: Vec<LayerConfig>,
    /// As the options had them; None where the arm stores no scheme.
    schemes: Option<Schemes>,
    bases: Vec<Basis>,
    arm: Arm,
    cache: Cache,
    attention: Attention,
    limits: Limits,
    /// Requests that have not ended, by arrival.
    sequences: Vec<Sequence>,
    /// Ended ones that nobody has taken yet.
    done: Vec<Sequence>,
    prefixes: Prefixes,
    /// Tokens of a page that requests share; None: they share nothing.
    page_len: Option<usize>,
    totals: Totals,
    /// Why the last request failed that did.
    failure: Option<Error>,
    next_request: usize,
    pub(crate) tape: Option<Tape>,
    imitation: Option<Arc<dyn RowCodec>>,
    every_row: Option<EveryRow>,
    logits: Vec<f32>,
    decode: DecodeTime,
    /// Weights and cache on a GPU; then the CPU's cache stays empty.
    card: Option<card::Card>,
    held_on_card: CacheBytes,
}

/// Time spent decoding: steps that give each running request one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeTime {
    /// Tokens stored and followed by a choice, over all requests.
    pub tokens: usize,
    /// Decode steps.
    pub steps: usize,
    /// Time of those steps.
    pub time: Duration,
}

impl DecodeTime {
    /// Tokens per second over all requests together; None when nothing was decoded.
    pub fn tok_s(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.time.as_secs_f64())
    }
}

/// What [`Engine::generate`] did.
#[derive(Debug, Clone)]
pub struct Generation {
    /// One per request, in the order given.
    pub outcomes: Vec<Outcome>,
    /// Time spent decoding.
    pub decode: DecodeTime,
    /// Attention calls by route.
    pub routes: BTreeMap<String, u64>,
    /// What the cache held when the last request ended, all requests still in it; on a card what each held when it ended, its
    /// window among it.
    pub cache: CacheBytes,
}

impl Engine {
    /// An engine with an empty cache.
    ///
    /// # Errors
    /// [`Error::Threads`], and [`Error::Kv`] for an unknown kernel or a layer that the cache cannot hold.
    pub fn new(loaded: Arc<LoadedModel>, options: EngineOptions) -> Result<Self, Error> {
        let pool = Pool::new(options.threads)?;
        let config = loaded.config();
        let schemes = options.schemes;
        if schemes.layers().len() != config.layers {
            let (expected, got) = (config.layers, schemes.layers().len());
            return Err(kvant_kv::Error::Shape { what: "schemes, one per layer", expected, got }.into());
        }
        // The arms of plain caches store no scheme, so there is nothing to turn for.
        let plain = matches!(options.arm, Arm::F16 | Arm::Bf16);
        let bases = if plain {
            vec![Basis::default(); config.layers]
        } else {
            schemes.check(&config.shape)?;
            schemes.complete_bases(&config.shape)
        };
        let layers: Vec<LayerConfig> =
            schemes.layers().iter().enumerate().map(|(i, &scheme)| config.layer(i, scheme)).collect();
        options.limits.check()?;
        let schemes = (!plain).then_some(schemes);
        let cache = empty_cache(&layers, options.arm, schemes.as_ref(), options.limits.kv_memory)?;
        let page_len = cache.share_len().filter(|_| options.limits.share_prefixes);
        let attention = Attention::new(options.threads, options.kernel.as_deref())?;
        Ok(Self {
            loaded,
            pool,
            layers,
            schemes,
            bases,
            arm: options.arm,
            cache,
            attention,
            limits: options.limits,
            sequences: Vec::new(),
            done: Vec::new(),
            prefixes: Prefixes::default(),
            page_len,
            totals: Totals::default(),
            failure: None,
            next_request: 0,
            tape: None,
            imitation: None,
            every_row: None,
            logits: Vec::new(),
            decode: DecodeTime::default(),
            card: None,
            held_on_card: CacheBytes::default(),
        })
    }

    /// The model.
    pub fn model(&self) -> &LoadedModel {
        &self.loaded
    }

    /// Name of the attention kernel in use.
    pub fn kernel(&self) -> &'static str {
        if self.card.is_some() {
            return "cuda-mma";
        }
        self.attention.kernel()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The arm in use.
    pub fn arm(&self) -> Arm {
        self.arm
    }

    /// Name of the kernel that multiplies with the weights.
    pub fn products(&self) -> &'static str {
        if self.card.is_some() { "bf16" } else { self.loaded.products() }
    }

    /// How the cache stores each layer, asked from the cache itself: f16 under the `f16` arm and bf16
    /// under the `bf16` arm, whatever the options said.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn schemes(&self) -> Result<Schemes, Error> {
        if let Some(schemes) = &self.schemes {
            return Ok(schemes.clone());
        }
        let of = |layer| self.cache.layer_config(layer).map(|c| c.scheme);
        Ok(Schemes::of_layers((0..self.cache.layers()).map(of).collect::<Result<_, _>>()?))
    }

    /// What the cache holds.
    pub fn cache_bytes(&self) -> CacheBytes {
        if let Some(card) = &self.card {
            return card.bytes();
        }
        self.cache.bytes()
    }

    /// Attention calls by route since the last reset.
    pub fn routes(&self) -> &BTreeMap<String, u64> {
        if let Some(card) = &self.card {
            return card.routes();
        }
        self.attention.routes()
    }

    /// Time spent decoding since the last reset.
    pub fn decode_time(&self) -> DecodeTime {
        self.decode
    }

    /// Forgets routes and decode time.
    pub fn reset_counters(&mut self) {
        self.attention.reset_routes();
        if let Some(card) = &mut self.card {
            card.forget_routes();
        }
        self.decode = DecodeTime::default();
        self.held_on_card = CacheBytes::default();
    }

    /// Decodes these requests together until all have ended. Every request is checked before any work is done.
    /// `on_event` may break: then nothing more is decoded, and the cache gives back what the requests held.
    ///
    /// # Errors
    /// [`Error::Stopped`] when `on_event` breaks.
    /// [`Error::EmptyPrompt`], [`Error::PromptTooLong`], [`Error::NoSuchToken`], [`Error::Sampling`] before any work;
    /// [`Error::NanLogit`] and [`Error::Kv`] from the model's numbers, after which the cache is empty again.
    pub fn generate(
        &mut self,
        requests: Vec<Request>,
        on_event: &mut dyn FnMut(&Event) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        for (i, request) in requests.iter().enumerate() {
            self.check(i, request)?;
        }
        self.clear()?;
        self.run_all(requests, on_event)
    }

    /// Decodes these requests and nothing else, beside what is kept.
    pub(crate) fn run_all(
        &mut self,
        requests: Vec<Request>,
        on_event: &mut dyn FnMut(&Event) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        self.reset_counters();
        self.next_request = 0;
        for request in requests {
            self.add(request)?;
        }
        while !self.idle() {
            let events = self.step()?;
            if events.iter().any(|e| matches!(e, Event::Failed { .. })) {
                self.clear()?;
                return Err(self.failure.take().unwrap_or(Error::Stopped));
            }
            if events.iter().try_for_each(&mut *on_event).is_break() {
                self.clear()?;
                return Err(Error::Stopped);
            }
        }
        let cache = match &self.card {
            // A copy for one step is held once for all.
            Some(card) => {
                let CacheBytes { copy_bytes, .. } = card.bytes();
                CacheBytes { copy_bytes: self.held_on_card.copy_bytes + copy_bytes, ..self.held_on_card }
            }
            None => self.cache_bytes(),
        };
        let (routes, decode) = (self.routes().clone(), self.decode);
        let outcomes = self.take_finished()?.into_iter().map(|(_, outcome)| outcome).collect();
        Ok(Generation { outcomes, decode, routes, cache })
    }

    /// Checks a prompt alone.
    pub(crate) fn check_prompt(&self, tokens: &[u32]) -> Result<(), Error> {
        check_tokens(0, tokens, self.loaded.config())
    }

    /// Keeps a sequence of the cache for the request that goes on with its tokens.
    pub(crate) fn keep_session(&mut self, seq: SeqId, tokens: Vec<u32>) {
        self.prefixes.keep_session(seq, tokens, Vec::new());
    }

    fn check(&self, number: usize, request: &Request) -> Result<(), Error> {
        let config = self.loaded.config();
        check_tokens(number, &request.prompt, config)?;
        if request.max_tokens == 0 {
            return Err(Error::Sampling { option: "max_tokens", allowed: "1 or more", got: "0".into() });
        }
        request.sampling.check()
    }

    /// Adds a request to those being decoded and gives it the next number. It waits until there is room.
    ///
    /// # Errors
    /// As the checks of [`Engine::generate`]; [`Error::NeverFits`].
    pub fn add(&mut self, request: Request) -> Result<usize, Error> {
        let number = self.next_request;
        self.check(number, &request)?;
        if let Some(budget) = self.limits.kv_memory.filter(|_| self.card.is_none()) {
            // The newest token is chosen and not stored.
            let prompt = request.prompt.len();
            let tokens = prompt.saturating_add(request.max_tokens - 1).min(self.loaded.config().context);
            let need = self.cache.bytes_to_reach(tokens, prompt, self.step_tokens());
            if need > budget {
                return Err(Error::NeverFits { request: number, tokens, need, budget });
            }
        }
        let sequence = Sequence::new(number, request, Instant::now())?;
        if let Some(card) = &self.card {
            card.check_fits(number, sequence.most_tokens(self.loaded.config().context))?;
        }
        self.sequences.push(sequence);
        self.next_request += 1;
        Ok(number)
    }

    /// Drops a request and frees what it holds; pages that it offered to others stay until the memory is needed. Whether
    /// it was there.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn cancel(&mut self, number: usize) -> Result<bool, Error> {
        let of = |list: &mut Vec<Sequence>| list.iter().position(|s| s.request == number).map(|i| list.remove(i));
        let Some(sequence) = of(&mut self.sequences).or_else(|| of(&mut self.done)) else { return Ok(false) };
        self.forget(sequence)?;
        Ok(true)
    }

    /// Requests that it decodes at once at most: those of its limits, or fewer where a card has no room for more windows.
    pub fn most_running(&self) -> usize {
        self.limits.max_running
    }

    /// What it is doing and has done.
    pub fn status(&self) -> Status {
        let mut status = Status {
            waiting: 0,
            running: 0,
            swapped: 0,
            requests: Vec::with_capacity(self.sequences.len()),
            budget_bytes: self.limits.kv_memory,
            bytes: self.cache_bytes(),
            swapped_bytes: 0,
            blocks_used: self.cache.blocks().0,
            blocks_shared: self.cache.blocks().1,
            blocks_free: None,
            kept_bytes: self.kept_bytes(),
            pages: self.prefixes.len(),
            sessions: self.prefixes.sessions().len(),
            totals: self.totals,
        };
        let free = self.limits.kv_memory.map(|budget| budget.saturating_sub(self.cache.held_bytes()));
        status.blocks_free = free.map(|free| free / self.cache.largest_block_bytes());
        if let Some(card) = &self.card {
            let (free, all) = card.pages();
            (status.blocks_used, status.blocks_free) = (all - free, Some(free));
        }
        for s in &self.sequences {
            let state = s.state();
            let bytes = match &s.place {
                Place::Waiting => {
                    status.waiting += 1;
                    0
                }
                Place::Cache(id) => {
                    status.running += 1;
                    self.cache.sequence_bytes(*id).unwrap_or(0)
                }
                Place::Slot(slot) => {
                    status.running += 1;
                    self.card.as_ref().map_or(0, |card| card.sequence_bytes(*slot))
                }
                Place::Out(swapped) => {
                    status.swapped += 1;
                    status.swapped_bytes += swapped.bytes;
                    0
                }
            };
            let (number, phase, prompt_tokens, stored) = (s.request, state.phase, s.prompt_len(), state.stored);
            status.requests.push(RequestStatus { number, phase, prompt_tokens, stored, bytes });
        }
        status
    }

    /// Runs the model; `self.logits` becomes `[wanted][vocabulary]`.
    pub(crate) fn forward(
        &mut self,
        batch: &[Rows],
        tokens: &[u32],
        positions: &[usize],
        wanted: &[usize],
    ) -> Result<&[f32], Error> {
        let step = Step { batch, tokens, positions, wanted, bases: &self.bases };
        let Self { loaded, pool, cache, attention, tape, every_row, logits, .. } = self;
        let tape = tape.as_mut().map(|tape| tape as &mut dyn StoredRows);
        let stored = tape.or(every_row.as_mut().map(|codec| codec as &mut dyn StoredRows));
        let model = loaded.model()?;
        pool.run(|| model.forward(&step, cache, attention, stored, logits))?;
        Ok(&self.logits)
    }

    /// Takes finished requests, with their numbers, out of the engine. With shared prefixes what they hold stays in the
    /// cache for a next turn, until the memory is needed.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn take_finished(&mut self) -> Result<Vec<(usize, Outcome)>, Error> {
        let mut finished = std::mem::take(&mut self.done);
        finished.sort_by_key(|s| s.request);
        for s in &finished {
            self.retire(s)?;
        }
        Ok(finished.into_iter().filter_map(|s| Some((s.request, s.outcome()?))).collect())
    }

    /// Drops every request, everything kept for others, and all that the cache holds.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn clear(&mut self) -> Result<(), Error> {
        let sequences = std::mem::take(&mut self.sequences);
        self.done.clear();
        if let Some(card) = &mut self.card {
            // Every slot is freed, whatever becomes of another one.
            sequences.iter().filter_map(Sequence::slot).map(|slot| card.free(slot)).fold(Ok(()), Result::and)?;
        }
        self.prefixes = Prefixes::default();
        self.cache = empty_cache(&self.layers, self.arm, self.schemes.as_ref(), self.limits.kv_memory)?;
        if let Some(codec) = &self.imitation {
            self.cache.imitate(codec);
        }
        Ok(())
    }

    /// From now on packed groups are attended as `codec` gives their rows back ([`Cache::imitate`]; the arm is to be
    /// dequant-once), and what was being decoded is dropped.
    ///
    /// # Errors
    /// As [`Engine::clear`].
    pub fn imitate(&mut self, codec: Arc<dyn RowCodec>) -> Result<(), Error> {
        self.imitation = Some(codec);
        self.clear()
    }

    /// From now on every row passes `codec` before it is stored.
    pub fn pass_every_row(&mut self, codec: Arc<dyn RowCodec>) {
        self.every_row = Some(EveryRow(codec));
    }

    pub(crate) fn cache_mut(&mut self) -> &mut Cache {
        &mut self.cache
    }
}

/// A cache with nothing in it but codebooks.
fn empty_cache(
    layers: &[LayerConfig],
    arm: Arm,
    schemes: Option<&Schemes>,
    budget: Option<usize>,
) -> Result<Cache, Error> {
    let mut cache = Cache::new(layers, arm)?;
    cache.set_budget(budget);
    if let Some(schemes) = schemes {
        schemes.give_codebooks(&mut cache)?;
    }
    Ok(cache)
}

/// Tokens that the model can hold, all of its vocabulary.
pub(crate) fn check_tokens(number: usize, tokens: &[u32], config: &Config) -> Result<(), Error> {
    let Config { context, vocabulary, .. } = *config;
    if tokens.is_empty() {
        return Err(Error::EmptyPrompt { request: number });
    }
    if tokens.len() > context {
        return Err(Error::PromptTooLong { request: number, tokens: tokens.len(), context });
    }
    match tokens.iter().find(|&&t| t as usize >= vocabulary) {
        Some(&token) => Err(Error::NoSuchToken { token, vocabulary }),
        None => Ok(()),
    }
}
