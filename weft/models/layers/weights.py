"""The mapping from a checkpoint's tensors to a layer's weights; some tensors are stacked, to fuse matrix products.

Owns only the description; `loader.py` reads the tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.kernels.block_weights import BlockPart


class WeightSource(NamedTuple):
    """A tensor of the checkpoint, which fills consecutive rows of a weight."""

    name: str
    rows: int


class WeightTarget(NamedTuple):
    """A weight as a layer uses it: `sources` stacked along the first dimension."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]
    packed: bool = False
    """Whether only `linear` and `take_rows` read it, so that they may have it in an order of their own."""
    quantized: bool = False
    """Whether it is quantized if weights are."""
    blocks: tuple[BlockPart, ...] = ()
    """For each source, its type of quantized blocks and its rows, if it stays in them; empty: it does not."""


def vector(name: str, source: str, size: int) -> WeightTarget:
    """A one-dimensional weight of `size` from one tensor."""
    return WeightTarget(name, (size,), (WeightSource(source, size),))


def projection(name: str, bias: str | None, sources: dict[str, int], columns: int) -> list[WeightTarget]:
    """A matrix of the stacked `<source>.weight` (source: rows) and, unless `bias` is None, their biases under that
    name.

    All projections are quantized if weights are.
    """
    rows = sum(sources.values())
    matrices = tuple(WeightSource(f"{s}.weight", n) for s, n in sources.items())
    targets = [WeightTarget(name, (rows, columns), matrices, packed=True, quantized=True)]
    if bias is not None:
        targets.append(WeightTarget(bias, (rows,), tuple(WeightSource(f"{s}.bias", n) for s, n in sources.items())))
    return targets
