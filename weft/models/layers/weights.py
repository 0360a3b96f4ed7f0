"""How a checkpoint's tensors become a layer's weights: some are stacked into one matrix, so that one product does.

Owns the description alone; `loader.py` reads the tensors.
"""

from __future__ import annotations

from typing import NamedTuple


class WeightSource(NamedTuple):
    """A tensor of the checkpoint, which fills a run of rows of a weight."""

    name: str
    rows: int


class WeightTarget(NamedTuple):
    """A weight as a layer uses it: `sources` stacked along the first dimension."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]
    packed: bool = False
    """Whether only `linear` and `take_rows` read it, so that they may have it in an order of their own."""
    scales: str | None = None
    """Under which name its scales go when weights are quantized. None: it never is."""


def vector(name: str, source: str, size: int) -> WeightTarget:
    """A one-dimensional weight of `size` from one tensor."""
    return WeightTarget(name, (size,), (WeightSource(source, size),))


def projection(name: str, bias: str | None, sources: dict[str, int], columns: int) -> list[WeightTarget]:
    """A matrix of the stacked `<source>.weight` (source: rows); if `bias` is a name, their biases under that name.

    Every projection is quantized when weights are.
    """
    rows = sum(sources.values())
    matrices = tuple(WeightSource(f"{s}.weight", n) for s, n in sources.items())
    targets = [WeightTarget(name, (rows, columns), matrices, packed=True, scales=f"{name}_scales")]
    if bias is not None:
        targets.append(WeightTarget(bias, (rows,), tuple(WeightSource(f"{s}.bias", n) for s, n in sources.items())))
    return targets
