#!/usr/bin/env python3
"""Rivals beside kvant, in turns on one machine: a record of both, and the table made from it.

  run.py attend [options]     one query token over a cache: kvant, PyTorch, llama.cpp, ik_llama.cpp
  run.py model [options]      a whole model: kvant, llama.cpp, ik_llama.cpp
  run.py table FILE           the tables of a record, as Markdown on stdout

In: programs (README.md beside this file says how to get them); out: benches/record/<machine>/rivals/<date>.json and the
tables on stdout. A rival that is not found, fails or gets no time is named with the reason, on stderr and in the record.
Ratios are taken within one pass: kvant has its turn in the middle of it. Needs python3; PyTorch is optional.
NOT here: any figure, a kernel, a build (build.sh).
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import record as records  # noqa: E402

ROOT = records.ROOT
SCHEMES = "f16,k8v8g64,k4v4g64,k2v2g64"
CONTROL, PACKED = "f16", "k4v4g64"

# What is timed by `attend`: the shape, whether each rival runs all its types (else f16 alone), and whether the ggml rivals
# also run over the layout of their own caches, which is the slower one.
SHAPES = [
    ("q=32,kv=8,d=128,s=16384", True, True),
    ("q=32,kv=8,d=128,s=65536", True, False),
    ("q=32,kv=8,d=64,s=16384", False, False),
]
SMOKE = [("q=32,kv=8,d=128,s=2048", True, True)]
# Programs of build.sh: rival, file, cache types.
GGML = [
    ("llama.cpp", "llama-cpp-ggml_attend", "f16,q8_0,q4_0"),
    ("llama.cpp, AVX512FP16", "llama-cpp-fp16-ggml_attend", "f16"),
    ("ik_llama.cpp", "ik-llama-ggml_attend", "f16,bf16,q8_0,q8_KV,q4_0"),
]
GRACE = 25  # seconds that a program gets beyond --limit
BUSY = 0.5, 0.1  # load average, or load average per core, from which on the machine is not called quiet
DEPTHS = (0, 2048, 7900)
STEPS = 128  # decoded tokens: the fewest that pack two groups behind any prompt, which kvant's proof of its arms asks for
BATCHES = "1,4,16"


def fail(what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    raise SystemExit(2)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("attend", "model"):
        sub = commands.add_parser(name)
        sub.add_argument("--kvant", default=os.environ.get("KVANT", str(ROOT / "target" / "release" / "kvant")), help="the program [KVANT]")
        sub.add_argument("--programs", default=os.environ.get("RIVALS", str(ROOT / "target" / "rivals")), help="folder of build.sh's programs [RIVALS]")
        sub.add_argument("--threads", type=int, default=2, help="each program's threads, pinned to as many cores")
        sub.add_argument("--passes", type=int, default=2, help="how often every program has its turn")
        sub.add_argument("--limit", type=float, default=330, help=f"seconds after which nothing new is started; {GRACE} more end what runs")
        sub.add_argument("--commit", help="kvant's commit, where there is no git to ask")
        sub.add_argument("--note", help="words to keep in the record")
        sub.add_argument("--out", help="the record's file [default: benches/record/<machine>/rivals/<date>.json]")
    attend, model = (commands.choices[name] for name in ("attend", "model"))
    attend.add_argument("--python", default=os.environ.get("TORCH_PYTHON", sys.executable), help="a python with torch [TORCH_PYTHON]")
    attend.add_argument("--seconds", type=float, default=2.0, help="time for each cache type in each turn of a rival")
    attend.add_argument("--smoke", action="store_true", help="does it run? 2,048 tokens; figures of this size say nothing")
    model.add_argument("--models", default=os.environ.get("RIVAL_MODELS", ""), help="GGUF files, comma-separated [RIVAL_MODELS]")
    model.add_argument("--caches", default="f16,q8_0,q4_0", help="cache types of the rivals")
    model.add_argument("--smoke", action="store_true", help="does it run? depths of 0 and 256; figures of this size say nothing")
    commands.add_parser("table").add_argument("file")
    return parser.parse_args()


def main():
    args = arguments()
    if args.command == "table":
        try:
            print(tables(json.loads(pathlib.Path(args.file).read_text()), args.file))
        except (OSError, ValueError, KeyError) as error:
            fail(f"{args.file} is no record of rivals: {error}", "give a file that `run.py attend` or `run.py model` wrote")
        return
    if args.passes < 1 or args.threads < 1:
        fail("passes and threads begin at 1", "--passes 2 --threads 2")
    if not os.access(args.kvant, os.X_OK):
        fail(f"there is no program {args.kvant}", "cargo build --release -p kvant-cli, or --kvant PATH")
    session = Run(args)
    jobs = attend_jobs(session, args) if args.command == "attend" else model_jobs(session, args)
    for number in range(1, args.passes + 1):
        for group in jobs:
            for job in order(group, number):
                session.turn(number, *job)
    session.write()
    print(session.path, file=sys.stderr)
    print(tables(session.record, session.path.name))


def order(group, number):
    """A pass: kvant in the middle of the rivals, whose first one changes, so that nobody always follows the same predecessor."""
    kvant, rivals = [j for j in group if j[0] == "kvant"], [j for j in group if j[0] != "kvant"]
    turn = (number - 1) % max(1, len(rivals))
    rivals = rivals[turn:] + rivals[:turn]
    middle = (len(rivals) + 1) // 2
    return rivals[:middle] + kvant + rivals[middle:]


def plain(text):
    """Without the folders that lie on this machine alone: records are for others to read."""
    return re.sub(r"(?<![\w.])/(?:[\w.@+-]+/)+", "", text)


class Run:
    """A record on its way: facts of the machine, reports so far, who was skipped and why."""

    def __init__(self, args):
        self.args = args
        self.start = time.monotonic()
        info = records.info(args.kvant)
        self.machine = records.facts(info["machine"])
        load = os.getloadavg()[0]
        if load > max(BUSY[0], BUSY[1] * (os.cpu_count() or 1)):
            print(f"warning: the load average is {load:.1f}: rivals that wait by spinning suffer most, and no figure counts", file=sys.stderr)
        cores = distinct_cores(args.threads)
        os.sched_setaffinity(0, cores)
        commit, changed = commit_of(args)
        now = datetime.datetime.now(datetime.timezone.utc)
        self.path = pathlib.Path(args.out or records.folder(self.machine) / "rivals" / f"{now:%Y-%m-%dT%H%M}.json")
        self.record = {
            "date": now.isoformat(timespec="seconds"),
            "what": args.command,
            "commit": commit,
            "uncommitted_changes": changed,
            "kvant": info["version"],
            "load_average_before": load,
            "machine": {**self.machine, "kernel": os.uname().release.split("-")[0], "huge_pages": line_of("/sys/kernel/mm/transparent_hugepage/enabled")},
            "pinned_to": sorted(cores),
            "threads": args.threads,
            "smoke": args.smoke,
            "command": plain(" ".join(["benches/rivals/run.py", *sys.argv[1:]])),
            "note": args.note,
            "versions": {r: text for r, file, _ in GGML if (text := line_of(pathlib.Path(args.programs) / f"{file.removesuffix('-ggml_attend')}.version"))},
            "runs": [],
            "skipped": [],
        }

    def skip(self, rival, what, why):
        print(f"skipped: {rival} {what}: {why}", file=sys.stderr)
        self.record["skipped"].append({"rival": rival, "what": what, "why": plain(why)})

    def turn(self, number, rival, what, words, parse):
        left = self.start + self.args.limit - time.monotonic()
        if left <= 0:
            return self.skip(rival, f"{what}, pass {number}", f"the limit of {self.args.limit:g} s was reached")
        begin = time.monotonic()
        shown = plain(" ".join(words))
        try:
            printed = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", timeout=left + GRACE)
        except subprocess.TimeoutExpired:
            return self.skip(rival, f"{what}, pass {number}", f"`{shown}` was ended {GRACE} s after the limit of {self.args.limit:g} s")
        if printed.returncode != 0:
            lines = printed.stderr.strip().splitlines() or [""]
            why = next((line for line in lines if line.startswith("error:")), lines[-1])
            return self.skip(rival, f"{what}, pass {number}", f"`{shown}` ended with code {printed.returncode}: {why}")
        try:
            report = parse(printed.stdout)
        except (ValueError, KeyError) as error:
            return self.skip(rival, f"{what}, pass {number}", f"`{shown}` printed no report: {error}")
        spent = time.monotonic() - begin
        self.record["runs"].append(
            {"rival": rival, "what": what, "pass": number, "seconds": round(spent, 1), "command": shown, "report": report}
        )
        print(f"pass {number}, {what}: {rival}, {spent:.0f} s, {time.monotonic() - self.start:.0f} s in all", file=sys.stderr)
        self.write()

    def write(self):
        """After every turn, so that what was measured is kept if the next one never ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record, indent=1) + "\n")


def line_of(path):
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return None


def distinct_cores(count):
    """As many allowed cores as there are threads, of different physical cores where the machine says which are."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < count:
        fail(f"{count} threads are asked for and {len(allowed)} cores are allowed", f"--threads {len(allowed)}")
    seen, first, rest = set(), [], []
    for core in allowed:
        siblings = line_of(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") or str(core)
        (rest if siblings in seen else first).append(core)
        seen.add(siblings)
    if len(first) < count:
        print("warning: some of the cores are threads of one physical core", file=sys.stderr)
    return set((first + rest)[:count])


def commit_of(args):
    if args.commit:
        return args.commit, None
    try:
        return records.commit(), records.changed()
    except (OSError, subprocess.CalledProcessError):
        print("warning: no git here says what kvant's commit is; --commit names it", file=sys.stderr)
        return "unknown", None


def program(session, rival, name):
    path = pathlib.Path(session.args.programs) / name
    if os.access(path, os.X_OK):
        return str(path)
    session.skip(rival, name, f"there is no program {name} in the folder of --programs; build.sh makes it")
    return None


def attend_jobs(session, args):
    ggml = [(rival, path, types) for rival, file, types in GGML if (path := program(session, rival, file))]
    torch = subprocess.run([args.python, "-c", "import torch"], stderr=subprocess.PIPE, text=True)
    if torch.returncode != 0:
        session.skip("PyTorch", "torch_sdpa.py", f"{args.python} cannot import torch; --python names one that can")
    jobs = []
    for shape, every, own_layout in SMOKE if args.smoke else SHAPES:
        common = ["--threads", str(args.threads)]
        seconds = ["--seconds", "0.2" if args.smoke else str(args.seconds)]
        words = [args.kvant, "bench", "attend", "--shape", f"b=1,{shape}", "--kv", SCHEMES if every else f"{CONTROL},{PACKED}", *common, "--json"]
        group = [("kvant", shape, words, json.loads)]
        if torch.returncode == 0:
            group.append(("PyTorch", shape, [args.python, str(HERE / "torch_sdpa.py"), shape, *common, *seconds], json.loads))
        for rival, path, types in ggml:
            for layout in ("head", "token") if own_layout and types != CONTROL else ("head",):
                words = [path, shape, types if every else CONTROL, "--layout", layout, *common, *seconds]
                group.append((rival, shape, words, json.loads))
        jobs.append(group)
    return jobs


def model_jobs(session, args):
    models = [m for m in args.models.split(",") if m]
    if not models:
        fail("no model is named", "--models SmolLM2-135M-Instruct.Q4_1.gguf[,SmolLM2-135M-Instruct.Q8_0.gguf]")
    for model in models:
        if not os.path.exists(model):
            fail(f"there is no model {model}", "`kvant pull` fetches one, llama-cpp-quantize makes its Q8_0 copy")
    depths, prompt, batches = ((0, 256), "128", "1,2") if args.smoke else (DEPTHS, "1024", BATCHES)
    threads, steps = str(args.threads), str(STEPS)
    kvant = ["--steps", steps, "--threads", threads, "--arms", "f16,fused", "--json"]
    llama = [(r, p) for r, f in (("llama.cpp", "llama-cpp-bench"), ("ik_llama.cpp", "ik-llama-bench")) if (p := program(session, r, f))]
    batched = program(session, "llama.cpp", "llama-cpp-batched-bench")
    jobs = []
    for model in models:
        weights = pathlib.Path(model).stem.split(".")[-1]
        for depth in depths:
            group = []
            if depth:
                words = [args.kvant, "bench", "decode", "--model", model, "--batch", "1", "--prompt-len", str(depth), *kvant]
                group.append(("kvant", f"{weights}, depth {depth}", words, json.loads))
            for rival, path in llama:
                for cache in args.caches.split(","):
                    words = [path, "-m", model, "-p", "0", "-fa", "1", "-t", threads, "-r", "1", "-ctk", cache, "-ctv", cache, "-o", "json"]
                    if rival == "ik_llama.cpp":  # its llama-bench has no depth; -gp times what follows a prompt
                        words += ["-n", "0", "-gp", f"{depth},{steps}"] if depth else ["-n", steps]
                    else:
                        words += ["-n", steps, "-d", str(depth)]
                    group.append((rival, f"{weights}, depth {depth}", words, bench_rows))
            if group:
                jobs.append(group)
        group = []
        words = [args.kvant, "bench", "decode", "--model", model, "--batch", batches, "--prompt-len", prompt, *kvant]
        group.append(("kvant", f"{weights}, requests of {prompt}", words, json.loads))
        for cache in args.caches.split(",") if batched else []:
            words = [batched, "-m", model, "-c", "20480", "-b", "2048", "-ub", "512", "-npp", prompt, "-ntg", steps, "-npl", batches]
            words += ["-fa", "on", "-t", threads, "-tb", threads, "-ctk", cache, "-ctv", cache, "--output-format", "jsonl"]
            group.append(("llama.cpp", f"{weights}, requests of {prompt}", words, batched_rows))
        jobs.append(group)
    return jobs


def bench_rows(text):
    """llama-bench: tokens per second of decoding."""
    rows = json.loads(text[text.index("[") :])
    return {"rows": [{"kv": r["type_k"], "batch": 1, "decode_tok_s": r["avg_ts"], "samples": r["samples_ts"]} for r in rows]}


def batched_rows(text):
    """llama-batched-bench: tokens per second of all sequences together, and of the prompts."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError("no line of JSON")
    return {"rows": [{"batch": x["pl"], "decode_tok_s": x["speed_tg"], "prompt_tok_s": x["speed_pp"]} for x in lines]}


def tables(record, name):
    m = record["machine"]
    changed = {True: " with uncommitted changes", False: "", None: ""}[record["uncommitted_changes"]]
    parts = [
        f"From `{name}`: {m['cpu']}, {m['cores']} cores, {record['threads']} threads, {record['date']}, kvant commit "
        f"{record['commit'][:10]}{changed}, load average before {record['load_average_before']:.1f}."
        + (" **A smoke run: the figures say nothing.**" if record["smoke"] else ""),
        f"`{record['command']}`",
    ]
    whats = list(dict.fromkeys(run["what"] for run in record["runs"]))
    for what in whats:
        runs = [r for r in record["runs"] if r["what"] == what]
        table = attend_table(runs) if record["what"] == "attend" else model_table(runs, record["versions"])
        parts.append(f"### {what}\n\n{table}")
    if record["skipped"]:
        parts.append("\n".join(f"- skipped: {s['rival']}, {s['what']}: {s['why']}" for s in record["skipped"]))
    return "\n\n".join(parts)


def gather(runs, key):
    """Rows of all passes by rival and key, in the order they appeared."""
    found = {}
    for run in sorted(runs, key=lambda r: (r["rival"] != "kvant", r["pass"])):
        for row in run["report"]["rows"]:
            found.setdefault((run["rival"], key(run, row)), []).append((run["pass"], run["report"], row))
    return found


def attend_table(runs):
    def key(run, row):
        if run["rival"] == "kvant":
            return row["scheme"]
        lies = ", as its own cache lies" if run["report"]["layout"] == "token" else ""
        return " ".join(filter(None, (row.get("form"), row["kv"]))) + lies

    found = gather(runs, key)
    base = {}
    for scheme in (CONTROL, PACKED):
        base[scheme] = {n: row["median_ns"] for n, _, row in found.get(("kvant", scheme), [])}
    rows = []
    for (rival, kv), taken in found.items():
        median = statistics.median(row["median_ns"] for _, _, row in taken)
        title = rival if rival == "kvant" else taken[0][1]["rival"] + (", AVX512FP16" if "AVX512FP16" in rival else "")
        ratios = {s: ratio([row["median_ns"] / base[s][n] for n, _, row in taken if n in base[s]]) for s in base}
        rows.append((title, kv, min(row["min_ns"] for _, _, row in taken), median, taken[0][2], ratios))
    # PyTorch is as good as the best of its ways: the others stay in the record.
    torch = [row for row in rows if row[0].startswith("PyTorch")]
    best = min(torch, key=lambda row: row[3], default=None)
    rows = [row for row in rows if row not in torch or row is best]
    return records.table(
        [
            ("who", lambda r: r[0] + (f", best of {len(torch)} ways" if r is best else "")),
            ("cache", lambda r: r[1]),
            ("minimum ms", lambda r: f"{r[2] / 1e6:.2f}"),
            ("median ms", lambda r: f"{r[3] / 1e6:.2f}"),
            ("MiB", lambda r: f"{r[4]['bytes'] / 2**20:.1f}"),
            ("relative error", lambda r: f"{r[4]['rel_err']:.1e}"),
            (f"time, kvant {CONTROL} = 1", lambda r: r[5][CONTROL]),
            (f"time, kvant {PACKED} = 1", lambda r: r[5][PACKED]),
        ],
        rows,
    )


def ratio(values):
    """The middle of the passes, and how far they lie apart."""
    if not values:
        return ""
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def model_table(runs, versions):
    def key(run, row):
        if run["rival"] == "kvant":
            return run["report"]["scheme"] if row["arm"] != "f16" else "f16", row["batch"]
        words = run["command"].split()
        cache = words[words.index("-ctk") + 1]
        return cache, row["batch"]

    found = gather(runs, key)
    rows = [(rival, cache, batch, taken) for (rival, (cache, batch)), taken in found.items()]
    rows.sort(key=lambda r: r[2])

    def against(row):
        base = {(n, b): x["decode_tok_s"] for (who, (kv, b)), t in found.items() if who == "kvant" and kv == "f16" for n, _, x in t}
        return ratio([x["decode_tok_s"] / base[(n, row[2])] for n, _, x in row[3] if (n, row[2]) in base])

    return records.table(
        [
            ("who", lambda r: versions.get(r[0], r[0])),
            ("cache", lambda r: r[1]),
            ("requests", lambda r: str(r[2])),
            ("decode tokens/s", lambda r: f"{statistics.median(x['decode_tok_s'] for _, _, x in r[3]):.1f}"),
            ("best pass", lambda r: f"{max(x['decode_tok_s'] for _, _, x in r[3]):.1f}"),
            (f"tokens/s, kvant {CONTROL} = 1", against),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
