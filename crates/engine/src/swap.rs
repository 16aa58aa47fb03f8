//! Requests that were moved out of the cache. In: a sequence of the cache; out: the same bytes in main memory or in a file
//! without a name, and the sequence back.
//! NOT here: who is moved (scheduler.rs), what the bytes are (kvant-kv).

use crate::Error;
use kvant_kv::{Cache, PageId, SeqId};
use std::fs::File;
use std::io::{BufReader, BufWriter, Seek, Write};
use std::path::Path;

/// A saved sequence.
pub struct Swapped {
    kept: Kept,
    /// Bytes that it takes where it is.
    pub bytes: usize,
}

enum Kept {
    Memory(Vec<u8>),
    File(File),
}

impl Swapped {
    /// Saves a sequence to a file in `folder`, or to main memory. It stays in the cache.
    ///
    /// # Errors
    /// [`Error::Swap`].
    pub fn save(cache: &Cache, seq: SeqId, folder: Option<&Path>) -> Result<Self, Error> {
        let no = |why: String| Error::Swap { what: "written", why };
        match folder {
            None => {
                let mut bytes =
                    Vec::with_capacity(cache.sequence_bytes(seq).map_err(|e| no(e.to_string()))? + (64 << 10));
                cache.save_sequence(seq, &mut bytes).map_err(|e| no(e.to_string()))?;
                Ok(Self { bytes: bytes.capacity(), kept: Kept::Memory(bytes) })
            }
            Some(folder) => {
                // The operating system frees a file without a name with the process, however that ends.
                let file = tempfile::tempfile_in(folder).map_err(|e| no(e.to_string()))?;
                let mut writer = BufWriter::with_capacity(1 << 20, file);
                cache.save_sequence(seq, &mut writer).map_err(|e| no(e.to_string()))?;
                let mut file = writer.into_inner().map_err(|e| no(e.to_string()))?;
                file.flush().map_err(|e| no(e.to_string()))?;
                let bytes = file.stream_position().map_err(|e| no(e.to_string()))? as usize;
                Ok(Self { bytes, kept: Kept::File(file) })
            }
        }
    }

    /// Brings the sequence back; its first tokens share these pages.
    ///
    /// # Errors
    /// [`Error::Kv`] when the cache has no room, and then it can be tried again; [`Error::Swap`].
    pub fn restore(&mut self, cache: &mut Cache, pages: &[PageId]) -> Result<SeqId, Error> {
        let no = |why: String| Error::Swap { what: "read back", why };
        let restored = match &mut self.kept {
            Kept::Memory(bytes) => cache.restore_sequence(&mut &bytes[..], pages),
            Kept::File(file) => {
                file.rewind().map_err(|e| no(e.to_string()))?;
                cache.restore_sequence(&mut BufReader::with_capacity(1 << 20, file), pages)
            }
        };
        restored.map_err(|e| match e {
            e @ (kvant_kv::Error::OutOfBlocks { .. } | kvant_kv::Error::OutOfMemory { .. }) => e.into(),
            e => no(e.to_string()),
        })
    }
}
