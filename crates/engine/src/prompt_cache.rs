//! A prompt's cache in a file. In: tokens that an engine has computed; out: a file from which another run goes on as if it
//! had computed them itself, to the bit. A file of another model, scheme or version, a truncated or a changed one is an error.
//! NOT here: the bytes of a sequence (kvant-kv).
//!
//! Format, little-endian: `kvantpmt`, version u32, SHA-256 of the model's and of the kind of its products, u32 length and text of the schemes by layer, u32
//! count and the tokens, the sequence, and SHA-256 of all of that. The sum is checked before anything else is believed.

use crate::engine::Engine;
use crate::model::Basis;
use crate::{Error, Event, Generation, Request};
use kvant_kv::Rows;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::Path;

const MAGIC: &[u8; 8] = b"kvantpmt";
const VERSION: u32 = 1;
const SUM_BYTES: u64 = 32;

/// Writes through to a file and sums what passes.
struct Summed<W> {
    inner: W,
    sum: Sha256,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.sum.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

impl Engine {
    /// Computes a prompt and keeps its cache in a file: all tokens but the last, which runs again when the file is used, for
    /// the logits that choose the next one. What was being decoded is dropped; the prompt stays as a session.
    ///
    /// # Errors
    /// [`Error::PromptCache`] when the file cannot be written, and those of [`Engine::generate`].
    pub fn save_prompt(&mut self, tokens: &[u32], path: &Path) -> Result<(), Error> {
        self.check_prompt(tokens)?;
        // A rename would put a file in the place of a device, a pipe or a link.
        if std::fs::symlink_metadata(path).is_ok_and(|m| !m.is_file()) {
            let why = "there is something that is not a regular file".into();
            return Err(Error::PromptCache { path: path.into(), why });
        }
        self.clear()?;
        self.save_checked(tokens, path).or_else(|e| {
            // A half-stored prompt is nobody's.
            self.clear()?;
            Err(e)
        })
    }

    fn save_checked(&mut self, tokens: &[u32], path: &Path) -> Result<(), Error> {
        let stored = &tokens[..tokens.len() - 1];
        let seq = self.cache_mut().add_sequence();
        let mut start = 0;
        for chunk in stored.chunks(crate::STEP_TOKENS) {
            let positions: Vec<usize> = (start..start + chunk.len()).collect();
            self.forward(&[Rows { seq, rows: chunk.len() }], chunk, &positions, &[])?;
            start += chunk.len();
        }
        let no = |why: String| Error::PromptCache { path: path.into(), why };
        let failed = |e: std::io::Error| no(e.to_string());
        // Beside the file and renamed when whole: whoever reads meanwhile finds the old one.
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let file = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
        let mut out = Summed { inner: BufWriter::with_capacity(1 << 20, file), sum: Sha256::new() };
        let schemes = self.scheme_texts()?;
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend(self.computed_by()?);
        head.extend((schemes.len() as u32).to_le_bytes());
        head.extend(schemes.as_bytes());
        head.extend((stored.len() as u32).to_le_bytes());
        head.extend(stored.iter().flat_map(|t| t.to_le_bytes()));
        out.write_all(&head).map_err(failed)?;
        self.cache_mut().save_sequence(seq, &mut out).map_err(|e| no(e.to_string()))?;
        let Summed { mut inner, sum } = out;
        inner.write_all(&sum.finalize()).map_err(failed)?;
        let file = inner.into_inner().map_err(|e| failed(e.into_error()))?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        self.keep_session(seq, stored.to_vec());
        Ok(())
    }

    /// Brings the cache of [`Engine::save_prompt`] back; what was being decoded is dropped. Returns its tokens: a request
    /// that begins with them goes on from there.
    ///
    /// # Errors
    /// [`Error::PromptCache`] says what does not fit; the engine is then empty.
    pub fn restore_prompt(&mut self, path: &Path) -> Result<Vec<u32>, Error> {
        self.clear()?;
        let no = |why: String| Error::PromptCache { path: path.into(), why };
        // Opening a pipe would wait for a writer.
        if std::fs::metadata(path).is_ok_and(|m| !m.is_file()) {
            return Err(no("it is not a regular file".into()));
        }
        let mut file = File::open(path).map_err(|e| no(e.to_string()))?;
        let bytes = summed_bytes(&mut file).map_err(no)?;
        let mut file = BufReader::with_capacity(1 << 20, file).take(bytes);
        let computed_by = self.computed_by()?;
        let schemes = self.scheme_texts()?;
        let vocabulary = self.model().config().vocabulary;
        let tokens = read_head(&mut file, &computed_by, &schemes, vocabulary).map_err(no)?;
        let seq = self.cache_mut().restore_sequence(&mut file, &[]).map_err(|e| no(e.to_string()))?;
        let held = self.cache_mut().len(0, seq)?;
        if held != tokens.len() || file.limit() > 0 {
            self.clear()?;
            return Err(no(format!("it has {} tokens and the cache of {held}", tokens.len())));
        }
        self.keep_session(seq, tokens.clone());
        Ok(tokens)
    }

    /// [`Engine::generate`] for one request that goes on from what [`Engine::save_prompt`] or [`Engine::restore_prompt`] left.
    ///
    /// # Errors
    /// Those of [`Engine::generate`].
    pub fn generate_from_session(
        &mut self,
        request: Request,
        on_event: &mut dyn FnMut(&Event) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        self.run_all(vec![request], on_event)
    }

    /// What says which numbers were stored: the model and how its weights are multiplied.
    fn computed_by(&self) -> Result<[u8; 32], Error> {
        let exact = self.model().products() == "f32";
        Ok(Sha256::new().chain_update(self.model().sha256()?).chain_update([u8::from(exact)]).finalize().into())
    }

    /// What says how numbers were turned and stored: schemes with their rotations, and behind those that turn by more than their
    /// text says (loud channels, smoothing) a sum of that. Centroids are in the sequence's own names.
    fn scheme_texts(&self) -> Result<String, Error> {
        let schemes = self.schemes()?;
        let sum = |basis: &Basis| {
            let orders = basis.key_order.iter().flat_map(|o| o.iter()).flatten().flat_map(|c| c.to_le_bytes());
            let smooth = basis.smooth.iter().flat_map(|s| s.iter()).flat_map(|x| x.to_le_bytes());
            let bytes: Vec<u8> = orders.chain(smooth).collect();
            let sum = Sha256::digest(&bytes);
            (!bytes.is_empty()).then(|| sum[..8].iter().map(|b| format!("{b:02x}")).collect::<String>())
        };
        let texts = schemes.bases().iter().enumerate().map(|(layer, basis)| match sum(basis) {
            Some(sum) => format!("{}#{sum}", schemes.text(layer)),
            None => schemes.text(layer),
        });
        Ok(texts.collect::<Vec<_>>().join(" "))
    }
}

/// Checks the sum behind a file's bytes and returns how many bytes it is of; the file stands at its start again.
fn summed_bytes(file: &mut File) -> Result<u64, String> {
    let failed = |e: std::io::Error| e.to_string();
    let length = file.metadata().map_err(failed)?.len();
    let bytes = length.checked_sub(SUM_BYTES).ok_or("it is too short to be one")?;
    let mut magic = [0; 8];
    file.read_exact(&mut magic).map_err(failed)?;
    if &magic != MAGIC {
        return Err("it does not start as a prompt cache does".into());
    }
    file.rewind().map_err(failed)?;
    let mut sum = Sha256::new();
    let (mut reader, mut chunk) = (Read::by_ref(file).take(bytes), vec![0; 1 << 20]);
    loop {
        match reader.read(&mut chunk).map_err(failed)? {
            0 => break,
            n => sum.update(&chunk[..n]),
        }
    }
    let mut expected = [0; SUM_BYTES as usize];
    file.read_exact(&mut expected).map_err(failed)?;
    if sum.finalize().as_slice() != expected {
        return Err("its checksum does not fit: it is truncated or was changed".into());
    }
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    Ok(bytes)
}

/// Reads what stands before the sequence; returns the tokens.
fn read_head(
    file: &mut dyn Read,
    computed_by: &[u8; 32],
    schemes: &str,
    vocabulary: usize,
) -> Result<Vec<u32>, String> {
    let mut take = |n: usize| -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        let read = Read::take(&mut *file, n as u64).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
        if read == n { Ok(bytes) } else { Err("it ends early".into()) }
    };
    let number = |bytes: Vec<u8>| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
    take(MAGIC.len())?;
    let version = number(take(4)?);
    if version != VERSION {
        return Err(format!("it has version {version}, and this program reads version {VERSION}"));
    }
    if take(32)? != computed_by {
        return Err("it is of another model, or of products of other precision".into());
    }
    let length = number(take(4)?) as usize;
    let found = String::from_utf8_lossy(&take(length)?).into_owned();
    if found != schemes {
        let first = |texts: &str| texts.split(' ').next().unwrap_or_default().to_owned();
        return Err(format!("it is of other schemes ({} ..., here {} ...)", first(&found), first(schemes)));
    }
    let count = number(take(4)?) as usize;
    let tokens: Vec<u32> =
        take(4 * count)?.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
    match tokens.iter().find(|&&t| t as usize >= vocabulary) {
        Some(token) => Err(format!("token {token} is beyond the vocabulary of {vocabulary}")),
        None => Ok(tokens),
    }
}
