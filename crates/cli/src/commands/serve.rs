//! `kvant serve`: answers the OpenAI API until SIGTERM or SIGINT. In: flags, the environment's key; out: HTTP, a log on
//! stderr, exit code 0 when it was asked to stop. NOT here: routes and connections (kvant-server), decoding (the engine).

use super::{check_kernel, check_rows};
use crate::args::{LogFormat, ServeArgs};
use crate::failure::Failure;
use crate::models::{self, HubName};
use crate::{output, rss, session};
use anyhow::Result;
use kvant_engine::{Arm, Limits};
use kvant_server::{Options, Server};
use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Where the key is read from when no flag gives it.
const KEY: &str = "KVANT_API_KEY";

/// Threads that read and write sockets: the rest of the processor is the engine's.
const SOCKET_THREADS: usize = 2;
/// Threads that split prompts into tokens.
const TOKENIZER_THREADS: usize = 2;

/// Exit code of a server that was told twice to stop.
const TOLD_TWICE: i32 = 1;

/// Runs the command.
pub fn run(args: &ServeArgs) -> Result<()> {
    // Cheap checks come before the model is loaded.
    let on_gpu = args.machine.on_gpu()?;
    check_kernel(args.kernel.as_deref())?;
    if on_gpu {
        for (flag, n) in [("--max-requests", Some(args.max_requests)), ("--step-tokens", args.step_tokens)] {
            check_rows(flag, n.unwrap_or(1))?;
        }
    }
    session::check_text(args.cache.kv.as_deref())?;
    let api_key = api_key(args.api_key.clone(), std::env::var_os(KEY))?;
    if let Some(folder) = &args.swap_dir {
        check_folder(folder)?;
    }
    let kv_memory = if on_gpu { args.kv_memory } else { Some(kv_memory(args.kv_memory)?) };
    let located = session::locate(&args.model)?;
    let (schemes, arm) = session::schemes_and_arm(args.cache.kv.as_deref(), args.cache.arm, located.config.layers)?;
    if arm == Arm::DequantOnce && !on_gpu {
        let hint = "leave --arm out";
        return Err(
            Failure::input("--arm dequant-once keeps a copy that requests cannot be moved out with", hint).into()
        );
    }
    session::check_schemes(&schemes, &located.config)?;
    let listener = listen(&args.host, args.port)?;
    let address = listener.local_addr()?;
    start_log(args.log_format);
    log_panics();

    let limits = Limits {
        kv_memory,
        max_running: args.max_requests,
        step_tokens: args.step_tokens,
        // On a GPU nothing is shared yet.
        share_prefixes: !args.no_prefix_sharing && !on_gpu,
        swap: args.swap_dir.clone(),
        // A long prompt is to hold nobody up.
        prompts_first: false,
    };
    let kernel = args.kernel.as_deref();
    let (model, engine) = session::model_and_engine(&args.machine, &located, kernel, arm, schemes, limits)?;
    // Who finds no window waits as well.
    let running = engine.most_running().min(args.max_requests);
    if running < args.max_requests {
        output::note(format_args!(
            "warning: of {} requests {running} are decoded at once, others wait: windows take a fourth of the cache's memory at most \
             (a larger --kv-memory or a scheme with a smaller window makes room for more)",
            args.max_requests
        ));
    }
    let options = Options {
        scheme: engine.schemes().map_err(Failure::from)?.to_string(),
        max_running: running,
        max_waiting: args.max_waiting + (args.max_requests - running),
        drain: Duration::from_secs(args.drain_seconds),
        max_body_bytes: args.max_body,
        log_prompts: args.log_prompts,
        hosts: hosts(&args.allowed_host, api_key.is_some(), address.ip().is_loopback()),
        api_key,
        ..Options::new(model_name(&args.model, located.path()))
    };
    if options.api_key.is_none() && !address.ip().is_loopback() {
        output::note(format_args!(
            "warning: everyone who reaches {address} may use this server: no API key is set (--api-key or {KEY})"
        ));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SOCKET_THREADS)
        .max_blocking_threads(TOKENIZER_THREADS)
        .enable_all()
        .build()?;
    let ended = runtime.block_on(async {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (name, scheme) = (options.model.clone(), options.scheme.clone());
        let server = Server::new(engine, model, options)?;
        output::note(format_args!("{name} with cache {scheme}; listening on http://{address}"));
        let stop = async move {
            told(&mut terminate, &mut interrupt).await;
            tokio::spawn(async move {
                told(&mut terminate, &mut interrupt).await;
                output::note("told twice to stop: running requests are not waited for");
                std::process::exit(TOLD_TWICE);
            });
        };
        let gone = |e| Failure::proof(e, "the log's last lines say why; `kvant serve` can be started again");
        server.run(listener, stop).await.map_err(gone)?;
        anyhow::Ok(())
    });
    // A prompt that is being split into tokens for nobody is not waited for.
    runtime.shutdown_background();
    ended
}

async fn told(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// The key of the flag, else of the environment.
fn api_key(flag: Option<String>, environment: Option<std::ffi::OsString>) -> Result<Option<String>, Failure> {
    let key = match (flag, environment) {
        (Some(key), _) => key,
        (None, None) => return Ok(None),
        (None, Some(key)) => key.into_string().map_err(|_| {
            Failure::input(format!("{KEY} is not UTF-8 text"), "a key is what clients send in a header")
        })?,
    };
    // Whoever set an empty key believes that there is one.
    if key.is_empty() || !key.chars().all(|c| c.is_ascii_graphic()) {
        return Err(Failure::input(
            format!("the API key (--api-key or {KEY}) must be one or more visible ASCII characters"),
            format!("leave --api-key out and unset {KEY} to serve without a key"),
        ));
    }
    Ok(Some(key))
}

/// Names that requests may call the server by, besides localhost and addresses; None: any. A server that whoever is on
/// this machine may use is not to be used by the pages they look at. Where a key is needed or other machines reach it,
/// names are the network's business, unless some are given.
fn hosts(given: &[String], key: bool, loopback: bool) -> Option<Vec<String>> {
    (!given.is_empty() || loopback && !key).then(|| given.to_vec())
}

/// Half of what is available now where no flag says: the rest is for weights, prompts and other programs.
fn kv_memory(flag: Option<usize>) -> Result<usize, Failure> {
    let half = || rss::machine_memory_bytes().and_then(|(available, _)| usize::try_from(available / 2).ok());
    flag.or_else(half).ok_or_else(|| {
        Failure::input(
            "this system does not say how much memory is available",
            "give --kv-memory, as in --kv-memory 2GiB",
        )
    })
}

/// Whether files can be made in a folder.
fn check_folder(folder: &Path) -> Result<(), Failure> {
    tempfile::Builder::new().prefix(".kvant-").tempfile_in(folder).map(drop).map_err(|e| {
        let what = format!("cannot write to the swap folder {}: {}", folder.display(), e.kind());
        Failure::input(what, "--swap-dir takes a folder that exists and that you may write to")
    })
}

fn listen(host: &str, port: u16) -> Result<TcpListener, Failure> {
    let hint =
        "--host takes an address of this machine (127.0.0.1, 0.0.0.0, ::1), --port one that nobody listens on (0: any)";
    let refused = |e: std::io::Error| Failure::input(format!("cannot listen on {host} port {port}: {e}"), hint);
    kvant_server::listen((host, port)).map_err(refused)
}

/// What `/v1/models` calls the model: the name that `--model` was given, OWNER/NAME for one of the hub, or the name of its
/// folder, or of its file without the ending. `path` is where it was found.
fn model_name(flag: &str, path: &Path) -> String {
    if let Some(known) = models::known(flag) {
        return known.name.to_string();
    }
    if let Some(name) = HubName::of(flag, path) {
        return name.repository;
    }
    // A folder may be named by dots alone.
    let real = path.file_name().is_none().then(|| path.canonicalize().ok()).flatten();
    let path = real.as_deref().unwrap_or(path);
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| flag.to_string(), |name| name.to_string_lossy().into_owned())
}

/// From now on a panic is one line of the log, which says where. Its words may quote a prompt.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let at = panic.location().map(ToString::to_string).unwrap_or_default();
        let thread = std::thread::current();
        tracing::error!(at, thread = thread.name(), "panicked");
    }));
}

/// Lines on stderr, lost when it takes nothing.
fn start_log(format: LogFormat) {
    let log = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).log_internal_errors(false);
    match format {
        LogFormat::Text => log.with_target(false).init(),
        LogFormat::Json => log.with_target(false).json().flatten_event(true).init(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_flags_or_the_environments_and_never_empty() {
        let of = |flag: Option<&str>, env: Option<&str>| api_key(flag.map(String::from), env.map(Into::into));
        assert_eq!(of(None, None).unwrap(), None);
        assert_eq!(of(None, Some("e")).unwrap().unwrap(), "e");
        assert_eq!(of(Some("f"), Some("e")).unwrap().unwrap(), "f");
        for bad in ["", "two words", "ключ"] {
            assert!(of(Some(bad), None).is_err() && of(None, Some(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn models_are_called_by_name_or_file() {
        assert_eq!(model_name(models::DEFAULT, Path::new("x/y.gguf")), models::DEFAULT);
        assert_eq!(model_name("x/My.Model.Q4.gguf", Path::new("x/My.Model.Q4.gguf")), "My.Model.Q4");
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("Qwen3-0.6B");
        std::fs::create_dir(&folder).unwrap();
        assert_eq!(model_name(folder.to_str().unwrap(), &folder), "Qwen3-0.6B");
        assert_eq!(model_name("x", &folder.join(".")), "Qwen3-0.6B");
        for flag in ["Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B@main", "hf:Qwen/Qwen3-0.6B/a.gguf"] {
            let named = flag.strip_prefix("hf:").map_or_else(|| format!("hf:{flag}"), |_| flag.to_string());
            let path = HubName::read(&named).unwrap().unwrap().path();
            assert_eq!(model_name(flag, &path), "Qwen/Qwen3-0.6B", "{flag}");
        }
        // A path that looks like a name of the hub.
        assert_eq!(model_name("Qwen/Qwen3-0.6B", Path::new("Qwen/Qwen3-0.6B.gguf")), "Qwen3-0.6B");
    }

    #[test]
    fn a_local_server_without_a_key_wants_to_be_called_by_its_name() {
        let names = ["kvant.lan".to_string()];
        assert_eq!(hosts(&[], false, true), Some(vec![]));
        assert_eq!(hosts(&names, false, true), Some(names.to_vec()));
        assert_eq!((hosts(&[], true, true), hosts(&[], false, false)), (None, None));
        assert_eq!(hosts(&names, true, false), Some(names.to_vec()));
    }
}
