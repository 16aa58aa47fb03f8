#!/usr/bin/env python3
"""What llama.cpp's own perplexity tool says of its caches: a record to hold `kvant eval` against.

  perplexity.py [options]       runs it, writes the record and prints its table
  perplexity.py table FILE      the table of a record, as Markdown on stdout

In: llama-cpp-perplexity and llama-cpp-quantize (build.sh llama.cpp), a GGUF model, a text of texts.py. Out:
benches/record/<machine>/accuracy/llama.cpp-<date>.json. Each run scores the second half of each chunk; the f16 cache with flash
attention is the base of every other run of the same weights. Two kinds of weights: dequantized to f32 (products of f32, so that
the cache is all that differs), and the file as it is (products of 8-bit activations). Base logits take 100 MB a chunk in
--scratch while it runs. NOT here: any figure, a build (build.sh), kvant's side (`kvant eval`). Needs python3, and kvant for
the machine's facts.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import record as records  # noqa: E402
from run import fail, line_of, plain  # noqa: E402

ROOT = records.ROOT
UNROTATED = {"LLAMA_ATTN_ROT_DISABLE": "1"}  # llama.cpp rotates keys and values of a quantized cache unless told not to
# Weights, cache, flash attention, environment. The first of each kind of weights makes the base; f16 against that base once more
# shows the floor that the tool's 16-bit base puts under every divergence. The most wanted come first.
RUNS = [
    ("f32", "f16", "on", {}),
    ("f32", "q8_0", "on", {}),
    ("f32", "q4_0", "on", {}),
    ("f32", "f16", "on", {}),
    ("f32", "f16", "off", {}),
    ("file", "f16", "on", {}),
    ("file", "q8_0", "on", {}),
    ("file", "q4_0", "on", {}),
    ("f32", "q4_0", "on", UNROTATED),
    ("f32", "f32", "off", {}),  # flash attention would make f16 of it first
]
# A line of the tool's summary: `Mean    KLD:   0.003600 ±   0.000100`, `Same top p: 97.1 ± 0.2 %`.
# An error of a difference that is nothing but rounding can be nan.
FIGURE = re.compile(r"^\s*([^:=]*\S)\s*: *(-?[\d.]+)%?(?: ± +(?:([\d.]+)|-?nan))?(?: %)?$", re.MULTILINE)
FINAL = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "table":
        print(table(json.loads(pathlib.Path(sys.argv[2]).read_text())))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "texts" / "eighty.txt")
    parser.add_argument("--programs", type=pathlib.Path, default=os.environ.get("RIVALS", ROOT / "target" / "rivals"), help="folder of build.sh's programs [RIVALS]")
    parser.add_argument("--kvant", default=os.environ.get("KVANT", str(ROOT / "target" / "release" / "kvant")), help="the program [KVANT]")
    parser.add_argument("--scratch", help="where weights and base logits lie while it runs [default: the system's]")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, help="the record's file [default: benches/record/<machine>/accuracy/llama.cpp-<date>.json]")
    args = parser.parse_args()
    for path, hint in (
        (args.programs / "llama-cpp-perplexity", "`benches/rivals/build.sh llama.cpp SCRATCH OUT` builds it; --programs says where"),
        (args.programs / "llama-cpp-quantize", "`benches/rivals/build.sh llama.cpp SCRATCH OUT` builds it; --programs says where"),
        (args.model, "`kvant pull` fetches the default one"),
        (args.text, "`python3 benches/texts.py` makes it"),
        (pathlib.Path(args.kvant), "`cargo build --release -p kvant-cli` builds it; --kvant says where"),
    ):
        if not path.is_file():
            fail(f"{path} is missing", hint)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        measure(args, pathlib.Path(scratch))


def measure(args, scratch):
    machine = records.facts(records.info(args.kvant)["machine"])
    now = datetime.datetime.now(datetime.timezone.utc)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "what": "accuracy",
        "rival": line_of(args.programs / "llama-cpp.version"),
        "load_average_before": os.getloadavg()[0],
        "machine": machine,
        "threads": args.threads,
        "model": {"file": args.model.name, "sha256": digest(args.model)},
        "text": {"file": args.text.name, "sha256": digest(args.text)},
        "ctx": args.ctx,
        "chunks": args.chunks,
        "runs": [],
    }
    path = args.out or records.folder(machine) / "accuracy" / f"llama.cpp-{now:%Y-%m-%dT%H%M}.json"
    f32 = scratch / f"{args.model.stem}.f32.gguf"
    words = [args.programs / "llama-cpp-quantize", "--allow-requantize", args.model, f32, "F32"]
    tool(words)
    record["dequantized_by"] = plain(" ".join(map(str, words)))
    weights = {"f32": f32, "file": args.model}
    common = ["-c", args.ctx, "--chunks", args.chunks, "-t", args.threads]
    for number, (kind, cache, flash, environment) in enumerate(RUNS, 1):
        base = scratch / f"{kind}.logits"
        against = ["--kl-divergence", "--kl-divergence-base", base] if base.exists() else ["-f", args.text, "--kl-divergence-base", base]
        words = [args.programs / "llama-cpp-perplexity", "-m", weights[kind], *common, "-fa", flash, "-ctk", cache, "-ctv", cache, *against]
        begin = time.monotonic()
        printed = tool(words, environment)
        figures = {name: [float(value), float(error) if error else None] for name, value, error in FIGURE.findall(printed)}
        final = FINAL.search(printed)
        if final:
            figures = {"Final estimate: PPL": [float(final[1]), float(final[2])]}
        elif "Mean    KLD" not in figures:
            fail(f"llama-perplexity printed no figures for {kind} weights, {cache} cache", printed[-300:])
        record["runs"].append(
            {
                "weights": kind,
                "cache": cache,
                "flash_attention": flash,
                "environment": environment,
                "command": "".join(f"{k}={v} " for k, v in environment.items()) + plain(" ".join(map(str, words))),
                "seconds": round(time.monotonic() - begin, 1),
                "running_ppl": [float(v) for v in re.findall(r"\[\d+\]([\d.]+),", printed)] or None,
                "figures": figures,
            }
        )
        record.setdefault("tokens", tokens(base))
        record["not_run"] = [label(*run) for run in RUNS[number:]]
        # After every run: what was measured before a run fails is not lost.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(label(kind, cache, flash, environment), file=sys.stderr)
    print(f"{path}\n\n{table(record)}")


def label(kind, cache, flash, environment):
    return f"{kind} weights, {cache} cache{', not rotated' if environment else ''}, flash attention {flash}"


def tool(words, environment={}):
    """All that a program of llama.cpp prints. Its threads sleep when they wait, for nothing is timed and neighbours may be busy."""
    words = [str(w) for w in words]
    environment = {"OMP_WAIT_POLICY": "passive"} | environment
    result = subprocess.run(words, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if result.returncode:
        fail(f"{pathlib.Path(words[0]).name} ended with {result.returncode}", result.stdout[-300:].strip() or "it said nothing")
    return result.stdout


def tokens(base):
    """The tokens that were scored, as the head of a file of base logits has them: ctx, vocabulary, chunks, then int32 each."""
    with base.open("rb") as file:
        mark, ctx, _, chunks = struct.unpack("<8sIii", file.read(20))
        if mark != b"_logits_":
            fail(f"{base.name} is not a file of base logits", "this script was written for llama-cpp-python 0.3.36")
        ids = file.read(4 * ctx * chunks)
    return {"count": ctx * chunks, "first": struct.unpack("<16i", ids[:64]), "sha256_of_int32": hashlib.sha256(ids).hexdigest()}


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def table(record):
    """PPL ratios are of two PPLs from f32 logits. The printed ratio divides by the base read back from 16 bits, which is another."""
    head = (
        f"{record['rival']}, {record['model']['file']} on {record['text']['file']}, chunks of {record['ctx']} tokens, {record['chunks']} of them, "
        f"{record['date']}. Weights `f32`: the file's, dequantized. Base: the same weights with the f16 cache. "
        "f16 against its own base is what the tool's 16-bit base adds to a printed ratio and to a divergence."
    )
    names = ("weights", "cache", "flash attention", "PPL", "PPL ratio", "ratio as printed", "mean KLD", "99 % KLD", "equal top-1")
    lines = [head, "", "| " + " | ".join(names) + " |", "|---|---|---" + "|---:" * 6 + "|"]
    bases = {}
    for run in record["runs"]:
        figures = run["figures"]
        cache = run["cache"] + (", not rotated" if run["environment"] else "")
        cells = [run["weights"], cache, run["flash_attention"]]
        if "Final estimate: PPL" in figures:
            base = bases[run["weights"]] = figures["Final estimate: PPL"][0]
            cells += [f"{base:.4f}", "base", "", "", "", ""]
        else:
            cells += [
                f"{figures['Mean PPL(Q)'][0]:.4f}",
                f"{figures['Mean PPL(Q)'][0] / bases[run['weights']]:.5f}",
                f"{figures['Mean PPL(Q)/PPL(base)'][0]:.5f}",
                f"{figures['Mean    KLD'][0]:.6f}",
                f"{figures['99.0%   KLD'][0]:.6f}",
                f"{figures['Same top p'][0]:.2f} %",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    if record["not_run"]:
        lines += ["", f"Not run, since the measurement was stopped: {'; '.join(record['not_run'])}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
