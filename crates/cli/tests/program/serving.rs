//! `kvant serve`: signals, flags, its log, and real clients: the `openai` package, a load generator and a browser. Python
//! packages are installed into the target folder. NOT here: each field and error of the API (crates/server/tests).

use crate::run::{command, finish, kvant};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A server of the program, on a free port.
pub struct Served {
    child: Child,
    address: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl Served {
    fn start(flags: &[&str]) -> Self {
        Self::by(command(), flags)
    }

    /// Started by a command that has its environment.
    pub fn by(mut command: Command, flags: &[&str]) -> Self {
        let mut child = command
            .args(["serve", "--port", "0", "--kv-memory", "256MiB"])
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (send, address) = std::sync::mpsc::channel();
        let written = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some((_, address)) = line.split_once("listening on http://") {
                    let _ = send.send(address.to_string());
                }
                written.lock().unwrap().push(line);
            }
        });
        let address = address.recv_timeout(Duration::from_secs(120)).expect("it listens");
        Self { child, address, log }
    }

    pub fn send(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let (address, body) = (&self.address, body.to_string());
        let method = if body == "null" { "GET" } else { "POST" };
        let len = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Waits for its end; the exit code and the log.
    pub fn ended(mut self) -> (Option<i32>, String) {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < Duration::from_secs(120), "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        // The reader of the log may be a line behind.
        std::thread::sleep(Duration::from_millis(100));
        let log = self.log.lock().unwrap().join("\n");
        (status.code(), log)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ask(prompt: &str, max_tokens: usize) -> Value {
    json!({ "model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": true })
}

pub fn rest(mut stream: impl Read) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_signal_lets_running_requests_end_and_the_exit_code_is_0() {
    for (name, log_prompts) in [("-TERM", false), ("-INT", true)] {
        let served = Served::start(if log_prompts { &["--log-prompts"] } else { &[] });
        let mut stream = BufReader::new(served.send("/v1/completions", &ask("The lighthouse keeper", 64)));
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0, "a first event comes");
        }
        served.signal(name);
        assert!(rest(stream).contains("data: [DONE]"), "the stream ends whole");
        let (code, log) = served.ended();
        assert_eq!(code, Some(0), "{log}");
        let lines: Vec<&str> = log.lines().filter(|l| l.contains("route=\"/v1/completions\"")).collect();
        assert_eq!(lines.len(), 1, "one line per request: {log}");
        for part in [
            "id=",
            "status=200",
            "prompt_tokens=3",
            "completion_tokens=64",
            "cached_tokens=",
            "queue_ms=",
            "ttft_ms=",
            "duration_ms=",
            "finish_reason=\"length\"",
        ] {
            assert!(lines[0].contains(part), "{part}: {}", lines[0]);
        }
        assert_eq!(log.contains("lighthouse"), log_prompts, "{log}");
        assert!(!log.contains("panicked"), "{log}");
    }
}

#[test]
fn what_does_not_end_in_time_is_ended() {
    let served = Served::start(&["--drain-seconds", "0", "--log-format", "json"]);
    let stream = served.send("/v1/completions", &ask("Once", 8000));
    std::thread::sleep(Duration::from_millis(300));
    served.signal("-TERM");
    let text = rest(stream);
    assert!(text.contains("shutting_down") && !text.contains("[DONE]"), "{text}");
    let (code, log) = served.ended();
    assert_eq!(code, Some(0), "{log}");
    let line = log.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok()).find(|l| l["message"] == "request");
    assert_eq!(line.unwrap()["route"], "/v1/completions");
}

#[test]
fn bad_flags_are_refused_before_a_model_is_loaded() {
    for (args, error) in [
        (&["--port", "65536"][..], "0 to 65535"),
        (&["--port", "-1"], "0 to 65535"),
        (&["--max-requests", "0"], "at least 1"),
        (&["--max-requests", "-5"], "at least 1"),
        (&["--max-waiting", "-1"], "from 0"),
        (&["--kv-memory", "0"], "at least one byte"),
        (&["--kv-memory", "lots"], "--kv-memory"),
        (&["--step-tokens", "0"], "at least 1"),
        (&["--drain-seconds", "-1"], "from 0 to 86400"),
        (&["--kv", "k9v4g64"], "k9v4g64"),
        (&["--kv", "nothing.toml"], "nothing.toml"),
        (&["--kernel", "abacus"], "unknown kernel"),
        (&["--model", "gpt-17"], "unknown model"),
        (&["--model", "no/such.gguf"], "no model file"),
        (&["--swap-dir", "/nonexistent/folder"], "swap folder"),
        (&["--api-key", ""], "API key"),
        (&["--api-key", "two words"], "API key"),
        (&["--log-format", "xml"], "xml"),
        (&["--threads", "0"], "at least 1"),
        (&["--kv", "f16", "--arm", "fused"], "packs nothing"),
        (&["--arm", "dequant-once"], "cannot be moved out"),
        (&["--allowed-host", "kvant.lan:80"], "without a port"),
        (&["--allowed-host", ""], "--allowed-host"),
    ] {
        kvant([&["serve"], args].concat()).is_refused(error);
    }
    finish(command().env("KVANT_API_KEY", "").arg("serve"), "").is_refused("API key");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    kvant(["serve", "--port", &port]).is_refused("cannot listen on 127.0.0.1");
}

/// The worked example of the operator's guide is what the program says.
#[test]
fn the_guide_sizes_memory_as_the_program_does() {
    let guide = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/serving.md")).unwrap();
    let flags = ["info", "--memory", "2GiB", "--len", "2000", "--kv", "f16,safe,balanced,small"];
    let table = kvant(flags).stdout;
    let rows: Vec<&str> = table.lines().skip_while(|l| !l.starts_with("scheme  ")).collect();
    assert_eq!(rows.len(), 6, "{table}");
    for row in rows {
        assert!(guide.contains(row.trim_end()), "docs/serving.md does not have: {row}");
    }
    let fits: Value = serde_json::from_str(&kvant(flags.iter().chain(&["--json"])).stdout).unwrap();
    let (fits, f16) = (&fits["fits"], &fits["fits"]["rows"][0]);
    let of = |name: &str| fits[name].as_u64().unwrap();
    let per_token = 2 * of("layers") * of("kv_heads") * of("head_dim") * 2;
    let tokens = of("kv_len").next_multiple_of(32);
    assert_eq!(f16["request_bytes"], tokens * per_token);
    for number in [per_token, tokens, tokens * per_token] {
        assert!(guide.contains(&number.to_string()), "docs/serving.md does not have {number}");
    }
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serving").join(name)
}

/// A Python of its own with the packages of requirements.txt; made once, and again when those change.
fn packages() -> PathBuf {
    static LOCK: Mutex<()> = Mutex::new(());
    let _one = LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let wanted = std::fs::read_to_string(script("requirements.txt")).unwrap();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serving-clients");
    let (python, made) = (folder.join("bin/python"), folder.join("made"));
    if std::fs::read_to_string(&made).is_ok_and(|m| m == wanted) {
        return python;
    }
    let _ = std::fs::remove_dir_all(&folder);
    let run = |program: &Path, args: &[&str]| {
        let out = Command::new(program).args(args).output().unwrap();
        assert!(out.status.success(), "{program:?} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    };
    run(Path::new("python3"), &["-m", "venv", folder.to_str().unwrap()]);
    let requirements = script("requirements.txt");
    run(
        &python,
        &["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements.to_str().unwrap()],
    );
    std::fs::write(made, wanted).unwrap();
    python
}

fn passes(command: &mut Command, served: &Served) {
    let out = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let log = served.log.lock().unwrap().join("\n");
    assert!(out.status.success(), "{stdout}\n{stderr}\nserver: {log}");
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn the_openai_package_and_a_load_generator_get_what_they_expect() {
    let python = packages();
    let served = Served::start(&["--api-key", "secret", "--max-requests", "6", "--max-waiting", "4"]);
    let base = format!("http://{}", served.address);
    passes(Command::new(&python).arg(script("openai_client.py")).args([&base, "secret"]), &served);
    let mut locust = Command::new(&python);
    locust.args([
        "-m",
        "locust",
        "--headless",
        "--only-summary",
        "--users",
        "12",
        "--spawn-rate",
        "12",
        "--run-time",
        "8s",
    ]);
    locust.args(["--host", &base, "--locustfile"]).arg(script("locustfile.py")).env("LOCUST_KEY", "secret");
    passes(&mut locust, &served);
    served.signal("-TERM");
    let (code, log) = served.ended();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn a_browser_shows_the_page_and_it_is_used_by_keyboard() {
    let Some(chromium) = ["chromium", "chromium-browser", "google-chrome"].iter().find(|c| {
        let found = Command::new(c).arg("--version").output();
        found.is_ok_and(|o| o.status.success())
    }) else {
        println!("skipped: no browser (chromium) here, so that nobody has looked at the server's page");
        return;
    };
    let served = Served::start(&["--api-key", "secret"]);
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("page.png");
    let mut person = Command::new("python3");
    person.arg(script("page.py")).args([chromium, &*format!("http://{}", served.address), "secret"]).arg(&picture);
    passes(&mut person, &served);
    // An empty picture of this size compresses to a few kilobytes.
    assert!(std::fs::read(&picture).unwrap().len() > 15_000, "the picture is almost empty");
}
