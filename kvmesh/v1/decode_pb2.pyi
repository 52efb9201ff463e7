from kvmesh.v1 import generation_pb2 as _generation_pb2
from kvmesh.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("open", "starts", "cancels")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    open: _generation_pb2.Open
    starts: _containers.RepeatedCompositeFieldContainer[DecodeStart]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[_generation_pb2.Open, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[DecodeStart, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeStart(_message.Message):
    __slots__ = ("stream_id", "context", "token_ids", "sampling", "ticket", "generated_token_ids")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    ticket: _kv_pb2.KvTicket
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., ticket: _Optional[_Union[_kv_pb2.KvTicket, _Mapping]] = ..., generated_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("sequence", "opened", "deltas", "ends")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: _generation_pb2.Opened
    deltas: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenDelta]
    ends: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StreamEnd]
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[_generation_pb2.Opened, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[_generation_pb2.TokenDelta, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[_generation_pb2.StreamEnd, _Mapping]]] = ...) -> None: ...
