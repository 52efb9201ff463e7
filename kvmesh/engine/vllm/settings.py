"""What is set for vLLM, and what vLLM is told because of it. Imports no vLLM."""

import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.base import Seat
from kvmesh.errors import InvalidRequestError
from kvmesh.types import Role

OWNER_KEY = "kvmesh_owner"  # in the connector's extra config: pid of the worker
ENDED_KEY = "kvmesh_ended"  # in the connector's stats: requests whose leases ended

_GIB = 1 << 30
_WILDCARD = "0.0.0.0"
_CPU_BATCH_TOKENS = 1024  # more makes the warm-up longer, and a step longer than a client waits


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """How one vLLM engine runs. Zero or empty leaves a choice to vLLM or the machine."""

    block_size: int = field(default=32, metadata={"help": "tokens in a KV block", "min": 1})
    max_model_len: int = field(
        default=0, metadata={"help": "context length in tokens; 0: the model's own", "min": 0}
    )
    kv_cache_gb: float = field(
        default=0.0, metadata={"help": "GiB of KV cache; 0: 1 on a CPU, vLLM's choice on a GPU"}
    )
    max_num_seqs: int = field(
        default=0, metadata={"help": "requests in one step; 0: 64 on a CPU, else vLLM's", "min": 0}
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "of weights and KV; auto: float32 on a CPU, the model's own on a GPU"},
    )
    threads: int = field(
        default=0, metadata={"help": "threads of a CPU engine; 0: all cores allowed", "min": 0}
    )
    fork: bool = field(
        default=True,
        metadata={
            "help": "fork the engine core of a CPU engine: three times quicker, and safe only in "
            "a process that runs nothing else yet, as workers start"
        },
    )
    kv_lease_seconds: int = field(
        default=30, metadata={"help": "how long prefilled KV waits to be pulled", "min": 6}
    )
    kv_host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "address under which other engines reach this one's KV side channel; "
            "0.0.0.0: the one that this machine's name stands for"
        },
    )
    kv_port: int = field(
        default=0, metadata={"help": "port of the KV side channel; 0: a free one", "min": 0}
    )
    engine_args: str = field(
        default="", metadata={"help": "further vLLM engine arguments, a JSON object"}
    )


def engine_args(
    config: VllmConfig, seat: Seat, events_endpoint: str, *, cpu: bool
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `AsyncEngineArgs`, plain values only.

    Raises `InvalidRequestError` where `config.engine_args` is no JSON object.
    """
    args: dict[str, Any] = {
        "model": str(seat.model),
        "served_model_name": seat.name,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "block_size": config.block_size,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,  # ours is added to vLLM's own, which would only log
        "enable_log_requests": False,
        "worker_extension_cls": "kvmesh.engine.vllm.connector.WorkerExtension",
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "kvmesh.engine.vllm.connector",
            "kv_role": "kv_producer" if seat.role is Role.PREFILL else "kv_consumer",
            # A failed pull is told; recomputing in secret would hide a dead prefill worker.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "kv_lease_duration": config.kv_lease_seconds,
                OWNER_KEY: os.getpid(),
            },
        },
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"{events_endpoint}/kv",
            "replay_endpoint": f"{events_endpoint}/replay",
        },
    }
    if config.max_model_len:
        args["max_model_len"] = config.max_model_len
    if config.kv_cache_gb:
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gb * _GIB)
    if config.max_num_seqs:
        args["max_num_seqs"] = config.max_num_seqs
    if cpu:
        _suit_cpu(args, config)
    return args | _further(config.engine_args)


def environment(config: VllmConfig, *, cpu: bool) -> dict[str, str]:
    """Return the variables that vLLM, NIXL and OpenMP read, for this process."""
    host = _own_address() if config.kv_host == _WILDCARD else config.kv_host
    variables = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(config.kv_port or _free_port(host)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if cpu:
        threads = config.threads or len(os.sched_getaffinity(0))
        # "0" is what lets a CPU engine run its worker in the engine core's own process.
        variables |= {"OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return variables


def _suit_cpu(args: dict[str, Any], config: VllmConfig) -> None:
    args["distributed_executor_backend"] = "uni"
    args["enforce_eager"] = True  # compiling takes minutes
    args.setdefault("kv_cache_memory_bytes", _GIB)
    args.setdefault("max_num_seqs", 64)
    args["max_num_batched_tokens"] = _CPU_BATCH_TOKENS
    if config.dtype == "auto":
        # bfloat16 is faster with AMX, but there greedy text depends on batch, cache and
        # hand-over, and without AVX512 it is slower by far; float32 gives one text always.
        args["dtype"] = "float32"


def _further(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"engine_args is no JSON: {error}", field="engine_args"
        ) from error
    if not isinstance(value, dict):
        raise InvalidRequestError("engine_args must be a JSON object", field="engine_args")
    return value


def _own_address() -> str:
    """Return the address that this machine's name stands for; ZeroMQ can't listen on a name."""
    return socket.gethostbyname(socket.gethostname())


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
