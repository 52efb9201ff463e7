"""Conversations into text, by the model's own chat template or by the request's."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvmesh.config import ConfigError
from kvmesh.errors import InvalidRequestError
from kvmesh.types import ChatPrompt
from services.tokenizer.conversation import VARIABLES_FIELD, Conversation
from services.tokenizer.rendering import Rendering, render

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "conversations",
        "tokenize",
        "return_assistant_tokens_mask",
    }
)
"""Variables that a request may not set beside the fields that are for them."""

Render = Callable[[str, Rendering], str]
"""Renders a template of a request, where it can do no harm; raises as `render` does."""


class ChatTemplates:
    """The chat template of a model folder, and those that requests bring along.

    Templates are rendered as transformers' `apply_chat_template` does, the model's special
    tokens (`bos_token` and the like) in their variables.
    """

    def __init__(
        self,
        template: str | None,
        special_tokens: Mapping[str, str],
        render_foreign: Render | None = None,
    ) -> None:
        """Compile the model's template. Raises `ConfigError` when it can't be.

        `template` None: the model has none. `render_foreign` None: those of requests are
        refused.
        """
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._render_foreign = render_foreign
        if template is not None:
            _try_out(template, self._special_tokens)

    def render(self, chat: ChatPrompt, conversation: Conversation) -> str:
        """Return the prompt: `conversation`, which is of `chat`, perhaps with marks.

        Raises `InvalidRequestError` for what the template refuses, for variables that are
        not to be set, and where there is no template to use.
        """
        self._check(chat, conversation)
        given = Rendering(
            conversation.messages,
            conversation.tools,
            self._special_tokens | conversation.variables,
            chat.add_generation_prompt,
            chat.continue_final_message,
        )
        if chat.template:
            return self._foreign()(chat.template, given)
        if self._template is None:
            raise InvalidRequestError("the model has no chat template", field="messages")
        return render(self._template, given)

    def _check(self, chat: ChatPrompt, conversation: Conversation) -> None:
        for name in conversation.variables:
            if name in RESERVED or name in self._special_tokens:
                raise InvalidRequestError(
                    f"{VARIABLES_FIELD} may not set {name}", field=VARIABLES_FIELD
                )
        if chat.add_generation_prompt and chat.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                field="continue_final_message",
            )

    def _foreign(self) -> Render:
        if self._render_foreign is None:
            raise InvalidRequestError(
                "chat templates of requests are not allowed here", field="chat_template"
            )
        return self._render_foreign


def load_templates(folder: Path, render_foreign: Render | None = None) -> ChatTemplates:
    """Return the folder's chat template, if the model has one.

    It is `chat_template.jinja`, else what `tokenizer_config.json` holds; of several
    named ones, `default`.
    """
    config = load_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    template = None if source is None else str(source)
    return ChatTemplates(template, _special_tokens(config), render_foreign)


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


def _try_out(template: str, special_tokens: Mapping[str, str]) -> None:
    """Render an empty conversation, which compiles; many templates refuse it."""
    try:
        render(template, Rendering([], variables=dict(special_tokens)))
    except InvalidRequestError as error:
        if error.field == "chat_template":
            raise ConfigError(f"model.path: {error.message}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and the like by name, as templates refer to them."""
    found: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found
