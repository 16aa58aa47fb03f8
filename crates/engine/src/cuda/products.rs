//! Which way each product takes. In: a product and a number of rows; out: the way that was fastest when all were timed.
//! NOT here: the ways themselves (few.cu through kernels.rs, library.rs).
//!
//! Contestants of a product are timed once per size, captured into a graph that runs over several layers, so that weights
//! come from memory as in a step and no launch is waited for.

use super::buffers::Buffers;
use super::kernels::{FEW_ROWS, FewKind, FewProduct, at};
use super::library::{Form, Library, Sums, Way};
use super::weights::Weights;
use crate::Error;
use kvant_kv::cuda::Gpu;
use kvant_kv::cuda::cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvant_kv::cuda::cudarc::driver::{CudaGraph, DriverError};
use std::collections::HashMap;

/// Products of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Product {
    Qkv,
    Output,
    GateUp,
    Down,
    Head,
}

impl Product {
    pub const ALL: [Self; 5] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down, Self::Head];
}

/// How a product is computed.
enum Route {
    /// few.cu over this many blocks.
    Few(u32),
    Library(Way),
}

/// What was chosen for one product and number of rows, and what it took when it was timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// `qkv`, `output`, `gate_up`, `down` or `head`.
    pub product: String,
    /// Rows.
    pub rows: usize,
    /// `few` with its blocks, or `library` with its place among the ways that the library offers.
    pub route: String,
    /// One product, with the norm in front of it or the gate behind it.
    pub time_ns: f64,
    /// Bytes of weights per second, 1e9 B/s.
    pub gbps: f64,
}

/// What a way is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Size {
    pub rows: usize,
    /// Whether a row's result must not depend on how many others there are: few.cu alone promises that.
    pub invariant: bool,
}

/// All ways chosen so far.
pub(super) struct Products {
    library: Library,
    routes: HashMap<(Product, Size), Route>,
    choices: Vec<Choice>,
}

/// Most layers that contestants are timed over: enough to leave the second-level cache.
const TIMED_LAYERS: usize = 12;
/// Rounds of which the fastest counts.
const ROUNDS: usize = 3;

/// Runs `work` as one graph instead of launch by launch.
pub(super) fn captured(gpu: &Gpu, work: impl FnOnce() -> Result<(), Error>) -> Result<CudaGraph, Error> {
    let stream = gpu.stream();
    let driver = |e: DriverError| Error::from(kvant_kv::Error::from(e));
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).map_err(driver)?;
    let outcome = work();
    // Whatever happened, the stream must leave the capture.
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    outcome?;
    graph.map_err(driver)?.ok_or_else(|| kvant_kv::Error::Gpu { why: "a step was captured without work".into() }.into())
}

impl Products {
    pub fn new(gpu: &std::sync::Arc<Gpu>) -> Result<Self, Error> {
        Ok(Self { library: Library::open(gpu)?, routes: HashMap::new(), choices: Vec::new() })
    }

    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Chooses for all products of steps of this size and `wanted` rows of logits. What buffers hold is lost.
    pub fn prepare(&mut self, weights: &Weights, buffers: &Buffers, size: Size, wanted: usize) -> Result<(), Error> {
        for product in Product::ALL {
            let size = if product == Product::Head { Size { rows: wanted, ..size } } else { size };
            if !self.routes.contains_key(&(product, size)) {
                let (route, choice) = self.fastest(weights, buffers, product, size)?;
                self.routes.insert((product, size), route);
                self.choices.push(choice);
            }
        }
        Ok(())
    }

    /// Puts a product of a layer on the stream. `size` was prepared; of the head `first` is the first row.
    pub fn run(
        &self,
        weights: &Weights,
        buffers: &Buffers,
        product: Product,
        layer: usize,
        (first, size): (usize, Size),
    ) -> Result<(), Error> {
        match self.routes.get(&(product, size)) {
            Some(route) => self.run_route(route, weights, buffers, product, layer, (first, size.rows)),
            None => Err(Error::Unsupported { what: format!("{product:?} of {size:?} that nobody prepared") }),
        }
    }

    fn run_route(
        &self,
        route: &Route,
        weights: &Weights,
        buffers: &Buffers,
        product: Product,
        layer: usize,
        (first, rows): (usize, usize),
    ) -> Result<(), Error> {
        let (gpu, kernels, config) = (&weights.gpu, &weights.kernels, &weights.config);
        let Matrix { w, norm, n, k } = Matrix::of(weights, product, layer);
        let normed = norm != 0;
        let out = match product {
            Product::Qkv => at(gpu, &buffers.qkv),
            Product::Output | Product::Down => at(gpu, &buffers.stream),
            Product::GateUp => at(gpu, &buffers.gate_up),
            Product::Head => at(gpu, &buffers.logits),
        };
        let x = match product {
            Product::Output => at(gpu, &buffers.attended),
            Product::Down => at(gpu, &buffers.gated),
            _ => at(gpu, &buffers.stream),
        };
        match route {
            Route::Few(grid) => {
                let (kind, n, out) = match product {
                    Product::Qkv => (FewKind::NormedStore, n, out),
                    Product::Output | Product::Down => (FewKind::PlainAdd, n, out),
                    Product::GateUp => (FewKind::NormedGated, n / 2, at(gpu, &buffers.gated)),
                    Product::Head => (FewKind::NormedLogits, n, out),
                };
                let (epsilon, width) = (config.norm_epsilon, (n * kind.out_bytes()) as u64);
                for part in (0..rows).step_by(FEW_ROWS) {
                    let (first, rows) = (first + part, FEW_ROWS.min(rows - part));
                    let out = out + part as u64 * width;
                    kernels.few(&FewProduct { kind, x, norm, w, out, rows, n, k, epsilon, first, grid: *grid })?;
                }
                Ok(())
            }
            Route::Library(way) => {
                let x = if normed { at(gpu, &buffers.normed) } else { x };
                if normed {
                    kernels.norm(at(gpu, &buffers.stream), norm, x, (first, rows), config)?;
                }
                // SAFETY: buffers have room for every prepared number of rows, weights are n by k.
                unsafe { self.library.run(way, x, w, out) }?;
                match product {
                    Product::GateUp => kernels.gate(out, at(gpu, &buffers.gated), rows, n / 2),
                    _ => Ok(()),
                }
            }
        }
    }

    fn fastest(
        &self,
        weights: &Weights,
        buffers: &Buffers,
        product: Product,
        Size { rows, invariant }: Size,
    ) -> Result<(Route, Choice), Error> {
        let Matrix { n, k, .. } = Matrix::of(weights, product, 0);
        let sums = match product {
            Product::Qkv | Product::GateUp => Sums::Bf16,
            Product::Output | Product::Down => Sums::Added,
            Product::Head => Sums::F32,
        };
        let mut contestants: Vec<(String, Route)> = Vec::new();
        let (kind, outputs) = match product {
            Product::Qkv => (FewKind::NormedStore, n),
            Product::Output | Product::Down => (FewKind::PlainAdd, n),
            Product::GateUp => (FewKind::NormedGated, n / 2),
            Product::Head => (FewKind::NormedLogits, n),
        };
        let fits = weights.kernels.few_bytes(kind, rows.min(FEW_ROWS), outputs, k).is_some();
        if fits && (rows <= FEW_ROWS || invariant) {
            let grids = weights.kernels.few_grids(outputs);
            contestants.extend(grids.into_iter().map(|grid| (format!("few {grid}"), Route::Few(grid))));
        }
        let ways = if invariant { Vec::new() } else { self.library.ways(Form { rows, n, k, sums })? };
        contestants.extend(ways.into_iter().enumerate().map(|(i, way)| (format!("library {i}"), Route::Library(way))));
        let mut best: Option<(f64, String, Route)> = None;
        let mut why = None;
        for (name, route) in contestants {
            match self.time(&route, weights, buffers, product, rows) {
                Ok(ns) if best.as_ref().is_none_or(|(least, ..)| ns < *least) => best = Some((ns, name, route)),
                Ok(_) => {}
                // A way that the library offers and then refuses is none.
                Err(e) => why = Some(e),
            }
        }
        let Some((time_ns, name, route)) = best else {
            let none = format!("a product of {rows} x {k} with {n} x {k}, for which no way runs");
            return Err(why.unwrap_or(Error::Unsupported { what: none }));
        };
        let gbps = (n * k * 2) as f64 / time_ns;
        let product = match product {
            Product::Qkv => "qkv",
            Product::Output => "output",
            Product::GateUp => "gate_up",
            Product::Down => "down",
            Product::Head => "head",
        };
        Ok((route, Choice { product: product.into(), rows, route: name, time_ns, gbps }))
    }

    /// Nanoseconds of one product.
    fn time(
        &self,
        route: &Route,
        weights: &Weights,
        buffers: &Buffers,
        product: Product,
        rows: usize,
    ) -> Result<f64, Error> {
        let gpu = &weights.gpu;
        let driver = |e: DriverError| Error::from(kvant_kv::Error::from(e));
        let run = |layer| self.run_route(route, weights, buffers, product, layer, (0, rows));
        // Once outside of a graph: libraries load their kernels on first use.
        run(0)?;
        gpu.synchronize()?;
        // The head is one matrix, several times as large as the cache in between.
        let layers = if product == Product::Head { 2 } else { weights.layers.len().min(TIMED_LAYERS) };
        let graph = captured(gpu, || (0..layers).try_for_each(|layer| run(layer.min(weights.layers.len() - 1))))?;
        let event = || gpu.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(driver);
        let mut least = f64::INFINITY;
        for _ in 0..=ROUNDS {
            let (start, end) = (event()?, event()?);
            start.record(gpu.stream()).map_err(driver)?;
            graph.launch().map_err(driver)?;
            end.record(gpu.stream()).map_err(driver)?;
            least = least.min(f64::from(start.elapsed_ms(&end).map_err(driver)?));
        }
        Ok(least * 1e6 / layers as f64)
    }
}

/// A product's weights: their address, that of the norm in front (0: none), and their shape.
struct Matrix {
    w: u64,
    norm: u64,
    n: usize,
    k: usize,
}

impl Matrix {
    fn of(weights: &Weights, product: Product, layer: usize) -> Self {
        let (gpu, c, l) = (&weights.gpu, &weights.config, &weights.layers[layer]);
        let (q_len, kv_len) = (c.shape.q_heads * c.shape.head_dim, c.shape.row_len());
        let (w, norm, n, k) = match product {
            Product::Qkv => (&l.qkv, at(gpu, &l.attention_norm), q_len + 2 * kv_len, c.hidden),
            Product::Output => (&l.output, 0, c.hidden, q_len),
            Product::GateUp => (&l.gate_up, at(gpu, &l.feed_forward_norm), 2 * c.feed_forward, c.hidden),
            Product::Down => (&l.down, 0, c.hidden, c.feed_forward),
            Product::Head => {
                (weights.head.as_ref().unwrap_or(&weights.embedding), at(gpu, &weights.norm), c.vocabulary, c.hidden)
            }
        };
        Self { w: at(gpu, w), norm, n, k }
    }
}
