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
    "Use a tool when you need one.", "(Some|A few) tools are at hand.", "Call a function if it helps.",
    "Call a tool, read the result, then answer.", "After a tool call, tell the user the result.",
    "When you have the result, say it in words.", "Answer the user. Tools are there to help.",
    "You are a (friendly|polite|careful) assistant with functions.", "Your tools know more than you do.",
    "You may call tools. Do not make up results.", "If you need (data|a value|facts), call a tool.",
    "Reply in short once the tool has answered.", "Pick a tool, fill in the arguments, report the result.",
    "Functions are listed below.", "You work for a (shop|school|company). Use the tools to help.",
    "Today you help people with tools.", "The user asks, the tools know, you tell.", "Keep answers short. Use tools.",
    "Do what the user asks.", "you are an assistant. use the tools.", "Small talk needs no tool.",
    "Do not repeat a call that has an answer.",
    "You (have|got) (some |)tools.", "Help the user with the tools.", "(Use|Call|Pick) the right tool.",
    "Tools are (there|given) for you.", "You are an agent.", "You are an agent with tools.",
    "Answer with the help of tools.", "If a tool fits, call it.", "You can use functions.", "Be helpful.",
    "Do not guess: use a tool.", "Work with the tools below.", "You assist people.",
    "Use the tools.", "You can call tools.", "You are a helpful assistant with tools.", "Call a tool when it helps.",
    "You have tools. Use them to answer.", "You are a helpful assistant.",
    "~Whenever you need to know something, call a function.", "~Solve the tasks of the user with your tools.",
)  # fmt: skip
POLITE = Phrases(
    "{q}\n\n(Thanks|Thank you|Please|Cheers)(!|.|)", "(Hi|Hello|Hey),\n\n{q}",
    "(Hi|Hello|Hey) (again|assistant|bot|there), {q}", "I hope you can help me: {q}",
    "(Could|Can|Would) you do (this|something) for me? {q}",
    "(I need|I want) (this|one thing) (now|today|from you): {q}", "This is what I need: {q}",
    "Here is (my|a|the) (question|task|request|job): {q}", "{q}\nThat is (all|my question|what I need|what I ask).",
    "(My boss|My sister|My friend|A friend|A customer|Someone) (asks|wants to know): {q}",
    "(My boss|My teacher|A friend|A customer|Someone) (says|wrote):\n{q}", "Q: {q}", "> {q}", "1. {q}", "task: {q}",
    "Question:\n{q}", "{q}\n\n(Best regards|Greetings|Yours)",
    "If you can, (help me with this|do this|answer this): {q}", "When you have (time|a minute|a moment): {q}",
    "I am (busy|in a hurry|on the road|at work). {q}",
    "I am (busy|in a hurry|on the road|at work), so (quickly|in short): {q}", "(Sorry|Excuse me|Pardon), {q}",
    "(Back to work|Now to work|Something else|Another thing|New topic|Also): {q}",
    "(First of all|For a start|To begin with): {q}",
    "{q} (Do you know?|Do you know that?|Can you do that?|Could you?|Is that okay?|Would you?)",
    "{q} (You have a tool for it.|There is a tool for it.|Look it up.|Do not guess.)",
    "(With|Using) (a tool|the tools|your tools): {q}",
    "Use (a tool|the tools|your tools|the right tool) (for this|here): {q}",
    "Call (a tool|the right tool|a function) for this: {q}",
    "I (do not know|am not sure about|cannot say|was asked) this: {q}",
    "{q}\n(I do not know.|I am not sure.|I have no idea.|I need it soon.)",
    "(please|kindly|quickly|ok|so|and|then): {q}", "{q} (ok?|pls|thx|please)",
    "(Be so kind|Be a good helper|Do me a favor): {q}", "It would be great to know: {q}",
    "What I (want|need) to know is this: {q}", "(Everyone|My class|My family) (asks|wonders|wants to know): {q}",
    "Let me ask (you|this): {q}", "Answer me (this|please): {q}",
    "(A|One) (small|last|short|simple) (question|thing|task|request): {q}",
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
    "I (will be|am) at the {x} (soon|today|tomorrow).", "The {x} can wait.",
    "(I|We) had a (long|good|hard|busy) day.", "(Sorry|Excuse me) for (asking|the trouble).",
    "(I am|We are) in a hurry.", "(I am|We are) (on the bus|at home|at work|in the garden).",
    "My {x} has the same question.", "I promised it to my {x}.", "I do not have it (here|with me|at home).",
    "(I could not|Nobody could) find it.", "The {x} was (nice|great|long), by the way.",
    "You helped me (before|last week|with the {x}).", "There is no need to explain.",
    "A short answer is (fine|enough|best).", "Take your time.", "This came up at (work|school|dinner|the {x}).",
    "I am writing a (letter|note|report|plan).", "It is not for me but for my {x}.",
    "Without it the {x} cannot start.", "Then I can (go|sleep|start|work on the {x}).",
    "I (have been|was) thinking about it (all day|since yesterday|at the {x}).", "We are planning a {x}.",
    "Last time it (worked|took long|was easy).",
    "Maybe you (know|can look it up|have it).", "My coffee is (cold|hot|ready).",
    "Our {x} starts (soon|tomorrow|at noon).",
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
    "{q}\n\n{r}", "* {q}\n* {r}", "I have two (questions|requests|tasks). {q} {r}",
    "(My first|The first) (question|request|task): {q} (The second|The other): {r}",
    "{q}\n(And|Also|Then|Next):\n{r}", "(Please do|Do) (this|one): {q} (Then|And) (this|the other): {r}",
    "{q} (I also need this|I have one more|There is more|Not only that): {r}", "{q} And at the same time: {r}",
    "(Both of these|Two requests|Two questions|A list), please:\n{q}\n{r}", "Can you do both? {q} {r}",
    "{q} {r} (Both, please.|I need both.|Please do both.|Answer both.)", "{q}\n{r}\n(Thanks|Thank you|Please)(!|.)",
    "(Hi|Hello|Hey)! {q} And also: {r}", "Question one: {q}\nQuestion two: {r}", "Q1: {q}\nQ2: {r}", "A: {q}\nB: {r}",
    "Task 1: {q} Task 2: {r}", "Before you go: {q} And (then|last): {r}", "{q} While you are at it: {r}",
    "{q} (On top of that|In addition|Further|Apart from that): {r}", "I want to know two things. {q}\n{r}",
    "To begin: {q} To finish: {r}", "Answer these:\n- {q}\n- {r}",
    "{q} (Next|Second|And|Besides|Plus): {r}", "(Do|I need) (two|both) things: {q} {r}", "a) {q} b) {r}",
    "- {q}\n- {r}", "{q}\n{r}", "{q} (One more thing|And one more|Another thing): {r}",
    "(Please|Help me): {q} Also: {r}", "{q} (As well|Too). {r}", "Start with this: {q} Go on with this: {r}",
    "{q} (Once done|When done): {r}",
    "{q} (Then|After that|Also): {r}", "{q} And then: {r}", "First: {q} Second: {r}", "{q} {r}", "Two things. {q} {r}",
    "~{q} When you have that: {r}", "~1) {q} 2) {r}",
)  # fmt: skip
CHAIN = Phrases(
    "{k} times {n}?", "value of {k} * {n}", "What is {n} times the value of {k}?",
    "If I take the value of {k} {n} times, what do I get?",
    "The value of {k} must be multiplied by {n}. What is the result?",
    "There is a number under {k}. Multiply it by {n}.", "I need {n} times the number that is stored under {k}.",
    "(Look up|Find|Get) {k}. (Then|Next|After that), multiply (it|the value|the result) by {n}.",
    "First (look up|read|get) {k}, second multiply by {n}.", "Multiply by {n} what you find under {k}.",
    "One costs as much as {k} says. What do {n} cost?", "{k} is a price in the table. What do {n} of them cost?",
    "How much is {n} times {k}? {k} is in the table.", "With the value of {k}: times {n}?",
    "Can you look up {k} and multiply it by {n}?", "Please take the number of {k} and calculate it times {n}.",
    "Two steps: look up {k}, multiply by {n}.", "Read {k} from the table and tell me {n} times that.",
    "The product of the value of {k} and {n}, please.", "What is the product of {k} and {n}? {k} is a key.",
    "My {k} times {n}: what is it? Look up {k}.", "Use the table for {k}, then the calculator for times {n}.",
    "{k}, multiplied by {n}. {k} is in the table.",
    "(Look up|Get|Read|Check) {k}, then (multiply it by|take it times) {n}.", "Multiply the value of {k} by {n}.",
    "How much is the value of {k} times {n}?", "{n} times the value of {k}?",
    "(Get|Find) {k} first, then (multiply|calculate) times {n}.", "Take {k} from the table, times {n}.",
    "What do I get if I multiply {k} by {n}? Look it up.", "{k} * {n}, please; look up {k}.",
    "(Look up|Get|Read) {k} and (multiply it by|times) {n}.", "What is the value of {k} times {n}?",
    "Take the value of {k} and multiply it by {n}.", "Fetch {k}, then multiply by {n}.",
    "{k} times {n}: look up {k} first.",
    "~Find the value of {k}, then tell me {n} times that.", "~I need {n} times the value stored under {k}.",
)  # fmt: skip
AGAIN = Phrases(
    "{q}", "(Thanks|Thank you|Good|Great|Okay|Nice)(!|.) {q}", "(And|Now|Next|Then): {q}", "(And|Now|So), {q}",
    "(One more|Another one|Next question|And this one): {q}", "(Thanks|Good|Okay)(!|.) (Now|And|Next): {q}",
    "That (helps|is good to know). {q}", "(I see|Aha|Fine)(.|!) {q}", "{q}\n(Same again, please.|Please.|Thanks.)",
    "(The same|Once more) for this: {q}", "Something else now. {q}", "(ok|thx|thanks|good)\n{q}",
    "I have another (question|one|request). {q}", "And what about this? {q}", "Right. Let us go on: {q}",
)  # fmt: skip
"""How a second request follows the first."""
RESULT = Phrases(
    "(R|r)esult: {r}", "The result is {r}.", "Answer: {r}", "Output: {r}", "{k}: {r}", "{k} = {r}", "{k} -> {r}",
    "(ok|OK|done|success): {r}", "(OK|Done|Success). {r}", "status: ok\n{k}: {r}", "status=ok {k}={r}", "Found: {r}",
    "Found {r}.", "Here is the result: {r}", "It is {r}.", "Tool result: {r}", "The tool returned {r}.",
    "Returned {r}.", '"{r}"', "[{r}]", "{k} returned {r}", "{r} (ok)", "Result 1 of 1: {r}", "Results:\n- {r}",
    "- {r}", "200 OK\n{r}", "The {k} is {r}.", "I found this: {r}", "The answer from the table is {r}.",
    "| {k} | {r} |",
    "The call was fine. {r}", "{k}:\n  {r}", "{r}\n(1 result)", "Your result: {r}", "{r} is the result.",
)  # fmt: skip
"""Plain text in which a tool may put its result."""
_KEYS = ("result", "value", "answer", "output", "data", "content", "response", "text", "return", "info")
_STATES = ("status", "state", "message")
_EXTRAS: tuple[tuple[str, object], ...] = (
    ("status", "ok"), ("status", "success"), ("status", "done"), ("ok", True), ("success", True), ("error", None),
    ("error", ""), ("cached", False), ("source", "table"), ("source", "web"), ("found", True), ("note", "fresh"),
    ("warnings", []), ("type", "text"),
)  # fmt: skip
"""Further fields that a tool may send along with its result."""


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
        self.messages.append({"role": "tool", "content": rendered(self.draw, tool, values, result)})

    def say(self, text: str, *include: str) -> None:
        """Append an assistant text that must mention the given values."""
        self.messages.append(assistant(text))
        self.checks.append(Check(include=include, exclude=("tool_call",)))

    def talk(self) -> None:
        """Append a turn of small talk, which calls no tool."""
        talk = chat.small_talk(self.draw)
        self.messages += [user(talk.text), assistant(talk.answer)]
        self.checks.append(Check(any_of=talk.any_of, exclude=("tool_call",)))

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


def rendered(draw: Draw, tool: Offered, values: tuple[object, ...], result: str) -> str:
    """The tool's answer as one server or another writes it: bare, in words, in lines or in JSON."""
    roll = draw.rng.random()
    if roll < 0.45:
        return result
    if roll < 0.53:
        return reply(tool.family, values, result)
    arguments: dict[str, object] = dict(zip(tool.parameters, values, strict=True))
    states = () if "{r}" in tool.family.reply else _STATES
    key = draw.pick([name for name in (*_KEYS, *states, *tool.family.names) if name not in arguments])
    if roll < 0.68:
        return draw.phrase(RESULT, k=key, r=result)
    fields: dict[str, object] = {key: result if draw.chance(0.2) else _native(result)}
    number, _, unit = result.partition(" ")
    if number.isdigit() and unit.isalpha() and draw.chance(0.4):
        fields = {key: int(number), "unit": unit}
    if draw.chance(0.3):
        fields = {**arguments, **fields}
    if roll < 0.76:
        sign, between = draw.pick(((": ", "\n"), ("=", "\n"), ("=", " "), (": ", ", "), (" = ", "; ")))
        return between.join(f"{name}{sign}{value}" for name, value in fields.items())
    if draw.chance(0.35):
        name, extra = draw.pick(_EXTRAS)
        if name not in fields:
            fields = {name: extra, **fields} if draw.chance(0.5) else {**fields, name: extra}
    shown: object = fields
    if draw.chance(0.15):
        shown = {draw.pick(("data", "result", "response", "output")): fields}
    elif draw.chance(0.15):
        shown = draw.pick(([fields], [_native(result)], {key: [_native(result)]}))
    separators = (",", ":") if draw.chance(0.25) else None
    return json.dumps(shown, indent=2 if draw.chance(0.1) else None, separators=separators)


def _native(result: str) -> object:
    """The result as the JSON value that is written like it, such as a number or true; else as text."""
    try:
        value: object = json.loads(result)
    except ValueError:
        return result
    return value if json.dumps(value) == result else result


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
        if draw.chance(0.06):
            session.talk()
        session.messages.append(user(remarked(draw, draw.phrase(POLITE, q=text) if draw.chance(0.5) else text)))
        session.call(tool, values, result)
        session.say(reply(family, values, result), *_mentioned(family, result))
        if draw.chance(0.3):
            _again(session, family, tool)
        elif draw.chance(0.08):
            session.talk()
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
    session.messages.append(user(session.draw.phrase(AGAIN, q=text) if session.draw.chance(0.4) else text))
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
