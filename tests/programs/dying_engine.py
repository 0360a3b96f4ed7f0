"""An engine process that is killed once, in the middle of a forward: where it has read the rows of its embedding.

Run by `weft.children.entry` in place of `weft.engine.process`. Two variables of its environment say at which call of
`take_rows` it is killed, and which file it makes then; while that file exists, it is not killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import Tensor

from weft.engine import process
from weft.kernels import dispatch
from weft.kernels.base import Kernels

DIES_AT, MARKER = "TEST_DIES_AT", "TEST_MARKER"


def main(address: str) -> int:
    """Run the engine. The file has the number of dimensions of the embedding, more than two where it is packed."""
    select, marker, dies_at = dispatch.select, Path(os.environ[MARKER]), int(os.environ[DIES_AT])
    calls = 0

    def select_dying(*args: object, **options: object) -> Kernels:
        kernels = select(*args, **options)  # type: ignore[arg-type]

        def take_rows(weight: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
            nonlocal calls
            rows = kernels.take_rows(weight, indices, dtype)
            calls += 1
            if calls == dies_at and not marker.exists():
                marker.write_text(str(weight.dim()))
                os.kill(os.getpid(), signal.SIGKILL)
            return rows

        return kernels._replace(take_rows=take_rows)

    dispatch.select = select_dying  # type: ignore[assignment]
    return process.main(address)
