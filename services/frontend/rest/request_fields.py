"""Every field of every request body, each described in one place.

These tables are what is read, what is refused, and what `/openapi.json` says.
"""

from services.frontend.rest.fields import (
    ARRAY,
    BIASES,
    BOOLEAN,
    CONTENT,
    INTEGER,
    NUMBER,
    OBJECT,
    PROMPTS,
    STRING,
    STRINGS,
    TOKEN_IDS,
    WORDS,
    Field,
    one_of,
)

ROLES = ("system", "developer", "user", "assistant", "tool")

DEFAULT_COMPLETION_TOKENS = 16
"""What `/v1/completions` generates when nothing is said: OpenAI's default."""

MAX_METADATA = 16
"""Entries of `metadata`: OpenAI's limit."""

_STREAM_OPTIONS = (
    Field("include_usage", BOOLEAN, "One more chunk at the end, with the usage.", False),
    Field(
        "continuous_usage_stats",
        BOOLEAN,
        "With include_usage: each chunk has the usage so far.",
        False,
    ),
    Field("include_obfuscation", BOOLEAN, "Padding of chunks.", False, only=(False,)),
)

PART = (
    Field("type", STRING, "Kind of part.", only=("text",), required=True),
    Field("text", STRING, "The text.", required=True),
)

MESSAGE = (
    Field("role", one_of(*ROLES), "Who speaks; a developer is the system.", required=True),
    Field("content", CONTENT, "The text, or parts of it, which are joined. null is empty."),
    Field("name", STRING, "Name of who speaks."),
    Field("tool_calls", ARRAY, "An assistant's calls, for the chat template."),
    Field("tool_call_id", STRING, "The call that a tool's message answers, for the template."),
    Field("reasoning", STRING, "An assistant's reasoning, for the template."),
    Field("reasoning_content", STRING, "The same by its older name."),
    Field("refusal", STRING, "Only as answers have it.", only=("",)),
    Field("annotations", ARRAY, "Only as answers have it.", only=([],)),
)

_MODEL = Field("model", STRING, "Name of the model.", required=True, limits={"minLength": 1})

_SAMPLING = (
    Field("temperature", NUMBER, "0 is greedy. Default: the model's."),
    Field("top_p", NUMBER, "Share of probability to sample from. Default: the model's."),
    Field("top_k", INTEGER, "Likeliest tokens to sample from; -1 or 0: all. Default: the model's."),
    Field("min_p", NUMBER, "Least probability, as a share of the likeliest token's."),
    Field("presence_penalty", NUMBER, "Subtracted from tokens that the answer has."),
    Field("frequency_penalty", NUMBER, "The same, for each time that it has them."),
    Field("repetition_penalty", NUMBER, "Divides logits of tokens in prompt and answer."),
    Field("seed", INTEGER, "Makes sampling reproducible."),
    Field("logit_bias", BIASES, "Token id to what is added to its logit."),
    Field(
        "allowed_token_ids",
        TOKEN_IDS,
        "The only tokens that may be sampled.",
        limits={"minItems": 1},
    ),
    Field("bad_words", WORDS, "Words that answers do not have, bare or behind a space."),
    Field("stop", STRINGS, "Texts that end the answer; it does not have them."),
    Field("stop_token_ids", TOKEN_IDS, "Tokens that end the answer."),
    Field("include_stop_str_in_output", BOOLEAN, "The answer keeps the stop text.", False),
    Field("ignore_eos", BOOLEAN, "Go on after the model's own end.", False),
    Field("min_tokens", INTEGER, "Tokens before anything may end the answer.", 0),
    Field("skip_special_tokens", BOOLEAN, "Special tokens do not show in the text.", True),
    Field("spaces_between_special_tokens", BOOLEAN, "Only the default.", True, only=(True,)),
    Field(
        "truncate_prompt_tokens",
        INTEGER,
        "Keep so many last tokens of a prompt; -1: as many as fit.",
        limits={"anyOf": [{"const": -1}, {"minimum": 1}], "maximum": 2**32 - 1},
    ),
    Field("n", INTEGER, "Answers to each prompt.", 1, limits={"minimum": 1}),
    Field("best_of", INTEGER, "Only 1, or the same as n.", limits={"minimum": 1}),
    Field("use_beam_search", BOOLEAN, "Only the default.", False, only=(False,)),
    Field("length_penalty", NUMBER, "Only the default.", 1.0, only=(1.0,)),
)

_COMMON = (
    _MODEL,
    *_SAMPLING,
    Field("stream", BOOLEAN, "Answer with server-sent events.", False),
    Field(
        "prompt_logprobs",
        INTEGER,
        "Return log probabilities of the prompt's tokens, and those of so many likeliest; "
        "not with stream.",
    ),
    Field("stream_options", OBJECT, "Only with stream.", inner=_STREAM_OPTIONS),
    Field(
        "return_tokens_as_token_ids",
        BOOLEAN,
        "Log probabilities name tokens as token_id:{id}.",
        False,
    ),
    Field(
        "priority",
        INTEGER,
        "Smaller goes first.",
        0,
        limits={"minimum": -(2**31), "maximum": 2**31 - 1},
    ),
    Field(
        "request_id",
        STRING,
        "Comes back as x-request-id, unless that header was sent.",
        limits={"pattern": "^[!-~]{1,128}$"},
    ),
    Field("user", STRING, "The caller's own note; says nothing of the answer."),
    Field(
        "metadata",
        OBJECT,
        "The caller's own notes; say nothing of the answer.",
        limits={"additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA},
    ),
    Field("store", BOOLEAN, "Nothing is stored.", False, only=(False,)),
    Field("service_tier", STRING, "There is one tier.", only=("auto", "default")),
    Field("safety_identifier", STRING, "The caller's own note."),
    Field("prompt_cache_key", STRING, "Names a session, as the header x-kvmesh-session does."),
)

_TEMPLATE = (
    Field(
        "add_generation_prompt",
        BOOLEAN,
        "The template opens the answer's turn. Default: unless the last message goes on.",
    ),
    Field(
        "continue_final_message",
        BOOLEAN,
        "The last message is left open; not with add_generation_prompt.",
        False,
    ),
    Field("chat_template", STRING, "A template of the request's own, where that is allowed."),
    Field("chat_template_kwargs", OBJECT, "Further variables of the template."),
    Field(
        "tools",
        ARRAY,
        "Shown to the template; calling them is not supported.",
        limits={"items": {"type": "object"}},
    ),
)

_MESSAGES = Field(
    "messages",
    ARRAY,
    "The conversation.",
    required=True,
    limits={"items": {"$ref": "#/components/schemas/Message"}, "minItems": 1},
)


def _add_special_tokens(default: bool) -> Field:
    return Field("add_special_tokens", BOOLEAN, "The tokenizer adds its own tokens (BOS).", default)


CHAT = (
    _MESSAGES,
    *_COMMON,
    Field("max_completion_tokens", INTEGER, "The same as max_tokens; wins.", within="max_tokens"),
    Field("max_tokens", INTEGER, "Longest answer. Default: as long as the context holds."),
    Field("logprobs", BOOLEAN, "Return log probabilities.", False),
    Field("top_logprobs", INTEGER, "With logprobs: those of so many likeliest.", within="logprobs"),
    *_TEMPLATE,
    _add_special_tokens(False),
    Field("echo", BOOLEAN, "The answer begins with the message that it goes on with.", False),
    Field("tool_choice", STRING, 'Must be "none" where there are tools.', only=("none",)),
    Field("parallel_tool_calls", BOOLEAN, "Says nothing where no tool is called."),
    Field("functions", ARRAY, "Tools by their older name.", only=([],)),
    Field("function_call", STRING, "tool_choice by its older name.", only=("none",)),
    Field("response_format", OBJECT, "Only the default.", only=({"type": "text"},)),
    Field("modalities", ARRAY, "Only the default.", only=(["text"],)),
)

TEXT = (
    Field("prompt", PROMPTS, "One prompt, or several, as text or token ids.", required=True),
    *_COMMON,
    Field(
        "max_tokens",
        INTEGER,
        "Longest answer. 0 with echo: the prompt alone.",
        limits={"minimum": 0, "default": DEFAULT_COMPLETION_TOKENS},
    ),
    Field("logprobs", INTEGER, "Return log probabilities, and those of so many likeliest."),
    Field("echo", BOOLEAN, "The answer begins with the prompt.", False),
    _add_special_tokens(True),
    Field("suffix", STRING, "Only none.", only=("",)),
    Field("response_format", OBJECT, "Only the default.", only=({"type": "text"},)),
)

_TOKENIZE = (
    _MODEL,
    Field("return_token_strs", BOOLEAN, "Only the default.", False, only=(False,)),
)

TOKENIZE_TEXT = (
    Field("prompt", STRING, "The text.", required=True, limits={"minLength": 1}),
    *_TOKENIZE,
    _add_special_tokens(True),
)

TOKENIZE_CHAT = (_MESSAGES, *_TOKENIZE, *_TEMPLATE, _add_special_tokens(False))

DETOKENIZE = (
    _MODEL,
    Field("tokens", TOKEN_IDS, "The token ids.", required=True, limits={"minItems": 1}),
)
