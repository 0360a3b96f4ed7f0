"""The two ways to run guests, and the choice: fibers where the self-test passes, else a thread for each guest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from weft.abi.errors import ConfigError
from weft.programs.sandbox.compiled import CompiledModule
from weft.programs.sandbox.machine import LoadedCode

_LOG = logging.getLogger(__name__)


class Backend(Protocol):
    """Loads compiled code, to make machines of."""

    name: str

    def component(self, compiled: Path) -> LoadedCode:
        """Load the machine code of the component that runs Python."""

    def module(self, compiled: CompiledModule) -> LoadedCode:
        """Load the machine code of an uploaded core module."""

    def close(self) -> None:
        """Stop what runs in the background."""


def choose(wanted: str, slots: int, memory_bytes: int, tick_s: float) -> Backend:
    """The backend that is wanted; `auto` takes fibers if they work here. Raises `ConfigError`."""
    from weft.programs.sandbox.threads import ThreadBackend

    if wanted == "threads":
        return ThreadBackend(slots, memory_bytes)
    try:
        return _fibers(slots, memory_bytes, tick_s)
    except Exception as error:
        # Private bindings may raise anything: the other backend needs none of them.
        if wanted == "fibers":
            raise ConfigError(f"the sandbox cannot use fibers here: {error}") from error
        _LOG.warning("sandboxed programs run on a thread each, which is slower: %s", error)
        return ThreadBackend(slots, memory_bytes)


def _fibers(slots: int, memory_bytes: int, tick_s: float) -> Backend:
    from weft.programs.sandbox.fibers import FiberBackend
    from weft.programs.sandbox.selftest import check_fibers

    check_fibers()
    return FiberBackend(slots, memory_bytes, tick_s)
