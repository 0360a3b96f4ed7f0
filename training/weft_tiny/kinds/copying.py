"""An auxiliary kind for training only: repeating and looking back, so that copying is learned early."""

from __future__ import annotations

import string

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, Message, assistant, user
from training.weft_tiny.grammar import Draw, Phrases

REPEAT = Phrases(
    "repeat this: {t}", "say {t}", "repeat {t}", "copy this for me: {t}",
    "(Can|Could|Would) you (repeat|copy|echo|type) this(| for me)? {t}", '(Can|Could|Would) you say "{t}"?',
    "Please (say|repeat|write|copy) this: {t}", 'Please (say|repeat|write|copy) "{t}".',
    "(Say|Repeat|Write|Copy) what follows: {t}", "(Say|Repeat|Write|Copy) what comes next.\n{t}",
    "(Repeat|Copy|Echo) the (next line|line below).\n{t}", "(Repeat|Copy|Echo) my (words|message|text): {t}",
    "{t}\n\nPlease (repeat|copy|echo) what I wrote.", "{t}\n(Repeat|Copy) the line above.",
    '"{t}" - (repeat|say|copy) (it|this|that).', "I (want|would like) you to (say|write|repeat) this: {t}",
    "I want to hear this from you: {t}", "Your (task|job): (repeat|copy|echo) this. {t}",
    "Task: (repeat|copy|echo)\nText: {t}", "Text: {t}\nCopy:", "original: {t}\ncopy:", 'echo "{t}"', 'print("{t}")',
    "My words are: {t}\nYour words are:", "(Send|Give|Read) this back to me: {t}",
    "Say (only|just|nothing but) this: {t}", "(Answer|Reply|Respond) with this text(| only): {t}", "Once more: {t}",
    "(Repeat|Say|Write|Echo|Copy|Print|Output|Return|Type) (this|the following|the text|these words): {t}",
    "(Repeat|Say|Write|Echo|Copy|Print|Output) {t}", "(Repeat|Say|Write|Copy|Print) this back(| to me): {t}",
    "{t}\n\n(Repeat|Copy|Echo|Say) (that|this|it).", "(Can|Could) you (repeat|say|write) (this|that)? {t}",
    "{t}\n(Say|Write|Repeat) it again.", "(Answer|Reply|Respond) with: {t}", "(Answer|Reply) only with {t}",
    "The word is {t}. (Say|Repeat|Write) it.", "(Please |)(say|write|print): {t}", "I say {t}, you say", "Again: {t}",
    "Input: {t}\nOutput:", "Your (answer|reply) is: {t}", "What did I say? {t}", "Repeat: {t}", "Say this: {t}",
    "Repeat after me: {t}", 'Say "{t}".', "Echo {t}", "Write exactly this: {t}", "Copy: {t}", "Please repeat: {t}",
    "Type {t}",
)  # fmt: skip
PAIRS = Phrases(
    "{i}\n{k}?", "{i}\n\n{k}", "{k} in {i}?", "please look up {k}\n{l}",
    "(Can|Could) you (find|look up|tell me|give me) {k}?\n{l}",
    "{l}\n\n(Can|Could) you (find|look up|tell me|give me) {k}?", "I need (the value of |){k}.\n{l}",
    "{l}\nI need (the value of |){k}.", "Here (is a|is the|is my) (table|list|map): {i}. What is {k}?",
    "(Below|This) is a (table|list).\n{l}\n\nWhat (is|does it say for) {k}?",
    "In this (table|list), what is {k}?\n{l}", "{l}\n\n(Which|What) value (goes with|is given for|is next to) {k}?",
    "What (goes with|belongs to) {k}?\n{l}", "What (goes with|belongs to) {k} (here|in this list)? {i}",
    "{i}. (Look up|Find|Tell me) {k}.", "{i}. So what is {k}?", "The (table|list|data): {i}\nThe (question|key): {k}",
    "key: {k}\ntable: {i}", "table: {i}\nkey: {k}\nvalue:", "{l}\n\nkey: {k}\nvalue:",
    "(Remember|Note|Learn) this: {i}. Now, {k}?", "Value (of|for) {k}?\n\n{l}", "{l}\n\nValue (of|for) {k}?",
    "lookup({k})\n{l}",
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
