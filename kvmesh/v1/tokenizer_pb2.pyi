from kvmesh.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenizeRequest(_message.Message):
    __slots__ = ("open", "starts", "cancels")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    open: _generation_pb2.Open
    starts: _containers.RepeatedCompositeFieldContainer[TokenizeStart]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[_generation_pb2.Open, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[TokenizeStart, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenizeStart(_message.Message):
    __slots__ = ("stream_id", "context", "model", "text", "chat", "token_ids", "block_size", "add_special_tokens", "truncate_to", "bad_words")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TO_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    model: str
    text: str
    chat: Chat
    token_ids: TokenIds
    block_size: int
    add_special_tokens: bool
    truncate_to: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., block_size: _Optional[int] = ..., add_special_tokens: bool = ..., truncate_to: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "tools_json", "template_kwargs_json", "template")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    tools_json: str
    template_kwargs_json: str
    template: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ..., tools_json: _Optional[str] = ..., template_kwargs_json: _Optional[str] = ..., template: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "extra_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    extra_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., extra_json: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("sequence", "opened", "results", "ends")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: _generation_pb2.Opened
    results: _containers.RepeatedCompositeFieldContainer[TokenizeResult]
    ends: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StreamEnd]
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[_generation_pb2.Opened, _Mapping]] = ..., results: _Optional[_Iterable[_Union[TokenizeResult, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[_generation_pb2.StreamEnd, _Mapping]]] = ...) -> None: ...

class TokenizeResult(_message.Message):
    __slots__ = ("stream_id", "token_ids", "block_hashes", "bad_words")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenSequence]
    def __init__(self, stream_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[_generation_pb2.TokenSequence, _Mapping]]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("open", "starts", "deltas", "finishes", "cancels")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    open: _generation_pb2.Open
    starts: _containers.RepeatedCompositeFieldContainer[DetokenizeStart]
    deltas: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenDelta]
    finishes: _containers.RepeatedScalarFieldContainer[int]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[_generation_pb2.Open, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[DetokenizeStart, _Mapping]]] = ..., deltas: _Optional[_Iterable[_Union[_generation_pb2.TokenDelta, _Mapping]]] = ..., finishes: _Optional[_Iterable[int]] = ..., cancels: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeStart(_message.Message):
    __slots__ = ("stream_id", "context", "model", "stop", "include_stop", "keep_special", "min_tokens")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    context: _generation_pb2.RequestContext
    model: str
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    keep_special: bool
    min_tokens: int
    def __init__(self, stream_id: _Optional[int] = ..., context: _Optional[_Union[_generation_pb2.RequestContext, _Mapping]] = ..., model: _Optional[str] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: bool = ..., keep_special: bool = ..., min_tokens: _Optional[int] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("sequence", "opened", "deltas", "ends")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    opened: _generation_pb2.Opened
    deltas: _containers.RepeatedCompositeFieldContainer[TextDelta]
    ends: _containers.RepeatedCompositeFieldContainer[_generation_pb2.StreamEnd]
    def __init__(self, sequence: _Optional[int] = ..., opened: _Optional[_Union[_generation_pb2.Opened, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[TextDelta, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[_generation_pb2.StreamEnd, _Mapping]]] = ...) -> None: ...

class TextDelta(_message.Message):
    __slots__ = ("stream_id", "text", "token_count", "logprobs")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    text: str
    token_count: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, stream_id: _Optional[int] = ..., text: _Optional[str] = ..., token_count: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...
