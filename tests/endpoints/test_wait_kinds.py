"""What the engine is told about the wait after a chat's answer: which tool it called, or that a person reads it."""

from __future__ import annotations

import pytest

from weft.core.waits import WaitKind
from weft.endpoints.answers import Reading, ToolsCalled
from weft.endpoints.dialect import Dialect

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
NAMES = frozenset({"read", "edit"})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The answer is 4.", WaitKind.CHAT),
        (CALL.format("read"), "tools:read"),
        (f"Let me see.\n{CALL.format('edit')}\n{CALL.format('edit')}", "tools:edit"),
        (f"{CALL.format('read')}\n{CALL.format('edit')}", WaitKind.TOOLS),
        (CALL.format("unknown"), WaitKind.CHAT),
        (CALL.format("read")[:-20], WaitKind.CHAT),
    ],
)
def test_the_kind_follows_from_the_calls(text: str, kind: str) -> None:
    for size in (1, len(text)):
        called = ToolsCalled(Reading(Dialect(tool_form="hermes", reasoning=False), True, False, False, names=NAMES))
        for at in range(0, len(text), size):
            called.push(text[at : at + size])
        assert called.wait_kind("stop") == kind
