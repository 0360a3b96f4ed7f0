"""The deprecated name of `weft.sdk.run`. It works as before, with a warning at each use."""

from __future__ import annotations

import warnings
from typing import Any

from weft.sdk import run


def __getattr__(name: str) -> Any:
    value = getattr(run, name)
    warnings.warn("weft.sdk.session is now weft.sdk.run; use that instead", DeprecationWarning, stacklevel=2)
    return value
