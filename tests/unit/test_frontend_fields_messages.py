"""Conversations: shapes of messages, and what goes to the chat template as it is."""

import json
from typing import Any

import pytest

from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatMessage, ChatPrompt
from services.frontend.config import LimitsConfig
from services.frontend.rest.body import parse
from services.frontend.rest.schemas import Arrival, parse_chat, parse_tokenize

ARRIVAL = Arrival(deadline=10.0, traceparent="", caller_id="")
USER = {"role": "user", "content": "hi"}


def written(body: str, reader: Any = parse_chat) -> ChatPrompt:
    (prompt,) = reader(parse(body.encode()), ARRIVAL, LimitsConfig()).request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def chat(**more: Any) -> ChatPrompt:
    return written(json.dumps({"model": "m", "messages": [USER], **more}))


def refused(**more: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**more)
    assert caught.value.field
    assert caught.value.field in caught.value.message
    return caught.value.field


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": None}, ""),
        ({"role": "assistant", "content": None, "tool_calls": []}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "user", "content": None}, ""),
        ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": "None"}, "None"),
        ({"role": "user", "content": parts("a", "b")}, "ab"),
        ({"role": "user", "content": parts("a", "", "\n", "b")}, "a\nb"),
        ({"role": "system", "content": parts("")}, ""),
        ({"role": "tool", "content": "x"}, "x"),
        ({"role": "assistant", "content": "x", "refusal": None, "annotations": []}, "x"),
        ({"role": "assistant", "content": "x", "refusal": "", "audio": None}, "x"),
    ],
)
def test_a17_message_shapes_that_are_taken(message: dict[str, Any], content: str) -> None:
    for before in ([], [USER], [{"role": "system", "content": "x"}] * 3):
        messages = chat(messages=[*before, message]).messages
        assert messages[-1] == ChatMessage(message["role"], content)
        assert len(messages) == len(before) + 1


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("x", ""),
        (None, ""),
        ([], ""),
        ({}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "tool"}, ".content"),
        ({"role": "user", "content": []}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": False}, ".content"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, ".content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0]"),
        ({"role": "user", "content": [*parts("a"), {"type": "video"}]}, ".content[1]"),
        ({"role": "user", "content": [{"text": "a"}]}, ".content[0]"),
        ({"role": "user", "content": ["a"]}, ".content[0]"),
        ({"role": "user", "content": [None]}, ".content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, ".content[0].text"),
        ({"role": "user", "content": [{**parts("a")[0], "x": 1}]}, ".content[0].x"),
        ({"content": "x"}, ".role"),
        ({"role": "", "content": "x"}, ".role"),
        ({"role": "function", "content": "x"}, ".role"),
        ({"role": 5, "content": "x"}, ".role"),
        ({"role": "user", "content": "x", "name": 5}, ".name"),
        ({"role": "user", "content": "x", "audio": {"id": "1"}}, ".audio"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, ".refusal"),
        ({"role": "assistant", "content": "x", "function_call": {}}, ".function_call"),
        ({"role": "assistant", "tool_calls": "x"}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, ".tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, ".tool_call_id"),
    ],
)
def test_a17_message_shapes_that_are_refused(message: Any, field: str) -> None:
    assert refused(messages=[message]) == f"messages[0]{field}"
    assert refused(messages=[USER, USER, message]) == f"messages[2]{field}"


def test_developers_are_the_system() -> None:
    prompt = chat(messages=[{"role": "developer", "content": "x", "name": "n"}])
    assert prompt == ChatPrompt((ChatMessage("system", "x", "n"),))


CALL = (
    '{"id":"1" , "function":{"name":"f","arguments":"{\\"n\\": 9007199254740993}"}, "z":1.0,"a":2}'
)


def test_a19_calls_of_the_history_are_as_they_were_written() -> None:
    prompt = written(
        '{"model":"m","messages":[{"role":"user","content":"]}\\""},'
        '{"tool_calls":[' + CALL + '],"role":"assistant","content":null,"reasoning":"r"},'
        '{"role":"tool","tool_call_id":"1","content":"42"}, {"role":"user","content":"x"}]}'
    )
    assert [message.extra for message in prompt.messages] == [
        "",
        f'{{"tool_calls":[{CALL}],"reasoning":"r"}}',
        '{"tool_call_id":"1"}',
        "",
    ]


TOOLS = (
    '[{"type":"function","function":{"name":"f","parameters":{"minLength":5, "enum":[1,2],'
    '"big":9007199254740993,"bigger":18446744073709551616,"b":1.0,"a":'
    + '{"x":' * 34
    + "1"
    + "}" * 34
    + "}}}]"
)


def test_a19_tools_are_as_they_were_written() -> None:
    prompt = written(
        f'{{"messages":[{json.dumps(USER)}],"tools": {TOOLS} ,"tool_choice":"none","model":"m",'
        '"chat_template_kwargs": {"b": 1.50, "a": 18446744073709551616} }'
    )
    assert prompt.tools == TOOLS
    assert prompt.template_kwargs == '{"b": 1.50, "a": 18446744073709551616}'


def test_tools_are_only_shown_where_none_is_to_be_called() -> None:
    assert chat(tools=[]).tools == chat(tools=None).tools == ""
    assert chat(tools=[], tool_choice="none").tools == ""
    assert refused(tools=[{"type": "function"}]) == "tools"
    assert refused(tools=[{"type": "function"}], tool_choice="auto") == "tool_choice"
    assert refused(tools=[1], tool_choice="none") == "tools"
    body = f'{{"model":"m","messages":[{json.dumps(USER)}],"tools":{TOOLS}}}'
    assert written(body, parse_tokenize).tools == TOOLS


def test_variables_of_the_template() -> None:
    assert chat(chat_template_kwargs={}).template_kwargs == ""
    assert chat(chat_template="{{ x }}").template == "{{ x }}"
    assert chat(chat_template="").template == ""


@pytest.mark.parametrize(
    ("opens", "goes_on", "read"),
    [
        (None, None, (True, False)),
        (True, None, (True, False)),
        (False, None, (False, False)),
        (None, True, (False, True)),
        (False, True, (False, True)),
        (True, False, (True, False)),
    ],
)
def test_the_last_message_is_open_or_the_next_one(opens: Any, goes_on: Any, read: Any) -> None:
    prompt = chat(add_generation_prompt=opens, continue_final_message=goes_on)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == read
    both = refused(add_generation_prompt=True, continue_final_message=True)
    assert both == "continue_final_message"
