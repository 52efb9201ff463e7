"""What fuzzers say to the public gRPC service: right, nearly right, and anything at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from kvmesh.testing.fuzz_proto import Likely, broken, messages
from kvmesh.v1 import generation_pb2, inference_pb2

NAME = "models/tiny"
"""The model that right requests ask for."""

SECONDS = 30.0
"""Time for any one call. Shorter deadlines are a client's own wish."""


def good(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a type that can be answered, most of them."""
    return messages(kind.DESCRIPTOR, _GOOD)


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Messages of a type: good ones, nearly good ones, and any at all."""
    others = (messages(kind.DESCRIPTOR, likely) for likely in (_NEARLY, _WILD))
    return st.one_of(good(kind), *others)


def opening(revision: int = 1) -> inference_pb2.MultiplexGenerateRequest:
    """Return the first message of a stream."""
    message = inference_pb2.MultiplexGenerateRequest()
    message.open.schema_revision = revision
    return message


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """What a client says on a stream, from a right opening or a wrong one."""
    ids = iter(range(1, 1000))
    first: Any = opening(draw(st.sampled_from((1, 1, 1, 1, 1, 1, 2, 2**32 - 1, 0))))
    if _rarely(draw, 10):
        first.MergeFrom(draw(_batches(ids)))
    said = [first, *[draw(_batches(ids)) for _ in range(draw(st.integers(0, 4)))]]
    if _rarely(draw, 15):
        said = said[1:]
    data = [message.SerializeToString() for message in said]
    if _rarely(draw, 10):
        data.insert(draw(st.integers(0, len(data))), draw(broken(st.sampled_from(said or [first]))))
    return data


@dataclass(frozen=True, slots=True)
class Expected:
    """How a conversation must end, the ids started before that, and the messages it takes."""

    code: grpc.StatusCode
    started: list[int]
    taken: int


def expected(said: Sequence[bytes]) -> Expected:
    """Return what the protocol at `Open` makes of a conversation."""
    started: list[int] = []
    for at, data in enumerate(said):
        code = _heard(data, started, first=at == 0)
        if code is not grpc.StatusCode.OK:
            return Expected(code, started, at + 1)
    code = grpc.StatusCode.OK if said else grpc.StatusCode.FAILED_PRECONDITION
    return Expected(code, started, len(said))


_PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300)
_TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
_IDS = _PRINTABLE | st.sampled_from(("a" * 128, "a" * 9000, " "))
_TRACES = _PRINTABLE | st.sampled_from((_TRACE, _TRACE[:-1], "00--", ""))

METADATA = st.lists(
    st.tuples(st.just("x-request-id"), _IDS)
    | st.tuples(st.just("traceparent"), _TRACES)
    | st.tuples(st.sampled_from(("tracestate", "authorization", "x-priority")), _PRINTABLE)
    | st.tuples(st.just("x-odd-bin"), st.binary(max_size=100)),
    max_size=4,
)
"""Metadata of a call, odd but such as gRPC's client lets through."""

TIMEOUTS = st.sampled_from((None, None, SECONDS, SECONDS, 1e-9, 0.0005, 1e9))
"""Deadlines of a call, in seconds. Beyond 2**63 ns gRPC's client counts wrongly."""

_TEXTS = st.sampled_from(
    ("hi", "The capital of France", "\0", "é🙂\ufffd", "<|im_start|>", "a " * 200, "a " * 3000, "")
)
_JSON = st.sampled_from(("", "{}", "[]", "{", "null", "NaN", '{"a": 1e999}', "[" * 500))
_NUMBERS = st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 8, 2**32 - 1))
_TOKENS = st.integers(0, 700) | st.sampled_from((2**31, 2**32 - 1))
_PENALTIES = st.floats(-2, 2)


def _names(*names: str) -> set[str]:
    return {f"kvmesh.v1.{name}" for name in names}


def _sequence(ids: list[int]) -> generation_pb2.TokenSequence:
    return generation_pb2.TokenSequence(ids=ids)


def _values(**more: Any) -> dict[str, Any]:
    """Values in range, most of them; `more` are sampling parameters'."""
    sampling = {
        "max_tokens": st.sampled_from((1, 2, 5, 20, 100)),
        "min_tokens": st.sampled_from((0, 1)),
        "temperature": st.floats(0, 1),
        "top_p": st.floats(0.01, 1),
        "top_k": st.sampled_from((-1, 1, 50, 2**31 - 1)),
        "min_p": st.floats(0, 1),
        "presence_penalty": _PENALTIES,
        "frequency_penalty": _PENALTIES,
        "repetition_penalty": st.floats(0.1, 10),
        "stop_token_ids": _TOKENS,
        "logit_bias": st.dictionaries(_TOKENS, st.floats(-100, 100), max_size=3),
        "logprobs": st.sampled_from((0, 1, 20)),
        "allowed_token_ids": st.integers(10, 600),
        "bad_words": st.lists(st.integers(0, 500), min_size=1, max_size=3).map(_sequence),
        **more,
    }
    given = {
        "GenerateInput.text": _TEXTS,
        "GenerateInput.truncate_to": st.sampled_from((0, 1, 2, 8, 2**31, 2**32 - 1)),
        "GenerateInput.stop": st.sampled_from(("a", "é", "\0", "x" * 1000)),
        "GenerateInput.bad_words": st.sampled_from(("a", "é", "The", "two words", "x" * 100)),
        "TokenIds.ids": st.integers(0, 500),
        "ChatMessage.role": st.sampled_from(("user", "system", "assistant")),
        "ChatMessage.content": _TEXTS,
        **{f"SamplingParams.{name}": strategy for name, strategy in sampling.items()},
        **{f"{message}.model": st.just(NAME) for message in _MESSAGES},
    }
    return {f"kvmesh.v1.{name}": strategy for name, strategy in given.items()}


_MESSAGES = ("GenerateRequest", "StreamGenerateRequest", "GenerateStart")
_ALWAYS = _names(*(f"{message}.{name}" for message in _MESSAGES for name in ("model", "input")))
_GOOD = Likely(
    _values(),
    always=_ALWAYS
    | _names("GenerateInput.text", "GenerateInput.sampling", "SamplingParams.max_tokens"),
    never=_names(
        "SamplingParams.prompt_logprobs",
        "GenerateInput.token_ids",
        "GenerateInput.chat",
        "GenerateStart.context",
    ),
)
_NEARLY = Likely(
    {
        **_values(
            max_tokens=st.sampled_from((1, 2, 0, 600, 2**32 - 1)),
            logprobs=st.sampled_from((1, 21)),
            top_k=st.sampled_from((-1, 0)),
        ),
        "kvmesh.v1.Chat.template": st.sampled_from(("", "", "{{", "{% for %}")),
        "kvmesh.v1.Chat.tools_json": _JSON,
        "kvmesh.v1.Chat.template_kwargs_json": _JSON,
        "kvmesh.v1.ChatMessage.extra_json": _JSON,
        "kvmesh.v1.GenerateInput.stop": st.sampled_from(("", "a", "x" * 2000)),
        "google.protobuf.Duration.seconds": st.sampled_from((60, 60, 0, -1, 2**63 - 1)),
    },
    always=_ALWAYS,
)
_ANY_NAME = st.sampled_from((NAME, "models/", "models/other", "tiny", "", "\0"))
_WILD = Likely({f"kvmesh.v1.{message}.model": _ANY_NAME for message in _MESSAGES})


@st.composite
def _batches(draw: st.DrawFn, ids: Iterator[int]) -> Any:
    """A message of the middle of a stream; ids mostly rise."""
    message = inference_pb2.MultiplexGenerateRequest()
    for start in draw(st.lists(anything(inference_pb2.GenerateStart), max_size=3)):
        start.stream_id = draw(_NUMBERS) if _rarely(draw, 15) else next(ids)
        message.starts.append(start)
    if draw(st.booleans()):
        message.cancels.extend(draw(st.lists(_NUMBERS, max_size=3)))
    if _rarely(draw, 20):
        message.open.schema_revision = 1
    return message


def _rarely(draw: st.DrawFn, one_in: int) -> bool:
    # The greatest number: hypothesis likes the least.
    return draw(st.integers(1, one_in)) == one_in


def _heard(data: bytes, started: list[int], *, first: bool) -> grpc.StatusCode:
    """Return what one message makes of a stream; adds to `started`."""
    try:
        message = inference_pb2.MultiplexGenerateRequest.FromString(data)
    except DecodeError:
        return grpc.StatusCode.INVALID_ARGUMENT
    if first:
        alone = [one.name for one, _ in message.ListFields()] == ["open"]
        ok = alone and message.open.schema_revision
        return grpc.StatusCode.OK if ok else grpc.StatusCode.FAILED_PRECONDITION
    if message.HasField("open"):
        return grpc.StatusCode.FAILED_PRECONDITION
    for start in message.starts:
        if start.stream_id <= max(started, default=0):
            return grpc.StatusCode.FAILED_PRECONDITION
        started.append(start.stream_id)
    return grpc.StatusCode.OK
