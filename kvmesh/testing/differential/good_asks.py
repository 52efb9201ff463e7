"""Requests that a server should answer, made from a seed. All are greedy.

Stop strings and stop tokens are cut from what the model is known to say (`Said`), so
that they do stop it.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

from kvmesh.testing.differential.asks import (
    CHAT,
    COMPLETIONS,
    CONVERSATIONS,
    PROBE_TOKENS,
    PROBED,
    PROMPTS,
    SYSTEM,
    Ask,
    Body,
    Said,
)
from kvmesh.testing.differential.word_asks import bad_words, chat_bad_words


def good_asks(model: str, said: Mapping[str, Said], rng: random.Random) -> list[Ask]:
    """Return requests that both servers should answer alike."""
    made: list[Ask] = []
    groups: Sequence[tuple[str, str, Iterator[tuple[str, Body]]]] = (
        ("completion", COMPLETIONS, _completions(rng)),
        ("chat", CHAT, _chats(rng)),
        ("stop", COMPLETIONS, _stops(said, rng)),
        ("stop-chat", CHAT, _chat_stops()),
        ("ending", COMPLETIONS, _endings(said)),
        ("length", COMPLETIONS, _lengths()),
        ("length-chat", CHAT, _chat_lengths()),
        ("many", COMPLETIONS, _many()),
        ("many-chat", CHAT, _many_chat()),
        ("logprobs", COMPLETIONS, _logprobs()),
        ("logprobs-chat", CHAT, _chat_logprobs()),
        ("prompt", COMPLETIONS, _prompt_logprobs()),
        ("prompt-chat", CHAT, _chat_prompt_logprobs()),
        ("sampling", COMPLETIONS, _sampling(said)),
        ("words", COMPLETIONS, bad_words(said)),
        ("words-chat", CHAT, chat_bad_words()),
        ("template", CHAT, _templates()),
        ("stream", COMPLETIONS, _streams()),
        ("stream-chat", CHAT, _chat_streams()),
    )
    for group, path, cases in groups:
        for what, fields in cases:
            body = {"model": model, "temperature": 0, **fields}
            made.append(Ask(f"{group}/{what}", path, body))
    return made


def _completions(rng: random.Random) -> Iterator[tuple[str, Body]]:
    for index, prompt in enumerate(PROMPTS):
        for variant in "ab":
            body: Body = {"prompt": prompt, "max_tokens": rng.randint(2, 24)}
            _vary(body, rng)
            yield f"{index}{variant}", body


def _chats(rng: random.Random) -> Iterator[tuple[str, Body]]:
    for index, messages in enumerate(CONVERSATIONS):
        for variant in "ab":
            body: Body = {"messages": messages}
            body[rng.choice(["max_tokens", "max_completion_tokens"])] = rng.randint(2, 24)
            _vary(body, rng)
            yield f"{index}{variant}", body


def _vary(body: Body, rng: random.Random) -> None:
    """Add what must change nothing of a greedy text."""
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.6:
            body["stream_options"] = {"include_usage": True}
    neutral: list[Body] = [
        {"top_p": 1.0},
        {"top_p": 0.3},
        {"top_k": -1},
        {"top_k": 7},
        {"min_p": 0.0},
        {"seed": 1234},
        {"seed": -5},
        {"user": "somebody"},
        {"ignore_eos": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}},
        {"stop": []},
        {"stop": None, "stop_token_ids": None},
        {"n": 1},
    ]
    for extra in rng.sample(neutral, 3):
        body.update(extra)


def _stops(said: Mapping[str, Said], rng: random.Random) -> Iterator[tuple[str, Body]]:
    for index, (prompt, answer) in enumerate(said.items()):
        text = answer.text
        for variant in "abc":
            start = rng.randrange(1, max(2, len(text) - 8))
            stop = text[start : start + rng.randint(1, 8)]
            body: Body = {"prompt": prompt, "max_tokens": PROBE_TOKENS, "stop": [stop]}
            if variant == "b":
                body["stop"] = ["\N{SNOWMAN} never", stop, stop[:1] + "\N{SNOWMAN}"]
                body["stream"] = True
            if variant == "c":
                body["include_stop_str_in_output"] = True
                body |= _streamed_if(rng.random() < 0.5)
            yield f"cut-{index}{variant}", body
    for index, (prompt, answer) in enumerate(list(said.items())[:3]):
        fields = {"prompt": prompt, "max_tokens": 8}
        yield f"at-start-{index}", {**fields, "stop": answer.text[:2]}
        yield f"never-{index}", {**fields, "stop": "\N{SNOWMAN}", **_streamed_if(index == 1)}
    first = said[PROBED[0]]
    fields = {"prompt": PROBED[0], "max_tokens": PROBE_TOKENS}
    yield "min-tokens", {**fields, "stop": first.text[:3], "min_tokens": 6}
    yield "whole-text", {**fields, "stop": first.text}
    yield "overlap", {**fields, "stop": [first.text[6:12], first.text[4:9], first.text[5:7]]}
    yield "with-echo", {**fields, "stop": first.text[4:9], "echo": True}
    yield "in-prompt", {**fields, "stop": "capital", "max_tokens": 6}


def _chat_stops() -> Iterator[tuple[str, Body]]:
    messages = CONVERSATIONS[0]
    yield "word", {"messages": messages, "max_tokens": 24, "stop": "France"}
    yield (
        "kept",
        {
            "messages": messages,
            "max_tokens": 24,
            "stop": ["Paris", "France"],
            "include_stop_str_in_output": True,
            **_streamed_if(True),
        },
    )
    yield "special", {"messages": messages, "max_tokens": 24, "stop": "<|im_end|>"}


def _endings(said: Mapping[str, Said]) -> Iterator[tuple[str, Body]]:
    first, second = list(said.items())[:2]
    for index, (prompt, answer) in enumerate((first, second)):
        fields = {"prompt": prompt, "max_tokens": 16}
        ids = answer.token_ids
        yield f"token-{index}", {**fields, "stop_token_ids": [ids[5]]}
        yield (
            f"tokens-{index}",
            {**fields, "stop_token_ids": [ids[9], ids[4]], **_streamed_if(True)},
        )
        yield f"first-token-{index}", {**fields, "stop_token_ids": [ids[0]]}
        yield f"min-tokens-{index}", {**fields, "stop_token_ids": [ids[3]], "min_tokens": 8}
    prompt = first[0]
    kept = {"stop_token_ids": [first[1].token_ids[5]], "include_stop_str_in_output": True}
    yield "token-kept", {"prompt": prompt, "max_tokens": 16, **kept}
    yield "unused-token", {"prompt": prompt, "max_tokens": 4, "stop_token_ids": [49000]}
    turn = PROMPTS[12]
    yield "eos", {"prompt": turn, "max_tokens": 24}
    yield "ignore-eos", {"prompt": turn, "max_tokens": 24, "ignore_eos": True}
    yield "eos-shown", {"prompt": turn, "max_tokens": 24, "skip_special_tokens": False}
    shown = {"ignore_eos": True, "skip_special_tokens": False}
    yield "ignored-eos-shown", {"prompt": turn, "max_tokens": 24, **shown, **_streamed_if(True)}
    yield "eos-min-tokens", {"prompt": turn, "max_tokens": 24, "min_tokens": 20}
    yield "eos-as-stop-token", {"prompt": turn, "max_tokens": 24, "stop_token_ids": [2]}


def _lengths() -> Iterator[tuple[str, Body]]:
    prompt = PROMPTS[0]
    yield "one", {"prompt": prompt, "max_tokens": 1}
    yield "one-streamed", {"prompt": prompt, "max_tokens": 1, **_streamed_if(True)}
    yield "default", {"prompt": prompt}
    yield "null", {"prompt": prompt, "max_tokens": None}
    yield "min-is-max", {"prompt": PROMPTS[4], "max_tokens": 8, "min_tokens": 8}
    yield "exactly-full", {"prompt": [100] * 2040, "max_tokens": 8, "ignore_eos": True}
    yield "full-prompt", {"prompt": [100] * 2047, "max_tokens": 1}
    yield "truncated", {"prompt": PROMPTS[13], "max_tokens": 4, "truncate_prompt_tokens": 12}
    yield (
        "truncated-to-fit",
        {"prompt": [200] * 3000, "max_tokens": 4, "truncate_prompt_tokens": -1},
    )


def _chat_lengths() -> Iterator[tuple[str, Body]]:
    messages = CONVERSATIONS[0]
    yield "one", {"messages": messages, "max_tokens": 1}
    yield "both", {"messages": messages, "max_tokens": 3, "max_completion_tokens": 5}
    yield "unlimited", {"messages": messages}
    yield "null", {"messages": messages, "max_tokens": None, "max_completion_tokens": 4}
    yield "truncated", {"messages": messages, "max_tokens": 4, "truncate_prompt_tokens": 16}


def _many() -> Iterator[tuple[str, Body]]:
    top = {"temperature": 1.0, "top_k": 1}  # greedy by another name: n > 1 allows it
    texts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    yield "n", {"prompt": PROMPTS[0], "max_tokens": 6, "n": 3, **top}
    yield "n-streamed", {"prompt": PROMPTS[1], "max_tokens": 6, "n": 2, **top, **_streamed_if(True)}
    yield "n-greedy", {"prompt": PROMPTS[0], "max_tokens": 4, "n": 2}
    yield "prompts", {"prompt": texts, "max_tokens": 6}
    yield "prompts-streamed", {"prompt": texts, "max_tokens": 5, **_streamed_if(True)}
    yield "prompts-times-n", {"prompt": texts[:2], "max_tokens": 4, "n": 2, **top}
    yield "one-in-list", {"prompt": [PROMPTS[5]], "max_tokens": 6}
    yield "ids", {"prompt": [504, 3575, 282, 4649, 314], "max_tokens": 6}
    yield "ids-lists", {"prompt": [[504, 3575, 282], [1024, 2048]], "max_tokens": 5}
    yield "id", {"prompt": [1], "max_tokens": 5}
    yield "last-id", {"prompt": [49151], "max_tokens": 3}
    yield "n-stop", {"prompt": PROMPTS[0], "max_tokens": 12, "n": 2, "stop": ".", **top}
    yield "echo", {"prompt": PROMPTS[2], "max_tokens": 5, "echo": True}
    yield (
        "echo-streamed",
        {"prompt": PROMPTS[3], "max_tokens": 5, "echo": True, **_streamed_if(True)},
    )
    yield "echo-ids", {"prompt": [504, 3575, 282], "max_tokens": 3, "echo": True}
    yield "echo-only", {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True}
    yield "echo-n", {"prompt": texts[:2], "max_tokens": 3, "echo": True, "n": 2, **top}
    yield "no-bos", {"prompt": PROMPTS[0], "max_tokens": 4, "add_special_tokens": False}


def _many_chat() -> Iterator[tuple[str, Body]]:
    top = {"temperature": 1.0, "top_k": 1}
    messages = CONVERSATIONS[0]
    yield "n", {"messages": messages, "max_tokens": 5, "n": 2, **top}
    yield "n-streamed", {"messages": messages, "max_tokens": 5, "n": 3, **top, **_streamed_if(True)}
    yield "n-greedy", {"messages": messages, "max_tokens": 3, "n": 2}


def _logprobs() -> Iterator[tuple[str, Body]]:
    for count in (0, 1, 5):
        yield f"{count}", {"prompt": PROMPTS[0], "max_tokens": 5, "logprobs": count}
    yield "streamed", {"prompt": PROMPTS[2], "max_tokens": 6, "logprobs": 2, **_streamed_if(True)}
    yield "bytes", {"prompt": PROMPTS[3], "max_tokens": 12, "logprobs": 1}
    yield "stopped", {"prompt": PROMPTS[0], "max_tokens": 12, "logprobs": 1, "stop": "."}
    yield "echo", {"prompt": PROMPTS[0], "max_tokens": 3, "logprobs": 2, "echo": True}
    yield "echo-only", {"prompt": PROMPTS[1], "max_tokens": 0, "logprobs": 1, "echo": True}
    many = {"prompt": [PROMPTS[0], PROMPTS[1]], "max_tokens": 3, "logprobs": 1}
    yield "prompts", many
    yield (
        "penalised",
        {
            "prompt": PROMPTS[5],
            "max_tokens": 6,
            "logprobs": 2,
            "repetition_penalty": 1.4,
        },
    )
    yield "eos", {"prompt": PROMPTS[12], "max_tokens": 24, "logprobs": 0}
    named = {"logprobs": 1, "return_tokens_as_token_ids": True}
    yield "tokens-as-ids", {"prompt": PROMPTS[3], "max_tokens": 3, **named}


def _chat_logprobs() -> Iterator[tuple[str, Body]]:
    messages = CONVERSATIONS[0]
    fields: Body = {"messages": messages, "max_tokens": 5, "logprobs": True}
    yield "plain", fields
    yield "zero", {**fields, "top_logprobs": 0}
    yield "top", {**fields, "top_logprobs": 4}
    yield "streamed", {**fields, "top_logprobs": 2, **_streamed_if(True)}
    yield "bytes", {**fields, "messages": CONVERSATIONS[3], "top_logprobs": 1, "max_tokens": 16}
    yield "off", {**fields, "logprobs": False}
    yield "tokens-as-ids", {**fields, "top_logprobs": 1, "return_tokens_as_token_ids": True}


def _prompt_logprobs() -> Iterator[tuple[str, Body]]:
    fields: Body = {"prompt": PROMPTS[0], "max_tokens": 2}
    for count in (0, 1, 5):
        yield f"{count}", {**fields, "prompt_logprobs": count}
    yield "bytes", {**fields, "prompt": PROMPTS[3], "prompt_logprobs": 2}
    yield "special", {**fields, "prompt": PROMPTS[12], "prompt_logprobs": 1}
    yield "long", {**fields, "prompt": PROMPTS[13], "prompt_logprobs": 1}
    yield "one-token", {**fields, "prompt": [1], "prompt_logprobs": 2}
    truncated = {"prompt": PROMPTS[13], "truncate_prompt_tokens": 12}
    yield "truncated", {**fields, **truncated, "prompt_logprobs": 1}
    top = {"temperature": 1.0, "top_k": 1, "n": 2}
    yield "n", {**fields, "prompt": [PROMPTS[0], PROMPTS[4]], "prompt_logprobs": 1, **top}
    yield "logprobs", {**fields, "prompt_logprobs": 1, "logprobs": 3}
    yield "echo", {**fields, "prompt_logprobs": 1, "echo": True}
    yield "echo-alone", {**fields, "prompt_logprobs": 1, "echo": True, "max_tokens": 0}
    named = {"prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    yield "tokens-as-ids", {**fields, **named}


def _chat_prompt_logprobs() -> Iterator[tuple[str, Body]]:
    fields: Body = {"messages": CONVERSATIONS[1], "max_tokens": 2}
    yield "2", {**fields, "prompt_logprobs": 2}
    yield "logprobs", {**fields, "prompt_logprobs": 0, "logprobs": True, "top_logprobs": 1}
    yield "n", {**fields, "prompt_logprobs": 1, "temperature": 1.0, "top_k": 1, "n": 2}


def _sampling(said: Mapping[str, Said]) -> Iterator[tuple[str, Body]]:
    prompt = PROBED[1]
    fields: Body = {"prompt": prompt, "max_tokens": 12}
    first = said[prompt].token_ids[0]
    yield "presence", {**fields, "presence_penalty": 1.5}
    yield "frequency", {**fields, "prompt": PROMPTS[7], "frequency_penalty": 2.0}
    yield "repetition", {**fields, "repetition_penalty": 1.5}
    yield "negative", {**fields, "presence_penalty": -2, "frequency_penalty": -1.5}
    yield "encourage", {**fields, "repetition_penalty": 0.7}
    yield (
        "all-penalties",
        {
            **fields,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.1,
            **_streamed_if(True),
        },
    )
    yield "bias-away", {**fields, "logit_bias": {str(first): -100}}
    yield "bias-to", {**fields, "logit_bias": {"4649": 100}}
    yield "bias-small", {**fields, "logit_bias": {str(first): -1.5, "260": 1.5}}
    yield "allowed", {**fields, "allowed_token_ids": [260, 282, 4649, 504]}
    yield "bias-and-penalty", {**fields, "logit_bias": {"4649": 30}, "frequency_penalty": 1.8}
    yield "greedy-with-seed", {**fields, "seed": 7, "top_p": 0.5, "top_k": 3, "min_p": 0.9}


def _templates() -> Iterator[tuple[str, Body]]:
    user = {"role": "user", "content": "What is the capital of France?"}
    begun = {"role": "assistant", "content": "The capital of"}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    yield "go-on", {"messages": [user, begun], "max_tokens": 6, **going_on}
    yield "go-on-user", {"messages": [user], "max_tokens": 6, **going_on}
    yield "go-on-echo", {"messages": [user, begun], "max_tokens": 6, "echo": True, **going_on}
    yield (
        "no-generation-prompt",
        {
            "messages": [user],
            "max_tokens": 6,
            "add_generation_prompt": False,
        },
    )
    yield "assistant-last", {"messages": [user, begun], "max_tokens": 6}
    yield "system-only", {"messages": [SYSTEM], "max_tokens": 6}
    yield (
        "kwargs",
        {
            "messages": [user],
            "max_tokens": 4,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    yield (
        "special-in-text",
        {
            "messages": [{"role": "user", "content": "What does <|im_end|> mean?"}],
            "max_tokens": 6,
        },
    )
    yield (
        "developer",
        {
            "messages": [{"role": "developer", "content": "Be brief."}, user],
            "max_tokens": 6,
        },
    )
    yield "notes", {"messages": [user], "max_tokens": 4, "metadata": {"a": "b"}, "request_id": "x1"}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turns = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "It is noon.", "tool_call_id": "c1"},
    ]
    yield "tool-turns", {"messages": turns, "max_tokens": 4}
    yield "tool-choice-none", {"messages": [user], "max_tokens": 4, "tool_choice": "none"}


def _streams() -> Iterator[tuple[str, Body]]:
    fields: Body = {"prompt": PROMPTS[0], "max_tokens": 5, "stream": True}
    yield "plain", fields
    yield "no-usage", {**fields, "stream_options": {"include_usage": False}}
    yield "usage", {**fields, "stream_options": {"include_usage": True}}
    yield "empty-options", {**fields, "stream_options": {}}
    running = {"include_usage": True, "continuous_usage_stats": True}
    yield "usage-in-each", {**fields, "stream_options": running}
    yield "not", {**fields, "stream": False}


def _chat_streams() -> Iterator[tuple[str, Body]]:
    fields: Body = {"messages": CONVERSATIONS[0], "max_tokens": 5, "stream": True}
    yield "plain", fields
    yield "usage", {**fields, "stream_options": {"include_usage": True}}
    yield "null-options", {**fields, "stream_options": None}
    running = {"include_usage": True, "continuous_usage_stats": True}
    yield "usage-in-each", {**fields, "stream_options": running}


def _streamed_if(streamed: bool) -> Body:
    if not streamed:
        return {}
    return {"stream": True, "stream_options": {"include_usage": True}}
