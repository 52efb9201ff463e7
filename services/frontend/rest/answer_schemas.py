"""JSON Schema of what is answered, for the API's own description."""

from typing import Any

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_NUMBER_OR_NULL = {"type": ["number", "null"]}
_STRING_OR_NULL = {"type": ["string", "null"]}
_FINISH = {"enum": ["stop", "length"]}
_FINISH_OR_NULL = {"enum": ["stop", "length", None]}
_NULL = {"type": "null"}


def _object(optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """Return an object of these fields, of which but the `optional` ones are always there."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, _NULL]}


def _answer(choice: Any, kind: str, *, chunk: bool, **more: Any) -> dict[str, Any]:
    """Return an answer; `more` fields are there only at times."""
    usage = _or_null(_ref("Usage")) if chunk else _ref("Usage")
    return _object(
        ("usage", *more) if chunk else (*more,),
        id=_STRING,
        object={"const": kind},
        created={**_INTEGER, "description": "Unix seconds."},
        model=_STRING,
        choices=_array(choice),
        usage=usage,
        **more,
    )


_STOP = {
    "type": ["string", "integer", "null"],
    "description": "The stop string or stop token id that ended it; null: the model's own end.",
}

_SCORED: dict[str, Any] = {
    "token": _STRING,
    "logprob": _NUMBER,
    "bytes": _array(_INTEGER),
}

_DELTA = _object(("role", "content"), role={"const": "assistant"}, content=_STRING)

_TEXT_CHOICE: dict[str, Any] = {
    "index": _INTEGER,
    "text": _STRING,
    "logprobs": _or_null(_ref("TextLogprobs")),
}

ERROR = _object(
    error=_object(
        message=_STRING,
        type={
            "enum": [
                "invalid_request_error",
                "rate_limit_error",
                "timeout_error",
                "server_error",
            ]
        },
        param={**_STRING_OR_NULL, "description": "The field at fault."},
        code=_STRING,
    )
)

ANSWERS: dict[str, Any] = {
    "Usage": _object(
        ("prompt_tokens_details",),
        prompt_tokens=_INTEGER,
        completion_tokens=_INTEGER,
        total_tokens=_INTEGER,
        prompt_tokens_details=_object(cached_tokens=_INTEGER),
    ),
    "ChatLogprobs": _object(
        content=_array(_object(**_SCORED, top_logprobs=_array(_object(**_SCORED)))),
        refusal=_NULL,
    ),
    "TextLogprobs": _object(
        tokens=_array(_STRING),
        token_logprobs=_array(_NUMBER_OR_NULL),
        top_logprobs=_array(
            {"type": ["object", "null"], "additionalProperties": _NUMBER},
        ),
        text_offset=_array(_INTEGER),
    ),
    "PromptLogprobs": {
        "description": "One entry for each token of the prompt, null for the first. By token id: "
        "the prompt's own token, and the likeliest ones.",
        **_array(
            {
                "type": ["object", "null"],
                "additionalProperties": _object(
                    logprob=_NUMBER, rank={"type": ["integer", "null"]}, decoded_token=_STRING
                ),
            }
        ),
    },
    "ChatCompletion": _answer(
        _object(
            index=_INTEGER,
            message=_object(role={"const": "assistant"}, content=_STRING, refusal=_NULL),
            logprobs=_or_null(_ref("ChatLogprobs")),
            finish_reason=_FINISH,
            stop_reason=_STOP,
        ),
        "chat.completion",
        chunk=False,
        prompt_logprobs=_ref("PromptLogprobs"),
    ),
    "ChatCompletionChunk": _answer(
        _object(
            ("logprobs", "stop_reason"),
            index=_INTEGER,
            delta=_DELTA,
            logprobs=_ref("ChatLogprobs"),
            finish_reason=_FINISH_OR_NULL,
            stop_reason=_STOP,
        ),
        "chat.completion.chunk",
        chunk=True,
    ),
    "Completion": _answer(
        _object(
            ("prompt_logprobs",),
            **_TEXT_CHOICE,
            finish_reason=_FINISH,
            stop_reason=_STOP,
            prompt_logprobs=_ref("PromptLogprobs"),
        ),
        "text_completion",
        chunk=False,
    ),
    "CompletionChunk": _answer(
        _object(
            ("stop_reason",),
            **_TEXT_CHOICE,
            finish_reason=_FINISH_OR_NULL,
            stop_reason=_STOP,
        ),
        "text_completion",
        chunk=True,
    ),
    "Tokens": _object(
        count=_INTEGER,
        max_model_len={"type": ["integer", "null"]},
        tokens=_array(_INTEGER),
        token_strs=_NULL,
    ),
    "Detokenized": _object(prompt=_STRING),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_INTEGER,
        owned_by=_STRING,
        max_model_len={"type": ["integer", "null"]},
    ),
    "ModelList": _object(object={"const": "list"}, data=_array(_ref("Model"))),
    "Health": _object(status={"const": "ok"}),
    "Ready": _object(("models",), status={"const": "ready"}, models=_array(_STRING)),
    "Version": _object(version=_STRING),
}
