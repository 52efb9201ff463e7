"""`x-kvmesh-*`: response headers that tell a caller who asks which workers answer, and why."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from string import printable
from urllib.parse import quote

from kvmesh.errors import MeshError
from services.frontend.explanation import Explanation, Placed
from services.frontend.request import Request
from services.frontend.rest.asgi import Exchange

ASK = b"x-kvmesh-explain"
"""The request header that asks."""

MAX_VALUE_CHARS = 1024
"""Of one header; what proxies let pass of all headers together is some 8 KB."""

PREFIX = "x-kvmesh-"

HEADERS = {
    "request-id": "Id of the request in the mesh, as in logs and router decisions.",
    "decode-worker": "Worker that decodes.",
    "prefill-worker": "Worker that computes the prompt; `none`: the one that decodes.",
    "prefill": "`remote` or `local`: where the prompt is computed.",
    "prefill-reason": "Why there, in one word.",
    "prompt-tokens": "Length of the prompt.",
    "expected-cached-tokens": "Prompt tokens thought to be cached where it is computed.",
    "policy": "Routing policy that picked the workers.",
    "router": "Router that decided; `none`: none was reachable.",
    "queue-seconds": "Time in the router's queue.",
    "why": "The decision in a few words.",
    "attempts": "Attempts that it took, this one included.",
    "failures": "Attempts that failed: step, worker and reason of each, joined by commas.",
    "choice": "Which of several answers the headers are about.",
    "choices": "How many answers there are, where there are several.",
}
"""The headers without their prefix, and what each says."""

_YES = ("1", "true", "yes")

_WORDS = "".join(sorted(set(printable) - set("%\t\n\r\v\f")))
_ID = _WORDS.replace(",", "").replace(" ", "")


@contextmanager
def explaining(
    exchange: Exchange, request: Request, *, allowed: bool
) -> Iterator[Explanation | None]:
    """Yield what is to be told with the response; None if nobody asks.

    A request that fails before its first byte is explained as far as it came.
    """
    if not allowed or exchange.header(ASK).strip().lower() not in _YES:
        yield None
        return
    explanation = Explanation(request.id, request.choices)
    try:
        yield explanation
    except MeshError:
        if not exchange.started:
            tell(exchange, explanation, explanation.first())
        raise


def tell(exchange: Exchange, explanation: Explanation, index: int) -> None:
    """Add the headers about one choice to the response, which has not begun."""
    exchange.headers.append(_header("request-id", explanation.request_id))
    placed = explanation.of(index)
    if placed is None:
        return
    pairs = list(_pairs(placed))
    if explanation.choices > 1:
        pairs += [("choice", str(index)), ("choices", str(explanation.choices))]
    exchange.headers.extend(_header(name, value) for name, value in pairs if value)


def _pairs(placed: Placed) -> Iterable[tuple[str, str]]:
    plan = placed.plan
    prefill = plan.prefill
    yield "decode-worker", _id(plan.decode.id)
    yield "prefill-worker", "none" if prefill is None else _id(prefill.id)
    yield "prefill", "local" if prefill is None else "remote"
    yield "prefill-reason", _id(plan.reason)
    yield "prompt-tokens", str(placed.prompt_tokens)
    yield "expected-cached-tokens", str(plan.expected_cached_tokens)
    yield "policy", _id(plan.policy)
    yield "router", _id(placed.router_id) or "none"
    yield "queue-seconds", f"{plan.waited:.6f}"
    yield "why", quote(plan.why, safe=_WORDS, errors="replace")
    yield "attempts", str(placed.attempts)
    failures = (f"{f.step} {_id(f.worker_id)} {_id(f.reason)}" for f in placed.failures)
    yield "failures", ", ".join(failures)


def _header(name: str, value: str) -> tuple[bytes, bytes]:
    return (PREFIX + name).encode(), value[:MAX_VALUE_CHARS].strip().encode("ascii")


def _id(text: str) -> str:
    """Return a name as one word of visible ASCII; the rest percent-encoded."""
    return quote(text, safe=_ID, errors="replace")
