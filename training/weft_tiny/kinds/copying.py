"""An auxiliary kind for training only: repeating and looking back, so that copying is learned early."""

from __future__ import annotations

import string

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, Message, assistant, user
from training.weft_tiny.grammar import Draw, Phrases

REPEAT = Phrases(
    "Repeat: {t}",
    "Say this: {t}",
    "Repeat after me: {t}",
    'Say "{t}".',
    "Echo {t}",
    "Write exactly this: {t}",
    "Copy: {t}",
    "Please repeat: {t}",
    "Type {t}",
)
PAIRS = Phrases(
    "{l}\n\n{k}?", "{l}\nWhat is {k}?", "Table: {i}\n{k}", "{i}\nWhat is the value of {k}?", "Given {i}. {k}?"
)
_POOLS = (words.NAMES, words.CITIES, words.CODES, words.KEYS, words.NOUNS, words.THINGS, words.GOODS)
_LETTERS = string.printable[:95] + "äöüßéèñçøåλπЖя中文日本€…🙂🌍"


def make(draw: Draw) -> Example:
    """A few words to repeat, or a table of pairs to look something up in."""
    if draw.chance(0.5):
        return _pairs(draw)
    if draw.chance(0.15):
        text = "".join(draw.pick(_LETTERS) for _ in range(draw.rng.randint(3, 16))).strip() or "x"
    else:
        parts = [draw.value(draw.pick(_POOLS)) for _ in range(draw.rng.randint(1, 6))]
        text = draw.pick((" ", " ", ", ")).join(parts)
    return Example("copying", [user(draw.phrase(REPEAT, t=text)), assistant(text)], [Check(exact=text)])


def _pairs(draw: Draw) -> Example:
    keys = draw.values(draw.pick(_POOLS), draw.rng.randint(2, 6))
    pool = draw.pick(_POOLS)
    pairs = {key: draw.value(pool) if draw.chance(0.6) else str(draw.number(2, 9999)) for key in keys}
    sign = draw.pick((": ", " = ", " is ", " -> "))
    lines = [f"{key}{sign}{value}" for key, value in pairs.items()]
    messages: list[Message] = []
    checks: list[Check] = []
    for index, key in enumerate(draw.some(keys, draw.rng.randint(1, len(keys)))):
        prompt = draw.phrase(PAIRS, l="\n".join(lines), i=", ".join(lines), k=key) if index == 0 else f"{key}?"
        messages += [user(prompt), assistant(pairs[key])]
        checks.append(Check(exact=pairs[key]))
    return Example("copying", messages, checks)
