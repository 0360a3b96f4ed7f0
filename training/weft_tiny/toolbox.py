"""The tools that examples offer: names, arguments, requests for them, results and replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.weft_tiny import words
from training.weft_tiny.grammar import Draw, Phrases, Pool

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """A family of tools: any of the names, argument names and descriptions may be offered."""

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    about: tuple[str, ...]
    sample: Callable[[Draw], tuple[Any, ...]]
    ask: Phrases
    result: Callable[[Draw, tuple[Any, ...]], str]
    reply: str


@dataclass(frozen=True)
class Offered:
    """One tool as a prompt offers it."""

    family: Tool
    name: str
    parameters: tuple[str, ...]
    about: str

    def schema(self) -> dict[str, Any]:
        """The tool as a chat request carries it."""
        properties = {parameter: {"type": "string"} for parameter in self.parameters}
        function = {
            "name": self.name,
            "description": self.about,
            "parameters": {"type": "object", "properties": properties, "required": list(self.parameters)},
        }
        return {"type": "function", "function": function}


def offer(draw: Draw, family: Tool) -> Offered:
    """A tool of the family with its names drawn."""
    parameters = tuple(draw.pick(options) for options in family.parameters)
    return Offered(family, draw.pick(family.names), parameters, draw.pick(family.about))


def number_text(value: float) -> str:
    """A result as text, without a needless fraction."""
    return str(int(value)) if value == int(value) else f"{value:.2f}"


def pooled(*pools: Pool) -> Callable[[Draw], tuple[Any, ...]]:
    """Arguments: a value of each list."""
    return lambda draw: tuple(draw.value(pool) for pool in pools)


def numbered(low: int, high: int, unit: str = "") -> Callable[[Draw, tuple[Any, ...]], str]:
    """Results: a number of a range, with a unit."""
    return lambda draw, _: f"{draw.number(low, high)}{unit}"


def valued(pool: Pool) -> Callable[[Draw, tuple[Any, ...]], str]:
    """Results: a value of a list."""
    return lambda draw, _: draw.value(pool)


def content(draw: Draw, _: tuple[Any, ...]) -> str:
    """What a table may hold: a word, a code, a name or a number."""
    if draw.chance(0.4):
        return str(draw.number(2, 999))
    return draw.value(draw.pick((words.NOUNS, words.CODES, words.NAMES)))


def message(draw: Draw) -> tuple[Any, ...]:
    """Arguments: a person and a short message."""
    text = draw.fill(
        draw.pick(MESSAGES), d=draw.pick(words.DAYS), o=draw.value(words.THINGS), c=draw.value(words.CITIES),
        n=draw.value(words.NAMES),
    )  # fmt: skip
    return draw.value(words.NAMES), text


def meaning(draw: Draw, _: tuple[Any, ...]) -> str:
    """Results: what an invented word may mean."""
    return draw.fill("a (small|big|old) (kind|sort) of {o}", o=draw.value(words.THINGS))


def operands(draw: Draw) -> tuple[Any, ...]:
    """Arguments: an expression of two or three numbers."""
    sign = draw.pick("+-*/")
    top = draw.pick((20, 99, 99, 999))
    left, right = draw.number(2, top), draw.number(2, top)
    if sign == "/":
        left = left * right if left < 100 else left
    if sign == "-" and left < right:
        left, right = right, left
    if draw.chance(0.06):
        return (f"{left} {sign} {right} {draw.pick('+-')} {draw.number(2, 99)}",)
    return (f"{left} {sign} {right}",)


MESSAGES = (
    "I am late", "dinner is ready", "see you soon", "see you on {d}", "bring the {o}", "I am in {c}", "happy birthday",
    "call {n}", "meet me in {c}", "the {o} is here", "{n} is coming on {d}", "I cannot find the {o}",
    "please call {n} on {d}",
)  # fmt: skip
SPOKEN = {"+": ("plus", "and"), "-": ("minus", "less"), "*": ("times", "multiplied by"), "/": ("divided by", "over")}


def spoken(draw: Draw, expression: str) -> str:
    """The expression as a user may write it: with signs, without spaces or in words."""
    style = draw.rng.randrange(4)
    if style == 0:
        return expression
    if style == 1:
        return expression.replace(" ", "")
    parts = expression.split(" ")
    for index in range(1, len(parts), 2):
        usual, other = SPOKEN[parts[index]]
        parts[index] = other if len(parts) == 3 and parts[index] != "+" and draw.chance(0.5) else usual
    return " ".join(parts)


# Word problems: the numbers stand in the text in the order of the expression.
PROBLEMS = (
    ("*", Phrases(
        "There are {a} boxes with {b} (pens|eggs|books) each. How many are there (in all|in total)?",
        "One ticket costs {a} dollars. What do {b} tickets cost?", "I buy {a} cups at {b} dollars each. What do I pay?",
        "A shelf holds {a} books. How many books do {b} shelves hold?",
        "{a} (packs|bags) hold {b} nuts each. How many nuts do I have?",
        "I walk {a} miles each day for {b} days. How far is that?",
        "We need {a} plates for each of {b} tables. How many plates?",
        "~Each of {a} rows has {b} seats. How many seats are there?",
    )),
    ("+", Phrases(
        "{n} has {a} (coins|apples|books) and gets {b} more. How many does {n} have now?",
        "There are {a} cats and {b} dogs. How many animals are there?",
        "I pay {a} dollars for food and {b} dollars for books. What do I pay in total?",
        "I read {a} pages today and {b} pages before. How many pages is that?",
        "{n} earns {a} dollars, and then {b} dollars. What is the sum?",
        "~In one bag are {a} nuts, in another {b}. How many nuts are in both?",
    )),
    ("-", Phrases(
        "{n} has {a} (coins|apples|books) and gives away {b}. How many are left?",
        "From {a} eggs, {b} broke. How many are left?",
        "I had {a} dollars and spent {b}. How much is left?", "A book has {a} pages. I read {b}. How many are left?",
        "{n} had {a} coins and lost {b} of them. How many remain?", "~Of {a} seats, {b} are taken. How many are free?",
    )),
    ("/", Phrases(
        "Share {a} (coins|apples|books) among {b} people. How many does each get?",
        "{a} books are put on {b} shelves evenly. How many are on each shelf?",
        "{a} dollars are shared by {b} friends. What does each one get?",
        "Put {a} eggs into {b} boxes. How many are in each box?", "~Split {a} dollars into {b} equal parts.",
    )),
)  # fmt: skip


def problem(draw: Draw) -> tuple[str, str]:
    """A word problem and its expression."""
    sign, phrases = draw.pick(PROBLEMS)
    left, right = draw.number(3, 200), draw.number(3, 99)
    if sign == "/":
        left = left * right
    if sign == "-" and left < right:
        left, right = right, left
    return draw.phrase(phrases, a=left, b=right, n=draw.value(words.NAMES)), f"{left} {sign} {right}"


_GET_NAMES = ("get_{k}", "{k}_of", "find_{k}", "{k}", "fetch_{k}", "{k}_lookup", "check_{k}")
_GET_ABOUT = (
    "Get the {k} of a {e}.",
    "The {k} of a {e}.",
    "Find the {k} for a {e}.",
    "Returns the {k}.",
    "Look up the {k}.",
)
_GET_ASK = (
    "What is the {k} of {0}?", "What is {0}'s {k}?", "(Get|Find|Tell me) the {k} of {0}.", "Which {k} does {0} have?",
    "I need the {k} of {0}.", "{k} of {0}?", "What {k} has {0}?", "Give me the {k} for {0}.", "Look up the {k} of {0}.",
    "Can you get the {k} of {0}?", "{0}: {k}?", "The {k} for {0}, please.", "I forgot the {k} of {0}.",
    "Check {0}'s {k}.", "Fetch the {k} of {0}.",
    "What is known as the {k} of {0}?", "Let me know the {k} of {0}.", "~Do you know the {k} of {0}?",
    "~Which {k} belongs to {0}?", "~Please find out {0}'s {k}.",
)  # fmt: skip


def made_up(draw: Draw) -> Tool:
    """A tool that returns an attribute, often an invented word, of an entity."""
    noun = draw.value(words.NOUNS) if draw.chance(0.7) else draw.pick(words.ATTRIBUTES).replace(" ", "_")
    entity = draw.pick(("person", "item", "place", "user", "thing", "customer", "room", "team", "file", "city"))
    pool = draw.pick((words.NAMES, words.CITIES, words.CODES, words.KEYS, words.THINGS))
    spoken_noun = noun.replace("_", " ")

    def put(lines: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(line.replace("{k}", spoken_noun).replace("{e}", entity) for line in lines)

    return Tool(
        tuple(name.replace("{k}", noun) for name in _GET_NAMES),
        ((entity, "name", "id", "key", "of", "target"),),
        put(_GET_ABOUT),
        pooled(pool),
        Phrases(*put(_GET_ASK)),
        content,
        f"The {spoken_noun} of {{0}} is {{r}}.",
    )
