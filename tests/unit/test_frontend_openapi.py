"""The API's own description agrees with what is read and what is answered."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from kvmesh.errors import InvalidRequestError
from kvmesh.rpc.status import TABLE
from kvmesh.types import (
    Completion,
    FinishReason,
    Sampling,
    TextLogprob,
    TextPrompt,
    TokenScore,
    Usage,
)
from services.frontend.answer import Piece
from services.frontend.config import LimitsConfig
from services.frontend.request import Request
from services.frontend.rest.answers import Chat, Shape, Text, Whole
from services.frontend.rest.body import parse
from services.frontend.rest.docs import page
from services.frontend.rest.errors import HttpError
from services.frontend.rest.openapi import document
from services.frontend.rest.request_fields import CHAT, TEXT
from services.frontend.rest.schemas import (
    Arrival,
    Call,
    parse_chat,
    parse_detokenize,
    parse_text,
    parse_tokenize,
)
from services.frontend.rest.sse import Chunks

DOCUMENT = document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]
USER = {"role": "user", "content": "hi"}

READERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ChatCompletionRequest": (parse_chat, {"model": "m", "messages": [USER]}),
    "CompletionRequest": (parse_text, {"model": "m", "prompt": "x"}),
    "TokenizeRequest": (parse_tokenize, {"model": "m", "prompt": "x"}),
    "DetokenizeRequest": (parse_detokenize, {"model": "m", "tokens": [1]}),
}


def schema(name: str) -> Any:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def fits(name: str, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema(name)).is_valid(value))


def taken(reader: Any, value: Any) -> bool:
    try:
        reader(parse(json.dumps(value).encode()), Arrival(1.0, "", ""), LimitsConfig())
    except InvalidRequestError:
        return False
    return True


def refs(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(refs, node.values()))
    return set().union(*map(refs, node)) if isinstance(node, list) else set()


def test_it_is_json_of_valid_schemas_and_refers_to_nothing_missing() -> None:
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1")
    for one in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(one)
    assert {ref.rpartition("/")[2] for ref in refs(DOCUMENT)} <= SCHEMAS.keys()


def test_every_status_of_a_failure_is_there() -> None:
    responses = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {str(row.http) for row in TABLE.values()} < responses.keys()
    assert {"200", "401", "408", "413", "415"} < responses.keys()
    assert "model_not_found" in responses["404"]["description"]


def test_every_field_is_described() -> None:
    for name, fields in (("ChatCompletionRequest", CHAT), ("CompletionRequest", TEXT)):
        assert list(SCHEMAS[name]["properties"]) == [field.name for field in fields]
        assert all(one["description"] for one in SCHEMAS[name]["properties"].values())


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 16, 20, 21, 100, 101, 2**31, 2**32, 2**63, -(2**63) - 1),
    *(0.5, 1.0, 1.5, -2.5, "", "x", "none", "auto", [], {}, [1], [-1], [2**32], ["x"], [[1]]),
    *([1.5], [None], {"5": 1}, {"5": 101}, {"x": 1}, {"a": "b"}, {"type": "text"}, ["text"], [{}]),
]

LOOSER = {
    # Of several fields at once, or of limits that are configured.
    *("max_tokens", "max_completion_tokens", "min_tokens", "best_of", "top_logprobs", "tools"),
    *("stream_options", "n", "tool_calls", "stop", "logit_bias", "messages", "prompt", "tokens"),
    "temperature",
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_described_is_what_is_read(name: str) -> None:
    reader, body = READERS[name]
    assert fits(name, body)
    forms = SCHEMAS[name].get("anyOf", [SCHEMAS[name]])
    for field in {field for form in forms for field in form["properties"]}:
        for value in VALUES:
            tried = {**body, field: value}
            described, read = fits(name, tried), taken(reader, tried)
            # null is as good as absent, also for fields of the other form.
            assert described or not read or value is None, (field, value)
            # JSON Schema counts 1.0 as an integer.
            looser = field in LOOSER or value == 1.0
            assert read or not described or looser, (field, value)


def test_what_is_not_described_is_refused() -> None:
    for name, (reader, body) in READERS.items():
        assert not fits(name, {**body, "unheard_of": 1})
        assert not taken(reader, {**body, "unheard_of": 1})


SCORE = TokenScore(1, b"a", -0.5)
PIECES = [
    Piece("a", 1, None, 0, (TextLogprob(SCORE, 0, (SCORE,)),), 1),
    Piece("", 1, Completion(FinishReason.STOP, Usage(1, 1)), 0, (), 1),
]


@pytest.mark.parametrize(("shape", "name"), [(Chat, "ChatCompletion"), (Text, "Completion")])
@pytest.mark.parametrize("logprobs", [False, True])
def test_answers_are_as_described(shape: Shape, name: str, logprobs: bool) -> None:
    sampling = Sampling(logprobs=1 if logprobs else None)
    request = Request("m", (TextPrompt("x"),), 1.0, sampling)
    call = Call(request, stream=True, include_usage=True, continuous_usage=logprobs)
    pieces = PIECES if logprobs else [Piece("a", 1), PIECES[1]]
    whole, chunks = Whole(shape, call, 1), Chunks(shape, call, 1)
    data = b""
    for piece in pieces:
        whole.add(piece)
        data += chunks.of(piece)
    jsonschema.validate(json.loads(whole.body()), schema(name), jsonschema.Draft202012Validator)
    for line in (data + chunks.end()).decode().split("\n\n")[:-2]:
        event = json.loads(line.removeprefix("data: "))
        jsonschema.validate(event, schema(f"{name}Chunk"), jsonschema.Draft202012Validator)


FIRST = TextLogprob(TokenScore(7, b"x", None), 0)


@pytest.mark.parametrize(("shape", "name"), [(Chat, "ChatCompletion"), (Text, "Completion")])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_prompts_log_probabilities_are_as_described(shape: Shape, name: str, rank: int) -> None:
    request = Request("m", (TextPrompt("x"),), 1.0, Sampling(prompt_logprobs=1))
    whole = Whole(shape, Call(request), 1)
    told = (FIRST, TextLogprob(SCORE, 0, (SCORE,), rank))
    for piece in (Piece("", 0, None, 0, (), 2, told), *PIECES):
        whole.add(piece)
    jsonschema.validate(json.loads(whole.body()), schema(name), jsonschema.Draft202012Validator)


def test_errors_are_as_described() -> None:
    assert fits("Error", json.loads(HttpError(404, "not_found", "x").body()))
    kinds = SCHEMAS["Error"]["properties"]["error"]["properties"]["type"]["enum"]
    assert {row.openai_type for row in TABLE.values()} == set(kinds)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := found.get(name))]
        self.ids += [value for value in [found.get("id")] if value]


def test_the_page_needs_nothing_from_elsewhere_and_runs_nothing() -> None:
    read = _Tags()
    read.feed(page(DOCUMENT).decode())
    assert not {"script", "link", "img", "iframe"} & set(read.tags)
    assert all(link.removeprefix("#") in read.ids for link in read.links)
    text = page(DOCUMENT).decode()
    for path in DOCUMENT["paths"]:
        assert path.replace("<", "") in text
    for field in (*CHAT, *TEXT):
        assert re.search(rf"<code>{field.name}</code>", text)


def test_the_page_escapes_what_it_shows() -> None:
    evil = "<script>alert(1)</script>"
    hostile = json.loads(json.dumps(DOCUMENT).replace("The text.", evil))
    hostile["info"]["version"] = evil
    hostile["paths"]["/health"]["get"]["summary"] = evil
    hostile["paths"][f"/{evil}"] = hostile["paths"]["/version"]
    text = page(hostile).decode()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
