//! How many blocks a sequence takes in one layer: numbers only. In: rows that come and commits; out: blocks that each
//! takes and gives back. Store works by it, and who has to know beforehand (a budget) asks the same numbers.
//! NOT here: blocks and bytes (store.rs, layout.rs).

use super::layout::BLOCK_LEN;
use super::store::LayerSpec;
use crate::PackedScheme;

/// What one sequence holds in one layer.
///
/// Invariants: groups `first_group..groups` are held as records, `[tail_start, len)` as plain rows; every query at
/// `committed - 1` or later finds the keys it sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Tokens.
    pub len: usize,
    /// Of them kept for good.
    pub committed: usize,
    /// First token that is held plain (sinks apart); a multiple of 32.
    pub tail_start: usize,
    /// Blocks of plain rows.
    pub tail: usize,
    /// First group that is held: earlier ones are out of every later query's sight.
    pub first_group: usize,
    /// One behind the last group that is held.
    pub groups: usize,
    /// Whether there is a block of sinks.
    pub sinks: bool,
}

/// Blocks by use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub tail: usize,
    pub groups: usize,
    pub sinks: usize,
}

impl Blocks {
    /// Their bytes, with those of the dequant-once arm's copy if it keeps one.
    pub(crate) fn bytes(&self, spec: &LayerSpec, copies: bool) -> usize {
        let (plain, heads) = (spec.plain.block_bytes(spec.shape.kv_heads), spec.shape.kv_heads);
        let record = spec.record.as_ref().map_or(0, |layout| layout.block_bytes(heads));
        let copy = if copies { spec.group_len() / BLOCK_LEN * plain } else { 0 };
        let sinks = if self.sinks > 0 { self.sinks * spec.sinks.block_bytes(heads) } else { 0 };
        let groups = if self.groups > 0 { self.groups * (record + copy) } else { 0 };
        self.tail * plain + groups + sinks
    }
}

impl Extent {
    /// A committed sequence of `len` tokens that came one by one.
    pub(crate) fn of_len(spec: &LayerSpec, len: usize) -> Self {
        let mut extent = Self::default();
        if len > 0 {
            extent.append(spec, len);
            extent.commit(spec);
        }
        extent
    }

    /// Everything held.
    pub(crate) fn blocks(&self) -> Blocks {
        Blocks { tail: self.tail, groups: self.groups - self.first_group, sinks: usize::from(self.sinks) }
    }

    /// More rows; returns the blocks that they take.
    pub(crate) fn append(&mut self, spec: &LayerSpec, rows: usize) -> Blocks {
        let before = *self;
        self.len += rows;
        self.groups = self.groups.max(spec.scheme.packed_len(self.len) / spec.group_len());
        self.tail = (self.len - self.tail_start).div_ceil(BLOCK_LEN);
        self.sinks |= spec.sinks.tokens > 0;
        Blocks {
            tail: self.tail - before.tail,
            groups: self.groups - before.groups,
            sinks: usize::from(self.sinks) - usize::from(before.sinks),
        }
    }

    /// Keeps every row for good; returns the blocks that no later query reads.
    pub(crate) fn commit(&mut self, spec: &LayerSpec) -> Blocks {
        let before = *self;
        self.committed = self.len;
        if let Some(newest) = self.len.checked_sub(1) {
            let start = match spec.scheme.packed() {
                Some(scheme) => scheme.edge(newest),
                None => spec.first_seen(newest) / BLOCK_LEN * BLOCK_LEN,
            };
            self.tail_start = self.tail_start.max(start);
        }
        if spec.record.is_some() {
            // By the oldest query that still finds its plain rows, so that what trim may go back to sees its groups.
            let seen = spec.first_seen(self.tail_start.saturating_sub(1)) / spec.group_len();
            self.first_group = self.first_group.max(seen.min(self.groups));
        }
        let gone = (self.tail_start - before.tail_start) / BLOCK_LEN;
        self.tail -= gone;
        Blocks { tail: gone, groups: self.first_group - before.first_group, sinks: 0 }
    }

    /// Whether the keys are held that a query at `position` sees.
    pub(crate) fn serves(&self, spec: &LayerSpec, position: usize) -> bool {
        match spec.scheme.packed() {
            Some(scheme) => {
                scheme.edge(position) >= self.tail_start
                    && spec.first_seen(position) / spec.group_len() >= self.first_group
            }
            None => spec.first_seen(position) / BLOCK_LEN * BLOCK_LEN >= self.tail_start,
        }
    }

    /// Drops the tokens from `len` on, which [`Extent::serves`] as the next position.
    pub(crate) fn trim(&mut self, spec: &LayerSpec, len: usize) {
        if len == 0 {
            *self = Self::default();
            return;
        }
        self.len = len;
        self.committed = self.committed.min(len);
        self.groups = self.groups.min(spec.scheme.packed_len(len).max(self.tail_start) / spec.group_len());
        self.tail = len.saturating_sub(self.tail_start).div_ceil(BLOCK_LEN);
    }

    /// Packs every whole group before `len`, a position whose query sees all of them packed; returns how many are new.
    /// Their plain rows stay until the next commit.
    pub(crate) fn seal(&mut self, spec: &LayerSpec) -> usize {
        let before = self.groups;
        if spec.scheme.packed().is_some_and(|scheme| scheme.edge(self.len) >= self.len) {
            self.groups = self.groups.max(self.len / spec.group_len());
        }
        self.groups - before
    }
}

impl LayerSpec {
    /// Tokens of a group; as long as any text where nothing is packed.
    pub(crate) fn group_len(&self) -> usize {
        self.scheme.packed().map_or(usize::MAX, PackedScheme::group_len)
    }

    /// First position that a query at `position` sees.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        self.visible.map_or(0, |visible| (position + 1).saturating_sub(visible))
    }
}
