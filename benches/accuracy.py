#!/usr/bin/env python3
"""Accuracy of schemes: records of `kvant eval`, and the tables of docs/accuracy.md made from them.

  accuracy.py measure PROGRAM OUT.json [--only NAME,..] [--chunks N] [--threads N] [--model M]
                                       runs the evaluations below and writes a record (about half an hour on two cores)
  accuracy.py page                     writes the newest records' tables into docs/accuracy.md, and what presets cost into README.md
  accuracy.py check                    fails when these pages do not show them

In: the program, texts/ (texts.py makes it), schemes/*.toml. Out: benches/record/<machine>/accuracy/kvant-<date>.json. A record may
hold some of the evaluations only; the page shows the newest of each. NOT here: any figure, llama.cpp's own tool
(rivals/perplexity.py). Needs python3 and nothing else. COMMIT names the program's commit where there is no git to ask.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from record import README, RECORDS, ROOT, commit, facts, info, table  # noqa: E402

PAGE = ROOT / "docs" / "accuracy.md"
MARKS = ("<!-- accuracy: begin -->", "<!-- accuracy: end -->")
PRESETS = {"k8v8g64w128s4p512": "safe", "k4v4g64w128s4p512.rotv": "balanced", "k3v2g64w128s4p512.ls.rotv": "small"}
TUNED = [f"schemes/smollm2-135m-{bits}.toml" for bits in ("2.65", "2.75", "3", "3.5")]
LOUD = [f"schemes/levers/k2l{share}v2.toml" for share in (8, 4, 2)]  # k2lNv2g64w128s4.mse.rotv in every layer

# Name, title, text, chunks left out, chunks, schemes.
EVALS = {
    "presets": ("Presets", "eighty.txt", 0, 8, [*PRESETS]),
    "formats": (
        "Tuned files, rotated keys, and llama.cpp's formats (imitated)",
        "eighty.txt", 0, 8,
        [*TUNED, "k4v4g64w128s4p512.ls.rotk.rotv", "k3v2g64w128s4p512.ls.rotk.rotv", "llama.cpp:q8_0r", "llama.cpp:q4_0", "llama.cpp:q4_0r", "llama.cpp:q8_0r+w128s4",
         "llama.cpp:q4_0r+w128s4"],
    ),
    "third": ("The same on a text that nothing was tuned or chosen on", "sotu.txt", 100, 6, ["safe", "balanced", "small", *TUNED]),
    "levers": (
        "Levers, one after another",
        "eighty.txt", 0, 8,
        ["k4v4g64w128", "k4v4g64w128s4", "k4v4g64w128s4.mse", "k4v4g64w128s4.mse.rotv", "k4v4g64w128s4.mse.rotk.rotv",
         "k4v4g64w128s4.ls.rotk.rotv", "k3v3g64w128s4", "k3v3g64w128s4.mse.rotv", "k3v3g64w128s4.mse.rotk.rotv",
         "k3v3g64w128s4.ls.rotk.rotv", "k3v2g64w128s4.mse.rotv", "k2v3g64w128s4.mse.rotv", "k2v2g64w128", "k2v2g64w128s4", "k2v2g64w128s4.mse", "k2v2g64w128s4.mse.rotv",
         "k2v2g64w128s4.ls.rotv", "k2v2g64w128s4.mse.rotk.rotv", *LOUD, "k4v4g64w128s4p512.ls.rotk.rotv"],
    ),
}
# Run only when named, with a --model of its own: no such model is pulled.
SECOND = "second"
EVALS[SECOND] = (
    "Another family: a qwen2 model of 0.5B, 2 kv heads of 64 channels, products of 15-bit activations",
    "eighty.txt", 0, 2,
    ["k8v8g64w128s4", "k4v4g64w128", "k4v4g64w128s4", "k4v4g64w128s4.ls.rotk.rotv", "k3v3g64w128s4", "k3v3g64w128s4.ls.rotk.rotv",
     "k2v2g64w128s4", "k2v2g64w128s4.mse.rotv", "qw-2.75.toml", "qw-3.5.toml", "llama.cpp:q4_0r"],
)
MORE = {SECOND: ["--activations", "product"]}


def measure(args):
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or commit(),
        "machine": facts(info(args.program)["machine"]),
        "evals": {},
    }
    for name in args.only.split(",") if args.only else (name for name in EVALS if name != SECOND):
        _, text, skip, chunks, schemes = EVALS[name]
        words = ["eval", "--text", f"texts/{text}", "--skip-chunks", str(skip), "--chunks", str(args.chunks or chunks),
                 "--kv", ",".join(schemes), "--json", *MORE.get(name, [])]
        if args.model:
            words += ["--model", args.model]
        if args.threads:
            words += ["--threads", str(args.threads)]
        printed = subprocess.run([args.program, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        record["evals"][name] = {"command": f"kvant {' '.join(words)}", "report": json.loads(printed)}
        # After every one: what was measured before one fails is not lost.
        pathlib.Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
        print(name, file=sys.stderr)


COLUMNS = [
    ("cache", lambda r: f"`{r['scheme']}`" + (f" ({PRESETS[r['scheme']]})" if r["scheme"] in PRESETS else "")),
    ("bits", lambda r: f"{r['bits']:.2f}"),
    ("whole, 2k", lambda r: f"{r['whole_bits_2k']:.2f}"),
    ("8k", lambda r: f"{r['whole_bits_8k']:.2f}"),
    ("32k", lambda r: f"{r['whole_bits_32k']:.2f}"),
    ("PPL ratio", lambda r: f"{r['ppl_ratio']:.4f}"),
    ("KLD", lambda r: f"{r['kld_mean']:.6f}"),
    ("KLD, 99 %", lambda r: f"{r['kld_p99']:.4f}"),
    ("same first", lambda r: f"{100 * r['top1_same']:.1f} %"),
]


def newest():
    """Of each evaluation the newest run, with its record and path."""
    found = {}
    for path in sorted(RECORDS.glob("*/accuracy/kvant-*.json"), key=lambda path: path.stem):
        record = json.loads(path.read_text())
        found.update({name: (path, record, run) for name, run in record["evals"].items()})
    return found


def theirs(report):
    """What llama.cpp's own tool has for the f16 cache, where it ran on the same chunks with f32 weights."""
    for path in sorted(RECORDS.glob("*/accuracy/llama.cpp-*.json"), reverse=True):
        record = json.loads(path.read_text())
        same = record["ctx"] == report["ctx"] and record["chunks"] == report["chunks"] and report["skip_chunks"] == 0
        if same and record["text"]["sha256"] == report["text"]["sha256"] and report["products"] == "f32":
            for run in record["runs"]:
                if (run["weights"], run["cache"], run["flash_attention"]) == ("f32", "f16", "on"):
                    return f" (llama.cpp's own tool: {run['figures']['Final estimate: PPL'][0]:.4f})"
    return ""


def source(path, record, run, page):
    """Where a table comes from, in words."""
    report = run["report"]
    text = f"{pathlib.Path(report['text']['path']).name} (sha256 {report['text']['sha256'][:8]})"
    model = pathlib.Path(report["model"]).name
    return (
        f"{model}: {report['chunks']} chunks of {report['ctx']} tokens of {text}, f16 perplexity {report['base']['ppl']:.4f}{theirs(report)}; "
        f"[record]({os.path.relpath(path, page.parent)}), commit {record['commit'][:10]}, {record['machine']['cpu']}."
    )


def full_tables():
    found = newest()
    parts = []
    for name in (name for name in EVALS if name in found):
        parts += [f"### {EVALS[name][0]}", source(*found[name], PAGE), table(COLUMNS, found[name][2]["report"]["rows"])]
    return "\n\n".join(parts) or "No record has been made yet: `accuracy.py measure` makes one."


def preset_table():
    found = newest()
    if "presets" not in found:
        return "No record has been made yet: `accuracy.py measure` makes one."
    rows = found["presets"][2]["report"]["rows"]
    return source(*found["presets"], README) + "\n\n" + table(COLUMNS, rows)


def with_table(page, text, marks=MARKS):
    old = page.read_text()
    begin, end = (old.index(mark) for mark in marks)
    return old[: begin + len(marks[0])] + "\n" + text + "\n" + old[end:]


def pages():
    return {PAGE: with_table(PAGE, full_tables()), README: with_table(README, preset_table())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    task = tasks.add_parser("measure")
    task.add_argument("program", type=lambda p: str(pathlib.Path(p).resolve()))
    task.add_argument("out")
    task.add_argument("--only")
    task.add_argument("--chunks", type=int)
    task.add_argument("--threads", type=int)
    task.add_argument("--model")
    tasks.add_parser("page")
    tasks.add_parser("check")
    args = parser.parse_args()
    if args.task == "measure":
        measure(args)
    elif args.task == "page":
        for page, text in pages().items():
            page.write_text(text)
    elif any(page.read_text() != text for page, text in pages().items()):
        sys.exit("error: a page does not show the newest accuracy records\nhint: run `python3 benches/accuracy.py page`")


if __name__ == "__main__":
    main()
