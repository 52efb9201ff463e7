"""What vLLM is told."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.engine.base import Seat
from kvmesh.engine.vllm.settings import OWNER_KEY, VllmConfig, engine_args, environment
from kvmesh.errors import InvalidRequestError
from kvmesh.types import Role

SEAT = Seat("w", "e", Role.PREFILL, Path("folder"), "name")


def test_roles_make_and_take_kv_and_a_failed_pull_is_told() -> None:
    prefill = engine_args(VllmConfig(), SEAT, "ipc://x", cpu=True)["kv_transfer_config"]
    decoding = replace(SEAT, role=Role.DECODE)
    decode = engine_args(VllmConfig(), decoding, "ipc://x", cpu=True)["kv_transfer_config"]
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    assert decode["kv_load_failure_policy"] == "fail"
    assert prefill["kv_connector_extra_config"] == {
        "kv_lease_duration": 30,
        OWNER_KEY: os.getpid(),
    }


def test_a_cpu_gets_what_suits_it_and_a_gpu_vllms_defaults() -> None:
    cpu = engine_args(VllmConfig(), SEAT, "ipc://x", cpu=True)
    gpu = engine_args(VllmConfig(), SEAT, "ipc://x", cpu=False)
    assert (cpu["dtype"], gpu["dtype"]) == ("float32", "auto")
    assert cpu["enforce_eager"]
    for name in ("distributed_executor_backend", "enforce_eager", "kv_cache_memory_bytes"):
        assert name in cpu
        assert name not in gpu


def test_what_is_set_is_passed_on_and_further_arguments_win() -> None:
    config = VllmConfig(
        dtype="bfloat16",
        kv_cache_gb=0.5,
        max_model_len=512,
        max_num_seqs=3,
        engine_args='{"max_num_seqs": 4, "swap": 1}',
    )
    args = engine_args(config, SEAT, "ipc://x", cpu=True)
    assert args["dtype"] == "bfloat16"
    assert args["kv_cache_memory_bytes"] == 1 << 29
    assert (args["max_model_len"], args["max_num_seqs"], args["swap"]) == (512, 4, 1)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_further_arguments_must_be_an_object(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine_args(VllmConfig(engine_args=text), SEAT, "ipc://x", cpu=True)
    assert caught.value.field == "engine_args"


def test_threads_and_the_side_channel_go_through_the_environment() -> None:
    variables = environment(VllmConfig(threads=3, kv_port=5, kv_host="10.0.0.1"), cpu=True)
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    assert "OMP_NUM_THREADS" not in environment(VllmConfig(), cpu=False)


def test_a_free_port_is_found() -> None:
    assert int(environment(VllmConfig(), cpu=True)["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0
