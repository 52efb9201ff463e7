"""The torch engine on a real model: greedy text is that of transformers' generate()."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kvmesh.engine.base import EngineRequest
from kvmesh.engine.torch import TorchConfig
from kvmesh.testing.engine import started
from kvmesh.testing.engine_torch import torch_engine
from kvmesh.testing.engine_vllm import smollm2
from kvmesh.types import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

NEW = 16
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 511, 513, 2000)
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
CONFIG = TorchConfig(max_batch_tokens=300)


class Mesh:
    """Two engines and the model itself."""

    def __init__(self, prefill: Any, decode: Any, tokens: list[int], model: Any) -> None:
        self.prefill = prefill
        self.decode = decode
        self._tokens = tokens
        self._model = model

    def prompt(self, length: int) -> list[int]:
        """Return text that no other length starts with."""
        return self._tokens[length % 97 :][:length]

    def expected(self, prompt: Sequence[int]) -> list[int]:
        import torch  # noqa: PLC0415 - loads for seconds

        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
            )
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - loads for seconds

    folder = await asyncio.to_thread(smollm2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(started(torch_engine(folder, CONFIG, name="smol")))
            for _ in range(2)
        ]
        yield Mesh(engines[0].engine, engines[1].engine, tokens, model)


def ask(name: str, prompt: Sequence[int]) -> EngineRequest:
    return EngineRequest(
        name, prompt, Sampling(NEW, temperature=0.0, ignore_eos=True, min_tokens=NEW)
    )


async def collect(steps: Any) -> list[int]:
    return [token async for step in steps for token in step.token_ids]


async def test_sixteen_of_different_lengths_at_once(mesh: Mesh) -> None:
    prompts = [mesh.prompt(length) for length in LENGTHS]
    answers = await asyncio.gather(
        *(collect(mesh.decode.generate(ask(f"b{len(each)}", each))) for each in prompts)
    )
    assert answers == [mesh.expected(each) for each in prompts]


@pytest.mark.parametrize("length", [1, 16, 33, 513, 2000])
async def test_remote_prefill(mesh: Mesh, length: int) -> None:
    prompt = mesh.prompt(length)
    prefilled = await mesh.prefill.prefill(ask(f"p{length}", prompt))
    rest = await collect(mesh.decode.resume(ask(f"d{length}", prompt), prefilled.ticket))
    assert [*prefilled.first_token_ids, *rest] == mesh.expected(prompt)


@pytest.mark.parametrize("shared", [15, 16, 17, 500])
async def test_prefix_hits(mesh: Mesh, shared: int) -> None:
    first = mesh.prompt(600)
    second = [*first[:shared], *mesh.prompt(40)]
    for number, prompt in enumerate((first, second)):
        answer = await collect(mesh.decode.generate(ask(f"h{shared}-{number}", prompt)))
        assert answer == mesh.expected(prompt)
