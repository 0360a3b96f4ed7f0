"""Short stories from a request with given names and objects."""

from __future__ import annotations

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.grammar import Draw, Phrases, capital

ASK = Phrases(
    "tell me a story about {w}", "write a story with {w}", "a story: {w}", "story please, {w}",
    "(Please |)(write|tell|make up) (me |us |)a (story|tale|bedtime story) (about|with) {w}.",
    "(Please |)tell (me|us) (the story of|a story of) {w}.", "The (story|tale) of {w}, please.", "The story of {w}",
    "What is the story of {w}?", "(Do you|You) know a story (about|with) {w}? Tell it.",
    "Do you have a story about {w}?", "(I want|I'd like|We want) you to (tell|write|make up) a story about {w}.",
    "I (feel like|am in the mood for) a story about {w}.",
    "I need a (short |)(story|tale) for (my son|my class|the kids|school) about {w}.",
    "(Could|Can|May) (I|we) (hear|have|get) a (short |)story about {w}?",
    "Would you tell (me|us) about {w} in a story?", "(How about|What about) a story (about|with) {w}?",
    "Let us have a story about {w}.", "Let there be {w} in your story.", "Once upon a time... Write about {w}.",
    "(Think of|Come up with|Make up) a (short |nice |)(story|tale) (about|with) {w}.",
    "(Your|The) story (has|is about|should be about|should have) {w}.",
    "There should be {w} in the story. (Write|Tell) it.", "In the story, there (is|should be) {w}. Tell it.",
    "A (short|nice|funny|sweet) (tale|story) about {w}(|!)", "Topic: {w}. (Write|Tell) a story.",
    "Topic of the story: {w}", "Task: write a short story.\nTopic: {w}", "Write a story.\nIn it: {w}",
    "Write a story. It is about {w}.", "Write a (few sentences|short text|little story) about {w}.",
    "(Characters|Ingredients|Keywords|In it): {w}. Write a story.", "{w} - make a story (of|from) this.",
    "{w}. (Write|Tell|Make) a story.", "{w}. Story, please.",
    "(It is late|Good night|Bedtime). Tell (me|us) a story about {w}.",
    "(The children|My kids|We) cannot sleep. Tell a story about {w}.", "Be creative: write about {w}.",
    "You are a storyteller. Tell of {w}.", "Use this for a story: {w}", "Next story: {w}", "Now a story about {w}.",
    "Entertain (me|us) with a (story|tale) about {w}.", "Share a (story|tale) about {w}.",
    "What happened to {w}? Tell it as a story.",
   
    "(Write|Tell|Make|Invent|Create) (me |us |)(a|one) (short |nice |funny |)(story|tale) (about|with|of) {w}.",
    "(I would like|I'd like|We want|I need) a (short |)(story|tale) (about|with) {w}.", "Story about {w}",
    "A tale of {w}.", "story: {w}",
    "(Can|Could|Would) you (write|tell|make up|invent) (me |)a (short |)(story|tale) (about|with) {w}?",
    "{w}: (write|tell) a story.", "Let me hear (a story|something) about {w}.", "Use {w} in a story.",
    "(My son|The kids|We) want a story about {w}.", "A story for (children|kids|bedtime), with {w}.",
    "Tell (us|me) about {w}, as a story.", "(Put|Have) {w} in a (story|tale).", "Write about {w}.",
    "Something about {w}, please, as a story.",
    "(Write|Tell me) a (short |)story about {w}.", "Tell (me |)a story with {w}.",
    "A (short |)story about {w}, please.",
    "I want (to hear |)a story about {w}.", "Make up a (short |)story about {w}.", "Can you tell me a story about {w}?",
    "Please write a (short |little )story with {w}.", "Story time! Tell one about {w}.", "Write a tale about {w}.",
    "Tell a bedtime story about {w}.", "Give me a story with {w}.",
    "~Invent a little story in which {w} appear.", "~My child wants a tale of {w}.",
    "~Let us hear a story that has {w} in it.",
)  # fmt: skip
SYSTEM = Phrases(
    "You are a (great|creative|gifted) (writer|storyteller).",
    "You (make up|invent|write) (stories|tales) for (people|the user|kids|families).",
    "You are an assistant that (writes|tells) (stories|tales).",
    "Your (job|task) is to (write|tell) (short |)(stories|tales).",
    "Your stories are (short|short and nice|sweet|for children).", "Write (a story|stories) for the user.",
    "The user wants a story. (Write|Tell) it.", "The user (names|gives) some things. Make a story (of|from) them.",
    "Use (all|the) names and things (that |)the user gives.",
    "Every story has (a start and an end|a happy end|an end).", "Keep (your|the) stories short.",
    "(Please tell|Tell) (good|nice|short) stories.", "You work as (a writer|an author|a storyteller).",
    "You know how to tell a (story|tale).",
    "You (love|like) (to tell |)stories.", "You are a (kind|good|funny) storyteller.", "Write (nice|short) stories.",
    "Tell a story when asked.", "You are an author.", "You write for children.", "Be (creative|a writer).",
    "You are a friendly assistant.",
    "You are a storyteller.", "You write short stories.", "You tell stories to children.", "You are a writer of tales.",
    "You are a helpful assistant.", "~Stories are what you do best.", "~You make up stories on request.",
)  # fmt: skip
OPEN = (
    "Once there was a {r} named {a} who lived (near the sea|by a river|in a small town|in the hills).",
    "{a} was a (young|clever|quiet) {r} (near the sea|by a river|in a small town|in the hills).",
    "One (morning|evening|day) {a} the {r} woke up (early|late).",
    "Long ago, a {r} named {a} lived (alone|happily) in an old house.",
)  # fmt: skip
WITH_FRIEND = (
    "{a} had a friend named {b}.",
    "Every day {a} met {b} at the (market|bridge|well).",
    "{b} lived next door and often came to visit.",
)
FIND = (
    "One day {a} found a {o} (in the grass|under a tree|on the road|behind the house).",
    "(In the attic|At the market|In the forest) {a} saw a {o} and took it home.",
    "A stranger gave {a} a {o} and walked away.",
)  # fmt: skip
MARVEL = (
    "The {o} was (old|strange|shiny|heavy), but it (began to glow|could sing|started to hum) at night.",
    "Nobody knew where the {o} came from.", "When {a} touched the {o}, a soft (light|voice|song) came out of it.",
)  # fmt: skip
TROUBLE = (
    "But then a (storm|flood|thief) came and the {o} was lost.",
    "But soon the {o} broke into two pieces.",
    "But one night the {o} was gone.",
    "But the people of the town wanted to have the {o}.",
)
SOLO = (
    "{a} looked (for three days|everywhere) and did not give up.",
    "{a} sat down and thought of a plan.",
    "{a} asked every neighbor for help.",
)
TOGETHER = (
    "{b} came to help, and (together|side by side) they looked everywhere.",
    "{b} had a good idea and told {a} about it.",
    "{a} and {b} worked all night.",
)
CLOSE = (
    "In the end the {o} was safe and {a} was happy.",
    "At last {a} had the {o} again and shared it with (everyone|the town).",
    "From then on {a} kept the {o} in a (box|bag|drawer) and smiled.",
    "In the end {a} learned that friends matter more than a {o}.",
)  # fmt: skip
ROLES = ("girl", "boy", "king", "queen", "farmer", "sailor", "baker", "child", "fox", "robot", "knight", "painter")


def body(draw: Draw, together: bool, slots: dict[str, str]) -> str:
    """A story after its opening: three to seven sentences on ``a``, the friend ``b`` and the object ``o``."""
    parts = [*((WITH_FRIEND,) if together else ()), FIND]
    parts += [MARVEL] if draw.chance(0.6) else []
    parts += [TROUBLE, TOGETHER if together else SOLO] if draw.chance(0.8) or together else []
    parts.append(CLOSE)
    return " ".join(capital(draw.fill(draw.pick(part), **slots)) for part in parts)


def make(draw: Draw) -> Example:
    """A request for a story and a story of four to seven sentences."""
    first, friend = draw.values(words.NAMES, 2)
    thing, role = draw.value(words.THINGS), draw.pick(ROLES)
    together = draw.chance(0.5)
    subject = draw.pick((first, f"{first} the {role}", f"a {role} named {first}", f"a {role} called {first}"))
    wanted = f"{subject}, {friend} and a {thing}" if together else f"{subject} and a {thing}"
    if together and draw.chance(0.3):
        wanted = f"{first} and {friend} who find a {thing}"
    if draw.chance(0.1):
        wanted = wanted.replace("a " + thing, "the " + thing)
    slots = {"a": first, "b": friend, "o": thing, "r": role}
    text = f"{capital(draw.fill(draw.pick(OPEN), **slots))} {body(draw, together, slots)}"
    names = (first, thing, *((friend,) if together else ()))
    messages = [user(draw.phrase(ASK, w=wanted)), assistant(text)]
    if draw.chance(0.3):
        messages.insert(0, {"role": "system", "content": draw.phrase(SYSTEM)})
    return Example("story", messages, [Check(include=names, unrepeated=True)])
