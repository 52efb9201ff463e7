"""What is asked: one request as data, and the prompts that many of them share."""

from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

PROBED = (
    "The capital of France is",
    "Once upon a time, there was a small",
    "Voilà une liste de fruits : pomme, poire,",
    "こんにちは、私の名前は",
    "Q: What is the largest planet?\nA:",
    "An emoji of a cat: 😺. Emoji of a dog:",
)
"""Prompts whose greedy continuation is asked for first."""

PROBE_TOKENS = 24

PROMPTS = (
    *PROBED,
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "   spaces before and after   ",
    "\n\n",
    "x",
    "Привет, как",
    "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. " * 25,
)

SYSTEM = {"role": "system", "content": "Answer in one short sentence."}

CONVERSATIONS: tuple[list[Body], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [SYSTEM, {"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "Count to three."},
        {"role": "assistant", "content": "One, two, three."},
        {"role": "user", "content": "And now to five."},
    ],
    [{"role": "user", "content": "Écris une phrase sur la mer. 😀"}],
    [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}],
    [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Name a fruit"},
                {"type": "text", "text": "that is yellow."},
            ],
        }
    ],
    [{"role": "user", "content": "Write a haiku.", "name": "basho"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "  two  spaces\n\nand lines\t"}],
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request. A `body` of bytes is sent as it is, None is none at all.

    `name` is `<group>/<what>`; differences are told by it.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Said:
    """What the model says after one of `PROBED`: its text and the tokens of it."""

    text: str
    token_ids: tuple[int, ...]
