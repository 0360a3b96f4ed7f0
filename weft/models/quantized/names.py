"""Names of modules in `quantization_config`: lists of those that are not quantized, and targets of settings."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from weft.models.quantized.settings import refusal

PATTERN = "re:"
MAX_PATTERN_CHARS = 1000


def is_part_of(module: str, entries: Iterable[str]) -> bool:
    """Whether the name has one of `entries` as whole components: `mlp` and `layers.0.mlp` are in `layers.0.mlp.up`."""
    return any(f".{entry}." in f".{module}." for entry in entries)


def matches(module: str, entry: str) -> bool:
    """Whether an entry of compressed-tensors names the module, itself or as a pattern that its name begins with.

    Raises `Unsupported` for a pattern that RE2 does not take.
    """
    if not entry.startswith(PATTERN):
        return entry == module
    return _compiled(entry.removeprefix(PATTERN)).match(module) is not None


@functools.lru_cache(1024)
def _compiled(pattern: str) -> Any:
    # Patterns come with the checkpoint, and RE2's take time in proportion to the name. Loading plain checkpoints does
    # without the package.
    import re2

    options = re2.Options()
    options.log_errors = False
    if len(pattern) > MAX_PATTERN_CHARS:
        raise refusal(f"a pattern of more than {MAX_PATTERN_CHARS} characters")
    try:
        return re2.compile(pattern, options=options)
    except re2.error:
        raise refusal(f"the pattern {pattern!r}, which is not in RE2's syntax,") from None
