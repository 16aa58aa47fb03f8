#!/usr/bin/env python3
"""Every codec beside the others: accuracy, speed and what storing costs, and the table made of them.

  codecs.py measure PROGRAM OUT.json [--parts eval,attend,append] [--chunks N] [--threads N]
                    runs `kvant tune --codebooks`, `kvant eval`, `kvant bench attend` and `kvant roofline --only append`
                    (about half an hour on two cores; timings want a quiet machine) and writes or completes a record
  codecs.py page    writes the newest record's table into docs/accuracy.md and README.md
  codecs.py check   fails when these pages do not show it

In: the program, texts/ (texts.py makes it). Out: benches/record/<machine>/codecs/kvant-<date>.json. NOT here: any figure; the verdict's
words are, beside the schemes they are about. Needs python3 and nothing else. COMMIT names the program's commit where there is no
git to ask.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from accuracy import PAGE, with_table  # noqa: E402
from record import README, RECORDS, ROOT, commit, facts, info, table  # noqa: E402

MARKS = ("<!-- codecs: begin -->", "<!-- codecs: end -->")
REST = "g64w128s4p512"
SHAPE = "b=1,q=32,kv=8,d=128,s=16384"
MODEL = "smollm2-135m"
# Scheme without its rest; what the codecs are; what they need; when to take them.
CODECS = [
    ("k4v4", "scale and zero", "nothing", "take it at 4 bits: nothing is turned, the least divergence"),
    ("ktq4vtq4", "rotated codebook", "rotation", "a quarter bit less than `k4v4`, half as much divergence again"),
    ("ksb4vsb4", "sign bits, 4", "rotation", "as `tq4`, read faster, dearer to store"),
    ("krvq22vrvq22", "two stages", "rotation", "never: `tq4` has the same size and a third of the divergence"),
    ("k3v3", "scale and zero", "nothing", "a quarter bit more than `tq3`, a little less divergence; for keys that bear no rotation"),
    ("ktq3vtq3", "rotated codebook", "rotation", "take it at 3 bits, where keys bear a rotation"),
    ("krvq21vrvq21", "two stages", "rotation", "never: see `tq3`"),
    ("ksb3vsb3", "sign bits, 3", "rotation", "behind `tq3`"),
    ("k2v2", "scale and zero", "nothing", "never plain; with a fit and loud channels (`kvant tune`) it is another thing"),
    ("ktq2vtq2", "rotated codebook", "rotation", "at 2 bits without calibration"),
    ("krvq11vrvq11", "two stages", "rotation", "never: see `tq2`"),
    ("ksb2vsb2", "sign bits, 2", "rotation", "never: unbiased products are noisier products"),
    ("kvq256x4vvq256x4", "sub-vectors, 256", "calibration", "take it at 2 bits where there is a text to learn from; slow to store"),
    ("ktq1vtq1", "rotated codebook", "rotation", "never: nothing is left of the text"),
    ("ksb1vsb1", "sign bits", "rotation", "never for attention"),
    ("ksb1v4", "sign bits, values 4", "rotation", "never here, the classic pairing: keys need more than their signs"),
    ("kvq256x8vvq256x8", "sub-vectors, 256", "calibration", "take it at 1 bit: as much divergence as `k2v2`, at less than half the size"),
    ("kvq16x4vvq16x4", "sub-vectors, 16", "calibration", "as `vq256x8`, faster to read and to store, a third more divergence"),
]
FAST = 8  # Schemes that one run of bench attend compares: their caches are held at once.


def run(program, words, **kind):
    print("kvant", " ".join(words), file=sys.stderr)
    return subprocess.run([program, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, **kind).stdout


def evaluate(args, folder):
    """Codebooks of one text, scores on another."""
    schemes, tunes = [], []
    for codes, *_ in CODECS:
        scheme = codes + REST
        if "vq256" in codes or "vq16" in codes:
            out = f"{folder}/{codes}.toml"
            words = ["tune", "--codebooks", "--model", MODEL, "--text", "texts/moby-dick.txt", "--kv", scheme, "--out", out, "--json"]
            words += ["--threads", str(args.threads)]
            tunes.append({"scheme": scheme, "report": json.loads(run(args.program, words))})
            scheme = out
        schemes.append(scheme)
    words = ["eval", "--model", MODEL, "--text", "texts/eighty.txt", "--chunks", str(args.chunks), "--kv", ",".join(schemes), "--json"]
    report = json.loads(run(args.program, words + ["--threads", str(args.threads)]))
    # Where the files lay says nothing.
    found = {"command": " ".join(["kvant", *words]), "tunes": tunes, "report": report}
    return json.loads(json.dumps(found).replace(f"{folder}/", ""))


def attend(args):
    reports = []
    schemes = [codes + "g64" for codes, *_ in CODECS]
    for first in range(0, len(schemes), FAST):
        words = ["bench", "attend", "--shape", SHAPE, "--kv", ",".join(schemes[first : first + FAST]), "--threads", str(args.threads), "--json"]
        reports.append({"command": " ".join(["kvant", *words]), "report": json.loads(run(args.program, words))})
    return reports


def append(args):
    words = ["roofline", "--only", "append", "--threads", "1", "--kv", ",".join(codes + "g64" for codes, *_ in CODECS), "--json"]
    return {"command": " ".join(["kvant", *words]), "report": json.loads(run(args.program, words))}


def measure(args):
    out = pathlib.Path(args.out)
    record = json.loads(out.read_text()) if out.exists() else {}
    record |= {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": facts(info(args.program)["machine"]),
    }
    parts = {"attend": attend, "append": append}
    for part in args.parts.split(","):
        if part == "eval":
            with tempfile.TemporaryDirectory() as folder:
                found = evaluate(args, folder)
        else:
            found = parts[part](args)
        record[part] = {"commit": os.environ.get("COMMIT") or commit(), "result": found}
        out.write_text(json.dumps(record, indent=1) + "\n")


def newest():
    paths = sorted(RECORDS.glob("*/codecs/kvant-*.json"), key=lambda path: path.stem)
    return (paths[-1], json.loads(paths[-1].read_text())) if paths else None


def text():
    found = newest()
    if not found:
        return "No record has been made yet: `codecs.py measure` makes one."
    path, record = found
    # In the order of CODECS: files are named by their codes.
    scores = record["eval"]["result"]["report"]["rows"]
    speed = {r["scheme"]: r for run in record["attend"]["result"] for r in run["report"]["rows"]}
    stored = {}
    for row in record["append"]["result"]["report"]["rows"]:
        stored[row["scheme"]] = max(stored.get(row["scheme"], 0.0), row["input_gbps"])
    rows = [
        {"codes": codes, "what": what, "needs": needs, "verdict": verdict, "score": score, "speed": speed[codes + "g64"], "stored": stored[codes + "g64"]}
        for (codes, what, needs, verdict), score in zip(CODECS, scores, strict=True)
    ]
    columns = [
        ("codes", lambda r: f"`{r['codes']}`"),
        ("codec", lambda r: r["what"]),
        ("whole bits, 8k", lambda r: f"{r['score']['whole_bits_8k']:.2f}"),
        ("KLD", lambda r: f"{r['score']['kld_mean']:.4f}"),
        ("PPL ratio", lambda r: f"{r['score']['ppl_ratio']:.4f}"),
        ("attention, of f16's speed", lambda r: f"{r['speed']['vs_f16']:.2f}x"),
        ("storing, GB/s", lambda r: f"{r['stored']:.2f}"),
        ("needs", lambda r: r["needs"]),
        ("verdict", lambda r: r["verdict"]),
    ]
    report = record["eval"]["result"]["report"]
    seconds = [f"{t['report']['seconds']:.0f} s" for t in record["eval"]["result"]["tunes"] if "seconds" in t["report"]]
    head = (
        f"Schemes are the codes and `{REST}`. KLD and PPL ratio: {pathlib.Path(report['model']).name}, {report['chunks']} chunks of {report['ctx']} tokens of "
        f"eighty.txt, second half scored; codebooks learned on moby-dick.txt{' in ' + ', '.join(seconds) if seconds else ''}. Attention: {SHAPE}, cold, median of interleaved rounds, "
        f"{record['attend']['result'][0]['report']['rows'][0]['kernel']} on 2 threads (window and pages left out). Storing: keys and values as f16, one thread, the best of "
        f"four sizes. [Record](%s), commits {record['eval']['commit'][:10]} (eval), {record['attend']['commit'][:10]} (speed), {record['machine']['cpu']}."
    )
    return head, path, table(columns, rows)


def pages():
    shown = {}
    for page in (PAGE, README):
        made = text()
        body = made if isinstance(made, str) else made[0] % os.path.relpath(made[1], page.parent) + "\n\n" + made[2]
        shown[page] = with_table(page, body, MARKS)
    return shown


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    task = tasks.add_parser("measure")
    task.add_argument("program", type=lambda p: str(pathlib.Path(p).resolve()))
    task.add_argument("out")
    task.add_argument("--parts", default="eval,attend,append")
    task.add_argument("--chunks", type=int, default=8)
    task.add_argument("--threads", type=int, default=2)
    tasks.add_parser("page")
    tasks.add_parser("check")
    args = parser.parse_args()
    if args.task == "measure":
        measure(args)
        return
    for page, new in pages().items():
        if args.task == "page":
            page.write_text(new)
        elif page.read_text() != new:
            sys.exit(f"{page.relative_to(ROOT)} does not show the newest record: run `python3 benches/codecs.py page`")


main()
