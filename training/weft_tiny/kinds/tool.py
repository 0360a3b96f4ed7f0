"""Arithmetic and look-ups through tool calls."""

from __future__ import annotations

import json

from training.weft_tiny import toolbox
from training.weft_tiny.examples import Check, Example, Message, assistant, calculate, calling, user
from training.weft_tiny.grammar import Draw, Phrases
from training.weft_tiny.kinds import chat
from training.weft_tiny.toolbox import Offered, Tool
from training.weft_tiny.toolset import CALCULATOR, LOOKUP, NAMED

SYSTEM = Phrases(
    "You (have|got) (some |)tools.", "Help the user with the tools.", "(Use|Call|Pick) the right tool.",
    "Tools are (there|given) for you.", "You are an agent.", "You are an agent with tools.",
    "Answer with the help of tools.", "If a tool fits, call it.", "You can use functions.", "Be helpful.",
    "Do not guess: use a tool.", "Work with the tools below.", "You assist people.",
    "Use the tools.", "You can call tools.", "You are a helpful assistant with tools.", "Call a tool when it helps.",
    "You have tools. Use them to answer.", "You are a helpful assistant.",
    "~Whenever you need to know something, call a function.", "~Solve the tasks of the user with your tools.",
)  # fmt: skip
POLITE = Phrases(
    "(Well|Right|Good|Listen|Tell me|Look), {q}",
    "{q} (Please.|Please!|Thank you.|Asap.|Can you help?|I am waiting.|Any idea?)",
    "(A question|Question|Next|My question|Task|Request): {q}", "(Could|Can|Would) you help me? {q}",
    "(Good morning|Good day|Hi there|Hello there|Hey there). {q}", "I (have|got) a question. {q}", "Sorry to ask. {q}",
    "(Help|Help me): {q}", "{q} (Use a tool.|Use the tools.|Check it.)",
    "(For my|It is for) (work|trip|class|boss): {q}", "{q} I (forgot|lost it|cannot find it).", "(Oh|Ah|Um), {q}",
    "Do this for me: {q}", "(Let us see|Let me see). {q}",
    "Hi! {q}", "Please help me. {q}", "Quick question: {q}", "{q} Thanks!", "Hello. {q}", "(Hey|So|Okay|Now), {q}",
    "I wonder: {q}",
    "{q} (Please be quick.|It is urgent.|I must know.)", "One more: {q}", "~Would you be so kind? {q}",
    "~{q} That would help me a lot.",
)  # fmt: skip
REMARK = Phrases(
    "It is (for|about) (my|our) {x}.", "(I|We) (need|want) it (today|now|soon|tonight|this week|for the {x}).",
    "(My|Our) {x} (wants to know|asked me|told me to ask|needs it).", "(That|This) is all.",
    "I (just|only|really) wonder.", "(You are|How) (great|kind|nice).", "It is (late|cold|early|loud|quiet) here.",
    "Nobody (here|at home|at work) knows.", "This is (easy|hard|new|fun) for (me|us|my {x}).",
    "(I was|We were) (told|asked) about it (today|yesterday|at work).", "I would (love|like) to know.",
    "It (matters|means a lot) to (me|us|my {x}).", "I (tried|looked) (twice|everywhere|it up).",
    "(I am|We are) (new|happy|tired|back) here.", "We (talked|spoke) about it (today|yesterday|at work).",
    "It would make (me|my {x}|us) (happy|glad).", "(I hope|Hope) you can.", "No (hurry|rush).",
    "(I like|We like) the {x}.", "There is a {x} (here|too|next to me).", "My {x} is (here|away|asleep|late).",
    "I (count on|trust|like) you.",
)  # fmt: skip
BESIDE = (
    "boss", "sister", "brother", "friend", "team", "work", "trip", "class", "book", "garden", "party", "report",
    "guest", "mother", "plan", "house", "shop", "neighbour", "teacher", "letter", "dog", "cat", "car", "game", "school",
)  # fmt: skip
"""What remarks are about."""
BOTH = Phrases(
    "{q} (Next|Second|And|Besides|Plus): {r}", "(Do|I need) (two|both) things: {q} {r}", "a) {q} b) {r}",
    "- {q}\n- {r}", "{q}\n{r}", "{q} (One more thing|And one more|Another thing): {r}",
    "(Please|Help me): {q} Also: {r}", "{q} (As well|Too). {r}", "Start with this: {q} Go on with this: {r}",
    "{q} (Once done|When done): {r}",
    "{q} (Then|After that|Also): {r}", "{q} And then: {r}", "First: {q} Second: {r}", "{q} {r}", "Two things. {q} {r}",
    "~{q} When you have that: {r}", "~1) {q} 2) {r}",
)  # fmt: skip
CHAIN = Phrases(
    "(Look up|Get|Read|Check) {k}, then (multiply it by|take it times) {n}.", "Multiply the value of {k} by {n}.",
    "How much is the value of {k} times {n}?", "{n} times the value of {k}?",
    "(Get|Find) {k} first, then (multiply|calculate) times {n}.", "Take {k} from the table, times {n}.",
    "What do I get if I multiply {k} by {n}? Look it up.", "{k} * {n}, please; look up {k}.",
    "(Look up|Get|Read) {k} and (multiply it by|times) {n}.", "What is the value of {k} times {n}?",
    "Take the value of {k} and multiply it by {n}.", "Fetch {k}, then multiply by {n}.",
    "{k} times {n}: look up {k} first.",
    "~Find the value of {k}, then tell me {n} times that.", "~I need {n} times the value stored under {k}.",
)  # fmt: skip


class Session:
    """The conversation of one example under construction."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.messages: list[Message] = []
        self.checks: list[Check] = []
        self.offered: list[Offered] = []

    def offer(self, family: Tool) -> Offered:
        """Offer a tool of the family, under a name that no other offered tool has."""
        while True:
            tool = toolbox.offer(self.draw, family)
            if all(tool.name != other.name for other in self.offered):
                self.offered.append(tool)
                return tool

    def call(self, tool: Offered, values: tuple[object, ...], result: str) -> None:
        """Append a call and the tool's answer."""
        arguments = dict(zip(tool.parameters, values, strict=True))
        self.messages.append(calling(tool.name, arguments))
        self.checks.append(Check(call=(tool.name, arguments)))
        content = result
        if self.draw.chance(0.2):
            number = result.isdigit()
            content = json.dumps({self.draw.pick(("result", "value", "answer")): int(result) if number else result})
        self.messages.append({"role": "tool", "content": content})

    def say(self, text: str, *include: str) -> None:
        """Append an assistant text that must mention the given values."""
        self.messages.append(assistant(text))
        self.checks.append(Check(include=include, exclude=("tool_call",)))

    def finish(self, distractors: int) -> Example:
        """The example, with further tools offered and a system prompt at times."""
        draw = self.draw
        for _ in range(min(distractors, draw.level - 1)):
            family = toolbox.made_up(draw) if draw.chance(0.4) else draw.pick(NAMED)
            if all(family is not other.family for other in self.offered):
                self.offer(family)
        draw.rng.shuffle(self.offered)
        if draw.chance(0.4):
            self.messages.insert(0, {"role": "system", "content": draw.phrase(SYSTEM)})
        return Example("tool", self.messages, self.checks, [tool.schema() for tool in self.offered])


def request(draw: Draw, family: Tool) -> tuple[str, tuple[object, ...]]:
    """A user's request for the tool and the values of the call."""
    if family is CALCULATOR and draw.chance(0.25):
        text, expression = toolbox.problem(draw)
        return text, (expression,)
    values = family.sample(draw)
    spoken = (toolbox.spoken(draw, values[0]),) if family is CALCULATOR else values
    return draw.phrase(family.ask, **{str(index): value for index, value in enumerate(spoken)}), values


def remarked(draw: Draw, text: str) -> str:
    """The request, at times among sentences that ask for nothing."""
    while draw.chance(0.25):
        remark = draw.phrase(REMARK, x=draw.pick(BESIDE))
        text = f"{text} {remark}" if draw.chance(0.65) else f"{remark} {text}"
    return text


def reply(family: Tool, values: tuple[object, ...], result: str) -> str:
    """The sentence that reports a result."""
    text = family.reply
    for index, value in enumerate(values):
        text = text.replace(f"{{{index}}}", str(value))
    return text.replace("{r}", result)


def _mentioned(family: Tool, result: str) -> tuple[str, ...]:
    return (result,) if "{r}" in family.reply else ()


def _family(draw: Draw) -> Tool:
    roll = draw.rng.random()
    if roll < 0.25:
        return CALCULATOR
    if roll < 0.4:
        return LOOKUP
    return toolbox.made_up(draw) if roll < 0.65 else draw.pick(NAMED)


def make(draw: Draw) -> Example:
    """One call, two calls in a row, a chain of two calls, or small talk with tools offered."""
    session = Session(draw)
    roll = draw.rng.random()
    if roll < 0.08:
        talk = chat.small_talk(draw)
        session.offer(_family(draw))
        session.messages += [user(talk.text), assistant(talk.answer)]
        session.checks.append(Check(any_of=talk.any_of, exclude=("tool_call",)))
        return session.finish(draw.rng.randint(0, 2))
    if roll < 0.13:
        return _chain(session)
    family = _family(draw)
    text, values = request(draw, family)
    tool = session.offer(family)
    result = family.result(draw, values)
    if roll < 0.80:
        session.messages.append(user(remarked(draw, draw.phrase(POLITE, q=text) if draw.chance(0.5) else text)))
        session.call(tool, values, result)
        session.say(reply(family, values, result), *_mentioned(family, result))
        if draw.chance(0.3):
            _again(session, family, tool)
        return session.finish(draw.rng.choice((0, 0, 1, 1, 2, 3)))
    other = family if draw.chance(0.5) else _family(draw)
    next_text, next_values = request(draw, other)
    next_tool = tool if other is family else session.offer(other)
    next_result = other.result(draw, next_values)
    session.messages.append(user(remarked(draw, draw.phrase(BOTH, q=text, r=next_text))))
    session.call(tool, values, result)
    session.call(next_tool, next_values, next_result)
    answer = f"{reply(family, values, result)} {reply(other, next_values, next_result)}"
    session.say(answer, *_mentioned(family, result), *_mentioned(other, next_result))
    return session.finish(draw.rng.choice((0, 0, 1, 2)))


def _again(session: Session, family: Tool, tool: Offered) -> None:
    """A second turn that needs the same tool with other values."""
    text, values = request(session.draw, family)
    result = family.result(session.draw, values)
    session.messages.append(user(text))
    session.call(tool, values, result)
    session.say(reply(family, values, result), *_mentioned(family, result))


def _chain(session: Session) -> Example:
    """A looked-up number goes into a calculation."""
    draw = session.draw
    key, factor, value = LOOKUP.sample(draw)[0], draw.number(2, 99), draw.number(2, 999)
    expression = f"{value} * {factor}"
    session.messages.append(user(draw.phrase(CHAIN, k=key, n=factor)))
    session.call(session.offer(LOOKUP), (key,), str(value))
    product = toolbox.number_text(calculate(expression))
    session.call(session.offer(CALCULATOR), (expression,), product)
    session.say(f"{expression} = {product}.", product)
    return session.finish(draw.rng.choice((0, 0, 1, 2)))
