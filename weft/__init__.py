"""Weft: a serving system for open-weights language models and for LLM programs that run beside them.

This module stays empty but for a lazy `__getattr__`: sandboxes and pure layers import through it, and must not pay
for torch or a web server they do not use.
"""

from typing import Any

from weft.version import __version__

_EXPORTS = {
    "LLM": "weft.llm",
    "Grammar": "weft.core.grammar",
    "SamplingParams": "weft.core.sampling",
    "StopParams": "weft.core.sampling",
}

__all__ = ["LLM", "Grammar", "SamplingParams", "StopParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
