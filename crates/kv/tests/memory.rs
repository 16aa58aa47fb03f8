//! Process memory: what the operating system counts for a cache is what the cache says it holds. A test binary of its
//! own with one test, so that nothing else of this process grows meanwhile. In: 8 layers x 16k tokens x 8 kv heads x
//! head_dim 128; out: resident bytes within 5 % of `bytes()`, and given back at the end.
//! NOT here: the formula (contract/bytes.rs).

#![cfg(target_os = "linux")]

use kvant_kv::{Arm, Cache, LayerConfig, LayerShape, Rows};

/// Resident bytes of this process that belong to no file.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has /proc");
    let line = status.lines().find(|l| l.starts_with("RssAnon:")).expect("status has RssAnon");
    let kib: usize = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number of KiB");
    kib * 1024
}

#[test]
fn process_memory_is_what_the_cache_says_it_holds() {
    const LAYERS: usize = 8;
    const TOKENS: usize = 16 * 1024;
    let shape = LayerShape::new(8, 8, 128).unwrap();
    // The same rows for K, V and all layers: what they hold does not matter here.
    let row = |i: usize| ((i * 7919 % 1000) as f32 - 500.0) / 250.0;
    let rows: Vec<f32> = (0..TOKENS * shape.row_len()).map(row).collect();
    // A prompt in chunks, and in one call: whatever the call needs beside the cache must be gone after it.
    for (scheme, chunk) in [
        ("k4v4g64w128s4p512", 512),
        ("k4v4g64w128s4p512", TOKENS),
        ("k2v2g32w128", TOKENS),
        ("f16", TOKENS),
        ("bf16", TOKENS),
    ] {
        let layer = LayerConfig { shape, scheme: scheme.parse().unwrap(), visible: None };
        let before = resident_bytes();
        let mut cache = Cache::new(&[layer; LAYERS], Arm::Fused).unwrap();
        let batch = [Rows { seq: cache.add_sequence(), rows: chunk }];
        for _ in 0..TOKENS / chunk {
            for layer in 0..LAYERS {
                let rows = &rows[..chunk * shape.row_len()];
                cache.append(layer, &batch, rows, rows).unwrap();
                cache.commit(layer, &batch).unwrap();
            }
        }
        let held = cache.bytes().packed_bytes + cache.bytes().window_bytes;
        let grown = resident_bytes() - before;
        let ratio = grown as f64 / held as f64;
        println!("{scheme} in chunks of {chunk}: cache {held} bytes, process {grown} bytes, ratio {ratio:.4}");
        assert!((0.95..=1.05).contains(&ratio), "{scheme}: the process grew by {grown} bytes for {held} held");
        drop(cache);
        let left = resident_bytes().saturating_sub(before);
        assert!(left < held / 20, "{scheme}: {left} bytes stayed after the cache was dropped");
    }
}
