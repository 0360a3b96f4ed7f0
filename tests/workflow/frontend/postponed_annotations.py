"""A semantic function whose annotations are texts."""

from __future__ import annotations

import weft

END = "x"


@weft.semantic_function
def say(text: weft.Input, answer: weft.Output(stop=END)):  # type: ignore[valid-type]
    """{{text}} {{answer}}"""
