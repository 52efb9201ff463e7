"""Between protobuf and the mesh's own types, both ways, for what services share.

`x_to_proto` fills or returns a message; `x_from_proto` returns a valid value or raises
`InvalidRequestError` with the field at fault. Nothing else in the library knows how
these types look on the wire.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from google.protobuf.timestamp_pb2 import Timestamp

from kvmesh.clock import Clock
from kvmesh.errors import InvalidRequestError
from kvmesh.types import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheSnapshot,
    ChatMessage,
    ChatPrompt,
    Completion,
    Context,
    FinishReason,
    KvTicket,
    Leg,
    Load,
    Plan,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
    Usage,
    Worker,
    WorkerEvent,
)
from kvmesh.v1 import (
    generation_pb2,
    inference_pb2,
    kv_pb2,
    router_pb2,
    tokenizer_pb2,
    worker_pb2,
)

SCHEMA_REVISION = 1
"""Revision of the schemas in `protos/`; goes into every `Open`."""

_OPTIONAL_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)

_FINISH_TO_PROTO = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO: dict[int, FinishReason | None] = {
    number: reason for reason, number in _FINISH_TO_PROTO.items()
}

LEG_TO_PROTO: Mapping[Leg, router_pb2.RouteProgress.Leg] = {
    Leg.PREFILL: router_pb2.RouteProgress.LEG_PREFILL,
    Leg.DECODE: router_pb2.RouteProgress.LEG_DECODE,
    Leg.HANDOFF: router_pb2.RouteProgress.LEG_HANDOFF,
}
LEG_FROM_PROTO: Mapping[int, Leg] = {number: leg for leg, number in LEG_TO_PROTO.items()}


def sampling_to_proto(sampling: Sampling, out: generation_pb2.SamplingParams) -> None:
    """Write `sampling` into `out`; what is None stays absent."""
    for name in _OPTIONAL_SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            setattr(out, name, value)
    out.stop_token_ids.extend(sampling.stop_token_ids)
    out.allowed_token_ids.extend(sampling.allowed_token_ids)
    for sequence in sampling.bad_words:
        out.bad_words.add(ids=sequence)
    if sampling.logit_bias:
        out.logit_bias.update(sampling.logit_bias)


def sampling_from_proto(message: generation_pb2.SamplingParams) -> Sampling:
    """Read sampling knobs; absent ones take the defaults of `Sampling`, biases come sorted."""
    given = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    return Sampling(
        stop_token_ids=tuple(message.stop_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=sequences_from_proto(message.bad_words),
        **given,
    )


def sequences_from_proto(
    messages: Iterable[generation_pb2.TokenSequence],
) -> tuple[tuple[int, ...], ...]:
    """Read sequences of token ids."""
    return tuple([tuple(message.ids) for message in messages])


def context_to_proto(context: Context, out: generation_pb2.RequestContext, clock: Clock) -> None:
    """Write `context` into `out`; the deadline as the time left now, at least 0."""
    out.request_id = context.request_id
    out.traceparent = context.traceparent
    out.priority = context.priority
    if context.deadline is not None:
        out.timeout.FromNanoseconds(int(max(0.0, context.deadline - clock.now()) * 1e9))


def context_from_proto(message: generation_pb2.RequestContext, clock: Clock) -> Context:
    """Read a request's context; the time left becomes a deadline on `clock`."""
    deadline = None
    if message.HasField("timeout"):
        deadline = clock.now() + message.timeout.ToNanoseconds() / 1e9
    return Context(message.request_id, deadline, message.traceparent, message.priority)


def completion_to_proto(completion: Completion, out: generation_pb2.Completion) -> None:
    """Write a natural end into `out`."""
    out.SetInParent()
    out.finish_reason = _FINISH_TO_PROTO[completion.finish_reason]
    if completion.usage is not None:
        out.usage.prompt_tokens = completion.usage.prompt_tokens
        out.usage.completion_tokens = completion.usage.completion_tokens
        out.usage.cached_tokens = completion.usage.cached_tokens
    if isinstance(completion.stop, str):
        out.stop_string = completion.stop
    elif completion.stop is not None:
        out.stop_token_id = completion.stop


def completion_from_proto(message: generation_pb2.Completion) -> Completion:
    """Read a natural end. Finish reasons from the future read as `STOP`."""
    which = message.WhichOneof("stop")
    usage = None
    if message.HasField("usage"):
        counts = message.usage
        usage = Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)
    return Completion(
        finish_reason=_FINISH_FROM_PROTO.get(message.finish_reason, FinishReason.STOP),
        usage=usage,
        stop=getattr(message, which) if which else None,
    )


def ticket_to_proto(ticket: KvTicket, out: kv_pb2.KvTicket) -> None:
    """Write a KV ticket into `out`."""
    out.ticket_id = ticket.ticket_id
    out.worker_id = ticket.worker_id
    out.epoch = ticket.epoch
    out.backend = ticket.backend
    out.engine = ticket.engine
    out.layout_fingerprint = ticket.layout_fingerprint
    out.prompt_tokens = ticket.prompt_tokens
    out.block_count = ticket.block_count
    out.byte_count = ticket.byte_count
    out.lease_expire_time.CopyFrom(_timestamp(ticket.lease_expire_time))
    out.first_token_ids.extend(ticket.first_token_ids)
    out.engine_params = ticket.engine_params


def ticket_from_proto(message: kv_pb2.KvTicket) -> KvTicket:
    """Read a KV ticket. Whether it can be honoured is for the engine to say."""
    return KvTicket(
        ticket_id=message.ticket_id,
        worker_id=message.worker_id,
        epoch=message.epoch,
        backend=message.backend,
        engine=message.engine,
        layout_fingerprint=message.layout_fingerprint,
        prompt_tokens=message.prompt_tokens,
        block_count=message.block_count,
        byte_count=message.byte_count,
        lease_expire_time=message.lease_expire_time.ToNanoseconds() / 1e9,
        first_token_ids=tuple(message.first_token_ids),
        engine_params=message.engine_params,
    )


def plan_to_proto(plan: Plan, out: router_pb2.RoutePlan) -> None:
    """Write a router's decision into `out`."""
    _worker_to_proto(plan.decode, out.decode)
    if plan.prefill is not None:
        _worker_to_proto(plan.prefill, out.prefill)
    out.expected_cached_tokens = plan.expected_cached_tokens
    out.why = plan.why
    out.policy = plan.policy
    out.reason = plan.reason
    out.waited_seconds = plan.waited


def plan_from_proto(message: router_pb2.RoutePlan) -> Plan:
    """Read a router's decision."""
    return Plan(
        decode=_worker_from_proto(message.decode),
        prefill=_worker_from_proto(message.prefill) if message.HasField("prefill") else None,
        expected_cached_tokens=message.expected_cached_tokens,
        why=message.why,
        policy=message.policy,
        reason=message.reason,
        waited=message.waited_seconds,
    )


PromptMessage = tokenizer_pb2.TokenizeStart | inference_pb2.GenerateInput
"""The messages that hold a prompt as `oneof prompt { text, chat, token_ids }`."""


def prompt_to_proto(prompt: Prompt, out: PromptMessage) -> None:
    """Write a prompt into the `prompt` of `out`."""
    match prompt:
        case TextPrompt(text, add_special_tokens):
            out.text = text
            out.add_special_tokens = add_special_tokens
        case TokenPrompt(token_ids):
            out.token_ids.ids.extend(token_ids)
        case ChatPrompt():
            _chat_to_proto(prompt, out.chat)
            out.add_special_tokens = prompt.add_special_tokens
        case _:
            assert_never(prompt)


def prompt_from_proto(message: PromptMessage) -> Prompt:
    """Read the `prompt` of `message`; it must be set."""
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text, _flag(message, "add_special_tokens", default=True))
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            special = _flag(message, "add_special_tokens", default=False)
            return _chat_from_proto(message.chat, add_special_tokens=special)
        case _:
            raise InvalidRequestError(
                "a prompt is required: text, chat or token_ids", field="prompt"
            )


def event_to_proto(event: WorkerEvent, out: worker_pb2.WorkerEvent) -> None:
    """Write one of a worker's events into `out`."""
    match event:
        case CacheSnapshot(hashes):
            out.snapshot.SetInParent()
            out.snapshot.hashes.extend(hashes)
        case BlocksStored(hashes):
            out.stored.hashes.extend(hashes)
        case BlocksRemoved(hashes):
            out.removed.hashes.extend(hashes)
        case BlocksCleared():
            out.cleared.SetInParent()
        case Load():
            out.load.SetInParent()
            for name in Load.__dataclass_fields__:
                setattr(out.load, name, getattr(event, name))
        case _:
            assert_never(event)


def event_from_proto(message: worker_pb2.WorkerEvent) -> WorkerEvent | None:
    """Read one of a worker's events; None for kinds from the future."""
    match message.WhichOneof("event"):
        case "snapshot":
            return CacheSnapshot(message.snapshot.hashes)
        case "stored":
            return BlocksStored(message.stored.hashes)
        case "removed":
            return BlocksRemoved(message.removed.hashes)
        case "cleared":
            return BlocksCleared()
        case "load":
            load = message.load
            return Load(**{name: getattr(load, name) for name in Load.__dataclass_fields__})
        case _:
            return None


def check_revision(revision: int) -> None:
    """Raise `InvalidRequestError` for a schema revision that can't be spoken here."""
    if revision < 1:
        raise InvalidRequestError(
            f"schema_revision must be at least 1, got {revision}", field="schema_revision"
        )


def token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return a prompt's ids, refusing an empty one."""
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", field="token_ids")
    return tuple(ids)


def _chat_to_proto(prompt: ChatPrompt, out: tokenizer_pb2.Chat) -> None:
    out.add_generation_prompt = prompt.add_generation_prompt
    out.continue_final_message = prompt.continue_final_message
    out.tools_json = prompt.tools
    out.template_kwargs_json = prompt.template_kwargs
    out.template = prompt.template
    for message in prompt.messages:
        out.messages.add(
            role=message.role,
            content=message.content,
            name=message.name,
            extra_json=message.extra,
        )


def _chat_from_proto(chat: tokenizer_pb2.Chat, *, add_special_tokens: bool) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequestError("at least one message is required", field="messages")
    # Absent, it is opened unless the last message is to be gone on with.
    default = not chat.continue_final_message
    return ChatPrompt(
        tuple(ChatMessage(m.role, m.content, m.name, m.extra_json) for m in chat.messages),
        _flag(chat, "add_generation_prompt", default=default),
        chat.continue_final_message,
        chat.tools_json,
        chat.template_kwargs_json,
        chat.template,
        add_special_tokens,
    )


def _flag(message: PromptMessage | tokenizer_pb2.Chat, name: str, *, default: bool) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else default


def _worker_to_proto(worker: Worker, out: router_pb2.WorkerRef) -> None:
    out.worker_id, out.epoch, out.address = worker.id, worker.epoch, worker.address


def _worker_from_proto(message: router_pb2.WorkerRef) -> Worker:
    return Worker(message.worker_id, message.epoch, message.address)


def _timestamp(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
