"""JSON records from a sentence or two."""

from __future__ import annotations

import json

from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.facts import Fact, pick_relations, state
from training.weft_tiny.grammar import Draw, Phrases, join
from training.weft_tiny.kinds.passage import FILLER

ASK = Phrases(
    "(Extract|Get|Take|Read|Pick|Collect) {k} (from|out of) (this|the) (text|note|message|line|sentence): {p}",
    "(Extract|Get|Take|Read|Pick) {k} (from|out of) (this|the) (text|note|message) (below|here) (as|in) JSON.\n\n{p}",
    "{p}\n\n(Now |Then |)(give|write|return|print|show) (me |)(a |)JSON (object|record) (with|of|for) {k}.",
    "{p}\n(JSON|As JSON|In JSON|JSON please), (with|keys|fields): {k}", "{p}\n\n{k}?\nJSON only.", "{p} {k}. JSON.",
    "{p}\n{k}",
    "(Make|Build|Form) (a |one |)JSON (object|record) (from|out of) (this|the) text: {p} (Keys|Fields|Use): {k}.",
    "(Parse|Read|Scan) this and (give|return|output) JSON ({k}): {p}", "JSON: {k}\n\n{p}", "keys = {k}\ntext = {p}",
    "(Which|What) {k} does this (text|note|sentence) (have|give|state)? (Write|Answer in|Use) JSON. {p}",
    "{k} from: {p}", "(I want|I need|Please send|Send) {k} as (a |)JSON (object |record |): {p}",
    "Task: JSON with {k}.\nText: {p}",
    "Transform (the|this) (text|note) into (a |)JSON (object|record) (with|that holds) {k}. {p}", "{p} => {k} as JSON",
    "(Structure|Format|Encode|Rewrite) (this|the text) as JSON with (the |)(keys|fields) {k}:\n{p}",
    "Form with {k}.\n{p}", "The (text|note) is: {p}\n\nThe (keys|fields) are: {k}\n\n(Give|Write|Return) the JSON.",
    "Object with {k}, please.\n\n{p}", "(Only|Just) {k}, as JSON: {p}", "Data: {p}\nWanted: {k}",
    "{p}\nWanted in JSON: {k}", "Record of {k} for: {p}",
    "(Can|Could) you (extract|find|give me) {k} (as|in) JSON? {p}",
    "{p}\n(Can|Could) you put {k} (of this |)into JSON?",
    "(Look for|Search for|Spot) {k} in the (text|note), then answer in JSON. {p}", "Map this to JSON ({k}): {p}",
    "Extract the {k} as JSON: {p}", "Extract {k} as JSON.\n\n{p}", "{p}\n\nExtract {k} as JSON.",
    "{p}\nGive me a JSON object with (the keys |){k}.", "Turn this (text |sentence |)into JSON with {k}: {p}",
    "From the text below, extract {k}. Answer in JSON.\n\n{p}", "Text: {p}\nKeys: {k}\nJSON:",
    "Return a JSON object with the (fields|keys) {k} for this text: {p}", "JSON with {k} please: {p}",
    "Read the text and (write|return) JSON with (fields|keys) {k}.\nText: {p}", "{p}\n\nKeys: {k}",
    "(Find|Pull out|Get) {k} (in|from) this text (as|in) JSON: {p}", "Text: {p}\n\nReturn {k} as a JSON object.",
    "Make a JSON record ({k}) from this: {p}", "What are {k} here? Answer with JSON.\n{p}",
    "Here is a (note|text): {p}\nI want JSON with {k}.", "{p} -> JSON ({k})", "JSON object with the keys {k}:\n{p}",
    "Note: {p}\n\n{k} as JSON, please.",
    "{p}\n\nAnswer with a JSON object that has {k}.", "(Give|Show) me {k} from this (note|text) as JSON. {p}",
    "Data extraction. Keys: {k}. Text: {p}",
    "Take {k} from the (text|sentence) and return JSON: {p}", "Input: {p}\nOutput JSON with: {k}",
    "I need a JSON object. It has {k}. The text is: {p}",
    "Create JSON from this. Use the keys {k}.\n{p}", "Put {k} into JSON. {p}", "Schema: {k}\nInput: {p}",
    "Write down {k} as a JSON object: {p}", "~Convert to a JSON record having {k}: {p}",
    "~{p}\nI need {k} in JSON format.",
    "~Fill in a JSON object. Fields: {k}. Source: {p}", "~Please parse the following note and output {k} as JSON.\n{p}",
)  # fmt: skip
SYSTEM = Phrases(
    "(Write|Produce|Return) (only |)JSON.", "You answer in JSON.", "Your output is JSON.",
    "Be a tool that writes JSON.", "JSON only.", "You are a helpful assistant.",
    "You (read|take) a text and return (a record|JSON|an object).", "No words besides JSON, please.",
    "The answer is always one JSON object.", "You extract (facts|data|records) from (notes|texts).",
    "You extract data as JSON.", "Reply only with JSON.", "You turn text into JSON objects.",
    "You are a data extraction tool.", "Answer with a JSON object and nothing else.",
    "~All of your output must be JSON.", "~You are a parser that returns JSON.",
)  # fmt: skip


def list_keys(draw: Draw, keys: list[str]) -> str:
    """The requested keys, written in one of several ways."""
    style = draw.rng.randrange(4)
    if style == 0:
        return ", ".join(keys)
    if style == 1:
        return ", ".join(f'"{key}"' for key in keys)
    return join(keys)


def make(draw: Draw) -> Example:
    """A record of one to four values, asked for in some order; the text may state more than is asked."""
    subject_key, pool, relations = pick_relations(draw, draw.rng.randint(1, min(draw.level, 5)))
    subject = draw.value(pool)
    facts = [Fact(relation, subject, relation.sample(draw)) for relation in relations]
    fields: list[tuple[str, str | int]] = [(draw.pick(fact.relation.keys), _value(fact)) for fact in facts]
    if draw.chance(0.75):
        fields.insert(0, (subject_key, subject))
    if len({key for key, _ in fields}) < len(fields) or len({str(v) for _, v in fields}) < len(fields):
        return make(draw)
    if draw.chance(0.3):
        draw.rng.shuffle(fields)
    if len(fields) > 2 and draw.chance(0.3):
        fields.pop(draw.rng.randrange(len(fields)))
    sentences = state(facts, subject_key, draw)
    if draw.chance(0.2):
        sentences.insert(draw.pick((0, len(sentences))), draw.pick(FILLER))
    record = dict(fields)
    messages = [user(draw.phrase(ASK, k=list_keys(draw, list(record)), p=" ".join(sentences)))]
    if draw.chance(0.3):
        messages.insert(0, {"role": "system", "content": draw.phrase(SYSTEM)})
    messages.append(assistant(json.dumps(record, ensure_ascii=False)))
    return Example("json", messages, [Check(record=record)])


def _value(fact: Fact) -> str | int:
    """The value as it stands in the record, without an article."""
    return fact.value.removeprefix("the ") if isinstance(fact.value, str) else fact.value
