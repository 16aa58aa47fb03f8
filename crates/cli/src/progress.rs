//! Progress on stderr. In: a verb and a total; out: an indicatif bar on a terminal, and one plain line where stderr is
//! none (a log). NOT here: anything on stdout.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Duration;

/// A bar over bytes.
pub fn bytes(verb: &str, total: u64) -> ProgressBar {
    bar(verb, total, "{msg:<18} [{bar:30}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}")
}

/// A bar over tokens.
pub fn tokens(verb: &str, total: u64) -> ProgressBar {
    bar(verb, total, "{msg:<18} [{bar:30}] {pos}/{len} tokens {eta}")
}

/// A bar over a whole whose unit means nothing to a user.
pub fn percent(verb: &str) -> ProgressBar {
    bar(verb, 100, "{msg:<18} [{bar:30}] {percent} % {eta}")
}

/// A turning wheel for work whose end is unknown.
pub fn wheel(verb: &str) -> ProgressBar {
    let bar = bar(verb, 0, "{spinner} {msg} {elapsed}");
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn bar(verb: &str, total: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        crate::output::note(verb);
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(verb.to_string());
    bar
}
