"""How a token is drawn from logits: the contract, of which there are two implementations.

`draw_device` is torch alone: batched, on any device, never waiting for it. `draw_host` looks at the data of a CPU row
by row in numpy, which sorts and partitions ten times faster than torch, in a few threads of its own: a step makes one
round of them, where torch would start and join its threads for each of a dozen short operations.

A row's token depends on its own row and parameters alone: never on what else is in the batch or in which order.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from weft.core.step import F64

I64 = npt.NDArray[np.int64]

BLOCK = 128
"""Tokens whose weights are summed together before the running sum, which so has V / 128 steps instead of V."""
SMALLEST = -80.0
"""Log of the smallest weight of a token, relative to the largest of its row; below it, the token is impossible.

Such a token is too rare ever to be drawn, and processors handle numbers below e**-87 a hundred times slower.
"""


class Draws(NamedTuple):
    """How n rows are drawn."""

    temperature: F64
    """[n] above 0."""
    top_k: I64
    """[n] 1 to V - 1; 0: no limit."""
    top_p: F64
    """[n] in (0, 1]."""
    min_p: F64
    """[n] in [0, 1]."""
    uniforms: F64
    """[n] in [0, 1)."""

    def part(self, chosen: slice) -> Draws:
        """The parameters of a slice of the rows."""
        return Draws(
            self.temperature[chosen], self.top_k[chosen], self.top_p[chosen], self.min_p[chosen], self.uniforms[chosen]
        )


class Argmax(Protocol):
    """The most probable token of each row."""

    def __call__(self, logits: Tensor, rows: I64) -> Tensor:
        """logits [O, V] and n row numbers -> token ids int64 [n]; ties go to the lowest id."""
        ...


class Draw(Protocol):
    """A random token of each row."""

    def __call__(self, logits: Tensor, rows: I64, draws: Draws) -> Tensor:
        """logits [O, V], kept, and n row numbers -> token ids int64 [n].

        Temperature; the k largest (Fan et al., 2018), ties to the lowest ids; of these the smallest set of largest
        weights with at least p of the sum (Holtzman et al., 2019), ties to the lowest ids; of these all with at least
        `min_p` of the largest weight. Then the first token, in order of id, at which the running sum of weights, in
        float64, exceeds `uniform * total`. A row whose largest logit is not finite gives its argmax.
        """
        ...


class Drawing(NamedTuple):
    """One implementation of the contract, for a kind of device."""

    argmax: Argmax
    draw: Draw
