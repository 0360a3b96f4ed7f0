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
    "Please read this and answer.\n\n{p}\n\n{q}", "please read: {p} then answer: {q}", "hi, i have this text: {p} {q}",
    "I will give you a text and a question.\nText: {p}\nQuestion: {q}",
    "I will give you a question and a text.\nQuestion: {q}\nText: {p}",
    "Below (is|you see) a (text|note|passage). (Read it and answer|Answer from it): {q}\n\n{p}",
    "{p}\n\nAnswer this question (about|on|from) the (text|passage|note) above: {q}",
    "{p}\n\nAccording to the (text|passage|note): {q}", "According to this (text|note|passage): {q}\n{p}",
    '"{p}"\n\n{q}', '{q}\n\n"{p}"', '(Text|Note|Passage|Quote): "{p}"\n{q}',
    "(Someone|A friend|My boss) (wrote|told me|sent me) this: {p} {q}",
    "I just (heard|learned|read|got) this. {p} {q}", "(This is|Here is) what I (know|heard|read): {p}\n{q}",
    "What I know: {p}\nWhat I want to know: {q}", "Known: {p}\nAsked: {q}", "Given: {p}\nFind: {q}",
    "Information:\n{p}\n\nUser question: {q}", "Query: {q}\nDocument: {p}",
    "### Text\n{p}\n### Question\n{q}", "# Context\n{p}\n\n# Question\n{q}", "<text>{p}</text>\n{q}", "[{p}] {q}",
    "Input: {p}\nQuestion: {q}\nOutput:", "Background: {p}\n\n{q}", "Some background. {p} {q}",
    "(Keep|Bear) this in mind: {p}\n\n{q}", "Remember this: {p}\n\n{q}", "Suppose (this is true|that is so). {p} {q}",
    "Assume this. {p}\n{q}", "That is the text: {p}\n\nAnd this is the question: {q}",
    "{p}\n\nThat was the text. (Here is|Now comes) the question: {q}",
    "The text comes first, then the question.\n{p}\n{q}", "The question comes first, then the text.\n{q}\n{p}",
    "(Reading test|Reading task|Quiz|Exercise|Task).\n{p}\n\n{q}", "Step 1, read: {p}\nStep 2, answer: {q}",
    "{q} (To answer|For this), (read|use|see) (this|the text): {p}",
    "{q} (Here is|You find it in|See) the (note|text):\n\n{p}", "{q} The (facts|details) are these: {p}",
    "{q}\n(Hint|Help|Source|Facts|Note): {p}", "{p}\n(Can|Could) you answer this? {q}",
    "(Can|Could) you help me with this text? {p}\n{q}", "I (do not|don't) (understand|get) this (text|note). {p} {q}",
    "I need to know something about this (text|note|story). {p}\n\n{q}",
    "I have to answer a question on this text. {p}\n\nThe question is: {q}",
    "(Help me|Please help) with this: {p}\n\n{q}", "(Look|See) what it says here: {p} {q}", "It says here: {p} {q}",
    "The (note|letter|sign|report) says: {p}\n{q}", "In my (notes|book|diary) (it says|I found|I read): {p}\n{q}",
    "From a (letter|book|newspaper|report): {p}\n\n{q}", "News: {p}\n{q}", "{p} That is all I know. {q}", "{p} - {q}",
    "{q} {p}", "Text:\n{p}\n\nTask: answer this question.\n{q}", "{p}\n===\n{q}", "- {p}\n- {q}",
    "(A|My|One) question for you: {q}\n(It is|It's) (about|on) this: {p}", "Find out from the text: {q}\n\n{p}",
    "Check the text (for me |)and (tell me|answer|say): {q}\n{p}", "{p}\nanswer this: {q}",
    "{p}\n\nNow the question: {q}",
    "(Read|See|Study|Take|Consider) (this|the) (text|note|message|report): {p}\n(Then |Now |)answer: {q}",
    "{p}\n\n{q} (Answer from the text.|Use the text.|It is in the text.)",
    "(Use|With|From|In) (this|the) (text|note|passage) (below|here), (answer|tell me): {q}\n\n{p}", "{q}\n{p}",
    "{p} Now: {q}", "{p} So, {q}", "(Article|Report|Letter|Message|Facts|Data|Info|Information|Extract): {p}\n{q}",
    "(Facts|Info|Data):\n{p}\n\n{q}", "Question: {q}\n\nContext: {p}",
    "I (got|have|found) (this|a) (note|text|message): {p} (My question|Question): {q}",
    "{q} (This is what I know|Here is the text|The text says): {p}",
    "(Answer|Solve) (this|the question) (with|from) (the text|what follows). {q}\n{p}", "Q: {q}\nText: {p}\nA:",
    "text: {p}\nquestion: {q}\nanswer:", "(Find|Search|Look for) the answer in (this|the) (text|note). {q}\n\n{p}",
    "{p}\n---\n{q}", "{p}\n\n(Based on this|From this|With that): {q}", "(Here are|These are) some facts. {p} {q}",
    "(Listen|Attention|Okay): {p} {q}", "{p} (Can you tell me|Do you know|Tell me|Say): {q}",
    "(First read|Read) this. {p}\n(Then answer this|Now answer|Answer): {q}", "What follows is a text.\n{p}\n\n{q}",
    "The question {q} is about this text: {p}",
    "{p}\n\n{q}", "{p}\n{q}", "{p} {q}", "Passage: {p}\nQuestion: {q}", "Text: {p}\n\nQuestion: {q}", "{q}\n\n{p}",
    "Read (this|the) (text|passage) and answer the question.\n\n{p}\n\n{q}", "Context: {p}\nQ: {q}", "{q}\n\nText: {p}",
    "Here is a (text|passage|note): {p}\n{q}", "(Read|Look at) this: {p}\n\nNow tell me: {q}",
    "Answer from the text.\nText: {p}\nQuestion: {q}", "I have a question about this text: {p}\n\n{q}",
    "Story: {p}\n\n{q}", "{p}\n\nQ: {q}\nA:", "Notes:\n{p}\n\nPlease answer: {q}", "I read this: {p} {q}",
    "Please answer: {q}\nText: {p}", "Use the text to answer. {p} Question: {q}", "Question: {q}\nText: {p}",
    "Context:\n{p}\n\nQuestion: {q}\nAnswer:", "Given this text: {p}\n{q}",
    "{q} Look it up in this text: {p}", "Source: {p}\n{q}",
    "~Using only the following paragraph, answer. {p}\n\nThe question is: {q}", "~Document:\n{p}\n\nQuery: {q}",
    "~According to what is written here, {q}\n{p}",
)  # fmt: skip
BRIEF = Phrases(
    "just the answer", "One word is enough.", "(Please |)answer in one word.", "(One|A single) word will do.",
    "(Write|Say|Give|Return) (just |only |)the (answer|value)(|, nothing else).",
    "(Do not|Don't) (write|use|say) a (full |whole |)sentence.", "No sentence(, please|, just the answer).",
    "Without (a sentence|other words|explanation).", "In (a word|short|brief)(|, please).",
    "(As short as possible|As short as you can).", "A short answer (will do|is enough|is best).",
    "I (want|need) (only |just )the answer.", "The (name|word|value|number) only.",
    "(Leave out|Skip) (everything|all) else.", "Keep the answer (short|brief|to a word).",
    "Answer: (one word|short|just the value).", "No (extra words|explanation|talk), (just|only) the answer.",
    "(Be quick|Quick answer): one word.",
    "Answer with (the|one) word.", "One word.", "In one word.", "No full sentence.", "Only the (name|word|value).",
    "Be brief.", "Short.", "Just say it.", "(Be short|Keep it short|Make it short).", "The answer alone.",
    "Nothing but the answer.", "Answer in (one|two) words.", "Just the (answer|value|word), please.",
    "Answer (with one word|briefly|in a word or two).", "Give only the answer.", "Short answer please.",
    "Reply with just the answer.", "Only the answer, no sentence.",
    "~Keep the answer as short as possible.", "~Just the answer itself.",
)  # fmt: skip
SYSTEM = Phrases(
    "you answer questions from a text", "You are a reading assistant.", "You are good at reading (texts|notes).",
    "The user gives you a (text|passage|note) and (asks|has) questions.",
    "You get a (text|passage) and a question. Answer (it|from the text).",
    "(Read|Study) what the user sends and answer (the question|from it).",
    "Your (job|task) is to (read and answer|find the answer in the text).",
    "(Look|Search) for the answer in the (text|passage|note).",
    "All (answers|facts) come from the (text|passage|user).", "Only (say|state) what the text says.",
    "Trust the text, not your memory.", "Take the (answer|facts) from the (text|passage|note).",
    "Help the user (to understand|with) (texts|a text).", "Be (exact|careful) (with|about) names and numbers.",
    "Answer what (is|was) asked.", "If there is a text, use it.",
    "You read texts and answer questions.", "Read, then answer.", "You are an assistant that reads.",
    "Answer (well|truthfully) from the text.", "The answer is always in the text.", "(Stick|Keep) to the text.",
    "You find answers in texts.", "You help with questions.", "Do not make things up.",
    "Answer questions (on|about) what the user sends.",
    "You answer questions about texts.", "Answer the question from the passage.", "You are a careful reader.",
    "Use only the given text.", "You are a helpful assistant.",
    "~Your task is to read and to answer.", "~Answer what is asked, from what is given.",
)  # fmt: skip


_FACTS = (1, 2, 3, 4, 6, 9)
"""The most facts of a passage, by level."""


def _shape(draw: Draw) -> tuple[int, int]:
    """How many relations of how many subjects a passage of the draw's level states."""
    most = _FACTS[draw.level - 1]
    while True:
        relations, subjects = draw.rng.randint(1, 3), draw.rng.randint(1, 4)
        if most // 2 < relations * subjects <= most:
            return relations, subjects


def make(draw: Draw) -> Example:
    """A passage of several facts, with one to three questions in turn."""
    width, count = _shape(draw)
    key, pool, relations = pick_relations(draw, width)
    subjects = draw.values(pool, count)
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
