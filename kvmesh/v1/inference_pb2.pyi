from google.api import annotations_pb2 as _annotations_pb2
from google.api import field_behavior_pb2 as _field_behavior_pb2
from kvmesh.v1 import generation_pb2 as _generation_pb2
from kvmesh.v1 import tokenizer_pb2 as _tokenizer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateInput(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "sampling", "stop", "priority", "include_stop", "keep_special", "add_special_tokens", "truncate_to", "session", "bad_words", "explain")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TO_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: _tokenizer_pb2.Chat
    token_ids: _tokenizer_pb2.TokenIds
    sampling: _generation_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    priority: int
    include_stop: bool
    keep_special: bool
    add_special_tokens: bool
    truncate_to: int
    session: str
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    explain: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[_tokenizer_pb2.Chat, _Mapping]] = ..., token_ids: _Optional[_Union[_tokenizer_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., priority: _Optional[int] = ..., include_stop: bool = ..., keep_special: bool = ..., add_special_tokens: bool = ..., truncate_to: _Optional[int] = ..., session: _Optional[str] = ..., bad_words: _Optional[_Iterable[str]] = ..., explain: bool = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("decode_worker_id", "prefill_worker_id", "reason", "policy", "router_id", "prompt_tokens", "expected_cached_tokens", "queue_seconds", "why", "failures")
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    decode_worker_id: str
    prefill_worker_id: str
    reason: str
    policy: str
    router_id: str
    prompt_tokens: int
    expected_cached_tokens: int
    queue_seconds: float
    why: str
    failures: _containers.RepeatedCompositeFieldContainer[FailedAttempt]
    def __init__(self, decode_worker_id: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., reason: _Optional[str] = ..., policy: _Optional[str] = ..., router_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., expected_cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., why: _Optional[str] = ..., failures: _Optional[_Iterable[_Union[FailedAttempt, _Mapping]]] = ...) -> None: ...

class FailedAttempt(_message.Message):
    __slots__ = ("step", "worker_id", "reason")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    step: str
    worker_id: str
    reason: str
    def __init__(self, step: _Optional[str] = ..., worker_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "input")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    input: GenerateInput
    def __init__(self, model: _Optional[str] = ..., input: _Optional[_Union[GenerateInput, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("text", "completion", "request_id", "logprobs", "explanation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    completion: _generation_pb2.Completion
    request_id: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    explanation: Explanation
    def __init__(self, text: _Optional[str] = ..., completion: _Optional[_Union[_generation_pb2.Completion, _Mapping]] = ..., request_id: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class StreamGenerateRequest(_message.Message):
    __slots__ = ("model", "input")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    input: GenerateInput
    def __init__(self, model: _Optional[str] = ..., input: _Optional[_Union[GenerateInput, _Mapping]] = ...) -> None: ...

class StreamGenerateResponse(_message.Message):
    __slots__ = ("text", "completion", "request_id", "logprobs", "explanation")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    text: str
    completion: _generation_pb2.Completion
    request_id: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    explanation: Explanation
    def __init__(self, text: _Optional[str] = ..., completion: _Optional[_Union[_generation_pb2.Completion, _Mapping]] = ..., request_id: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class MultiplexGenerateRequest(_message.Message):
    __slots__ = ("open", "starts", "cancels")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    open: _generation_pb2.Open
    starts: _containers.RepeatedCompositeFieldContainer[GenerateStart]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[_generation_pb2.Open, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[GenerateStart, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("stream_id", "context", "model", "input")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    model: str
    input: GenerateInput
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., model: _Optional[str] = ..., input: _Optional[_Union[GenerateInput, _Mapping]] = ...) -> None: ...

class MultiplexGenerateResponse(_message.Message):
    __slots__ = ("sequence", "opened", "deltas", "ends", "explanations")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: _generation_pb2.Opened
    deltas: _containers.RepeatedCompositeFieldContainer[_tokenizer_pb2.TextDelta]
    ends: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StreamEnd]
    explanations: _containers.RepeatedCompositeFieldContainer[RequestExplanation]
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[_generation_pb2.Opened, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[_tokenizer_pb2.TextDelta, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[_generation_pb2.StreamEnd, _Mapping]]] = ..., explanations: _Optional[_Iterable[_Union[RequestExplanation, _Mapping]]] = ...) -> None: ...

class RequestExplanation(_message.Message):
    __slots__ = ("stream_id", "explanation")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    explanation: Explanation
    def __init__(self, stream_id: _Optional[int] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "context_length")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_length: int
    def __init__(self, name: _Optional[str] = ..., context_length: _Optional[int] = ...) -> None: ...
