//! `kvant roofline`: its JSON, its page, and that a browser shows every row. The browser is used where there is one; where
//! there is none the test says so.

use crate::run::kvant;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Small heads and two schemes: a few seconds.
const SMALL: [&str; 6] = ["roofline", "--quick", "--shape", "q=4,kv=2,d=64", "--kv", "f16,k4v4g64"];

/// One run for all that these tests ask.
fn pages(folder: &Path) -> (Value, PathBuf, PathBuf) {
    let (html, markdown) = (folder.join("roofline.html"), folder.join("roofline.md"));
    let paths = ["--html", html.to_str().unwrap(), "--markdown", markdown.to_str().unwrap()];
    let run = kvant(SMALL.iter().chain(&paths).chain(&["--note", "commit <unknown>", "--json"]));
    assert_eq!(run.code, Some(0), "{run:?}");
    (serde_json::from_str(&run.stdout).unwrap(), html, markdown)
}

#[test]
fn json_html_and_markdown_hold_every_row() {
    let folder = tempfile::tempdir().unwrap();
    let (report, html, markdown) = pages(folder.path());
    assert_eq!((&report["quick"], &report["note"]), (&Value::Bool(true), &Value::from("commit <unknown>")));
    for key in ["read", "copy", "fma", "int8_dot", "matmul"] {
        assert!(!report["ceilings"][key].is_null(), "{key}");
    }
    let page = std::fs::read_to_string(html).unwrap();
    let tables = std::fs::read_to_string(markdown).unwrap();
    let rows = report["rows"].as_array().unwrap();
    for op in ["attend", "prefill", "append"] {
        assert_eq!(rows.iter().filter(|r| r["op"] == op).count(), 4, "{op}: two schemes, two sizes");
    }
    assert_eq!(page.matches("data-row=").count(), rows.len());
    let mut ids = Vec::new();
    for row in rows {
        let text = |key: &str| row[key].to_string().trim_matches('"').to_string();
        let (op, scheme) = (text("op"), text("scheme"));
        let id = format!("{op}-{scheme}-b{}-s{}-n{}", text("batch"), text("kv_len"), text("new_rows"));
        assert!(page.contains(&format!("data-row=\"{id}\"")), "{id} is not in a plot");
        assert!(page.contains(&format!("id=\"row-{id}\"")), "{id} is not in a table");
        let bounds = ["memory", "compute", "dispatch", "occupancy", "unexplained"];
        assert!(bounds.contains(&row["verdict"]["bound"].as_str().unwrap()), "{row}");
        assert!(row["pct_of_bandwidth"].as_f64().is_some_and(|p| p > 0.0), "{row}");
        ids.push(id);
    }
    assert!(page.contains("commit &lt;unknown&gt;") && page.contains("Quick run"));
    assert!(tables.contains("commit <unknown>") && tables.contains("### Decode attention"));
    browser(&folder.path().join("roofline.html"), &ids);
}

/// Asks a browser, in a copy of the page, what a reader sees: for each point its row, whether it lies in its plot, whether
/// its label is what the browser finds at the label's middle, and how many other labels cover part of it.
const LOOK: &str = r#"<pre id="seen"></pre><script>
const points = [...document.querySelectorAll('a[data-row]')];
const labels = [...document.querySelectorAll('svg .label, svg .roofname')];
const seen = points.map(a => {
  const label = a.querySelector('.label'), circle = a.querySelector('circle');
  a.scrollIntoView({ block: 'center' });
  const box = label.getBoundingClientRect(), dot = circle.getBoundingClientRect();
  const plot = a.closest('svg').getBoundingClientRect();
  const inside = [box, dot].every(b => b.width > 0 && b.left >= plot.left && b.right <= plot.right && b.top >= plot.top && b.bottom <= plot.bottom);
  const found = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
  const covered = labels.filter(l => l !== label && l.closest('svg') === a.closest('svg')).filter(l => {
    if (l.hasAttribute('transform')) return false; // The box of slanted text is larger than its letters.
    const b = l.getBoundingClientRect();
    return b.left < box.right - 1 && box.left < b.right - 1 && b.top < box.bottom - 4 && box.top < b.bottom - 4;
  }).map(l => l.textContent);
  return [a.dataset.row, inside ? 'inside' : 'outside', label === found ? 'found' : 'hidden', covered.length ? 'covered by ' + covered : 'clear'].join(' | ');
});
document.getElementById('seen').textContent = 'ROWS\n' + seen.join('\n') + '\nEND';
</script></body>"#;

/// A real browser lays the page out with every row's point and label in sight, and paints it.
fn browser(page: &Path, rows: &[String]) {
    let Some(chromium) = ["chromium", "chromium-browser", "google-chrome"].iter().find(|c| {
        let found = Command::new(c).arg("--version").output();
        found.is_ok_and(|o| o.status.success())
    }) else {
        println!("skipped: no browser (chromium) here, so that nobody has looked at the page");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = |what: &str, page: &Path| {
        let profile = format!("--user-data-dir={}", folder.path().join("profile").display());
        let mut command = Command::new(chromium);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.args([profile.as_str(), "--window-size=1100,3000", what]);
        command.arg(format!("file://{}", page.canonicalize().unwrap().display()));
        // A browser that hangs must not hang the tests.
        let mut child = command
            .stdout(std::fs::File::create(folder.path().join("dom")).unwrap())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        for _ in 0..600 {
            match child.try_wait().unwrap() {
                Some(status) => return status.success(),
                None => std::thread::sleep(Duration::from_millis(100)),
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        false
    };
    let asking = folder.path().join("asking.html");
    std::fs::write(&asking, std::fs::read_to_string(page).unwrap().replace("</body>", LOOK)).unwrap();
    assert!(run("--dump-dom", &asking), "{chromium} could not load the page");
    let dom = std::fs::read_to_string(folder.path().join("dom")).unwrap();
    // The first such text is the question itself.
    let seen = dom.split("<pre id=\"seen\">").nth(1).and_then(|s| s.split("ROWS\n").nth(1)?.split("\nEND").next());
    let mut seen: Vec<&str> = seen.expect("the browser answers").lines().collect();
    let mut expected: Vec<String> = rows.iter().map(|id| format!("{id} | inside | found | clear")).collect();
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected, "every row is a point with a label that can be read");

    let picture = folder.path().join("page.png");
    assert!(run(&format!("--screenshot={}", picture.display()), page), "{chromium} could not paint the page");
    let png = std::fs::read(&picture).unwrap();
    assert!(png.starts_with(b"\x89PNG"));
    let number = |at: usize| u32::from_be_bytes([png[at], png[at + 1], png[at + 2], png[at + 3]]);
    assert_eq!((number(16), number(20)), (1100, 3000), "width and height of the picture");
    // An empty white picture of this size compresses to a few kilobytes; plots and tables do not.
    assert!(png.len() > 60_000, "the picture of {} bytes is almost empty", png.len());
}

#[test]
fn text_names_ceilings_verdicts_and_that_a_quick_run_says_nothing() {
    let run = kvant(SMALL.iter().chain(&["--threads", "1"]));
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["int8 dot", "f32 FMA", "f32 matrix product", "empty dispatch", "verdict", "say nothing", "12 rows:"] {
        assert!(run.stdout.contains(part), "{part}: {}", run.stdout);
    }
}

#[test]
fn one_operation_of_every_codec_alone() {
    let schemes = "ktq3vtq1g32,krvq21vrvq22g32,ksb1vsb4g32,kvq16x4vvq256x8g32";
    let shape = ["--quick", "--shape", "q=4,kv=2,d=64", "--only", "append"];
    let run = kvant(["roofline"].iter().chain(&shape).chain(&["--kv", schemes, "--json"]));
    assert_eq!(run.code, Some(0), "{run:?}");
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    let rows = report["rows"].as_array().unwrap();
    assert!(rows.iter().all(|row| row["op"] == "append" && row["input_gbps"].as_f64() > Some(0.0)), "{rows:?}");
    assert!(schemes.split(',').all(|scheme| rows.iter().any(|row| row["scheme"] == scheme)), "{rows:?}");
    let text = kvant(["roofline"].iter().chain(&shape).chain(&["--kv", "k4v4g32"]));
    assert!(text.stdout.contains("Append") && !text.stdout.contains("cut otherwise"), "{text:?}");
    kvant(["roofline", "--quick", "--only", "appendix"]).is_refused("unknown operation `appendix`");
}

#[test]
fn bad_input_is_refused_before_anything_is_measured() {
    kvant(["roofline", "--quick", "--html", "/nonexistent/folder/x.html"]).is_refused("cannot write /nonexistent");
    kvant(["roofline", "--shape", "q=3,kv=2,d=64"]).is_refused("q_heads 3");
    kvant(["roofline", "--kv", "k5v5g64"]).is_refused("unknown scheme");
    kvant(["roofline", "--kernel", "abacus"]).is_refused("unknown kernel");
    kvant(["roofline", "--threads", "0"]).is_refused("at least 1");
    kvant(["roofline", "--device", "tpu"]).is_refused("unknown device");
}
