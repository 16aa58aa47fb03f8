//! One arm in a process of its own. The parent starts it, sends lines (`decode N`, `end`) and reads one JSON line for each;
//! the child loads the model, prefills, and decodes only when told to. In: arguments and lines; out: what was measured.
//! NOT here: the proof that arms agree.

use crate::args::{ArmName, DecodeArgs};
use crate::failure::Failure;
use crate::session::Located;
use crate::{rss, session};
use anyhow::{Context, Result};
use kvant_engine::{Event, Request, load_schemes};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// What an arm reports when all steps are done.
#[derive(Debug, Serialize, Deserialize)]
pub struct End {
    /// Median over requests (the mean of the middle two of an even number), each from the moment its own prefill began.
    pub ttft_ms: f64,
    /// Tokens decoded, over all requests.
    pub tokens: usize,
    /// Time of those steps.
    pub decode_ns: u64,
    /// Attention calls by route, prefill and decode.
    pub routes: BTreeMap<String, u64>,
    /// All bytes the cache holds, copies included.
    pub cache_bytes: usize,
    /// Most memory of the process.
    pub peak_rss_bytes: Option<u64>,
}

/// A running arm, its requests prefilled.
pub struct ArmProcess {
    arm: ArmName,
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl ArmProcess {
    /// Starts the process and waits until its requests are prefilled.
    ///
    /// # Errors
    /// When it does not start, or fails (its own message is on stderr).
    pub fn start(args: &DecodeArgs, arm: ArmName, batch: usize, threads: usize) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
        command.args(["bench", "decode", "--arm-process", "--model", &args.model, "--kv", &args.kv]);
        command.args(["--arms", arm.name(), "--batch", &batch.to_string(), "--threads", &threads.to_string()]);
        command.args(["--prompt-len", &args.prompt_len.to_string(), "--steps", &args.steps.to_string()]);
        if let Some(kernel) = &args.kernel {
            command.args(["--kernel", kernel]);
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .with_context(|| format!("cannot start the process of arm {}", arm.name()))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            anyhow::bail!("the process of arm {} has no pipes", arm.name());
        };
        let mut process = Self { arm, child, to, from: BufReader::new(from) };
        process.answer("ready")?;
        Ok(process)
    }

    /// Lets it decode some steps.
    ///
    /// # Errors
    /// When the process has failed.
    pub fn decode(&mut self, steps: usize) -> Result<()> {
        writeln!(self.to, "decode {steps}").with_context(|| self.gone())?;
        self.answer("done").map(|_| ())
    }

    /// Asks for what it measured and ends it.
    ///
    /// # Errors
    /// When the process has failed.
    pub fn end(mut self) -> Result<End> {
        writeln!(self.to, "end").with_context(|| self.gone())?;
        let line = self.answer("")?;
        self.child.wait().with_context(|| self.gone())?;
        serde_json::from_str(&line).with_context(|| format!("arm {} answered with no report", self.arm.name()))
    }

    /// One line, which must begin with `word`.
    fn answer(&mut self, word: &str) -> Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line).with_context(|| self.gone())?;
        if line.is_empty() || !line.starts_with(word) {
            if !line.is_empty() {
                let _ = self.child.kill();
            }
            // It has ended or is about to: by itself with a message, or by a signal without one.
            let how = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
            return Err(Failure::input(
                format!("{} ({how})", self.gone()),
                "its own message, if it had one, is above; less memory may help: a smaller --batch",
            )
            .into());
        }
        Ok(line)
    }

    fn gone(&self) -> String {
        format!("the process of arm {} ended early", self.arm.name())
    }
}

impl Drop for ArmProcess {
    fn drop(&mut self) {
        // A process that ended by itself is already gone; one of an aborted bench must not stay.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The middle of some numbers, of which there is one at least; the mean of the middle two of an even number.
fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let (below, above) = (numbers[(numbers.len() - 1) / 2], numbers[numbers.len() / 2]);
    below + (above - below) / 2.0
}

/// The child's side.
///
/// # Errors
/// What the engine refuses; the parent sees the process end.
pub fn serve(args: &DecodeArgs, model: &Located, threads: usize) -> Result<()> {
    let (Some(&arm), Some(&batch)) = (args.arms.first(), args.batch.first()) else {
        anyhow::bail!("an arm's process needs one arm and one batch");
    };
    let model = session::load_silently(model, threads)?;
    let schemes = load_schemes(&args.kv, model.config().layers).map_err(Failure::from)?;
    let mut engine = session::engine(&model, threads, args.kernel.as_deref(), arm.arm(), schemes)?;
    let mut ttft_ms = Vec::new();
    for prompt in super::requests(&model, batch, args.prompt_len)? {
        // The first token comes from the prefill; each decode step stores one and chooses the next.
        let request = Request { ignore_end: true, ..Request::greedy(prompt, args.steps + 1) };
        let start = std::time::Instant::now();
        let number = engine.add(request).map_err(Failure::from)?;
        // Prompts go first, so these steps are this request's prefill alone.
        loop {
            let events = engine.step().map_err(Failure::from)?;
            if events.iter().any(|e| matches!(e, Event::Token { request, .. } if *request == number)) {
                break;
            }
        }
        ttft_ms.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready")?;
    out.flush()?;
    for line in std::io::stdin().lines() {
        let line = line.context("cannot read from the parent")?;
        match line.strip_prefix("decode ") {
            Some(steps) => {
                for _ in 0..steps.parse::<usize>().context("steps are a number")? {
                    engine.step().map_err(Failure::from)?;
                }
                writeln!(out, "done")?;
            }
            None => {
                let bytes = engine.cache_bytes();
                let time = engine.decode_time();
                let end = End {
                    ttft_ms: median(&mut ttft_ms),
                    tokens: time.tokens,
                    decode_ns: u64::try_from(time.time.as_nanos()).unwrap_or(u64::MAX),
                    routes: engine.routes().clone(),
                    cache_bytes: bytes.packed_bytes + bytes.window_bytes + bytes.copy_bytes,
                    peak_rss_bytes: rss::peak_rss_bytes(),
                };
                writeln!(out, "{}", serde_json::to_string(&end)?)?;
                return Ok(());
            }
        }
        out.flush()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(median(&mut [3.0]), 3.0);
        assert_eq!(median(&mut [9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(&mut [9.0, 1.0, 5.0, 6.0]), 5.5);
    }
}
