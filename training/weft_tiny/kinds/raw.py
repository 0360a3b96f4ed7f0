"""Text without a chat template, to be continued: stories and short notes."""

from __future__ import annotations

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.facts import Fact, pick_relations, state
from training.weft_tiny.grammar import Draw, capital
from training.weft_tiny.kinds import story

OPENINGS = (
    "In a (small|far|quiet) (town|land|village) lived a {r} named {a}.",
    "There was once a {r} called {a} who (loved|liked) (walks|stories|the sea|old things).",
    "This is the story of {a}, a (young|clever|kind) {r}.", "This is a story about a {r} named {a}.",
    "A long time ago there lived a {r} named {a}.",
    "Many years ago, {a} was a {r} (near the sea|by a river|in a small town|in the hills).",
    "{a} the {r} lived in a (small|blue|wooden) house (near the sea|by a river|in the hills).",
    "Everyone in the (town|village) knew {a} the {r}.",
    "Once there lived a (young|kind|poor) {r}, whose name was {a}.",
    "One (sunny|cold|windy) (morning|day), {a} the {r} went (to the market|into the forest|down to the river).",
    "{a} was a (young|happy|lonely) {r} who lived (near the sea|by a river|in a small town|in the hills).",
    "On the first day of (spring|summer|winter), {a} the {r} got up early.",
    "Once upon a time there was a {r} named {a}.", "Once upon a time, there was a {r} called {a}.",
    "Once upon a time a {r} named {a} lived (near the sea|by a river|in a small town|in the hills).",
    "Once upon a time, in a (small|far|quiet) (town|land|village), there lived a {r} named {a}.",
    "Long ago, in a (small|far|quiet) (town|land|village), there was a {r} named {a}.",
    "There once was a {r} named {a}.", "One day, a {r} named {a} went for a walk.", "{a} was a {r}.",
    "It was a (dark|cold|warm|quiet) night, and {a} the {r} could not sleep.", "The {r} was called {a}.",
    "It was a (sunny|rainy|cold) morning when {a} the {r} left the house.",
)  # fmt: skip


def make(draw: Draw) -> Example:
    """A story or a note: its first sentence as a user's turn, the rest as the answer.

    Both turns are written without the template, one after the other, and all of the text is a target in training.
    """
    if draw.chance(0.2):
        return _note(draw)
    first, friend = draw.values(words.NAMES, 2)
    slots = {"a": first, "b": friend, "o": draw.value(words.THINGS), "r": draw.pick(story.ROLES)}
    opening = capital(draw.fill(draw.pick(OPENINGS), **slots))
    body = story.body(draw, draw.chance(0.5), slots)
    return Example("raw", [user(opening), assistant(" " + body)], [Check(include=(first,), unrepeated=True)])


def _note(draw: Draw) -> Example:
    key, pool, relations = pick_relations(draw, 3)
    subject = draw.value(pool)
    sentences = state([Fact(relation, subject, relation.sample(draw)) for relation in relations], key, draw)
    if len(sentences) == 1:
        return _note(draw)
    rest = " ".join(["", *sentences[1:]])
    return Example("raw", [user(sentences[0]), assistant(rest)], [Check(unrepeated=True)])
