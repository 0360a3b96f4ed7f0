"""Facts about subjects: choosing them, stating them in sentences, asking for them."""

from __future__ import annotations

from dataclasses import dataclass

from training.weft_tiny import words
from training.weft_tiny.grammar import Draw, Phrases, Pool, capital
from training.weft_tiny.relations import (
    COMPOUNDS,
    EVENT,
    ITEM,
    PERSON,
    Relation,
    Sample,
    drawn_from,
    one_of,
    within,
)


@dataclass(frozen=True)
class Fact:
    """One stated fact."""

    relation: Relation
    subject: str
    value: str | int

    def sentence(self, draw: Draw) -> str:
        """A sentence that states the fact."""
        return draw.phrase(self.relation.say, s=self.subject, v=self.value)

    def more(self, draw: Draw, pronoun: str) -> str:
        """A further sentence on the subject of the sentence before, with a pronoun where the line allows it."""
        sentence = draw.phrase(self.relation.say, s="\0", v=self.value)
        for start in ("The \0 ", "\0 "):
            if sentence.startswith(start):
                sentence = f"{pronoun} {sentence.removeprefix(start)}"
        return sentence.replace("\0", self.subject)

    def question(self, draw: Draw) -> str:
        """A question for the value."""
        question = draw.phrase(self.relation.ask, s=self.subject)
        return draw.phrase(ASKED, q=question) if draw.chance(0.2) else question

    def answer(self) -> str:
        """The full-sentence answer."""
        return self.relation.reply.replace("{s}", self.subject).replace("{v}", str(self.value))


ASKED = Phrases(
    "{q}\n(Please|Thanks|Thank you)(!|.)", "(Can|Could) you (tell me|answer this|say): {q}",
    "(Another|A|My next|The next) question: {q}", "(Well|Right|And|Then), {q}", "Q: {q}",
    "All I want to know is this: {q}",
    "{q} (I am not sure.|I did not see it.|I cannot recall.|What do you think?|Any idea?)",
    "(I am asking you|I ask|Someone asks|They ask): {q}", "Answer (this|me|please): {q}", "Please answer: {q}",
    "Here is (my|a|the next) question: {q}", "(Sorry|Excuse me), {q}", "Let me ask (this|you): {q}",
    "Now for a question. {q}", "(Quick|Short|Small|Last) question: {q}", "I (need|want) to know this: {q}",
    "I have (a question|one question|to ask something). {q}", "If you know it, tell me. {q}", "It is about this: {q}",
    "Tell me: {q}", "I wonder: {q}", "My question is: {q}",
    "{q} (I forgot.|I would like to know.|Do you know?|Thanks.)",
    "Please tell me: {q}", "(Hey|Hi|So|Now|Okay), {q}", "One (more thing|question): {q}", "I must know: {q}",
    "~Here is what I want to know: {q}", "~{q} That is all I ask.",
)  # fmt: skip
TOLD = Phrases(
    "{f} (That is known.|That much is sure.|So it is.|This is true.|I am sure of it.|That is what I heard.)",
    "It turns out that {f}", "As it happens, {f}", "(I|We) (know|think|believe|remember) that {f}",
    "It is true that {f}", "You should know that {f}", "People say that {f}", "The (letter|note|paper) says that {f}",
    "(Yesterday|Last week) I (heard|read) that {f}", "To be clear, {f}", "(Remember|Fact|Also|Note): {f}",
    "(Well|Indeed|Actually|Still), {f}", "Do not forget that {f}", "Everyone (here |)knows that {f}",
    "Besides, {f}", "(My neighbour|A friend|The teacher) told me that {f}", "For your information, {f}",
    "It may be of use that {f}", "If I remember well, {f}", "Let me add that {f}", "Here is a fact: {f}",
    "I heard that {f}", "As (you|we) know, {f}", "It is (said|known) that {f}", "By the way, {f}", "They say that {f}",
    "Also, {f}", "Note that {f}", "Someone told me that {f}", "In fact, {f}", "Of course, {f}",
    "Today I learned that {f}", "~Rumor has it that {f}", "~The papers say {f}",
)  # fmt: skip
_LOWERED = (
    "The", "In", "On", "For", "At", "To", "With", "It", "She", "He", "One", "You", "Call", "People", "There", "Nothing",
)  # fmt: skip
MADE_UP_SAY = (
    "As {k}, {s} has {v}.", "The {k} that {s} has is {v}.", "{s} comes with the {k} {v}.",
    "The {k} of {s} reads {v}.", "The {k} for {s} is {v}.", "{s}: {k} {v}.",
    "{s} uses {v} as the {k}.", "{v} serves as the {k} of {s}.", "{k} {v} belongs to {s}.",
    "They gave {s} the {k} {v}.", "When it comes to {s}, the {k} is {v}.", "Note the {k} of {s}: {v}.",
    "We know that the {k} of {s} is {v}.", "Somebody set the {k} of {s} to {v}.", "Under {k}, {s} has {v}.",
    "{s} is listed with the {k} {v}.", "{s}'s {k}: {v}.",
    "The {k} of {s} is {v}.", "{s} has the {k} {v}.", "{s}'s {k} is {v}.", "{s} got {v} as {k}.", "{k} of {s}: {v}.",
    "{v} is the {k} of {s}.", "For {s} the {k} is {v}.", "~As {k}, {s} was given {v}.", "~{s} uses {v} for a {k}.",
)  # fmt: skip
MADE_UP_ASK = (
    "{k} of {s}?", "{s}'s {k}?", "Can you tell me {s}'s {k}?",
    "What {k} was given to {s}?", "I need the {k} of {s}.", "The {k} of {s} is what?", "For {s}, what is the {k}?",
    "{s} has which {k}?", "Name the {k} of {s}.", "What did they give {s} as {k}?", "what is the {k} of {s}",
    "Say which {k} {s} has.", "Please give the {k} of {s}.", "What is the {k} for {s}?",
    "I would like to know the {k} of {s}.", "What about the {k} of {s}?", "Look for the {k} of {s}.",
    "What is the {k} of {s}?", "What {k} does {s} have?", "What is {s}'s {k}?", "Which {k} does {s} have?",
    "Tell me the {k} of {s}.", "Which {k} belongs to {s}?", "Give me {s}'s {k}.",
    "~Find the {k} of {s}.", "~What was given to {s} as {k}?",
)  # fmt: skip


def made_up(draw: Draw, person: bool) -> Relation:
    """A relation with an arbitrary attribute, often an invented word."""
    noun = draw.value(words.NOUNS) if draw.chance(0.6) else draw.pick(words.ATTRIBUTES)
    makers: tuple[Sample, ...] = (
        drawn_from(words.CODES), within(2, 999), drawn_from(words.NAMES), drawn_from(words.NOUNS),
        one_of(words.COLORS),
    )  # fmt: skip
    article = "{s}" if person else "the {s}"

    def lines(templates: tuple[str, ...]) -> Phrases:
        return Phrases(*(line.replace("{k}", noun).replace("{s}", article) for line in templates))

    reply = f"The {noun} of {article} is {{v}}."
    return Relation((noun.replace(" ", "_"),), draw.pick(makers), lines(MADE_UP_SAY), lines(MADE_UP_ASK), reply)


def pick_relations(draw: Draw, count: int) -> tuple[str, Pool, list[Relation]]:
    """The key for the subject, the list it comes from, and ``count`` relations that fit it."""
    key, pool, known = draw.pick(
        (
            ("name", words.NAMES, PERSON),
            ("name", words.NAMES, PERSON),
            ("item", words.THINGS, ITEM),
            ("event", words.HAPPENINGS, EVENT),
        )
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


_PRONOUNS = {"name": ("She", "He"), "item": ("It",), "event": ("It",)}


def state(facts: list[Fact], key: str, draw: Draw) -> list[str]:
    """Sentences for facts on one subject: joined ones where a compound line fits, pronouns for later mentions."""
    left, sentences = list(facts), []
    pronoun = draw.pick(_PRONOUNS[key]) if draw.chance(0.4) else ""
    if draw.chance(0.5):
        known = {fact.relation.keys[0]: fact for fact in facts if fact.relation in (*PERSON, *ITEM, *EVENT)}
        fitting = [keys for keys in COMPOUNDS if all(key in known for key in keys)]
        if fitting:
            keys = draw.pick(fitting)
            values = {key: known[key].value for key in keys}
            sentences.append(draw.phrase(COMPOUNDS[keys], s=facts[0].subject, **values))
            left = [fact for fact in left if all(fact is not known[key] for key in keys)]
    for fact in left:
        sentences.append(fact.more(draw, pronoun) if pronoun and sentences else fact.sentence(draw))
    sentences = [_told(sentence, draw) if draw.chance(0.06) else sentence for sentence in sentences]
    # A value keeps its letters where it opens a sentence, so that it can be copied.
    values = tuple(str(fact.value) for fact in facts)
    return [sentence if sentence.startswith(values) else capital(sentence) for sentence in sentences]


def _told(sentence: str, draw: Draw) -> str:
    """The sentence inside a longer one."""
    first = sentence.split(" ", 1)[0]
    if first in _LOWERED:
        sentence = sentence[:1].lower() + sentence[1:]
    return draw.phrase(TOLD, f=sentence)
