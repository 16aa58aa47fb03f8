"""The `openai` package against a server. In: base address, key; out: exit code 0, or a failed assertion.
NOT here: starting the server (serving.rs)."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[2], max_retries=0, timeout=120)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model
messages = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is the capital of France?"}]

# Whole and as a stream, the same words.
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
text = whole.choices[0].message.content
assert "Paris" in text, text
assert whole.choices[0].finish_reason in ("stop", "length")
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
assert whole.usage.prompt_tokens_details.cached_tokens >= 0
said, usage, reason = "", None, None
for chunk in client.chat.completions.create(
    model=model, messages=messages, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
):
    for choice in chunk.choices:
        said += choice.delta.content or ""
        reason = choice.finish_reason or reason
    usage = chunk.usage or usage
assert (said, reason) == (text, whole.choices[0].finish_reason)
assert usage.completion_tokens == whole.usage.completion_tokens

# Seeds, several answers, a stop text, log probabilities.
several = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=1.0, top_p=0.9, seed=7, n=3,
                                         extra_body={"top_k": 40, "min_p": 0.01})
again = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=1.0, top_p=0.9, seed=8,
                                       extra_body={"top_k": 40, "min_p": 0.01})
assert [c.index for c in several.choices] == [0, 1, 2]
assert several.choices[1].message.content == again.choices[0].message.content
stopped = client.completions.create(model=model, prompt="1, 2, 3, 4, 5,", max_tokens=30, temperature=0, stop=[" 8", "\n\n"])
assert stopped.choices[0].finish_reason == "stop" and " 8" not in stopped.choices[0].text and " 7" in stopped.choices[0].text, stopped
scored = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
for entry in scored.choices[0].logprobs.content:
    assert entry.logprob <= 0 and len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
lists = client.completions.create(model=model, prompt="Once upon a", max_tokens=4, temperature=0, logprobs=2).choices[0].logprobs
assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset) == 4
texts = [c.text for c in client.completions.create(model=model, prompt=["One,", "Two,"], max_tokens=4, temperature=0).choices]
assert len(texts) == 2
streamed = "".join(c.choices[0].text for c in client.completions.create(model=model, prompt="One,", max_tokens=4, temperature=0, stream=True))
assert streamed == texts[0], (streamed, texts)


def refused(kind, status, param, ask):
    try:
        ask()
    except kind as error:
        assert (error.status_code, error.param) == (status, param), error
        assert param is None or param in error.message, error
    else:
        raise AssertionError(f"{kind} was expected")


def chat(**fields):
    return lambda: client.chat.completions.create(**{"model": model, "messages": messages, **fields})


refused(openai.BadRequestError, 400, "max_tokens", chat(max_tokens=-1))
refused(openai.BadRequestError, 400, "temperature", chat(temperature=9))
refused(openai.BadRequestError, 400, "tools", chat(tools=[{"type": "function", "function": {"name": "f"}}]))
refused(openai.BadRequestError, 400, "response_format", chat(response_format={"type": "json_object"}))
refused(openai.BadRequestError, 400, "messages", chat(messages=[{"role": "user", "content": "word " * 20000}]))
refused(openai.NotFoundError, 404, "model", chat(model="gpt-17"))
wrong = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="wrong", max_retries=0)
refused(openai.AuthenticationError, 401, None, wrong.models.list)
# A stream that is closed early.
with client.completions.create(model=model, prompt="Count:", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}) as stream:
    next(iter(stream))
print("ok")
