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
    const CHUNK: usize = 512;
    let shape = LayerShape::new(8, 8, 128).unwrap();
    // The same rows for every chunk: what they hold does not matter here, and making them would take most of the time.
    let row = |i: usize| ((i * 7919 % 1000) as f32 - 500.0) / 250.0;
    let rows: Vec<f32> = (0..CHUNK * shape.row_len()).map(row).collect();
    for scheme in ["k4v4g64w128s4p512", "k2v2g32w128", "f16"] {
        let layer = LayerConfig { shape, scheme: scheme.parse().unwrap() };
        let before = resident_bytes();
        let mut cache = Cache::new(&[layer; LAYERS], Arm::Fused).unwrap();
        let batch = [Rows { seq: cache.add_sequence(), rows: CHUNK }];
        for _ in 0..TOKENS / CHUNK {
            for layer in 0..LAYERS {
                cache.append(layer, &batch, &rows, &rows).unwrap();
                cache.commit(layer, &batch).unwrap();
            }
        }
        let held = cache.bytes().packed_bytes + cache.bytes().window_bytes;
        let grown = resident_bytes() - before;
        let ratio = grown as f64 / held as f64;
        println!("{scheme}: cache {held} bytes, process {grown} bytes, ratio {ratio:.4}");
        assert!((0.95..=1.05).contains(&ratio), "{scheme}: the process grew by {grown} bytes for {held} held");
        drop(cache);
        let left = resident_bytes().saturating_sub(before);
        assert!(left < held / 20, "{scheme}: {left} bytes stayed after the cache was dropped");
    }
}
