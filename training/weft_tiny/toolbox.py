"""The tools that examples offer: names, arguments, requests for them, results and replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from training.weft_tiny import words
from training.weft_tiny.examples import calculate
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


def _pooled(*pools: Pool) -> Callable[[Draw], tuple[Any, ...]]:
    return lambda draw: tuple(draw.value(pool) for pool in pools)


def _numbered(low: int, high: int, unit: str = "") -> Callable[[Draw, tuple[Any, ...]], str]:
    return lambda draw, _: f"{draw.number(low, high)}{unit}"


def _valued(pool: Pool) -> Callable[[Draw, tuple[Any, ...]], str]:
    return lambda draw, _: draw.value(pool)


def _content(draw: Draw, _: tuple[Any, ...]) -> str:
    """What a table may hold: a word, a code, a name or a number."""
    if draw.chance(0.4):
        return str(draw.number(2, 9999))
    return draw.value(draw.pick((words.NOUNS, words.CODES, words.NAMES)))


def _message(draw: Draw) -> tuple[Any, ...]:
    text = draw.fill(
        draw.pick(MESSAGES), d=draw.pick(words.DAYS), o=draw.value(words.THINGS), c=draw.value(words.CITIES),
        n=draw.value(words.NAMES),
    )  # fmt: skip
    return draw.value(words.NAMES), text


def _meaning(draw: Draw, _: tuple[Any, ...]) -> str:
    return draw.fill("a (small|big|old) (kind|sort) of {o}", o=draw.value(words.THINGS))


def _operands(draw: Draw) -> tuple[Any, ...]:
    sign = draw.pick("+-*/")
    top = draw.pick((20, 99, 999, 9999))
    left, right = draw.number(2, top), draw.number(2, min(top, 999))
    if sign == "/":
        left = left * right if left < 100 else left
    if sign == "-" and left < right:
        left, right = right, left
    if draw.chance(0.12):
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


CALCULATOR = Tool(
    ("calculator", "calculate", "calc", "compute", "eval_math", "math", "evaluate"),
    (("expression", "expr", "formula", "input"),),
    ("Work out an arithmetic expression.", "Evaluates arithmetic.", "A calculator.",
    "Compute the value of an expression.",
     "Calculate sums and products.", "Do the math."),
    _operands,
    Phrases(
        "What is {0}?", "(Calculate|Compute|Work out|Find) {0}.", "How much is {0}?", "{0} = ?",
        "What do you get for {0}?",
        "(Can|Could) you (calculate|compute|work out) {0}?", "Tell me the (result|value) of {0}.",
        "I need to know {0}.",
        "What is the (result|value) of {0}?", "Please (evaluate|compute) {0}.", "{0}", "What does {0} (make|give)?",
        "Give me {0}.", "Could you do {0}?", "{0}, what is that?", "So what is {0}?", "Help me with {0}.",
        "My homework says {0}.", "Do the sum {0}.",
        "I have to compute {0}.", "How many are {0}?", "Let me have the answer to {0}.", "~Solve {0} for me.",
        "~What does {0} come to?", "~Do you know how much {0} equals?",
    ),
    lambda draw, values: number_text(calculate(values[0])),
    "{0} = {r}.",
)  # fmt: skip

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


LOOKUP = Tool(
    ("lookup", "look_up", "get_value", "fetch", "db_get", "read_key", "get", "find_entry", "query_table"),
    (("key", "id", "name", "entry", "k"),),
    ("Look up the value of a key.", "Get the value stored under a key.", "Fetch an entry by its key.",
    "Reads a key from the table.",
     "Find the entry for a key."),
    lambda draw: (draw.value(draw.pick((words.KEYS, words.CODES, words.KEYS))),),
    Phrases(
        "Look up {0}.", "What is the value of {0}?", "(Get|Fetch|Read) the value of {0}.",
        "(Look up|Find) the key {0}.",
        "What is stored under {0}?", "(Get|Fetch) {0} (for me|please).", "I need the (value|entry) for {0}.",
        "Look up the (key|entry|value) {0} (for me|please|in the table).", "What does the table say for {0}?",
        "Read {0}.", "Which value does {0} have?", "Please find {0} in the table.",
        "Open the entry {0}.", "Under {0}, what do we have?", "Give me {0}.", "Key {0}, please.", "{0}: which value?",
        "Tell me about {0}.",
        "Query {0}.", "I want to see {0}.", "Could you look up {0}?", "Check {0} for me.",
        "~Can you check the key {0}?", "~Show me what is saved as {0}.", "~Retrieve {0}, please.",
    ),
    _content,
    "The value of {0} is {r}.",
)  # fmt: skip

NAMED: tuple[Tool, ...] = (
    CALCULATOR,
    LOOKUP,
    Tool(
        ("weather", "get_weather", "current_weather", "forecast", "weather_report"),
        (("city", "location", "place", "town"),),
        ("Current weather in a city.", "Get the weather of a place.", "Weather report for a town.",
        "Tells the weather."),
        _pooled(words.CITIES),
        Phrases(
            "(What is|How is) the weather in {0}?", "What is the weather like in {0} (today|now)?", "Weather in {0}?",
            "Is it (warm|cold|raining|sunny) in {0}?", "Tell me the weather in {0}.", "Do I need a coat in {0}?",
            "Check the weather for {0}.", "How warm is it in {0}?", "I travel to {0}. How is the weather?",
            "Will it rain in {0}?", "Weather report for {0}, please.", "{0}: sun or rain?",
            "What should I wear in {0}?", "Forecast for {0}?",
            "Let me know the weather at {0}.", "~Give me the weather report of {0}.",
            "~Should I take an umbrella in {0}?",
        ),
        lambda draw, _: f"{draw.pick(words.WEATHER)}, {draw.number(0, 38)} degrees",
        "The weather in {0} is {r}.",
    ),
    Tool(
        ("population", "get_population", "count_people", "city_size"),
        (("city", "place", "town"),),
        ("Number of people in a city.", "Get the population of a place.", "How many people live in a town."),
        _pooled(words.CITIES),
        Phrases(
            "How many people live in {0}?", "What is the population of {0}?", "How big is the population of {0}?",
            "Tell me the population of {0}.", "Get the number of people in {0}.",
            "{0} has how many people?", "Population of {0}?", "Is {0} a big city? How many people?",
            "Number of people in {0}?", "What is the size of {0}?", "~How many inhabitants does {0} have?",
            "~Count the people of {0}.",
        ),
        _numbered(100, 999999),
        "{r} people live in {0}.",
    ),
    Tool(
        ("local_time", "get_time", "time_in", "clock", "current_time"),
        (("city", "location", "place", "zone"),),
        ("Current time in a city.", "Get the local time of a place.", "Tells the time."),
        _pooled(words.CITIES),
        Phrases(
            "What time is it in {0}?", "What is the (local |)time in {0}?", "Tell me the time in {0}.", "Time in {0}?",
            "How late is it in {0}?", "Get the current time in {0}.", "I call someone in {0}. What time is it there?",
            "Is it late in {0}?", "Which time do they have in {0}?", "Local time of {0}, please.",
            "~What does the clock say in {0}?",
            "~What is the hour in {0}?",
        ),
        lambda draw, _: f"{draw.rng.randint(0, 23):02d}:{draw.rng.randint(0, 59):02d}",
        "It is {r} in {0}.",
    ),
    Tool(
        ("phone_book", "find_phone", "get_number", "phone_number", "contacts"),
        (("name", "person", "who", "contact"),),
        ("Find the phone number of a person.", "Phone numbers by name.", "Search the contacts."),
        _pooled(words.NAMES),
        Phrases(
            "What is the phone number of {0}?", "What is {0}'s (phone |)number?", "Find the number of {0}.",
            "I want to call {0}. What is the number?", "How can I call {0}?", "Get me {0}'s phone number.",
            "Phone number of {0}?", "I need to phone {0}.", "Give me the number for {0}.",
            "Do you have the phone number of {0}?", "Look up {0} in the contacts.",
            "~Which number do I dial to reach {0}?", "~Search for the phone number of {0}.",
        ),
        _numbered(10000, 999999),
        "The phone number of {0} is {r}.",
    ),
    Tool(
        ("order_status", "get_order", "track_order", "check_order", "track_package"),
        (("order_id", "order", "id", "number"),),
        ("Status of an order.", "Track an order by its number.", "Check where an order is."),
        _pooled(words.CODES),
        Phrases(
            "Where is my order {0}?", "What is the status of order {0}?", "(Track|Check) (my |)order {0}.",
            "Has order {0} been sent?",
            "I am waiting for order {0}.", "When does order {0} arrive?", "Order {0}: where is it?",
            "Did {0} arrive?", "How is my order {0} doing?", "Status of {0}?", "Please look after my package {0}.",
            "~Any news on order {0}?",
            "~What happened to my order {0}?",
        ),
        lambda draw, _: draw.pick(("shipped", "delivered", "delayed", "packed", "cancelled", "on the way", "paid")),
        "Order {0} is {r}.",
    ),
    Tool(
        ("stock", "check_stock", "inventory", "get_stock", "in_stock"),
        (("item", "product", "article", "name"),),
        ("How many of an item are in stock.", "Check the inventory.", "Number of items in store."),
        _pooled(words.THINGS),
        Phrases(
            "How many of the item {0} are in stock?", "Is the {0} in stock?", "Check the stock of {0}.",
            "Do you have a {0} in store?",
            "How many {0} items are left?", "What is the stock for {0}?", "Stock of {0}?", "Can I still get a {0}?",
            "How many of {0} do we have?", "Inventory for {0}, please.", "Count the {0} in store.",
            "~Is there still a {0} in the store?",
            "~What does the inventory say about {0}?",
        ),
        _numbered(2, 900),
        "There are {r} of {0} in stock.",
    ),
    Tool(
        ("price", "get_price", "price_of", "check_price", "cost"),
        (("item", "product", "article", "name"),),
        ("Price of an item.", "Get the price of a product.", "Find out what an item costs."),
        _pooled(words.THINGS),
        Phrases(
            "What does the {0} cost?", "How much is the {0}?", "What is the price of the {0}?", "Get the price of {0}.",
            "Price of {0}?", "Tell me the price for the {0}.", "I want to buy the {0}. How much is it?",
            "The {0}, how much?", "What do you ask for the {0}?", "Check the cost of the {0}.",
            "~How expensive is the {0}?",
            "~What must I pay for the {0}?",
        ),
        _numbered(2, 2000, " dollars"),
        "The price of {0} is {r}.",
    ),
    Tool(
        ("define", "dictionary", "definition", "explain_word"),
        (("word", "term", "w"),),
        ("Definition of a word.", "Explains a word.", "Dictionary of words."),
        _pooled(words.NOUNS),
        Phrases(
            "What does {0} mean?", "Define {0}.", "What is the (meaning|definition) of {0}?", "Explain the word {0}.",
            "What is the meaning of the word {0}?", "Meaning of {0}?", "{0}: what is that?",
            "Give the definition of {0}.", "Look up the word {0} in the dictionary.", "What is meant by {0}?",
            "~Tell me what the word {0} means.",
            "~I do not know the word {0}. What is it?",
        ),
        _meaning,
        "The word {0} means {r}.",
    ),
    Tool(
        ("translate", "translator", "translate_word", "translation"),
        (("word", "text", "input"), ("language", "lang", "to", "target")),
        ("Translate a word.", "Translates into another language.", "Translation of words."),
        lambda draw: (draw.value(draw.pick((words.NOUNS, words.THINGS, words.MEALS))), draw.pick(words.LANGUAGES)),
        Phrases(
            "Translate {0} (to|into) {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?",
            "What is the {1} word for {0}?",
            "Give me {0} in {1}.", "{0} into {1}, please.", "Say {0} in {1}.", "Can you translate {0} to {1}?",
            "What do they call {0} in {1}?", "{1} for {0}?", "Put {0} into {1}.", "~I need the word {0} in {1}.",
            "~How would one say {0} in {1}?",
        ),
        _valued(words.NOUNS),
        "{0} in {1} is {r}.",
    ),
    Tool(
        ("distance", "get_distance", "route_length", "how_far"),
        (("start", "from", "origin", "a"), ("end", "to", "destination", "b")),
        ("Distance between two cities.", "How far it is from one place to another.", "Length of a route."),
        _pooled(words.CITIES, words.CITIES),
        Phrases(
            "How far is it from {0} to {1}?", "What is the distance (from|between) {0} (to|and) {1}?",
            "How far is {0} from {1}?",
            "Distance from {0} to {1}?", "How long is the (way|route) from {0} to {1}?",
            "I go from {0} to {1}. What is the distance?", "Is it far from {0} to {1}?", "From {0} to {1}: how far?",
            "Tell me how far {1} is from {0}.", "~How many kilometers are between {0} and {1}?",
            "~I travel from {0} to {1}. How far is that?",
        ),
        _numbered(10, 9000, " km"),
        "It is {r} from {0} to {1}.",
    ),
    Tool(
        ("convert", "exchange", "convert_money", "currency"),
        (("amount", "value", "sum"), ("source", "from", "from_currency"), ("target", "to", "to_currency")),
        ("Convert money.", "Exchange an amount to another currency.", "Converts currencies."),
        lambda draw: (draw.number(2, 5000), *draw.some(words.CURRENCIES, 2)),
        Phrases(
            "Convert {0} {1} (to|into) {2}.", "How many {2} are {0} {1}?", "What are {0} {1} in {2}?",
            "Change {0} {1} (to|into) {2}.",
            "How much is {0} {1} in {2}?", "{0} {1} to {2}?", "{0} {1} in {2}, please.",
            "What do I get in {2} for {0} {1}?", "Turn {0} {1} into {2}.", "Can you change {0} {1} to {2}?",
            "~I have {0} {1}. What is that in {2}?", "~Exchange {0} {1} for {2}.",
        ),
        _numbered(2, 9999),
        "{0} {1} are {r} {2}.",
    ),
    Tool(
        ("send_message", "send", "message", "text_person", "send_text"),
        (("to", "recipient", "person", "name"), ("text", "message", "body")),
        ("Send a message to a person.", "Sends a text.", "Write to somebody."),
        _message,
        Phrases(
            "Send {0} the message: {1}", "Tell {0}: {1}", 'Send "{1}" to {0}.', 'Message {0}: "{1}"',
            "Write to {0}: {1}",
            'Send {0} a message saying "{1}".', 'Text {0} "{1}".', "Please write {0}: {1}", 'Can you tell {0} "{1}"?',
            "To {0}: {1}", '{0} should read this: "{1}"', 'Drop {0} a line: "{1}"', '~Let {0} know this: "{1}"',
            "~A message for {0}: {1}",
        ),
        lambda draw, _: draw.pick(("sent", "ok", "done", "delivered")),
        "The message to {0} was sent.",
    ),
    Tool(
        ("set_timer", "timer", "start_timer", "alarm"),
        (("minutes", "duration", "time"),),
        ("Set a timer in minutes.", "Starts a timer.", "Rings after some minutes."),
        lambda draw: (draw.number(2, 180),),
        Phrases(
            "Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer for {0} minutes please.",
            "Wake me in {0} minutes.",
            "Remind me in {0} minutes.", "{0} minutes, go!", "Count down {0} minutes.", "My tea needs {0} minutes.",
            "Can you set a timer to {0} minutes?", "Tell me when {0} minutes are over.", "~Ring after {0} minutes.",
            "~I need an alarm in {0} minutes.",
        ),
        lambda draw, _: draw.pick(("ok", "done", "set", "started")),
        "The timer is set for {0} minutes.",
    ),
    Tool(
        ("add_event", "create_event", "calendar_add", "schedule"),
        (("title", "event", "what", "name"), ("day", "date", "when")),
        ("Add an event to the calendar.", "Puts something in the calendar.", "Schedule an event."),
        lambda draw: (draw.value(words.HAPPENINGS), draw.pick(words.DAYS)),
        Phrases(
            "Add a {0} on {1} (to my calendar|please).", "Put the {0} on {1} in my calendar.",
            "Schedule a {0} for {1}.",
            "Create an event: {0} on {1}.", "I have a {0} on {1}. Add it.", "{0} on {1}, please add it.",
            "New event: {0}, {1}.", "On {1} I have a {0}. Put it in.", "Can you schedule the {0} on {1}?",
            "My calendar needs a {0} on {1}.", "~Save the {0} for {1}.",
            "~There is a {0} on {1}, note it.",
        ),
        lambda draw, _: draw.pick(("ok", "added", "done", "saved")),
        "The {0} on {1} is in the calendar.",
    ),
    Tool(
        ("search", "web_search", "find", "search_docs"),
        (("query", "q", "text", "topic"),),
        ("Search the web.", "Find pages about a topic.", "Searches documents."),
        _pooled(words.NOUNS),
        Phrases(
            "Search for {0}.", "Find (pages|something|documents) about {0}.", "What can you find about {0}?",
            "Look for {0} on the web.",
            "Search the web for {0}.", "I want to read about {0}.", "{0}: what is on the web?", "Any pages on {0}?",
            "Do a search for {0}.", "Which documents talk about {0}?", "~Is there something on the web about {0}?",
            "~Google {0}.",
        ),
        lambda draw, _: f"{draw.number(2, 999)} pages",
        "I found {r} about {0}.",
    ),
)  # fmt: skip

_GET_NAMES = ("get_{k}", "{k}_of", "find_{k}", "{k}", "fetch_{k}", "{k}_lookup", "check_{k}")
_GET_ABOUT = ("Get the {k} of a {e}.", "The {k} of a {e}.", "Find the {k} for a {e}.", "Returns the {k}.",
"Look up the {k}.")
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
        _pooled(pool),
        Phrases(*put(_GET_ASK)),
        _content,
        f"The {spoken_noun} of {{0}} is {{r}}.",
    )
