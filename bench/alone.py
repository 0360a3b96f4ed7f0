"""Refuses to run benchmarks beside the training of weft-tiny, which uses all idle CPU time."""

from __future__ import annotations

import os

from training.weft_tiny.state import holder, running_lock


def require() -> None:
    """Exit with an error if a trainer of this user is running on this machine.

    `BENCH_BESIDE_TRAINING=1` permits it, for tests, which measure nothing.
    """
    if os.environ.get("BENCH_BESIDE_TRAINING") == "1":
        return
    running = holder(running_lock())
    if running is not None:
        raise SystemExit(
            f"training runs (process {running.get('pid')}): pause it first with "
            f"python -m training.weft_tiny.control pause --state {running.get('state')}"
        )
