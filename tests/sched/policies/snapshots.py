"""Snapshots of runs for tests: every column has a default, and scalars count for all rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.cache.runs import PREFIX, PageRuns
from weft.core.cost.model import CostModel, ForwardModel, SwapModel

COLUMNS: dict[str, tuple[type, Any]] = {
    "since_s": (np.float64, 0.0),
    "expected_s": (np.float64, np.nan),
    "kind": (np.int64, 1),
    "num_tokens": (np.int64, 16),
    "num_pages": (np.int64, 1),
    "num_behind": (np.int64, 0),
    "has_copy": (np.bool_, False),
    "over_share": (np.bool_, False),
    "weight": (np.float64, 0.0),
    "tenant": (np.int64, 0),
    "explicit": (np.bool_, False),
    "sooner_s": (np.float64, np.nan),
}


def make_runs(
    count: int = 1, *, kinds: tuple[str, ...] = (PREFIX, "tool"), tenants: tuple[str, ...] = (), **columns: Any
) -> PageRuns:
    assert set(columns) <= {*COLUMNS, "order"}
    made = {
        name: np.array(np.broadcast_to(np.asarray(columns.get(name, default), dtype), (count,)))
        for name, (dtype, default) in COLUMNS.items()
    }
    order = np.asarray(columns.get("order", np.arange(count)), np.int64)
    return PageRuns(**made, order=order, kinds=kinds, tenants=tenants)


def line(
    per_token_s: float = 0.001, base_s: float = 0.01, pair_s: float = 0.0, page_s: float | None = None
) -> CostModel:
    """Forwards of a fixed time and one per token (and pair); transfers of `page_s` a page, not measured for None."""
    swap = None if page_s is None else SwapModel(base_s=0.25, per_page_s=page_s)
    forward = ForwardModel(base_s, 0.0, 0.0, 0.0, 0.0, 0.0, pair_s, (), (per_token_s,))
    return CostModel(forward, swap, swap, saturation_tokens=64)
