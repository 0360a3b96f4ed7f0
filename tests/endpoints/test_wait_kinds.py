"""What the engine is told about the wait after a chat's answer: which tool it called, or that a person reads it."""

from __future__ import annotations

import pytest

from weft.core.waits import WaitKind
from weft.endpoints.answers import Reading
from weft.endpoints.dialect import Dialect

CALL = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
NAMES = frozenset({"read", "edit"})


def reading(*, calls: bool) -> Reading:
    return Reading(Dialect(tool_form="hermes", reasoning=False), calls, False, False, names=NAMES)


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
    assert reading(calls=True).wait_kind(lambda: text, "stop") == kind


def test_without_tools_the_text_is_not_looked_at() -> None:
    def text() -> str:
        raise AssertionError("nobody asked for it")

    assert reading(calls=False).wait_kind(text, "stop") == WaitKind.CHAT
