"""How the mesh is known to differ from vLLM's own server.

The reasons are for users and stand in `docs/differences.md`, under the same titles. A
difference in a status names both: `status 400|200` is 400 from us and 200 from vLLM.
"""

from typing import Any

from kvmesh.testing.differential.answers import Position
from kvmesh.testing.differential.compare import Known

_REFUSED = ("status 400|200",)


def _cut_off(ours: str, theirs: str) -> bool:
    return ours == theirs + "\N{REPLACEMENT CHARACTER}"


def _part_of_a_character(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Position):
        return False
    return "\N{REPLACEMENT CHARACTER}" in ours.token and theirs.token == ""


def _one_less(ours: Any, theirs: Any) -> bool:
    return isinstance(ours, list) and ours == theirs[: len(ours)]


KNOWN = (
    Known("A character that was cut off", ("*",), ("text",), _cut_off),
    Known(
        "The role of an answer",
        ("template/go-on-user", "template/no-generation-prompt"),
        ("labels",),
        lambda ours, theirs: ours - theirs == {"assistant"},
    ),
    Known("Special tokens in messages", ("template/special-in-text",), ("*",)),
    Known("Parts of a message", ("chat/5?",), ("text", "usage")),
    Known("Truncation to what fits", ("length/truncated-to-fit",), ("text", "usage")),
    Known("Truncation to what fits", ("bad/truncate-beyond-context",), ("status 200|400",)),
    Known("A prompt and max_tokens that don't fit", ("bad/prompt-plus-max-too-long",), _REFUSED),
    Known("Several greedy answers", ("many/n-greedy", "many-chat/n-greedy"), ("status 200|400",)),
    Known(
        "Usage of a prompt that is only echoed",
        ("many/echo-only", "logprobs/echo-only", "prompt/echo-alone"),
        ("usage",),
        lambda ours, theirs: theirs[1] == 1 and ours == (theirs[0], 0, theirs[0]),
    ),
    Known(
        "Log probabilities of parts of characters",
        ("logprobs/bytes", "logprobs/penalised", "logprobs-chat/bytes"),
        ("logprobs",),
        _part_of_a_character,
    ),
    Known(
        "Log probabilities of parts of characters",
        ("logprobs/penalised", "logprobs-chat/bytes"),
        ("offsets", "bytes"),
    ),
    Known(
        "Log probabilities of a text that was stopped",
        ("logprobs/stopped",),
        ("logprobs",),
        _one_less,
    ),
    Known("Log probabilities of parts of characters", ("prompt/bytes",), ("prompt_text",)),
    Known(
        "Log probabilities of a prompt",
        ("logprobs/echo", "logprobs/echo-only", "template/go-on-echo"),
        ("prompt",),
        lambda ours, theirs: ours is None,
    ),
    Known("Offsets of tokens that are named by id", ("logprobs/tokens-as-ids",), ("offsets",)),
    Known("Numbers are numbers", ("bad/temperature-number-in-text",), _REFUSED),
    Known("Numbers are numbers", ("bad/max-tokens-whole-float", "bad/max-tokens-true"), _REFUSED),
    Known("Values out of range", ("bad/bias-out-of-range",), _REFUSED),
    Known("The model has to be named", ("bad/no-model", "bad/model-empty"), _REFUSED),
    Known(
        "Nothing is ignored",
        ("bad/unknown-field", "bad/best-of", "bad/prompt-logprobs-none-streamed"),
        _REFUSED,
    ),
    Known(
        "Fields of vLLM that the mesh does not have",
        (*("bad/beam-search", "bad/response-format-json", "tokenize/strings"),),
        _REFUSED,
    ),
    Known(
        "Messages are checked",
        ("bad-chat/role-unknown", "bad-chat/content-missing", "bad-chat/parts-empty"),
        _REFUSED,
    ),
    Known("Messages are checked", ("bad-chat/content-null",), ("status 200|400",)),
    Known("Nothing to tokenize", ("tokenize/empty", "detokenize/none"), _REFUSED),
    Known("Token ids outside the vocabulary", ("detokenize/out-of-vocabulary",), _REFUSED),
    Known("Media types", ("body/content-type-text", "body/content-type-none"), ("status 415|400",)),
    Known(
        "Every error is an error object",
        ("body/not-utf-8", "body/deep", "route/unknown*", "route/wrong-method*"),
        ("error",),
        lambda ours, theirs: theirs == "no error object",
    ),
)
"""The first entry that covers a difference has it; one that covers none is out of date."""
