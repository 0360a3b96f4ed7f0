"""Whether what a caller asks for can travel to an engine at all.

Commands of all programs and requests of one turn of the event loop leave as one message, and one number that has more
than 64 bits would keep all of them from leaving. So it is refused where it comes in: by the session of a program, and
by the completion that requests over HTTP and `weft.LLM` become. It knows nothing of what the numbers mean.
"""

from __future__ import annotations

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.sampling import SamplingParams, StopParams

MAX_COUNT = 1 << 31
_COUNTS = ("top_k", "max_tokens", "min_tokens")
_encoder = msgspec.msgpack.Encoder()


def check_sizes(asked: SamplingParams | StopParams) -> None:
    """Raise `InvalidRequest`, naming the field, for a number that is too large, or a text that is not valid Unicode."""
    for name in _COUNTS:
        count = getattr(asked, name, None)
        if count is not None and count >= MAX_COUNT:
            raise InvalidRequest(f"{name} must be below {MAX_COUNT}, got {count}", name)
    try:
        _encoder.encode(asked)
    except (OverflowError, UnicodeEncodeError) as error:
        name = _culprit(asked)
        raise InvalidRequest(
            f"{name} has a number of more than 64 bits, or a text that is not valid Unicode", name
        ) from error


def _culprit(asked: SamplingParams | StopParams) -> str:
    for name in asked.__struct_fields__:
        try:
            _encoder.encode(getattr(asked, name))
        except (OverflowError, UnicodeEncodeError):
            return name
    return type(asked).__name__
