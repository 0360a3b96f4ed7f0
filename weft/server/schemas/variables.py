"""Requests and responses about calls of sessions and their variables."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.endpoints.schemas.common import Json, ModelName
from weft.workflow.service.call_request import CallPlaceholder

MAX_TIMEOUT_S = 3600.0


class CallRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Calls for a session: a prompt with placeholders, or nodes of a graph."""

    session_id: (
        Annotated[str, Meta(description="The session, which begins with its first call; absent: one is drawn.")] | None
    ) = None
    continues: Annotated[
        bool, Meta(description="The session must be there: one that has ended is not begun anew, and the calls fail.")
    ] = False
    prompt: (
        Annotated[str, Meta(description="A text with `{{name}}` of each placeholder; each output is a call.")] | None
    ) = None
    placeholders: Annotated[list[CallPlaceholder], Meta(description="The names in `prompt`.")] = []
    raw: Annotated[bool, Meta(description="The text is continued as it is, instead of in a chat.")] = False
    model: ModelName | None = None
    sampling: Annotated[Json, Meta(description="Fields of a chat completion, for every output.")] = {}
    nodes: (
        Annotated[
            list[Json],
            Meta(
                description="Instead of `prompt`: nodes as in [workflows](workflows.md#json), at most 500. They may "
                "refer to earlier nodes of the session."
            ),
        ]
        | None
    ) = None


class CallVariable(msgspec.Struct, frozen=True, kw_only=True):
    """An output of a submitted call: its name and the id of its variable."""

    id: str
    name: str
    """Of the output, or the id of the node."""


class CallReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a submission: the session, and a variable for each output."""

    object: Literal["call"] = "call"
    session_id: str
    variables: list[CallVariable]
    """Of the outputs, or of the nodes."""


class VariableError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a variable has no value."""

    message: str
    node: str
    """Where it began, such as `notes[3].summary`."""
    code: str
    """The kind of error."""


class VariableCard(msgspec.Struct, frozen=True, kw_only=True):
    """A variable as a client sees it: its state, and its value or error once there is one."""

    id: str
    object: Literal["variable"] = "variable"
    status: Literal["ready", "failed", "pending"]
    """`pending`: `timeout_s` passed before there was a value."""
    value: Any = msgspec.UNSET
    """With `ready`."""
    error: VariableError | msgspec.UnsetType = msgspec.UNSET
    """With `failed`."""


class VariableUpdate(msgspec.Struct, kw_only=True, frozen=True):
    """The value of a variable that comes from outside, or why it will not come."""

    value: Annotated[Any, Meta(description="Any JSON.")] = msgspec.UNSET
    error: Annotated[str, Meta(description="Instead of a value: the node fails with this message.")] | None = None
    kind: (
        Annotated[str, Meta(max_length=100, description="Of the error, in a run of a workflow; absent: `external`.")]
        | None
    ) = None


class SessionEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to the end of a session."""

    object: Literal["session.ended"] = "session.ended"
    id: str
