"""A schedule or a run as a picture: a bar for each call over time, in as many lanes as there are calls at once.

One file without scripts, styles or references from outside. Names of nodes are of users, and escaped.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

MAX_BARS = 2_000
"""The first ones; a line says how many are left out."""
MAX_NAMES = 24
WIDTH, LEFT, TOP = 1000, 20, 60
LANE = 14
"""Pixels, as the widths."""
_UNPRINTABLE = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 65534, 65535), "�")
"""Characters that XML cannot have."""


class Bar(NamedTuple):
    """A call, or a part of a schedule."""

    name: str
    """Of the node: bars of one have one colour."""
    start: float
    begun: float
    """Until then it is shown pale: it waited."""
    end: float
    title: str
    """What a viewer shows beside it."""


def timeline_svg(bars: Iterable[Bar], heading: str, unit: str) -> str:
    """The picture. Times are in `unit`."""
    ordered = sorted(bars, key=lambda bar: (bar.start, bar.end, bar.name))
    shown, left_out = ordered[:MAX_BARS], max(len(ordered) - MAX_BARS, 0)
    lanes, placed = _in_lanes(shown)
    first = min((bar.start for bar in shown), default=0.0)
    last = max((bar.end for bar in shown), default=1.0)
    scale = (WIDTH - 2 * LEFT) / ((last - first) or 1.0)
    names = list(dict.fromkeys(bar.name for bar in shown))
    bottom = TOP + lanes * LANE + 20
    height = bottom + 16 * min(len(names), MAX_NAMES + 1) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(LEFT, 22, heading, size=15),
        *_axis(last - first, scale, bottom - 14, unit),
    ]
    for bar, lane in placed:
        parts += _bar(bar, first, scale, TOP + lane * LANE)
    for number, name in enumerate(names[:MAX_NAMES]):
        y = bottom + 16 * number
        parts.append(f'<rect x="{LEFT}" y="{y}" width="10" height="10" fill="{_colour(name)}"/>')
        parts.append(_text(LEFT + 16, y + 10, name))
    notes = [f"and {len(names) - MAX_NAMES:,} more nodes"] if len(names) > MAX_NAMES else []
    notes += [f"{left_out:,} later bars are left out"] if left_out else []
    parts.append(_text(LEFT, height - 12, "; ".join(notes)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _in_lanes(bars: Sequence[Bar]) -> tuple[int, list[tuple[Bar, int]]]:
    """How many lanes there are, and each bar with the lowest one that is free at its start."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    placed, count = [], 0
    for bar in bars:
        while busy and busy[0][0] <= bar.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(busy, (bar.end, lane))
        placed.append((bar, lane))
    return count, placed


def _bar(bar: Bar, first: float, scale: float, y: int) -> Iterator[str]:
    colour = _colour(bar.name)
    x, begun, end = (LEFT + (time - first) * scale for time in (bar.start, bar.begun, bar.end))
    yield f"<g><title>{_clean(bar.title)}</title>"
    if begun > x:
        yield _box(x, begun, y, colour, 0.25)
    yield _box(begun, end, y, colour, 0.9)
    yield "</g>"


def _box(x: float, end: float, y: int, colour: str, opacity: float) -> str:
    width = max(end - x, 0.5)
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE - 3}" fill="{colour}" opacity="{opacity}"/>'


def _axis(span: float, scale: float, bottom: int, unit: str) -> Iterator[str]:
    for part in range(5):
        x = LEFT + span * scale * part / 4
        yield f'<line x1="{x:.2f}" y1="{TOP - 10}" x2="{x:.2f}" y2="{bottom}" stroke="#cccccc"/>'
        yield _text(x, TOP - 16, f"{span * part / 4:,.4g} {unit}", anchor=("start", "middle", "end")[(part + 2) // 3])


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor={quoteattr(anchor)}>{_clean(text)}</text>'


def _clean(text: str) -> str:
    replaced = text.translate(_UNPRINTABLE).encode("utf-8", "replace").decode()
    return escape(replaced)


def _colour(name: str) -> str:
    """The same for the same name, everywhere."""
    return f"hsl({zlib.crc32(name.encode('utf-8', 'replace')) % 360},60%,45%)"
