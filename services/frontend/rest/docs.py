"""`/docs`: the API's description as one page of HTML that needs nothing from elsewhere."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1rem }
code, .type { font-family: ui-monospace, monospace; font-size: 13px }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
  border-bottom: 1px solid #8882 }
.type { color: #777 }
:root { color-scheme: light dark }
"""

_WORDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
    ("enum", "one of"),
    ("default", "default"),
)


def page(document: Mapping[str, Any]) -> bytes:
    """Return the page of an OpenAPI document; everything from the document is escaped."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    body = "".join(
        [
            *(_operations(document)),
            *(_schema(name, one) for name, one in document["components"]["schemas"].items()),
        ]
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info['description'])}</p>{body}</html>"
    ).encode()


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation['summary'])}</p>"
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                yield f"<p>Body: {_type(schema)}</p>"
            yield _rows(_response(*item) for item in operation["responses"].items())


def _response(status: str, response: Mapping[str, Any]) -> tuple[str, str, str]:
    kinds = [
        f"{escape(kind)}: {_type(content['schema'])}"
        for kind, content in response["content"].items()
    ]
    return status, "<br>".join(kinds), escape(response["description"])


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    head = f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
    forms = schema.get("anyOf", [schema])
    return head + "<p>or</p>".join(_rows(_fields(form)) for form in forms)


def _fields(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield a row for each field, and for those of the objects in it."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        notes = [field.get("description", "")]
        notes += [f"{words} {json.dumps(field[key])}" for key, words in _WORDS if key in field]
        notes += ["required"] if name in required else []
        yield path + name, _type(field), escape("; ".join(note for note in notes if note))
        inner = field.get("items", field)
        yield from _fields(inner, f"{path}{name}.")


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema and "type" not in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "items" in schema:
        return f"array of {_type(schema['items'])}"
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "value")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    return f'<span class="type">{escape(kind)}</span>'


def _rows(rows: Iterator[tuple[str, str, str]]) -> str:
    cells = (
        f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{text}</tr>" for name, kind, text in rows
    )
    return f"<table>{''.join(cells)}</table>"
