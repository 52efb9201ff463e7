"""Requests for answers without certain words, which are cut from what the model is known to say."""

from collections.abc import Iterator, Mapping

from kvmesh.testing.differential.asks import CONVERSATIONS, PROBE_TOKENS, PROMPTS, Body, Said


def bad_words(said: Mapping[str, Said]) -> Iterator[tuple[str, Body]]:
    """Yield completions, by name."""
    for index, (prompt, answer) in enumerate(said.items()):
        fields: Body = {"prompt": prompt, "max_tokens": PROBE_TOKENS, "ignore_eos": True}
        words = answer.text.split()
        yield f"one-{index}", {**fields, "bad_words": words[:1]}
        yield f"several-{index}", {**fields, "bad_words": words[1:6]}
        # Of several tokens, and then some that it would not begin with.
        yield f"phrase-{index}", {**fields, "bad_words": [" ".join(words[1:4]), *words[2:3]]}
        cut = [answer.text[at : at + 5] for at in range(0, len(answer.text) - 5, 5)]
        kept = [part for part in cut if part.strip()]
        yield f"cut-{index}", {**fields, "bad_words": kept, "stream": True}
    prompt, answer = next(iter(said.items()))
    fields = {"prompt": prompt, "max_tokens": PROBE_TOKENS}
    word = answer.text.split()[0]
    yield "none", {**fields, "bad_words": []}
    yield "unused", {**fields, "bad_words": ["\N{SNOWMAN} never"]}
    yield "twice", {**fields, "bad_words": [word, word, f"  {word}"]}
    yield "many", {**fields, "bad_words": [f"{letter}word" for letter in "abcdefghij" * 4]}
    yield "n", {**fields, "bad_words": [word], "n": 2, "temperature": 1.0, "top_k": 1}
    yield "prompts", {**fields, "prompt": [prompt, PROMPTS[4]], "bad_words": [word, "Jupiter"]}
    yield "logprobs", {**fields, "max_tokens": 5, "bad_words": [word], "logprobs": 3}
    yield "penalties", {**fields, "bad_words": [word], "repetition_penalty": 1.3}
    yield "bias", {**fields, "bad_words": [word], "logit_bias": {str(answer.token_ids[0]): 50}}
    yield "echo", {**fields, "max_tokens": 5, "bad_words": [word], "echo": True}
    yield "end", {"prompt": PROMPTS[12], "max_tokens": 24, "bad_words": ["<|im_end|>"]}


def chat_bad_words() -> Iterator[tuple[str, Body]]:
    """Yield chats, by name."""
    fields: Body = {"messages": CONVERSATIONS[0], "max_tokens": 16}
    yield "one", {**fields, "bad_words": ["Paris"]}
    yield "several", {**fields, "bad_words": ["The capital", "Paris", "France", "is"]}
    yield "end", {**fields, "bad_words": ["<|im_end|>", "."]}
