"""`WaitKind`: what a sequence can wait for while it has nothing to do.

The engine learns how long the waits of each kind take, so kinds tell apart what takes times of its own. It accepts
other names too: simulated workloads have kinds that are not served.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import StrEnum
from typing import Literal
from zlib import crc32

from weft.abi.errors import InvalidRequest
from weft.core.ids import TOKEN_BYTES

MAX_KIND_CHARS = 64


class WaitKind(StrEnum):
    """The kinds of wait that Weft itself announces."""

    PROGRAM = "program"
    """Its program has not said what it waits for."""
    HTTP = "http"
    """Its program waits for a response of the network."""
    SLEEP = "sleep"
    """Its program sleeps; the end is known."""
    MESSAGE = "message"
    """Its program waits for a message of a client or a person, or for another run."""
    TOOL = "tool"
    """Its program runs a tool that its model has called."""
    CHAT = "chat"
    """A finished turn of a chat that called no tool: a person may answer."""
    TOOLS = "tools"
    """A finished turn that called tools: the client may bring results. `tool_wait` names the tool with it."""
    COMPLETION = "completion"
    """A finished completion, which may be extended."""
    WORKFLOW = "workflow"
    """A finished call of a workflow, with whose conversation another call goes on."""
    HOLD = "hold"
    """Its program gave it up, to be found again."""
    QUEUE = "queue"
    """It has work, and waits for the device alone."""
    PREFIX = "prefix"
    """Nothing is known to wait: a cached prefix that has been of use."""
    UNUSED = "unused"
    """Nothing is known to wait: KV that a closed sequence has left, and no other has found yet."""


OTHER = "other"
_LABELS: dict[str, str] = {kind: kind.value for kind in WaitKind}


def label_of(kind: str) -> str:
    """The name under which a kind is counted: that of a `WaitKind`, without a tool's name and a cohort, or `OTHER`."""
    return _LABELS.get(kind) or _LABELS.get(kind.partition(":")[0], OTHER)


def tool_wait(names: Collection[str]) -> str:
    """The kind of wait of a turn that called tools of these names. Tools take times of their own, so a single one is
    named, as far as a kind has room; of several, the slowest decides, which is not known."""
    if len(set(names)) != 1:
        return WaitKind.TOOLS
    return f"{WaitKind.TOOLS}:{next(iter(names))}"[:MAX_KIND_CHARS]


COHORT_TOKENS = 256
"""Sessions of a tenant whose first tokens, so many, are equal are a *cohort*: in most cases those of one application or
system prompt, on which it depends whether a turn is continued."""
_COHORT = ":#"


def of_cohort(kind: str, tokens: bytes) -> str:
    """A kind of wait together with the cohort of a sequence whose first tokens these are, packed. Empty where they are
    fewer than `COHORT_TOKENS`."""
    return f"{kind}{_COHORT}{crc32(tokens):08x}" if len(tokens) >= COHORT_TOKENS * TOKEN_BYTES else ""


def without_cohort(kind: str) -> str:
    """The kind of `of_cohort`; of a kind alone, itself."""
    return kind.partition(_COHORT)[0]


ExpectedBy = Literal["announced", "learned", "elapsed"]
"""What an expected return rests on: an announcement, earlier waits of the kind, or the time waited so far alone."""

PROGRAM_WAITS = frozenset({WaitKind.HTTP, WaitKind.SLEEP, WaitKind.MESSAGE, WaitKind.TOOL})
"""The kinds that a program may announce."""


def check_wait(kind: str, expected_in_s: float | None) -> None:
    """Raise `InvalidRequest`, naming the field, unless `kind` is a name and `expected_in_s` a time from now or None."""
    if not 0 < len(kind) <= MAX_KIND_CHARS:
        raise InvalidRequest(f"a kind of wait has 1 to {MAX_KIND_CHARS} characters, got {len(kind)}", "kind")
    if kind in (WaitKind.PREFIX, WaitKind.QUEUE):
        raise InvalidRequest(f"a client cannot announce a wait of kind {kind}, which is the engine's own", "kind")
    if expected_in_s is not None and not 0 <= expected_in_s < math.inf:
        raise InvalidRequest(f"expected_in_s must be finite and not negative, got {expected_in_s}", "expected_in_s")
