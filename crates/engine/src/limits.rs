//! What an engine may use. In and out: plain data, checked.
//! NOT here: who gets what of it (scheduler.rs).

use crate::Error;
use std::path::PathBuf;

/// What an engine may use, and whether requests share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the cache: all that it holds together, never more. None: what the machine gives.
    pub kv_memory: Option<usize>,
    /// Requests in the cache at once; others wait.
    pub max_running: usize,
    /// Rows of one step: one of each request that decodes, the rest for chunks of prompts. None: as many as keep the device busy
    /// ([`STEP_TOKENS`] on a CPU, 2,048 on a GPU, which takes no more).
    pub step_tokens: Option<usize>,
    /// All prompts are computed, one after another, before anyone decodes: for measurements. Otherwise chunks of prompts run
    /// beside those that decode.
    pub prompts_first: bool,
    /// Requests share the pages of equal prefixes, and what a finished request held is kept for the next turn until the
    /// memory is needed. Asks for `kv_memory`.
    pub share_prefixes: bool,
    /// Folder of what is moved out when memory is short; None: main memory.
    pub swap: Option<PathBuf>,
}

/// Rows of a step on a CPU. Results do not depend on it (a query sees keys by position); this many keep all threads busy with whole
/// work items while the buffers of a step stay in a few MB.
pub const STEP_TOKENS: usize = 256;

impl Default for Limits {
    /// No bound on memory or requests, prompts first, nothing shared.
    fn default() -> Self {
        let (kv_memory, max_running, step_tokens) = (None, usize::MAX, None);
        Self { kv_memory, max_running, step_tokens, prompts_first: true, share_prefixes: false, swap: None }
    }
}

impl Limits {
    /// Checks the numbers.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn check(&self) -> Result<(), Error> {
        let no = |option, why: &str| Err(Error::Limit { option, why: why.into() });
        if self.max_running == 0 {
            return no("max_running", "at least one request must run");
        }
        if self.step_tokens == Some(0) {
            return no("step_tokens", "a step needs at least one row");
        }
        if self.share_prefixes && self.kv_memory.is_none() {
            return no("share_prefixes", "kept prefixes fill any memory, so kv_memory must say how much there is");
        }
        if let Some(folder) = self.swap.as_ref().filter(|folder| !folder.is_dir()) {
            return no("swap", &format!("{} is no folder", folder.display()));
        }
        Ok(())
    }
}
