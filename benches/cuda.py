#!/usr/bin/env python3
"""Attention of decode on an NVIDIA GPU: kvant beside PyTorch's attention (cuDNN) in the same minutes on the same card.

    python3 benches/cuda.py measure PROGRAM OUT.json     runs on the machine with the GPU; needs torch there
    python3 benches/cuda.py page                         writes the tables of docs/cuda.md from the newest record
    python3 benches/cuda.py check                        fails when the page is not what the record says

The figures that were asked for stand beside those reached, in the tables below.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benches/record/nvidia-h200/cuda"
PAGE = ROOT / "docs/cuda.md"

# Batch, length, schemes, further flags; what was asked: share of read (percent), times torch, times our f16.
RUNS = [
    (64, 32768, "f16,k4v4g64,k2v2g64,k4v4g128", []),
    (64, 65536, "f16,k4v4g64,k2v2g64", []),
    (64, 16384, "f16,k4v4g64,k8v8g64,k4v4g64w128", []),
    (32, 16384, "f16,k4v4g64", []),
    (16, 32768, "f16,k4v4g128", []),
    (1, 65536, "f16,k4v4g64,k4v4g128", []),
    (8, 16384, "f16,k4v4g64", []),
    (32, 4096, "f16,k4v4g64", []),
    (1, 4096, "f16,k4v4g64", []),
    (64, 16384, "f16,k4v4g64w128s4p512", ["--ragged"]),
    (64, 16384, "f16,k4v4g64", ["--invariant"]),
    (1, 65536, "f16,k4v4g64", ["--invariant"]),
]
ASKED = [
    # batch, length, scheme, what, at least
    (32, 16384, "k4v4g64", "read", 93), (64, 16384, "k4v4g64", "read", 93), (64, 32768, "k4v4g64", "read", 93),
    (64, 65536, "k4v4g64", "read", 93), (64, 32768, "k4v4g64", "torch", 3.2),
    (64, 32768, "k2v2g64", "read", 88), (64, 65536, "k2v2g64", "read", 88), (64, 32768, "k2v2g64", "torch", 5.3),
    (64, 16384, "k8v8g64", "read", 93),
    (1, 65536, "k4v4g64", "f16", 2.4), (8, 16384, "k4v4g64", "f16", 2.8), (32, 4096, "k4v4g64", "f16", 2.8),
    (1, 4096, "k4v4g64", "f16", 1.15),
]
# Milliseconds of BitDecoding (4 bits, groups of 128) on such a card, from its own benchmark.
BITDECODING = {(64, 32768): 1.006, (16, 32768): 0.272, (1, 65536): 0.0533}


def torch_ms(batch, length):
    """Milliseconds of one decode attention in torch, the fastest of the ways it offers, over copies that leave the L2 cache."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    one = 2 * batch * 8 * length * 128 * 2
    copies = max(1, min(24, -(-600_000_000 // one)))
    kv = [[torch.randn(batch, 8, length, 128, device="cuda", dtype=torch.float16) for _ in "kv"] for _ in range(copies)]
    best = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for folded in (False, True):
            # Query heads that share a kv head as rows of it, or as heads of their own.
            q = torch.randn(batch, 8 if folded else 32, 4 if folded else 1, 128, device="cuda", dtype=torch.float16)
            try:
                with sdpa_kernel(backend):
                    run = lambda i: F.scaled_dot_product_attention(q, *kv[i % copies], enable_gqa=not folded)
                    run(0)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    launches = max(24, copies)
                    with torch.cuda.graph(graph):
                        for i in range(launches):
                            run(i)
                    times = []
                    for _ in range(22):
                        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        a.record()
                        graph.replay()
                        b.record()
                        torch.cuda.synchronize()
                        times.append(a.elapsed_time(b) / launches)
                    best[f"{backend.name.lower()}{', heads folded' if folded else ''}"] = sorted(times[2:])[10]
                    del graph
            except RuntimeError as e:
                best[f"{backend.name.lower()}{', heads folded' if folded else ''}"] = None
                print(f"torch {backend.name} folded={folded}: {str(e).splitlines()[0]}", file=sys.stderr)
    del kv
    torch.cuda.empty_cache()
    return best


def measure(program, out):
    import torch

    record = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": []}
    torches = {}
    for batch, length, schemes, flags in RUNS:
        if (batch, length) not in torches:
            torches[batch, length] = torch_ms(batch, length)
        command = [program, "bench", "attend", "--device", "cuda", "--json", "--shape", f"b={batch},q=32,kv=8,d=128,s={length}", "--kv", schemes, *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-600:], file=sys.stderr)
            record["runs"].append({"batch": batch, "length": length, "flags": flags, "error": done.stderr.strip()[-300:]})
            continue
        run = json.loads(done.stdout)
        ms = min(t for t in torches[batch, length].values() if t)
        for row in run["rows"]:
            row["times_torch"] = ms / (row["median_ns"] / 1e6)
        record["runs"].append({"batch": batch, "length": length, "flags": flags, "torch_ms": torches[batch, length], "rows": run["rows"]})
        text = " ".join(f"{r['scheme']} {r['median_ns'] / 1e6:.4f} ms {r['pct_of_read']:.1f}% {r['vs_f16']:.2f}f16 {r['times_torch']:.2f}t {r['rel_err']:.0e};" for r in run["rows"])
        print(batch, length, *flags, f"torch {ms:.4f}", text, flush=True)
        pathlib.Path(out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", program, out]:
            measure(program, out)
        case _:
            sys.exit(__doc__)
