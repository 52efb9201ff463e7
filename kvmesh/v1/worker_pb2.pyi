from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchEventsRequest(_message.Message):
    __slots__ = ("schema_revision", "client_id")
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    schema_revision: int
    client_id: str
    def __init__(self, schema_revision: _Optional[int] = ..., client_id: _Optional[str] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("worker_id", "epoch", "sequence", "events")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[WorkerEvent]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[WorkerEvent, _Mapping]]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("snapshot", "stored", "removed", "cleared", "load")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    snapshot: BlockHashes
    stored: BlockHashes
    removed: BlockHashes
    cleared: CacheCleared
    load: WorkerLoad
    def __init__(self, snapshot: _Optional[_Union[BlockHashes, _Mapping]] = ..., stored: _Optional[_Union[BlockHashes, _Mapping]] = ..., removed: _Optional[_Union[BlockHashes, _Mapping]] = ..., cleared: _Optional[_Union[CacheCleared, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class BlockHashes(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "used_blocks", "total_blocks", "ticket_blocks", "ticket_bytes", "received_bytes", "received_seconds")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    used_blocks: int
    total_blocks: int
    ticket_blocks: int
    ticket_bytes: int
    received_bytes: int
    received_seconds: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., used_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., ticket_blocks: _Optional[int] = ..., ticket_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., received_seconds: _Optional[float] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("ticket_id", "epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    epoch: str
    def __init__(self, ticket_id: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: bool = ...) -> None: ...
