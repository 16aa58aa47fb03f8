#!/usr/bin/env python3
"""Golden logits of tiny random models, computed by transformers, and what its tokenizers make of texts.

In: nothing; out: tests/golden/models/NAME/ (a model as transformers saves it) and tests/golden/models/golden.safetensors:
NAME.tokens, NAME.logits (what transformers computes in f32; last positions) and NAME.logits_f16 (the same with keys and values rounded to
f16 on their way into attention, as a cache stores them); tests/golden/models/texts.json.
Needs: pip install torch transformers safetensors tokenizers. Run from the root of the repository.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

OUT = Path("tests/golden/models")
LEN = 40
# Positions whose plain logits are kept, from the end.
PLAIN = 8
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = """The harbour was quiet, and the boats lay in rows of 12 along the wall. "Who's there?" she asked; nobody answered.
Élan, naïve, straße: words with marks. 2024-05-17 10:32:01 error code=-17\n\n    indented text,   three  spaces\t(tab)."""
TEXTS = [TEXT, "", " ", "a", " leading", "<|im_end|> and <end_of_turn>", "€ 🙂 漢字", "x\n\n\ny", "1234567890"]


def rounded(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Attention over keys and values as an f16 cache holds them."""
    key, value = (x.half().to(x.dtype) for x in (key, value))
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask[..., : key.shape[-2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("rounded", rounded)
ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", eager_mask)

COMMON = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
              head_dim=64, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "llama": ("Llama", torch.bfloat16, dict(vocab_size=96, rope_parameters=dict(rope_type="linear", rope_theta=5e5, factor=2.0))),
    "qwen2": ("Qwen2", torch.float16, dict(vocab_size=96, hidden_size=128, intermediate_size=32, num_hidden_layers=1,
                                            tie_word_embeddings=True)),
    "qwen3": ("Qwen3", torch.float32, dict(vocab_size=330, num_hidden_layers=1, eos_token_id=[2, 3])),
    "gemma3": ("Gemma3", torch.bfloat16, dict(
        vocab_size=420, bos_token_id=2, eos_token_id=[1, 5], num_hidden_layers=3, sliding_window=16, query_pre_attn_scalar=48,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                             sliding_attention=dict(rope_type="default", rope_theta=1e4)))),
    "llama3": ("Llama", torch.bfloat16, dict(vocab_size=96, num_hidden_layers=1, rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64))),
}


def randomize(model, gemma):
    for name, p in model.named_parameters():
        if p.dim() == 2:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            p.data = torch.randn(p.shape) * gain * (0.7 if "embed" in name else p.shape[1] ** -0.5)
        elif "norm" in name:
            p.data = torch.randn(p.shape) * 0.3 + (0.0 if gemma else 1.0)
        else:
            p.data = torch.randn(p.shape) * 0.7


def byte_level():
    """As qwen has it: bytes as characters, no start token."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
    t.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=325, special_tokens=special, show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    template = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    return PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)


def pieces():
    """As gemma has it: spaces as U+2581, unknown characters as bytes, a start token."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.train_from_iterator([TEXT.replace(" ", "\u2581").replace("Élan", "")],
                          trainers.BpeTrainer(vocab_size=160, special_tokens=special, show_progress=False))
    # The byte tokens that byte_fallback looks up.
    made = json.loads(t.to_str())
    vocabulary = made["model"]["vocab"]
    for i in range(256):
        vocabulary.setdefault(f"<0x{i:02X}>", len(vocabulary))
    t = Tokenizer.from_str(json.dumps(made))
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.post_processor = processors.TemplateProcessing(single="<bos>:0 $A:0", pair="<bos>:0 $A:0 <bos>:1 $B:1",
                                                     special_tokens=[("<bos>", vocabulary["<bos>"])])
    template = ("{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + "
                "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
                                   pad_token="<pad>", chat_template=template)


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    golden, texts = {}, {}
    for seed, (name, (family, dtype, config)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        text = "Text" if family == "Gemma3" else ""
        config = getattr(transformers, f"{family}{text}Config")(**{**COMMON, **config})
        made = getattr(transformers, f"{family}ForCausalLM")
        model = made(config)
        randomize(model, family == "Gemma3")
        model.to(dtype).save_pretrained(OUT / name, max_shard_size="20KB" if name == "qwen2" else "1GB")
        tokens = torch.randint(4, config.vocab_size, (1, LEN))
        golden[f"{name}.tokens"] = tokens[0].int()
        for key, attention in [("logits", "eager"), ("logits_f16", "rounded")]:
            again = made.from_pretrained(OUT / name, dtype=torch.float32, attn_implementation=attention).eval()
            with torch.no_grad():
                golden[f"{name}.{key}"] = again(tokens).logits[0, -PLAIN if key == "logits" else 0 :].float().contiguous()
    for name, tokenizer in [("qwen3", byte_level()), ("gemma3", pieces())]:
        assert len(tokenizer) <= MODELS[name][2]["vocab_size"], len(tokenizer)
        tokenizer.save_pretrained(OUT / name)
        encode = tokenizer.backend_tokenizer
        plain = Tokenizer.from_str(encode.to_str())
        plain.encode_special_tokens = True
        chat = [dict(role="user", content="Who's there? 12 boats.")]
        texts[name] = dict(
            texts=[dict(text=t, ids=plain.encode(t).ids) for t in TEXTS],
            chat=tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False),
            said=chat[0]["content"])
    save_file(golden, OUT / "golden.safetensors")
    (OUT / "texts.json").write_text(json.dumps(texts, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
