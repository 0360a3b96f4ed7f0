"""HTML pages: the start page and the API's documentation. They have no scripts and load nothing."""

from __future__ import annotations

import functools
import html
import re

from weft.server.openapi import OPERATIONS, SHAPES, Struct, default_text, description_of, openapi, type_text
from weft.version import __version__

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#222;background:#fff}"
    "code{background:#f2f2f2;padding:.1em .3em;border-radius:3px}pre{overflow-x:auto}"
    "table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left;vertical-align:top}h2{margin-top:2.5rem}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}code{background:#333}td,th{border-color:#444}}"
)


@functools.cache
def docs_page(*, needs_key: bool) -> bytes:
    """The OpenAPI document as an HTML page."""
    document = openapi(needs_key=needs_key)
    said = document["info"]["description"] if needs_key else "This server asks for no API key."
    parts = [f"<h1>Weft {html.escape(__version__)}</h1><p>The same as <code>/openapi.json</code>. {_code(said)}</p>"]
    for op in OPERATIONS:
        parts.append(f"<h2><code>{op.method} {html.escape(op.path)}</code></h2><p>{html.escape(op.summary)}</p>")
        if op.request is not None:
            parts.append("<h3>Request</h3>" + _table(op.request))
        if op.response is not None:
            parts.append("<h3>Answer</h3>" + _table(op.response))
    shapes = "".join(f"<h3>{shape.__name__}</h3>{_table(shape)}" for shape in SHAPES)
    return _page("Weft API", "".join(parts) + "<h2>Objects inside requests</h2>" + shapes)


def start_page(curl: str, model: str | None) -> bytes:
    """The HTML page at `/`; `curl` is an example command."""
    serves = f"<p>It serves <code>{html.escape(model)}</code>.</p>" if model is not None else ""
    return _page(
        "Weft",
        f"<h1>Weft {html.escape(__version__)}</h1><p>A server of language models with OpenAI's API.</p>{serves}"
        f"<p>Try it:</p><pre><code>{html.escape(curl)}</code></pre>"
        "<p><a href=/docs>Requests and answers</a>, as <a href=/openapi.json>OpenAPI</a>; "
        "<a href=/v1/models>models</a>; <a href=/metrics>metrics</a>; <a href=/health>health</a>.</p>",
    )


def _page(title: str, body: str) -> bytes:
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style>{body}</html>"
    ).encode()


def _code(text: str) -> str:
    """Text with `code`, as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _table(struct: Struct) -> str:
    schema = openapi()["components"]["schemas"][struct.__name__]
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        kind = html.escape(type_text(field))
        text = "required" if name in required else default_text(field)
        default = f"<code>{html.escape(text)}</code>" if text else ""
        meaning = html.escape(description_of(field))
        rows.append(f"<tr><td><code>{name}</code><td>{kind}<td>{default}<td>{meaning}")
    return "<table><tr><th>Field<th>Type<th>Default<th>Meaning" + "".join(rows) + "</table>"
