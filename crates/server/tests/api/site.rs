//! A server under test and a client of few lines. In: options; out: answers as status, headers and body.

use crate::tiny_model::Tiny;
use kvant_engine::{Arm, Engine, EngineOptions, Limits, LoadedModel, Products, load_schemes};
use kvant_kv::RowCodec;
use kvant_server::{Options, ServeError, Server, listen};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What tests may choose.
pub struct Setup {
    pub tiny: Tiny,
    pub limits: Limits,
    pub options: Options,
    /// Sees the keys and values of every step.
    pub codec: Option<Arc<dyn RowCodec>>,
}

impl Default for Setup {
    fn default() -> Self {
        let limits = Limits { max_running: 8, prompts_first: false, ..Limits::default() };
        Self {
            tiny: Tiny::default(),
            limits,
            options: Options { max_running: 8, max_waiting: 8, ..Options::new("tiny") },
            codec: None,
        }
    }
}

/// A model whose steps take long enough to come between.
pub fn slow() -> Tiny {
    Tiny { layers: 6, hidden: 512, forward: 1024, context: 8000, ..Tiny::default() }
}

/// Keys and values as they are, after a while: steps of an exact length.
pub struct Waits(pub Duration);

impl RowCodec for Waits {
    fn round_trip(&self, _: usize, _: &mut [f32], _: &mut [f32]) {
        // Called for both kv heads of both layers.
        std::thread::sleep(self.0 / 4);
    }
}

/// A server that runs; it ends with the value.
pub struct Site {
    pub address: SocketAddr,
    pub key: Option<String>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<Result<(), ServeError>>>,
}

impl Site {
    pub fn start(setup: Setup) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = setup.tiny.parts().write(folder.path(), "tiny.gguf");
        let model = Arc::new(LoadedModel::load(&path, 1, Products::Quantized, &|_, _| ()).unwrap());
        let schemes = load_schemes("k4v4g32w32s4p64", setup.tiny.layers).unwrap();
        let options = EngineOptions { threads: 1, kernel: None, arm: Arm::Fused, schemes, limits: setup.limits };
        let mut engine = Engine::new(model.clone(), options).unwrap();
        if let Some(codec) = setup.codec {
            engine.pass_every_row(codec);
        }
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let listener = listen("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let key = setup.options.api_key.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let server = Server::new(engine, model, setup.options)?;
                server.run(listener, async { drop(stopped.await) }).await
            })
        });
        Self { address, key, stop: Some(stop), thread: Some(thread) }
    }

    /// Asks it to stop, and does not wait.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has ended.
    pub fn ended(&mut self) -> Result<(), ServeError> {
        self.stop();
        self.thread.take().expect("it ends once").join().expect("no panic")
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request and leaves the answer in the socket.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> TcpStream {
        let mut stream = self.connect();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        head += &format!("Content-Length: {}\r\n", body.len());
        if let Some(key) = &self.key {
            head += &format!("Authorization: Bearer {key}\r\n");
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        // A server that has answered before the body was sent may have closed.
        let _ = stream.write_all(body);
        stream
    }

    pub fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        Answer::read(self.send(method, path, headers, body))
    }

    /// Asks by another name for the server.
    pub fn get_as(&self, host: &str, path: &str) -> Answer {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        Answer::read(stream)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, &[], body.to_string().as_bytes())
    }

    pub fn complete(&self, body: Value) -> Answer {
        self.post("/v1/completions", &with_model(body))
    }

    pub fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", &with_model(body))
    }

    pub fn status(&self) -> Value {
        self.get("/status").json()
    }

    /// Waits until the status looks so; fails after a time that no machine needs.
    #[track_caller]
    pub fn until(&self, what: &str, seen: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let status = self.status();
            if seen(&status) {
                return status;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{what} does not come: {status}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn with_model(mut body: Value) -> Value {
    if body.get("model").is_none() {
        body["model"] = "tiny".into();
    }
    body
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn read(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let (status, headers) = head(&mut reader);
        let mut body = Vec::new();
        let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
        if chunked {
            while let Some(chunk) = chunk(&mut reader) {
                body.extend(chunk);
            }
        } else {
            let _ = reader.read_to_end(&mut body);
        }
        Self { status, headers, body }
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// Objects of a stream, without its `[DONE]`, and whether that was there.
    pub fn events(&self) -> (Vec<Value>, bool) {
        let text = self.text();
        let data: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
        let done = data.last() == Some(&"[DONE]");
        let objects = data.iter().filter(|d| **d != "[DONE]").map(|d| serde_json::from_str(d).unwrap()).collect();
        (objects, done)
    }

    /// The contract of every refusal: this status, an error object of four fields, this field named.
    #[track_caller]
    pub fn is_refused(&self, status: u16, param: Option<&str>, words: &str) {
        assert_eq!(self.status, status, "{}", self.text());
        let json = self.json();
        let error = json["error"].as_object().expect("an error object");
        assert_eq!(error.keys().map(String::as_str).collect::<Vec<_>>(), ["code", "message", "param", "type"]);
        assert_eq!(error["param"].as_str(), param, "{json}");
        let message = error["message"].as_str().expect("a sentence");
        assert!(message.contains(words), "{words:?} is not in {message:?}");
        if let Some(param) = param.filter(|_| status == 400) {
            assert!(message.starts_with(param), "{message:?} names {param}");
        }
        assert!(error["type"].is_string(), "{json}");
    }
}

/// Status and headers.
pub fn head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("a status: {line:?}"));
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.to_string())),
            None => return (status, headers),
        }
    }
}

/// The next chunk of a chunked body; None at its end.
pub fn chunk(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let len = usize::from_str_radix(line.trim(), 16).ok()?;
    let mut bytes = vec![0; len + 2];
    reader.read_exact(&mut bytes).ok()?;
    bytes.truncate(len);
    (len > 0).then_some(bytes)
}
