#!/usr/bin/env python3
"""Scalar codebooks of a standard normal: `python3 tests/golden/codebooks.py` writes crates/kv/src/quant/levels.rs.

Lloyd-Max: each centroid is the mean of the normal between the midpoints to its neighbours. Two-stage codebooks (RVQ) take the
first stage's centroids and one Lloyd-Max codebook for the residuals of all its cells together. Kernels multiply 8-bit
integers, so centroids are rounded to odd multiples of half a unit, the outermost being 127.5 units. Prints the distortion of
both forms beside the published ones (TurboQuant, arXiv 2504.19874: .36, .117, .03, .009). Needs Python only.
"""
import math
import struct
import sys
from pathlib import Path

OUT = Path(__file__).parents[2] / "crates/kv/src/quant/levels.rs"
PUBLISHED = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def pdf(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def cdf(x):
    return 0.5 * math.erfc(-x / math.sqrt(2))


def moments(a, b):
    """Integrals of 1, x, x^2 times the density over (a, b)."""
    xa, xb = (a * pdf(a) if math.isfinite(a) else 0.0), (b * pdf(b) if math.isfinite(b) else 0.0)
    m0 = cdf(b) - cdf(a)
    return m0, pdf(a) - pdf(b), m0 + xa - xb


def edges(centroids):
    mids = [(a + b) / 2 for a, b in zip(centroids, centroids[1:])]
    return [-math.inf, *mids, math.inf]


def distortion(centroids):
    e = edges(centroids)
    total = 0.0
    for c, a, b in zip(centroids, e, e[1:]):
        m0, m1, m2 = moments(a, b)
        total += m2 - 2 * c * m1 + c * c * m0
    return total


def lloyd(bits):
    n = 2**bits
    c = [(i + 0.5 - n / 2) * 5 / n for i in range(n)]
    for _ in range(20000):
        e = edges(c)
        c = [moments(a, b)[1] / moments(a, b)[0] for a, b in zip(e, e[1:])]
    return [(x - y) / 2 for x, y in zip(c, reversed(c))]


def residual(first, bits):
    """The codebook of 2^bits centroids for x - first[cell of x], all cells together."""
    n = 2**bits
    c = [(i + 0.5 - n / 2) * 1.5 / n for i in range(n)]
    cells = list(zip(first, edges(first), edges(first)[1:]))
    for _ in range(3000):
        e = edges(c)
        new = []
        for a, b in zip(e, e[1:]):
            m0 = m1 = 0.0
            for centre, lo, hi in cells:
                lo, hi = max(lo, centre + a), min(hi, centre + b)
                if lo < hi:
                    p0, p1, _ = moments(lo, hi)
                    m0, m1 = m0 + p0, m1 + p1 - centre * p0
            new.append(m1 / m0)
        c = new
    return [(x - y) / 2 for x, y in zip(c, reversed(c))]


def integers(centroids):
    """Levels 0..=255 about 127.5, and the unit that makes numbers of them."""
    unit = max(centroids) / 127.5
    levels = [math.floor(c / unit) + 0.5 if c > 0 else -(math.floor(-c / unit) + 0.5) for c in centroids]
    return [int(x + 127.5) for x in levels], unit


def shortest(x):
    """The shortest text of the nearest f32."""
    f32 = struct.pack("<f", x)
    (x,) = struct.unpack("<f", f32)
    return next(t for d in range(9) if struct.pack("<f", float(t := f"{x:.{d}e}")) == f32)


def main():
    books = [(f"{b}", b, lloyd(b)) for b in (1, 2, 3, 4)]
    for one, two in ((1, 1), (2, 1), (2, 2)):
        first = lloyd(one)
        second = residual(first, two)
        both = [a + b for a in first for b in second]
        assert both == sorted(both), "the sums must be in order: a code is the first stage's, then the second's"
        books.append((f"{one}+{two}", one + two, both))
    text = [
        "//! Codebooks of a standard normal. Written by tests/golden/codebooks.py, which says how; not by hand.",
        "",
        "/// Levels of the codes, about 127.5, and what one unit is in standard deviations.",
        "pub(crate) struct Levels {",
        "    pub levels: &'static [u8],",
        "    pub unit: f32,",
        "}",
    ]
    names = {"1": "LLOYD_1", "2": "LLOYD_2", "3": "LLOYD_3", "4": "LLOYD_4"}
    for name, bits, c in books:
        levels, unit = integers(c)
        rounded = [(x - 127.5) * unit for x in levels]
        d, r = distortion(c), distortion(rounded)
        print(f"{name:>4}: distortion {d:.6f}, of integers {r:.6f} ({100 * (r / d - 1):.2f} % more)", end="")
        print(f", published {PUBLISHED[bits]}" if name in names else "", file=sys.stdout)
        label = names.get(name, "RESIDUAL_" + name.replace("+", "_"))
        what = f"{name} bits" if name in names else f"{name} bits in two stages"
        text += [
            "",
            f"/// {what}: mean squared error {r:.6f} (exact centroids {d:.6f}).",
            f"pub(crate) const {label}: Levels =",
            f"    Levels {{ levels: &{levels}, unit: {shortest(unit)} }};",
        ]
    OUT.write_text("\n".join(text) + "\n")


main()
