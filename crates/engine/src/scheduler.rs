//! What runs next. In: how far each sequence is; out: one step. Pure: no model, no cache, no clock.
//! NOT here: running it (engine.rs).
//!
//! Rule: prompts first, one after another, in chunks; then one token of every running sequence together.

/// How far a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Tokens in the cache.
    pub stored: usize,
    /// It has ended.
    pub finished: bool,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Rows `start..start + rows` of one prompt.
    Prefill {
        /// Index of the sequence.
        sequence: usize,
        /// First position.
        start: usize,
        /// Positions.
        rows: usize,
    },
    /// One token of each.
    Decode {
        /// Indices of the sequences.
        sequences: Vec<usize>,
    },
    /// Nothing is left to do.
    Idle,
}

/// Rows of a prefill step. Results do not depend on it (a query sees keys by position); this many keep all threads
/// busy with whole work items while the buffers of a step stay in a few MB.
pub const PREFILL_ROWS: usize = 256;

/// The next step of these sequences.
pub fn plan(states: &[State]) -> Plan {
    if let Some(sequence) = states.iter().position(|s| !s.finished && s.stored < s.prompt) {
        let State { prompt, stored, .. } = states[sequence];
        return Plan::Prefill { sequence, start: stored, rows: (prompt - stored).min(PREFILL_ROWS) };
    }
    let sequences: Vec<usize> = (0..states.len()).filter(|&i| !states[i].finished).collect();
    if sequences.is_empty() { Plan::Idle } else { Plan::Decode { sequences } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(prompt: usize, stored: usize, finished: bool) -> State {
        State { prompt, stored, finished }
    }

    #[test]
    fn prompts_come_first_in_chunks() {
        let long = PREFILL_ROWS + 5;
        assert_eq!(
            plan(&[state(3, 3, false), state(long, 0, false)]),
            Plan::Prefill { sequence: 1, start: 0, rows: PREFILL_ROWS }
        );
        assert_eq!(
            plan(&[state(long, PREFILL_ROWS, false)]),
            Plan::Prefill { sequence: 0, start: PREFILL_ROWS, rows: 5 }
        );
    }

    #[test]
    fn then_all_that_run_decode_together() {
        let states = [state(3, 3, false), state(4, 9, true), state(5, 7, false), state(9, 0, true)];
        assert_eq!(plan(&states), Plan::Decode { sequences: vec![0, 2] });
        assert_eq!(plan(&[state(1, 1, true)]), Plan::Idle);
        assert_eq!(plan(&[]), Plan::Idle);
    }
}
