//! One step: who leaves and enters the cache, the model over everybody's rows, the next tokens. In: requests; out: events.
//! NOT here: the rules (scheduler.rs), memory (room.rs), what a request does with a token (sequence.rs).

use super::Engine;
use crate::model::Config;
use crate::request::Event;
use crate::scheduler::{self, Moves, State};
use crate::sequence::{Place, Sequence};
use crate::swap::Swapped;
use crate::{Error, prefixes::Chain};
use kvant_kv::Error as KvError;
use kvant_kv::{Rows, SeqId};
use std::time::Instant;

/// A sequence in the cache that a request begins with.
struct Start {
    id: SeqId,
    /// Tokens that it holds.
    stored: usize,
    /// The pages of these.
    chain: Chain,
    /// The pages that must stay for it.
    uses: Chain,
}

impl Engine {
    /// Whether no request is left to be decoded.
    pub fn idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// One step of what is being decoded. Nothing is left to do when [`Engine::idle`] says so.
    ///
    /// # Errors
    /// Those of the model that are no single request's fault; the cache is empty afterwards. What is the fault of one, such
    /// as keys that f16 cannot hold or memory that cannot be had, ends that one with [`Event::Failed`].
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        self.try_step(&mut events).inspect_err(|_| {
            // Some layers may have stored the step and others not: nothing of it can be used.
            let _ = self.clear();
        })?;
        Ok(events)
    }

    fn try_step(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        if self.card.is_some() {
            return self.step_on_card(events);
        }
        let Moves { out, enter } = scheduler::moves(&self.states(), &self.bounds(), &self.view());
        let mut failed = Vec::new();
        for i in out {
            if let Err(e) = self.move_out(i) {
                failed.push((i, e));
            }
        }
        for i in enter {
            let others = self.sequences.iter().any(|s| s.id().is_some());
            match self.enter(i) {
                Ok(()) => {}
                // Memory that was promised and is not there: it is tried again when others have given theirs back.
                Err(Error::Kv(KvError::OutOfBlocks { .. })) if others => {}
                Err(e) => failed.push((i, e)),
            }
        }
        self.fail(failed, events)?;
        let rows = scheduler::rows(&self.states(), &self.bounds(), &self.view());
        if rows.is_empty() {
            return Ok(());
        }
        self.run(&rows, events)
    }

    fn states(&self) -> Vec<State> {
        self.sequences.iter().map(Sequence::state).collect()
    }

    /// Runs these rows and chooses the tokens that follow.
    fn run(&mut self, rows: &[(usize, usize)], events: &mut Vec<Event>) -> Result<(), Error> {
        let started = Instant::now();
        let (mut batch, mut tokens, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let (mut wanted, mut choosing) = (Vec::new(), Vec::new());
        for &(i, n) in rows {
            let s = &self.sequences[i];
            let range = s.stored..s.stored + n;
            batch.push(Rows { seq: s.id().expect("who runs is in the cache"), rows: n });
            tokens.extend_from_slice(&s.tokens[range.clone()]);
            if range.end == s.tokens.len() {
                wanted.push(tokens.len() - 1);
                choosing.push(i);
            }
            positions.extend(range);
        }
        let need = self.cache.bytes_needed(&batch)?;
        self.make_room(need, true)?;
        if let Err(e) = self.forward(&batch, &tokens, &positions, &wanted) {
            return self.recover(rows, e, events);
        }
        self.totals.steps += 1;
        let step = self.totals.steps;
        let mut decoding = true;
        for &(i, n) in rows {
            let s = &mut self.sequences[i];
            // Tokens that were chosen before a request began again are a prompt too.
            if s.stored + 1 < s.tokens.len() || s.stored < s.prompt_len() {
                decoding = false;
                s.served = step;
            }
            if s.stored < s.prompt_len() {
                let (request, of) = (s.request, s.prompt_len());
                events.push(Event::Prefilled { request, tokens: (s.stored + n).min(of), of, cached: s.cached });
            }
            s.stored += n;
            self.keep_page(i);
        }
        self.choose(&choosing, events)?;
        if decoding {
            self.decode.tokens += rows.len();
            self.decode.steps += 1;
            self.decode.time += started.elapsed();
        }
        self.set_finished_aside()
    }

    /// Gives each of these sequences its next token, from one row of logits each.
    fn choose(&mut self, sequences: &[usize], events: &mut Vec<Event>) -> Result<(), Error> {
        let Config { vocabulary, context, .. } = *self.loaded.config();
        let tokenizer = self.loaded.tokenizer().ok();
        let mut failed = Vec::new();
        let before = events.len();
        for (&i, logits) in sequences.iter().zip(self.logits.chunks_exact(vocabulary)) {
            if let Err(e) = self.sequences[i].advance(logits, tokenizer, context, events) {
                failed.push((i, e));
            }
        }
        let chosen = events[before..].iter().filter(|e| matches!(e, Event::Token { .. }));
        self.totals.output_tokens += chosen.count() as u64;
        self.fail(failed, events)
    }

    /// Ends these requests, each for its reason.
    pub(super) fn fail(&mut self, mut failed: Vec<(usize, Error)>, events: &mut Vec<Event>) -> Result<(), Error> {
        // From the last on, so that the places of the others stay.
        failed.sort_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, e) in failed {
            let sequence = self.sequences.remove(i);
            events.push(Event::Failed { request: sequence.request, why: e.to_string() });
            self.failure = Some(e);
            self.forget(sequence)?;
        }
        Ok(())
    }

    /// After a step that failed some layers have stored its rows and others not. When it was one request's fault, that one
    /// ends, and the others begin again with the tokens they have: the same numbers come out.
    fn recover(&mut self, rows: &[(usize, usize)], error: Error, events: &mut Vec<Event>) -> Result<(), Error> {
        let youngest = rows.last().map(|(i, _)| *i);
        let guilty = match &error {
            Error::Kv(KvError::NotFinite { seq: Some(seq), .. }) => {
                rows.iter().map(|(i, _)| *i).find(|&i| self.sequences[i].id() == Some(*seq))
            }
            Error::Kv(KvError::OutOfBlocks { .. } | KvError::OutOfMemory { .. }) => youngest,
            _ => None,
        };
        let Some(guilty) = guilty else { return Err(error) };
        for &(i, _) in rows {
            self.sequences[i].stored = 0;
            self.leave_cache(i, Place::Waiting)?;
        }
        self.fail(vec![(guilty, error)], events)
    }

    /// Moves a request out of the cache.
    fn move_out(&mut self, i: usize) -> Result<(), Error> {
        let s = &self.sequences[i];
        let Place::Cache(id) = s.place else { return Ok(()) };
        let to = match s.stored {
            0 => Place::Waiting,
            _ => Place::Out(Swapped::save(&self.cache, id, self.limits.swap.as_deref())?),
        };
        self.leave_cache(i, to)?;
        self.totals.preemptions += 1;
        Ok(())
    }

    /// Frees what a request holds in the cache and gives its pages back; from now on it is `to`.
    fn leave_cache(&mut self, i: usize, to: Place) -> Result<(), Error> {
        let s = &mut self.sequences[i];
        self.prefixes.give_back(&s.leave_pages());
        match std::mem::replace(&mut s.place, to) {
            Place::Cache(id) => Ok(self.cache.remove_sequence(id)?),
            Place::Waiting | Place::Slot(_) | Place::Out(_) => Ok(()),
        }
    }

    /// Brings a request into the cache, with as much of its text as is kept.
    fn enter(&mut self, i: usize) -> Result<(), Error> {
        let Place::Out(swapped) = &self.sequences[i].place else {
            let Start { id, stored, chain, uses } = self.start(i)?;
            let s = &mut self.sequences[i];
            (s.place, s.stored) = (Place::Cache(id), stored);
            if s.enters() {
                s.cached = stored.min(s.prompt_len());
                self.totals.prompt_tokens += s.prompt_len() as u64;
                self.totals.cached_tokens += s.cached as u64;
            }
            (s.chain, s.uses) = (chain, uses);
            return Ok(());
        };
        let bytes = swapped.bytes;
        let stored = self.sequences[i].stored;
        let mut chain = self.kept_chain(&self.sequences[i].tokens[..stored])?;
        self.prefixes.take(&chain);
        let missing = bytes.saturating_sub(self.view().pages_bytes(self.prefixes.pages(&chain)));
        if !self.make_room(missing, false)? {
            // The last resort may take the very pages that it would share.
            self.prefixes.give_back(&chain);
            self.make_room(bytes, true)?;
            chain = self.kept_chain(&self.sequences[i].tokens[..stored])?;
            self.prefixes.take(&chain);
        }
        let pages = self.prefixes.pages(&chain);
        let Place::Out(swapped) = &mut self.sequences[i].place else { unreachable!("neither in nor waiting") };
        let result = swapped.restore(&mut self.cache, &pages);
        match result {
            Ok(id) => {
                let s = &mut self.sequences[i];
                (s.place, s.chain, s.uses) = (Place::Cache(id), chain.clone(), chain);
                Ok(())
            }
            Err(e) => {
                self.prefixes.give_back(&chain);
                Err(e)
            }
        }
    }

    /// A sequence in the cache that holds the first tokens of request `i`: a kept session or kept pages, whichever has more.
    fn start(&mut self, i: usize) -> Result<Start, Error> {
        if !self.limits.share_prefixes && self.prefixes.sessions().is_empty() {
            return Ok(Start { id: self.cache.add_sequence(), stored: 0, chain: Chain::new(), uses: Chain::new() });
        }
        let tokens = &self.sequences[i].tokens;
        // The last token always runs: its logits choose the next one.
        let most = tokens.len() - 1;
        let chain = self.kept_chain(&tokens[..most])?;
        let of_pages = chain.len() * self.page_len.unwrap_or(0);
        let mut sessions: Vec<(usize, usize)> = self
            .prefixes
            .sessions_matching(&tokens[..most])
            // What it gains is more than what it takes from whoever would go on with the whole session.
            .filter(|(_, session, n)| n.saturating_sub(of_pages) > session.tokens.len() - n)
            .map(|(index, _, n)| (n, index))
            .collect();
        sessions.sort_unstable_by(|a, b| b.cmp(a));
        for (n, index) in sessions {
            // Refused when the plain rows are gone that its next token would see; then nothing has changed.
            if self.cache.trim(self.prefixes.sessions()[index].id, n).is_ok() {
                let session = self.prefixes.take_session(index);
                self.prefixes.take(&session.chain);
                let mut chain = session.chain.clone();
                chain.truncate(self.page_len.map_or(0, |page_len| n / page_len));
                return Ok(Start { id: session.id, stored: n, chain, uses: session.chain });
            }
        }
        let id = if chain.is_empty() {
            self.cache.add_sequence()
        } else {
            self.cache.add_sequence_from(&self.prefixes.pages(&chain))?
        };
        self.prefixes.take(&chain);
        Ok(Start { id, stored: of_pages, chain: chain.clone(), uses: chain })
    }

    /// The kept pages that this text begins with and that a sequence can start from.
    fn kept_chain(&self, tokens: &[u32]) -> Result<Chain, Error> {
        let Some(page_len) = self.page_len else { return Ok(Chain::new()) };
        let mut chain = self.prefixes.matching(tokens, page_len);
        chain.truncate(self.cache.usable_pages(&self.prefixes.pages(&chain))?);
        Ok(chain)
    }

    /// Keeps the page that a request has just completed, if it has.
    fn keep_page(&mut self, i: usize) {
        let Some(page_len) = self.page_len else { return };
        let s = &self.sequences[i];
        let (Some(id), true) = (s.id(), s.stored.is_multiple_of(page_len)) else { return };
        let Some(number) = (s.stored / page_len).checked_sub(1).filter(|&n| n == s.chain.len()) else { return };
        if !self.prefixes.has(&s.chain) {
            return;
        }
        // What is packed ahead takes memory; what was used longest ago goes for it.
        let need = self.cache.bytes_to_hold(id).unwrap_or(0);
        if !self.make_room(need, false).unwrap_or(false) {
            return;
        }
        let s = &mut self.sequences[i];
        let tokens = &s.tokens[number * page_len..s.stored];
        let node = match self.prefixes.child(s.chain.last().copied(), tokens) {
            Some(node) => node,
            // No memory for it now: this text is not shared any further.
            None => match self.cache.hold_page(id, number) {
                Ok(page) => self.prefixes.keep(&s.chain, tokens, page),
                Err(_) => return,
            },
        };
        self.prefixes.take(&[node]);
        s.chain.push(node);
        s.uses.push(node);
    }

    /// Ended requests no longer take part; what they hold stays until somebody takes them or needs the memory. On a card, where
    /// nothing is kept of them, they give their slots back at once.
    pub(super) fn set_finished_aside(&mut self) -> Result<(), Error> {
        let (finished, running): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.sequences).into_iter().partition(Sequence::finished);
        self.sequences = running;
        for mut s in finished {
            self.prefixes.give_back(&s.leave_pages());
            if let (Some(slot), Some(card)) = (s.slot(), self.card.as_mut()) {
                // What each held when it ended is what a generation reports.
                let before = card.bytes();
                card.free(slot)?;
                let mut held = before - card.bytes();
                held.window_bytes += card.window_bytes();
                self.held_on_card = self.held_on_card + held;
                s.place = Place::Waiting;
            }
            self.done.push(s);
        }
        Ok(())
    }

    /// Frees all that a request holds.
    pub(super) fn forget(&mut self, sequence: Sequence) -> Result<(), Error> {
        self.prefixes.give_back(&sequence.uses);
        if let (Some(slot), Some(card)) = (sequence.slot(), self.card.as_mut()) {
            return card.free(slot);
        }
        match sequence.id() {
            Some(id) => Ok(self.cache.remove_sequence(id)?),
            None => Ok(()),
        }
    }

    /// Keeps a finished sequence for a next turn, or frees it.
    pub(super) fn retire(&mut self, sequence: &Sequence) -> Result<(), Error> {
        let Some(id) = sequence.id() else { return Ok(()) };
        if !self.limits.share_prefixes {
            return Ok(self.cache.remove_sequence(id)?);
        }
        let tokens = sequence.tokens[..sequence.stored].to_vec();
        let chain = self.kept_chain(&tokens)?;
        self.prefixes.keep_session(id, tokens, chain);
        Ok(())
    }
}
