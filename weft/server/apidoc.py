"""The field tables of `docs/api.md`, generated from the structs that check requests.

`python -m weft.server.apidoc docs/api.md` fills each `<!-- table: NAME -->` of the page; a test compares the page with
the result.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from weft.endpoints.fields import ADVISORY, REFUSED
from weft.endpoints.schemas.chat import ChatRequest
from weft.endpoints.schemas.common import GenerationRequest, PromptTokensDetails
from weft.endpoints.schemas.completion import CompletionRequest
from weft.endpoints.schemas.embedding import EmbeddingRequest
from weft.endpoints.schemas.nested import NESTED_SHAPES, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from weft.endpoints.schemas.tokens import DetokenizeRequest, TokenizeRequest
from weft.server.openapi import default_text, description_of, openapi, type_text
from weft.server.schemas.programs import MessageRequest, ProgramUpload, RunRequest, SourceRunRequest
from weft.server.schemas.sessions import SessionCard
from weft.server.schemas.variables import CallRequest, VariableUpdate
from weft.server.schemas.workflows import WorkflowExplainRequest, WorkflowRunRequest, WorkflowUpload
from weft.workflow.service.call_request import CallPlaceholder

Struct = type[msgspec.Struct]
_TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_REQUESTS: dict[str, Struct] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/programs": ProgramUpload,
    "/v1/programs/{program}/runs": RunRequest,
    "/v1/runs": SourceRunRequest,
    "/v1/runs/{run}/messages": MessageRequest,
    "/v1/workflows": WorkflowUpload,
    "/v1/workflows/{workflow}/explain": WorkflowExplainRequest,
    "/v1/workflows/{workflow}/runs": WorkflowRunRequest,
    "/v1/calls": CallRequest,
    "/v1/variables/{variable}": VariableUpdate,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_FORMATS = (ResponseFormat, JsonSchemaFormat, StructuredOutputs)


def tables() -> dict[str, str]:
    """Every table of the page in Markdown, by name. Requests are named by their path."""
    # The last shape, the options of streams, is described in the text of the page.
    chat_shapes = [shape for shape in NESTED_SHAPES[:-1] if shape not in _FORMATS]
    head = "| Field | Type | Default | Meaning |\n|---|---|---|---|\n"
    return {
        "generation": head + _rows(ChatRequest, GenerationRequest.__struct_fields__),
        **{path: head + _rows(kind, _own_fields(kind)) for path, kind in _REQUESTS.items()},
        "messages and tools": head + "".join(_rows(s, s.__struct_fields__, f"{s.__name__}.") for s in chat_shapes),
        "formats": head + "".join(_rows(s, s.__struct_fields__, f"{s.__name__}.") for s in _FORMATS),
        "placeholders": head + _rows(CallPlaceholder, CallPlaceholder.__struct_fields__),
        "usage": _response_rows(PromptTokensDetails),
        "sessions": _response_rows(SessionCard),
        "advisory": "| Field | Reason |\n|---|---|\n"
        + "".join(f"| `{n}` | {ADVISORY[n]} |\n" for n in sorted(ADVISORY)),
        "refused": _refused(),
    }


def _own_fields(kind: Struct) -> tuple[str, ...]:
    """Fields of a request that the table of its base does not have."""
    bases = [base for base in (GenerationRequest, RunRequest) if issubclass(kind, base) and kind is not base]
    shared = {name for base in bases for name in base.__struct_fields__}
    return tuple(name for name in kind.__struct_fields__ if name not in shared)


def _rows(kind: Struct, names: tuple[str, ...], prefix: str = "") -> str:
    schema = openapi()["components"]["schemas"][kind.__name__]
    rows = []
    for name in names:
        field = schema["properties"][name]
        text = default_text(field)
        default = "required" if name in schema.get("required", ()) else f"`{text}`" if text else "absent"
        rows.append(f"| `{prefix}{name}` | {type_text(field)} | {default} | {description_of(field)} |\n")
    return "".join(rows)


def _response_rows(kind: Struct) -> str:
    properties = openapi()["components"]["schemas"][kind.__name__]["properties"]
    rows = [f"| `{name}` | {type_text(field)} | {description_of(field)} |\n" for name, field in properties.items()]
    return "| Field | Type | Meaning |\n|---|---|---|\n" + "".join(rows)


def _refused() -> str:
    path_of = {kind: path.removeprefix("/v1/") for path, kind in _REQUESTS.items()}
    endpoints: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for kind, refused in REFUSED.items():
        for name, refusal in refused.items():
            harmless = ["null", *(msgspec.json.encode(value).decode() for value in refusal.harmless)]
            values = ", ".join(f"`{value}`" for value in harmless)
            endpoints[name, values, refusal.advice].append(path_of[kind])
    rows = [
        f"| `{name}` | {', '.join(paths)} | {values} | {advice} |\n"
        for (name, values, advice), paths in sorted(endpoints.items())
    ]
    return "| Field | Endpoints | Accepted values | Instead |\n|---|---|---|---|\n" + "".join(rows)


def filled(page: str) -> str:
    """The page with its tables filled. Raises `ValueError` for a table that is missing, unknown or there twice."""
    found = tables()
    names = [match[2] for match in _TABLE.finditer(page)]
    if sorted(names) != sorted(found):
        raise ValueError(
            f"the page needs one `<!-- table: NAME -->` for each of {sorted(found)}, and has {sorted(names)}"
        )
    return _TABLE.sub(lambda match: f"{match[1]}{found[match[2]]}{match[3]}", page)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(filled(target.read_text(encoding="utf-8")), encoding="utf-8")
