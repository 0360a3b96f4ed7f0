"""An auxiliary kind for training only: many look-ups in one small table, for dense lessons in matching.

In an answer on a passage, one or two tokens need a look-up. Here nearly every token of the answer does, over the forms
that the other kinds use, from single letters to sentences.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.facts import MADE_UP_ASK, MADE_UP_SAY
from training.weft_tiny.grammar import Draw, Phrases, capital

_POOLS = (words.NAMES, words.CITIES, words.CODES, words.KEYS, words.NOUNS, words.THINGS, words.GOODS)
_ONE_LETTER = tuple(string.ascii_letters)
_ONE_DIGIT = tuple(string.digits)
_SAY, _ASK = Phrases(*MADE_UP_SAY).train, Phrases(*MADE_UP_ASK).train
_WANTED = Phrases(
    "{t}\n{k}", "{t}\n\n{k}?", "{k}\n\n{t}", "{k}\n{t}", "{t}. What (is|about) {k}?", "{t}\n\nI need {k}.",
    "I need {k}.\n\n{t}", "I have this:\n{t}\nWhat is {k}?", "What is {k} here?\n{t}", "{t}\n---\n{k}",
    "Data:\n{t}\n\nWanted: {k}", "Wanted: {k}\nData: {t}", "Table:\n{t}\n\nLook up {k}.",
    "(Look up|Get|Read) {k} (in|from) this table: {t}", "{t}\n(Look up|Get|Read|Tell me) {k}",
    "Here is a (table|list): {t}\n(Show|Give|Tell) me {k}.", "(Can|Could) you (look up|find|give me) {k}?\n{t}",
    "{t}\n\n(Can|Could) you (look up|find|give me) {k}?", "Text: {t}\nKeys: {k}",
    "With this in mind: {t}\nWhat is {k}?", "input: {t}\nkeys: {k}\noutput:",
    "(Please find|Please give me|Please read out) {k}: {t}",
    "{t}\n\n{k}", "{t}\n{k}?", "Table: {t}\nGive me {k}.", "{t}\n\nWhat is {k}?", "Given {t}: {k}", "{t}. Find {k}.",
    "Find {k}.\n{t}", "{k}?\n\n{t}", "Use this: {t}\nTell me {k}.", "Keys: {k}\nText: {t}",
)  # fmt: skip
_ASKED = Phrases("{t}\n\n{q}", "{t}\n{q}", "{t} {q}", "Text: {t}\nQuestions: {q}", "{q}\n\n{t}", "{q}\nText: {t}")
_ASKED = _ASKED.also(
    "Read this. {t}\n{q}", "{t}\n\nNow answer: {q}", "(Answer|Please answer): {q}\n\n{t}", "{q} {t}",
    "Facts: {t}\n{q}", "Questions: {q}\n\nText: {t}", "Context: {t}\n\n{q}", "{q}\nUse this: {t}", "{t}\n---\n{q}",
    "I know this: {t} {q}", "From the text: {q}\n{t}", "Note: {t}\nAsked: {q}",
    "Text:\n{t}\n\nQuestions:\n{q}\nAnswers:",
)  # fmt: skip


def make(draw: Draw) -> Example:
    """A table of pairs or of subjects and attributes, and a request for most of it in another order."""
    return _pairs(draw) if draw.chance(0.5) else _grid(draw)


def _column(draw: Draw, count: int) -> list[str]:
    """``count`` different values of one sort."""
    roll = draw.rng.random()
    if roll < 0.15:
        return draw.some(_ONE_LETTER, count)
    if roll < 0.2:
        return draw.some(_ONE_DIGIT, count)
    if roll < 0.35:
        top = draw.pick((20, 100, 1000, 10000))
        numbers: dict[str, None] = {}
        while len(numbers) < count:
            numbers[str(draw.number(1, top))] = None
        return list(numbers)
    return draw.values(draw.pick(_POOLS), count)


def _pairs(draw: Draw) -> Example:
    count = draw.rng.randint(2, draw.level + 2)
    keys, values = _column(draw, count), _column(draw, count)
    sign = draw.pick((": ", " = ", " is ", " -> ", " ", "="))
    between = draw.pick((", ", "; ", "\n", "\n- "))
    table = between.join(f"{key}{sign}{value}" for key, value in zip(keys, values, strict=True))
    order = draw.some(range(count), 1 if draw.chance(0.25) else count)
    prompt = draw.phrase(_WANTED, t=table, k=", ".join(keys[index] for index in order))
    return _example(prompt, _listed(draw, [keys[index] for index in order], [values[index] for index in order]))


def _listed(draw: Draw, keys: Sequence[str], values: Sequence[str]) -> str:
    """The answer: values alone, pairs, or a JSON object."""
    roll = draw.rng.random()
    if roll < 0.2 or (len(keys) == 1 and roll < 0.6):
        return ", ".join(values)
    if roll < 0.75:
        return ", ".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    inner = ", ".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
    return f"{{{inner}}}"


def _grid(draw: Draw) -> Example:
    """Subjects with the same attributes, stated in sentences; only the pair of both names a value."""
    count = draw.rng.randint(1, min(3, draw.level))
    people = draw.values(draw.pick((words.NAMES, words.NAMES, words.THINGS)), count)
    low = 2 if len(people) == 1 else 1
    attributes = draw.values(words.NOUNS, draw.rng.randint(low, 3 if len(people) < 3 else 2))
    cells = [(person, attribute) for person in people for attribute in attributes]
    values = dict(zip(cells, _column(draw, len(cells)), strict=True))
    if len({*people, *attributes, *values.values()}) < len(people) + len(attributes) + len(values):
        return make(draw)
    stated = draw.some(cells, len(cells)) if draw.chance(0.5) else cells
    same = draw.vary(draw.pick(_SAY)) if draw.chance(0.5) else None
    lines = [
        draw.fill(same or draw.pick(_SAY), s=person, k=attribute, v=values[person, attribute])
        for person, attribute in stated
    ]
    text = " ".join(line if line.startswith(values[cell]) else capital(line)
                    for line, cell in zip(lines, stated, strict=True))  # fmt: skip
    order = draw.some(cells, len(cells))
    question = draw.pick((*_ASK, "{s}, {k}?", "{k} of {s}?", "{s}'s {k}?", "the {k} of {s}"))
    questions = " ".join(draw.fill(question, s=person, k=attribute) for person, attribute in order)
    answers = [values[cell] for cell in order]
    if draw.chance(0.7):
        answers = [f"{person}, {attribute}: {values[person, attribute]}" for person, attribute in order]
    return _example(draw.phrase(_ASKED, t=text, q=questions), draw.pick(("; ", "\n", ", ")).join(answers))


def _example(prompt: str, answer: str) -> Example:
    return Example("recall", [user(prompt), assistant(answer)], [Check(exact=answer)])
