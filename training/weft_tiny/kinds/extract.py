"""JSON records from a sentence or two."""

from __future__ import annotations

import json

from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.facts import Fact, pick_relations, state
from training.weft_tiny.grammar import Draw, Phrases, join
from training.weft_tiny.kinds.passage import FILLER

ASK = Phrases(
    "Please extract {k} from the (text|note|message) below and (answer|reply) in JSON.\n{p}",
    "please get {k} as json: {p}", "{p}\nplease extract {k} as json", "json with {k} from this: {p}",
    "need {k} as json from: {p}", "hey, can you pull {k} out of this as json? {p}", "Quick one: {k} as JSON. {p}",
    "I have this (text|note|message): {p} (Extract|Get|Pull) {k} as JSON.",
    "I have a (text|note) and need {k} from it as JSON.\n\n{p}",
    "I would like to have {k} in a JSON object. (Here is the text|The text|Text): {p}",
    "We need {k} in JSON format. (Source|Input|Text): {p}",
    "My (program|app|script) needs {k} as JSON. (Read|Take) this: {p}",
    "For my (database|table|app) I need JSON with {k}. {p}",
    "Fill a JSON (object|record) with {k}, (using|based on) this (text|note): {p}",
    "(Fill in|Fill) these (keys|fields): {k}.\n(Text|Source|Note): {p}\n(Format|Output): JSON",
    "Fields: {k}\n\n{p}\n\n(Answer|Output|Reply): JSON", "Fields to extract: {k}\nText: {p}",
    "(Keys|Fields) (wanted|needed|to fill): {k}\n\n{p}",
    '(Extract|Find) these (fields|keys) in the (text|note): {k}\n\n"{p}"',
    '(Text|Note|Input): "{p}"\n(Extract|Get) {k} (as|in) JSON.', '"{p}"\n\n{k}, as JSON.',
    "There is {k} in this (text|note). (Write|Return|Give) JSON.\n{p}",
    "Convert (this|the following) (text|note|sentence) to JSON. (Keys|Fields|Use the keys): {k}.\n{p}",
    "Convert to JSON with {k}: {p}", "{p}\nConvert (this|that|it) to JSON with the (keys|fields) {k}.",
    "Represent this as a JSON (object|record) with {k}: {p}", "(List|Name|State) {k} as JSON, please.\n\n{p}",
    "(Store|Save|Record) {k} (from|of) this (text|note) in a JSON object: {p}",
    "(A|One) JSON object, please, with {k}. {p}", "(Just|Only) (the |)JSON with {k}, no other (text|words): {p}",
    "Respond with a JSON object (containing|holding|listing) {k}.\n\n{p}",
    "Your (answer|reply) (must|should) be a JSON object with {k}. {p}",
    "Your task: (extract|read|find) {k}, write JSON. Text: {p}", "I give you a text, you give me JSON with {k}: {p}",
    "{p}\n\nFrom (this|the text), (extract|get|take) {k} and (give|return|write) JSON.",
    "{p}\n\n(From|Out of) the text above, make a JSON object with {k}.",
    "{p} (Extract|Get|Give me) {k} from (this|that), in JSON.",
    "{p}\n\nAbove is a (text|note). (Give|Return|Write) {k} as JSON.",
    "Below is a (text|note). (Give|Return|Write) {k} as JSON.\n\n{p}", "Let me have {k} as JSON. {p}",
    "Let us turn this into JSON ({k}).\n{p}", "How would {k} look as JSON for this text? {p}",
    "What would a JSON object with {k} look like (here|for this)? {p}",
    "Could I (get|have|see) {k} as JSON(|, please)? {p}", "Would you (write|put|return) {k} as JSON? {p}",
    "{p} Could I have {k} in JSON?", "Do you see {k} in this text? Answer with JSON.\n{p}",
    "Go through the (text|note) and write {k} as JSON: {p}",
    "After reading this, (write|return|give) JSON with {k}.\n{p}", "First read: {p}\nThen write JSON with {k}.",
    "Step 1: read this. {p}\nStep 2: write {k} as JSON.", "JSON object\n(keys|fields): {k}\n(text|input|source): {p}",
    "Request: {k} as JSON\nText: {p}", "Instruction: extract {k} as JSON.\nInput: {p}", "### Text\n{p}\n### Keys\n{k}",
    "[text] {p} [keys] {k}", "<text>{p}</text>\nJSON with {k}:", "text: {p} | keys: {k} | format: JSON", "{k}\n\n{p}",
    "{p}\n\n{k} (as|in) JSON", "JSON, {k}, from this: {p}", "(Give|Send|Show|Hand) me {k}. Use JSON. {p}",
    "(Get|Grab|Fetch) {k} and (write|output|print) JSON: {p}", 'From "{p}" extract {k} as JSON.',
    'In the text "{p}", find {k} and write JSON.',
    "(Here comes|This is) (the|my|a) (text|note): {p}\n\n(Extract|Read out|Write down) {k} as JSON.",
    "(Parse|Analyze|Process) the (text|note) and return the (fields|keys) {k} as JSON.\n\n{p}",
    "Keep only {k} from this text, in JSON: {p}", "Someone sent me this: {p}\nI need {k} as JSON.",
    "A (customer|friend|colleague) wrote this. {p} Put {k} into JSON.", "Details: {p}\nJSON ({k}):",
    "(Make|Create|Build|Produce) JSON ({k}) for the following.\n{p}",
    "Take this text:\n{p}\nand give me JSON with these keys: {k}",
    "Use these keys: {k}.\nUse this text: {p}\nWrite JSON.", "The object should have {k}. The text: {p}",
    "The JSON should (have|contain|include) {k}.\n{p}",
    "The keys of the JSON object are {k}. The values are in this text: {p}",
    "The values for {k} are in the text. (Write|Return) JSON.\n\n{p}", "JSON object ({k})\n\n{p}",
    "I only (care about|need|want) {k}. Give me JSON. {p}", "Nothing but a JSON object with {k}: {p}",
    "Please (read|scan) the (text|note) and report {k} in JSON format: {p}", "Output format: JSON with {k}\nText: {p}",
    "Tell me {k} in JSON: {p}",
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
    "you extract data and answer in json", "You are a (parser|JSON parser|text parser).",
    "You are an assistant that (returns|writes|outputs) JSON.",
    "You (convert|turn) (notes|texts|messages|sentences) (in|)to JSON.",
    "(All|Your) (answers|replies|outputs) are JSON objects.", "(Always|Only) (answer|reply|respond) (in|with) JSON.",
    "(Never|Do not) (write|add) (anything|text) (but|besides|around) the JSON.",
    "For each (text|note|message), (return|write|give) one JSON object.",
    "The user sends a text and keys. You send back JSON.", "The user wants (data|facts|fields) as JSON.",
    "Output: JSON. No (comments|explanations|extra text).", "Use the keys that the user (asks for|gives|names).",
    "Read the text, find the values, write JSON.", "(Get|Take|Read) the (data|values) from the text.",
    "Your (job|task) is (data extraction|to extract data|to fill in JSON objects).",
    "Be exact: copy the values from the text.", "A program reads your answer, so write (valid|clean|only) JSON.",
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
