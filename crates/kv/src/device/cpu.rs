//! Blocks of main memory of one size. In: a block size; out: [`Block`] handles into large mapped chunks.
//! Chunks are 2 MiB-aligned and marked for huge pages: with 4 KiB pages, reading a cold cache is bound by
//! address translation instead of memory. A chunk whose blocks are all free goes back to the operating system.
//! A block can have several owners; it goes back when the last one frees it.
//! NOT here: a budget (cache/pools.rs) or eviction, and what a block holds.

use crate::Error;
use memmap2::{MmapMut, MmapOptions};

/// Size and alignment of a huge page, and the smallest chunk.
const HUGE_PAGE: usize = 2 << 20;
/// Largest chunk: big enough to make the number of mappings small, small enough to give memory back in steps.
const MAX_CHUNK: usize = 64 << 20;
/// Blocks begin at multiples of this many bytes: a cache line, the width of the widest vector load.
const ALIGN: usize = 64;

/// Handle of one block of a [`BlockPool`]. Owned: not `Clone` (only [`BlockPool::share`] makes another), and only
/// [`BlockPool::free`] takes it back.
#[derive(Debug)]
pub(crate) struct Block {
    chunk: u32,
    index: u32,
}

impl Block {
    /// Which block of its pool it is: equal for all handles of one block.
    pub(crate) fn place(&self) -> (u32, u32) {
        (self.chunk, self.index)
    }
}

struct Chunk {
    map: MmapMut,
    /// First byte that is 2 MiB-aligned.
    start: usize,
    /// Indices of free blocks.
    free: Vec<u32>,
    /// Handles of each block, 0 of a free one.
    owners: Vec<u32>,
}

/// Hands out zeroed blocks of one size.
pub(crate) struct BlockPool {
    block_bytes: usize,
    /// Slots keep their index for life, so that handles stay valid when another chunk is unmapped.
    chunks: Vec<Option<Chunk>>,
    in_use: usize,
    shared: usize,
}

impl BlockPool {
    /// `block_bytes`: a multiple of 64 (every layout is made of whole cache lines).
    pub(crate) fn new(block_bytes: usize) -> Self {
        assert!(block_bytes > 0 && block_bytes.is_multiple_of(ALIGN), "blocks are whole cache lines: {block_bytes}");
        Self { block_bytes, chunks: Vec::new(), in_use: 0, shared: 0 }
    }

    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of all blocks that were handed out and not given back; a block of several owners counts once.
    pub(crate) fn in_use_bytes(&self) -> usize {
        self.in_use * self.block_bytes
    }

    /// Blocks that were handed out and not given back.
    pub(crate) fn in_use(&self) -> usize {
        self.in_use
    }

    /// Blocks of more than one owner.
    pub(crate) fn shared(&self) -> usize {
        self.shared
    }

    /// Another handle of the same block: from now on nobody writes it.
    pub(crate) fn share(&mut self, block: &Block) -> Block {
        let owners = self.owners_mut(block);
        *owners += 1;
        if *owners == 2 {
            self.shared += 1;
        }
        Block { ..*block }
    }

    /// Whether the block has other owners.
    pub(crate) fn is_shared(&self, block: &Block) -> bool {
        self.chunks[block.chunk as usize].as_ref().expect("block of a live chunk").owners[block.index as usize] > 1
    }

    fn owners_mut(&mut self, block: &Block) -> &mut u32 {
        &mut self.chunks[block.chunk as usize].as_mut().expect("block of a live chunk").owners[block.index as usize]
    }

    /// A block whose bytes are all zero.
    pub(crate) fn alloc(&mut self) -> Result<Block, Error> {
        let slot = match self.first_with_room() {
            Some(slot) => slot,
            None => self.map_chunk()?,
        };
        let chunk = self.chunks[slot].as_mut().expect("slot was just found");
        let index = chunk.free.pop().expect("chunk has a free block");
        chunk.owners[index as usize] = 1;
        self.in_use += 1;
        Ok(Block { chunk: slot as u32, index })
    }

    /// The first chunk that has a free block.
    fn first_with_room(&self) -> Option<usize> {
        self.chunks.iter().position(|c| c.as_ref().is_some_and(|c| !c.free.is_empty()))
    }

    /// Moves a block to an earlier chunk when one has room. Whoever frees many blocks settles the few that stay: one
    /// block would keep a whole chunk from going back to the operating system. A block of several owners stays.
    pub(crate) fn settle(&mut self, block: Block) -> Block {
        if self.is_shared(&block) || self.first_with_room().is_none_or(|slot| slot >= block.chunk as usize) {
            return block;
        }
        let Ok(settled) = self.alloc() else { return block };
        self.copy(&block, &settled);
        self.free(block);
        settled
    }

    /// Copies the bytes of one block over those of another.
    pub(crate) fn copy(&mut self, from: &Block, to: &Block) {
        let bytes = self.bytes(from).to_vec();
        self.bytes_mut(to).copy_from_slice(&bytes);
    }

    /// Takes a handle back, and with the last one the block. Its bytes are cleared then, so that `alloc` need not know
    /// which blocks are fresh.
    pub(crate) fn free(&mut self, block: Block) {
        let owners = self.owners_mut(&block);
        *owners -= 1;
        match *owners {
            0 => {}
            1 => {
                self.shared -= 1;
                return;
            }
            _ => return,
        }
        self.bytes_mut(&block).fill(0);
        let slot = block.chunk as usize;
        let chunk = self.chunks[slot].as_mut().expect("block of a live chunk");
        chunk.free.push(block.index);
        self.in_use -= 1;
        if chunk.free.len() == chunk.owners.len() {
            self.chunks[slot] = None;
        }
    }

    pub(crate) fn bytes(&self, block: &Block) -> &[u8] {
        let chunk = self.chunks[block.chunk as usize].as_ref().expect("block of a live chunk");
        &chunk.map[chunk.start + block.index as usize * self.block_bytes..][..self.block_bytes]
    }

    pub(crate) fn bytes_mut(&mut self, block: &Block) -> &mut [u8] {
        let chunk = self.chunks[block.chunk as usize].as_mut().expect("block of a live chunk");
        &mut chunk.map[chunk.start + block.index as usize * self.block_bytes..][..self.block_bytes]
    }

    /// Maps one more chunk, as large as all blocks in use, and returns its slot. Pages that no block has touched take no
    /// memory.
    fn map_chunk(&mut self) -> Result<usize, Error> {
        let bytes = self.in_use_bytes().clamp(HUGE_PAGE, MAX_CHUNK).max(self.block_bytes).next_multiple_of(HUGE_PAGE);
        let no_memory = |_| Error::OutOfMemory { bytes };
        let map = MmapOptions::new().len(bytes + HUGE_PAGE).map_anon().map_err(no_memory)?;
        // Huge pages are a wish: a kernel without them serves small ones, slower but right.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        let blocks = (bytes / self.block_bytes) as u32;
        let chunk = Chunk { map, start, free: (0..blocks).rev().collect(), owners: vec![0; blocks as usize] };
        let slot = self.chunks.iter().position(Option::is_none).unwrap_or_else(|| {
            self.chunks.push(None);
            self.chunks.len() - 1
        });
        self.chunks[slot] = Some(chunk);
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zero_distinct_and_counted() {
        let mut pool = BlockPool::new(1 << 20);
        let blocks: Vec<_> = (0..5).map(|_| pool.alloc().unwrap()).collect();
        assert_eq!(pool.in_use_bytes(), 5 << 20);
        for (i, b) in blocks.iter().enumerate() {
            assert!(pool.bytes(b).iter().all(|&x| x == 0));
            pool.bytes_mut(b).fill(i as u8 + 1);
        }
        for (i, b) in blocks.iter().enumerate() {
            assert!(pool.bytes(b).iter().all(|&x| x == i as u8 + 1));
            assert_eq!(pool.bytes(b).as_ptr() as usize % ALIGN, 0);
        }
        for b in blocks {
            pool.free(b);
        }
        assert_eq!(pool.in_use_bytes(), 0);
        assert!(pool.chunks.iter().all(Option::is_none), "empty chunks go back");
        let again = pool.alloc().unwrap();
        assert!(pool.bytes(&again).iter().all(|&x| x == 0));
    }

    #[test]
    fn a_freed_block_is_zero_when_it_comes_back() {
        let mut pool = BlockPool::new(64);
        let (keep, give) = (pool.alloc().unwrap(), pool.alloc().unwrap());
        pool.bytes_mut(&give).fill(7);
        pool.free(give);
        let again = pool.alloc().unwrap();
        assert!(pool.bytes(&again).iter().all(|&x| x == 0));
        assert!(pool.bytes(&keep).iter().all(|&x| x == 0));
    }

    #[test]
    fn a_block_goes_back_with_its_last_owner() {
        let mut pool = BlockPool::new(64);
        let first = pool.alloc().unwrap();
        pool.bytes_mut(&first).fill(5);
        let (second, third) = (pool.share(&first), pool.share(&first));
        assert_eq!((pool.in_use(), pool.shared()), (1, 1));
        pool.free(first);
        pool.free(third);
        assert_eq!((pool.in_use(), pool.shared(), pool.is_shared(&second)), (1, 0, false));
        assert!(pool.bytes(&second).iter().all(|&x| x == 5));
        pool.free(second);
        assert_eq!((pool.in_use(), pool.shared()), (0, 0));
    }

    #[test]
    fn a_settled_block_lets_its_chunk_go() {
        let mut pool = BlockPool::new(1 << 20);
        // Chunks of 2 MiB: the last block is alone in the second once the first ones are free.
        let mut blocks: Vec<_> = (0..3).map(|_| pool.alloc().unwrap()).collect();
        let last = blocks.pop().unwrap();
        pool.bytes_mut(&last).fill(9);
        let settled = pool.settle(last);
        assert_eq!(settled.chunk, 1, "no earlier chunk has room yet");
        pool.free(blocks.remove(0));
        let settled = pool.settle(settled);
        assert_eq!(settled.chunk, 0);
        assert!(pool.bytes(&settled).iter().all(|&x| x == 9));
        assert!(pool.chunks[1].is_none() && pool.in_use_bytes() == 2 << 20);
    }

    #[test]
    fn a_block_larger_than_a_chunk_fits() {
        let mut pool = BlockPool::new(MAX_CHUNK + 64);
        let b = pool.alloc().unwrap();
        assert_eq!(pool.bytes(&b).len(), MAX_CHUNK + 64);
    }
}
