#!/usr/bin/env python3
"""Sweeps: attention over threads, over batch and length; a whole model. In: the program; out: records and their tables.

  sweep.py threads PROGRAM OUT.json    1, 2, 4, 8, 16 threads (as many as there are cores), 16k and 64k tokens; every kernel
  sweep.py grid PROGRAM OUT.json       batch 1, 4, 16 by 256 to 16k tokens, cold and hot, two threads
  sweep.py model PROGRAM OUT.json [MODEL]   a whole model: requests and prompt lengths, arms f16 and fused, two threads
  sweep.py tables                      writes benches/record/README.md from the records under
                                       benches/record/*/sweeps/, .../rivals/ and .../accuracy/

Each thread count is pinned to as many cores, so that a shared host moves less. Quote ratios: both sides of `vs_f16` (medians)
were timed in turns. NOT here: any figure. Needs python3 and taskset. PROGRAM must be built from a clean commit, which is
COMMIT where there is no git to ask.
"""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from record import RECORDS, ROOT, commit, info  # noqa: E402

ALL = "f16,k8v8g64,k4v4g64,k3v3g64,k2v2g64"
SHAPE = "b={b},q=32,kv=8,d=128,s={s}"


def threads_runs():
    cores = len(os.sched_getaffinity(0))
    for s in (16384, 65536):
        yield f"2 threads, {s} tokens", 2, SHAPE.format(b=1, s=s), ALL, []
    for kernel in ("avx2", "avx-vnni"):
        yield f"2 threads, 16384 tokens, {kernel}", 2, SHAPE.format(b=1, s=16384), ALL, ["--kernel", kernel]
    for n in (n for n in (1, 2, 4, 8, 16) if n <= cores):
        for s in (16384, 65536):
            yield f"{n} threads, {s} tokens", n, SHAPE.format(b=1, s=s), "f16,k8v8g64,k4v4g64", []


def grid_runs():
    for flags in ([], ["--hot"]):
        for b in (1, 4, 16):
            for s in (256, 1024, 4096, 16384):
                temperature = "hot" if flags else "cold"
                yield f"batch {b}, {s} tokens, {temperature}", 2, SHAPE.format(b=b, s=s), ALL, flags


def model_runs(model):
    # Long first: a run that is cut short should have them.
    for b, s in ((1, 7900), (16, 1024), (1, 256), (1, 2048), (16, 256), (4, 2048)):
        words = ["bench", "decode", *model, "--batch", str(b), "--prompt-len", str(s), "--steps", "128", "--arms", "f16,fused"]
        yield f"{b} requests, {s} tokens", 2, words


def attend_runs(runs):
    for label, threads, shape, schemes, flags in runs:
        yield label, threads, ["bench", "attend", "--shape", shape, "--kv", schemes, *flags]


def measure(runs, program, out):
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or commit(),
        "machine": {"cores": os.cpu_count(), "arch": platform.machine(), "info": info(program)["machine"]},
        "runs": [],
    }
    for label, threads, words in runs:
        words = [*words, "--threads", str(threads), "--json"]
        cores = ",".join(str(c) for c in sorted(os.sched_getaffinity(0))[:threads])
        printed = subprocess.run(["taskset", "-c", cores, program, *words], check=True, stdout=subprocess.PIPE, text=True)
        record["runs"].append({"label": label, "command": f"kvant {' '.join(words)}", "report": json.loads(printed.stdout)})
        # After every run: what was measured before a run fails is not lost.
        pathlib.Path(out).write_text(json.dumps(record, indent=1) + "\n")
        print(label, file=sys.stderr)


def model_table(record):
    lines = ["| what | arm | decode tokens/s | vs f16 | first token ms | cache MiB | peak RSS MiB |", "|---|---|---:|---:|---:|---:|---:|"]
    for run in record["runs"]:
        rows = run["report"]["rows"]
        for row in rows:
            ratio = row["decode_tok_s"] / rows[0]["decode_tok_s"]
            sizes = [f"{row[key] / 2**20:.1f}" for key in ("cache_bytes", "peak_rss_bytes")]
            cells = [run["label"], row["arm"], f"{row['decode_tok_s']:.1f}", f"{ratio:.2f}x", f"{row['ttft_ms']:.0f}", *sizes]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(record):
    if "decode_tok_s" in record["runs"][0]["report"]["rows"][0]:
        return model_table(record)
    lines = ["| what | scheme | kernel | minimum ms | median ms | % of read bandwidth | vs f16 |", "|---|---|---|---:|---:|---:|---:|"]
    for run in record["runs"]:
        for row in run["report"]["rows"]:
            share = "" if row["pct_of_read"] > 100 or row.get("read_unreliable") else f"{row['pct_of_read']:.0f}"
            cells = [run["label"], row["scheme"], row["kernel"], f"{row['min_ns'] / 1e6:.3f}", f"{row['median_ns'] / 1e6:.3f}"]
            lines.append("| " + " | ".join(cells + [share, f"{row['vs_f16']:.2f}x"]) + " |")
    return "\n".join(lines)


def tables():
    parts = ["# Sweeps and rivals", "Written by `python3 benches/sweep.py tables` from the records beside this page."]
    for path in sorted(RECORDS.glob("*/sweeps/*.json")):
        record = json.loads(path.read_text())
        machine = record["machine"]
        cpu = (machine.get("info") or {}).get("cpu") or machine.get("cpu", "")
        parts.append(f"## {path.relative_to(RECORDS)}\n\n{cpu}, {machine['cores']} cores, {record['date']}, commit {record['commit'][:10]}.")
        parts.append(f"The first command: `{record['runs'][0]['command']}`")
        parts.append(table(record))
    for path in sorted(RECORDS.glob("*/rivals/*.json")):
        words = [sys.executable, str(ROOT / "benches" / "rivals" / "run.py"), "table", str(path.relative_to(ROOT))]
        printed = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        parts.append(f"## {path.relative_to(RECORDS)}\n\n{printed}")
    for path in sorted(RECORDS.glob("*/accuracy/llama.cpp-*.json")):
        words = [sys.executable, str(ROOT / "benches" / "rivals" / "perplexity.py"), "table", str(path.relative_to(ROOT))]
        printed = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        parts.append(f"## {path.relative_to(RECORDS)}\n\n{printed}")
    (RECORDS / "README.md").write_text("\n\n".join(parts) + "\n")


def main():
    match sys.argv[1:]:
        case ["threads", program, out]:
            measure(attend_runs(threads_runs()), program, out)
        case ["grid", program, out]:
            measure(attend_runs(grid_runs()), program, out)
        case ["model", program, out, *model]:
            measure(model_runs(["--model", *model] if model else []), program, out)
        case ["tables"]:
            tables()
        case _:
            sys.exit(__doc__)


main()
