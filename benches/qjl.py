#!/usr/bin/env python3
"""Is a bit better spent on a sketch of what is left (QJL) or on a finer table? `python3 benches/qjl.py [SEED]`.

TurboQuant's second form (arXiv 2504.19874) codes keys with a table of b - 1 bits and one bit more per channel: the sign of a
random projection of what the table leaves, which makes products unbiased. Beside it at the same bits: the table of b bits,
sign bits of b bits, two stages. Values are exact, so errors are the keys' alone. Prints, for keys of several kinds: the bias
and deviation of products (in deviations of the scores), and the relative L2 error of what attention makes of scores of several
deviations. The sketch is given its numbers as they are: projections in float64, the norm of what is left not rounded.
Needs numpy.
"""
import importlib.util
import sys
from pathlib import Path
import numpy as np

# By its path: `codecs` is a module of Python.
GOLDEN = Path(__file__).parents[1] / "tests/golden"
sys.path.insert(0, str(GOLDEN))
SPEC = importlib.util.spec_from_file_location("golden_codecs", GOLDEN / "codecs.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)

D, TOKENS, QUERIES, ROUNDS = 128, 4096, 64, 4


def keys(rng, kind):
    x = rng.standard_normal((TOKENS, D))
    if kind != "normal":
        loud = rng.choice(D, D // 16, replace=False)
        x[:, loud] = x[:, loud] * 6 + rng.standard_normal(len(loud)) * 8
    if kind == "loud, tokens of many sizes":
        x *= np.exp(0.5 * rng.standard_normal((TOKENS, 1)))
    return reference.rotate(x, rng.choice([-1.0, 1.0], D))


def sketched(rng, x, q, table):
    """Products q . x of a table and a sketch of one bit per channel."""
    hat = reference.encode(table, x)[2]
    left = x - hat
    s = rng.standard_normal((D, D))
    bits = np.where(left @ s.T > 0, 1.0, -1.0)
    size = np.sqrt((left * left).sum(-1))
    return q @ hat.T + np.sqrt(np.pi / 2) / D * (q @ s.T) @ bits.T * size


def softmax(x):
    w = np.exp(x - x.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def main():
    rng = np.random.default_rng(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    plain = lambda name: lambda x, q: q @ reference.encode(name, x)[2].T
    contestants = {
        "tq1 + QJL": (2, lambda x, q: sketched(rng, x, q, "tq1")), "tq2": (2, plain("tq2")), "sb2": (2, plain("sb2")),
        "tq2 + QJL": (3, lambda x, q: sketched(rng, x, q, "tq2")), "tq3": (3, plain("tq3")), "rvq21": (3, plain("rvq21")),
        "sb3": (3, plain("sb3")),
        "tq3 + QJL": (4, lambda x, q: sketched(rng, x, q, "tq3")), "tq4": (4, plain("tq4")), "sb4": (4, plain("sb4")),
    }
    for kind in ("normal", "loud", "loud, tokens of many sizes"):
        figures = {name: [] for name in contestants}
        for _ in range(ROUNDS):
            x, v = keys(rng, kind), rng.standard_normal((TOKENS, D))
            directions = rng.standard_normal((QUERIES, D))
            for spread in (1.0, 2.0, 4.0):
                # Scores whose deviation over the tokens is `spread`.
                q = directions * (spread / (directions @ x.T).std(-1, keepdims=True))
                exact = q @ x.T
                want = softmax(exact) @ v
                for name, (_, product) in contestants.items():
                    got = product(x, q)
                    off = got - exact
                    # Biased products shrink towards 0: the slope over the exact ones.
                    slope = (off * exact).sum() / (exact * exact).sum()
                    out = softmax(got) @ v
                    error = np.sqrt(((out - want) ** 2).sum(-1) / (want**2).sum(-1))
                    figures[name].append((spread, slope, off.std() / spread, error.mean()))
        print(f"\nkeys: {kind}; {TOKENS} tokens, {D} channels, {QUERIES * ROUNDS} queries; errors at scores' deviations")
        print(f"{'bits':>4} {'codec':<10} {'bias':>8} {'deviation':>9}" + "".join(f"{f'at {s}':>8}" for s in (1, 2, 4)))
        for name, (bits, _) in contestants.items():
            rows = np.array(figures[name])
            at = [rows[rows[:, 0] == s, 3].mean() for s in (1.0, 2.0, 4.0)]
            print(f"{bits:>4} {name:<10} {rows[:, 1].mean():+8.4f} {rows[:, 2].mean():9.4f}" + "".join(f"{a:8.4f}" for a in at))


main()
