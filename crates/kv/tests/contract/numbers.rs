//! Numbers and a small driver for the contract tests. In: a stream and positions; out: the same rows on every machine,
//! whatever the chunking, and a cache with its attention that appends, attends and commits them.
//! NOT here: any expectation.

use kvant_kv::attend::kernels;
use kvant_kv::{Arm, AttendOptions, Attention, Cache, LayerConfig, LayerShape, Rows, SeqId};
use std::ops::Range;

/// Names of the kernels that run here.
pub fn kernels_here() -> Vec<&'static str> {
    kernels().into_iter().filter(|(_, available)| available.is_ok()).map(|(name, _)| name).collect()
}

/// One number in about -1.7..1.7 from a place: equal places give equal numbers.
fn number(stream: u64, layer: usize, position: usize, i: usize) -> f32 {
    let mut x = stream.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (layer as u64) << 48 ^ (position as u64) << 20 ^ i as u64;
    let mut sum = 0.0;
    for _ in 0..2 {
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        sum += (x >> 40) as f32 / (1u64 << 24) as f32;
    }
    (sum - 1.0) * 1.7
}

/// Rows `[positions][n]` of a stream.
pub fn rows(stream: u64, layer: usize, positions: Range<usize>, n: usize) -> Vec<f32> {
    positions.flat_map(|p| (0..n).map(move |i| number(stream, layer, p, i))).collect()
}

/// K, V and Q rows of a request's positions in a layer.
pub struct Tokens {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub q: Vec<f32>,
}

/// The tokens that request `stream` has at `positions` of `layer`.
pub fn tokens(stream: u64, layer: usize, positions: Range<usize>, shape: &LayerShape) -> Tokens {
    let q_len = shape.q_heads * shape.head_dim;
    Tokens {
        k: rows(3 * stream, layer, positions.clone(), shape.row_len()),
        v: rows(3 * stream + 1, layer, positions.clone(), shape.row_len()),
        q: rows(3 * stream + 2, layer, positions, q_len),
    }
}

/// The bits of a result: equality of floats would call two zeros equal and two NaN different.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// A sequence and the stream its numbers come from.
#[derive(Clone, Copy)]
pub struct Request {
    pub seq: SeqId,
    pub stream: u64,
}

/// A cache, its attention, and numbers for both.
pub struct Rig {
    pub cache: Cache,
    pub attention: Attention,
    pub shape: LayerShape,
}

impl Rig {
    /// Layers of one shape, a scheme for each.
    pub fn layers(shape: LayerShape, schemes: &[&str], arm: Arm, kernel: &str, threads: usize) -> Self {
        Self::windowed(shape, schemes, None, arm, kernel, threads)
    }

    /// Layers whose queries see this many keys.
    pub fn windowed(
        shape: LayerShape,
        schemes: &[&str],
        visible: Option<usize>,
        arm: Arm,
        kernel: &str,
        threads: usize,
    ) -> Self {
        let layers: Vec<_> =
            schemes.iter().map(|s| LayerConfig { shape, scheme: s.parse().expect("a scheme"), visible }).collect();
        Self {
            cache: Cache::new(&layers, arm).unwrap(),
            attention: Attention::new(threads, Some(kernel)).unwrap(),
            shape,
        }
    }

    /// One layer of the fused arm.
    pub fn new(shape: LayerShape, scheme: &str, kernel: &str, threads: usize) -> Self {
        Self::layers(shape, &[scheme], Arm::Fused, kernel, threads)
    }

    pub fn add(&mut self, stream: u64) -> Request {
        Request { seq: self.cache.add_sequence(), stream }
    }

    /// Appends the next `rows` tokens of each request to every layer; no commit. Out: the queries, `[layer][rows][..]`.
    pub fn append(&mut self, batch: &[(Request, usize)]) -> Vec<f32> {
        let entries = entries(batch);
        let mut q = Vec::new();
        for layer in 0..self.cache.layers() {
            let (mut k, mut v) = (Vec::new(), Vec::new());
            for (request, rows) in batch {
                let held = self.cache.len(layer, request.seq).unwrap();
                let t = tokens(request.stream, layer, held..held + rows, &self.shape);
                k.extend(t.k);
                v.extend(t.v);
                q.extend(t.q);
            }
            self.cache.append(layer, &entries, &k, &v).unwrap();
        }
        q
    }

    /// Attends the newest rows of each request in every layer. Out: per request `[layer][rows][q_heads][head_dim]`.
    pub fn attend(&mut self, batch: &[(Request, usize)], q: &[f32]) -> Vec<Vec<f32>> {
        let (entries, layers) = (entries(batch), self.cache.layers());
        let mut out = vec![f32::NAN; q.len()];
        let options = AttendOptions::new(self.shape.head_dim);
        self.attention.attend_layers(&self.cache, 0..layers, &entries, q, &mut out, &options).unwrap();
        let row = self.shape.q_heads * self.shape.head_dim;
        let mut results = vec![Vec::new(); batch.len()];
        let mut rest = &out[..];
        for _ in 0..layers {
            for (result, (_, rows)) in results.iter_mut().zip(batch) {
                let (own, others) = rest.split_at(rows * row);
                result.extend_from_slice(own);
                rest = others;
            }
        }
        results
    }

    /// Keeps what was appended.
    pub fn commit(&mut self, batch: &[(Request, usize)]) {
        let entries = entries(batch);
        (0..self.cache.layers()).for_each(|layer| self.cache.commit(layer, &entries).unwrap());
    }

    /// One step: append, attend, commit.
    pub fn step(&mut self, batch: &[(Request, usize)]) -> Vec<Vec<f32>> {
        let q = self.append(batch);
        let out = self.attend(batch, &q);
        self.commit(batch);
        out
    }

    /// What the newest token of a request gets, without changing anything.
    pub fn newest(&mut self, request: Request) -> Vec<f32> {
        let layers = self.cache.layers();
        let q: Vec<f32> = (0..layers)
            .flat_map(|layer| {
                let len = self.cache.len(layer, request.seq).unwrap();
                tokens(request.stream, layer, len - 1..len, &self.shape).q
            })
            .collect();
        self.attend(&[(request, 1)], &q).remove(0)
    }
}

pub fn entries(batch: &[(Request, usize)]) -> Vec<Rows> {
    batch.iter().map(|(request, rows)| Rows { seq: request.seq, rows: *rows }).collect()
}
