"""Requests and responses about workflows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import Json

MAX_NAME_CHARS = 200


class WorkflowUpload(msgspec.Struct, kw_only=True, frozen=True):
    """A workflow."""

    graph: Annotated[
        Json, Meta(description="The graph: `version`, `inputs`, `nodes`, `outputs`, as [workflows](workflows.md#json).")
    ]
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS, description="For lists; a later one replaces it.")] = ""


class WorkflowCard(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow."""

    id: str
    """Digest of the graph: equal graphs are one workflow."""
    object: Literal["workflow"] = "workflow"
    hash: str
    """The same."""
    name: str
    inputs: list[str]
    """Columns of its rows."""
    outputs: list[str]
    nodes: int
    """Nodes, those of bodies included."""
    size_bytes: int
    created: float
    """Seconds since 1970."""
    graph: Any = msgspec.UNSET
    """Canonical; absent in lists."""


class WorkflowList(msgspec.Struct, frozen=True, kw_only=True):
    """All workflows of the caller."""

    object: Literal["list"] = "list"
    data: list[WorkflowCard]


class WorkflowDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a deletion."""

    object: Literal["workflow.deleted"] = "workflow.deleted"
    id: str
