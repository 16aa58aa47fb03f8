//! Operation 2: attention over the cache. In: query rows and a cache; out: attention rows, and which route they took.
//!
//! Formula: softmax over all visible keys of `sm_scale * q.k_hat`, times `v_hat`; query head h reads kv head
//! `h / (q_heads/kv_heads)`; packed part, sinks and window are one softmax.
//! Rooms: cpu/ kernels and the VARIANTS table; plan.rs splits work; softmax.rs partial states; reference.rs the oracle;
//! dense.rs the same operation over given codes.
//! NOT here: what is packed when (cache/).

pub(crate) mod cpu;
pub(crate) mod cuda;
pub mod dense;
mod plan;
pub mod reference;
mod softmax;
mod threads;

#[cfg(test)]
mod parity;
#[cfg(test)]
mod unread;

use crate::append::record::dequantize_record;
use crate::cache::layout::{BLOCK_LEN, PlainLayout};
use crate::cache::store::SeqView;
use crate::{Arm, Cache, Error, Rows, Scheme};
use cpu::generic::Source;
#[doc(hidden)]
pub use cpu::{TILE_KERNEL, TILE_VECTORS};
use cpu::{VARIANTS, Variant};
use half::{bf16, f16};
use plan::Problem;
#[doc(hidden)]
pub use plan::Split;
use std::collections::BTreeMap;
use std::ops::Range;
use threads::Threads;

/// Options of one attention call.
#[derive(Debug, Clone, Copy)]
pub struct AttendOptions<'a> {
    /// Factor of every score, usually `head_dim^-0.5`.
    pub sm_scale: f32,
    /// `score = c * tanh(score / c)`.
    pub softcap: Option<f32>,
    /// One more term `exp(sink_logit)` per query head in the denominator only. Shape `[q_heads]`.
    pub sink_logits: Option<&'a [f32]>,
    /// Keys before this position are not seen; one per batch entry, or empty for "all seen". A layer's own window
    /// ([`crate::LayerConfig::visible`]) hides further ones.
    pub first_visible: &'a [usize],
}

impl AttendOptions<'_> {
    /// `head_dim^-0.5`, nothing else.
    pub fn new(head_dim: usize) -> Self {
        Self { sm_scale: (head_dim as f32).powf(-0.5), softcap: None, sink_logits: None, first_visible: &[] }
    }
}

/// The attention operation: a chosen kernel, its threads and its counters.
pub struct Attention {
    variant: &'static Variant,
    threads: Threads,
    split: Split,
    routes: BTreeMap<String, u64>,
}

impl Attention {
    /// `threads` >= 1; `kernel`: a name of the VARIANTS table, or None for the best that this processor runs.
    ///
    /// # Errors
    /// [`Error::Threads`]; [`Error::Unsupported`] for a kernel that does not exist or cannot run here.
    pub fn new(threads: usize, kernel: Option<&str>) -> Result<Self, Error> {
        let variant = match kernel {
            None => VARIANTS.iter().find(|v| (v.available)().is_ok()).expect("the portable kernel always runs"),
            Some(name) => {
                let no = |why| Error::Unsupported { kernel: name.to_string(), why };
                let names = || VARIANTS.iter().map(|v| v.name).collect::<Vec<_>>().join(", ");
                let variant = VARIANTS.iter().find(|v| v.name == name);
                let variant = variant.ok_or_else(|| no(format!("there is none of this name; kernels: {}", names())))?;
                (variant.available)().map_err(no)?;
                variant
            }
        };
        Ok(Self { variant, threads: Threads::new(threads)?, split: Split::default(), routes: BTreeMap::new() })
    }

    /// Attends the newest `rows` tokens of each batch entry (already appended to `layer`) over everything they see.
    ///
    /// Shapes: `q`, `out`: f32 `[sum of rows][q_heads][head_dim]`.
    /// Accuracy: against [`reference::attend_cache_f64`], relative L2 error 1e-4 for the portable kernel and for plain rows,
    /// 3e-3 for the other kernels over packed records (their multipliers are integers of 15 or 16 bits).
    /// Exactness: a row's result depends on neither the other rows, the batch, nor the threads.
    ///
    /// # Errors
    /// [`Error::Shape`] (also for rows so old that [`Cache::commit`] freed what they saw), [`Error::NoSuchLayer`],
    /// [`Error::NoSuchSequence`], [`Error::NotFinite`] (a query).
    pub fn attend(
        &mut self,
        cache: &Cache,
        layer: usize,
        batch: &[Rows],
        q: &[f32],
        out: &mut [f32],
        options: &AttendOptions<'_>,
    ) -> Result<(), Error> {
        self.attend_layers(cache, layer..layer + 1, batch, q, out, options)
    }

    /// The same over several layers of one shape in one call: a leading `layers` axis. Bit-identical to a loop of
    /// [`Attention::attend`] calls.
    ///
    /// Shapes: `q`, `out`: f32 `[layers][sum of rows][q_heads][head_dim]`.
    ///
    /// # Errors
    /// As [`Attention::attend`]; [`Error::Shape`] also when the layers differ in shape.
    pub fn attend_layers(
        &mut self,
        cache: &Cache,
        layers: Range<usize>,
        batch: &[Rows],
        q: &[f32],
        out: &mut [f32],
        options: &AttendOptions<'_>,
    ) -> Result<(), Error> {
        let shape = cache.layer(layers.start)?.shape;
        let row_len = shape.q_heads * shape.head_dim;
        let rows: usize = batch.iter().map(|b| b.rows).sum();
        check_len("length of q", layers.len() * rows * row_len, q.len())?;
        check_len("length of out", layers.len() * rows * row_len, out.len())?;
        check_options(options, batch.len(), shape.q_heads)?;
        if batch.is_empty() {
            return Ok(());
        }
        let mut views = Vec::with_capacity(layers.len() * batch.len());
        for layer in layers.clone() {
            if cache.layer(layer)?.shape != shape {
                return Err(Error::Shape { what: "layers of one shape", expected: layers.start, got: layer });
            }
            for entry in batch {
                let view = cache.view(layer, entry.seq)?;
                if entry.rows == 0 || entry.rows > view.len {
                    let what = "rows of a batch entry (1 up to the tokens held)";
                    return Err(Error::Shape { what, expected: view.len, got: entry.rows });
                }
                if !view.holds_all_of(entry.rows) {
                    let most = (1..entry.rows).rev().find(|&rows| view.holds_all_of(rows)).unwrap_or(0);
                    let what = "most rows of a batch entry after commit, which frees what only older rows saw";
                    return Err(Error::Shape { what, expected: most, got: entry.rows });
                }
                views.push(view);
            }
        }
        check_queries(q, layers.start, shape.head_dim, shape.q_heads, &views, batch)?;

        let oldest = |(i, view): (usize, &SeqView<'_>)| {
            let entry = i % batch.len();
            let own = view.spec.first_seen(view.len - batch[entry].rows);
            own.max(options.first_visible.get(entry).copied().unwrap_or(0))
        };
        let sources: Vec<_> = views
            .iter()
            .zip(views.iter().enumerate().map(oldest))
            .map(|(view, from)| CacheSource::new(*view, cache.arm(), from))
            .collect();
        let edges: Vec<_> = views.iter().map(|view| move |position| view.spec.scheme.edge(position)).collect();
        let mut first_row = 0;
        let mut problems = Vec::with_capacity(views.len());
        for (i, (view, source)) in views.iter().zip(&sources).enumerate() {
            let entry = i % batch.len();
            problems.push(Problem {
                source,
                shape,
                format: view.spec.plain.format,
                records: view.spec.record.as_ref().filter(|_| cache.arm() == Arm::Fused),
                sinks: view.spec.sinks.tokens,
                edge: &edges[i],
                positions: view.len - batch[entry].rows..view.len,
                first_visible: options.first_visible.get(entry).copied().unwrap_or(0),
                visible: view.spec.visible,
                first_row,
                sm_scale: options.sm_scale,
                softcap: options.softcap,
                sink_logits: options.sink_logits,
            });
            first_row += batch[entry].rows;
        }
        plan::run(self.variant, &self.threads, self.split, &problems, q, out);
        // What the problems really carried, not what the arm should have done.
        let read = |p: &Problem<'_>, v: &SeqView<'_>| match (!v.groups().is_empty(), p.records.is_some()) {
            (true, true) => Some("packed"),
            (true, false) if cache.arm() == Arm::DequantStep => Some("dequant-step"),
            (true, false) => Some("dequant-once"),
            (false, _) => None,
        };
        let unpacked = |v: &SeqView<'_>| match v.spec.scheme {
            Scheme::Bf16 => "bf16",
            Scheme::F16 if cache.arm() == Arm::F16 => "f16",
            Scheme::F16 | Scheme::Packed(_) => "window-only",
        };
        for (layer, problems) in views.chunks(batch.len()).zip(problems.chunks(batch.len())) {
            let path = problems.iter().zip(layer).find_map(|(p, v)| read(p, v)).unwrap_or(unpacked(&layer[0]));
            self.count(path, 1);
        }
        Ok(())
    }

    /// More calls of a route: `KERNEL:PATH`, where PATH says what the packed part was read as.
    fn count(&mut self, path: &str, calls: u64) {
        *self.routes.entry(format!("{}:{path}", self.variant.name)).or_default() += calls;
    }

    /// Name of the kernel in use, as in the VARIANTS table.
    pub fn kernel(&self) -> &'static str {
        self.variant.name
    }

    /// Largest relative L2 error against [`reference::attend_cache_f64`] that this kernel promises, for calls that read
    /// packed records and for calls that read plain rows (f16 or bf16) only.
    pub fn tolerance(&self, packed: bool) -> f64 {
        if packed { self.variant.packed_tolerance } else { self.variant.plain_tolerance }
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// Hands one empty piece of work to every thread and waits for all of them: what a parallel call costs before it does
    /// anything (what a roofline calls dispatch).
    pub fn dispatch_nothing(&self) {
        self.threads.map(self.threads.count(), |_| ());
    }

    /// Cuts work otherwise than the product does, for experiments; results stay the same to the bit.
    #[doc(hidden)]
    pub fn set_split(&mut self, split: Split) {
        self.split = split;
    }

    /// Attention calls (one per layer) by route since the last reset. A route is `KERNEL:PATH` with PATH one of `f16`
    /// (the f16 arm), `bf16` (a layer stored as bf16), `packed` (records read directly), `window-only` (nothing was packed
    /// yet), `dequant-once`, `dequant-step`.
    pub fn routes(&self) -> &BTreeMap<String, u64> {
        &self.routes
    }

    /// Forgets the counts.
    pub fn reset_routes(&mut self) {
        self.routes.clear();
    }
}

/// Kernel names of this build, best first, with the reason when this processor cannot run one.
pub fn kernels() -> Vec<(&'static str, Result<(), String>)> {
    VARIANTS.iter().map(|v| (v.name, (v.available)())).collect()
}

fn check_len(what: &'static str, expected: usize, got: usize) -> Result<(), Error> {
    if expected == got { Ok(()) } else { Err(Error::Shape { what, expected, got }) }
}

fn check_options(options: &AttendOptions<'_>, entries: usize, q_heads: usize) -> Result<(), Error> {
    let no = |what, value, allowed| Err(Error::Number { what, value, allowed });
    if !options.sm_scale.is_finite() {
        return no("sm_scale", options.sm_scale, "a finite number");
    }
    if let Some(cap) = options.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
        return no("softcap", cap, "a finite number above 0");
    }
    if let Some(sinks) = options.sink_logits {
        check_len("length of sink_logits", q_heads, sinks.len())?;
        if let Some(&bad) = sinks.iter().find(|x| !x.is_finite()) {
            return no("a sink logit", bad, "a finite number");
        }
    }
    if !options.first_visible.is_empty() {
        check_len("length of first_visible", entries, options.first_visible.len())?;
    }
    Ok(())
}

/// A query that is no number would silently drop out of the maximum: refuse it with its place.
fn check_queries(
    q: &[f32],
    first_layer: usize,
    head_dim: usize,
    q_heads: usize,
    views: &[SeqView<'_>],
    batch: &[Rows],
) -> Result<(), Error> {
    let Some(at) = q.iter().position(|x| !x.is_finite()) else { return Ok(()) };
    let mut row = at / (q_heads * head_dim);
    for (i, view) in views.iter().enumerate() {
        let rows = batch[i % batch.len()].rows;
        if row < rows {
            return Err(Error::NotFinite {
                tensor: "Q",
                format: view.spec.plain.format,
                layer: first_layer + i / batch.len(),
                head: at / head_dim % q_heads,
                token: view.len - rows + row,
                value: q[at],
                seq: Some(batch[i % batch.len()].seq),
            });
        }
        row -= rows;
    }
    unreachable!("q has exactly the rows of the views")
}

/// A sequence of the cache as kernels read it.
struct CacheSource<'a> {
    view: SeqView<'a>,
    /// The dequant-step arm's f16 copy of the packed part, made anew for every call, and the position that it starts at.
    step: Option<(PlainLayout, usize, Vec<f16>)>,
}

impl<'a> CacheSource<'a> {
    /// `from`: the first position that any row sees.
    fn new(view: SeqView<'a>, arm: Arm, from: usize) -> Self {
        let start = if view.spec.record.is_some() { view.groups().start * view.spec.group_len() } else { 0 };
        let step = (arm == Arm::DequantStep).then(|| (view.spec.plain, start, dequantize_all(&view, from)));
        Self { view, step }
    }
}

/// Every record as f16 blocks `[groups * group_len / 32][kv_heads]`; zeros for groups before that of `from`.
fn dequantize_all(view: &SeqView<'_>, from: usize) -> Vec<f16> {
    let Some(layout) = view.spec.record.as_ref() else { return Vec::new() };
    let per_group = layout.group_len / BLOCK_LEN;
    let block_bytes = view.spec.plain.block_bytes(view.spec.shape.kv_heads);
    let mut rows = vec![f16::ZERO; view.groups().len() * per_group * block_bytes / size_of::<f16>()];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut rows);
    let seen = view.groups().zip(bytes.chunks_exact_mut(per_group * block_bytes));
    for (group, blocks) in seen.filter(|(group, _)| *group >= from / layout.group_len) {
        for head in 0..view.spec.shape.kv_heads {
            let blocks = blocks.chunks_exact_mut(block_bytes).map(|b| view.spec.plain.head_mut(b, head));
            dequantize_record(layout, head, view.record(head, group), &mut blocks.collect::<Vec<_>>());
        }
    }
    rows
}

impl Source for CacheSource<'_> {
    fn record(&self, head: usize, group: usize) -> &[u8] {
        self.view.record(head, group)
    }

    fn f16_block(&self, head: usize, position: usize) -> (&[f16], &[f16]) {
        self.view.block(head, position)
    }

    fn bf16_block(&self, head: usize, position: usize) -> (&[bf16], &[bf16]) {
        self.view.block(head, position)
    }

    fn dequantized_block(&self, head: usize, position: usize) -> (&[f16], &[f16]) {
        match &self.step {
            Some((layout, start, rows)) => {
                let bytes: &[u8] = bytemuck::cast_slice(rows);
                let block_bytes = layout.block_bytes(self.view.spec.shape.kv_heads);
                layout.head(&bytes[(position - start) / BLOCK_LEN * block_bytes..][..block_bytes], head)
            }
            None => self.view.copy_block(head, position).expect("arms that read records have no use for a copy"),
        }
    }

    fn sinks(&self, head: usize) -> (&[f16], &[f16]) {
        self.view.sinks(head).expect("a scheme with sinks has a sink block")
    }
}
