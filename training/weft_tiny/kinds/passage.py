"""Questions about a given passage."""

from __future__ import annotations

from training.weft_tiny.examples import Check, Example, assistant, mentions, user
from training.weft_tiny.facts import Fact, pick_relations, state
from training.weft_tiny.grammar import Draw, Phrases

FILLER = (
    "The weather is nice today.", "Many people were there.", "Nobody knows why.", "It was a long day.", "Time went by.",
    "The street was quiet.", "There is more to tell.", "This is well known.", "Everything went well.",
    "The old bridge is closed.", "Music could be heard.", "The sun was low.", "It had rained all night.",
    "Breakfast is served at eight.", "The train was late again.", "A bird sat on the roof.", "Tea was ready soon.",
    "That is all for now.", "Here are some notes.", "The report is short.",
)  # fmt: skip
ASK = Phrases(
    "{p}\n\n{q}", "{p}\n{q}", "{p} {q}", "Passage: {p}\nQuestion: {q}", "Text: {p}\n\nQuestion: {q}", "{q}\n\n{p}",
    "Read (this|the) (text|passage) and answer the question.\n\n{p}\n\n{q}", "Context: {p}\nQ: {q}", "{q}\n\nText: {p}",
    "Here is a (text|passage|note): {p}\n{q}", "(Read|Look at) this: {p}\n\nNow tell me: {q}",
    "Answer from the text.\nText: {p}\nQuestion: {q}", "I have a question about this text: {p}\n\n{q}",
    "Story: {p}\n\n{q}", "{p}\n\nQ: {q}\nA:", "Notes:\n{p}\n\nPlease answer: {q}", "I read this: {p} {q}",
    "Please answer: {q}\nText: {p}",
    "Use the text to answer. {p} Question: {q}", "Question: {q}\nText: {p}",
    "Context:\n{p}\n\nQuestion: {q}\nAnswer:", "Given this text: {p}\n{q}",
    "{q} Look it up in this text: {p}", "Source: {p}\n{q}",
    "~Using only the following paragraph, answer. {p}\n\nThe question is: {q}", "~Document:\n{p}\n\nQuery: {q}",
    "~According to what is written here, {q}\n{p}",
)  # fmt: skip
BRIEF = Phrases(
    "Answer (with one word|briefly|in a word or two).", "Give only the answer.", "Short answer please.",
    "Reply with just the answer.", "Only the answer, no sentence.",
    "~Keep the answer as short as possible.", "~Just the answer itself.",
)  # fmt: skip
SYSTEM = Phrases(
    "You answer questions about texts.", "Answer the question from the passage.", "You are a careful reader.",
    "Use only the given text.", "You are a helpful assistant.",
    "~Your task is to read and to answer.", "~Answer what is asked, from what is given.",
)  # fmt: skip


def make(draw: Draw) -> Example:
    """A passage of several facts, with one to three questions in turn."""
    key, pool, relations = pick_relations(draw, draw.rng.choice((1, 1, 2, 2, 3)))
    count = draw.pick((1, 2, 2, 2, 3, 4) if len(relations) > 1 else (2, 2, 3, 3, 4))
    subjects = draw.values(pool, count)
    if len(subjects) * len(relations) > 4 and draw.chance(0.85):
        return make(draw)
    facts = [Fact(relation, subject, relation.sample(draw)) for subject in subjects for relation in relations]
    if len({str(fact.value) for fact in facts}) < len(facts) or _entangled(facts):
        return make(draw)
    groups = [[fact for fact in facts if fact.subject == subject] for subject in subjects]
    if draw.chance(0.4):
        groups = [[fact] for fact in draw.some(facts, len(facts))]
    sentences = [sentence for group in groups for sentence in state(group, key, draw)]
    for _ in range(draw.rng.choice((0, 0, 0, 1))):
        sentences.insert(draw.pick((0, len(sentences))), draw.pick(FILLER))
    passage = " ".join(sentences)
    brief = draw.chance(0.3)
    instruction = draw.phrase(BRIEF)
    messages = []
    if draw.chance(0.3):
        messages.append({"role": "system", "content": draw.phrase(SYSTEM) + (f" {instruction}" if brief else "")})
    checks = []
    for index, fact in enumerate(draw.some(facts, min(len(facts), draw.rng.choice((1, 2, 2, 3))))):
        question = fact.question(draw)
        prompt = draw.phrase(ASK, p=passage, q=question) if index == 0 else question
        if brief and (index > 0 or not messages):
            prompt += " " + instruction
        answer = str(fact.value) if brief else fact.answer()
        others = tuple(str(other.value) for other in facts if other is not fact)
        others = tuple(other for other in others if not mentions(fact.answer(), other))
        messages += [user(prompt), assistant(answer)]
        checks.append(Check(include=(str(fact.value),), exclude=others))
    return Example("passage", messages, checks)


def _entangled(facts: list[Fact]) -> bool:
    """Whether a value is also a subject, which would make the passage ambiguous."""
    subjects = {fact.subject for fact in facts}
    return any(str(fact.value) in subjects for fact in facts)
