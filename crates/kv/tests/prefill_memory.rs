//! Working memory of prefill: rows over a long packed history take memory for themselves only. A copy of the history as
//! f16, or a matrix of scores, would show here many times over.
//! NOT here: bytes of the cache itself (contract/bytes.rs, memory.rs).

use kvant_kv::{AttendOptions, Attention, Cache, LayerConfig, LayerShape, Rows, Scheme};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const HISTORY: usize = 32 << 10;
const CHUNK: usize = 1024;

/// Most heap bytes that append, attend and commit of `rows` tokens behind the history hold at once, and the cache's bytes.
fn peak(scheme: &str, rows: usize, threads: usize) -> (usize, usize) {
    let shape = LayerShape::new(4, 2, 64).unwrap();
    let scheme: Scheme = scheme.parse().unwrap();
    let arm = kvant_kv::Arm::of(scheme);
    let mut cache = Cache::new(&[LayerConfig { shape, scheme, visible: None }], arm).unwrap();
    let mut attention = Attention::new(threads, None).unwrap();
    let seq = cache.add_sequence();
    let number = |i: usize| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0;
    let keys: Vec<f32> = (0..CHUNK * shape.row_len()).map(number).collect();
    let q: Vec<f32> = (0..rows * shape.q_heads * shape.head_dim).map(number).collect();
    let mut out = vec![0.0; q.len()];
    for _ in 0..HISTORY / CHUNK {
        let batch = [Rows { seq, rows: CHUNK }];
        cache.append(0, &batch, &keys, &keys).unwrap();
        cache.commit(0, &batch).unwrap();
    }
    // What threads keep for themselves is made at their first call.
    let one = AttendOptions::new(shape.head_dim);
    let few = Rows { seq, rows: 1 };
    let n = few.rows * shape.q_heads * shape.head_dim;
    attention.attend(&cache, 0, &[few], &vec![0.1; n], &mut vec![0.0; n], &one).unwrap();
    let batch = [Rows { seq, rows }];
    let new = &keys[..rows * shape.row_len()];
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    cache.append(0, &batch, new, new).unwrap();
    attention.attend(&cache, 0, &batch, &q, &mut out, &AttendOptions::new(shape.head_dim)).unwrap();
    cache.commit(0, &batch).unwrap();
    assert!(out.iter().all(|x| x.is_finite()) && out.iter().any(|x| *x != 0.0));
    let bytes = cache.bytes();
    (HEAP.peak_usage() - before, bytes.packed_bytes + bytes.window_bytes)
}

#[test]
fn rows_over_a_long_history_need_memory_for_themselves_only() {
    for threads in [1, 2] {
        for rows in [64, 256, 1024] {
            let out_bytes = rows * 4 * 64 * size_of::<f32>();
            let (f16, f16_cache) = peak("f16", rows, threads);
            for scheme in ["k4v4g64w128s4p512", "k2v2g64w128s4p512", "k8v8g64", "k3v3g32w64"] {
                let (packed, cache) = peak(scheme, rows, threads);
                println!("{scheme}, {rows} rows, {threads} threads: {packed} bytes, f16 {f16}, output {out_bytes}");
                // An f16 copy of the history would be 16 MiB, the scores of one head of 64 rows 8 MiB.
                assert!(packed <= 2 * out_bytes + (1 << 18), "{scheme}: {packed} bytes for {rows} rows");
                assert!(packed + cache < f16 + f16_cache, "{scheme}: {packed} + {cache}, f16 {f16} + {f16_cache}");
            }
        }
    }
}
