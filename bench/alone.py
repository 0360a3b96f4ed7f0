"""Benchmarks do not run beside the training of weft-tiny, which takes all idle time of the processors."""

from __future__ import annotations

import os

from training.weft_tiny.state import holder, running_lock


def require() -> None:
    """End the process with an error if a trainer of this user computes on this machine.

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
