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


def numbered(low: int, high: int, *units: str) -> Callable[[Draw, tuple[Any, ...]], str]:
    """Results: a number of a range, with one of the units."""
    return lambda draw, _: f"{draw.number(low, high)}{draw.pick(units) if units else ''}"


def valued(pool: Pool) -> Callable[[Draw, tuple[Any, ...]], str]:
    """Results: a value of a list."""
    return lambda draw, _: draw.value(pool)


def content(draw: Draw, _: tuple[Any, ...]) -> str:
    """What a table may hold: a word, a code, a name or a number, or else something of several parts."""
    if draw.chance(0.15):
        return draw.fill(
            draw.pick(CONTENTS), n=draw.number(2, 999), m=draw.rng.randint(1, 28), c=draw.value(words.CITIES),
            o=draw.value(words.THINGS), d=draw.pick(words.DAYS), w=draw.pick(words.COLORS), y=draw.pick(words.MONTHS),
        )  # fmt: skip
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
    return draw.fill(draw.pick(MEANINGS), o=draw.value(words.THINGS))


def forecast(draw: Draw, _: tuple[Any, ...]) -> str:
    """Results: the weather and how warm it is."""
    return draw.fill("{w}(,|,|,| and| at| with) {n} degrees", w=draw.pick(words.WEATHER), n=draw.number(0, 38))


def clock(draw: Draw, _: tuple[Any, ...]) -> str:
    """Results: a time of day, of 24 or of 12 hours."""
    minute = f"{draw.rng.randint(0, 59):02d}"
    if draw.chance(0.7):
        return f"{draw.rng.randint(0, 23):02d}:{minute}"
    return f"{draw.rng.randint(1, 12)}:{minute} {draw.pick(('am', 'pm'))}"


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
CONTENTS = (
    "{n} (kilos|meters|dollars|days|points)", "{n}.5", "{d}", "{c}", "{y} {m}", "{w}", "on", "off", "yes", "no",
    "open", "closed", "a {w} {o}", "{w} {o}", "{o} {n}", "{c}, {d}", "{d}, {m}:30", "room {n}", "{o} and {w}",
    "free on {d}",
)  # fmt: skip
MEANINGS = (
    "a (small|big|old) (kind|sort) of {o}", "a (small|big|old) (kind|sort) of {o}", "a part of a {o}",
    "something like a {o}", "a {o} for (children|the garden|the kitchen)", "a (person|shop) that sells a {o}",
    "to (break|paint|sell|carry) a {o}", "as (hard|soft|round|old) as a {o}", "a place for a {o}",
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
        "Each day I (save|earn|spend) {a} dollars. How much is that in {b} days?",
        "A (train|bus|plane) has {a} seats. How many seats do {b} of them have?",
        "There are {a} rows of {b} chairs. How many chairs are there?",
        "{a} rooms have {b} beds each. What is the number of beds?",
        "I run {a} miles a day. How many miles do I run in {b} days?",
        "One box weighs {a} kilos. What do {b} boxes weigh?",
        "My garden has {a} trees with {b} plums on each. How many plums do I have?",
        "A page has {a} words. How many words are on {b} pages?",
        "A book costs {a} dollars, and I buy {b} of them. How much do I pay?",
        "{n} reads {a} pages each day. How many pages does {n} read in {b} days?",
        "{n} works {a} hours a week. How many hours is that in {b} weeks?",
        "We have {a} bags, and in each bag are {b} coins. How many coins do we have?",
        "If {a} teams have {b} players each, how many players are there?",
        "For {a} guests we need {b} cups each. How many cups?", "how much are {a} tickets at {b} dollars each",
        "{a} shelves, {b} books on each. How many books?",
        "A baker bakes {a} loaves each hour. How many loaves in {b} hours?",
        "The rent is {a} dollars a month. What do I pay for {b} months?",
        "There are {a} boxes with {b} (pens|eggs|books) each. How many are there (in all|in total)?",
        "One ticket costs {a} dollars. What do {b} tickets cost?", "I buy {a} cups at {b} dollars each. What do I pay?",
        "A shelf holds {a} books. How many books do {b} shelves hold?",
        "{a} (packs|bags) hold {b} nuts each. How many nuts do I have?",
        "I walk {a} miles each day for {b} days. How far is that?",
        "We need {a} plates for each of {b} tables. How many plates?",
        "~Each of {a} rows has {b} seats. How many seats are there?",
    )),
    ("+", Phrases(
        "{n} has {a} (coins|apples|books) and finds {b} more. How many does {n} have now?",
        "I have {a} dollars and get {b} dollars as a gift. How much do I have?",
        "There are {a} men and {b} women on the train. How many people is that?",
        "A farmer has {a} cows and {b} sheep. How many animals does the farmer have?",
        "We walked {a} miles in the morning and {b} miles in the evening. How far did we walk?",
        "One bag weighs {a} kilos, the other {b} kilos. What do they weigh together?",
        "{a} guests are here, and {b} more will come. How many guests will there be?",
        "In one box are {a} pens, in the other {b}. How many pens are there in all?",
        "The lamp costs {a} dollars and the chair {b} dollars. What do both cost?",
        "{n} sold {a} tickets on Monday and {b} on Tuesday. How many tickets is that?",
        "To my {a} stamps I add {b} more. How many stamps do I have?",
        "A town had {a} houses, then {b} more were built. How many houses are there now?",
        "I worked {a} hours last week and {b} hours this week. How many hours in total?",
        "how many fruits are {a} apples and {b} pears",
        "{a} red balls and {b} blue balls are in a bag. How many balls are in the bag?",
        "{n} has {a} (coins|apples|books) and gets {b} more. How many does {n} have now?",
        "There are {a} cats and {b} dogs. How many animals are there?",
        "I pay {a} dollars for food and {b} dollars for books. What do I pay in total?",
        "I read {a} pages today and {b} pages before. How many pages is that?",
        "{n} earns {a} dollars, and then {b} dollars. What is the sum?",
        "~In one bag are {a} nuts, in another {b}. How many nuts are in both?",
    )),
    ("-", Phrases(
        "There were {a} birds on a roof, and {b} flew away. How many are left?",
        "{n} has {a} dollars and pays {b} dollars. How much does {n} have left?",
        "Of {a} (pages|tickets|cookies), {b} are gone. How many are left?",
        "A bus has {a} people on it, and {b} of them leave. How many stay on?",
        "I need {a} dollars and have {b}. How much is missing?",
        "The way is {a} miles long, and I walked {b} miles. How far is it still?",
        "We baked {a} cookies and ate {b}. How many cookies remain?",
        "A shop had {a} lamps and sold {b}. How many lamps does it still have?",
        "From {a} liters of water we drank {b}. How much water is left?",
        "A rope is {a} feet long, and I cut off {b} feet. How long is the rope now?",
        "{a} people were invited, but {b} did not come. How many came?",
        "The coat was {a} dollars and is now {b} dollars cheaper. What does it cost?",
        "If I have {a} eggs and use {b}, how many do I have left?",
        "Out of {a} answers, {n} got {b} wrong. How many were right?",
        "A tank holds {a} liters. {b} liters ran out. How much is in it?",
        "{n} has {a} (coins|apples|books) and gives away {b}. How many are left?",
        "From {a} eggs, {b} broke. How many are left?",
        "I had {a} dollars and spent {b}. How much is left?", "A book has {a} pages. I read {b}. How many are left?",
        "{n} had {a} coins and lost {b} of them. How many remain?", "~Of {a} seats, {b} are taken. How many are free?",
    )),
    ("/", Phrases(
        "{a} (coins|apples|books) are given to {b} people in equal parts. How many does each person get?",
        "I have {a} cookies for {b} children. How many can each child have?",
        "{a} pupils make {b} teams of the same size. How many pupils are in a team?",
        "A rope of {a} feet is cut into {b} equal parts. How long is each part?",
        "The bill is {a} dollars, and we are {b} people. What does each of us pay?",
        "I read a book of {a} pages in {b} days, the same every day. How many pages a day?",
        "{n} has {a} pens and puts them into {b} cups, the same number in each. How many pens are in a cup?",
        "{a} miles in {b} hours: how many miles per hour?",
        "{n} earned {a} dollars in {b} days. How much is that per day?",
        "We plant {a} trees in {b} rows. How many trees are in a row?",
        "Split {a} dollars between {b} people. How much does each get?",
        "{a} kilos of rice fill {b} bags evenly. How many kilos are in one bag?",
        "Divide {a} (plums|nuts|cards) among {b} children. How many does each child get?",
        "{a} guests sit at {b} tables, the same at each. How many sit at one table?",
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
    "{k} {0}", "{k}, {0}?", "{0} {k}?", "what is the {k} of {0}", "{0}'s {k}?", "{0}'s {k}, please.",
    "Can you tell me the {k} of {0}?", "Could you look up {0}'s {k}?",
    "I would like to know the {k} of {0}.", "I want {0}'s {k}.", "I am looking for the {k} of {0}.",
    "Is there a {k} for {0}? Which one?", "For {0}, what is the {k}?", "For {0} I need the {k}.",
    "About {0}: what {k}?", "We have a {e} called {0}. What is the {k}?", "What is the {k} of the {e} {0}?",
    "The {e} is {0}. Get the {k}.", "{e}: {0}. {k}?", "Show me the {k} that {0} has.", "Show {0}'s {k}.",
    "Has {0} a {k}? Tell me.", "The {k} of {0} is what?", "My form asks for the {k} of {0}.",
    "Someone asked me for {0}'s {k}.", "Please find the {k} of {0} for me.", "How about {0}: which {k}?",
    "Look at {0} and tell me the {k}.",
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
