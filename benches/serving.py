#!/usr/bin/env python3
"""What `kvant serve` does under load: records, and the tables of docs/serving.md made from them.

  serving.py measure PROGRAM OUT.json [--only NAME,..] [--threads N] [--model M] [--small]
                                    starts servers on 127.0.0.1, runs the loads below and writes a record; --small: does it run?
                                    fails when texts differ that must not; says which figures missed their targets
  serving.py soak PROGRAM OUT.json [--seconds 1800]
                                    mixed load with clients that leave, bad requests and preemption; fails when a text is wrong,
                                    a panic is in the log, or blocks or memory do not come back
  serving.py page                   writes the newest records' tables into docs/serving.md
  serving.py check                  fails when that page does not show them

In: the program and its model. Out: benches/record/<machine>/serving/*.json. The loads: how many requests of 1,000 tokens fit a
memory (held), a shared system prompt (shared), a long session (session), batches (batch), decoding beside a long prompt (beside).
NOT here: any figure, a browser, rivals. Needs python3 and nothing else. COMMIT names the program's commit where there is no git.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from record import RECORDS, ROOT, changed, commit, facts, info, table  # noqa: E402

PAGE = ROOT / "docs" / "serving.md"
MARKS = ("<!-- serving: begin -->", "<!-- serving: end -->")
SCHEMES = ["f16", "k4v4g64w64", "k2v2g64w64"]
SCHEME = "k4v4g64w64s4p512"
WORDS = (ROOT / "texts" / "words.txt").read_text().split() if (ROOT / "texts" / "words.txt").exists() else (
    "the a of river stone light house under winter seven green horses walked slowly over bridges while old sailors sang "
    "about distant harbours and their grey morning ships carried salt wool copper letters from one island to another"
).split()


class Server:
    """A server of the program on a free port of 127.0.0.1."""

    def __init__(self, args, *flags):
        self.command = [args.program, "serve", "--port", "0", "--model", args.model, *flags]
        if args.threads:
            self.command += ["--threads", str(args.threads)]

    async def __aenter__(self):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = await asyncio.create_subprocess_exec(*self.command, cwd=ROOT, stderr=self.log)
        while not (found := re.search(r"listening on http://([\d.]+):(\d+)", self.text())):
            if self.process.returncode is not None:
                sys.exit(f"error: the server did not start: {self.text()}")
            await asyncio.sleep(0.05)
        self.address = (found[1], int(found[2]))
        self.model = json.loads((await self.get("/v1/models"))[1])["data"][0]["id"]
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.terminate()
        self.code = await self.process.wait()

    def text(self):
        return pathlib.Path(self.log.name).read_text()

    def rss(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    async def get(self, path):
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.address[0]}:{self.address[1]}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body

    async def status(self):
        return json.loads((await self.get("/status"))[1])

    @contextlib.asynccontextmanager
    async def post(self, path, body):
        """Status and lines of an answer; leaving early closes the connection."""
        reader, writer = await asyncio.open_connection(*self.address, limit=1 << 24)
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {self.address[0]}:{self.address[1]}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        try:
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass

            async def lines():
                while line := await reader.readline():
                    yield line.strip()

            yield status, lines()
        finally:
            writer.close()

    async def ask(self, body, leave_after=None):
        """A stream to its end, or until so many pieces have come."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        out = {"text": "", "times": [], "usage": None, "finish": None}
        began = time.perf_counter()
        async with self.post(path, {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **body}) as (status, lines):
            out["status"] = status
            async for line in lines:
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    piece = choice.get("text") or choice.get("delta", {}).get("content")
                    if piece:
                        out["text"] += piece
                        out["times"].append(time.perf_counter())
                    out["finish"] = choice["finish_reason"] or out["finish"]
                out["usage"] = event.get("usage") or out["usage"]
                if leave_after is not None and len(out["times"]) >= leave_after:
                    return out
        out["took"] = time.perf_counter() - began
        out["ttft"] = out["times"][0] - began if out["times"] else None
        return out


# Tokens per word, about; the records have the counts of the server.
PER_WORD = 1.1


def words(n, seed):
    """So many words that no other seed begins with."""
    source = random.Random(seed)
    return " ".join([f"({seed})"] + [source.choice(WORDS) for _ in range(n)])


async def tokens(server, n, seed):
    """A prompt of exactly n tokens, as tokens: other seeds differ from the first on."""
    source = random.Random(seed)
    return [source.randrange(1000, 30000) for _ in range(n)]


async def held(args):
    """Requests of 1,000 tokens that hold cache at once."""
    memory, length = ("16MiB", 128) if args.small else ("256MiB", 1000)
    rows = []
    for scheme in SCHEMES:
        flags = ["--kv", scheme, "--kv-memory", memory, "--max-requests", "1024", "--step-tokens", str(length), "--no-prefix-sharing"]
        async with Server(args, *flags) as server:
            # Long enough that nobody ends while others come in: a prompt takes one step.
            body = {"max_tokens": length // 4, "ignore_eos": True}
            asked = [asyncio.create_task(server.ask({**body, "prompt": await tokens(server, length, seed)})) for seed in range(96)]
            most, since, peak = 0, time.perf_counter(), 0
            while time.perf_counter() - since < 20 and not all(task.done() for task in asked):
                status = await server.status()
                n = sum(r["state"] == "running" and r["tokens"] >= length for r in status["requests"])
                peak = max(peak, status["held_bytes"])
                if n > most:
                    most, since = n, time.perf_counter()
                await asyncio.sleep(0.02)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        rows.append({"scheme": scheme, "memory": memory, "tokens": length, "requests": most, "peak_bytes": peak})
    for row in rows:
        row["vs_f16"] = row["requests"] / max(rows[0]["requests"], 1)
    return {"rows": rows}


async def shared(args):
    """Clients with one system prompt, some turns each, with shared prefixes and without."""
    clients, turns, length = (4, 2, 200) if args.small else (32, 3, 1500)
    system = words(int(length / PER_WORD), "system")
    rows, texts = [], []
    for flags in ([], ["--no-prefix-sharing"]):
        async with Server(args, "--kv", SCHEME, "--max-requests", str(clients), *flags) as server:

            async def client(i):
                messages, said = [{"role": "system", "content": system}], []
                for turn in range(turns):
                    messages.append({"role": "user", "content": words(12, f"{i}.{turn}")})
                    answer = await server.ask({"messages": messages, "max_tokens": 16, "ignore_eos": True})
                    said.append(answer["text"])
                    messages.append({"role": "assistant", "content": answer["text"]})
                return said

            began = time.perf_counter()
            texts.append(await asyncio.gather(*map(client, range(clients))))
            took = time.perf_counter() - began
            status = await server.status()
        rows.append({"sharing": not flags, "seconds": took, "prefix_hit_rate": status["prefix_hit_rate"]})
    return {"clients": clients, "turns": turns, "system_tokens": length, "rows": rows, "same_texts": texts[0] == texts[1],
            "speedup": rows[1]["seconds"] / rows[0]["seconds"]}


async def session(args):
    """The first token of a late turn, the session kept and not."""
    turns, length = (4, 400) if args.small else (20, 7000)
    # The tokens of an answer and of the template around both come on top.
    messages, each = [], int(length / (turns - 1) / PER_WORD) - 25
    new = words(50, "last")
    rows, texts = [], []
    async with Server(args, "--kv", SCHEME) as server:
        for turn in range(turns - 1):
            messages.append({"role": "user", "content": words(each, turn)})
            answer = await server.ask({"messages": messages, "max_tokens": 16, "ignore_eos": True})
            messages.append({"role": "assistant", "content": answer["text"]})
        messages.append({"role": "user", "content": new})
        last = {"messages": messages, "max_tokens": 16, "ignore_eos": True}
        answer = await server.ask(last)
        rows.append({"kept": True, "ttft_s": answer["ttft"], "usage": answer["usage"]})
        texts.append(answer["text"])
    async with Server(args, "--kv", SCHEME, "--no-prefix-sharing") as server:
        answer = await server.ask(last)
        rows.append({"kept": False, "ttft_s": answer["ttft"], "usage": answer["usage"]})
        texts.append(answer["text"])
    return {"turn": turns, "rows": rows, "same_texts": texts[0] == texts[1], "speedup": rows[1]["ttft_s"] / rows[0]["ttft_s"]}


async def batch(args):
    """Output tokens per second: requests one by one, and all at once. A question with its answer, and a longer prompt with a
    shorter one: prompts cost the same either way, so the share of the answers decides."""
    n, shapes = (4, [(50, 16)]) if args.small else (16, [(50, 256), (200, 128)])
    rows = []
    async with Server(args, "--kv", SCHEME, "--max-requests", str(n), "--no-prefix-sharing") as server:
        for prompt, out in shapes:
            bodies = [{"prompt": await tokens(server, prompt, seed), "max_tokens": out, "ignore_eos": True} for seed in range(n)]
            await server.ask(bodies[0])
            began = time.perf_counter()
            alone = [(await server.ask(body))["text"] for body in bodies]
            one_by_one = time.perf_counter() - began
            began = time.perf_counter()
            together = [answer["text"] for answer in await asyncio.gather(*map(server.ask, bodies))]
            at_once = time.perf_counter() - began
            rows.append({"prompt_tokens": prompt, "completion_tokens": out, "one_by_one_tok_s": n * out / one_by_one,
                         "at_once_tok_s": n * out / at_once, "speedup": one_by_one / at_once, "same_texts": alone == together})
    return {"requests": n, "rows": rows, "same_texts": all(row["same_texts"] for row in rows)}


async def beside(args):
    """Gaps between tokens of streams while a long prompt comes in, against the time of one of its chunks."""
    streams, length, chunk = (2, 600, 128) if args.small else (4, 7000, 256)
    async with Server(args, "--kv", SCHEME, "--step-tokens", str(chunk), "--no-prefix-sharing") as server:
        long = {"prompt": await tokens(server, length, "long"), "max_tokens": 1, "ignore_eos": True}
        alone = await server.ask(long)
        chunk_s = alone["ttft"] / -(-length // chunk)
        seen = []

        async def stream(seed):
            body = {"prompt": await tokens(server, 64, seed), "max_tokens": 2000, "ignore_eos": True}
            path_body = {"stream": True, "temperature": 0, **body}
            async with server.post("/v1/completions", path_body) as (_, lines):
                async for line in lines:
                    if line.startswith(b"data: {"):
                        seen.append((seed, time.perf_counter()))

        tasks = [asyncio.create_task(stream(seed)) for seed in range(streams)]
        while len({seed for seed, _ in seen}) < streams:
            await asyncio.sleep(0.02)
        began = time.perf_counter()
        answer = await server.ask(long)
        ended = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = []
    for seed in range(streams):
        times = [t for s, t in seen if s == seed and began <= t <= ended]
        gaps += [b - a for a, b in zip([began, *times], [*times, ended])]
    return {"streams": streams, "prompt_tokens": length, "chunk_tokens": chunk, "chunk_s": chunk_s, "worst_gap_s": max(gaps),
            "median_gap_s": statistics.median(gaps), "worst_in_chunks": max(gaps) / chunk_s, "ttft_s": answer["ttft"], "ttft_alone_s": alone["ttft"]}


def rows_vs_f16(run):
    return {row["scheme"]: row["vs_f16"] for row in run["rows"]}


# What each load is to reach: a name, its value in a run, and the least (or with "most" the most) it may be.
TARGETS = {
    "held": [("requests held with k4v4g64w64, times f16", lambda r: rows_vs_f16(r)["k4v4g64w64"], "least", 2.6),
             ("requests held with k2v2g64w64, times f16", lambda r: rows_vs_f16(r)["k2v2g64w64"], "least", 3.6)],
    "shared": [("shared prefixes, times faster", lambda r: r["speedup"], "least", 3)],
    "session": [("first token of a kept session, times faster", lambda r: r["speedup"], "least", 20)],
    "batch": [("tokens per second at once, times one by one (50 tokens in, 256 out)", lambda r: r["rows"][0]["speedup"], "least", 1.8)],
    "beside": [("worst gap, in chunks", lambda r: r["worst_in_chunks"], "most", 2)],
}


def missed(loads):
    """Sentences on the figures that are not what they are to be."""
    return [f"missed: {what} is {of(loads[name]):.2f}, to be at {kind} {bound}"
            for name in loads for what, of, kind, bound in TARGETS.get(name, [])
            if (of(loads[name]) < bound if kind == "least" else of(loads[name]) > bound)]


LOADS = {"held": held, "shared": shared, "session": session, "batch": batch, "beside": beside}

BAD = [b"{", b"\xff\xfe", b'{"model":"nobody","prompt":"x"}', {"prompt": "x", "max_tokens": -1}, {"prompt": "x " * 20000},
       {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, {"prompt": "x", "temperature": "hot"},
       # Near the largest body: what it costs is to be bounded.
       {"prompt": "x " * 2_000_000}, {"prompt": [1] * 1_300_000, "n": 12}, {"prompt": "x", "n": 128}, {"prompt": "x", "k" * 3_000_000: 1}]


async def soak(args):
    """Mixed load for a time, half of it with shared prefixes and half without. What fails is in `wrong`."""
    halves = [await mixed(args, args.seconds // 2, flags) for flags in ([], ["--no-prefix-sharing"])]
    return {"seconds": args.seconds, "clients": args.clients, "kv_memory": args.kv_memory, "halves": halves,
            "wrong": sorted({what for half in halves for what in half["wrong"]})}


async def mixed(args, seconds, flags):
    """One server under mixed load."""
    source, wrong, counts = random.Random(1), [], {}
    flags = ["--kv", SCHEME, "--kv-memory", args.kv_memory, "--max-requests", "12", "--max-waiting", "24", *flags]
    async with Server(args, *flags) as server:
        bodies = [{"prompt": words(source.choice([5, 40, 150, 400]), i), "max_tokens": source.choice([8, 40, 120]), "ignore_eos": True}
                  for i in range(24 if seconds > 100 else 12)]
        bodies += [{"messages": [{"role": "system", "content": words(300, "system")}, {"role": "user", "content": words(10, i)}],
                    "max_tokens": 40} for i in range(8 if seconds > 100 else 4)]
        solo = [(await server.ask(body))["text"] for body in bodies]
        # Made once: large ones take this program a while.
        spoilt = [(body, body if isinstance(body, bytes) else json.dumps({"model": server.model, **body}).encode()) for body in BAD]

        async def bad(body, data):
            path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
            async with server.post(path, data) as (status, lines):
                said = b"".join([line async for line in lines])
            if not (400 <= status < 500 and "error" in json.loads(said or b"{}")):
                wrong.append(f"a bad request was answered {status}")
            if len(said) > 2000:
                wrong.append(f"a bad request was answered with {len(said)} bytes")

        # Each once before memory is first looked at.
        for one_of_them in spoilt:
            await bad(*one_of_them)
        ends = time.monotonic() + seconds
        warm = time.monotonic() + min(seconds / 4, 60)
        start = {}

        async def client(i):
            mine = random.Random(i)
            while time.monotonic() < ends:
                # The memory of many at once is there before it is first looked at.
                if not start and time.monotonic() > warm:
                    start["rss"] = server.rss()
                kind = mine.choices(["whole", "leave", "bad", "several"], [6, 2, 1, 1])[0]
                try:
                    kind = await one(mine, kind)
                except Exception as error:  # noqa: BLE001: whatever it is, it is a failure of the run
                    wrong.append(f"{kind}: {error!r}")
                    await asyncio.sleep(0.5)
                counts[kind] = counts.get(kind, 0) + 1

        async def one(mine, kind):
            n = mine.randrange(len(bodies))
            if kind == "bad":
                await bad(*mine.choice(spoilt))
                return kind
            if kind == "several":
                body = {"prompt": "once", "n": 3, "max_tokens": 12, "seed": 1}
                async with server.post("/v1/completions", body) as (status, lines):
                    async for _ in lines:
                        pass
            else:
                leave = mine.randrange(1, 8) if kind == "leave" else None
                answer = await server.ask(bodies[n], leave)
                status = answer["status"]
                if status == 200 and not (answer["text"] == solo[n] if leave is None else solo[n].startswith(answer["text"])):
                    wrong.append(f"text {n} is not what it is alone")
            if status == 429:
                await asyncio.sleep(0.2)
                return "429"
            if status != 200:
                wrong.append(f"a good request ({kind}) was answered {status}")
            return kind

        await asyncio.gather(*map(client, range(args.clients)))
        for _ in range(200):
            status = await server.status()
            if not status["requests"]:
                break
            await asyncio.sleep(0.05)
        rss, health = server.rss(), (await server.get("/health"))[0]
    if "panicked" in server.text():
        wrong.append("a panic is in the log")
    if health != 200 or server.code != 0:
        wrong.append(f"health {health}, exit code {server.code}")
    if status["requests"]:
        wrong.append("requests are left")
    if status["budget_bytes"] and status["held_bytes"] > status["budget_bytes"]:
        wrong.append(f"{status['held_bytes']} bytes of cache are over the budget")
    # What is kept for later stays, and nothing else.
    if status["held_bytes"] != status["kept_bytes"]:
        wrong.append(f"{status['held_bytes']} bytes of cache are held, {status['kept_bytes']} of them for later")
    if "--no-prefix-sharing" in flags and (status["held_bytes"] or status["blocks"]["used"]):
        wrong.append(f"{status['held_bytes']} bytes and {status['blocks']['used']} blocks of cache are left")
    # A tenth for the allocator; and the cache may be fuller with what is kept than when it was first looked at.
    if rss > 1.1 * start["rss"] + (status["budget_bytes"] or 0):
        wrong.append(f"resident memory grew from {start['rss']} to {rss} bytes")
    # A minute on a busy machine may be too short for it.
    if seconds > 100 and not status["preemptions"]:
        wrong.append("nothing was preempted: give less --kv-memory")
    return {"flags": flags, "counts": counts, "wrong": sorted(set(wrong)), "wrong_count": len(wrong), "preemptions": status["preemptions"],
            "evictions": status["evictions"], "steps": status["steps"], "prefix_hit_rate": status["prefix_hit_rate"],
            "rss_start": start["rss"], "rss_end": rss, "held_end": status["held_bytes"], "kept_end": status["kept_bytes"]}


def measure(args):
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or commit(),
        "uncommitted_changes": False if os.environ.get("COMMIT") else changed(),
        "load_average_before": os.getloadavg()[0],
        "machine": facts(info(args.program)["machine"]),
        "threads": args.threads,
        "small": args.small,
        "loads": {},
    }
    loads = {"soak": soak} if args.task == "soak" else {name: LOADS[name] for name in (args.only.split(",") if args.only else LOADS)}
    for name, load in loads.items():
        record["loads"][name] = asyncio.run(load(args))
        # After every one: what was measured before one fails is not lost.
        pathlib.Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
        print(name, json.dumps(record["loads"][name]), file=sys.stderr)
    if not args.small:
        print("\n".join(missed(record["loads"])), file=sys.stderr)
    differ = [name for name, run in record["loads"].items() if run.get("same_texts") is False]
    if differ:
        sys.exit(f"error: texts differ that must be the same: {', '.join(differ)}")
    if record["loads"].get("soak", {}).get("wrong"):
        sys.exit("error: " + "; ".join(record["loads"]["soak"]["wrong"][:5]))


def newest():
    """Of each load the newest run, with its record and path."""
    found = {}
    for path in sorted(RECORDS.glob("*/serving/*.json"), key=lambda path: path.stem):
        record = json.loads(path.read_text())
        if not record["small"]:
            found.update({name: (path, record, run) for name, run in record["loads"].items()})
    return found


def source(path, record):
    return f"[record]({os.path.relpath(path, PAGE.parent)}), commit {record['commit'][:10]}, {record['machine']['cpu']}, {record['machine']['cores']} cores."


def same(run):
    return "the same texts" if run["same_texts"] else "**not the same texts**"


def sentences(run):
    """What a load says, by name."""
    return {
        "held": lambda: f"Requests of {run['rows'][0]['tokens']} tokens held at once in {run['rows'][0]['memory']}:\n\n" + table(
            [("cache", lambda r: f"`{r['scheme']}`"), ("requests", lambda r: str(r["requests"])), ("times f16", lambda r: f"{r['vs_f16']:.2f}")], run["rows"]),
        "shared": lambda: f"{run['clients']} clients with {run['turns']} turns each behind one system prompt of {run['system_tokens']} tokens: "
        f"{run['rows'][0]['seconds']:.1f} s with shared prefixes, {run['rows'][1]['seconds']:.1f} s without ({run['speedup']:.1f} times), {same(run)}.",
        "session": lambda: f"First token of turn {run['turn']} of one session ({run['rows'][0]['usage']['prompt_tokens']} tokens of prompt): "
        f"{run['rows'][0]['ttft_s'] * 1e3:.0f} ms with the session kept, {run['rows'][1]['ttft_s'] * 1e3:.0f} ms without ({run['speedup']:.1f} times), {same(run)}.",
        "batch": lambda: f"{run['requests']} requests, output tokens per second ({same(run)}):\n\n" + table(
            [("tokens in", lambda r: str(r["prompt_tokens"])), ("tokens out", lambda r: str(r["completion_tokens"])), ("one by one", lambda r: f"{r['one_by_one_tok_s']:.1f}"),
             ("at once", lambda r: f"{r['at_once_tok_s']:.1f}"), ("times", lambda r: f"{r['speedup']:.2f}")], run["rows"]),
        "beside": lambda: f"{run['streams']} streams while a prompt of {run['prompt_tokens']} tokens comes in, chunks of {run['chunk_tokens']} rows: worst gap between two tokens "
        f"{run['worst_gap_s'] * 1e3:.0f} ms, {run['worst_in_chunks']:.2f} times a chunk's {run['chunk_s'] * 1e3:.0f} ms.",
        "soak": lambda: f"{run['seconds']} s of mixed load by {run['clients']} clients in {run['kv_memory']}: "
        + "; ".join(f"{', '.join(f'{v} {k}' for k, v in sorted(half['counts'].items()))}, {half['preemptions']} preemptions, {half['wrong_count']} wrong"
                    for half in run["halves"]) + " (with shared prefixes; without).",
    }


def text():
    found = newest()
    parts = []
    for name in (name for name in [*LOADS, "soak"] if name in found):
        path, record, run = found[name]
        parts.append(sentences(run)[name]() + "\n\n" + source(path, record))
    return "\n\n".join(parts) or "No record has been made yet: `python3 benches/serving.py measure` makes one."


def page():
    old = PAGE.read_text()
    begin, end = (old.index(mark) for mark in MARKS)
    return old[: begin + len(MARKS[0])] + "\n" + text() + "\n" + old[end:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name in ("measure", "soak"):
        task = tasks.add_parser(name)
        task.add_argument("program", type=lambda p: str(pathlib.Path(p).resolve()))
        task.add_argument("out")
        task.add_argument("--threads", type=int)
        task.add_argument("--model", default="smollm2-135m")
        task.set_defaults(only=None, small=False)
    tasks.choices["measure"].add_argument("--only")
    tasks.choices["measure"].add_argument("--small", action="store_true")
    tasks.choices["soak"].add_argument("--seconds", type=int, default=1800)
    tasks.choices["soak"].add_argument("--clients", type=int, default=20)
    tasks.choices["soak"].add_argument("--kv-memory", default="24MiB")
    tasks.add_parser("page")
    tasks.add_parser("check")
    args = parser.parse_args()
    if args.task in ("measure", "soak"):
        measure(args)
    elif args.task == "page":
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("error: docs/serving.md does not show the newest serving records\nhint: run `python3 benches/serving.py page`")


if __name__ == "__main__":
    main()
