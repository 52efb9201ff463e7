"""The multiplexed streams of the mesh, each with the messages it is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio

from kvmesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class StreamSpec(Generic[RequestT, ResponseT]):
    """One multiplexed rpc: how to call it, its messages, and where its items are."""

    name: str
    stub: Callable[[grpc.aio.Channel], Any]
    request: Callable[[], RequestT]
    response: Callable[[], ResponseT]
    items: str


TOKENIZE = StreamSpec(
    "Tokenize",
    tokenizer_pb2_grpc.TokenizerServiceStub,
    tokenizer_pb2.TokenizeRequest,
    tokenizer_pb2.TokenizeResponse,
    "results",
)
DETOKENIZE = StreamSpec(
    "Detokenize",
    tokenizer_pb2_grpc.TokenizerServiceStub,
    tokenizer_pb2.DetokenizeRequest,
    tokenizer_pb2.DetokenizeResponse,
    "deltas",
)
ROUTE = StreamSpec(
    "Route",
    router_pb2_grpc.RouterServiceStub,
    router_pb2.RouteRequest,
    router_pb2.RouteResponse,
    "plans",
)
PREFILL = StreamSpec(
    "Prefill",
    prefill_pb2_grpc.PrefillServiceStub,
    prefill_pb2.PrefillRequest,
    prefill_pb2.PrefillResponse,
    "results",
)
DECODE = StreamSpec(
    "Decode",
    decode_pb2_grpc.DecodeServiceStub,
    decode_pb2.DecodeRequest,
    decode_pb2.DecodeResponse,
    "deltas",
)
GENERATE = StreamSpec(
    "MultiplexGenerate",
    inference_pb2_grpc.InferenceServiceStub,
    inference_pb2.MultiplexGenerateRequest,
    inference_pb2.MultiplexGenerateResponse,
    "deltas",
)
