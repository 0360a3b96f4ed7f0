"""Lines of text in a stream of bytes: only a line feed ends one, with or without a carriage return before it.

`str.splitlines`, and `iter_lines` of HTTP clients with it, also split at characters that JSON has in its strings.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Generator, Iterable, Iterator


def lines_of(parts: Iterable[bytes]) -> Generator[str, None, None]:
    """Yield each line as it ends, without its end, and what is behind the last one."""
    lines = _Lines()
    for part in parts:
        yield from lines.ended_in(part)
    yield from lines.rest()


async def async_lines_of(parts: AsyncIterable[bytes]) -> AsyncGenerator[str, None]:
    """As `lines_of`."""
    lines = _Lines()
    async for part in parts:
        for line in lines.ended_in(part):
            yield line
    for line in lines.rest():
        yield line


class _Lines:
    def __init__(self) -> None:
        self._begun: list[bytes] = []
        """Parts of a line that has not ended."""

    def ended_in(self, part: bytes) -> Iterator[str]:
        *ends, begun = part.split(b"\n")
        for end in ends:
            self._begun.append(end)
            yield self._take()
        if begun:
            self._begun.append(begun)

    def rest(self) -> Iterator[str]:
        if self._begun:
            yield self._take()

    def _take(self) -> str:
        line = b"".join(self._begun)
        self._begun.clear()
        return line.removesuffix(b"\r").decode(errors="replace")
