//! From problems to units of work. In: problems (a sequence's rows in a layer); out: attention outputs.
//!
//! Rows are cut into tiles in which `edge` and the first record that a row sees are constant; a unit is one tile, one kv head and a run of key ranges. Ranges
//! are fixed by position and merged in order, so that bits depend on neither threads nor batch.
//! NOT here: validation (mod.rs), arithmetic (cpu/, softmax.rs).

use super::cpu::Variant;
use super::cpu::generic::{RANGE_LEN, Scratch, Source, Task};
use super::softmax::States;
use super::threads::Threads;
use crate::cache::layout::RecordLayout;
use crate::{LayerShape, RowFormat};
use std::cell::RefCell;
use std::ops::Range;

/// Most rows of a tile: the states of its vectors stay in the second-level cache while the keys go by.
const TILE_ROWS: usize = 32;
/// Tiles of at most this many query vectors per kv head are split by key range among threads; larger ones have work
/// enough for one thread as they are.
const SPLIT_VECTORS: usize = 16;

/// Units that each thread should find at least, so that no thread waits long for the last one.
const UNITS_PER_THREAD: usize = 8;
/// Ranges that are merged among themselves before their block is merged with others, and most ranges of a unit of few
/// query vectors: blocks begin at multiples of it, so that the order of merges is fixed by position.
const BLOCK_RANGES: usize = 8;

/// Working memory of one thread, kept from call to call: a unit of a small call is over in a few microseconds.
struct Own {
    /// Query vectors times sm_scale, `[vectors][head_dim]`.
    scaled: Vec<f32>,
    /// First and last visible position of each query vector.
    first_visible: Vec<usize>,
    last_visible: Vec<usize>,
    scratch: Box<Scratch>,
}

thread_local! {
    static OWN: RefCell<Own> =
        RefCell::new(Own {
            scaled: Vec::new(),
            first_visible: Vec::new(),
            last_visible: Vec::new(),
            scratch: Scratch::new(),
        });
}

/// How calls are cut into work, for experiments; results do not depend on it. None: the product's rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    /// Key ranges of one unit of work (rows with few query vectors only), 1 or more.
    pub ranges_per_unit: Option<usize>,
    /// Query vectors that share one pass over the codes, from 1 to the rule's number.
    pub vectors_per_unpack: Option<usize>,
}

impl Split {
    /// The product's rule: ranges of one unit, when a call has `ranges` of them over all kv heads, rows and layers.
    pub fn rule(ranges: usize, threads: usize) -> usize {
        // Runs of ranges keep a thread on memory that it fetches ahead; many units keep threads evenly busy.
        let run = (ranges / (threads * UNITS_PER_THREAD)).clamp(1, BLOCK_RANGES);
        // A power of two divides a block into units without a short one.
        1 << run.ilog2()
    }
}

/// The newest rows of one sequence in one layer, to be attended.
pub(crate) struct Problem<'a> {
    pub source: &'a dyn Source,
    pub shape: LayerShape,
    /// Of rows that are not packed.
    pub format: RowFormat,
    /// None: packed positions are read dequantized.
    pub records: Option<&'a RecordLayout>,
    pub sinks: usize,
    /// Keys before `edge(position)` are packed for a query at `position`.
    pub edge: &'a (dyn Fn(usize) -> usize + Sync),
    /// Positions of the rows.
    pub positions: Range<usize>,
    /// Keys before this position are not seen, whatever the row.
    pub first_visible: usize,
    /// Keys that a row sees at most; None: all.
    pub visible: Option<usize>,
    /// First row of this problem in q and out.
    pub first_row: usize,
    pub sm_scale: f32,
    pub softcap: Option<f32>,
    /// `[q_heads]`
    pub sink_logits: Option<&'a [f32]>,
}

impl Problem<'_> {
    /// First position that a row at `position` sees; beyond the row's own where the call's options hide all.
    fn first_seen(&self, position: usize) -> usize {
        self.first_visible.max(self.visible.map_or(0, |n| (position + 1).saturating_sub(n)))
    }
}

/// Rows of one problem with the same edge.
struct Tile {
    problem: usize,
    positions: Range<usize>,
    edge: usize,
    /// The first group that these rows see packed: records that share a range share a bound of their scales, so that a
    /// row must not find more of them than it would alone.
    first_group: usize,
}

impl Tile {
    /// Query vectors per kv head.
    fn vectors(&self, p: &Problem<'_>) -> usize {
        self.positions.len() * p.shape.gqa_ratio()
    }
}

struct Unit {
    tile: usize,
    head: usize,
    ranges: Range<usize>,
    /// Begins at the first range that its tile sees of a block.
    leads: bool,
    /// All ranges that its tile sees.
    whole: bool,
}

/// Attends every problem. Shapes: `q`, `out`: `[rows of all problems][q_heads][head_dim]`, all of one shape.
pub(crate) fn run(
    variant: &Variant,
    threads: &Threads,
    split: Split,
    problems: &[Problem<'_>],
    q: &[f32],
    out: &mut [f32],
) {
    let tiles = tiles(problems);
    let units = units(problems, &tiles, threads.count(), split);
    let states = threads.map(units.len(), |i| {
        OWN.with_borrow_mut(|own| attend_unit(variant, split, problems, &tiles, &units[i], q, own))
    });
    let mut results = units.iter().zip(states).peekable();
    while let Some((unit, parts)) = results.next() {
        let mut merge = Merge::new(parts);
        while let Some((_, parts)) = results.next_if(|(u, _)| (u.tile, u.head) == (unit.tile, unit.head)) {
            merge.add(parts);
        }
        let merged = merge.finish();
        let tile = &tiles[unit.tile];
        let p = &problems[tile.problem];
        for (i, at) in vectors(p, tile, unit.head).enumerate() {
            let sink = p.sink_logits.map(|s| s[unit.head * p.shape.gqa_ratio() + i % p.shape.gqa_ratio()]);
            merged.finish(i, sink, &mut out[at..at + p.shape.head_dim]);
        }
    }
}

fn tiles(problems: &[Problem<'_>]) -> Vec<Tile> {
    let mut tiles: Vec<Tile> = Vec::new();
    for (problem, p) in problems.iter().enumerate() {
        for position in p.positions.clone() {
            let edge = (p.edge)(position);
            let first_group = p.records.map_or(0, |layout| p.first_seen(position).min(edge) / layout.group_len);
            let same = |t: &Tile| t.problem == problem && t.edge == edge && t.first_group == first_group;
            match tiles.last_mut() {
                Some(t) if same(t) && t.positions.len() < TILE_ROWS => t.positions.end = position + 1,
                _ => tiles.push(Tile { problem, positions: position..position + 1, edge, first_group }),
            }
        }
    }
    tiles
}

fn units(problems: &[Problem<'_>], tiles: &[Tile], threads: usize, split: Split) -> Vec<Unit> {
    let ranges = |t: &Tile| {
        let first = problems[t.problem].first_seen(t.positions.start).min(t.positions.end - 1) / RANGE_LEN;
        first..t.positions.end.div_ceil(RANGE_LEN)
    };
    let all: usize = tiles.iter().map(|t| ranges(t).len() * problems[t.problem].shape.kv_heads).sum();
    let run = split.ranges_per_unit.map_or_else(|| Split::rule(all, threads), |run| run.max(1));
    let mut units = Vec::new();
    for (tile, t) in tiles.iter().enumerate() {
        let (p, ranges) = (&problems[t.problem], ranges(t));
        let run = if t.vectors(p) <= SPLIT_VECTORS { run } else { ranges.len() };
        for head in 0..p.shape.kv_heads {
            let runs = ranges.clone().step_by(run).map(|r| r..(r + run).min(ranges.end));
            let leads = |r: usize| r == ranges.start || r.is_multiple_of(BLOCK_RANGES);
            let unit =
                |run: Range<usize>| Unit { tile, head, leads: leads(run.start), whole: run == ranges, ranges: run };
            units.extend(runs.map(unit));
        }
    }
    units
}

/// Where each query vector of a tile and kv head begins in q and out: row by row, the head's query heads in order.
fn vectors<'a>(p: &'a Problem<'_>, tile: &Tile, head: usize) -> impl Iterator<Item = usize> + use<'a> {
    let (d, ratio) = (p.shape.head_dim, p.shape.gqa_ratio());
    let rows = tile.positions.start - p.positions.start..tile.positions.end - p.positions.start;
    rows.flat_map(move |row| (0..ratio).map(move |i| ((p.first_row + row) * p.shape.q_heads + head * ratio + i) * d))
}

/// A partial state and the block of ranges that it is of, a whole block or a part of one.
struct Part {
    block: usize,
    states: States,
}

/// Merges the parts of one tile and head: those of a block in order, then the blocks in order. How blocks were cut into
/// units does not show: only a block's first part may hold several ranges.
struct Merge {
    done: Option<States>,
    block: Part,
}

impl Merge {
    fn new(parts: Vec<Part>) -> Self {
        let mut parts = parts.into_iter();
        let mut merge = Self { done: None, block: parts.next().expect("a unit has a range") };
        merge.add(parts);
        merge
    }

    fn add(&mut self, parts: impl IntoIterator<Item = Part>) {
        for part in parts {
            if part.block == self.block.block {
                self.block.states.merge_all(&part.states);
            } else {
                self.close(part);
            }
        }
    }

    /// The block is complete; `next` begins the next one.
    fn close(&mut self, next: Part) {
        let block = std::mem::replace(&mut self.block, next);
        match &mut self.done {
            None => self.done = Some(block.states),
            Some(done) => done.merge_all(&block.states),
        }
    }

    fn finish(self) -> States {
        match self.done {
            None => self.block.states,
            Some(mut done) => {
                done.merge_all(&self.block.states);
                done
            }
        }
    }
}

/// Attends a unit's ranges. A block that it begins is merged range by range, as [`Merge`] would: one part. Of a block that
/// another unit begins each range is a part of its own. A whole unit merges its blocks too, so that many rows over a long
/// history do not keep a state for every block.
fn attend_unit(
    variant: &Variant,
    split: Split,
    problems: &[Problem<'_>],
    tiles: &[Tile],
    unit: &Unit,
    q: &[f32],
    own: &mut Own,
) -> Vec<Part> {
    let tile = &tiles[unit.tile];
    let p = &problems[tile.problem];
    let (d, ratio) = (p.shape.head_dim, p.shape.gqa_ratio());
    let Own { scaled, first_visible, last_visible, scratch } = own;
    scaled.clear();
    vectors(p, tile, unit.head).for_each(|at| scaled.extend(q[at..at + d].iter().map(|x| x * p.sm_scale)));
    first_visible.clear();
    first_visible
        .extend(tile.positions.clone().flat_map(|position| std::iter::repeat_n(p.first_seen(position), ratio)));
    last_visible.clear();
    last_visible.extend(tile.positions.clone().flat_map(|p| std::iter::repeat_n(p, ratio)));
    let mut parts: Vec<Part> = Vec::with_capacity(if unit.whole { 2 } else { unit.ranges.len() });
    for r in unit.ranges.clone() {
        let range = r * RANGE_LEN..((r + 1) * RANGE_LEN).min(tile.positions.end);
        let more = r + 1 < unit.ranges.end && range.end < tile.edge;
        let task = Task {
            source: p.source,
            head: unit.head,
            head_dim: d,
            format: p.format,
            records: p.records,
            next_group: p.records.filter(|_| more).map(|layout| range.end / layout.group_len),
            range,
            edge: tile.edge,
            sinks: if tile.edge > 0 { p.sinks } else { 0 },
            first_visible,
            vectors_per_unpack: split.vectors_per_unpack.unwrap_or(variant.vectors).clamp(1, variant.vectors),
            softcap: p.softcap,
            q: scaled,
            last_visible,
        };
        let block = r / BLOCK_RANGES;
        let leads = unit.leads || block > unit.ranges.start / BLOCK_RANGES;
        if !leads || parts.last().is_none_or(|part| part.block != block) {
            if unit.whole {
                merge_second(&mut parts);
            }
            parts.push(Part { block, states: States::init(last_visible.len(), d) });
        }
        let part = parts.last_mut().expect("just pushed");
        (variant.run)(&task, scratch, &mut part.states);
    }
    if unit.whole {
        merge_second(&mut parts);
    }
    parts
}

/// Merges the second part, a complete block, into the first: all blocks before it.
fn merge_second(parts: &mut Vec<Part>) {
    if let [first, second] = &mut parts[..] {
        first.states.merge_all(&second.states);
        parts.truncate(1);
    }
}
