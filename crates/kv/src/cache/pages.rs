//! Pages: the packed tokens of a prefix that several sequences share. In: a sequence at a page's end; out: a handle that
//! keeps the page's blocks, and sequences that start with such pages. Blocks are never copied: they get one more owner.
//!
//! Why it is exact: at a page's first position everything before it is packed ([`Scheme::edge`]), so a query there or later
//! reads the same records whoever wrote them, and no plain row of who wrote them.
//! NOT here: which tokens a page is of (the engine's), when pages go (the engine's), blocks (store.rs, device/).

use super::extent::Extent;
use super::layout::BLOCK_LEN;
use super::pools::Pools;
use super::store::{LayerSpec, Store};
use super::{Cache, SeqId};
use crate::device::cpu::{Block, BlockPool};
use crate::{Arm, Error, Scheme};
use std::collections::{BTreeMap, HashSet};

/// Handle of a page in a [`Cache`]. Not reused while the cache lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(usize);

/// All pages that are held.
#[derive(Default)]
pub(super) struct Pages {
    pages: BTreeMap<PageId, Page>,
    next: usize,
}

impl Pages {
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

struct Page {
    /// Its place: it holds the tokens from `number * share_len` on.
    number: usize,
    layers: Vec<Part>,
}

/// A page in one layer. None: out of sight when the page was taken, as in layers that see a few tokens only.
struct Part {
    /// Records, or blocks of plain rows where nothing is packed.
    blocks: Vec<Option<Block>>,
    /// Of the first page.
    sinks: Option<Block>,
}

/// Tokens of a page where the schemes ask for none in particular.
const PAGE_LEN: usize = 512;

impl Pages {
    /// These pages, which are to be pages 0, 1, ...
    fn in_order(&self, pages: &[PageId]) -> Result<Vec<&Page>, Error> {
        let mut held = Vec::with_capacity(pages.len());
        for (number, id) in pages.iter().enumerate() {
            let page = self.pages.get(id).ok_or(Error::NoSuchPage { id: id.0 })?;
            if page.number != number {
                return Err(Error::Shape { what: "number of a page, in order", expected: number, got: page.number });
            }
            held.push(page);
        }
        Ok(held)
    }
}

impl Cache {
    /// Tokens of a page that sequences can share: at its end every layer has packed all before it. None: schemes with a
    /// window and no pages (`p`), and the dequant-once arm, whose copy is its own.
    pub fn share_len(&self) -> Option<usize> {
        if self.arm == Arm::DequantOnce {
            return None;
        }
        let (mut len, mut asked) = (1, false);
        for layer in &self.layers {
            let unit = match layer.scheme {
                Scheme::F16 | Scheme::Bf16 => BLOCK_LEN,
                Scheme::Packed(p) if p.page_len() > 0 => p.page_len(),
                Scheme::Packed(p) if p.window_len() <= 1 => p.group_len(),
                Scheme::Packed(_) => return None,
            };
            asked |= layer.scheme.packed().is_some_and(|p| p.page_len() > 0);
            len = lcm(len, unit)?;
        }
        if asked { Some(len) } else { len.checked_mul(PAGE_LEN.div_ceil(len)) }
    }

    /// Holds page `number` of a sequence: from now on its blocks stay until [`Cache::release_page`], whatever becomes of
    /// the sequence. Groups that the page's last tokens leave plain are packed now, as the next token would pack them.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`]; [`Error::Shape`] when the cache has no pages, or some layer has not committed all tokens
    /// of the page; [`Error::OutOfBlocks`], [`Error::OutOfMemory`].
    pub fn hold_page(&mut self, seq: SeqId, number: usize) -> Result<PageId, Error> {
        let share_len = self.known_share_len()?;
        let stores = self.sequences.get_mut(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        let tokens = number * share_len..(number + 1) * share_len;
        for store in stores.iter() {
            let (what, got) = ("committed tokens of a sequence whose page is held, at least", store.extent.committed);
            if got < tokens.end {
                return Err(Error::Shape { what, expected: tokens.end, got });
            }
        }
        for (store, spec) in stores.iter_mut().zip(&self.layers) {
            store.seal(spec, &mut self.pools, self.kernel)?;
        }
        let part = |(store, spec): (&Store, &LayerSpec)| {
            let (unit, pool) = spec.page_unit();
            let (first, blocks) = store.page_blocks(spec);
            let wanted = tokens.start / unit..tokens.end / unit;
            let blocks = wanted.map(|i| Some(self.pools.get_mut(pool).share(blocks.get(i.checked_sub(first)?)?)));
            let blocks = blocks.collect();
            let sinks = store.sink_block.as_ref().filter(|_| number == 0);
            Part { blocks, sinks: sinks.map(|block| self.pools.get_mut(spec.sink_pool).share(block)) }
        };
        let layers = stores.iter().zip(&self.layers).map(part).collect();
        let id = PageId(self.pages.next);
        self.pages.next += 1;
        self.pages.pages.insert(id, Page { number, layers });
        Ok(id)
    }

    /// Gives a page up. Blocks that sequences share with it stay theirs.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`].
    pub fn release_page(&mut self, page: PageId) -> Result<(), Error> {
        let released = self.pages.pages.remove(&page).ok_or(Error::NoSuchPage { id: page.0 })?;
        for (part, spec) in released.layers.into_iter().zip(&self.layers) {
            let (_, pool) = spec.page_unit();
            part.blocks.into_iter().flatten().for_each(|b| self.pools.get_mut(pool).free(b));
            part.sinks.into_iter().for_each(|b| self.pools.get_mut(spec.sink_pool).free(b));
        }
        Ok(())
    }

    /// Bytes of a page's blocks, whoever owns them too.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`].
    pub fn page_bytes(&self, page: PageId) -> Result<usize, Error> {
        self.page_bytes_of(page, |_, _| true)
    }

    /// Bytes of those of a page's blocks that nobody else owns: what releasing it frees now.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`].
    pub fn page_bytes_alone(&self, page: PageId) -> Result<usize, Error> {
        self.page_bytes_of(page, |pool, block| !pool.is_shared(block))
    }

    fn page_bytes_of(&self, page: PageId, counts: impl Fn(&BlockPool, &Block) -> bool) -> Result<usize, Error> {
        let held = self.pages.pages.get(&page).ok_or(Error::NoSuchPage { id: page.0 })?;
        let bytes = |pool: usize, blocks: &mut dyn Iterator<Item = &Block>| {
            let pool = self.pools.get(pool);
            blocks.filter(|b| counts(pool, b)).count() * pool.block_bytes()
        };
        let of = |(part, spec): (&Part, &LayerSpec)| {
            bytes(spec.page_unit().1, &mut part.blocks.iter().flatten()) + bytes(spec.sink_pool, &mut part.sinks.iter())
        };
        Ok(held.layers.iter().zip(&self.layers).map(of).sum())
    }

    /// Bytes of the blocks that these sequences and pages hold together, those of several owners once. Handles that are not
    /// in this cache count nothing.
    pub fn bytes_held_by(&self, sequences: &[SeqId], pages: &[PageId]) -> usize {
        let mut blocks = HashSet::new();
        let mut bytes = 0;
        let mut count = |pool: usize, block: &Block| {
            if blocks.insert((pool, block.place())) {
                bytes += self.pools.get(pool).block_bytes();
            }
        };
        for (layer, spec) in self.layers.iter().enumerate() {
            for store in sequences.iter().filter_map(|seq| Some(&self.sequences.get(seq)?[layer])) {
                store.groups.iter().for_each(|b| count(spec.record_pool, b));
                store.tail.iter().for_each(|b| count(spec.plain_pool, b));
                store.sink_block.iter().for_each(|b| count(spec.sink_pool, b));
                store.copy.iter().for_each(|b| count(self.copy_pools[layer].expect("copies have a pool"), b));
            }
            for part in pages.iter().filter_map(|page| Some(&self.pages.pages.get(page)?.layers[layer])) {
                part.blocks.iter().flatten().for_each(|b| count(spec.page_unit().1, b));
                part.sinks.iter().for_each(|b| count(spec.sink_pool, b));
            }
        }
        bytes
    }

    /// Pages held.
    pub fn pages(&self) -> usize {
        self.pages.pages.len()
    }

    /// The most of these pages, from the first on, that a sequence can start with: pages 0, 1, ... in order, with everything
    /// that a query behind the last of them sees.
    ///
    /// # Errors
    /// [`Error::NoSuchPage`], [`Error::Shape`] for pages out of order.
    pub fn usable_pages(&self, pages: &[PageId]) -> Result<usize, Error> {
        let held = self.pages.in_order(pages)?;
        Ok((0..=pages.len()).rev().find(|&n| self.start(&held[..n]).is_some()).unwrap_or(0))
    }

    /// A new sequence that holds the tokens of these pages, which stay held.
    ///
    /// # Errors
    /// As [`Cache::usable_pages`]; [`Error::Shape`] when not all of them can be used.
    pub fn add_sequence_from(&mut self, pages: &[PageId]) -> Result<SeqId, Error> {
        let held = self.pages.in_order(pages)?;
        let Some(layers) = self.start(&held) else {
            let (what, expected) = ("pages that a sequence can start with", self.usable_pages(pages)?);
            return Err(Error::Shape { what, expected, got: pages.len() });
        };
        let mut stores = Vec::with_capacity(layers.len());
        for (layer, extent) in layers.into_iter().enumerate() {
            let store = shared_start(&self.layers[layer], layer, &held, extent, &mut self.pools);
            stores.push(store);
        }
        let id = SeqId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, stores);
        Ok(id)
    }

    fn known_share_len(&self) -> Result<usize, Error> {
        let what = "tokens of a page (these schemes and this arm have none)";
        self.share_len().ok_or(Error::Shape { what, expected: 1, got: 0 })
    }

    /// What a sequence of these pages holds in each layer; None when something of it was out of sight.
    fn start(&self, pages: &[&Page]) -> Option<Vec<Extent>> {
        let len = if pages.is_empty() { 0 } else { pages.len() * self.share_len()? };
        let of = |(layer, spec): (usize, &LayerSpec)| {
            let extent = spec.start(len);
            let (unit, _) = spec.page_unit();
            let mut blocks = pages.iter().flat_map(|page| &page.layers[layer].blocks).skip(extent.first_block(spec));
            blocks.all(Option::is_some).then_some(extent).filter(|_| len.is_multiple_of(unit))
        };
        self.layers.iter().enumerate().map(of).collect()
    }
}

/// One layer of a sequence that starts with pages.
fn shared_start(spec: &LayerSpec, layer: usize, pages: &[&Page], extent: Extent, pools: &mut Pools) -> Store {
    let (_, pool) = spec.page_unit();
    let blocks = pages.iter().flat_map(|page| &page.layers[layer].blocks).skip(extent.first_block(spec));
    let blocks = blocks.map(|b| pools.get_mut(pool).share(b.as_ref().expect("usable pages"))).collect();
    let sinks = pages.first().and_then(|page| page.layers[layer].sinks.as_ref());
    let sink_block = sinks.map(|block| pools.get_mut(spec.sink_pool).share(block));
    let mut store = Store { extent, sink_block, ..Store::default() };
    if spec.record.is_some() {
        store.groups = blocks;
    } else {
        store.tail = blocks;
    }
    store
}

impl LayerSpec {
    /// Tokens of the blocks that pages are made of, and their pool.
    fn page_unit(&self) -> (usize, usize) {
        match &self.record {
            Some(layout) => (layout.group_len, self.record_pool),
            None => (BLOCK_LEN, self.plain_pool),
        }
    }

    /// What a sequence holds that starts with the first `len` tokens in pages.
    pub(super) fn start(&self, len: usize) -> Extent {
        if len == 0 {
            return Extent::default();
        }
        let seen = self.first_seen(len);
        let sinks = self.sinks.tokens > 0;
        let at = Extent { len, committed: len, sinks, ..Extent::default() };
        match &self.record {
            Some(layout) => {
                let (first_group, groups) = (seen / layout.group_len, len / layout.group_len);
                Extent { tail_start: len, first_group, groups, ..at }
            }
            None => {
                let first = seen / BLOCK_LEN;
                Extent { tail_start: first * BLOCK_LEN, tail: len / BLOCK_LEN - first, ..at }
            }
        }
    }
}

impl Extent {
    /// First block held, of those that pages are made of.
    fn first_block(&self, spec: &LayerSpec) -> usize {
        if spec.record.is_some() { self.first_group } else { self.tail_start / BLOCK_LEN }
    }
}

impl Store {
    /// The blocks that pages are made of, and the number of the first.
    fn page_blocks(&self, spec: &LayerSpec) -> (usize, &[Block]) {
        let blocks = if spec.record.is_some() { &self.groups } else { &self.tail };
        (self.extent.first_block(spec), blocks)
    }
}

/// Least common multiple, if it is a length.
fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}
