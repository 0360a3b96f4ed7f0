"""Tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with columns of one width; the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *values in rows:
        cells = (f"{value:>{width}}" for value, width in zip(values, widths[1:], strict=True))
        yield f"  {name:{widths[0]}}  {'  '.join(cells)}".rstrip()
