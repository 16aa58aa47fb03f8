//! What attention must not read: keys before the first that the oldest row of a call sees, which a store may have freed.
//! In: a source that knows how far back it may be asked; out: a panic where it is asked for more.
//! NOT here: what is computed of the rest (parity.rs).

use super::cpu::VARIANTS;
use super::cpu::generic::Source;
use super::plan::{self, Problem, Split};
use super::{CacheSource, Threads};
use crate::cache::layout::BLOCK_LEN;
use crate::{Arm, Cache, LayerConfig, LayerShape, Rows, Scheme};
use half::{bf16, f16};

/// A source whose keys before `from` are gone.
struct Watched<'a> {
    inner: CacheSource<'a>,
    group_len: usize,
    sinks: usize,
    from: usize,
}

impl Watched<'_> {
    fn check(&self, end: usize) {
        assert!(end > self.from, "keys up to {end} are read, and no row sees any before {}", self.from);
    }
}

impl Source for Watched<'_> {
    fn record(&self, head: usize, group: usize) -> &[u8] {
        self.check((group + 1) * self.group_len);
        self.inner.record(head, group)
    }

    fn f16_block(&self, head: usize, position: usize) -> (&[f16], &[f16]) {
        self.check(position + BLOCK_LEN);
        self.inner.f16_block(head, position)
    }

    fn bf16_block(&self, head: usize, position: usize) -> (&[bf16], &[bf16]) {
        self.check(position + BLOCK_LEN);
        self.inner.bf16_block(head, position)
    }

    fn dequantized_block(&self, head: usize, position: usize) -> (&[f16], &[f16]) {
        self.check(position + BLOCK_LEN);
        self.inner.dequantized_block(head, position)
    }

    fn sinks(&self, head: usize) -> (&[f16], &[f16]) {
        self.check(self.sinks);
        self.inner.sinks(head)
    }
}

#[test]
fn nothing_before_the_oldest_row_s_first_key_is_read() {
    let shape = LayerShape::new(2, 1, 64).unwrap();
    let schemes = ["f16", "bf16", "k4v4g64w128s4p512", "k2v3g32s16", "k3v8g128w20s2"];
    for (scheme, arm) in schemes.map(|s| (s, Arm::Fused)).into_iter().chain([("k4v4g64s4", Arm::DequantOnce)]) {
        let scheme: Scheme = scheme.parse().unwrap();
        for (past, rows) in [(1299, 1), (1200, 70), (0, 600), (511, 3)] {
            for visible in [1, 5, 32, 64, 100, 512, 600, 5000] {
                let mut cache = Cache::new(&[LayerConfig { shape, scheme, visible: Some(visible) }], arm).unwrap();
                let seq = cache.add_sequence();
                for n in [past, rows].into_iter().filter(|&n| n > 0) {
                    let x: Vec<f32> = (0..n * 64).map(|i| (i as f32 * 0.3).sin()).collect();
                    cache.append(0, &[Rows { seq, rows: n }], &x, &x).unwrap();
                    if n == past {
                        cache.commit(0, &[Rows { seq, rows: n }]).unwrap();
                    }
                }
                let view = cache.view(0, seq).unwrap();
                let from = (past + 1).saturating_sub(visible);
                let source = Watched {
                    inner: CacheSource::new(view, arm, from),
                    group_len: scheme.packed().map_or(BLOCK_LEN, |p| p.group_len()),
                    sinks: view.spec.sinks.tokens,
                    from,
                };
                let problem = Problem {
                    source: &source,
                    shape,
                    format: view.spec.plain.format,
                    records: view.spec.record.as_ref().filter(|_| arm == Arm::Fused),
                    sinks: view.spec.sinks.tokens,
                    edge: &|position| scheme.edge(position),
                    positions: past..past + rows,
                    first_visible: 0,
                    visible: Some(visible),
                    first_row: 0,
                    sm_scale: 0.125,
                    softcap: None,
                    sink_logits: None,
                };
                let q = vec![0.5; rows * 2 * 64];
                for variant in VARIANTS.iter().filter(|v| (v.available)().is_ok()) {
                    let mut out = vec![f32::NAN; q.len()];
                    let problems = std::slice::from_ref(&problem);
                    plan::run(variant, &Threads::new(1).unwrap(), Split::default(), problems, &q, &mut out);
                    assert!(out.iter().all(|x| x.is_finite()), "{} {scheme}", variant.name);
                }
            }
        }
    }
}
