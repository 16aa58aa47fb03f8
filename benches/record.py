#!/usr/bin/env python3
"""Records of benches, and the tables in README made from them.

In: the release program; out: benches/record/<machine>/<date>.json, and the part of README.md between its table marks.
  record.py measure   runs the benches below on this machine and writes a record (quiet machine, clean checkout)
  record.py readme    writes the newest record's tables into README.md
  record.py check     fails when README.md does not show the newest record
NOT here: any figure. Needs python3 and nothing else.
"""

import datetime
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benches" / "record"
README = ROOT / "README.md"
MARKS = ("<!-- record: begin -->", "<!-- record: end -->")

# What a record holds: name, and the program's arguments.
BENCHES = {
    "attend_16k": "bench attend --shape b=1,q=32,kv=8,d=128,s=16384 --kv f16,k8v8g64,k4v4g64,k3v3g64,k2v2g64 --json",
    "decode": "bench decode --batch 1,4 --prompt-len 1024 --steps 96 --json",
    "fits": "info --memory 8GiB --len 4096 --json",
}


def run(*words):
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure():
    run("cargo", "build", "--release", "--locked", "-p", "kvant-cli")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    program = str(target / "release" / "kvant")
    run(program, "pull")
    facts_of_code = {"commit": commit(), "uncommitted_changes": changed()}
    load = os.getloadavg()[0]
    results = {name: json.loads(run(program, *words.split())) for name, words in BENCHES.items()}
    machine = facts(results["fits"]["machine"])
    now = datetime.datetime.now(datetime.timezone.utc)
    record = {
        "date": now.isoformat(timespec="seconds"),
        **facts_of_code,
        "load_average_before": load,
        "machine": machine,
        "commands": {name: f"kvant {words}" for name, words in BENCHES.items()},
        "results": results,
    }
    path = folder(machine) / f"{now:%Y-%m-%dT%H%M}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path.relative_to(ROOT))


def info(program):
    """What the program says of itself and of this machine; a relative path is the caller's."""
    printed = subprocess.run([program, "info", "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(printed.stdout)


def commit():
    return run("git", "rev-parse", "HEAD").strip()


def changed():
    """Whether the checkout differs from its commit."""
    return bool(run("git", "status", "--porcelain", "--untracked-files=no").strip())


def facts(machine):
    """What a record says of a machine, out of what `kvant info --json` does."""
    return {k: machine[k] for k in ("os", "arch", "cpu", "cores", "memory_bytes")}


def folder(machine):
    """Where the records of a machine lie."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['cores']} cores".lower()).strip("-")
    return RECORDS / slug


def newest():
    records = sorted(RECORDS.glob("*/*.json"), key=lambda p: p.stem)
    return records[-1] if records else None


def table(columns, rows):
    lines = ["| " + " | ".join(name for name, _ in columns) + " |"]
    lines.append("|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|")
    for row in rows:
        lines.append("| " + " | ".join(cell(row) for _, cell in columns) + " |")
    return "\n".join(lines)


def tables(path):
    if path is None:
        return "No record has been made yet; `make record` makes one on a quiet machine."
    record = json.loads(path.read_text())
    machine, results = record["machine"], record["results"]
    attend, decode = results["attend_16k"], results["decode"]
    parts = [
        f"From [`{path.relative_to(ROOT)}`]({path.relative_to(ROOT)}): {machine['cpu']}, {machine['cores']} cores, "
        f"commit {record['commit'][:10]}{' with uncommitted changes' if record['uncommitted_changes'] else ''}, "
        f"load average before {record['load_average_before']:.1f}.",
        f"`{record['commands']['attend_16k']}`",
        table(
            [
                ("scheme", lambda r: r["scheme"]),
                ("minimum ms", lambda r: f"{r['min_ns'] / 1e6:.2f}"),
                ("median ms", lambda r: f"{r['median_ns'] / 1e6:.2f}"),
                ("MiB", lambda r: f"{r['bytes'] / 2**20:.1f}"),
                ("% of read bandwidth", lambda r: f"{r['pct_of_read']:.0f}{'?' if r.get('read_unreliable') else ''}"),
                ("vs f16", lambda r: f"{r['vs_f16']:.2f}x"),
                ("relative error", lambda r: f"{r['rel_err']:.1e}"),
            ],
            attend["rows"],
        ),
        f"`{record['commands']['decode']}` ({decode['scheme']})",
        table(
            [
                ("batch", lambda r: str(r["batch"])),
                ("arm", lambda r: r["arm"]),
                ("decode tokens/s", lambda r: f"{r['decode_tok_s']:.1f}"),
                ("first token ms", lambda r: f"{r['ttft_ms']:.0f}"),
                ("cache MiB", lambda r: f"{r['cache_bytes'] / 2**20:.1f}"),
                ("KLD to dequant-step", lambda r: f"{r['kld_to_dequant_step']:.1e}"),
            ],
            decode["rows"],
        ),
    ]
    return "\n\n".join(parts)


def readme():
    text = README.read_text()
    begin, end = (text.index(mark) for mark in MARKS)
    return text[: begin + len(MARKS[0])] + "\n" + tables(newest()) + "\n" + text[end:]


def main():
    task = sys.argv[1] if len(sys.argv) == 2 else ""
    if task == "measure":
        measure()
    elif task == "readme":
        README.write_text(readme())
    elif task == "check":
        if README.read_text() != readme():
            sys.exit("error: README.md does not show the newest record\nhint: run `make readme`")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
