"""Requests that a server should refuse, and requests to routes that generate nothing."""

from collections.abc import Iterator

from kvmesh.testing.differential.asks import CHAT, COMPLETIONS, Ask, Body

_PROMPT = "The capital of France is"
_USER: Body = {"role": "user", "content": "Hello."}


_IMAGE: Body = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

_CHAT_FIELDS: dict[str, Body] = {
    "messages-empty": {"messages": []},
    "messages-text": {"messages": "Hello"},
    "message-text": {"messages": ["Hello"]},
    "message-empty": {"messages": [{}]},
    "role-missing": {"messages": [{"content": "x"}]},
    "role-unknown": {"messages": [{"role": "wizard", "content": "x"}]},
    "role-number": {"messages": [{"role": 5, "content": "x"}]},
    "content-missing": {"messages": [{"role": "user"}]},
    "content-null": {"messages": [{"role": "user", "content": None}]},
    "content-number": {"messages": [{"role": "user", "content": 5}]},
    "part-unknown": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "part-image": {"messages": [{"role": "user", "content": [_IMAGE]}]},
    "part-without-text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "parts-empty": {"messages": [{"role": "user", "content": []}]},
    "too-long": {"messages": [{"role": "user", "content": "long " * 3000}]},
    "max-tokens-beyond-context": {"max_tokens": 5000},
    "max-tokens-zero": {"max_tokens": 0},
    "logprobs-number": {"logprobs": 3},
    "top-logprobs-alone": {"top_logprobs": 2},
    "top-logprobs-too-many": {"logprobs": True, "top_logprobs": 30},
    "words-empty": {"bad_words": [""]},
    "prompt-logprobs-streamed": {"prompt_logprobs": 1, "stream": True},
    "prompt-logprobs-too-many": {"prompt_logprobs": 30},
    "top-logprobs-negative": {"logprobs": True, "top_logprobs": -2},
    "n-zero": {"n": 0},
    "model-unknown": {"model": "nobody"},
    "both-continuations": {"continue_final_message": True, "add_generation_prompt": True},
    "template": {"chat_template": "{{ messages[0].content }}"},
    "tool-choice-without-tools": {"tool_choice": "auto"},
}

_FIELDS: dict[str, Body] = {
    "temperature-negative": {"temperature": -0.5},
    "temperature-text": {"temperature": "hot"},
    "temperature-number-in-text": {"temperature": "0"},
    "top-p-zero": {"top_p": 0},
    "top-p-above-one": {"top_p": 1.5},
    "top-k-zero": {"top_k": 0},
    "top-k-negative": {"top_k": -2},
    "min-p-above-one": {"min_p": 1.5},
    "presence-penalty-large": {"presence_penalty": 2.5},
    "frequency-penalty-small": {"frequency_penalty": -2.5},
    "repetition-penalty-zero": {"repetition_penalty": 0},
    "max-tokens-zero": {"max_tokens": 0},
    "max-tokens-negative": {"max_tokens": -1},
    "max-tokens-beyond-context": {"max_tokens": 5000},
    "max-tokens-text": {"max_tokens": "ten"},
    "max-tokens-fraction": {"max_tokens": 2.5},
    "max-tokens-whole-float": {"max_tokens": 2.0},
    "max-tokens-true": {"max_tokens": True},
    "min-tokens-negative": {"min_tokens": -1},
    "min-tokens-above-max": {"min_tokens": 5},
    "n-zero": {"n": 0},
    "n-negative": {"n": -1},
    "logprobs-negative": {"logprobs": -2},
    "logprobs-too-many": {"logprobs": 30},
    "logprobs-text": {"logprobs": "2"},
    "seed-too-large": {"seed": 2**63},
    "seed-text": {"seed": "abc"},
    "stop-number": {"stop": 3},
    "stop-numbers": {"stop": [1, 2]},
    "stop-empty": {"stop": ""},
    "stop-empty-in-list": {"stop": ["x", ""]},
    "stop-too-many": {"stop": [f"stop{n}" for n in range(200)]},
    "stop-token-text": {"stop_token_ids": ["x"]},
    "bias-not-a-token": {"logit_bias": {"abc": 1}},
    "bias-out-of-vocabulary": {"logit_bias": {"60000": 1}},
    "bias-out-of-range": {"logit_bias": {"5": 500}},
    "bias-list": {"logit_bias": [1]},
    "allowed-out-of-vocabulary": {"allowed_token_ids": [60000]},
    "allowed-none": {"allowed_token_ids": []},
    "stream-options-alone": {"stream_options": {"include_usage": True}},
    "stream-options-text": {"stream": True, "stream_options": "usage"},
    "stream-text": {"stream": "maybe"},
    "prompt-empty": {"prompt": ""},
    "prompt-empty-list": {"prompt": []},
    "prompt-null": {"prompt": None},
    "prompt-number": {"prompt": 5},
    "prompt-object": {"prompt": {"text": "x"}},
    "prompt-mixed-list": {"prompt": ["x", 5]},
    "prompt-list-with-empty": {"prompt": ["x", ""]},
    "prompt-id-out-of-vocabulary": {"prompt": [5, 49152]},
    "prompt-id-negative": {"prompt": [-1]},
    "prompt-id-huge": {"prompt": [2**40]},
    "prompt-too-long": {"prompt": "long " * 3000},
    "prompt-fills-context": {"prompt": [100] * 2048},
    "prompt-plus-max-too-long": {"prompt": [100] * 2040, "max_tokens": 9},
    "model-unknown": {"model": "nobody/nothing"},
    "model-number": {"model": 5},
    "model-empty": {"model": ""},
    "unknown-field": {"no_such_field": 1},
    "suffix": {"suffix": "the end"},
    "best-of": {"best_of": 3},
    "beam-search": {"use_beam_search": True, "n": 2},
    "truncate-zero": {"truncate_prompt_tokens": 0},
    "truncate-negative": {"truncate_prompt_tokens": -2},
    "truncate-beyond-context": {"truncate_prompt_tokens": 5000},
    "response-format-json": {"response_format": {"type": "json_object"}},
    "echo-text": {"echo": "please"},
    "priority": {"priority": 3},
    "words-text": {"bad_words": "Paris"},
    "words-numbers": {"bad_words": [1]},
    "words-empty": {"bad_words": ["Paris", ""]},
    "words-spaces": {"bad_words": ["  "]},
    "words-too-many": {"bad_words": [f"word{n}" for n in range(200)]},
    "prompt-logprobs-all": {"prompt_logprobs": -1},
    "prompt-logprobs-negative": {"prompt_logprobs": -2},
    "prompt-logprobs-too-many": {"prompt_logprobs": 30},
    "prompt-logprobs-text": {"prompt_logprobs": "x"},
    "prompt-logprobs-streamed": {"prompt_logprobs": 1, "stream": True},
    "prompt-logprobs-none-streamed": {"prompt_logprobs": 0, "stream": True},
}

_DETOKENIZE: dict[str, Body] = {
    "ids": {"tokens": [504, 3575, 282, 4649, 314]},
    "special": {"tokens": [1, 504, 2]},
    "none": {"tokens": []},
    "bytes": {"tokens": [236, 200, 180]},
    "out-of-vocabulary": {"tokens": [49152]},
    "negative": {"tokens": [-1]},
    "text": {"tokens": "abc"},
    "missing": {},
}

_GOING_ON = {"continue_final_message": True, "add_generation_prompt": False}

_TOKENIZE: dict[str, Body] = {
    "text": {"prompt": "Voilà: 😺, こんにちは"},
    "special": {"prompt": "<|im_start|>user"},
    "no-special": {"prompt": "plain", "add_special_tokens": False},
    "strings": {"prompt": "a few tokens", "return_token_strs": True},
    "empty": {"prompt": ""},
    "chat": {"messages": [_USER]},
    "chat-open": {"messages": [_USER], "add_generation_prompt": False},
    "chat-go-on": {"messages": [_USER, {"role": "assistant", "content": "Hi"}], **_GOING_ON},
    "nothing": {},
    "model-unknown": {"model": "nobody", "prompt": "x"},
    "number": {"prompt": 5},
}


def bad_asks(model: str) -> list[Ask]:
    """Return requests with something wrong in each."""
    text: Body = {"model": model, "prompt": _PROMPT, "max_tokens": 2, "temperature": 0}
    chat: Body = {"model": model, "messages": [_USER], "max_tokens": 2, "temperature": 0}
    asks = [Ask(f"bad/{what}", COMPLETIONS, {**text, **more}) for what, more in _FIELDS.items()]
    asks += [Ask(f"bad-chat/{what}", CHAT, {**chat, **more}) for what, more in _CHAT_FIELDS.items()]
    asks += [
        Ask("bad/no-prompt", COMPLETIONS, {"model": model, "max_tokens": 2}),
        Ask("bad/no-model", COMPLETIONS, {"prompt": _PROMPT, "max_tokens": 2, "temperature": 0}),
        Ask("bad-chat/no-messages", CHAT, {"model": model, "max_tokens": 2}),
        Ask("bad/streamed", COMPLETIONS, {**text, "stream": True, "temperature": -1}),
        Ask("bad/streamed-too-long", COMPLETIONS, {**text, "stream": True, "prompt": [100] * 3000}),
    ]
    return asks + list(_bodies())


def other_asks(model: str) -> list[Ask]:
    """Return requests to the routes beside generation."""
    asks = [
        Ask(f"tokenize/{what}", "/tokenize", {"model": model, **b}) for what, b in _TOKENIZE.items()
    ]
    asks += [
        Ask(f"detokenize/{what}", "/detokenize", {"model": model, **body})
        for what, body in _DETOKENIZE.items()
    ]
    asks += [
        Ask("route/models", "/v1/models", method="GET"),
        Ask("route/unknown", "/v1/nothing", {}),
        Ask("route/unknown-get", "/nothing", method="GET"),
        Ask("route/wrong-method", COMPLETIONS, method="GET"),
        Ask("route/wrong-method-models", "/v1/models", {}),
        Ask("route/health", "/health", method="GET"),
        Ask("route/version", "/version", method="GET"),
        Ask("route/openapi", "/openapi.json", method="GET"),
        Ask("route/docs", "/docs", method="GET"),
        Ask("route/metrics", "/metrics", method="GET"),
    ]
    return asks


def _bodies() -> Iterator[Ask]:
    bodies: dict[str, bytes] = {
        "not-json": b"{not json",
        "empty": b"",
        "list": b"[1, 2]",
        "null": b"null",
        "text": b'"hello"',
        "truncated": b'{"model": "x", "prompt": "y',
        "not-utf-8": b'{"prompt": "\xff\xfe"}',
        "nan": b'{"model": "SmolLM2-135M-Instruct", "prompt": "x", "temperature": NaN}',
        "deep": b'{"model": "x", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        "half-surrogate": b'{"model": "SmolLM2-135M-Instruct", "prompt": "\\ud83d"}',
    }
    for what, body in bodies.items():
        yield Ask(f"body/{what}", COMPLETIONS, body)
    fine = b'{"model": "SmolLM2-135M-Instruct", "prompt": "x", "max_tokens": 1, "temperature": 0}'
    yield Ask("body/content-type-text", COMPLETIONS, fine, content_type="text/plain")
    yield Ask(
        "body/content-type-charset",
        COMPLETIONS,
        fine,
        content_type="application/json; charset=utf-8",
    )
    yield Ask("body/content-type-none", COMPLETIONS, fine, content_type="")
