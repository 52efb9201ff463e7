import pytest
from transformers import PreTrainedTokenizerFast

from kvmesh.errors import InvalidRequestError, RequestTooLargeError
from kvmesh.testing.tokenizer_folders import (
    SPECIAL_TOKENS,
    byte_level_folder,
    sentencepiece_folder,
    wordpiece_folder,
)
from kvmesh.types import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from services.tokenizer.codec import Codec

FOLDERS = [byte_level_folder, sentencepiece_folder, wordpiece_folder]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> Codec:
    return with_template(tmp_path_factory.mktemp("model"), TEMPLATE)


def with_template(folder, template, make=byte_level_folder) -> Codec:
    make(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Codec(folder)


def shown(codec, prompt, **options) -> str:
    """Return the prompt that the template wrote, control tokens as text."""
    ids = codec.encode(prompt, **options)
    detokenizer = codec.detokenizer(keep_special=True)
    return detokenizer.push(ids) + detokenizer.flush()


def one(content="x", role="user", extra="", **options):
    return ChatPrompt((ChatMessage(role, content, extra=extra),), **options)


def controls(ids):
    return [id_ for id_ in ids if id_ < len(SPECIAL_TOKENS)]


def transformers_ids(codec_folder, messages, **options):
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(codec_folder / "tokenizer.json"),
        chat_template=(codec_folder / "chat_template.jinja").read_text(encoding="utf-8"),
    )
    return reference.apply_chat_template(messages, **options)["input_ids"]


@pytest.mark.parametrize("make", FOLDERS)
@pytest.mark.parametrize("trim", ["", " | trim"])
@pytest.mark.parametrize("content", ["Sure, the capital is", "ends in space  ", "🙂 caf", ""])
def test_the_last_message_is_left_open_as_transformers_does(tmp_path, make, trim, content):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content" + trim + " }}<|im_end|>\n"
        "{% endfor %}"
    )
    codec = with_template(tmp_path, template, make)
    prompt = ChatPrompt(
        (ChatMessage("user", "What?"), ChatMessage("assistant", content)),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    messages = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    ids = codec.encode(prompt)
    assert ids == transformers_ids(tmp_path, messages, continue_final_message=True)
    specials = [id_ for id_ in ids if id_ == codec.encode(TextPrompt("<|im_end|>", False))[0]]
    assert len(specials) == 1


def test_an_open_last_message_keeps_typed_special_tokens_as_text(codec):
    prompt = one(
        "a <|im_end|> b <",
        "assistant",
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert controls(codec.encode(prompt)) == [1]
    assert shown(codec, prompt) == "<|im_start|>assistant\na <|im_end|> b <"


def test_an_open_last_message_and_a_generation_prompt_exclude_each_other(codec):
    with pytest.raises(InvalidRequestError, match="exclude") as caught:
        codec.encode(one(continue_final_message=True))
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].role }}", "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"],
)
def test_a_template_that_drops_the_last_message_cannot_leave_it_open(tmp_path, template):
    codec = with_template(tmp_path, template)
    prompt = one("secret", add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError) as caught:
        codec.encode(prompt)
    assert caught.value.field == "continue_final_message"
    assert "secret" not in caught.value.message


def test_a_template_that_recurses_for_ever_is_a_bad_request(tmp_path):
    codec = with_template(
        tmp_path, "{% macro f() %}{{ f() }}{% endmacro %}{% if messages %}{{ f() }}{% endif %}"
    )
    with pytest.raises(InvalidRequestError, match="recurses"):
        codec.encode(one())


def test_a_template_of_a_request_is_refused_unless_allowed(codec):
    with pytest.raises(InvalidRequestError, match="not allowed") as caught:
        codec.encode(one(template="x"))
    assert caught.value.field == "chat_template"


def test_a_template_of_a_request_goes_where_it_may_run(tmp_path):
    folder = byte_level_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    asked = []

    def render(template, given):
        asked.append((template, given.messages))
        return "<|im_start|>" + given.messages[0]["content"]

    codec = Codec(folder, render_foreign=render)
    assert controls(codec.encode(one("a<|im_end|>", template="T"))) == [1]
    assert asked[0][0] == "T"
    with pytest.raises(InvalidRequestError, match="no chat template"):
        codec.encode(one())


@pytest.mark.parametrize("make", FOLDERS)
def test_special_tokens_of_the_tokenizer_are_added_or_not(tmp_path, make):
    codec = Codec(make(tmp_path))
    bos = [1] if make is sentencepiece_folder else []
    assert codec.encode(TextPrompt("the")) == [*bos, *codec.encode(TextPrompt("the", False))]
    plain = codec.encode(one())
    assert codec.encode(one(add_special_tokens=True)) == [*bos, *plain]
    typed = codec.encode(one("<file_sep>"))
    assert codec.encode(one("<file_sep>", add_special_tokens=True)) == [*bos, *typed]


@pytest.mark.parametrize(
    "prompt",
    [TextPrompt("the capital of France"), one("the capital"), TokenPrompt(tuple(range(5, 25)))],
)
def test_truncation_keeps_the_last_tokens(codec, prompt):
    ids = codec.encode(prompt)
    for size in (1, 3, len(ids), len(ids) + 1, 2**32 - 1):
        assert codec.encode(prompt, truncate_to=size) == ids[-size:]
    assert codec.encode(prompt, truncate_to=0) == ids


def test_truncation_lets_no_bad_id_pass(codec):
    with pytest.raises(InvalidRequestError):
        codec.encode(TokenPrompt((10**6, 5)), truncate_to=1)


@pytest.mark.parametrize("field", ["tools", "template_kwargs", "template"])
def test_all_parts_of_a_conversation_count_against_the_limit(tmp_path, field):
    codec = Codec(byte_level_folder(tmp_path), max_prompt_chars=100)
    with pytest.raises(RequestTooLargeError):
        codec.encode(one(**{field: " " * 100}))
    with pytest.raises(RequestTooLargeError):
        codec.encode(one(extra=" " * 100))


def test_a13_a_conversation_and_its_rendered_text_have_the_same_ids(codec):
    prompt = ChatPrompt((ChatMessage("user", "foo "), ChatMessage("assistant", "bar")))
    text = shown(codec, prompt)
    assert codec.encode(TextPrompt(text)) == codec.encode(prompt)
    assert codec.encode(TokenPrompt(tuple(codec.encode(prompt)))) == codec.encode(prompt)


@pytest.mark.parametrize("make", FOLDERS)
def test_a13_a_conversation_extended_by_a_turn_extends_its_ids(tmp_path, make):
    codec = with_template(tmp_path, TEMPLATE, make)
    turns = tuple(ChatMessage(role, "foo ") for role in ("user", "assistant", "user"))
    first = codec.encode(ChatPrompt(turns[:1], add_generation_prompt=False))
    second = codec.encode(ChatPrompt(turns, add_generation_prompt=False))
    # All but what the next turn's first characters could have been merged with.
    common = len(first) - 1
    assert second[:common] == first[:common]
