"""The mesh against vLLM's own OpenAI server: same model, same machine, same requests."""

import asyncio
import random
from pathlib import Path

import pytest

from kvmesh.models import SMOLLM2
from kvmesh.testing.cluster import cluster
from kvmesh.testing.differential.answers import ask_all, what_is_said
from kvmesh.testing.differential.compare import Verdict, differences, judge
from kvmesh.testing.differential.good_asks import good_asks
from kvmesh.testing.differential.known import KNOWN
from kvmesh.testing.differential.other_asks import bad_asks, other_asks
from kvmesh.testing.engine_vllm import smollm2
from kvmesh.testing.vllm_server import vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT_LENGTH = 2048
SEED = 4


async def test_the_mesh_answers_as_vllm_does_but_for_what_is_listed(tmp_path: Path) -> None:
    model = await asyncio.to_thread(smollm2)
    # One after the other: each then has the whole machine.
    log = tmp_path / "vllm.log"
    async with vllm_server(model, SMOLLM2, log, context_length=CONTEXT_LENGTH) as url:
        said = await what_is_said(url, SMOLLM2)
        good = good_asks(SMOLLM2, said, random.Random(SEED))
        asks = [*good, *bad_asks(SMOLLM2), *other_asks(SMOLLM2)]
        theirs = await ask_all(url, asks)
    flags = ["--engine", "torch"]
    for role in ("prefill", "decode"):
        flags += ["--set", f"{role}:engine.torch.context_length={CONTEXT_LENGTH}"]
    async with cluster(tmp_path / "state", *flags) as mesh:
        ours = await ask_all(mesh.url, asks)
    assert len(asks) >= 200
    found = [
        difference
        for ask, mine, their in zip(asks, ours, theirs, strict=True)
        for difference in differences(ask, mine, their)
    ]
    verdict = judge(found, KNOWN)
    assert not verdict.unexplained, report(verdict)
    assert not verdict.unused, report(verdict)


def report(verdict: Verdict) -> str:
    parts = [f"{len(verdict.unexplained)} differences that nothing explains:"]
    parts += [str(difference) for difference in verdict.unexplained]
    parts += [f"listed, but not found: {unused}" for unused in verdict.unused]
    return "\n".join(parts)
