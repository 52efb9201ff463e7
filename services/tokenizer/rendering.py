"""Rendering of chat templates, in transformers' sandbox and in its very words."""

from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from kvmesh.errors import InvalidRequestError

_MAX_REASON = 200
"""Characters of a template's own error message that are passed on."""

_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
"""What templates raise on purpose, or over messages they did not expect."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a template is rendered with. All of it is JSON.

    `variables` may have none of the other fields' names.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def render(template: str, given: Rendering) -> str:
    """Return the prompt, as `apply_chat_template` does.

    Raises `InvalidRequestError`: naming `chat_template` for one that is broken or recurses
    too deeply, `continue_final_message` where the last message can't be left open, and
    `messages` for what the template refuses.
    """
    try:
        rendered, _ = render_jinja_template(
            conversations=[given.messages],
            tools=given.tools,
            chat_template=template,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            **given.variables,
        )
        return str(rendered[0])
    except (TemplateSyntaxError, SyntaxError) as error:  # Python's own: too many nested loops
        reason = f"the chat template is broken: {error}"[:_MAX_REASON]
        raise InvalidRequestError(reason, field="chat_template") from error
    except RecursionError as error:
        reason = "the chat template recurses too deeply"
        raise InvalidRequestError(reason, field="chat_template") from error
    except _REFUSALS as error:
        raise _refusal(error, given) from error


def _refusal(error: Exception, given: Rendering) -> InvalidRequestError:
    """Say why in words that quote no prompt: only a template's own words are passed on."""
    if type(error) is TemplateError:
        reason = f"the chat template refuses the messages: {error}"[:_MAX_REASON]
        return InvalidRequestError(reason, field="messages")
    if given.continue_final_message and type(error) is ValueError:
        return InvalidRequestError(
            "the chat template cannot leave the last message open", field="continue_final_message"
        )
    return InvalidRequestError("the chat template cannot render these messages", field="messages")
