"""Finds integers of JSON that common readers refuse. Python's `json` raises for more than 4,300 digits."""

from __future__ import annotations

import re

MAX_DIGITS = 4300
"""Python's limit (`sys.int_info.default_max_str_digits`)."""
_DIGITS = re.compile(rb"[0-9]*+")
_READABLE = re.compile(
    rb"""(?:
        [^"0-9-]++
        | "(?:[^"\\]++|\\.)*+"
        | -?+(?:[0-9]{1,%d}+(?![0-9])|[0-9]++(?=[.eE]))(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+
    )*+"""
    % MAX_DIGITS,
    re.VERBOSE | re.DOTALL,
)
"""Values of JSON without an integer that is too long. Possessive, so that it takes time in proportion."""


def has_long_integer(json: bytes) -> bool:
    """Whether valid JSON has an integer, as its own value, of more than `MAX_DIGITS` digits. Allocates no memory in
    proportion to it."""
    return _has_many_digits(json) and _READABLE.fullmatch(json) is None


def _has_many_digits(data: bytes) -> bool:
    # So many digits in a row contain one of these places, most of which are in short runs.
    for place in range(0, len(data), MAX_DIGITS + 1):
        found = _DIGITS.match(data, place)
        assert found is not None
        end = found.end()
        if end > place:
            before = data[max(place - MAX_DIGITS, 0) : place]
            if len(before) - len(before.rstrip(b"0123456789")) + end - place > MAX_DIGITS:
                return True
    return False
