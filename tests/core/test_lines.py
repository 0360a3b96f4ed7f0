"""Lines end at line feeds alone, however their bytes come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from weft.core.lines import async_lines_of, lines_of

TEXT = "a\u2028b\u2029c\u0085d\x0b\x0c\x1ce\rf\r\n\n\r\né☃😀\nrest"
LINES = ["a\u2028b\u2029c\u0085d\x0b\x0c\x1ce\rf", "", "", "é☃😀", "rest"]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_end_at_line_feeds_alone(end: str, size: int) -> None:
    data = (TEXT + end).encode()
    parts = [data[start : start + size] for start in range(0, len(data), size)]

    async def arriving() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def found() -> list[str]:
        return [line async for line in async_lines_of(arriving())]

    assert list(lines_of(parts)) == LINES
    assert asyncio.run(found()) == LINES
