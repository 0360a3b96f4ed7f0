"""Words of prompts that are lost or foreign, so that an unseen wording is nothing unusual.

Whatever an answer holds is kept, and so are names, numbers and marks. A word that a question needs may be lost: then
the answer follows from the others, or from none, which costs the model little where it is rare.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from training.weft_tiny.examples import Example
from training.weft_tiny.grammar import is_held
from training.weft_tiny.words import invented_noun

KINDS = ("chat", "passage", "list", "json", "tool", "opening")
"""The kinds whose prompts are changed."""
_OF_WORDS = 0.1
_WORD = re.compile(r"(?<![\w{<\"'])[a-z]{2,}(?![\w}>\"'(])")


def noisy(example: Example, rng: random.Random) -> Example:
    """The example with some words of its prompts dropped, or replaced by an invented word or one of its own.

    Its level is 0: it does not say how well its level is learned.
    """
    answers = " ".join(f"{message['content']} {message.get('tool_calls', '')}" for message in example.messages
                       if message["role"] == "assistant").lower()  # fmt: skip
    kept = set(re.findall(r"[a-z]+", answers))
    asked = " ".join(message["content"] for message in example.messages if message["role"] in ("user", "system"))
    others = _WORD.findall(asked) or ["it"]

    def changed(match: re.Match[str]) -> str:
        if match[0] in kept or rng.random() >= _OF_WORDS:
            return match[0]
        kind = rng.random()
        if kind < 0.4:
            return ""
        word = invented_noun(rng).lower() if kind < 0.7 else rng.choice(others)
        return match[0] if is_held(word) else word

    messages = [
        {**message, "content": re.sub(" {2,}", " ", _WORD.sub(changed, message["content"])).strip(" ")}
        if message["role"] in ("user", "system")
        else message
        for message in example.messages
    ]
    return replace(example, messages=messages, level=0)
