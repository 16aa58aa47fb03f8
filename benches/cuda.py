#!/usr/bin/env python3
"""Attention of decode on an NVIDIA GPU: kvant beside PyTorch's attention (cuDNN) in the same minutes on the same card.

    python3 benches/cuda.py measure PROGRAM OUT.json [attend decode rival serve texts]
                                                         runs on the machine with the GPU; needs torch there
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
ROOFLINE = ROOT / "docs/roofline.md"
README = ROOT / "README.md"

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
# Batch, prompt, arms, scheme of the packed arms.
DECODES = [
    (1, 256, "f16,fused", "k4v4g64w128"),
    (32, 4096, "f16,fused,dequant-once,dequant-step", "k4v4g64w128"),
    (16, 32768, "f16,fused", "k4v4g64w128"),
    (64, 4096, "f16,fused", "k4v4g64w128"),
    (4, 32768, "f16,fused", "k4v4g64w128"),
    (32, 4096, "fused", "k2v2g64w128"),
    (16, 32768, "fused", "k2v2g64w128"),
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


def run_json(command, **kind):
    done = subprocess.run(command, capture_output=True, text=True, **kind)
    if done.returncode:
        return {"error": (done.stderr.strip() or f"exit code {done.returncode}")[-300:]}
    return json.loads(done.stdout)


def attend(program, record, save):
    """Attention of decode beside torch's, shape by shape."""
    torches = {}
    for batch, length, schemes, flags in RUNS:
        if (batch, length) not in torches:
            torches[batch, length] = torch_ms(batch, length)
        shape = f"b={batch},q=32,kv=8,d=128,s={length}"
        run = run_json([program, "bench", "attend", "--device", "cuda", "--json", "--shape", shape, "--kv", schemes, *flags])
        ms = min(t for t in torches[batch, length].values() if t)
        for row in run.get("rows", []):
            row["times_torch"] = ms / (row["median_ns"] / 1e6)
        record["attend"].append({"batch": batch, "length": length, "flags": flags, "torch_ms": torches[batch, length], **run})
        text = " ".join(f"{r['scheme']} {r['median_ns'] / 1e6:.4f} {r['pct_of_read']:.1f}% {r['vs_f16']:.2f}f16 {r['times_torch']:.2f}t;" for r in run.get("rows", []))
        print(batch, length, *flags, f"torch {ms:.4f}", text or run.get("error"), flush=True)
        save()


def decode(program, record, save):
    """Whole decode steps of Qwen3-4B's shape with random weights."""
    for batch, length, arms, scheme in DECODES:
        command = [program, "bench", "decode", "--device", "cuda", "--json", "--random-weights", "qwen3-4b", "--kv", scheme,
                   "--batch", str(batch), "--prompt-len", str(length), "--steps", "130", "--arms", arms]
        run = run_json(command)
        record["decode"].append({"batch": batch, "length": length, **run})
        text = " ".join(f"{r['arm']} {r['step_median_ms']:.2f} ms ({r['ttft_ms']:.0f} ms, {r['cache_bytes'] / 2**20:.0f} MiB) {r['failed'] if 'failed' in r else ''};" for r in run.get("rows", []))
        print(batch, length, scheme, text or run.get("error"), flush=True)
        save()


def rival(record, save):
    """transformers: the same shape and random weights, static cache, compiled step, bf16."""
    import time
    import torch

    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

        config = Qwen3Config(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                             intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=40960)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = Qwen3ForCausalLM(config).eval()
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for batch, length in [(1, 256), (32, 4096)]:
            cache = StaticCache(config=config, max_cache_len=length + 160)
            tokens = torch.randint(0, 151936, (batch, 1), device="cuda")
            with torch.inference_mode():
                position = torch.tensor([length], device="cuda")
                times = []
                for i in range(40):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    out = step(tokens, past_key_values=cache, cache_position=position, position_ids=position[None])
                    tokens = out.logits[:, -1:].argmax(-1).clone()
                    torch.cuda.synchronize()
                    times.append((time.perf_counter() - began) * 1e3)
                    position = position + 1
            median = sorted(times[20:])[10]
            record["transformers"].append({"batch": batch, "length": length, "step_median_ms": median})
            print("transformers", batch, length, f"{median:.2f} ms", flush=True)
            del cache
            save()
    except Exception as e:  # The rival's own errors are a result too.
        record["transformers"].append({"error": f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"})
        print("transformers", record["transformers"][-1], flush=True)
        save()


def serve(program, record, save):
    """64 requests of different lengths at once against `kvant serve --device cuda`."""
    import http.client
    import re
    import threading
    import time

    for scheme in ("f16", "k4v4g64w128s4p512"):
        log = open("/tmp/kvant-serve.log", "w+")
        server = subprocess.Popen([program, "serve", "--device", "cuda", "--port", "0", "--kv", scheme, "--max-requests", "64"], stderr=log)
        port = None
        for _ in range(600):
            found = re.search(r"listening on http://[\d.]+:(\d+)", open(log.name).read())
            if found or server.poll() is not None:
                port = found and int(found[1])
                break
            time.sleep(0.1)
        if not port:
            record["serve"].append({"scheme": scheme, "error": open(log.name).read()[-300:]})
            print("serve", record["serve"][-1], flush=True)
            continue
        results = []

        def client(i):
            prompt = " ".join(f"word{(i * 7919 + j * 104729) % 9973}" for j in range(20 + i * 37 % 64 * 10))
            body = json.dumps({"model": "smollm2-135m", "prompt": prompt, "max_tokens": 64 + i * 11 % 64 * 3, "temperature": 0, "stream": True})
            began = time.perf_counter()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            stamps = []
            for line in answer:
                if line.startswith(b"data: {"):
                    stamps.append((time.perf_counter() - began) * 1e3)
            results.append((answer.status, stamps))

        for warm in range(2):
            results.clear()
            threads = [threading.Thread(target=client, args=(i,)) for i in range(64)]
            began = time.perf_counter()
            [t.start() for t in threads]
            [t.join() for t in threads]
            seconds = time.perf_counter() - began
        server.terminate()
        server.wait(40)
        first = sorted(s[0] for _, s in results if s)
        between = sorted(b - a for _, s in results for a, b in zip(s, s[1:]))
        row = {"scheme": scheme, "requests": len(results), "ok": sum(c == 200 for c, _ in results), "seconds": seconds,
               "output_tok_s": sum(len(s) for _, s in results) / seconds, "first_median_ms": first[len(first) // 2],
               "first_p95_ms": first[int(len(first) * 0.95)], "between_median_ms": between[len(between) // 2],
               "between_p95_ms": between[int(len(between) * 0.95)]}
        record["serve"].append(row)
        print("serve", row, flush=True)
        save()


def texts(program, record, save):
    """Greedy texts of five prompts, on the CPU and on the GPU."""
    prompts = ["The capital of France is", "Once upon a time", "Water boils at", "The three laws of motion say that", "To bake bread you need"]
    file = pathlib.Path("/tmp/prompts.txt")
    file.write_text("\n".join(prompts) + "\n")
    answers = {}
    for device in ("cpu", "cuda"):
        run = run_json([program, "generate", "--device", device, "--prompts", str(file), "--max-tokens", "24", "--json"])
        answers[device] = [r["text"] for r in run["requests"]] if "requests" in run else run
    record["texts"] = {"prompts": prompts, **answers}
    print(json.dumps(record["texts"], indent=1), flush=True)
    save()


PARTS = {"attend": attend, "decode": decode}
OTHERS = {"rival": rival, "serve": serve, "texts": texts}


def measure(program, out, parts):
    import torch

    record = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "attend": [], "decode": [], "transformers": [], "serve": []}
    save = lambda: pathlib.Path(out).write_text(json.dumps(record, indent=1) + "\n")
    for part in parts:
        try:
            if part == "rival":
                rival(record, save)
            else:
                {**PARTS, **OTHERS}[part](program, record, save)
        except Exception as e:
            print(f"{part}: {type(e).__name__}: {e}", flush=True)
        save()


MARKS = ("<!-- cuda: begin -->", "<!-- cuda: end -->")


def newest():
    """The newest record that was kept."""
    records = sorted(RECORDS.glob("*.json"))
    return records[-1] if records else None


def number(x, form):
    return form.format(x) if x is not None else ""


def page_text(path):
    """The tables of a record, in Markdown."""
    record = json.loads(path.read_text())
    lines = [f"From `{path.relative_to(ROOT)}`: {record['card']}, commit {record.get('commit', '?')}, torch {record['torch']}.", ""]
    lines += ["| batch x tokens | scheme | ms | % of read | x our f16 | x torch | torch ms | relative error | asked |", "|---|---|---|---|---|---|---|---|---|"]
    unit = {"read": "% of read", "torch": "x torch", "f16": "x our f16"}
    for run in record["attend"]:
        times = [t for t in run["torch_ms"].values() if t]
        for row in run.get("rows", []):
            asked = [f"{n} {unit[what]}" for b, l, s, what, n in ASKED if (b, l, s) == (run["batch"], run["length"], row["scheme"]) and not run["flags"]]
            if row["scheme"] == "k4v4g128" and (run["batch"], run["length"]) in BITDECODING:
                asked.append(f"BitDecoding {BITDECODING[run['batch'], run['length']]} ms")
            name = " ".join([row["scheme"], *run["flags"]])
            lines.append(f"| {run['batch']} x {run['length']} | {name} | {row['median_ns'] / 1e6:.4f} | {row['pct_of_read']:.1f} | {row['vs_f16']:.2f} | {row['times_torch']:.2f} | {min(times):.4f} | {row['rel_err']:.1e} | {', '.join(asked)} |")
    lines += ["", "Whole steps, Qwen3-4B's shape with random weights:", "", "| batch x prompt | scheme | arm | step ms | tokens/s | x f16 | first token ms | cache MiB | card MiB |", "|---|---|---|---|---|---|---|---|---|"]
    control = {}
    for run in record["decode"]:
        for row in run.get("rows", []):
            key = (run["batch"], run["length"])
            if row.get("failed"):
                lines.append(f"| {run['batch']} x {run['length']} | {row['scheme']} | {row['arm']} | does not fit | | | | | |")
                continue
            if row["arm"] == "f16":
                control[key] = row["step_median_ms"]
            ratio = control.get(key)
            ratio = f"{ratio / row['step_median_ms']:.2f}" if ratio else ""
            lines.append(f"| {run['batch']} x {run['length']} | {row['scheme']} | {row['arm']} | {row['step_median_ms']:.2f} | {row['decode_tok_s']:.0f} | {ratio} | {row['ttft_ms']:.0f} | {row['cache_bytes'] / 2**20:.0f} | {row['device_bytes'] / 2**20:.0f} |")
    for row in record["transformers"]:
        if "step_median_ms" in row:
            lines.append(f"| {row['batch']} x {row['length']} | bf16 static cache | transformers, compiled | {row['step_median_ms']:.2f} | {row['batch'] / row['step_median_ms'] * 1e3:.0f} | | | | |")
        else:
            lines += ["", f"transformers: {row['error']}"]
    if record.get("texts"):
        both = [p for p, a, b in zip(record["texts"]["prompts"], record["texts"]["cpu"], record["texts"]["cuda"]) if a == b]
        lines += ["", f"SmolLM2-135M, greedy, 24 tokens behind {len(record['texts']['prompts'])} prompts, CPU beside GPU: {len(both)} the same.", ""]
        lines += [f"- {p!r}: {b!r}" + ("" if a == b else f"; CPU: {a!r}") for p, a, b in zip(record["texts"]["prompts"], record["texts"]["cpu"], record["texts"]["cuda"])]
    if record.get("log"):
        lines += ["", "Parity, divergence over 2,000 tokens of a book (first the packed cache, then f16), sanitizer, and 64 requests of Qwen3-4B's shape in 40 GB (f16, then packed), as they were printed:", "", "```", *record["log"], "```"]
    if record["serve"]:
        lines += ["", "64 requests of different lengths at once, SmolLM2-135M, `kvant serve --device cuda`:", "", "| scheme | output tokens/s | first token ms, median / p95 | between tokens ms, median / p95 |", "|---|---|---|---|"]
        lines += [f"| {r['scheme']} | {r['output_tok_s']:.0f} | {r['first_median_ms']:.0f} / {r['first_p95_ms']:.0f} | {r['between_median_ms']:.1f} / {r['between_p95_ms']:.1f} |" for r in record["serve"] if "error" not in r]
    return "\n".join(lines)


def roofline_text(path):
    """The GPU's roofline of a record, in Markdown."""
    record = json.loads(path.read_text())
    r = record["roofline"]
    read = ", ".join(f"{bytes / 2**20:.0f} MiB {gbps:.0f}" for bytes, gbps in r["read"])
    lines = [f"{r['card']}, {r['q_heads']} query heads, {r['kv_heads']} kv heads, head_dim {r['head_dim']}; commit {record['commit']}, `kvant roofline --device cuda`.",
             f"Plain read, GB/s by bytes: {read}. Product of bf16: {r['matrix_gops'] / 1e3:.0f} Tflop/s. Empty launch in a graph: {r['launch_ns'] / 1e3:.1f} us.", "",
             "| operation | scheme | batch x tokens | new rows | us | % of read | % of matrix | bound by |", "|---|---|---|---|---|---|---|---|"]
    lines += [f"| {x['op']} | {x['scheme']} | {x['batch']} x {x['kv_len']} | {x['rows']} | {x['median_ns'] / 1e3:.1f} | {x['pct_of_read']:.0f} | {x['pct_of_matrix']:.1f} | {x['limit']} |" for x in r["rows"]]
    lines += [""] + [f"- `kvant bench {name} --device cuda`: {' '.join(run['verdict'])}" for name, run in record["experiments"].items()]
    return "\n".join(lines)


def readme_text(path):
    """A few rows of whole steps for the front page."""
    record = json.loads(path.read_text())
    lines = [f"Whole decode steps on an {record['card']}, Qwen3-4B's shape with random weights (commit {record['commit']}; all tables: [docs/cuda.md](docs/cuda.md)):", "",
             "| batch x prompt | f16 cache | `k4v4g64w128` | cache bytes, f16 over packed |", "|---|---|---|---|"]
    for run in record["decode"]:
        arms = {row["arm"]: row for row in run.get("rows", [])}
        if "f16" in arms and "fused" in arms:
            f, p = arms["f16"], arms["fused"]
            lines.append(f"| {run['batch']} x {run['length']} | {f['step_median_ms']:.2f} ms | {p['step_median_ms']:.2f} ms ({f['step_median_ms'] / p['step_median_ms']:.2f}x) | {f['cache_bytes'] / p['cache_bytes']:.2f}x |")
    return "\n".join(lines)


def replaced(page, text):
    before, rest = page.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}"


def pages():
    """Each page with its text as the newest record has it."""
    path = newest()
    return [(page, replaced(page.read_text(), text(path))) for page, text in ((PAGE, page_text), (ROOFLINE, roofline_text), (README, readme_text))] if path else []


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", program, out, *parts]:
            measure(program, out, parts or list(PARTS))
        case ["page"]:
            for page, text in pages():
                page.write_text(text)
        case ["check"]:
            for page, text in pages():
                if text != page.read_text():
                    sys.exit(f"{page.relative_to(ROOT)} does not show the newest record: run `python3 benches/cuda.py page`")
        case _:
            sys.exit(__doc__)
