"""Seeds of the fuzz targets, made here: bodies of requests, and a small GGUF with a tokenizer. Prompt caches are written by the
target itself (KVANT_FUZZ_SEEDS=FOLDER). Usage: python3 seeds.py"""

import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"


def text(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def value(v):
    """A metadata value with its type."""
    if isinstance(v, bool):
        return struct.pack("<IB", 7, v)
    if isinstance(v, int):
        return struct.pack("<II", 4, v)
    if isinstance(v, float):
        return struct.pack("<If", 6, v)
    if isinstance(v, str):
        return struct.pack("<I", 8) + text(v)
    kind, items = v
    body = b"".join(text(x) if kind == 8 else struct.pack("<i" if kind == 5 else "<f", x) for x in items)
    return struct.pack("<IIQ", 9, kind, len(items)) + body


def gguf(architecture, byte_pairs):
    letters = ["<unk>", "<s>", "</s>", "\u0120", *"abcdefghijklmnopqrstuvwxyz", "he", "ll"]
    meta = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 1,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.feed_forward_length": 64,
        f"{architecture}.context_length": 128,
        f"{architecture}.attention.head_count": 1,
        f"{architecture}.attention.head_count_kv": 1,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.attention.sliding_window": 32,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2" if byte_pairs else "llama",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": (8, letters),
        "tokenizer.ggml.token_type": (5, [3 if t.startswith("<") else 1 for t in letters]),
        "tokenizer.ggml.scores": (6, [-float(i) for i in range(len(letters))]),
        "tokenizer.ggml.merges": (8, ["h e", "l l"]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}",
    }
    head = struct.pack("<IQQ", 3, 1, len(meta))
    body = b"".join(text(k) + value(v) for k, v in meta.items())
    tensor = text("output_norm.weight") + struct.pack("<IQIQ", 1, 64, 0, 0)
    file = b"GGUF" + head + body + tensor
    return (file + b"\0" * (-len(file) % 32) + b"\0" * 256)[4:]


BODIES = [
    {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "logprobs": True, "top_logprobs": 3, "n": 2},
    {"prompt": ["a", "b"], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7},
    {"prompt": [1, 2, 3], "stop": ["x", "\n"], "logprobs": 2, "echo": False, "best_of": 1, "suffix": ""},
    {"prompt": [[1, 2], [3]], "stop": "y", "max_tokens": -1, "frequency_penalty": 0, "logit_bias": {}},
    {"messages": [{"role": "system", "content": "\u20ac"}, {"role": "assistant", "content": None}], "max_completion_tokens": 1},
    {"messages": [], "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "user": "u", "metadata": {}},
]


def main():
    for target, seeds in {
        "request_json": [json.dumps(b).encode() for b in BODIES],
        "gguf_header": [gguf(a, p) for a in ("llama", "qwen2", "qwen3", "gemma3") for p in (True, False)],
    }.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(seeds):
            (folder / f"seed-{i}").write_bytes(seed)


if __name__ == "__main__":
    main()
