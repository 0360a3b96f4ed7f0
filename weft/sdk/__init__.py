"""The library that programs of users import. It needs the standard library only.

    from weft.sdk import Context, http, run

    async def main(args):
        async with Context(system="Answer in one sentence.") as ctx:
            ctx.user(args["question"])
            reply = await ctx.generate(max_tokens=50)
            return reply.text

It imports no other part of Weft than `weft.abi` and `weft.text`: its commands travel as bytes (`weft.abi.frames`) to
the host of the program. Names are imported at their first use, so that a small program starts fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.sdk import api, http, messaging, run, store
    from weft.sdk.beam import Beam, beam_search
    from weft.sdk.context import Context
    from weft.sdk.dist import Dist
    from weft.sdk.errors import (
        Cancelled,
        ContextTooLong,
        EngineDead,
        InvalidRequest,
        LimitExceeded,
        NetworkDenied,
        NetworkFailed,
        OutOfPages,
        ProgramError,
        ProgramFailed,
        UnknownHandle,
        Unsupported,
    )
    from weft.sdk.generation import Generation
    from weft.sdk.grammar import Grammar, Matcher, choice, ebnf, json_object, json_schema, lark, regex
    from weft.sdk.model import Model, models, own_model
    from weft.sdk.pages import Embed, Page
    from weft.sdk.parallel import best_of, gather, map_forks
    from weft.sdk.queues import Queue
    from weft.sdk.sampling import Sampler, Stop, greedy, min_p, multinomial, top_k, top_p
    from weft.sdk.sequence import Sequence, Usage
    from weft.sdk.snapshot import Snapshot
    from weft.sdk.tokens import detokenize, render, tokenize, vocabulary
    from weft.sdk.toolbox import ToolCall, tool

_HOMES = {
    "beam": ("Beam", "beam_search"),
    "context": ("Context",),
    "dist": ("Dist",),
    "errors": (
        "Cancelled",
        "ContextTooLong",
        "EngineDead",
        "InvalidRequest",
        "LimitExceeded",
        "NetworkDenied",
        "NetworkFailed",
        "OutOfPages",
        "ProgramError",
        "ProgramFailed",
        "UnknownHandle",
        "Unsupported",
    ),
    "generation": ("Generation",),
    "grammar": ("Grammar", "Matcher", "choice", "ebnf", "json_object", "json_schema", "lark", "regex"),
    "model": ("Model", "models", "own_model"),
    "pages": ("Embed", "Page"),
    "parallel": ("best_of", "gather", "map_forks"),
    "queues": ("Queue",),
    "sampling": ("Sampler", "Stop", "greedy", "min_p", "multinomial", "top_k", "top_p"),
    "sequence": ("Sequence", "Usage"),
    "snapshot": ("Snapshot",),
    "tokens": ("detokenize", "render", "tokenize", "vocabulary"),
    "toolbox": ("ToolCall", "tool"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("api", "http", "messaging", "run", "session", "store")

__all__ = [
    "Beam",
    "Cancelled",
    "Context",
    "ContextTooLong",
    "Dist",
    "Embed",
    "EngineDead",
    "Generation",
    "Grammar",
    "InvalidRequest",
    "LimitExceeded",
    "Matcher",
    "Model",
    "NetworkDenied",
    "NetworkFailed",
    "OutOfPages",
    "Page",
    "ProgramError",
    "ProgramFailed",
    "Queue",
    "Sampler",
    "Sequence",
    "Snapshot",
    "Stop",
    "ToolCall",
    "UnknownHandle",
    "Unsupported",
    "Usage",
    "api",
    "beam_search",
    "best_of",
    "choice",
    "detokenize",
    "ebnf",
    "gather",
    "greedy",
    "http",
    "json_object",
    "json_schema",
    "lark",
    "map_forks",
    "messaging",
    "min_p",
    "models",
    "multinomial",
    "own_model",
    "regex",
    "render",
    "run",
    "store",
    "tokenize",
    "tool",
    "top_k",
    "top_p",
    "vocabulary",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"weft.sdk has no {name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def preload() -> None:
    """Import all modules of the library. The build of a runner without a file system calls it."""
    for module in (*_HOMES, *_MODULES, "channel", "images", "main", "tool_rounds"):
        importlib.import_module(f"{__name__}.{module}")
    for name in __all__:
        __getattr__(name)
