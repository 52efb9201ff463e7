"""HTTP requests that nobody would send, and a bare client that sends them.

Everything comes from a seeded generator, so that a run can be repeated.
"""

import asyncio
import copy
import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as its bytes. `whole`: it has an end, so it must be answered."""

    data: bytes
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Answered:
    """A response. `headers` are in lower case; `body` is without its chunks' frames."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def exchange(address: str, sent: Sent, seconds: float) -> Answered | None:
    """Send a request on a connection of its own; None where the server only hung up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = b""
    try:
        async with asyncio.timeout(seconds):
            # A server may hang up on what it has refused already.
            with suppress(ConnectionError):
                writer.write(sent.data)
                await writer.drain()
                if not sent.whole:
                    writer.write_eof()
            with suppress(ConnectionError):
                while part := await reader.read(READ_BYTES):
                    data += part
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return _answered(data, bodiless=sent.data.startswith(b"HEAD ")) if data else None


def request(rng: random.Random, path: str, good: Mapping[str, Any]) -> Sent:
    """Return a request near a good one: that of a good body on its path."""
    body = _body(rng, copy.deepcopy(dict(good)))
    if rng.random() < 0.95:
        return _framed(rng, "POST", path, body)
    method = rng.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW", "post", "POST"))
    others = (path, "/", "//", path + "/", path + "?x=%00", "/%ff", "/v1/models/%2e%2e", "*")
    return _framed(rng, method, rng.choice(others), body)


def events(body: bytes) -> list[str]:
    """Return the data of a stream's events. Raises `ValueError` for what is no such stream."""
    lines = body.decode().split("\n\n")
    if lines.pop() or not all(line.startswith("data: ") and "\n" not in line for line in lines):
        raise ValueError(f"not a stream of events: {body[-200:]!r}")
    return [line.removeprefix("data: ") for line in lines]


# Bodies


def _body(rng: random.Random, values: dict[str, Any]) -> bytes:
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3))):
        rng.choice(_CHANGES)(rng, values)
    text = _written(values)
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2))):
        text = rng.choice(_SPOILS)(rng, text)
    return text


def _written(value: Any) -> bytes:
    """JSON, with what `json` can't write: numbers and names in any spelling."""
    if isinstance(value, _Literal):
        return value.text.encode("utf-8", "surrogatepass")
    if isinstance(value, dict):
        members = [_written(str(name)) + b":" + _written(item) for name, item in value.items()]
        return b"{" + b",".join(members) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(_written, value)) + b"]"
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class _Literal:
    """JSON text, or what should have been."""

    text: str


_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 1e308),
    *("", " ", "\0", "a", "é🙂", "\ud800", "\ufeff", "user", "a" * 3000, "<|im_start|>", "{{x}}"),
    *([], {}, [[]], [None], [""], [1, "a"], {"": ""}, {"a": {"b": []}}, [{}], [-1], [2**40]),
    *(_Literal(text) for text in ("NaN", "-Infinity", "1e999", "1e-999", "1" * 5000, "01", "+1")),
    *(_Literal(text) for text in (r'"\ud800"', r'"\u0000"', r'"\x"', "tru", "[" * 100, '"')),
    _Literal("[" * 80 + "]" * 80),
    _Literal("[" * 3000 + "]" * 3000),
    _Literal('{"a":' * 80 + "1" + "}" * 80),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a value, as a container and a key of it."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            found.append((value, key))
            found.extend(_places(value[key]))
    return found


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_ODD))  # it may be changed further


def _swap(rng: random.Random, values: dict[str, Any]) -> None:
    places = _places(values)
    if places:
        holder, key = rng.choice(places)
        holder[key] = _odd(rng)


def _drop(rng: random.Random, values: dict[str, Any]) -> None:
    places = _places(values)
    if places:
        holder, key = rng.choice(places)
        del holder[key]


def _nest(rng: random.Random, values: dict[str, Any]) -> None:
    places = _places(values)
    if places:
        holder, key = rng.choice(places)
        one = holder[key]
        holder[key] = rng.choice(([one], {"a": one}, [one, copy.deepcopy(one)]))


def _add(rng: random.Random, values: dict[str, Any]) -> None:
    values[rng.choice((*_FIELDS, "", "no_such", "__class__", "\0", "é"))] = _odd(rng)


_FIELDS = (
    *("stream", "n", "logprobs", "top_logprobs", "stop", "max_tokens", "max_completion_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stream_options", "echo"),
    *("stop_token_ids", "tools", "response_format", "user", "metadata", "chat_template"),
    *("chat_template_kwargs", "truncate_prompt_tokens", "min_tokens", "best_of", "suffix"),
    *("allowed_token_ids", "prompt_logprobs", "priority", "ignore_eos", "add_generation_prompt"),
    "bad_words",
)

_CHANGES: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    *(_swap, _swap, _drop, _nest, _add, _add),
)


def _cut(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randint(0, len(text))]


def _flip(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) or 1)
    return text[:at] + rng.randbytes(rng.randint(1, 4)) + text[at + 1 :]


def _twice(rng: random.Random, text: bytes) -> bytes:
    """Give the object its members a second time, or write the whole of it again."""
    return rng.choice((text[:-1] + b"," + text[1:], text + text, text + b"x", b"[" + text + b"]"))


def _recode(rng: random.Random, text: bytes) -> bytes:
    plain = text.decode("utf-8", "replace")
    coded = (
        b"\xef\xbb\xbf" + text,
        plain.encode("utf-16"),
        plain.encode("utf-32"),
        plain.encode("latin-1", "replace") + b"\xe9",
        gzip.compress(text),
        rng.randbytes(rng.randint(0, 300)),
        b"",
    )
    return rng.choice(coded)


_SPOILS: tuple[Callable[[random.Random, bytes], bytes], ...] = (_cut, _flip, _twice, _recode)


# Heads and frames

_HEADERS = (
    *("x-request-id: ok-1", "x-request-id: " + "a" * 129, "x-request-id: a b", "x-request-id: é"),
    *("x-request-id:", "traceparent: 00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"),
    *("traceparent: 00--", "traceparent: \x7f", "accept: text/event-stream", "accept: nothing"),
    *("authorization: Bearer x", "authorization: Basic \xff", "accept-encoding: gzip, br"),
    *("content-encoding: identity", "content-encoding: gzip", "content-encoding: zz"),
    *("x-long: " + "a" * 5000, "te: trailers", "range: bytes=0-1", "if-none-match: *"),
    *("cookie: a=b", "x-a: \t", "upgrade: websocket", "upgrade: h2c"),
)
_TYPES = (
    *("application/json; charset=utf-8", "APPLICATION/JSON", "application/json;", "text/plain"),
    *("", "multipart/form-data; boundary=x", "application/json, text/html", "é", "json"),
    *("application/json; charset=utf-16", "application/x-www-form-urlencoded"),
)


def _framed(rng: random.Random, method: str, path: str, body: bytes) -> Sent:
    kind = "application/json" if rng.random() < 0.9 else rng.choice(_TYPES)
    head = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-type: {kind}"]
    head += rng.sample(_HEADERS, rng.choice((0, 0, 0, 1, 1, 3)))
    frame = rng.choices(("plain", "chunked", "cut", "junk"), (20, 4, 2, 1))[0]
    if frame == "plain":
        return Sent(_head([*head, f"content-length: {len(body)}"]) + body)
    if frame == "chunked":
        return Sent(
            _head([*head, "transfer-encoding: chunked"]) + _chunks(rng, body) + b"0\r\n\r\n"
        )
    whole = rng.choice(
        (
            _head([*head, f"content-length: {len(body) + rng.randint(1, 99)}"]) + body,
            _head([*head, "transfer-encoding: chunked"]) + _chunks(rng, body),
        )
    )
    if frame == "cut":
        return Sent(whole[: rng.randint(1, len(whole))], whole=False)
    return Sent(_flip(rng, whole), whole=False)


def _head(lines: Sequence[str]) -> bytes:
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


def _chunks(rng: random.Random, body: bytes) -> bytes:
    parts: list[bytes] = []
    while body:
        size = rng.randint(1, len(body))
        parts.append(b"%x\r\n%s\r\n" % (size, body[:size]))
        body = body[size:]
    return b"".join(parts)


def _answered(data: bytes, *, bodiless: bool) -> Answered:
    """Take a response apart. Raises `ValueError` for what is none."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = first.split(" ")
    if not end or version != "HTTP/1.1":
        raise ValueError(f"not a response: {data[:200]!r}")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unframed(body)
    elif not bodiless and len(body) != int(headers["content-length"]):
        raise ValueError(f"{len(body)} bytes of body where {headers['content-length']} were told")
    return Answered(int(status), headers, body)


def _unframed(body: bytes) -> bytes:
    parts: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return b"".join(parts)
        parts.append(body[:count])
        body = body[count + 2 :]
