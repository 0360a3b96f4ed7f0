"""Weft: a serving system for open-weights language models and for LLM programs that run beside them.

This module stays empty but for a lazy `__getattr__`: sandboxes and pure layers import through it, and must not pay
for torch or a web server they do not use.
"""

from typing import Any

from weft.version import __version__

_EXPORTS = {
    "LATENCY": "weft.workflow.criteria",
    "LLM": "weft.llm",
    "THROUGHPUT": "weft.workflow.criteria",
    "TTFT": "weft.workflow.criteria",
    "Concurrency": "weft.workflow.run.driver",
    "Grammar": "weft.core.grammar",
    "Input": "weft.workflow.frontend.prompt_text",
    "Output": "weft.workflow.frontend.prompt_text",
    "RunLimits": "weft.workflow.run.instructions",
    "SamplingParams": "weft.core.sampling",
    "StopParams": "weft.core.sampling",
    "Workflow": "weft.workflow.frontend.workflow",
    "deadline": "weft.workflow.criteria",
    "flow": "weft.workflow.frontend.flow",
    "native_function": "weft.workflow.frontend.semantic",
    "ops": "weft.workflow.frontend",
    "semantic_function": "weft.workflow.frontend.semantic",
    "session": "weft.workflow.session.api",
}

__all__ = [
    "LATENCY",
    "LLM",
    "THROUGHPUT",
    "TTFT",
    "Concurrency",
    "Grammar",
    "Input",
    "Output",
    "RunLimits",
    "SamplingParams",
    "StopParams",
    "Workflow",
    "__version__",
    "deadline",
    "flow",
    "native_function",
    "ops",
    "semantic_function",
    "session",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
