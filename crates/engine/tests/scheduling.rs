//! The scheduler against a model of memory: whatever arrives, whatever is cancelled, however small the budget, nothing goes
//! over it, nobody starves, the oldest goes on, and rules of order hold in every step.

use kvant_engine::Phase;
use kvant_engine::scheduler::{Bounds, Moves, Outlook, State, moves, rows};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::cell::RefCell;

/// A request of the model.
#[derive(Debug, Clone)]
struct Job {
    number: usize,
    phase: Phase,
    prompt: usize,
    answer: usize,
    produced: usize,
    stored: usize,
    served: u64,
    /// Steps in a row that it did not run in, though everyone else arrived later.
    idle: usize,
    /// Shares its first page with others of the same prefix.
    prefix: usize,
}

impl Job {
    fn tokens(&self) -> usize {
        self.prompt + self.produced
    }

    fn state(&self) -> State {
        State { phase: self.phase, tokens: self.tokens(), stored: self.stored, served: self.served }
    }
}

/// Bytes of a sequence of `len` tokens: blocks of 16, and a block of sinks.
fn bytes(len: usize) -> usize {
    if len == 0 { 0 } else { len.div_ceil(16) * 16 + 4 }
}

/// Rows take their blocks, and while they run one byte each for their plain rows.
fn growth(stored: usize, rows: usize) -> usize {
    bytes(stored + rows) - bytes(stored) + rows
}

struct World {
    jobs: Vec<Job>,
    budget: usize,
    bounds: Bounds,
}

impl World {
    fn held(&self) -> usize {
        self.jobs.iter().filter(|j| j.phase == Phase::Running).map(|j| bytes(j.stored)).sum()
    }
}

impl Outlook for World {
    fn free(&self) -> usize {
        self.budget - self.held()
    }

    fn need(&self, rows: &[(usize, usize)]) -> usize {
        rows.iter().map(|&(i, n)| growth(self.jobs[i].stored, n)).sum()
    }

    fn held(&self, i: usize) -> usize {
        bytes(self.jobs[i].stored)
    }

    fn rest(&self, i: usize) -> usize {
        let job = &self.jobs[i];
        let now = if job.phase == Phase::Running { bytes(job.stored) } else { 0 };
        bytes(job.tokens() + 1) + self.bounds.step_tokens - now
    }

    fn awaits(&self, i: usize, entering: &[usize]) -> bool {
        let Some(page) = self.bounds.page_len else { return false };
        let own = &self.jobs[i];
        let computes = |(k, other): (usize, &Job)| {
            k != i
                && (other.phase == Phase::Running || entering.contains(&k))
                && other.prefix == own.prefix
                && other.stored < page
                && other.tokens() > page
        };
        own.tokens() > page && self.jobs.iter().enumerate().any(computes)
    }
}

/// What a request takes at most on its way, alone.
fn most(prompt: usize, answer: usize, step: usize) -> usize {
    bytes(prompt + answer) + step
}

/// What a run saw.
#[derive(Debug, Default)]
struct Seen {
    arrived: usize,
    finished: usize,
    cancelled: usize,
    preempted: usize,
    mixed: usize,
}

/// Runs arrivals (steps between them, prompt, answer, prefix, and after how many steps it is cancelled) to the end.
fn run(arrivals: &[(usize, usize, usize, usize, Option<usize>)], budget: usize, bounds: Bounds) -> Seen {
    let mut world = World { jobs: Vec::new(), budget, bounds };
    let (mut seen, mut step, mut next, mut wait) = (Seen::default(), 0u64, 0, 0);
    let mut cancels: Vec<(u64, usize)> = Vec::new();
    while next < arrivals.len() || !world.jobs.is_empty() {
        while next < arrivals.len() && wait == 0 {
            let (gap, prompt, answer, prefix, cancel) = arrivals[next];
            wait = gap;
            let job = Job {
                number: next,
                phase: Phase::Waiting,
                prompt,
                answer,
                produced: 0,
                stored: 0,
                served: 0,
                idle: 0,
                prefix,
            };
            if most(prompt, answer, bounds.step_tokens) <= budget {
                world.jobs.push(job);
                seen.arrived += 1;
                cancels.extend(cancel.map(|after| (step + after as u64, next)));
            }
            next += 1;
        }
        wait = wait.saturating_sub(1);
        cancels.retain(|&(at, number)| {
            if at > step {
                return true;
            }
            let before = world.jobs.len();
            world.jobs.retain(|j| j.number != number);
            seen.cancelled += before - world.jobs.len();
            false
        });
        step += 1;
        one_step(&mut world, step, &mut seen);
    }
    assert_eq!(seen.arrived, seen.finished + seen.cancelled, "everyone ends");
    seen
}

fn one_step(world: &mut World, step: u64, seen: &mut Seen) {
    let states: Vec<_> = world.jobs.iter().map(Job::state).collect();
    let bounds = world.bounds;
    let Moves { out, enter } = moves(&states, &bounds, world);
    assert!(out.is_empty() || enter.is_empty(), "nobody enters while others leave");
    assert!(out.windows(2).all(|w| w[0] > w[1]), "the youngest leaves first");
    let oldest = states.iter().position(|s| s.phase == Phase::Running);
    for &i in &out {
        assert_ne!(Some(i), oldest, "the oldest never leaves");
        assert!(
            states[i..]
                .iter()
                .skip(1)
                .enumerate()
                .all(|(k, s)| s.phase != Phase::Running || out.contains(&(i + 1 + k)))
        );
        world.jobs[i].phase = if world.jobs[i].stored == 0 { Phase::Waiting } else { Phase::Swapped };
        seen.preempted += 1;
    }
    let swapped_left = |i: &usize| states[*i].phase == Phase::Swapped && !enter.contains(i);
    for &i in &enter {
        if states[i].phase == Phase::Waiting {
            assert!(!(0..states.len()).any(|k| swapped_left(&k)), "who left comes back before anyone new enters");
            let page = bounds.page_len.unwrap_or(usize::MAX);
            let passed = |k: usize| states[k].phase == Phase::Waiting && !enter.contains(&k);
            let ahead = (0..i).filter(|&k| passed(k));
            ahead.for_each(|k| assert!(world.jobs[k].tokens() > page, "only who awaits a prefix is passed"));
        }
        // A prefix that is already there counts as stored.
        let page = bounds.page_len.unwrap_or(usize::MAX);
        let shared = world
            .jobs
            .iter()
            .any(|o| o.phase == Phase::Running && o.prefix == world.jobs[i].prefix && o.stored >= page);
        let job = &mut world.jobs[i];
        if shared && job.phase == Phase::Waiting && job.tokens() > page {
            job.stored = page;
        }
        job.phase = Phase::Running;
    }
    let running = world.jobs.iter().filter(|j| j.phase == Phase::Running).count();
    assert!(running <= bounds.max_running);
    assert!(world.held() <= world.budget, "{} of {}", world.held(), world.budget);
    assert!(running > 0 || world.jobs.is_empty(), "somebody always runs");

    let states: Vec<_> = world.jobs.iter().map(Job::state).collect();
    let rows = rows(&states, &bounds, world);
    assert_eq!(rows.is_empty(), world.jobs.is_empty());
    let total: usize = rows.iter().map(|r| r.1).sum();
    let decoding = rows.iter().filter(|(i, _)| states[*i].tokens - states[*i].stored == 1).count();
    assert!(total <= bounds.step_tokens.max(decoding + 1), "{total} rows");
    assert!(world.need(&rows) <= world.free(), "{} needed, {} free", world.need(&rows), world.free());
    let all = states.iter().filter(|s| s.phase == Phase::Running && s.tokens - s.stored == 1).count();
    if !bounds.prompts_first {
        assert_eq!(decoding, all, "everyone who decodes gets a row in every step");
        seen.mixed += usize::from(decoding > 0 && total > decoding);
    }
    for &(i, n) in &rows {
        let job = &mut world.jobs[i];
        if job.tokens() - job.stored > 1 {
            job.served = step;
            let page = bounds.page_len.unwrap_or(usize::MAX);
            assert!(job.stored / page == (job.stored + n - 1) / page, "chunks end at pages");
        }
        assert!(n > 0 && job.stored + n <= job.tokens());
        job.stored += n;
        job.idle = 0;
    }
    for (i, job) in world.jobs.iter_mut().enumerate() {
        if i == 0 && !rows.iter().any(|r| r.0 == i) {
            job.idle += 1;
        }
        if job.stored == job.tokens() {
            job.produced += 1;
        }
    }
    let before = world.jobs.len();
    world.jobs.retain(|j| j.produced < j.answer);
    seen.finished += before - world.jobs.len();
    // Whoever arrived first ends in bounded time, so everybody does: nobody starves.
    if let Some(first) = world.jobs.first().filter(|_| !bounds.prompts_first) {
        let bound = 700;
        assert!(first.idle <= bound, "the oldest of all did not run for {} steps: {first:?}", first.idle);
    }
}

fn arrival() -> impl Strategy<Value = (usize, usize, usize, usize, Option<usize>)> {
    let prompt = prop_oneof![4 => 1usize..40, 2 => 40usize..200, 1 => 200usize..900];
    let cancel = prop_oneof![9 => Just(None), 1 => (0usize..60).prop_map(Some)];
    let answer = prop_oneof![4 => 1usize..40, 1 => 40usize..300];
    (0usize..6, prompt, answer, 0usize..4, cancel)
}

/// 10^5 arrivals in all: 200 worlds of 500.
#[test]
fn everyone_ends_within_the_budget_whatever_arrives() {
    let world = (
        proptest::collection::vec(arrival(), 500),
        1000usize..6000,
        1usize..24,
        prop_oneof![Just(32usize), Just(64), Just(256)],
        prop_oneof![Just(None), Just(Some(64usize)), Just(Some(512))],
        any::<bool>(),
    );
    let mut total = Seen::default();
    let config = Config { max_shrink_iters: 0, cases: 200, failure_persistence: None, ..Config::default() };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let totals = RefCell::new(&mut total);
    TestRunner::new_with_rng(config, random)
        .run(&world, |(arrivals, budget, max_running, step_tokens, page_len, prompts_first)| {
            let bounds = Bounds { max_running, step_tokens, page_len, prompts_first };
            let seen = run(&arrivals, budget, bounds);
            let mut totals = totals.borrow_mut();
            totals.arrived += seen.arrived;
            totals.finished += seen.finished;
            totals.cancelled += seen.cancelled;
            totals.preempted += seen.preempted;
            totals.mixed += seen.mixed;
            Ok(())
        })
        .unwrap();
    println!("{total:?}");
    // The test is about what it means to be about.
    assert!(total.arrived > 90_000 && total.cancelled > 1_000 && total.preempted > 1_000 && total.mixed > 10_000);
}

fn waiting(tokens: usize) -> Job {
    Job {
        number: 0,
        phase: Phase::Waiting,
        prompt: tokens,
        answer: 1,
        produced: 0,
        stored: 0,
        served: 0,
        idle: 0,
        prefix: tokens,
    }
}

/// A long prompt beside one that decodes: the decoding one has a row in every step, and a short prompt that comes later does
/// not wait for the long one.
#[test]
fn a_long_prompt_holds_nobody_up() {
    let bounds = Bounds { max_running: 8, step_tokens: 256, page_len: None, prompts_first: false };
    let long = Job { phase: Phase::Running, ..waiting(7000) };
    let decoding = Job { phase: Phase::Running, prompt: 10, stored: 10, produced: 1, ..waiting(10) };
    let short = Job { phase: Phase::Running, ..waiting(20) };
    let mut world = World { jobs: vec![decoding, long], budget: 1 << 20, bounds };
    let states = |w: &World| w.jobs.iter().map(Job::state).collect::<Vec<_>>();
    assert_eq!(rows(&states(&world), &bounds, &world), [(0, 1), (1, 255)]);
    (world.jobs[1].stored, world.jobs[1].served) = (255, 1);
    world.jobs.push(short);
    assert_eq!(rows(&states(&world), &bounds, &world), [(0, 1), (1, 235), (2, 20)]);
    // Another one as short, though the long prompt was not served last: this step is the long one's.
    (world.jobs[2].stored, world.jobs[2].produced, world.jobs[2].answer) = (20, 1, 9);
    world.jobs.push(Job { phase: Phase::Running, stored: 1, served: 2, ..waiting(300) });
    assert_eq!(rows(&states(&world), &bounds, &world), [(0, 1), (1, 254), (2, 1)]);
}

#[test]
fn equal_prompts_end_in_their_order() {
    let bounds = Bounds { max_running: 8, step_tokens: 256, page_len: None, prompts_first: false };
    let jobs = (0..3).map(|_| Job { phase: Phase::Running, ..waiting(600) }).collect();
    let mut world = World { jobs, budget: 1 << 20, bounds };
    let mut served = Vec::new();
    for step in 1..=8 {
        let states: Vec<_> = world.jobs.iter().map(Job::state).collect();
        for (i, n) in rows(&states, &bounds, &world) {
            (world.jobs[i].stored, world.jobs[i].served) = (world.jobs[i].stored + n, step);
            if world.jobs[i].stored == 600 {
                served.push(i);
                world.jobs[i].phase = Phase::Swapped;
            }
        }
    }
    assert_eq!(served, [0, 1, 2]);
}

#[test]
fn equal_prefixes_wait_for_the_one_that_computes_them() {
    let bounds = Bounds { max_running: 8, step_tokens: 256, page_len: Some(512), prompts_first: false };
    let clones = (0..3).map(|_| waiting(1500)).collect::<Vec<_>>();
    let other = Job { prefix: 1, ..waiting(100) };
    let jobs = [clones, vec![other]].concat();
    let world = World { jobs, budget: 1 << 20, bounds };
    let states: Vec<_> = world.jobs.iter().map(Job::state).collect();
    assert_eq!(moves(&states, &bounds, &world), Moves { out: vec![], enter: vec![0, 3] });
}
