#!/usr/bin/env python3
"""The roofline example of the docs, made by the tool.

In: the release program on this machine (quiet, clean checkout); out: docs/roofline/example.{html,md,json}.
NOT here: any figure. Needs cargo, git, python3 and nothing else.
"""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "roofline"
WORDS = "roofline --html docs/roofline/example.html --markdown docs/roofline/example.md --json"


def run(*words):
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main():
    run("cargo", "build", "--release", "--locked", "-p", "kvant-cli")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    commit = run("git", "rev-parse", "--short=12", "HEAD").strip()
    changed = run("git", "status", "--porcelain", "--untracked-files=no", "--", "crates").strip()
    note = f"commit {commit}{' with uncommitted changes' if changed else ''}, release build, `kvant {WORDS}`"
    OUT.mkdir(parents=True, exist_ok=True)
    report = run(str(target / "release" / "kvant"), *WORDS.split(), "--note", note)
    (OUT / "example.json").write_text(report)
    tables = OUT / "example.md"
    head = "# Roofline: an example\n\nWritten by `benches/roofline.py`; how to read it: [roofline.md](../roofline.md).\n\n"
    tables.write_text(head + tables.read_text())
    print(*sorted(p.relative_to(ROOT) for p in OUT.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
