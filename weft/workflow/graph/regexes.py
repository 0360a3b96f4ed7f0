"""Regular expressions of workflows. They come from strangers and meet texts of any length, so they are RE2's, which
take time in proportion to the text; it has no backreferences and no lookaround."""

from __future__ import annotations

import functools

import re2

MAX_CHARS = 1000
MAX_PROGRAM_BYTES = 4 << 20


class RegexError(ValueError):
    """A regular expression that cannot be used; the message says why."""


@functools.lru_cache(256)
def compile_regex(pattern: str) -> re2.Pattern[str]:
    """Compile a pattern. Raises `RegexError` for one that is invalid, longer than `MAX_CHARS` characters, or needs
    more than `MAX_PROGRAM_BYTES` when compiled."""
    if len(pattern) > MAX_CHARS:
        raise RegexError(f"a regular expression has {MAX_CHARS:,} characters at most, this one {len(pattern):,}")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PROGRAM_BYTES
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0]
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise RegexError(f"{text} (the syntax is RE2's: no lookaround, no backreferences)") from None
