"""Conversations into text, by the model's own chat template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from kvmesh.config import ConfigError
from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatMessage, ChatPrompt

_MAX_REASON = 200
"""Characters of a template's own error message that are passed on."""

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
"""What templates raise on purpose, or over messages they did not expect."""


class ChatTemplate:
    """The chat template of a model folder, in transformers' sandbox.

    It is rendered as `apply_chat_template` does, special tokens in its variables.
    """

    def __init__(self, template: str, variables: Mapping[str, object]) -> None:
        """Compile the template. Raises `ConfigError` when it can't be."""
        self._template = template
        self._variables = dict(variables)
        try:
            self._render([], add_generation_prompt=True)
        except TemplateSyntaxError as error:
            raise ConfigError(f"model.path: the chat template is broken: {error}") from error
        except _REFUSALS:
            pass  # many templates refuse an empty conversation

    def render(self, chat: ChatPrompt) -> str:
        """Return the prompt. Raises `InvalidRequestError` for what the template refuses."""
        messages = [_as_template_sees(message) for message in chat.messages]
        try:
            return self._render(messages, add_generation_prompt=chat.add_generation_prompt)
        except _REFUSALS as error:
            raise InvalidRequestError(_why(error), field="messages") from error

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )
        return str(rendered[0])


def load_template(folder: Path) -> ChatTemplate | None:
    """Return the folder's chat template, None if the model has none.

    It is `chat_template.jinja`, else what `tokenizer_config.json` holds; of several
    named ones, `default`.
    """
    config = load_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if source is None:
        return None
    return ChatTemplate(str(source), _special_tokens(config))


def load_json(file: Path) -> dict[str, Any]:
    """Return a JSON object of the model folder, empty if the file is not there."""
    if not file.exists():
        return {}
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {file.name} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model.path: {file.name} is not a JSON object")
    return loaded


def _special_tokens(config: Mapping[str, Any]) -> dict[str, object]:
    """Return `bos_token` and the like by name, as templates refer to them."""
    found: dict[str, object] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _as_template_sees(message: ChatMessage) -> dict[str, str]:
    seen = {"role": message.role, "content": message.content}
    return seen | {"name": message.name} if message.name else seen


def _why(error: Exception) -> str:
    """Say why in words that quote no prompt: only a template's own words are passed on."""
    if type(error) is TemplateError:
        return f"the chat template refuses the messages: {error}"[:_MAX_REASON]
    return "the chat template cannot render these messages"
