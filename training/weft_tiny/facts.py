"""Relations between a subject and a value: how a text states them, how one asks for them, how one replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from training.weft_tiny import words
from training.weft_tiny.grammar import Draw, Phrases, Pool

Sample = Callable[[Draw], str | int]


@dataclass(frozen=True)
class Relation:
    """A kind of fact; ``keys`` are the names a JSON record may give it."""

    keys: tuple[str, ...]
    sample: Sample
    say: Phrases
    ask: Phrases
    reply: str


@dataclass(frozen=True)
class Fact:
    """One stated fact."""

    relation: Relation
    subject: str
    value: str | int

    def sentence(self, draw: Draw) -> str:
        """A sentence that states the fact."""
        return draw.phrase(self.relation.say, s=self.subject, v=self.value)

    def question(self, draw: Draw) -> str:
        """A question for the value."""
        return draw.phrase(self.relation.ask, s=self.subject)

    def answer(self) -> str:
        """The full-sentence answer."""
        return self.relation.reply.replace("{s}", self.subject).replace("{v}", str(self.value))


def _from(pool: Pool) -> Sample:
    return lambda draw: draw.value(pool)


def _within(low: int, high: int) -> Sample:
    return lambda draw: draw.number(low, high)


def _one_of(options: tuple[str, ...]) -> Sample:
    return lambda draw: draw.pick(options)


PERSON = (
    Relation(
        ("city", "town", "home", "residence"),
        _from(words.CITIES),
        Phrases(
            "{s} lives in {v}.", "{s} has a (flat|house|home|small flat) in {v}.", "{s} moved to {v} last (year|month).",
            "The home of {s} is in {v}.", "{s} comes from {v}.", "{s}, who lives in {v}, is very kind.",
            "For (two|three|many) years {s} has lived in {v}.", "{s} is from {v}.",
            "~{v} is where {s} lives.", "~{s} settled in {v} (long ago|years ago).",
        ),
        Phrases(
            "Where does {s} live?", "(Which|What) (city|town) does {s} live in?", "Where is {s} from?",
            "In (which|what) (city|town) is the home of {s}?", "Tell me where {s} lives.",
            "What is the (city|town) of {s}?", "Which place does {s} call home?",
            "~Where is {s}'s home?", "~Can you name the (town|city) where {s} lives?",
        ),
        "{s} lives in {v}.",
    ),
    Relation(
        ("age", "years"),
        _within(5, 99),
        Phrases(
            "{s} is {v} years old.", "{s} is {v}.", "{s} turned {v} (this year|last week|in May).",
            "At {v}, {s} is still very active.", "The age of {s} is {v}.", "{s} is aged {v}.",
            "~{s} has just had a birthday and is now {v}.", "~{s}'s age is {v}.",
        ),
        Phrases(
            "How old is {s}?", "What is the age of {s}?", "What age is {s}?", "How many years old is {s}?",
            "Tell me how old {s} is.", "What is {s}'s age?", "~Do you know the age of {s}?", "~How old would you say {s} is?",
        ),
        "{s} is {v} years old.",
    ),
    Relation(
        ("job", "occupation", "profession", "work"),
        _from(words.WORK),
        Phrases(
            "{s} works as a {v}.", "{s} is a {v}.", "{s} has a job as a {v}.", "{s} became a {v} (long ago|last year).",
            "The job of {s} is {v}.", "{s} earns a living as a {v}.", "Everyone knows {s} the {v}.",
            "~By profession, {s} is a {v}.", "~{s} trained for years to be a {v}.",
        ),
        Phrases(
            "What does {s} do for a living?", "What is the job of {s}?", "What is {s}'s (job|profession|occupation)?",
            "What (job|kind of work) does {s} have?", "What does {s} work as?", "What is {s} by trade?",
            "~How does {s} earn a living?", "~Tell me {s}'s job.",
        ),
        "{s} is a {v}.",
    ),
    Relation(
        ("food", "favorite_food", "meal"),
        _from(words.MEALS),
        Phrases(
            "{s} likes to eat {v}.", "{s} loves {v}.", "The favorite food of {s} is {v}.", "{s} always orders {v}.",
            "For lunch {s} has {v}.", "{s} eats {v} (every day|all the time).", "Nothing tastes better to {s} than {v}.",
            "~When hungry, {s} wants {v}.", "~{s} cannot live without {v}.",
        ),
        Phrases(
            "What does {s} like to eat?", "What is the favorite food of {s}?", "Which food does {s} love?",
            "What food does {s} like?", "What is {s}'s favorite food?", "What does {s} (eat|order)?",
            "~Which dish is {s} fond of?", "~What would {s} want to eat?",
        ),
        "{s} likes to eat {v}.",
    ),
    Relation(
        ("hobby", "pastime", "interest"),
        _from(words.PASTIMES),
        Phrases(
            "The hobby of {s} is {v}.", "{s} enjoys {v}.", "In the evening {s} goes for {v}.", "{s} is very good at {v}.",
            "On weekends {s} does some {v}.", "{s} spends free time on {v}.", "{s}'s hobby is {v}.",
            "~{v} is what {s} does for fun.", "~In spare hours, {s} practices {v}.",
        ),
        Phrases(
            "What is the hobby of {s}?", "What does {s} enjoy?", "What hobby does {s} have?", "What is {s}'s hobby?",
            "What does {s} do (on weekends|in free time|for fun)?", "What is {s} good at?",
            "~How does {s} spend spare time?", "~Which pastime does {s} have?",
        ),
        "The hobby of {s} is {v}.",
    ),
    Relation(
        ("pet", "animal"),
        _from(words.PETS),
        Phrases(
            "{s} has a pet {v}.", "{s} keeps a {v}.", "{s} owns a {v}.", "The pet of {s} is a {v}.",
            "{s} walks home with a {v}.", "{s} found a {v} and kept it.", "At home {s} feeds a {v}.",
            "~A {v} lives with {s}.", "~{s} looks after a {v}.",
        ),
        Phrases(
            "What pet does {s} have?", "What animal does {s} (own|keep)?", "Which animal does {s} have?",
            "What is the pet of {s}?", "What kind of pet does {s} own?", "What is {s}'s pet?",
            "~What creature does {s} look after?", "~Which animal lives with {s}?",
        ),
        "{s} has a {v}.",
    ),
    Relation(
        ("friend", "best_friend", "partner"),
        _from(words.NAMES),
        Phrases(
            "{s} is a friend of {v}.", "The best friend of {s} is {v}.", "{s} and a friend called {v} often talk.",
            "{s} plays with {v}.", "{s} has a friend named {v}.", "{s} met a friend, {v}.",
            "~{s} trusts a friend by the name of {v}.", "~{s}'s closest friend is {v}.",
        ),
        Phrases(
            "Who is the (best friend|friend) of {s}?", "Who is {s}'s (best friend|friend)?",
            "What is the name of {s}'s friend?", "Which friend does {s} have?", "What is {s}'s friend called?",
            "~Who does {s} have as a friend?", "~Name the friend of {s}.",
        ),
        "The friend of {s} is {v}.",
    ),
    Relation(
        ("phone", "phone_number", "number"),
        lambda draw: str(draw.number(10000, 999999)),
        Phrases(
            "The phone number of {s} is {v}.", "{s} can be called at {v}.", "Call {s} on {v}.", "{s}'s number is {v}.",
            "{s} has the number {v}.", "To reach {s}, dial {v}.", "~Phone {s} at {v}.", "~{s} answers calls to {v}.",
        ),
        Phrases(
            "What is the phone number of {s}?", "What is {s}'s (number|phone number)?", "Which number does {s} have?",
            "How can I call {s}?", "What number do I dial for {s}?", "~On which number can {s} be called?",
            "~I need to phone {s}. What is the number?",
        ),
        "The number of {s} is {v}.",
    ),
    Relation(
        ("color", "favorite_color"),
        _one_of(words.COLORS),
        Phrases(
            "The favorite color of {s} is {v}.", "{s} likes the color {v}.", "{s} always wears {v}.",
            "{s} painted the door {v}.", "{s} has a {v} coat.", "{s} loves the color {v}.",
            "~Of all colors, {s} prefers {v}.", "~{s} dresses in {v}.",
        ),
        Phrases(
            "What is the favorite color of {s}?", "Which color does {s} like?", "What color does {s} (like|love|wear)?",
            "What is {s}'s (color|favorite color)?", "~Which color does {s} prefer?", "~Name the color of {s}.",
        ),
        "The color of {s} is {v}.",
    ),
)

ITEM = (
    Relation(
        ("price", "cost"),
        _within(2, 999),
        Phrases(
            "The {s} costs {v} (dollars|euros).", "The price of the {s} is {v} (dollars|euros).",
            "You can buy the {s} for {v} (dollars|euros).", "The {s} is sold for {v} (dollars|euros).",
            "One pays {v} (dollars|euros) for the {s}.", "~The shop asks {v} (dollars|euros) for the {s}.",
            "~The {s} is priced at {v} (dollars|euros).",
        ),
        Phrases(
            "How much (is|does|for) the {s}?", "What is the price of the {s}?", "What does the {s} cost?",
            "How much does the {s} cost?", "How much must I pay for the {s}?", "~How expensive is the {s}?",
            "~At what price is the {s} sold?",
        ),
        "The {s} costs {v}.",
    ),
    Relation(
        ("weight", "mass"),
        _within(2, 400),
        Phrases(
            "The {s} weighs {v} (grams|kilos).", "The weight of the {s} is {v} (grams|kilos).",
            "The {s} has a weight of {v} (grams|kilos).", "With {v} (grams|kilos), the {s} is easy to carry.",
            "~The scale shows {v} (grams|kilos) for the {s}.",
        ),
        Phrases(
            "How much does the {s} weigh?", "What is the weight of the {s}?", "How heavy is the {s}?",
            "~What weight does the {s} have?",
        ),
        "The {s} weighs {v}.",
    ),
    Relation(
        ("color", "shade"),
        _one_of(words.COLORS),
        Phrases(
            "The {s} is {v}.", "The color of the {s} is {v}.", "The {s} was painted {v}.", "The {s} comes in {v}.",
            "The {s} has a nice {v} color.", "~Someone chose {v} as the color of the {s}.", "~The {s} shines in {v}.",
        ),
        Phrases(
            "What color is the {s}?", "What is the color of the {s}?", "Which color does the {s} have?",
            "~In what color does the {s} come?", "~Tell me the color of the {s}.",
        ),
        "The {s} is {v}.",
    ),
    Relation(
        ("material",),
        _one_of(words.MATERIALS),
        Phrases(
            "The {s} is made of {v}.", "The {s} was made from {v}.", "The material of the {s} is {v}.",
            "They built the {s} out of {v}.", "~A craftsman made the {s} from {v}.", "~{v} was used for the {s}.",
        ),
        Phrases(
            "What is the {s} made of?", "What is the material of the {s}?", "Which material is the {s} made from?",
            "~What was used to make the {s}?", "~Of what material is the {s}?",
        ),
        "The {s} is made of {v}.",
    ),
    Relation(
        ("owner",),
        _from(words.NAMES),
        Phrases(
            "The {s} belongs to {v}.", "The owner of the {s} is {v}.", "{v} owns the {s}.", "The {s} was given to {v}.",
            "{v} bought the {s}.", "~The {s} is the property of {v}.", "~{v} has the {s}.",
        ),
        Phrases(
            "Who owns the {s}?", "Who is the owner of the {s}?", "To whom does the {s} belong?", "Whose is the {s}?",
            "Who has the {s}?", "~Who does the {s} belong to?", "~Name the owner of the {s}.",
        ),
        "The {s} belongs to {v}.",
    ),
    Relation(
        ("location", "place", "room"),
        lambda draw: "the " + draw.pick(("kitchen", "garden", "cellar", "attic", "hall", "office", "garage", "barn", "library")),
        Phrases(
            "The {s} is in {v}.", "The {s} was left in {v}.", "You can find the {s} in {v}.", "Somebody put the {s} in {v}.",
            "The {s} stands in {v}.", "~One must look in {v} for the {s}.", "~The {s} was last seen in {v}.",
        ),
        Phrases(
            "Where is the {s}?", "In which room is the {s}?", "Where can I find the {s}?", "Where was the {s} left?",
            "~Where should I look for the {s}?", "~Which place holds the {s}?",
        ),
        "The {s} is in {v}.",
    ),
)

EVENT = (
    Relation(
        ("day", "weekday"),
        _one_of(words.DAYS),
        Phrases(
            "The {s} is on {v}.", "The {s} will be held on {v}.", "The {s} takes place on {v}.", "On {v} there is the {s}.",
            "The {s} was moved to {v}.", "~Come on {v} for the {s}.", "~The {s} has been planned for {v}.",
        ),
        Phrases(
            "When is the {s}?", "On (which|what) day is the {s}?", "What day is the {s}?", "Which day is the {s} on?",
            "~On what day does the {s} take place?", "~When will the {s} be?",
        ),
        "The {s} is on {v}.",
    ),
    Relation(
        ("city", "place", "location", "venue"),
        _from(words.CITIES),
        Phrases(
            "The {s} is in {v}.", "The {s} takes place in {v}.", "The {s} will be held in {v}.",
            "People come to {v} for the {s}.", "~{v} is the venue of the {s}.", "~They chose {v} as the place for the {s}.",
        ),
        Phrases(
            "Where is the {s}?", "Where does the {s} take place?", "In (which|what) (city|town) is the {s}?",
            "~In which place will the {s} be?", "~Where do they hold the {s}?",
        ),
        "The {s} is in {v}.",
    ),
    Relation(
        ("host", "organizer", "speaker"),
        _from(words.NAMES),
        Phrases(
            "{v} hosts the {s}.", "The {s} is hosted by {v}.", "The host of the {s} is {v}.", "{v} runs the {s}.",
            "The {s} is run by {v}.", "~{v} is in charge of the {s}.", "~The {s} was set up by {v}.",
        ),
        Phrases(
            "Who hosts the {s}?", "Who is the host of the {s}?", "Who runs the {s}?", "By whom is the {s} hosted?",
            "~Who is in charge of the {s}?", "~Name the host of the {s}.",
        ),
        "The host of the {s} is {v}.",
    ),
    Relation(
        ("guests", "people", "visitors"),
        _within(4, 900),
        Phrases(
            "There are {v} guests at the {s}.", "{v} people will come to the {s}.", "The {s} has {v} guests.",
            "The {s} is for {v} people.", "~They expect {v} people at the {s}.", "~As many as {v} guests join the {s}.",
        ),
        Phrases(
            "How many (people|guests) are at the {s}?", "How many (people|guests) come to the {s}?",
            "How many (people|guests) does the {s} have?", "~How many visitors are expected at the {s}?",
        ),
        "There are {v} guests at the {s}.",
    ),
)

_MADE_UP_SAY = (
    "The {k} of {s} is {v}.", "{s} has the {k} {v}.", "{s}'s {k} is {v}.", "{s} got {v} as {k}.", "{k} of {s}: {v}.",
    "{v} is the {k} of {s}.", "For {s} the {k} is {v}.", "~As {k}, {s} was given {v}.", "~{s} uses {v} for a {k}.",
)  # fmt: skip
_MADE_UP_ASK = (
    "What is the {k} of {s}?", "What {k} does {s} have?", "What is {s}'s {k}?", "Which {k} does {s} have?",
    "Tell me the {k} of {s}.", "Which {k} belongs to {s}?", "Give me {s}'s {k}.",
    "~Find the {k} of {s}.", "~What was given to {s} as {k}?",
)  # fmt: skip


def made_up(draw: Draw, person: bool) -> Relation:
    """A relation with an arbitrary attribute, often an invented word."""
    noun = draw.value(words.NOUNS) if draw.chance(0.6) else draw.pick(words.ATTRIBUTES)
    makers: tuple[Sample, ...] = (
        _from(words.CODES), _within(2, 9999), _from(words.NAMES), _from(words.NOUNS), _one_of(words.COLORS),
    )  # fmt: skip
    article = "{s}" if person else "the {s}"

    def lines(templates: tuple[str, ...]) -> Phrases:
        return Phrases(*(line.replace("{k}", noun).replace("{s}", article) for line in templates))

    reply = f"The {noun} of {article} is {{v}}."
    return Relation((noun.replace(" ", "_"),), draw.pick(makers), lines(_MADE_UP_SAY), lines(_MADE_UP_ASK), reply)


def pick_relations(draw: Draw, count: int) -> tuple[str, Pool, list[Relation]]:
    """The key for the subject, the list it comes from, and ``count`` relations that fit it."""
    key, pool, known = draw.pick(
        (("name", words.NAMES, PERSON), ("name", words.NAMES, PERSON), ("item", words.THINGS, ITEM),
         ("event", words.HAPPENINGS, EVENT))  # fmt: skip
    )
    invented = sum(draw.chance(0.3) for _ in range(count))
    invented = max(invented, count - len(known))
    relations = draw.some(known, count - invented)
    while len(relations) < count:
        extra = made_up(draw, key == "name")
        if all(extra.keys[0] not in relation.keys for relation in relations) and extra.keys[0] != key:
            relations.append(extra)
    draw.rng.shuffle(relations)
    return key, pool, relations


def state(fact: Fact, draw: Draw) -> str:
    """The sentence for a fact, with its first letter in upper case."""
    sentence = fact.sentence(draw)
    return sentence[:1].upper() + sentence[1:]
