"""The small REST client, against answers good and bad."""

import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from kvmesh.cli import rest
from kvmesh.cli.console import CommandError

URL = "http://frontend"
ASK = rest.Ask([{"role": "user", "content": "Hi"}], max_tokens=5)

make_client = rest._client

Answer = Callable[[httpx.Request], httpx.Response]
Serve = Callable[[Answer], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def with_answer(answer: Answer) -> None:
        def client(url: str, _seconds: float, api_key: str = "") -> httpx.AsyncClient:
            real = make_client(url, 1.0, api_key)
            transport = httpx.MockTransport(answer)
            return httpx.AsyncClient(base_url=url, headers=real.headers, transport=transport)

        monkeypatch.setattr(rest, "_client", client)

    return with_answer


def events(*data: object) -> httpx.Response:
    lines = [d if isinstance(d, str) else json.dumps(d) for d in data]
    return httpx.Response(200, text=": hello\n\n" + "".join(f"data: {d}\n\n" for d in lines))


def delta(text: str | None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


async def collect(texts: AsyncIterator[str]) -> list[str]:
    return [text async for text in texts]


async def test_an_answer_comes_in_pieces(serve: Serve) -> None:
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        role = {"choices": [{"delta": {"role": "assistant"}}]}
        return events(role, delta("Pa"), delta(None), delta("ris"), {"choices": []}, "[DONE]")

    serve(answer)
    assert await collect(rest.chat(URL, "m", ASK)) == ["Pa", "ris"]
    assert asked == [
        {"model": "m", "messages": ASK.messages, "stream": True, "max_tokens": 5},
    ]


async def test_an_error_is_shown_in_its_own_words(serve: Serve) -> None:
    serve(lambda _: httpx.Response(404, json={"error": {"message": "no model 'm'"}}))
    with pytest.raises(CommandError, match=r"^no model 'm'$"):
        await collect(rest.chat(URL, "m", ASK))
    serve(lambda _: httpx.Response(502, text="<html>"))
    with pytest.raises(CommandError, match="HTTP status 502"):
        await collect(rest.chat(URL, "m", ASK))


async def test_an_answer_that_breaks_off_is_an_error(serve: Serve) -> None:
    serve(lambda _: events(delta("Pa"), {"error": {"message": "worker died"}}))
    with pytest.raises(CommandError, match="broke off: worker died"):
        await collect(rest.chat(URL, "m", ASK))
    serve(lambda _: events(delta("Pa")))
    with pytest.raises(CommandError, match="ended too early"):
        await collect(rest.chat(URL, "m", ASK))


async def test_silence_and_absence_are_told_apart(serve: Serve) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    serve(refuse)
    with pytest.raises(CommandError, match="nothing answers at http://frontend"):
        await collect(rest.chat(URL, "m", ASK))
    assert not await rest.is_ready(URL)
    serve(hang)
    with pytest.raises(CommandError, match="silent for too long"):
        await rest.first_model(URL)


async def test_the_first_model_and_readiness(serve: Serve) -> None:
    serve(lambda _: httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]}))
    assert await rest.first_model(URL) == "a"
    assert await rest.is_ready(URL)
    serve(lambda _: httpx.Response(200, json={"data": []}))
    with pytest.raises(CommandError, match="serves no model now"):
        await rest.first_model(URL)
    serve(lambda _: httpx.Response(503, json={"error": {"message": "not yet"}}))
    assert not await rest.is_ready(URL)
    with pytest.raises(CommandError, match="not yet"):
        await rest.first_model(URL)


async def test_a_key_is_shown_if_there_is_one(serve: Serve) -> None:
    shown: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"data": [{"id": "a"}]})

    serve(answer)
    assert await rest.first_model(URL, "k") == "a"
    assert await rest.first_model(URL) == "a"
    assert shown == ["Bearer k", None]
