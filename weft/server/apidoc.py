"""The field tables of `docs/api.md`, from the code that checks the fields.

`python -m weft.server.apidoc docs/api.md` writes them between the page's markers; a test holds the page against them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from weft.endpoints.fields import ADVISORY, REFUSED
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.common import GenerationRequest
from weft.endpoints.schemas.completion import CompletionRequest
from weft.endpoints.schemas.embedding import EmbeddingRequest
from weft.endpoints.schemas.tokens import DetokenizeRequest, TokenizeRequest
from weft.server.openapi import SHAPES, default_text, description_of, openapi, type_text
from weft.server.schemas.programs import MessageRequest, ProgramUpload, RunRequest, SourceRunRequest

BEGIN = "<!-- fields: begin (written by python -m weft.server.apidoc docs/api.md) -->"
END = "<!-- fields: end -->"

_PAGES: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("/v1/chat/completions", ChatRequest),
    ("/v1/completions", CompletionRequest),
    ("/v1/embeddings", EmbeddingRequest),
    ("/v1/programs", ProgramUpload),
    ("/v1/programs/{program}/runs", RunRequest),
    ("/v1/runs", SourceRunRequest),
    ("/v1/runs/{run}/messages", MessageRequest),
    ("/tokenize", TokenizeRequest),
    ("/detokenize", DetokenizeRequest),
)


def tables() -> str:
    """The field tables of every request, of advisory and of refused fields, as Markdown."""
    shared = GenerationRequest.__struct_fields__
    parts = ["### Fields of every request that generates\n", _fields(ChatRequest, shared)]
    for path, kind in _PAGES:
        generates = issubclass(kind, GenerationRequest)
        own = tuple(name for name in kind.__struct_fields__ if not generates or name not in shared)
        more = ", beside those" if generates else ""
        parts += [f"### Fields of `{path}`{more}\n", _fields(kind, own)]
    for shape in SHAPES[:-2]:  # the last two, of streams and limits, have tables of their own
        parts += [f"### Fields of a `{shape.__name__}`, inside a request\n", _fields(shape, shape.__struct_fields__)]
    parts += ["### Fields that are accepted and have no effect\n", "| Field | Why |\n|---|---|"]
    parts += [f"| `{name}` | {why} |" for name, why in sorted(ADVISORY.items())]
    for kind, refused in REFUSED.items():
        path = next(path for path, other in _PAGES if other is kind)
        parts += [
            f"\n### Fields that `{path}` refuses\n",
            "| Field | Values that ask for nothing | Instead |\n|---|---|---|",
        ]
        for name, refusal in sorted(refused.items()):
            harmless = ["null", *(msgspec.json.encode(value).decode() for value in refusal.harmless)]
            parts.append(f"| `{name}` | {', '.join(f'`{value}`' for value in harmless)} | {refusal.advice} |")
    return "\n".join(parts) + "\n"


def _fields(kind: type[msgspec.Struct], names: tuple[str, ...]) -> str:
    schema = openapi()["components"]["schemas"][kind.__name__]
    rows = ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for name in names:
        field = schema["properties"][name]
        text = default_text(field)
        default = "required" if name in schema.get("required", ()) else f"`{text}`" if text else "absent"
        rows.append(f"| `{name}` | {type_text(field)} | {default} | {description_of(field)} |")
    return "\n".join(rows) + "\n"


def filled(page: str) -> str:
    """The page with its tables as they should be. Raises `ValueError` for a page without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(filled(target.read_text(encoding="utf-8")), encoding="utf-8")
