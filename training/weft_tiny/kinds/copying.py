"""An auxiliary kind for training only: repeating and looking back, so that copying is learned early."""

from __future__ import annotations

import string

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, Message, assistant, user
from training.weft_tiny.grammar import Draw, Phrases

REPEAT = Phrases(
    "(Repeat|Say|Write|Echo|Copy|Print|Output|Return|Type) (this|the following|the text|these words): {t}",
    "(Repeat|Say|Write|Echo|Copy|Print|Output) {t}", "(Repeat|Say|Write|Copy|Print) this back(| to me): {t}",
    "{t}\n\n(Repeat|Copy|Echo|Say) (that|this|it).", "(Can|Could) you (repeat|say|write) (this|that)? {t}",
    "{t}\n(Say|Write|Repeat) it again.", "(Answer|Reply|Respond) with: {t}", "(Answer|Reply) only with {t}",
    "The word is {t}. (Say|Repeat|Write) it.", "(Please |)(say|write|print): {t}", "I say {t}, you say", "Again: {t}",
    "Input: {t}\nOutput:", "Your (answer|reply) is: {t}", "What did I say? {t}",
    "Repeat: {t}",
    "Say this: {t}",
    "Repeat after me: {t}",
    'Say "{t}".',
    "Echo {t}",
    "Write exactly this: {t}",
    "Copy: {t}",
    "Please repeat: {t}",
    "Type {t}",
)  # fmt: skip
PAIRS = Phrases(
    "{l}\n{k}", "{k}?\n\n{l}", "What is {k}?\n{l}", "{i}. {k}?", "(Look up|Find|Get|Read|Give me) {k}.\n{l}",
    "{l}\n\n(Look up|Find|Get|Read|Give me|Tell me) {k}.", "(Table|Data|Map|Dict):\n{l}\n\n{k}",
    "{i}\n(Which|What) value (does {k} have|belongs to {k}|is at {k})?", "{i} | {k}?", "If {i}, what is {k}?",
    "{l}\n---\n{k}:",
    "{l}\n\n{k}?", "{l}\nWhat is {k}?", "Table: {i}\n{k}", "{i}\nWhat is the value of {k}?", "Given {i}. {k}?"
)  # fmt: skip
_POOLS = (words.NAMES, words.CITIES, words.CODES, words.KEYS, words.NOUNS, words.THINGS, words.GOODS)
_LETTERS = string.printable[:95] + "äöüßéèñçøåλπЖя中文日本€…🙂🌍"


def make(draw: Draw) -> Example:
    """A few words to repeat, or a table of pairs to look something up in."""
    if draw.chance(0.5):
        return _pairs(draw)
    if draw.chance(0.15):
        text = "".join(draw.pick(_LETTERS) for _ in range(draw.rng.randint(3, 16))).strip() or "x"
    else:
        parts = [draw.value(draw.pick(_POOLS)) for _ in range(draw.rng.randint(1, draw.level))]
        text = draw.pick((" ", " ", ", ")).join(parts)
    return Example("copying", [user(draw.phrase(REPEAT, t=text)), assistant(text)], [Check(exact=text)])


def _pairs(draw: Draw) -> Example:
    keys = draw.values(draw.pick(_POOLS), draw.rng.randint(1, draw.level + 1))
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
