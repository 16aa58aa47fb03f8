//! What an engine is doing, as numbers. Out: plain data for figures and logs.
//! NOT here: how they come about (engine.rs).

use crate::scheduler::Phase;
use kvant_kv::CacheBytes;

/// What an engine holds and has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Requests that nothing is done for yet.
    pub waiting: usize,
    /// Requests in the cache.
    pub running: usize,
    /// Requests moved out of the cache.
    pub swapped: usize,
    /// Each request that has not ended.
    pub requests: Vec<RequestStatus>,
    /// Bytes the cache may take.
    pub budget_bytes: Option<usize>,
    /// Bytes it holds, by use; `f16_bytes_equivalent` counts shared tokens once per request.
    pub bytes: CacheBytes,
    /// Bytes of them that no request needs: pages and sessions kept for requests to come.
    pub kept_bytes: usize,
    /// Bytes of saved requests outside the cache.
    pub swapped_bytes: usize,
    /// Blocks in use.
    pub blocks_used: usize,
    /// Blocks of several owners, among those.
    pub blocks_shared: usize,
    /// Blocks that the budget still has room for, if all were as large as the largest; None without a budget.
    pub blocks_free: Option<usize>,
    /// Pages kept for requests to come.
    pub pages: usize,
    /// Finished requests kept whole for a next turn.
    pub sessions: usize,
    /// Counts since the engine began.
    pub totals: Totals,
}

/// One request on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestStatus {
    /// Its number.
    pub number: usize,
    /// Where it stands.
    pub phase: Phase,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens of it in the cache (or saved).
    pub stored: usize,
    /// Bytes it holds in the cache, shared ones included.
    pub bytes: usize,
}

/// Counts that only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Steps of the model.
    pub steps: u64,
    /// Tokens of prompts of requests that entered the cache.
    pub prompt_tokens: u64,
    /// Of them taken from shared pages or kept sessions.
    pub cached_tokens: u64,
    /// Tokens chosen.
    pub output_tokens: u64,
    /// Requests moved out of the cache for want of memory.
    pub preemptions: u64,
    /// Pages and sessions given up for want of memory.
    pub evictions: u64,
}
