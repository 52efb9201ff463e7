from kvmesh.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteRequest(_message.Message):
    __slots__ = ("open", "starts", "progress", "cancels")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    open: _generation_pb2.Open
    starts: _containers.RepeatedCompositeFieldContainer[RouteStart]
    progress: _containers.RepeatedCompositeFieldContainer[RouteProgress]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[_generation_pb2.Open, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[RouteStart, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[RouteProgress, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class RouteStart(_message.Message):
    __slots__ = ("stream_id", "context", "model", "prompt_tokens", "max_tokens", "block_hashes", "block_size", "excluded_worker_ids", "session_key")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    model: str
    prompt_tokens: int
    max_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    excluded_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    session_key: str
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., excluded_worker_ids: _Optional[_Iterable[str]] = ..., session_key: _Optional[str] = ...) -> None: ...

class RouteProgress(_message.Message):
    __slots__ = ("stream_id", "prefilled", "cached_tokens")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    prefilled: bool
    cached_tokens: int
    def __init__(self, stream_id: _Optional[int] = ..., prefilled: bool = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("sequence", "opened", "plans", "ends")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: _generation_pb2.Opened
    plans: _containers.RepeatedCompositeFieldContainer[RoutePlan]
    ends: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StreamEnd]
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[_generation_pb2.Opened, _Mapping]] = ..., plans: _Optional[_Iterable[_Union[RoutePlan, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[_generation_pb2.StreamEnd, _Mapping]]] = ...) -> None: ...

class RoutePlan(_message.Message):
    __slots__ = ("stream_id", "decode", "prefill", "expected_cached_tokens", "why")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    decode: WorkerRef
    prefill: WorkerRef
    expected_cached_tokens: int
    why: str
    def __init__(self, stream_id: _Optional[int] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., expected_cached_tokens: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...
