//! `kvant bench attend --device cuda`: the same on a GPU, by its own clock. In: a shape and schemes; out: the same rows.
//!
//! A cache has as many layers as make its bytes exceed the card's second-level cache many times; launches go from layer to layer, so
//! that each finds its data in memory. One sequence is filled with real rows, the others are copies of it elsewhere in memory.
//! NOT here: the clock (kvant-roofline), kernels (kvant-kv).

use super::{Inputs, Report, Row, named, share_of_read};
use crate::args::AttendArgs;
use crate::failure::{Failure, SCHEME_HINT};
use crate::{progress, rss, shape_text};
use anyhow::Result;
use half::f16;
use kvant_kv::attend::reference::{attend_cache_f64, relative_error};
use kvant_kv::cuda::cudarc::driver::CudaSlice;
use kvant_kv::cuda::{Gpu, GpuCache, GpuOptions, OutFormat};
use kvant_kv::{Arm, AttendOptions, Cache, LayerConfig, LayerShape, Rows, Scheme};
use kvant_roofline::Cost;
use kvant_roofline::cuda::{Captured, GpuReader, LAUNCHES, interleave};
use kvant_roofline::timer::COLD_BYTES;
use std::sync::Arc;

/// Most layers of one cache.
const LAYERS: usize = 96;
/// Rounds when `--rounds` is left out.
const ROUNDS: usize = 20;
/// Largest relative error that is timed: products of f16 numbers, sums in f32.
const TOLERANCE: f64 = 2e-3;
/// Tokens of a prompt's part while a cache is filled.
const FILL: usize = 4096;

/// Puts rows `from..to` of keys or values on the card.
type Upload<'a> = dyn Fn(&[f32], usize, usize) -> Result<CudaSlice<f16>, kvant_kv::Error> + 'a;

/// A cache on the card, its step begun.
struct Subject {
    name: String,
    scheme: Scheme,
    cache: GpuCache,
    layers: usize,
    /// Of one layer.
    bytes: usize,
    error: f64,
}

/// Measures everything.
pub fn measure(args: &AttendArgs) -> Result<Report> {
    if args.kernel.is_some() || args.hot {
        let what = if args.hot { "--hot" } else { "--kernel" };
        return Err(Failure::input(format!("{what} is of the CPU's kernels"), "leave it out with --device cuda").into());
    }
    let [batch, q_heads, kv_heads, head_dim, kv_len] =
        shape_text::parts(&args.shape, ["b", "q", "kv", "d", "s"], "b=1,q=32,kv=8,d=128,s=16384")?;
    let shape = shape_text::layer_shape(q_heads, kv_heads, head_dim)?;
    let mut schemes = Vec::new();
    for (name, layers) in named(&args.kv)? {
        let [scheme] = layers[..] else {
            return Err(Failure::input(format!("{name} is a scheme file"), SCHEME_HINT).into());
        };
        schemes.push((name, scheme));
    }
    let gpu = Gpu::open(0).map_err(Failure::from)?;
    let lens = lengths(batch, kv_len, args.ragged);
    let wants_control = schemes.iter().any(|(_, s)| *s == Scheme::F16);
    schemes.retain(|(_, s)| *s != Scheme::F16);
    schemes.insert(0, (Scheme::F16.to_string(), Scheme::F16));
    let longest = lens.iter().copied().max().unwrap_or(kv_len);
    check_host_memory(shape, longest)?;
    let inputs = Inputs::new(shape, 1, longest);
    let mut subjects = Vec::new();
    for (name, scheme) in schemes {
        let wheel = progress::wheel(&format!("fill the caches of {name}"));
        let subject =
            Subject::fill(&gpu, name, scheme, shape, &lens, &inputs, args.invariant).map_err(Failure::from)?;
        wheel.finish_and_clear();
        let holds = subject.error <= TOLERANCE;
        if !holds {
            let what = format!("the GPU's kernel is wrong on {}: relative error {:.1e}", subject.name, subject.error);
            return Err(Failure::proof(what, format!("its tolerance is {TOLERANCE:.0e}; nothing was timed")).into());
        }
        subjects.push(subject);
    }
    let rounds = args.rounds.unwrap_or(ROUNDS);
    let wheel = progress::wheel("time attention");
    let timings = time(&gpu, &subjects, shape, batch, rounds).map_err(Failure::from)?;
    wheel.finish_and_clear();
    let f16_median = timings[0].median_ns as f64;
    let rows = subjects.iter().enumerate().skip(usize::from(!wants_control)).map(|(i, subject)| {
        let (attend, read) = (timings[i], timings[subjects.len() + i]);
        let gbps = subject.bytes as f64 / attend.median_ns as f64;
        let read_gbps = subject.bytes as f64 / read.median_ns as f64;
        let (pct_of_read, read_unreliable) = share_of_read(gbps, read_gbps);
        Row {
            scheme: subject.name.clone(),
            kernel: if args.invariant { "cuda-mma-invariant" } else { "cuda-mma" },
            min_ns: attend.min_ns,
            median_ns: attend.median_ns,
            bytes: subject.bytes,
            gbps,
            read_gbps,
            pct_of_read,
            read_unreliable,
            vs_f16: f16_median / attend.median_ns as f64,
            rel_err: subject.error,
        }
    });
    let rows = rows.collect();
    Ok(Report { rows, batch, q_heads, kv_heads, head_dim, kv_len, threads: 0, cold: true, rounds })
}

/// Whether the machine has room for one sequence's keys and values, in f32 and in f16 for the card.
fn check_host_memory(shape: LayerShape, kv_len: usize) -> Result<(), Failure> {
    let need = 2.0 * shape.row_len() as f64 * kv_len as f64 * (size_of::<f32>() + size_of::<f16>()) as f64;
    rss::check(need, "take a smaller shape")
}

/// Lengths of the batch's sequences: all `kv_len`, or spread evenly over 0.5 to 1.5 of it, in an order that mixes short and long.
fn lengths(batch: usize, kv_len: usize, ragged: bool) -> Vec<usize> {
    if !ragged || batch == 1 {
        return vec![kv_len; batch];
    }
    // A step that shares no factor with the batch visits every place once.
    let step = (batch * 5 / 8..).find(|s| gcd(*s, batch) == 1).unwrap_or(1);
    (0..batch).map(|i| (kv_len / 2 + kv_len * (i * step % batch) / (batch - 1)).max(1)).collect()
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Subject {
    fn fill(
        gpu: &Arc<Gpu>,
        name: String,
        scheme: Scheme,
        shape: LayerShape,
        lens: &[usize],
        inputs: &Inputs,
        invariant: bool,
    ) -> Result<Self, kvant_kv::Error> {
        let bytes = lens.iter().map(|&len| Cost::of(shape, scheme, len).bytes()).sum::<usize>();
        let layers = COLD_BYTES.div_ceil(bytes).clamp(1, LAYERS);
        let arm = Arm::of(scheme);
        let config = LayerConfig { shape, scheme, visible: None };
        let longest = lens.iter().copied().max().unwrap_or(1);
        let options = GpuOptions {
            slots: lens.len(),
            max_tokens: longest,
            bytes: usize::MAX,
            out: OutFormat::F32,
            softcap: None,
            invariant,
        };
        let mut cache = GpuCache::new(gpu, &vec![config; layers], arm, options)?;
        let slots = lens.iter().map(|_| cache.add(longest)).collect::<Result<Vec<_>, _>>()?;
        let row = shape.row_len();
        let upload = |x: &[f32], from: usize, to: usize| {
            let part: Vec<f16> = x[from * row..to * row].iter().map(|&x| f16::from_f32(x)).collect();
            gpu.upload(&part)
        };
        // Real rows in the first sequence's first layer; then the same everywhere.
        let mut at = 0;
        while at + 1 < longest {
            let end = (at + FILL).min(longest - 1);
            cache.begin_prefill(slots[0], end - at)?;
            cache.append_prefill(0, &upload(&inputs.k, at, end)?, &upload(&inputs.v, at, end)?)?;
            cache.end_prefill();
            at = end;
        }
        let error = Self::error(gpu, &mut cache, slots[0], scheme, shape, longest, inputs, &upload)?;
        cache.spread(slots[0], true)?;
        for (&slot, &len) in slots.iter().zip(lens) {
            cache.set_len(slot, len - 1)?;
        }
        cache.begin_decode(&slots, slots.len())?;
        cache.pack_due()?;
        cache.gpu().synchronize()?;
        Ok(Self { name, scheme, cache, layers, bytes, error })
    }

    /// Appends the last token and compares its attention with the f64 reference over the CPU's cache of the same rows.
    #[expect(clippy::too_many_arguments, reason = "what one step needs")]
    fn error(
        gpu: &Arc<Gpu>,
        cache: &mut GpuCache,
        slot: usize,
        scheme: Scheme,
        shape: LayerShape,
        len: usize,
        inputs: &Inputs,
        upload: &Upload<'_>,
    ) -> Result<f64, kvant_kv::Error> {
        let q: Vec<f16> = inputs.q.iter().map(|&x| f16::from_f32(x)).collect();
        let mut out = gpu.upload(&vec![f32::NAN; q.len()])?;
        let options = AttendOptions::new(shape.head_dim);
        cache.begin_decode(&[slot], 1)?;
        cache.pack_due()?;
        cache.append_decode(0, &upload(&inputs.k, len - 1, len)?, &upload(&inputs.v, len - 1, len)?)?;
        cache.attend(0, &gpu.upload(&q)?, &mut out, options.sm_scale)?;
        cache.end_decode();
        if let Some(fault) = cache.take_fault()? {
            return Err(fault.into());
        }
        let got = gpu.stream().clone_dtoh(&out)?;
        let mut cpu = Cache::new(&[LayerConfig { shape, scheme, visible: None }], Arm::of(scheme))?;
        let seq = cpu.add_sequence();
        for start in (0..len).step_by(super::APPEND_TOKENS) {
            let end = (start + super::APPEND_TOKENS).min(len);
            let rows = [Rows { seq, rows: end - start }];
            let span = start * shape.row_len()..end * shape.row_len();
            cpu.append(0, &rows, &inputs.k[span.clone()], &inputs.v[span])?;
            cpu.commit(0, &rows)?;
        }
        let q: Vec<f32> = q.iter().map(|x| x.to_f32()).collect();
        let exact = attend_cache_f64(&cpu, 0, &[Rows { seq, rows: 1 }], &q, &options)?;
        Ok(relative_error(&got, &exact))
    }
}

/// Times every subject, then for each a plain read of as many bytes, all in turns.
fn time(
    gpu: &Arc<Gpu>,
    subjects: &[Subject],
    shape: LayerShape,
    batch: usize,
    rounds: usize,
) -> Result<Vec<kvant_roofline::Timing>, kvant_kv::Error> {
    let n = batch * shape.q_heads * shape.head_dim;
    let q: Vec<f16> = (0..n).map(|i| f16::from_f32((i as f32 * 0.37).sin())).collect();
    let q = gpu.upload(&q)?;
    let mut out = gpu.zeros::<f32>(n)?;
    let scale = AttendOptions::new(shape.head_dim).sm_scale;
    let most = subjects.iter().map(|s| s.bytes).max().unwrap_or(0);
    let reader = GpuReader::new(gpu, most.max(COLD_BYTES).next_multiple_of(1 << 20))?;
    let buffer = most.max(COLD_BYTES);
    let mut captured = Vec::new();
    for s in subjects {
        debug_assert!(s.scheme == s.cache.layers()[0].scheme);
        let launches = LAUNCHES.max(s.layers);
        captured.push(Captured::new(gpu, launches, |i| s.cache.attend(i % s.layers, &q, &mut out, scale))?);
    }
    for s in subjects {
        let places = (buffer / s.bytes).max(1);
        let launches = LAUNCHES.max(s.layers);
        captured.push(Captured::new(gpu, launches, |i| reader.launch(i % places * s.bytes, s.bytes))?);
    }
    interleave(&captured.iter().collect::<Vec<_>>(), rounds)
}

#[cfg(test)]
mod tests {
    use super::lengths;

    #[test]
    fn ragged_lengths_are_even_and_mixed() {
        let mut lens = lengths(64, 1000, true);
        assert!(lens[..8].iter().any(|&l| l < 700) && lens[..8].iter().any(|&l| l > 1300));
        lens.sort_unstable();
        assert_eq!((lens[0], lens[63]), (500, 1500));
        assert!(lens.windows(2).all(|w| w[0] < w[1]), "each length once");
        assert_eq!(lens.iter().sum::<usize>() / 64, 999);
        assert_eq!(lengths(3, 10, false), [10, 10, 10]);
    }
}
