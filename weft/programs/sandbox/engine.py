"""How code is compiled and run: the settings that a compiler and all engines must share."""

from __future__ import annotations

import importlib.metadata

import wasmtime

from weft.programs.sandbox.module_shape import Signature

WASMTIME_VERSION = importlib.metadata.version("wasmtime")

STACK_BYTES = 1 << 20
"""Of a fiber; half of it for Wasm code."""
TABLE_ELEMENTS = 20_000
"""Of each table of functions; CPython needs about half of it."""
INTERFACE = "weft:runner/host@1.0.0"
"""What a component imports: `runner/runner.wit`."""
EXPORTS = ("compile", "run")
"""What it exports."""
_OFF = (
    *("threads", "memory64", "multi_memory", "gc", "function_references", "exceptions", "stack_switching"),
    *("custom_page_sizes", "wide_arithmetic"),
)
"""Proposals to WebAssembly that a module may not use."""
ENGINE_FORMAT = 2
"""Changes with the settings below, so that older machine code is not looked at."""


def engine_config() -> wasmtime.Config:
    """What code is compiled for and run with; code compiled with another one is refused by the engine."""
    config = wasmtime.Config()
    config.epoch_interruption = True
    config.max_wasm_stack = STACK_BYTES // 2
    # What docs/wasm.md does not offer is off, also where the engine has it on: garbage-collected objects live on a heap
    # that the limit on memory does not count.
    for proposal in _OFF:
        setattr(config, f"wasm_{proposal}", False)
    return config


def function_type(signature: Signature) -> wasmtime.FuncType:
    """A type of functions of numbers as the engine has it."""
    params, results = ([getattr(wasmtime.ValType, name)() for name in names] for names in signature)
    return wasmtime.FuncType(params, results)
