//! `kvant info`: what this machine and build can do, and what fits. In: a memory, a length, a model or shape, schemes; out:
//! instruction sets, kernels with the reason where one cannot run, and requests per scheme. NOT here: measuring.

use crate::args::{InfoArgs, cores};
use crate::failure::Failure;
use crate::table::{Align, Table};
use crate::{models, output, rss, session, shape_text, units};
use anyhow::Result;
use kvant_engine::requests_on_card;
use kvant_kv::cuda::{Gpu, GpuCache};
use kvant_kv::{Arm, LayerConfig, LayerShape, Scheme};
use kvant_roofline::cost::resident_bytes;
use serde::Serialize;

#[derive(Serialize)]
struct Info {
    version: &'static str,
    machine: MachineInfo,
    instruction_sets: Vec<InstructionSet>,
    kernels: Vec<Kernel>,
    products: Vec<Kernel>,
    threads: usize,
    devices: Vec<String>,
    fits: Fits,
}

#[derive(Serialize)]
struct MachineInfo {
    os: &'static str,
    arch: &'static str,
    cpu: String,
    cores: usize,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
}

#[derive(Serialize)]
struct InstructionSet {
    name: &'static str,
    available: bool,
}

#[derive(Serialize)]
struct Kernel {
    name: &'static str,
    available: bool,
    why: Option<String>,
}

#[derive(Serialize)]
struct Fits {
    memory_bytes: usize,
    kv_len: usize,
    model: Option<String>,
    context: Option<usize>,
    layers: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    scheme: String,
    bits: f64,
    request_bytes: usize,
    times_smaller: f64,
    requests: usize,
}

/// Runs the command.
pub fn run(args: &InfoArgs) -> Result<()> {
    let info = gather(args)?;
    if args.json { output::json(&info) } else { output::text("the report", &render(&info)) }
}

/// What work can run on, and the bytes that are free on a GPU. `gpu`: one is asked for, so that it is an error when there is none.
fn devices(gpu: bool) -> Result<(Vec<String>, Option<usize>), Failure> {
    let cpu = "cpu".to_string();
    match Gpu::open(0).and_then(|card| Ok((card.memory()?, card))) {
        Ok(((free, all), card)) => {
            let (free_mib, all) = (units::mib(free), units::mib(all));
            let name = format!("cuda: {}, {}, {free_mib} free of {all}", card.name(), card.architecture());
            Ok((vec![cpu, name], Some(free)))
        }
        Err(e) if gpu => Err(e.into()),
        Err(_) => Ok((vec![cpu], None)),
    }
}

fn gather(args: &InfoArgs) -> Result<Info> {
    let threads = args.machine.host_threads();
    let on_gpu = args.machine.on_gpu()?;
    let (devices, free_on_gpu) = devices(on_gpu)?;
    let schemes = shape_text::schemes(&args.kv)?;
    let memory = rss::machine_memory_bytes();
    let memory_bytes = match (args.memory, free_on_gpu.filter(|_| on_gpu), memory) {
        (Some(bytes), ..) => bytes,
        (None, Some(free), _) => free,
        (None, None, Some((available, _))) => usize::try_from(available).unwrap_or(usize::MAX),
        (None, None, None) => {
            return Err(Failure::input(
                "this system does not say how much memory is available",
                "give --memory, as in --memory 8GiB",
            )
            .into());
        }
    };
    let Layers { model, context, layers, shape } = layers_of(args)?;
    let kv_len = args.len.unwrap_or(context.map_or(DEFAULT_LEN, |context| context.min(DEFAULT_LEN)));
    if let (Some(model), Some(context)) = (&model, context.filter(|&context| kv_len > context)) {
        return Err(Failure::input(
            format!("no request of {model} has {kv_len} tokens: its context holds {context}"),
            "take a smaller --len, or give --shape for a model of another context",
        )
        .into());
    }
    // In floating point, as the product may be beyond 64 bits. Nothing is larger than f16 (and bf16).
    let largest = layers as f64 * 4.0 * shape.row_len() as f64 * (kv_len + shape.head_dim) as f64;
    if largest > (1u64 << 60) as f64 {
        return Err(Failure::input(
            format!("{layers} layers of {} elements over {kv_len} tokens are beyond any memory", shape.row_len()),
            "take a smaller --shape or --len",
        )
        .into());
    }
    Ok(Info {
        version: env!("CARGO_PKG_VERSION"),
        machine: MachineInfo {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cpu: cpu_name(),
            cores: cores(),
            memory_bytes: memory.map(|m| m.1),
            memory_available_bytes: memory.map(|m| m.0),
        },
        instruction_sets: instruction_sets(),
        kernels: kernels(kvant_kv::attend::kernels()),
        products: kernels(kvant_engine::product_kernels()),
        threads,
        devices,
        fits: Fits {
            memory_bytes,
            kv_len,
            model,
            context,
            layers,
            q_heads: shape.q_heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            rows: schemes
                .iter()
                .map(|&s| row(s, layers, shape, kv_len, memory_bytes, on_gpu))
                .collect::<Result<_, _>>()?,
        },
    })
}

fn kernels(table: Vec<(&'static str, Result<(), String>)>) -> Vec<Kernel> {
    table.into_iter().map(|(name, runs)| Kernel { name, available: runs.is_ok(), why: runs.err() }).collect()
}

/// Tokens of a request when `--len` is left out.
const DEFAULT_LEN: usize = 4096;

/// A model's layers; name and context where they are those of a model and not of a `--shape`.
struct Layers {
    model: Option<String>,
    context: Option<usize>,
    layers: usize,
    shape: LayerShape,
}

fn layers_of(args: &InfoArgs) -> Result<Layers> {
    if let Some(text) = &args.shape {
        let [layers, q, kv, d] = shape_text::parts(text, ["layers", "q", "kv", "d"], "layers=30,q=9,kv=3,d=64")?;
        return Ok(Layers { model: None, context: None, layers, shape: shape_text::layer_shape(q, kv, d)? });
    }
    let name = args.model.as_deref().unwrap_or(models::DEFAULT);
    let (context, layers, shape) = match models::known(name) {
        Some(known) => {
            let shape = shape_text::layer_shape(known.q_heads, known.kv_heads, known.head_dim)?;
            (known.context, known.layers, shape)
        }
        None => {
            let config = session::locate(name)?.config;
            (config.context, config.layers, config.shape)
        }
    };
    Ok(Layers { model: Some(name.to_string()), context: Some(context), layers, shape })
}

/// A scheme's line. A GPU's pages are of another length, so a request takes other bytes there.
fn row(
    scheme: Scheme,
    layers: usize,
    shape: LayerShape,
    kv_len: usize,
    memory_bytes: usize,
    on_gpu: bool,
) -> Result<Row, Failure> {
    let layer = |scheme: Scheme| LayerConfig { shape, scheme, visible: None };
    let bytes_of = |scheme: Scheme| match on_gpu {
        true => GpuCache::bytes_of(&[layer(scheme)], Arm::of(scheme), 1, kv_len),
        false => Ok(resident_bytes(shape, scheme, kv_len)),
    };
    let (one, plain) = (bytes_of(scheme)?, bytes_of(Scheme::F16)?);
    let request_bytes = layers * one;
    // There windows have a bound of their own.
    let requests = match on_gpu {
        true => requests_on_card(&[layer(scheme)], Arm::of(scheme), memory_bytes / layers, kv_len)?,
        false => memory_bytes / request_bytes,
    };
    Ok(Row {
        scheme: scheme.to_string(),
        bits: scheme.bits_per_element(shape.head_dim),
        request_bytes,
        times_smaller: plain as f64 / one as f64,
        requests,
    })
}

/// What a plain f16 cache of one request takes, divided by what this scheme takes: the same in every layer.
pub(super) fn times_smaller(scheme: Scheme, shape: LayerShape, kv_len: usize) -> f64 {
    resident_bytes(shape, Scheme::F16, kv_len) as f64 / resident_bytes(shape, scheme, kv_len) as f64
}

/// The processor's name as the system gives it.
pub(super) fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':').map(|(_, n)| n.trim().to_string()));
    name.unwrap_or_else(|| "unknown".to_string())
}

/// The instruction sets that kernels of this project ask for, now or planned.
fn instruction_sets() -> Vec<InstructionSet> {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! sets {
            ($($name:tt),*) => { vec![$(InstructionSet { name: $name, available: is_x86_feature_detected!($name) }),*] };
        }
        sets!(
            "avx2",
            "fma",
            "f16c",
            "avxvnni",
            "avx512f",
            "avx512bw",
            "avx512vl",
            "avx512vbmi",
            "avx512vnni",
            "avx512bf16"
        )
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! sets {
            ($($name:tt),*) => {
                vec![$(InstructionSet { name: $name, available: std::arch::is_aarch64_feature_detected!($name) }),*]
            };
        }
        sets!("neon", "dotprod", "fp16", "i8mm", "sve")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    Vec::new()
}

fn render(info: &Info) -> String {
    let m = &info.machine;
    let memory =
        |bytes: Option<u64>| bytes.map_or("unknown".into(), |b| units::mib(usize::try_from(b).unwrap_or(usize::MAX)));
    let sets = |available| {
        let names: Vec<_> = info.instruction_sets.iter().filter(|s| s.available == available).map(|s| s.name).collect();
        if names.is_empty() { "none".to_string() } else { names.join(" ") }
    };
    let mut text = format!(
        "kvant {}\nmachine       {} {}, {}\ndevices       {}\ncores         {}\nthreads       {} (by default one per core)\nmemory        {} available of {}\n\
         instructions  {}\nmissing       {}\n\n",
        info.version,
        m.os,
        m.arch,
        m.cpu,
        info.devices.join("; "),
        m.cores,
        info.threads,
        memory(m.memory_available_bytes),
        memory(m.memory_bytes),
        sets(true),
        sets(false),
    );
    let mut kernels = Table::new([
        ("kernels, best first", Align::Left),
        ("name", Align::Left),
        ("here", Align::Left),
        ("why not", Align::Left),
    ]);
    for (of, table) in [("attention", &info.kernels), ("products with weights", &info.products)] {
        for k in table {
            let here = if k.available { "yes" } else { "no" };
            kernels.row([of.into(), k.name.into(), here.into(), k.why.clone().unwrap_or_default()]);
        }
    }
    text += &kernels.render();
    let f = &info.fits;
    text += &format!(
        "\nrequests of {} tokens in {} of cache memory (weights not counted), {}{} layers, {} q heads, {} kv heads, head_dim {}:\n\n",
        f.kv_len,
        units::mib(f.memory_bytes),
        f.model.as_ref().map_or(String::new(), |m| format!("{m}: ")),
        f.layers,
        f.q_heads,
        f.kv_heads,
        f.head_dim
    );
    let mut fits = Table::new([
        ("scheme", Align::Left),
        ("bits per element", Align::Right),
        ("bytes per request", Align::Right),
        ("times smaller than f16", Align::Right),
        ("requests that fit", Align::Right),
    ]);
    for r in &f.rows {
        fits.row([
            r.scheme.clone(),
            format!("{:.2}", r.bits),
            units::mib(r.request_bytes),
            format!("{:.2}", r.times_smaller),
            r.requests.to_string(),
        ]);
    }
    text + &fits.render()
}
