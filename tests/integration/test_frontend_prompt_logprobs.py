"""Log probabilities of prompts, and words that answers must not have, among fakes."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvmesh.errors import EngineError
from kvmesh.testing import fakes
from kvmesh.testing.fake_mesh import FakeMesh, fake_mesh
from kvmesh.testing.fakes import MODEL, Emit, FakeDecode
from kvmesh.testing.http import error_of
from kvmesh.types import FinishReason
from services.frontend.app import app
from services.frontend.config import FrontendConfig, HttpConfig

CONFIG = FrontendConfig(http=HttpConfig(port=0))
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {
    TEXT: {"model": MODEL, "prompt": "hé", "max_tokens": 3},
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hé"}], "max_tokens": 3},
}


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh(app, CONFIG) as running:
        yield running


async def post(mesh: FakeMesh, path: str = TEXT, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=mesh.url, trust_env=False) as client:
        return await client.post(path, json={**ASKED[path], **body}, timeout=20)


async def ask(mesh: FakeMesh, path: str = TEXT, **body: Any) -> dict[str, Any]:
    response = await post(mesh, path, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def told(text: str, count: int) -> list[dict[str, Any] | None]:
    """Return what fakes say of a prompt's tokens, which are bytes: the smaller the likelier."""
    rows: list[dict[str, Any] | None] = [None]
    for token in text.encode()[1:]:
        entries = {token: token + 1} | {token + n: n + 1 for n in range(count)}
        rows.append({str(each): scored(each, rank) for each, rank in entries.items()})
    return rows


def scored(token: int, rank: int) -> dict[str, Any]:
    text = bytes([token % 256]).decode(errors="replace")
    return {"logprob": -token / 100, "rank": rank, "decoded_token": text}


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_completions_are_in_its_choice(mesh: FakeMesh, count: int) -> None:
    mesh.remote = True
    answer = await ask(mesh, prompt_logprobs=count)
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == told("hé", count)
    assert "prompt_logprobs" not in answer
    assert (choice["text"], choice["logprobs"]) == ("Hel", None)
    assert not mesh.prefill.starts  # decode scores the prompt, so it computes it
    await mesh.idle()


async def test_a_chats_are_beside_its_choices(mesh: FakeMesh) -> None:
    answer = await ask(mesh, CHAT, prompt_logprobs=2)
    assert answer["prompt_logprobs"] == told("user:hé", 2)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "Hel"
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_they_are_there_only_if_asked_for(mesh: FakeMesh, path: str) -> None:
    for more in ({}, {"prompt_logprobs": None}):
        assert "prompt_logprobs" not in (await post(mesh, path, **more)).text
    assert not mesh.decode.starts[0].sampling.HasField("prompt_logprobs")


async def test_a_prompt_of_one_token_has_one_that_nothing_predicts(mesh: FakeMesh) -> None:
    answer = await ask(mesh, prompt="x", prompt_logprobs=1)
    assert answer["choices"][0]["prompt_logprobs"] == [None]


async def test_each_choice_has_its_prompts_and_one_is_asked(mesh: FakeMesh) -> None:
    answer = await ask(mesh, prompt=["ab", "c"], n=2, prompt_logprobs=1)
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [told("ab", 1), told("ab", 1), told("c", 1), told("c", 1)]
    assert [choice["text"] for choice in answer["choices"]] == ["Hel"] * 4
    asked = [start.sampling.HasField("prompt_logprobs") for start in mesh.decode.starts]
    assert sorted(asked) == [False, False, True, True]


@pytest.mark.parametrize(("own", "echoed"), [(1, 3), (3, 1), (2, 2), (0, 0)])
async def test_an_echo_has_as_many_as_it_asks_for(mesh: FakeMesh, own: int, echoed: int) -> None:
    answer = await ask(mesh, echo=True, logprobs=echoed, prompt_logprobs=own)
    (choice,) = answer["choices"]
    assert choice["prompt_logprobs"] == told("hé", own)
    assert choice["text"] == "héHel"
    top = choice["logprobs"]["top_logprobs"]
    assert len(top) == len("hé".encode()) + 3
    assert top[0] is None
    assert mesh.decode.starts[0].sampling.prompt_logprobs == max(own, echoed)
    # At the place of the 2nd byte of é its text is not complete, so names may coincide.
    assert [len(row) for row in top[3:]] == [max(echoed, 1)] * 3


async def test_an_echo_without_log_probabilities_stays_as_it_is(mesh: FakeMesh) -> None:
    (choice,) = (await ask(mesh, echo=True, prompt_logprobs=1))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("héHel", None)
    assert choice["prompt_logprobs"] == told("hé", 1)


async def test_a_prompt_alone_can_be_asked_for(mesh: FakeMesh) -> None:
    answer = await ask(mesh, echo=True, max_tokens=0, prompt_logprobs=1, n=2)
    for choice in answer["choices"]:
        assert choice["text"] == "hé"
        assert choice["prompt_logprobs"] == told("hé", 1)
    assert answer["usage"]["completion_tokens"] == 0
    await mesh.idle()


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_they_are_refused_with_a_stream(mesh: FakeMesh, path: str) -> None:
    response = await post(mesh, path, prompt_logprobs=1, stream=True)
    assert (response.status_code, error_of(response.content)["param"]) == (400, "prompt_logprobs")
    assert not mesh.tokenizer.starts


async def test_they_survive_a_worker_that_fails() -> None:
    failures = [EngineError("broken")]

    async def once(fake: FakeDecode, start: Any, emit: Emit) -> FinishReason:
        if failures:
            raise failures.pop()
        return await fakes.say(fake, start, emit)

    async with fake_mesh(app, CONFIG, decodes=2) as two:
        for decode in two.decodes:
            decode.script = once
        (choice,) = (await ask(two, prompt_logprobs=1))["choices"]
        assert not failures
        assert choice["prompt_logprobs"] == told("hé", 1)


async def test_their_text_shows_special_tokens(mesh: FakeMesh) -> None:
    await ask(mesh, prompt_logprobs=0)
    kept = [start.keep_special for start in mesh.tokenizer.detokenizes]
    assert sorted(kept) == [False, True]  # the answer's, and the prompt's


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_bad_words_go_to_the_engines_as_token_ids(
    mesh: FakeMesh, path: str, remote: bool
) -> None:
    mesh.remote = remote
    await ask(mesh, path, bad_words=["ab", "c", "ab"])
    assert list(mesh.tokenizer.starts[0].bad_words) == ["ab", "c", "ab"]
    for start in (*mesh.prefill.starts, *mesh.decode.starts):
        words = [bytes(sequence.ids) for sequence in start.sampling.bad_words]
        assert words == [b"ab", b"c", b"ab"]
    assert len(mesh.prefill.starts) == remote


async def test_bad_words_are_encoded_once_for_many_prompts(mesh: FakeMesh) -> None:
    await ask(mesh, prompt=["a", "b", "c"], n=2, bad_words=["xyz"])
    assert sorted(len(start.bad_words) for start in mesh.tokenizer.starts) == [0, 0, 1]
    assert len(mesh.decode.starts) == 6
    for start in mesh.decode.starts:
        assert [bytes(sequence.ids) for sequence in start.sampling.bad_words] == [b"xyz"]


@pytest.mark.parametrize("words", [[""], ["x"] * 129, ["x" * 257], "x", [1]])
async def test_bad_words_are_refused_before_any_work(mesh: FakeMesh, words: Any) -> None:
    response = await post(mesh, bad_words=words)
    assert (response.status_code, error_of(response.content)["param"]) == (400, "bad_words")
    assert not mesh.tokenizer.starts


async def test_words_of_too_many_tokens_are_refused_by_name(mesh: FakeMesh) -> None:
    response = await post(mesh, bad_words=["x" * 100] * 11)
    assert (response.status_code, error_of(response.content)["param"]) == (400, "bad_words")
    assert not mesh.decode.starts
    await mesh.idle()
