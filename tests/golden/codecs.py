"""Independent float64 reference of the codecs beside affine groups, and the generator of codecs.safetensors.

Run: pip install numpy safetensors && python codecs.py OUT.safetensors [SEED]
     python codecs.py check [SEED]     # what the codecs cost on normal numbers, beside what their papers say

Written from the papers and docs/codecs.md (the product must match these). D = head_dim, a row = one token's keys or values:
  rotation   y = H (s * x) / sqrt(n): random signs s, H the Hadamard matrix of n, the largest power of two that divides D, on
             each block of n channels. Rows are rotated before they are stored; below, x is what is stored, as float16.
  tq<b>      TurboQuant (arXiv 2504.19874): scale = float16(root mean square of x), code = nearest of 2^b centroids to x/scale.
             Centroids: Lloyd-Max of N(0, 1), the outermost 127.5 units, the others rounded to odd multiples of half a unit.
  rvq<a><b>  the same with sums of two stages' centroids: Lloyd-Max of a bits, and of b bits for what it leaves, of all cells
             together. The sums in ascending order are one table.
  sb<b>      RaBitQ (SIGMOD 2024; arXiv 2409.09913). 1 bit: u = sign(x). More: u = code - (2^b - 1) / 2 with
             code = clip(floor(x / step + 2^(b-1)), 0, 2^b - 1), step = root mean square of x, times the best step of a uniform
             quantizer of N(0, 1) (4 decimals), times that of eight parts with the largest cosine of u and x (the first one).
             scale = float16(|x|^2 / <u, x>), x_hat = scale * u.
  vq<c>x<l>  product quantization: for l channels the nearest of c centroids, base + step * level by channel, level 0..255.
  Zero rows have scale 0. Attention and the rule of positions are those of reference.py; sinks have no codes.
The file leaves out rows for which float32 could choose another step of sb, and attention's rows also those with a number so
near a border that float32 could choose another code.
"""
import re
import sys
import numpy as np
import reference as ref

PARTS = (0.72, 0.81, 0.88, 0.94, 1.0, 1.07, 1.16, 1.28)
PUBLISHED = {"tq1": 0.36, "tq2": 0.117, "tq3": 0.03, "tq4": 0.009}
LLOYD_MAX = {"tq1": 0.3634, "tq2": 0.1175, "tq3": 0.03454, "tq4": 0.009497}     # Max 1960


# Codebooks: sums over a fine grid of x in place of closed integrals.
X = (np.arange(1 << 21) + 0.5) * (20 / (1 << 21)) - 10
W = np.exp(-X * X / 2)
W /= W.sum()


def nearest(c, x):
    """The index of the nearest of ascending numbers c."""
    return np.searchsorted((c[1:] + c[:-1]) / 2, x)


def lloyd(x, w, n, spread):
    """n centroids of the dense points x (ascending) with weights w; borders between points share their weight."""
    mass, moment = np.cumsum(w) - w / 2, np.cumsum(w * x) - w * x / 2
    all_mass, all_moment = w.sum(), (w * x).sum()
    c = (np.arange(n) + 0.5 - n / 2) * spread / n
    for _ in range(20000):
        at = (c[1:] + c[:-1]) / 2
        ends = lambda total, whole: np.diff(np.concatenate([[0], np.interp(at, x, total), [whole]]))
        new = ends(moment, all_moment) / ends(mass, all_mass)
        done = np.abs(new - c).max() < 1e-12
        c = new
        if done:
            break
    return (c - c[::-1]) / 2


def codebook(name):
    """Exact centroids of tq and rvq."""
    bits = [int(b) for b in name.lstrip("tqrv")]
    c = lloyd(X, W, 2 ** bits[0], 5.0)
    if len(bits) == 2:
        left = X - c[nearest(c, X)]
        order = np.argsort(left)
        c = (c[:, None] + lloyd(left[order], W[order], 2 ** bits[1], 1.5)).ravel()
        assert (np.diff(c) > 0).all()
    return c


def integers(c):
    """Levels and the unit: the outermost at 127.5 units, all at odd multiples of half a unit."""
    unit = c.max() / 127.5
    odd = np.minimum(2 * np.floor(np.abs(c) / unit) + 1, 255)
    return ((np.sign(c) * odd + 255) / 2).astype(np.uint8), unit


def best_step(bits):
    """The step of least error of a uniform quantizer of N(0, 1) with 2^bits levels about 0, to 4 decimals: golden section."""
    top = 2 ** (bits - 1) - 0.5
    half = X > 0
    x, w = X[half], W[half]

    def error(step):
        return (w * (x - step * np.minimum(np.floor(x / step) + 0.5, top)) ** 2).sum()

    lo, hi = 0.1, 1.5
    for _ in range(40):
        a, b = hi - (hi - lo) * 0.6180339887, lo + (hi - lo) * 0.6180339887
        lo, hi = (lo, b) if error(a) < error(b) else (a, hi)
    return round((lo + hi) / 2, 4)


BOOKS = {name: integers(codebook(name)) for name in ("tq1", "tq2", "tq3", "tq4", "rvq11", "rvq21", "rvq22")}
SIGNS = {"sb1": None, **{f"sb{b}": best_step(b) for b in (2, 3, 4)}}
VECTORS = {"vq16x4": (16, 4), "vq16x8": (16, 8), "vq256x4": (256, 4), "vq256x8": (256, 8)}
CODECS = (*BOOKS, *SIGNS, *VECTORS)


def numbers(book):
    levels, unit = book
    return (levels.astype(np.float64) - 127.5) * unit


# Codecs: rows [..., D] to codes, scales, numbers, and how far another choice was: the distance to the nearest border in scales
# or steps (vq: to the second nearest centroid), and for sb the relative distance to the best step with other codes.
def table(x, book):
    c = numbers(book)
    scale = np.sqrt((x * x).mean(-1)).astype(np.float16)
    s = scale.astype(np.float64)[..., None]
    y = np.divide(x, s, out=np.zeros_like(x), where=s > 0)
    code = nearest(c, y)
    margin = np.abs(y[..., None] - (c[1:] + c[:-1]) / 2).min((-1, -2))
    return code.astype(np.uint8), scale, c[code] * s, margin, np.ones_like(margin)


def signs(x, step):
    rms = np.sqrt((x * x).mean(-1))
    if step is None:
        tries = [(x > 0).astype(np.float64)]
        us, margins = [2 * tries[0] - 1], [np.abs(x).min(-1) / np.maximum(rms, 1e-9)]
    else:
        bits = next(b for b in (2, 3, 4) if SIGNS[f"sb{b}"] == step)
        tries, us, margins = [], [], []
        for part in PARTS:
            y = np.divide(x, (rms * step * part)[..., None], out=np.zeros_like(x), where=rms[..., None] > 0)
            tries.append(np.clip(np.floor(y + 2 ** (bits - 1)), 0, 2**bits - 1))
            us.append(tries[-1] - (2**bits - 1) / 2)
            borders = np.arange(1, 2**bits) - 2 ** (bits - 1)
            margins.append(np.abs(y[..., None] - borders).min((-1, -2)))
    tries, us, margins = np.stack(tries), np.stack(us), np.stack(margins)
    along, size = (us * x).sum(-1), (us * us).sum(-1)
    cosine = np.where(along > 0, along**2 / size, 0)
    best = cosine.argmax(0)
    pick = lambda a: np.take_along_axis(a, best.reshape(1, *best.shape, *[1] * (a.ndim - 1 - best.ndim)), 0)[0]
    u, product, code = pick(us), pick(along), pick(tries)
    other = (tries != code).any(-1)
    rival = np.where(other, cosine, 0).max(0)
    top = cosine.max(0)
    sure = np.where(top > 0, 1 - rival / np.maximum(top, 1e-300), 1)
    full = product > 0
    scale = np.where(full, (x * x).sum(-1) / np.where(full, product, 1), 0)
    scale = np.minimum(scale, 65504).astype(np.float16)
    return (code * full[..., None]).astype(np.uint8), scale, u * scale.astype(np.float64)[..., None], pick(margins), sure


def vectors(x, book):
    """book: base [D], step [D], levels [D/l][c][l] -> codes [..., D/l]."""
    m = centroids(book)
    subs, _, l = m.shape
    parts = x.reshape(*x.shape[:-1], subs, l)
    code = np.zeros(parts.shape[:-1], np.uint8)
    margin = np.full(x.shape[:-1], np.inf)
    for sub in range(subs):
        far = ((parts[..., sub, None, :] - m[sub]) ** 2).sum(-1)
        code[..., sub] = far.argmin(-1)
        two = np.partition(far, 1, -1)
        size = (parts[..., sub, :] ** 2).sum(-1) + 1e-30
        margin = np.minimum(margin, (two[..., 1] - two[..., 0]) / size)
    hat = np.stack([m[sub][code[..., sub]] for sub in range(subs)], -2).reshape(x.shape)
    return code, None, hat, margin, np.ones_like(margin)


def centroids(book):
    base, step, levels = book
    subs, _, l = levels.shape
    at = lambda a: a.astype(np.float64).reshape(subs, 1, l)
    return at(base) + at(step) * levels


def encode(name, x, book=None):
    x = np.asarray(x, np.float64)
    if name in BOOKS:
        return table(x, BOOKS[name])
    return signs(x, SIGNS[name]) if name in SIGNS else vectors(x, book)


def k_means(rng, rows, c, l):
    """A codebook as data: base and step float32 by channel, levels uint8."""
    d = rows.shape[1]
    m = np.zeros((d // l, c, l))
    for sub in range(d // l):
        part = rows[:, sub * l:(sub + 1) * l]
        m[sub] = part[rng.choice(len(part), c, replace=False)]
        for _ in range(6):
            code = ((part * part).sum(1)[:, None] - 2 * part @ m[sub].T + (m[sub] ** 2).sum(1)).argmin(1)
            for i in np.unique(code):
                m[sub, i] = part[code == i].mean(0)
    base = m.min(1).astype(np.float32)
    step = ((m.max(1) - base) / 255).astype(np.float32)
    levels = np.clip(np.rint((m - base[:, None]) / step[:, None]), 0, 255).astype(np.uint8)
    return base.ravel(), step.ravel(), levels


def hadamard(n):
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def rotate(x, s):
    d = x.shape[-1]
    n = d & -d
    blocks = (x * s).reshape(*x.shape[:-1], d // n, n)
    return (blocks @ hadamard(n).T).reshape(x.shape)


def rotated(rng, n, d, s, loud):
    """n rows as a cache is given them: with loud channels (keys), or flat (values), rotated, float16."""
    x = rng.standard_normal((n, d))
    if loud is not None:
        x[:, loud[0]] = x[:, loud[0]] * 6 + loud[1]
    return rotate(x, s).astype(np.float16)


def sure_rows(rng, n, d, s, loud, margin, books):
    """Rows whose codes float32 cannot doubt; margin 0: only steps of sb are looked at."""
    kept = np.zeros((0, d), np.float16)
    while len(kept) < n:
        x = rotated(rng, n, d, s, loud)
        good = np.ones(n, bool)
        for name in (*BOOKS, *SIGNS):
            *_, border, sure = encode(name, x)
            good &= (border > margin) & (sure > 1e-5)
        for name, book in books:
            good &= encode(name, x, book)[3] >= margin
        kept = np.concatenate([kept, x[good]])
    return kept[:n]


# Attention cases: scheme, head_dim. The last STEPS tokens are decoded one by one, the others are the prompt.
CASES = (
    ("ktq1vtq1g32w32s4", 64), ("ktq2vtq2g64", 128), ("ktq3vtq2g32w32s4", 80), ("ktq4vtq3g32w32", 64),
    ("krvq11vrvq11g32w32s4", 128), ("krvq21vrvq22g32w16", 80), ("krvq22vrvq21g64w32s4", 64),
    ("ksb1v4g32w32s4", 64), ("ksb1v4g64s16", 80), ("ksb2vtq4g32w32s4", 128), ("ksb3vsb1g32", 80), ("ksb4vsb3g32w32s4", 64),
    ("ksb1vsb4g32w32s4", 64),
    ("kvq16x4vvq16x8g32w32s4", 64), ("kvq16x8vvq16x4g32w32", 80), ("kvq256x4vvq256x8g32w32s4", 80),
    ("kvq256x8vvq256x4g64s4", 80), ("k4vtq4g32w32s4", 64), ("kvq256x4v4g32w32s4p64", 80), ("k2vsb2g32w32s4", 128),
)
TOKENS = {64: (2, 4, 118), 80: (2, 4, 102), 128: (1, 3, 118)}       # by head_dim: kv heads, query heads, tokens
STEPS = 2
ROWS, HATS = 32, 4
# The head_dim whose rows each codec is shown.
SHOWN = dict(zip(CODECS, (64, 80, 128, 64, 80, 128, 64, 128, 64, 80, 128, 64, 80, 80, 80)))


def cases(seed):
    rng = np.random.default_rng(seed)
    t = {}
    for name, book in BOOKS.items():
        t[f"table.{name}.levels"], t[f"table.{name}.unit"] = book[0], np.array([book[1]])
    made = {}
    for d, (heads, q_heads, tokens) in TOKENS.items():
        s = {x: rng.choice([-1.0, 1.0], d) for x in "kv"}
        channels = rng.choice(d, d // 16, replace=False)
        loud = {"k": (channels, rng.standard_normal(len(channels)) * 8), "v": None}
        x = rng.standard_normal((4, d)).astype(np.float32)
        t[f"turn.d{d}.x"], t[f"turn.d{d}.signs"] = x, s["k"].astype(np.int8)
        t[f"turn.d{d}.y"] = rotate(x.astype(np.float64), s["k"])
        # Codebooks of sub-vectors: those of 16 centroids one per kv head, those of 256 one for all.
        books = {}
        for name, (c, l) in VECTORS.items():
            if c == 256 and d != 80 or d == 128:
                continue
            for x in "kv":
                n = heads if c == 16 else 1
                rows = lambda: rotated(rng, 1024, d, s[x], loud[x]).astype(np.float64)
                books[name, x] = [k_means(rng, rows(), c, l) for _ in range(n)]
                for at, key in enumerate(("base", "step", "levels")):
                    t[f"book.d{d}.{name}.{x}.{key}"] = np.stack([book[at] for book in books[name, x]])
        data = {}
        for x in "kv":
            own = [(name, book) for (name, y), all in books.items() if y == x for book in all]
            rows = sure_rows(rng, heads * tokens, d, s[x], loud[x], 1e-5, own)
            data[x] = rows.reshape(heads, tokens, d)
            t[f"data.d{d}.{x}"] = data[x]
            shown = sure_rows(rng, ROWS, d, s[x], loud[x], 0, [])
            shown[1] = 0                                                       # nothing
            shown[2] = (shown[2].astype(np.float64) * 2**9).astype(np.float16)  # powers of two: no other codes
            shown[3] = (shown[3].astype(np.float64) * 2**-8).astype(np.float16)
            t[f"rows.d{d}.{x}"] = shown
        data["q"] = rng.standard_normal((STEPS, q_heads, d)).astype(np.float16)
        t[f"data.d{d}.q"] = data["q"]
        made[d] = data, books
    for name, d in SHOWN.items():
        t[f"codec.{name}.head_dim"] = np.array([d], np.int64)
        for x in "kv":
            book = made[d][1][name, x][0] if name in VECTORS else None
            code, scale, hat, *_ = encode(name, t[f"rows.d{d}.{x}"], book)
            n = f"codec.{name}.{x}."
            t[n + "codes"], t[n + "hat"] = code, hat[:HATS].astype(np.float32)
            if scale is not None:
                t[n + "scale"] = scale
    for text, d in CASES:
        t[f"attend.{text}.d{d}.out"] = decoded(text, d, *made[d])
    return t


def decoded(text, d, data, books):
    """Outputs [STEPS, q_heads, D] of the last tokens, each after all before it."""
    part = re.fullmatch(r"k([a-z]*\d+(?:x\d+)?)v([a-z]*\d+(?:x\d+)?)g(\d+)(?:w(\d+))?(?:s(\d+))?(?:p(\d+))?", text)
    codec = dict(zip("kv", part.groups()[:2]))
    g, window, sinks, page = (int(n or 0) for n in part.groups()[2:])
    tokens = data["k"].shape[1]
    outs = []
    for step in range(STEPS):
        i = tokens - STEPS + step
        e = ref.edge(i, window, g, page)
        assert e > sinks
        seen = {}
        for x in "kv":
            rows = data[x][:, :i + 1].astype(np.float64)
            packed = rows[:, :e].copy()
            if codec[x].isdigit():
                bits, axis = int(codec[x]), -2 if x == "k" else -1
                if x == "k" and sinks:
                    packed[:, :sinks] = packed[:, sinks:sinks + 1]
                packed = ref.dequantize(*ref.quantize(packed, bits, axis, g), axis, g)
            else:
                for head in range(len(packed)):
                    own = books.get((codec[x], x))
                    packed[head] = encode(codec[x], packed[head], own and own[head % len(own)])[2]
            rows[:, sinks:e] = packed[:, sinks:]
            seen[x] = rows
        outs.append(ref.attend(data["q"][step], seen["k"], seen["v"], d**-0.5))
    return np.stack(outs)


def check(seed):
    """What the codecs cost, on numbers of their own."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((7813, 128))      # 10^6 numbers
    print(f"mean squared error over {x.size} normal numbers; rows of 128 with their own scale")
    print(f"{'codec':>6} {'exact':>9} {'integers':>9} {'by rows':>9} {'paper':>7} {'Lloyd-Max':>9}")
    for name, book in BOOKS.items():
        c = codebook(name)
        of = lambda c: ((c[nearest(c, x)] - x) ** 2).mean()
        rows = ((encode(name, x)[2] - x) ** 2).mean() / (x * x).mean()
        known = f"{PUBLISHED.get(name, '')!s:>7} {LLOYD_MAX.get(name, '')!s:>9}"
        print(f"{name:>6} {of(c):9.6f} {of(numbers(book)):9.6f} {rows:9.6f} {known}")
    print("best steps of uniform quantizers:", {name: step for name, step in SIGNS.items() if step})
    print("products of 100000 pairs of 128 channels, error over |x||q|: random rows and queries; one row, all but flat, turned")
    flat = np.r_[10.0, np.ones(127)] * np.sign(rng.standard_normal(128))
    failed = False
    for name in SIGNS:
        for kind in ("random", "turned"):
            error, bound = [], []
            for _ in range(20):
                q = rng.standard_normal((5000, 128))
                if kind == "random":
                    r = rng.standard_normal((5000, 128))
                else:
                    # Random signs before and after a Hadamard matrix.
                    r = rotate(flat * rng.choice([-1.0, 1.0], (5000, 128)), 1.0) * rng.choice([-1.0, 1.0], (5000, 128))
                    q = q + 0.3 * r
                hat = encode(name, r)[2]
                norm = lambda a: np.sqrt((a * a).sum(-1))
                error.append((((hat - r) * q).sum(-1)) / (norm(r) * norm(q)))
                cosine = (hat * r).sum(-1) / (norm(hat) * norm(r))
                bound.append((1 - cosine**2) / cosine**2 / 127)
            error, bound = np.concatenate(error), np.concatenate(bound)
            off = error.mean() / (error.std() / np.sqrt(len(error)))
            failed |= abs(off) > 3
            print(f"{name:>6} {kind:>7}: mean {error.mean():+.2e}, {off:+.2f} standard errors; deviation {error.std():.5f}, "
                  f"paper's {np.sqrt(bound.mean()):.5f}")
    if failed:
        sys.exit("products are biased")


if __name__ == "__main__":
    out, seed = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20261130
    if out == "check":
        check(seed)
    else:
        from safetensors.numpy import save_file
        save_file({k: np.ascontiguousarray(v) for k, v in cases(seed).items()}, out)
        print("wrote", out)
