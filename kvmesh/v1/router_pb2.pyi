import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvmesh.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecisionOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_OUTCOME_UNSPECIFIED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_REMOTE: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_LOCAL: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_REFUSED: _ClassVar[DecisionOutcome]
    DECISION_OUTCOME_CANCELLED: _ClassVar[DecisionOutcome]
DECISION_OUTCOME_UNSPECIFIED: DecisionOutcome
DECISION_OUTCOME_REMOTE: DecisionOutcome
DECISION_OUTCOME_LOCAL: DecisionOutcome
DECISION_OUTCOME_REFUSED: DecisionOutcome
DECISION_OUTCOME_CANCELLED: DecisionOutcome

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
    __slots__ = ("stream_id", "context", "model", "prompt_tokens", "max_tokens", "block_hashes", "block_size", "excluded_worker_ids", "session_key", "fair_key")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    FAIR_KEY_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    model: str
    prompt_tokens: int
    max_tokens: int
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    excluded_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    session_key: str
    fair_key: str
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., excluded_worker_ids: _Optional[_Iterable[str]] = ..., session_key: _Optional[str] = ..., fair_key: _Optional[str] = ...) -> None: ...

class RouteProgress(_message.Message):
    __slots__ = ("stream_id", "prefilled", "cached_tokens", "generating", "failed_leg", "timed_out")
    class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LEG_UNSPECIFIED: _ClassVar[RouteProgress.Leg]
        LEG_PREFILL: _ClassVar[RouteProgress.Leg]
        LEG_DECODE: _ClassVar[RouteProgress.Leg]
        LEG_HANDOFF: _ClassVar[RouteProgress.Leg]
    LEG_UNSPECIFIED: RouteProgress.Leg
    LEG_PREFILL: RouteProgress.Leg
    LEG_DECODE: RouteProgress.Leg
    LEG_HANDOFF: RouteProgress.Leg
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATING_FIELD_NUMBER: _ClassVar[int]
    FAILED_LEG_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    prefilled: bool
    cached_tokens: int
    generating: bool
    failed_leg: RouteProgress.Leg
    timed_out: bool
    def __init__(self, stream_id: _Optional[int] = ..., prefilled: bool = ..., cached_tokens: _Optional[int] = ..., generating: bool = ..., failed_leg: _Optional[_Union[RouteProgress.Leg, str]] = ..., timed_out: bool = ...) -> None: ...

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
    __slots__ = ("stream_id", "decode", "prefill", "expected_cached_tokens", "why", "policy", "reason", "waited_seconds")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    decode: WorkerRef
    prefill: WorkerRef
    expected_cached_tokens: int
    why: str
    policy: str
    reason: str
    waited_seconds: float
    def __init__(self, stream_id: _Optional[int] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., expected_cached_tokens: _Optional[int] = ..., why: _Optional[str] = ..., policy: _Optional[str] = ..., reason: _Optional[str] = ..., waited_seconds: _Optional[float] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("worker_id", "epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WatchDecisionsRequest(_message.Message):
    __slots__ = ("model", "worker_id", "policy", "request_id", "outcomes", "limit", "follow")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    model: str
    worker_id: str
    policy: str
    request_id: str
    outcomes: _containers.RepeatedScalarFieldContainer[DecisionOutcome]
    limit: int
    follow: bool
    def __init__(self, model: _Optional[str] = ..., worker_id: _Optional[str] = ..., policy: _Optional[str] = ..., request_id: _Optional[str] = ..., outcomes: _Optional[_Iterable[_Union[DecisionOutcome, str]]] = ..., limit: _Optional[int] = ..., follow: bool = ...) -> None: ...

class WatchDecisionsResponse(_message.Message):
    __slots__ = ("decisions", "dropped")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[RoutingDecision]
    dropped: int
    def __init__(self, decisions: _Optional[_Iterable[_Union[RoutingDecision, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class RoutingDecision(_message.Message):
    __slots__ = ("number", "decide_time", "request_id", "model", "outcome", "reason", "policy", "decode_worker_id", "prefill_worker_id", "prompt_tokens", "expected_cached_tokens", "cached_tokens", "waited_seconds", "queue_position", "excluded_worker_ids", "decode_candidates", "prefill_candidates")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DECIDE_TIME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    number: int
    decide_time: _timestamp_pb2.Timestamp
    request_id: str
    model: str
    outcome: DecisionOutcome
    reason: str
    policy: str
    decode_worker_id: str
    prefill_worker_id: str
    prompt_tokens: int
    expected_cached_tokens: int
    cached_tokens: int
    waited_seconds: float
    queue_position: int
    excluded_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    decode_candidates: _containers.RepeatedCompositeFieldContainer[ScoredWorker]
    prefill_candidates: _containers.RepeatedCompositeFieldContainer[ScoredWorker]
    def __init__(self, number: _Optional[int] = ..., decide_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., outcome: _Optional[_Union[DecisionOutcome, str]] = ..., reason: _Optional[str] = ..., policy: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., prefill_worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., expected_cached_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., waited_seconds: _Optional[float] = ..., queue_position: _Optional[int] = ..., excluded_worker_ids: _Optional[_Iterable[str]] = ..., decode_candidates: _Optional[_Iterable[_Union[ScoredWorker, _Mapping]]] = ..., prefill_candidates: _Optional[_Iterable[_Union[ScoredWorker, _Mapping]]] = ...) -> None: ...

class ScoredWorker(_message.Message):
    __slots__ = ("worker_id", "score", "cached_tokens", "load_blocks", "requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    score: float
    cached_tokens: int
    load_blocks: float
    requests: int
    def __init__(self, worker_id: _Optional[str] = ..., score: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., load_blocks: _Optional[float] = ..., requests: _Optional[int] = ...) -> None: ...
