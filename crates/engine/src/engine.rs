//! Decodes requests together. In: requests; out: events of each step, and outcomes.
//! `step` reads as the pipeline: schedule, run the model, choose tokens.
//! NOT here: the rules of each part (scheduler.rs, model/, sampler.rs, kvant-kv).

use crate::chat::{ChatTemplate, Message};
use crate::forced::{EveryRow, StoredRows, Tape};
use crate::model::{Basis, Config, Model, Products, Step};
use crate::request::{Event, Outcome, Request};
use crate::scheduler::{self, Plan};
use crate::schemes::Schemes;
use crate::sequence::Sequence;
use crate::source::Source;
use crate::tokenizer::Tokenizer;
use crate::{Error, Pool};
use kvant_kv::{Arm, Attention, Cache, CacheBytes, LayerConfig, RowCodec, Rows};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A model in memory: weights, tokenizer, chat template. Engines share it.
pub struct LoadedModel {
    model: Model,
    tokenizer: Option<Tokenizer>,
    chat: Option<ChatTemplate>,
}

impl LoadedModel {
    /// Loads a GGUF file or a folder of safetensors, with weights laid out for `threads` threads (results do not depend on that number).
    /// `progress(done, all)` counts weights converted.
    ///
    /// # Errors
    /// [`Error`] says what is wrong with the file, or that there are no threads.
    pub fn load(
        path: &Path,
        threads: usize,
        products: Products,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, Error> {
        let pool = Pool::new(threads)?;
        let source = Source::open(path)?;
        // Cheap checks first: a model that cannot be decoded fails before its tokenizer is built.
        source.config()?;
        let (tokenizer, chat) = (source.tokenizer()?, source.chat_template()?);
        let model = pool.run(|| Model::load(&source, threads, products, progress))?;
        Ok(Self { model, tokenizer, chat })
    }

    /// Its weights.
    pub(crate) fn weights(&self) -> &Model {
        &self.model
    }

    /// The numbers of the model.
    pub fn config(&self) -> &Config {
        self.model.config()
    }

    /// Name of the kernel that multiplies with the weights ([`Model::products`]).
    pub fn products(&self) -> &'static str {
        self.model.products()
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the model brings none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        self.tokenizer.as_ref().ok_or_else(|| Error::Tokenizer { why: "the model brings none".into() })
    }

    /// Tokens of a raw prompt.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], also when the model brings none.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.tokenizer()?.encode(text)
    }

    /// Tokens of a chat, ending where the answer begins. Special tokens come from the template alone, never from what a
    /// message says.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] when the file has no template or it fails, and those of [`LoadedModel::encode`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        let chat = self.chat.as_ref().ok_or_else(|| Error::ChatTemplate { why: "the model file has none".into() })?;
        let tokenizer = self.tokenizer()?;
        tokenizer.encode_chat(&chat.render(messages, tokenizer.specials())?)
    }
}

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
    sequences: Vec<Sequence>,
    next_request: usize,
    pub(crate) tape: Option<Tape>,
    imitation: Option<Arc<dyn RowCodec>>,
    every_row: Option<EveryRow>,
    logits: Vec<f32>,
    decode: DecodeTime,
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
    /// What the cache held when the last request ended, all requests still in it.
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
            schemes.check_loud(&config.shape)?;
            schemes.complete_bases(&config.shape)
        };
        let layers: Vec<LayerConfig> =
            schemes.layers().iter().enumerate().map(|(i, &scheme)| config.layer(i, scheme)).collect();
        let cache = Cache::new(&layers, options.arm)?;
        let attention = Attention::new(options.threads, options.kernel.as_deref())?;
        Ok(Self {
            loaded,
            pool,
            layers,
            schemes: (!plain).then_some(schemes),
            bases,
            arm: options.arm,
            cache,
            attention,
            sequences: Vec::new(),
            next_request: 0,
            tape: None,
            imitation: None,
            every_row: None,
            logits: Vec::new(),
            decode: DecodeTime::default(),
        })
    }

    /// The model.
    pub fn model(&self) -> &LoadedModel {
        &self.loaded
    }

    /// Name of the attention kernel in use.
    pub fn kernel(&self) -> &'static str {
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
        self.loaded.model.products()
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
        self.cache.bytes()
    }

    /// Attention calls by route since the last reset.
    pub fn routes(&self) -> &BTreeMap<String, u64> {
        self.attention.routes()
    }

    /// Time spent decoding since the last reset.
    pub fn decode_time(&self) -> DecodeTime {
        self.decode
    }

    /// Forgets routes and decode time.
    pub fn reset_counters(&mut self) {
        self.attention.reset_routes();
        self.decode = DecodeTime::default();
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
        self.reset_counters();
        for request in requests {
            self.add(request)?;
        }
        loop {
            let events = self.step()?;
            if events.is_empty() {
                break;
            }
            if events.iter().try_for_each(&mut *on_event).is_break() {
                self.clear()?;
                return Err(Error::Stopped);
            }
        }
        let (cache, routes, decode) = (self.cache_bytes(), self.routes().clone(), self.decode);
        let outcomes = self.take_finished()?.into_iter().map(|(_, outcome)| outcome).collect();
        Ok(Generation { outcomes, decode, routes, cache })
    }

    fn check(&self, number: usize, request: &Request) -> Result<(), Error> {
        let config = self.loaded.config();
        check_tokens(number, &request.prompt, config)?;
        if request.max_tokens == 0 {
            return Err(Error::Sampling { option: "max_tokens", allowed: "1 or more", got: "0".into() });
        }
        request.sampling.check()
    }

    /// Adds a request to those being decoded and gives it the next number.
    ///
    /// # Errors
    /// As the checks of [`Engine::generate`].
    pub fn add(&mut self, request: Request) -> Result<usize, Error> {
        let number = self.next_request;
        self.check(number, &request)?;
        let id = self.cache.add_sequence();
        self.sequences.push(Sequence::new(number, id, request, Instant::now())?);
        self.next_request += 1;
        Ok(number)
    }

    /// One step of what is being decoded. No events: nothing is left to do.
    ///
    /// # Errors
    /// [`Error::NanLogit`], [`Error::Kv`]; the cache is empty afterwards.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.try_step().inspect_err(|_| {
            // Some layers may have stored the step and others not: nothing of it can be used.
            let _ = self.clear();
        })
    }

    fn try_step(&mut self) -> Result<Vec<Event>, Error> {
        let states: Vec<_> = self.sequences.iter().map(Sequence::state).collect();
        let mut events = Vec::new();
        match scheduler::plan(&states) {
            Plan::Idle => {}
            Plan::Prefill { sequence, start, rows } => {
                let s = &self.sequences[sequence];
                let (of, end) = (s.prompt_len(), start + rows);
                let tokens = s.tokens[start..end].to_vec();
                let wanted: &[usize] = if end == of { &[rows - 1] } else { &[] };
                self.forward(&[Rows { seq: s.id, rows }], &tokens, &(start..end).collect::<Vec<_>>(), wanted)?;
                self.sequences[sequence].stored = end;
                events.push(Event::Prefilled { request: self.sequences[sequence].request, tokens: end, of });
                if end == of {
                    self.choose(&[sequence], &mut events)?;
                }
            }
            Plan::Decode { sequences } => {
                let started = Instant::now();
                let of = |f: &dyn Fn(&Sequence) -> usize| -> Vec<usize> {
                    sequences.iter().map(|&i| f(&self.sequences[i])).collect()
                };
                let positions = of(&|s| s.stored);
                let batch: Vec<_> = sequences.iter().map(|&i| Rows { seq: self.sequences[i].id, rows: 1 }).collect();
                let tokens: Vec<u32> =
                    sequences.iter().map(|&i| self.sequences[i].tokens[self.sequences[i].stored]).collect();
                self.forward(&batch, &tokens, &positions, &(0..batch.len()).collect::<Vec<_>>())?;
                sequences.iter().for_each(|&i| self.sequences[i].stored += 1);
                self.choose(&sequences, &mut events)?;
                self.decode.tokens += sequences.len();
                self.decode.steps += 1;
                self.decode.time += started.elapsed();
            }
        }
        Ok(events)
    }

    /// Gives each of these sequences its next token, from one row of logits each.
    fn choose(&mut self, sequences: &[usize], events: &mut Vec<Event>) -> Result<(), Error> {
        let Config { vocabulary, context, .. } = *self.loaded.config();
        let tokenizer = self.loaded.tokenizer.as_ref();
        for (&i, logits) in sequences.iter().zip(self.logits.chunks_exact(vocabulary)) {
            self.sequences[i].advance(logits, tokenizer, context, events)?;
        }
        Ok(())
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
        pool.run(|| loaded.model.forward(&step, cache, attention, stored, logits))?;
        Ok(&self.logits)
    }

    /// Takes finished requests, with their numbers, out of the engine and the cache.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn take_finished(&mut self) -> Result<Vec<(usize, Outcome)>, Error> {
        let (finished, running): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.sequences).into_iter().partition(|s| s.state().finished);
        self.sequences = running;
        for s in &finished {
            self.cache.remove_sequence(s.id)?;
        }
        Ok(finished.into_iter().filter_map(|s| Some((s.request, s.outcome()?))).collect())
    }

    /// Drops every request and all that the cache holds.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn clear(&mut self) -> Result<(), Error> {
        self.sequences.clear();
        self.next_request = 0;
        self.cache = Cache::new(&self.layers, self.arm)?;
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
