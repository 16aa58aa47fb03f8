//! The pools of a cache and their budget. In: what blocks are for and how large they are; out: blocks, never more bytes
//! of them than the budget.
//! NOT here: memory itself (device/), which sequence holds what (store.rs).

use super::store::LayerSpec;
use crate::Error;
use crate::device::cpu::{Block, BlockPool};

/// One pool per block size and use.
#[derive(Default)]
pub(crate) struct Pools {
    pools: Vec<(BlockUse, BlockPool)>,
    /// Most bytes of blocks in use, over all pools.
    pub budget: Option<usize>,
}

/// What blocks are used for: each use is counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockUse {
    Records,
    Window,
    Copy,
}

impl Pools {
    /// The pool of such blocks, made now if there is none.
    pub(crate) fn index_of(&mut self, block_use: BlockUse, block_bytes: usize) -> usize {
        let found = self.pools.iter().position(|(u, p)| *u == block_use && p.block_bytes() == block_bytes);
        found.unwrap_or_else(|| {
            self.pools.push((block_use, BlockPool::new(block_bytes)));
            self.pools.len() - 1
        })
    }

    /// Bytes of the blocks in use for this.
    pub(crate) fn in_use_bytes(&self, block_use: BlockUse) -> usize {
        self.pools.iter().filter(|(u, _)| *u == block_use).map(|(_, p)| p.in_use_bytes()).sum()
    }

    /// Bytes of all blocks in use.
    pub(crate) fn held_bytes(&self) -> usize {
        self.pools.iter().map(|(_, p)| p.in_use_bytes()).sum()
    }

    pub(crate) fn largest_block_bytes(&self) -> usize {
        self.pools.iter().map(|(_, p)| p.block_bytes()).max().unwrap_or(0)
    }

    /// Blocks in use, and how many of them have several owners.
    pub(crate) fn blocks(&self) -> (usize, usize) {
        self.pools.iter().fold((0, 0), |(used, shared), (_, p)| (used + p.in_use(), shared + p.shared()))
    }

    pub(crate) fn get(&self, index: usize) -> &BlockPool {
        &self.pools[index].1
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> &mut BlockPool {
        &mut self.pools[index].1
    }

    /// A zeroed block of that pool.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`] over the budget, [`Error::OutOfMemory`].
    pub(crate) fn alloc(&mut self, index: usize) -> Result<Block, Error> {
        if let Some(budget) = self.budget {
            let (need, free) = (self.get(index).block_bytes(), budget.saturating_sub(self.held_bytes()));
            if need > free {
                return Err(Error::OutOfBlocks { need, free });
            }
        }
        self.get_mut(index).alloc()
    }

    /// A block of each of these pools, or none at all.
    ///
    /// # Errors
    /// As [`Pools::alloc`].
    pub(crate) fn alloc_all(&mut self, indices: impl IntoIterator<Item = usize>) -> Result<Vec<Block>, Error> {
        let mut taken = Vec::new();
        for index in indices {
            match self.alloc(index) {
                Ok(block) => taken.push((index, block)),
                Err(e) => {
                    taken.into_iter().for_each(|(index, block)| self.get_mut(index).free(block));
                    return Err(e);
                }
            }
        }
        Ok(taken.into_iter().map(|(_, block)| block).collect())
    }

    /// A block that may be written: `block` itself, or a copy of it when others own it too.
    ///
    /// # Errors
    /// As [`Pools::alloc`], and then `block` is as it was.
    pub(crate) fn make_own(&mut self, index: usize, block: &mut Block) -> Result<(), Error> {
        if self.get(index).is_shared(block) {
            let own = self.alloc(index)?;
            let pool = self.get_mut(index);
            pool.copy(block, &own);
            pool.free(std::mem::replace(block, own));
        }
        Ok(())
    }

    /// Records to write and the rows to read for them: pools of different uses, so of different indices.
    pub(crate) fn records_and_rows(&mut self, spec: &LayerSpec) -> (&mut BlockPool, &BlockPool) {
        let pair = [spec.record_pool, spec.plain_pool];
        let [records, rows] = self.pools.get_disjoint_mut(pair).expect("two pools");
        (&mut records.1, &rows.1)
    }
}
