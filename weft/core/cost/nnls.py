"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.core.step import F64

TOLERANCE = 1e-10
"""Of gradients, relative to the largest at the start."""


def nnls(matrix: F64, target: F64) -> F64:
    """The `x` [n] >= 0 that minimises |matrix @ x - target|, for `matrix` [m, n] and `target` [m].

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23): variables enter the
    set of free ones by their gradient and leave it when the solution over that set would make them negative. Columns
    are scaled first, so that their units do not matter.
    """
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    used = scale > 0
    scaled = matrix[:, used] / scale[used]
    found = np.zeros(matrix.shape[1])
    found[used] = _solve(scaled, target) / scale[used]
    return found


def _solve(matrix: F64, target: F64) -> F64:
    count = matrix.shape[1]
    free = np.zeros(count, np.bool_)
    x = np.zeros(count)
    gradient = matrix.T @ target
    enough = TOLERANCE * max(1.0, float(np.abs(gradient).max(initial=0.0)))
    for _ in range(10 * count):  # each round frees one variable; rounding alone could make them return for ever
        candidates = np.where(free, -np.inf, gradient)
        if not count or candidates.max() <= enough:
            break
        free[candidates.argmax()] = True
        x = _inside(matrix, target, free, x)
        gradient = matrix.T @ (target - matrix @ x)
    return x


def _inside(matrix: F64, target: F64, free: npt.NDArray[np.bool_], x: F64) -> F64:
    """From the feasible `x` towards the best over the `free` variables; those that reach zero on the way leave them."""
    while True:
        best = np.zeros_like(x)
        best[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        falling = np.flatnonzero(free & (best <= 0))
        if not len(falling):
            return best
        # Where along the way each reaches zero; one that is there already and stays has no way to go.
        way = x[falling] - best[falling]
        reached = np.divide(x[falling], way, out=np.zeros(len(falling)), where=way > 0)
        step = reached.min()
        x = x + step * (best - x)
        dropped = falling[reached <= step]
        free[dropped] = False
        x[dropped] = 0.0
