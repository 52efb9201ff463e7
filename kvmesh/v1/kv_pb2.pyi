import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvTicket(_message.Message):
    __slots__ = ("ticket_id", "worker_id", "epoch", "backend", "engine", "layout_fingerprint", "prompt_tokens", "block_count", "byte_count", "lease_expire_time", "first_token_ids", "engine_params")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    worker_id: str
    epoch: str
    backend: str
    engine: str
    layout_fingerprint: str
    prompt_tokens: int
    block_count: int
    byte_count: int
    lease_expire_time: _timestamp_pb2.Timestamp
    first_token_ids: _containers.RepeatedScalarFieldContainer[int]
    engine_params: bytes
    def __init__(self, ticket_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., backend: _Optional[str] = ..., engine: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., block_count: _Optional[int] = ..., byte_count: _Optional[int] = ..., lease_expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., first_token_ids: _Optional[_Iterable[int]] = ..., engine_params: _Optional[bytes] = ...) -> None: ...
