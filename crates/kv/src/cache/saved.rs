//! A sequence as bytes and back: for preempted requests and for prompts kept in files. In: a sequence, or a stream of bytes;
//! out: a stream, or the same sequence again, to the bit. What a stream says is checked against the cache before it is
//! believed, and memory is taken block by block as bytes arrive.
//! NOT here: files, checksums (the engine's), which model the bytes are of (the engine's).
//!
//! Format, little-endian: `kvantseq`, version u32, layers u32; then for each layer: u32 length and text of its shape and
//! scheme, the numbers of its extent (7 times u64), its records, blocks of plain rows and block of sinks.

use super::extent::Extent;
use super::layout::{BLOCK_LEN, Half};
use super::pools::Pools;
use super::store::{LayerSpec, Store};
use super::{Cache, PageId, SeqId};
use crate::device::cpu::Block;
use crate::{Arm, Error};
use std::io::{Read, Write};

const MAGIC: &[u8; 8] = b"kvantseq";
/// Of this format and of the records in it (docs/layout.md).
const VERSION: u32 = 1;
/// More tokens than any sequence has.
const MAX_LEN: u64 = 1 << 30;

impl Cache {
    /// Writes everything that a sequence holds.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`]; [`Error::Saved`] when `out` fails, and under the dequant-once arm, whose copy is not
    /// saved.
    pub fn save_sequence(&self, seq: SeqId, out: &mut dyn Write) -> Result<(), Error> {
        self.refuse_copies()?;
        let stores = self.sequences.get(&seq).ok_or(Error::NoSuchSequence { id: seq.0 })?;
        put(out, MAGIC)?;
        put(out, &VERSION.to_le_bytes())?;
        put(out, &(stores.len() as u32).to_le_bytes())?;
        for (store, spec) in stores.iter().zip(&self.layers) {
            let name = spec.name();
            put(out, &(name.len() as u32).to_le_bytes())?;
            put(out, name.as_bytes())?;
            for number in numbers(&store.extent) {
                put(out, &number.to_le_bytes())?;
            }
            for (pool, blocks) in store.saved_blocks(spec) {
                blocks.iter().try_for_each(|block| put(out, self.pools.get(pool).bytes(block)))?;
            }
            if let Some(block) = &store.sink_block {
                put(out, self.pools.get(spec.sink_pool).bytes(block))?;
            }
        }
        Ok(())
    }

    /// A new sequence from what [`Cache::save_sequence`] wrote of a cache of the same layers. With pages, which must be those
    /// of the sequence's own first tokens, the blocks of these are shared instead of read.
    ///
    /// # Errors
    /// [`Error::Saved`] for bytes that are no such sequence, are of other layers, or end early; [`Error::OutOfBlocks`],
    /// [`Error::OutOfMemory`]; those of [`Cache::add_sequence_from`]. The cache is then as before.
    pub fn restore_sequence(&mut self, bytes: &mut dyn Read, pages: &[PageId]) -> Result<SeqId, Error> {
        self.refuse_copies()?;
        let mut magic = [0; 8];
        take(bytes, &mut magic)?;
        if &magic != MAGIC {
            return Err(saved("it does not start as a saved sequence does"));
        }
        let version = take_u32(bytes)?;
        if version != VERSION {
            return Err(saved(format!("it has version {version}, and this program reads version {VERSION}")));
        }
        let layers = take_u32(bytes)? as usize;
        if layers != self.layers.len() {
            return Err(saved(format!("it has {layers} layers, and the cache has {}", self.layers.len())));
        }
        let id = if pages.is_empty() { self.add_sequence() } else { self.add_sequence_from(pages)? };
        match self.fill(id, bytes) {
            Ok(()) => Ok(id),
            Err(e) => {
                self.remove_sequence(id)?;
                Err(e)
            }
        }
    }

    /// Reads every layer of a sequence that holds nothing but shared pages.
    fn fill(&mut self, id: SeqId, bytes: &mut dyn Read) -> Result<(), Error> {
        let Self { layers, pools, sequences, .. } = self;
        let stores = sequences.get_mut(&id).ok_or(Error::NoSuchSequence { id: id.0 })?;
        let mut len = None;
        for (layer, (store, spec)) in stores.iter_mut().zip(layers.iter()).enumerate() {
            let extent = take_extent(layer, spec, bytes)?;
            if *len.get_or_insert(extent.len) != extent.len {
                return Err(saved(format!("layer {layer} has {} tokens, the ones before it others", extent.len)));
            }
            store.fill(spec, pools, extent, bytes)?;
        }
        Ok(())
    }

    fn refuse_copies(&self) -> Result<(), Error> {
        match self.arm {
            Arm::DequantOnce => Err(saved("sequences of the dequant-once arm are not saved: their copy is not")),
            _ => Ok(()),
        }
    }
}

impl Store {
    fn saved_blocks(&self, spec: &LayerSpec) -> [(usize, &[Block]); 2] {
        [(spec.record_pool, &self.groups), (spec.plain_pool, &self.tail)]
    }

    /// Becomes what `extent` says. Blocks that it holds already, shared ones of a prefix, are kept and their bytes skipped.
    fn fill(&mut self, spec: &LayerSpec, pools: &mut Pools, extent: Extent, bytes: &mut dyn Read) -> Result<(), Error> {
        let shared = self.extent;
        let (mut groups, mut tail) = (self.groups.drain(..), self.tail.drain(..));
        let mut kept = (Vec::new(), Vec::new());
        let of_pages = shared.first_group..shared.groups;
        let result = read_blocks(
            pools,
            spec.record_pool,
            bytes,
            extent.first_group..extent.groups,
            &of_pages,
            || groups.next(),
            &mut kept.0,
        );
        let first = |e: &Extent| e.tail_start / BLOCK_LEN;
        // Only where nothing is packed are plain rows part of pages.
        let of_pages = if spec.record.is_none() { first(&shared)..first(&shared) + shared.tail } else { 0..0 };
        let wanted = first(&extent)..first(&extent) + extent.tail;
        let result = result
            .and_then(|()| read_blocks(pools, spec.plain_pool, bytes, wanted, &of_pages, || tail.next(), &mut kept.1));
        groups.for_each(|b| pools.get_mut(spec.record_pool).free(b));
        tail.for_each(|b| pools.get_mut(spec.plain_pool).free(b));
        (self.groups, self.tail) = kept;
        // Whatever was read belongs to the store now, so that removing it frees it.
        self.extent =
            Extent { first_group: extent.first_group, groups: extent.first_group + self.groups.len(), ..extent };
        result?;
        if extent.sinks {
            match &self.sink_block {
                Some(_) => skip(bytes, pools.get(spec.sink_pool).block_bytes())?,
                None => {
                    let block = pools.alloc(spec.sink_pool)?;
                    let result = take(bytes, pools.get_mut(spec.sink_pool).bytes_mut(&block));
                    self.sink_block = Some(block);
                    result?;
                }
            }
        }
        Ok(())
    }
}

/// Reads the blocks of these numbers into `out`. Those of `shared` come from `next_shared` instead, in order, those before
/// the wanted ones left out.
fn read_blocks(
    pools: &mut Pools,
    pool: usize,
    bytes: &mut dyn Read,
    wanted: std::ops::Range<usize>,
    shared: &std::ops::Range<usize>,
    mut next_shared: impl FnMut() -> Option<Block>,
    out: &mut Vec<Block>,
) -> Result<(), Error> {
    for _ in shared.start..wanted.start.min(shared.end) {
        if let Some(block) = next_shared() {
            pools.get_mut(pool).free(block);
        }
    }
    for i in wanted {
        if shared.contains(&i) {
            skip(bytes, pools.get(pool).block_bytes())?;
            out.push(next_shared().ok_or_else(|| saved("its pages are not those of the sequence"))?);
        } else {
            let block = pools.alloc(pool)?;
            let result = take(bytes, pools.get_mut(pool).bytes_mut(&block));
            out.push(block);
            result?;
        }
    }
    Ok(())
}

impl LayerSpec {
    /// Everything that says what the bytes of a layer mean.
    fn name(&self) -> String {
        let shape = &self.shape;
        let visible = self.visible.map_or_else(|| "all".to_owned(), |n| n.to_string());
        let books = self.record.iter().flat_map(|record| [&record.k, &record.v]).filter_map(|half| match half {
            Half::Vectors(books) => Some(books.iter()),
            _ => None,
        });
        let books: String = books.flatten().map(|book| format!(" {:016x}", book.fingerprint())).collect();
        format!("kv{}d{} {} sees {visible}{books}", shape.kv_heads, shape.head_dim, self.scheme)
    }
}

fn numbers(extent: &Extent) -> [u64; 7] {
    let Extent { len, committed, tail_start, tail, first_group, groups, sinks } = *extent;
    [len, committed, tail_start, tail, first_group, groups, usize::from(sinks)].map(|n| n as u64)
}

/// The name and the numbers of a layer, checked: they are such as appending, committing and trimming can lead to.
fn take_extent(layer: usize, spec: &LayerSpec, bytes: &mut dyn Read) -> Result<Extent, Error> {
    let name = spec.name();
    let length = take_u32(bytes)? as usize;
    let mut found = vec![0; length.min(2 * name.len())];
    take(bytes, &mut found)?;
    if found != name.as_bytes() {
        let found = String::from_utf8_lossy(&found).into_owned();
        return Err(saved(format!("layer {layer} is `{found}`, and the cache's is `{name}`")));
    }
    let mut n = [0; 7];
    for n in &mut n {
        let mut number = [0; 8];
        take(bytes, &mut number)?;
        *n = u64::from_le_bytes(number);
    }
    if n.iter().any(|&n| n > MAX_LEN) {
        return Err(saved(format!("layer {layer} has numbers above {MAX_LEN}")));
    }
    let [len, committed, tail_start, tail, first_group, groups, sinks] = n.map(|n| n as usize);
    let extent = Extent { len, committed, tail_start, tail, first_group, groups, sinks: sinks > 0 };
    if extent.is_possible(spec) && sinks <= 1 {
        Ok(extent)
    } else {
        Err(saved(format!("the numbers of layer {layer} contradict each other")))
    }
}

impl Extent {
    /// Whether a sequence of this layer can stand so.
    fn is_possible(&self, spec: &LayerSpec) -> bool {
        let Self { len, committed, tail_start, tail, first_group, groups, sinks } = *self;
        if len == 0 {
            return *self == Self::default();
        }
        let packed = spec.scheme.packed_len(len);
        let rows = tail_start.is_multiple_of(BLOCK_LEN)
            && tail_start <= len
            && committed <= len
            && tail == (len - tail_start).div_ceil(BLOCK_LEN)
            && self.serves(spec, len);
        let records = match &spec.record {
            None => first_group == 0 && groups == 0,
            Some(layout) => {
                let least = packed.max(tail_start) / layout.group_len;
                first_group <= groups && groups >= least && groups <= len / layout.group_len
            }
        };
        rows && records && sinks == (spec.sinks.tokens > 0)
    }
}

fn put(out: &mut dyn Write, bytes: &[u8]) -> Result<(), Error> {
    out.write_all(bytes).map_err(|e| saved(e.to_string()))
}

fn take(bytes: &mut dyn Read, into: &mut [u8]) -> Result<(), Error> {
    bytes.read_exact(into).map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => saved("it ends early"),
        _ => saved(e.to_string()),
    })
}

fn take_u32(bytes: &mut dyn Read) -> Result<u32, Error> {
    let mut number = [0; 4];
    take(bytes, &mut number)?;
    Ok(u32::from_le_bytes(number))
}

fn skip(bytes: &mut dyn Read, n: usize) -> Result<(), Error> {
    let mut left = [0; 4096];
    let mut n = n;
    while n > 0 {
        let step = n.min(left.len());
        take(bytes, &mut left[..step])?;
        n -= step;
    }
    Ok(())
}

fn saved(why: impl Into<String>) -> Error {
    Error::Saved { why: why.into() }
}
