//! What runs next. In: how far each request is, limits, and what memory looks like; out: who enters and leaves the cache,
//! and how many rows each gets in a step. Pure: no model, no cache, no clock.
//! NOT here: running it (engine.rs), what memory costs (kvant-kv).
//!
//! Rules. Requests stand in order of arrival. Everyone who decodes gets one row in every step; what is left of a step's
//! rows goes to prompts in chunks, in every other step to the oldest first, else to the one that has least left: a short
//! prompt waits for a step or two and not for a long one, equal ones end in their order, and none starves. When memory is short the youngest leaves; who left comes back before anyone new enters, the oldest first; new ones
//! enter in order of arrival. The oldest request in the cache never leaves, so that everyone becomes the oldest and ends.

/// Where a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing of it is in the cache yet.
    Waiting,
    /// It is in the cache.
    Running,
    /// It was moved out of the cache.
    Swapped,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Where it stands.
    pub phase: Phase,
    /// Tokens that are to be stored before the next one is chosen: one more than `stored` while it decodes.
    pub tokens: usize,
    /// Tokens stored.
    pub stored: usize,
    /// The step that last gave it rows of its prompt; 0 before the first.
    pub served: u64,
}

impl State {
    fn left(&self) -> usize {
        self.tokens - self.stored
    }

    fn decodes(&self) -> bool {
        self.phase == Phase::Running && self.left() == 1
    }

    fn prefills(&self) -> bool {
        self.phase == Phase::Running && self.left() > 1
    }
}

/// What bounds a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Requests in the cache at once.
    pub max_running: usize,
    /// Rows of one step.
    pub step_tokens: usize,
    /// Chunks of prompts end at multiples of this, so that pages can be shared as they are completed.
    pub page_len: Option<usize>,
    /// Nobody decodes while there are prompts in the cache, and these come one after another: for measurements.
    pub prompts_first: bool,
}

/// What the scheduler asks about memory and prefixes. Requests are named by their place in the states.
pub trait Outlook {
    /// Bytes that are free or can be made so without moving a request out.
    fn free(&self) -> usize;
    /// Bytes that these rows of requests in the cache take at most while they run.
    fn need(&self, rows: &[(usize, usize)]) -> usize;
    /// Bytes that moving a request out of the cache frees.
    fn held(&self, request: usize) -> usize;
    /// Bytes that a request takes from now on until its next token can be chosen, wherever it stands.
    fn rest(&self, request: usize) -> usize;
    /// Whether another request, in the cache or among those entering it, computes a prefix that this one would share.
    fn awaits(&self, request: usize, entering: &[usize]) -> bool;
}

/// Who leaves and who enters the cache before a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Moves {
    /// Out of the cache, in this order.
    pub out: Vec<usize>,
    /// Into the cache, in this order: swapped ones, then waiting ones.
    pub enter: Vec<usize>,
}

/// Rows of a prompt that the oldest request is to get at least, however short memory is.
const LEAST_ROWS: usize = 32;

/// Who leaves and who enters.
pub fn moves(states: &[State], bounds: &Bounds, outlook: &dyn Outlook) -> Moves {
    let mut running: Vec<usize> = (0..states.len()).filter(|&i| states[i].phase == Phase::Running).collect();
    let mut free = outlook.free();
    let mut moves = Moves::default();
    while running.len() > 1 && outlook.need(&least_rows(states, &running)) > free {
        let youngest = running.pop().expect("more than one runs");
        free += outlook.held(youngest);
        moves.out.push(youngest);
    }
    if !moves.out.is_empty() {
        return moves;
    }
    // What those in the cache will take is not free for others.
    let mut taken = outlook.need(&least_rows(states, &running));
    taken += running.iter().filter(|&&i| states[i].prefills()).map(|&i| outlook.rest(i)).sum::<usize>();
    let of = |phase| (0..states.len()).filter(move |&i| states[i].phase == phase);
    let mut room = bounds.max_running.saturating_sub(running.len());
    let mut fits = |i: usize, alone: bool| {
        let fits = room > 0 && (alone || taken + outlook.rest(i) <= free);
        if fits {
            room -= 1;
            taken += outlook.rest(i);
        }
        fits
    };
    let mut alone = running.is_empty();
    for i in of(Phase::Swapped) {
        if !fits(i, alone) {
            return moves;
        }
        alone = false;
        moves.enter.push(i);
    }
    for i in of(Phase::Waiting) {
        if outlook.awaits(i, &moves.enter) {
            continue;
        }
        if !fits(i, alone) {
            return moves;
        }
        alone = false;
        moves.enter.push(i);
    }
    moves
}

/// Rows of each request in the next step, by arrival. Empty: nobody is in the cache.
pub fn rows(states: &[State], bounds: &Bounds, outlook: &dyn Outlook) -> Vec<(usize, usize)> {
    let running: Vec<usize> = (0..states.len()).filter(|&i| states[i].phase == Phase::Running).collect();
    let mut rows: Vec<_> = running.iter().filter(|&&i| states[i].decodes()).map(|&i| (i, 1)).collect();
    let mut left = bounds.step_tokens.saturating_sub(rows.len()).max(1);
    let free = outlook.free();
    let mut prompts: Vec<_> = running.iter().copied().filter(|&i| states[i].prefills()).collect();
    if bounds.prompts_first && !prompts.is_empty() {
        prompts.truncate(1);
        rows.clear();
        left = bounds.step_tokens;
    }
    prompts.sort_by_key(|&i| (states[i].left(), i));
    let oldest = prompts.iter().copied().min();
    let newest_turn = prompts.iter().map(|&i| states[i].served).max();
    if let Some(oldest) = oldest {
        let its_turn = Some(states[oldest].served) < newest_turn;
        // When memory is short, the oldest goes on first: the others could take what it needs.
        let short = || {
            running.first() == Some(&oldest)
                && outlook.need(&least_rows(states, &running)) + outlook.rest(oldest) > free
        };
        if its_turn || short() {
            prompts.retain(|&i| i != oldest);
            prompts.insert(0, oldest);
        }
    }
    for i in prompts {
        let State { tokens, stored, .. } = states[i];
        let to_page = bounds.page_len.map_or(usize::MAX, |page| page - stored % page);
        let mut n = left.min(tokens - stored).min(to_page);
        while n > 0 {
            rows.push((i, n));
            // Alone in a step, a request runs whatever is free: it was let in because it fits.
            if outlook.need(&rows) <= free || n <= LEAST_ROWS && rows.len() == 1 {
                break;
            }
            rows.pop();
            n = if n > LEAST_ROWS { (n / 2).max(LEAST_ROWS) } else { 0 };
        }
        left -= n;
        if left == 0 {
            break;
        }
    }
    rows.sort_unstable();
    rows
}

/// The rows that a step must have: one of everyone who decodes, some of the oldest if it does not.
fn least_rows(states: &[State], running: &[usize]) -> Vec<(usize, usize)> {
    let oldest = running.first().copied();
    let least = |&i: &usize| {
        let n = if states[i].decodes() { 1 } else { states[i].left().min(LEAST_ROWS) };
        (states[i].decodes() || Some(i) == oldest).then_some((i, n))
    };
    running.iter().filter_map(least).collect()
}
