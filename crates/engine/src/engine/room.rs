//! Memory of requests: what the scheduler is told about it, and making room. In: requests, kept prefixes, a budget; out:
//! bytes, and blocks given up for them.
//! NOT here: who runs (scheduler.rs), steps (steps.rs).

use super::Engine;
use crate::Error;
use crate::cuda::CHUNK;
use crate::limits::STEP_TOKENS;
use crate::prefixes::{Chain, NodeId, Prefixes, Victim};
use crate::scheduler::{Bounds, Outlook};
use crate::sequence::{Place, Sequence};
use kvant_kv::{Cache, PageId, Rows};
use std::cell::OnceCell;

/// Tokens that a request should be able to decode after it entered, as far as it is up to itself: what others take meanwhile
/// is not reserved.
const HEADROOM: usize = 64;

/// What the scheduler sees of an engine's memory.
pub(super) struct View<'a> {
    pub cache: &'a Cache,
    pub sequences: &'a [Sequence],
    /// Finished ones that nobody has taken yet.
    pub done: &'a [Sequence],
    pub prefixes: &'a Prefixes,
    pub bounds: Bounds,
    pub budget: Option<usize>,
    free: OnceCell<usize>,
}

impl View<'_> {
    /// Bytes of these pages together.
    pub fn pages_bytes(&self, pages: impl IntoIterator<Item = PageId>) -> usize {
        pages.into_iter().map(|page| self.cache.page_bytes(page).unwrap_or(0)).sum()
    }

    /// The kept pages that this text begins with.
    fn kept(&self, tokens: &[u32]) -> Chain {
        let Some(page_len) = self.bounds.page_len else { return Chain::new() };
        // The last token always runs: its logits choose the next one.
        let mut chain = self.prefixes.matching(&tokens[..tokens.len() - 1], page_len);
        chain.truncate(self.cache.usable_pages(&self.prefixes.pages(&chain)).unwrap_or(0));
        chain
    }

    /// Bytes that nobody needs, as a lower bound that is cheap to have in every step: pages, sessions, and finished requests that nobody has taken yet. A session that has
    /// its own copy of a page that another offered counts without it.
    fn kept_at_least(&self) -> usize {
        let alone = |id, chain: &[NodeId]| {
            let shared = self.pages_bytes(self.prefixes.pages(chain));
            self.cache.sequence_bytes(id).unwrap_or(0).saturating_sub(shared)
        };
        let done = self.done.iter().filter_map(|s| {
            let page_len = self.bounds.page_len;
            let chain = page_len.map_or_else(Chain::new, |n| self.prefixes.matching(&s.tokens[..s.stored], n));
            Some(alone(s.id()?, &chain))
        });
        let sessions = self.prefixes.sessions().iter().map(|s| alone(s.id, &s.chain));
        let pages = self.pages_bytes(self.prefixes.pages_by_use(false));
        done.chain(sessions).sum::<usize>() + pages
    }

    /// Bytes of those of these pages that more than `users` requests use.
    fn used_bytes(&self, chain: &[NodeId], users: usize) -> usize {
        let used: Vec<_> = chain.iter().copied().filter(|&node| self.prefixes.users(node) > users).collect();
        self.pages_bytes(self.prefixes.pages(&used))
    }
}

impl Outlook for View<'_> {
    fn free(&self) -> usize {
        *self.free.get_or_init(|| {
            let Some(budget) = self.budget else { return usize::MAX / 2 };
            let used = self.prefixes.pages_by_use(true);
            let last_resort: usize = used.map(|page| self.cache.page_bytes_alone(page).unwrap_or(0)).sum();
            let held = self.cache.held_bytes();
            budget.saturating_sub(held) + (self.kept_at_least() + last_resort).min(held)
        })
    }

    fn need(&self, rows: &[(usize, usize)]) -> usize {
        let batch: Vec<Rows> =
            rows.iter().filter_map(|&(i, rows)| Some(Rows { seq: self.sequences[i].id()?, rows })).collect();
        self.cache.bytes_needed(&batch).unwrap_or(0)
    }

    fn held(&self, request: usize) -> usize {
        let sequence = &self.sequences[request];
        let Some(id) = sequence.id() else { return 0 };
        self.cache.sequence_bytes(id).unwrap_or(0).saturating_sub(self.used_bytes(&sequence.uses, 1))
    }

    fn rest(&self, request: usize) -> usize {
        let sequence = &self.sequences[request];
        let tokens = sequence.tokens.len();
        let rows = self.bounds.step_tokens;
        match sequence.place {
            Place::Cache(id) => {
                let most = self.cache.bytes_to_reach(tokens, tokens, rows);
                most.saturating_sub(self.cache.sequence_bytes(id).unwrap_or(0))
            }
            Place::Waiting | Place::Slot(_) | Place::Out(_) => {
                let most = self.cache.bytes_to_reach(tokens + HEADROOM, tokens, rows);
                let most = if let Place::Out(swapped) = &sequence.place { most.max(swapped.bytes) } else { most };
                // Pages that nobody uses count as free; those in use are there for this one too.
                most.saturating_sub(self.used_bytes(&self.kept(&sequence.tokens), 0))
            }
        }
    }

    fn awaits(&self, request: usize, entering: &[usize]) -> bool {
        let Some(page_len) = self.bounds.page_len else { return false };
        let tokens = &self.sequences[request].tokens;
        let end = (self.kept(tokens).len() + 1) * page_len;
        if end >= tokens.len() {
            return false;
        }
        let computes = |(i, other): (usize, &Sequence)| {
            i != request
                && (entering.contains(&i) || other.id().is_some())
                && other.stored < end
                && other.tokens.get(..end) == Some(&tokens[..end])
        };
        self.sequences.iter().enumerate().any(computes)
    }
}

impl Engine {
    pub(super) fn view(&self) -> View<'_> {
        View {
            cache: &self.cache,
            sequences: &self.sequences,
            done: &self.done,
            prefixes: &self.prefixes,
            bounds: self.bounds(),
            budget: self.limits.kv_memory,
            free: OnceCell::new(),
        }
    }

    /// Bytes that no request needs: pages, sessions, and finished requests that nobody has taken yet. Counted block by block,
    /// where [`View`] takes a lower bound.
    pub(super) fn kept_bytes(&self) -> usize {
        let sessions = self.prefixes.sessions().iter().map(|s| s.id);
        let sequences: Vec<_> = self.done.iter().filter_map(Sequence::id).chain(sessions).collect();
        let pages: Vec<_> = self.prefixes.pages_by_use(false).collect();
        self.cache.bytes_held_by(&sequences, &pages)
    }

    /// Gives up every page and session that is kept for requests to come.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub fn release_kept(&mut self) -> Result<(), Error> {
        while let Some(victim) = self.prefixes.victim() {
            self.give_up(victim)?;
        }
        Ok(())
    }

    fn give_up(&mut self, victim: Victim) -> Result<(), Error> {
        match victim {
            Victim::Session(session) => Ok(self.cache.remove_sequence(session.id)?),
            Victim::Page(page) => Ok(self.cache.release_page(page)?),
        }
    }

    /// Rows of a step.
    pub(super) fn step_tokens(&self) -> usize {
        self.limits.step_tokens.unwrap_or(if self.card.is_some() { CHUNK } else { STEP_TOKENS })
    }

    pub(super) fn bounds(&self) -> Bounds {
        Bounds {
            max_running: self.limits.max_running,
            step_tokens: self.step_tokens(),
            page_len: self.page_len,
            prompts_first: self.limits.prompts_first,
        }
    }

    /// Gives up what nobody needs, finished requests' cache first, until so many bytes are free; with `must`, pages that
    /// requests use as well. Whether they are free.
    ///
    /// # Errors
    /// None in practice; those of the cache.
    pub(super) fn make_room(&mut self, bytes: usize, must: bool) -> Result<bool, Error> {
        let Some(budget) = self.limits.kv_memory else { return Ok(true) };
        while budget.saturating_sub(self.cache.held_bytes()) < bytes {
            if let Some(done) = self.done.iter_mut().find(|s| s.id().is_some()) {
                if let Place::Cache(id) = std::mem::replace(&mut done.place, Place::Waiting) {
                    self.cache.remove_sequence(id)?;
                }
                continue;
            }
            let victim = match self.prefixes.victim() {
                None if must => self.prefixes.last_resort().map(Victim::Page),
                victim => victim,
            };
            let Some(victim) = victim else { return Ok(false) };
            self.give_up(victim)?;
            self.totals.evictions += 1;
        }
        Ok(true)
    }
}
