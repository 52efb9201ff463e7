from kvmesh.v1 import generation_pb2 as _generation_pb2
from kvmesh.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("open", "starts", "cancels")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    open: _generation_pb2.Open
    starts: _containers.RepeatedCompositeFieldContainer[PrefillStart]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[_generation_pb2.Open, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[PrefillStart, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("stream_id", "context", "token_ids", "sampling")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("sequence", "opened", "results", "ends")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: _generation_pb2.Opened
    results: _containers.RepeatedCompositeFieldContainer[PrefillResult]
    ends: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StreamEnd]
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[_generation_pb2.Opened, _Mapping]] = ..., results: _Optional[_Iterable[_Union[PrefillResult, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[_generation_pb2.StreamEnd, _Mapping]]] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("stream_id", "ticket", "first_token_ids", "cached_tokens", "logprobs", "top_token_ids", "top_logprobs", "top_count", "ranks", "computing")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    ticket: _kv_pb2.KvTicket
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_count: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    computing: bool
    def __init__(self, stream_id: _Optional[int] = ..., ticket: _Optional[_Union[_kv_pb2.KvTicket, _Mapping]] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., top_count: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., computing: bool = ...) -> None: ...
