"""The worker's own error. It reaches clients as an internal error: no request causes or mends it."""

from __future__ import annotations

from weft.abi.errors import WeftError


class StepError(WeftError):
    """A step that contradicts the worker's sizes or its own contract: a bug of the scheduler, stopped before it ran."""
