"""How code is compiled and run: the settings that a compiler and all engines must share."""

from __future__ import annotations

import importlib.metadata

import wasmtime

WASMTIME_VERSION = importlib.metadata.version("wasmtime")

STACK_BYTES = 1 << 20
"""Of a fiber; half of it for Wasm code."""
TABLE_ELEMENTS = 20_000
"""Of each table of functions; CPython needs about half of it."""
INTERFACE = "weft:runner/host@1.0.0"
"""What a component imports: `runner/runner.wit`."""
EXPORTS = ("compile", "run")
"""What it exports."""
ENGINE_FORMAT = 1
"""Changes with the settings below, so that older machine code is not looked at."""


def engine_config() -> wasmtime.Config:
    """What code is compiled for and run with; code compiled with another one is refused by the engine."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    config.max_wasm_stack = STACK_BYTES // 2
    config.wasm_threads = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    return config
