#!/usr/bin/env python3
"""Times PyTorch's attention over an unquantized cache, one query token, on the CPU: the rows of PyTorch beside `kvant bench attend`.

  torch_sdpa.py q=32,kv=8,d=128,s=16384 [--kv f16,bf16] [--threads 2] [--seconds 2] [--layout head|token]

In: a shape and element types; out: one JSON object on stdout: minimum and median wall time of every form of the call, bytes,
and the error against attention in f64 over the same rounded rows. The forms are
  folded   the query heads of a kv head are rows of one matrix: [kv_heads, q_heads / kv_heads, d] x [kv_heads, s, d]
  gqa      [q_heads, 1, d] x [kv_heads, s, d] with enable_gqa=True (PyTorch 2.5 or newer)
Cold: each form and type rotates over copies of 600 MB or more, in memory that asked for huge pages, as kvant's timer does;
rounds are interleaved in the same way. NOT here: any figure, the choice of the best row (run.py makes it). Needs torch only.
"""

import argparse
import json
import math
import mmap
import os
import re
import sys
import time

COLD_BYTES = 600_000_000
LEAST_ROUNDS, MOST_ROUNDS = 7, 200
WORST_ERROR = 0.05
FORMS = ("folded", "gqa")


def fail(what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    raise SystemExit(2)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--kv", default="f16,bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--layout", choices=("head", "token"), default="head")
    args = parser.parse_args()
    parts = re.fullmatch(r"q=(\d+),kv=(\d+),d=(\d+),s=(\d+)", args.shape)
    if not parts or int(parts[1]) % max(1, int(parts[2])) or "0" in parts.groups():
        fail(f"the shape '{args.shape}' is not one", "q=32,kv=8,d=128,s=16384, q a multiple of kv")
    return args, [int(p) for p in parts.groups()]


def filled(torch, values):
    """A copy of a tensor in memory of its own that asked for huge pages."""
    memory = mmap.mmap(-1, values.numel() * values.element_size() + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel()).view(values.shape)
    return copy.copy_(values)


def measure(torch, shape, types, threads, seconds, layout):
    q_heads, kv_heads, head_dim, kv_len = shape
    attend = torch.nn.functional.scaled_dot_product_attention
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(q_heads, head_dim, generator=generator)
    rows = [torch.randn(kv_heads, kv_len, head_dim, generator=generator) for _ in range(2)]
    subjects, skipped = [], []
    for name, dtype in types:
        stored = [side.to(dtype) for side in rows]
        bytes_ = sum(side.numel() * side.element_size() for side in stored)
        copies = max(2, math.ceil(COLD_BYTES / bytes_))
        data = []
        for _ in range(copies):
            if layout == "token":  # the heads of a token side by side
                data.append([filled(torch, side.transpose(0, 1).contiguous()).transpose(0, 1) for side in stored])
            else:
                data.append([filled(torch, side) for side in stored])
        q = queries.to(dtype).view(kv_heads, q_heads // kv_heads, head_dim)
        want = f64(torch, q, *stored)
        for form in FORMS:
            call = (
                (lambda k, v, q=q: attend(q[None], k[None], v[None]))
                if form == "folded"
                else (lambda k, v, q=q: attend(q.reshape(1, q_heads, 1, head_dim), k[None], v[None], enable_gqa=True))
            )
            try:
                got = call(*data[0]).reshape(want.shape)
            except (TypeError, RuntimeError) as error:
                skipped.append({"kv": name, "form": form, "why": str(error).splitlines()[0]})
                continue
            error = float((got.double() - want).norm() / want.norm())
            if not error <= WORST_ERROR:
                fail(f"{form} {name} has a relative error of {error:.1e}", "nothing was timed")
            row = {"kv": name, "form": form, "bytes": bytes_, "copies": copies, "rel_err": error}
            subjects.append((row, call, data, []))
    start, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() - start < seconds * len(subjects)):
        for turn in range(len(subjects)):
            row, call, data, times = subjects[(turn + rounds) % len(subjects)]
            # Half a rotation between the two forms of a type, which share their copies.
            k, v = data[(rounds + 1 + FORMS.index(row["form"]) * (len(data) // 2)) % len(data)]
            begin = time.perf_counter_ns()
            call(k, v)
            times.append(time.perf_counter_ns() - begin)
        rounds += 1
    for row, _, _, times in subjects:
        times.sort()
        row.update(min_ns=times[0], median_ns=times[len(times) // 2])
    return {
        "rival": f"PyTorch {torch.__version__}",
        **dict(zip(("q_heads", "kv_heads", "head_dim", "kv_len"), shape)),
        "threads": threads,
        "cold": True,
        "layout": layout,
        "rounds": rounds,
        "rows": [row for row, *_ in subjects],
        "skipped": skipped,
    }


def f64(torch, q, k, v):
    out = []
    for head in range(k.shape[0]):
        logits = q[head].double() @ k[head].double().T / math.sqrt(q.shape[-1])
        out.append(torch.softmax(logits, -1) @ v[head].double())
    return torch.stack(out)


def main():
    args, shape = arguments()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    try:
        import torch
    except ImportError:
        fail("this python has no torch", "pip install torch, or name another python with --python")
    known = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    names = args.kv.split(",")
    if not set(names) <= set(known):
        fail(f"'{args.kv}' is not a list of types", "f16, bf16, f32")
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        report = measure(torch, shape, [(n, known[n]) for n in names], args.threads, args.seconds, args.layout)
    print(json.dumps(report))


main()
