"""What the span of a request says of it: figures and names of ours, nothing of its text."""

from collections.abc import Mapping

from kvmesh.telemetry.trace import Attribute
from services.frontend.metrics import PROVIDER
from services.frontend.request import Request


def described(request: Request, operation: str, model: str) -> Mapping[str, Attribute]:
    """Return the attributes of a request's span. `model` is as metrics call it.

    Stop strings are left out: they are the caller's text.
    """
    sampling = request.sampling
    given: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.output.type": "text",
        "gen_ai.request.choice.count": request.choices if request.choices > 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "kvmesh.request_id": request.id,
    }
    return {name: value for name, value in given.items() if value is not None}
