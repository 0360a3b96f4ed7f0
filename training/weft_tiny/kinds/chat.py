"""Small talk, and system prompts that set a name, a character or a rule to follow."""

from __future__ import annotations

from dataclasses import dataclass

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, Message, assistant, split_sentences, user
from training.weft_tiny.grammar import Draw, Phrases

TALK: tuple[tuple[Phrases, tuple[str, ...]], ...] = (
    (Phrases("Hello(!|.|)", "Hi(!|.| there!|)", "Hey(!|.|)", "Good (morning|evening|day)(!|.|)", "Greetings!",
    "~Hello there, friend!"),
     ("Hello! How can I help you?", "Hi! What can I do for you?")),
    (Phrases("How are you(?| today?)", "How do you do?", "Are you (well|okay|fine)?", "How is it going?",
    "~How are things with you?"),
     ("I am fine, thank you.", "I am very well, thank you.")),
    (Phrases("Thank you(!|.)", "Thanks(!|.| a lot!)", "Many thanks!", "That was helpful, thanks.",
    "~Thanks for all your help!"),
     ("You are welcome!", "I am glad to help.")),
    (Phrases("Bye(!|.)", "Goodbye(!|.)", "See you (later|soon)(!|.)", "I have to go now.",
    "~Good night, until next time!"),
     ("Goodbye! Have a nice day.", "See you soon!")),
    (Phrases("What can you do?", "How can you help me?", "What are you good at?", "What do you do?",
    "~Which things can you do?"),
     ("I can chat, tell short stories, answer questions about a text and call tools.",)),
    (Phrases("Tell me a joke(.|!)", "Do you know a joke?", "Make me laugh(.|!)", "Say something funny.",
    "~I want to hear a joke."),
     ("Why did the book go to the doctor? It had a broken spine.", "What has hands but cannot clap? A clock.")),
    (Phrases("I am (sad|tired|bored)(.| today.)", "I feel (sad|tired|bored)(.| today.)", "Today was a bad day.",
    "~Nothing goes right for me."),
     ("I am sorry to hear that. A short rest may help.", "That is hard. I hope it gets better soon.")),
    (Phrases("I am (happy|glad)(.| today!)", "I feel (great|happy)!", "Today was a good day.",
    "~Everything goes right for me today!"),
     ("That is good to hear!", "How nice! I am glad.")),
    (Phrases("Do you like (music|books|tea|rain|cats|dogs)?", "Are you fond of (music|books|tea|rain|cats|dogs)?",
    "~Is (music|tea) something you like?"),
     ("Yes, I like it very much.", "I do, it is a nice thing.")),
    (Phrases("Can you help me?", "I need (help|some help|your help).", "Please help me.", "Help!",
    "~Could I get some help from you?"),
     ("Of course! What do you need?", "Yes, tell me what you need.")),
    (Phrases("Are you (real|human|a person|a robot)?", "Are you a (computer|machine)?", "~Am I talking to a machine?"),
     ("I am a small language model, not a person.",)),
    (Phrases("Give me some advice(.|!)", "What should I do today?", "Any tips for me?",
    "~What would you advise me to do?"),
     ("Take a walk and drink some water.", "Start with the smallest task.")),
    (Phrases("What is your favorite (color|food|animal)?", "Do you have a favorite (color|food|animal)?",
    "~Which (color|food) do you like best?"),
     ("I like all of them.", "That is hard to say, I like many.")),
    (Phrases("Tell me something interesting(.|!)", "Tell me a fact(.|!)", "Do you know something interesting?",
    "~Share a fun fact with me."),
     ("Honey never goes bad.", "An octopus has three hearts.", "A day on Venus is longer than its year.")),
)  # fmt: skip
WHO = Phrases(
    "who are you", "who are you?", "what is your name", "what's your name?", "your name", "What's your name?",
    "(And|So|Okay), who are you?", "(And|So), what is your name?", "Who am I (talking|speaking) (to|with)?",
    "What should I call you?", "What can I call you?", "(Say|Give me|Tell me) your name.",
    "(Hello|Hi|Hey), who (is this|are you)?", "Could you tell me your name?", "Do you have a name? What is it?",
    "Who is (there|talking|on the line)?", "State your name.", "Under what name do you work?",
    "What name do you have?", "Present yourself.", "Are you somebody? Who?", "Which name do you (go by|use)?",
    "I forgot your name.", "Remind me of your name.", "Can I have your name?", "Tell me who you are.",
    "Who might you be?", "What do they call you?",
    "Who are you?", "What is your name?", "What are you called?", "Tell me your name(.|, please.)", "Your name?",
    "Hi, who are you?",
    "Who am I talking to?", "How should I call you?", "(Hello|Hi)! What is your name?", "Introduce yourself.",
    "Say who you are.",
    "And you are?", "Who is this?", "Do you have a name?", "What do people call you?", "Who is speaking?",
    "I would like to know your name.", "Name, please.", "~May I ask for your name?", "~With whom do I speak?",
    "~Please tell me who you are.",
)  # fmt: skip
PERSONA = Phrases(
    "(Play|Be|Act as|Act like|Speak as|Talk as|Answer as|Reply as) {n}.",
    "(Play|Be|Act as|Speak as|Answer as) {n}, {r}.", "Your name is {n}, and you are {r}.", "You are called {n}.",
    "You are called {n}. You are {r} and {m}.", "You go by {n}.", "Call yourself {n}.", "The user talks to {n}, {r}.",
    "In this (chat|talk|game) you are {n}.", "In this (chat|talk|game) you are {n}, {r}.", "Here you are {n}.",
    "Imagine you are {n}, {r}.", "You have the name {n}.", "People know you as {n}.", "People know you as {n}, {r}.",
    "Everyone calls you {n}.", "You answer to the name {n}.", "{n}, that is you.", "{n}, {r}: that is you.",
    "Role: {r}. Name: {n}.", "name: {n}\nrole: {r}", "You ({n}) are {r}.", "You are {m}, and you are called {n}.",
    "Today you are {n}, {r}.", "You were named {n}.", "As {n}, {r}, you talk to users.",
    "This assistant, {n}, is {m}.", "{n} is {r}. You are {n}.", "Stay {m}. You are {n}.", "Your role is {n}, {r}.",
    "Users know you under the name {n}.", "Let us call you {n}.",
    "You are {n}.", "You are {n}, {r}.", "Your name is {n}.", "Your name is {n}. You are {r}.",
    "You are {n}, {r}, and you are {m}.",
    "Act as {n}, {r}.", "You are {r} called {n}.", "You play {n}, {r}.", "You are {r}. Your name is {n}.",
    "You are {r} named {n}.",
    "This is a chat with {n}, {r}.", "You are {m}. Your name is {n}.", "Speak as {n}.",
    "Be {n}, {r}.", "I want you to be {n}, {r}.", "Your name: {n}. Your role: {r}.", "Name: {n}. Mood: {m}.",
    "{n} is your name.", "Answer as {n} would.",
    "From now on you are {n}.", "Pretend to be {n}, {r}.", "You, {n}, are {r}.",
    "The assistant is called {n}. It is {m}.", "The name of this assistant is {n}.",
    "~Take the part of {n}, who is {r}.", "~Here you go by the name of {n}.", "~They call you {n} and you are {r}.",
)  # fmt: skip
MOODS = ("friendly", "polite", "cheerful", "calm", "kind", "brave", "funny", "patient", "wise", "curious")
SAYINGS = ("Ahoy!", "Cheers!", "Well, well.", "Dear friend,", "Indeed!", "Peace.", "Hooray!", "As you wish.")
MAKER = Phrases(
    "You (are|were) (built|created|trained|hired|employed) by {o}.", "{o} (built|created|trained|hired|employs) you.",
    "You (are|act) for {o}.", "You are the assistant of {o}.", "{o} is your company.",
    "{o} is the company you work for.", "You help customers of {o}.", "You are with {o}.",
    "Your (boss|maker|firm) is {o}.", "You got a job at {o}.", "You talk to the customers of {o}.", "Company: {o}.",
    "You are employed at {o}.", "{o} pays you.", "The firm {o} made you.", "You come from {o}.",
    "This is the service of {o}.",
    "You work for {o}.", "You help the people at {o}.", "You were made by {o}.", "You belong to the team of {o}.",
    "Your company is {o}.", "You are part of {o}.", "You answer questions for {o}.", "{o} made you.",
    "You do your job at {o}.", "The company is called {o}.", "You serve the customers of {o}.",
    "~You speak on behalf of {o}.", "~Your employer is {o}.",
)  # fmt: skip
ASK_MAKER = Phrases(
    "Who (built|created|trained|hired|employs) you?", "What is your firm?", "Which firm (is this|are you with)?",
    "Where are you from?", "(Name|Say) your company.", "Who pays you?", "Which company (is this|are you from)?",
    "What company is this?", "Who do you (serve|help)?", "Do you work for a company? Which?",
    "Whom do you work for?", "What place do you work at?", "Who is your maker?", "Tell me who you work for.",
    "Which company made you?", "Your company?",
    "(Who|What company) do you work for?", "Where do you work?", "What is your company?",
    "Which company do you work for?",
    "Who made you?", "What firm are you with?", "For whom do you work?", "What is the name of your company?",
    "Tell me your company.", "~Who is your employer?", "~On whose behalf do you speak?",
)  # fmt: skip
START_RULE = Phrases(
    "(Begin|Start|Open) (each|every|all|any) (answer|reply|message|response)(s|) (with|by saying) {w}",
    "(Begin|Start|Open) with {w}", "(Your|All|The) (answers|replies|messages) (start|begin|open) with {w}",
    "(First|At first|To begin), say {w}", '"{w}" (comes|is) first.',
    '"{w}" is how each (answer|reply) (starts|begins).', "The start of (each|every) (answer|reply|message) is {w}",
    "(Say|Write|Put) {w} at the (start|beginning) of (each|every) (answer|reply).",
    "You always (start|begin) by saying {w}", "Let (each|every) answer start with {w}",
    "Make {w} the start of (all|your) answers.", "Rule: start with {w}", "You open all you say with {w}",
    "{w} - this is how you start.",
    'Begin (each|every) answer with "{w}".', "Start every (answer|reply) with {w}.", 'Always start with "{w}".',
    'Every reply must begin with "{w}".', "Your answers begin with {w}.", "Say {w} first in each answer.",
    "Open with {w} each time.", "Put {w} first.", 'Each reply starts like this: "{w}"', "Before you answer, say {w}",
    'Never forget to start with "{w}".', "~The first word of each answer is {w}.",
    '~Put "{w}" in front of all you say.',
)  # fmt: skip
END_RULE = Phrases(
    "(End|Finish|Close) (each|every|all|any) (answer|reply|message|response)(s|) (with|by saying) {w}",
    "(End|Finish|Close) with {w}", "(Your|All|The) (answers|replies|messages) (end|close|finish) with {w}",
    "(Last|At last|To finish), say {w}", '"{w}" (comes|is) last.', '"{w}" is how each (answer|reply) (ends|closes).',
    "The end of (each|every) (answer|reply|message) is {w}",
    "(Say|Write|Put) {w} at the end of (each|every) (answer|reply).", "You always (end|finish) by saying {w}",
    "Let (each|every) answer end with {w}", "Make {w} the end of (all|your) answers.", "Rule: end with {w}",
    "You close every message with {w}", "{w} - this is how you end.",
    'End (each|every) answer with "{w}".', "Finish every (answer|reply) with {w}.", 'Always end with "{w}".',
    'Every reply must end with "{w}".', "Your answers end with {w}.", "Say {w} last in each answer.",
    "Close with {w} each time.", "Put {w} last.", 'Each reply ends like this: "{w}"', "After you answer, say {w}",
    'Never forget to end with "{w}".', "~The last word of each answer is {w}.", '~Close all you say with "{w}".',
)  # fmt: skip
CALL_RULE = Phrases(
    "The user is {u}. (Use|Say) the name in (each|every) answer.", "Your user is called {u}: say the name.",
    "(Say|Use|Mention) the name {u} (each time|in each answer|every time).", "Begin with the name {u}.",
    "Start each answer with the name of the user, {u}.", "You are talking to {u}. Say {u} first.",
    "Always call the user {u}.", "(Call|Name) the person {u}.", "{u} is the user. Say {u} each time.",
    "Speak to {u} by name.", "Always address {u} by name.", "The name {u} is in all answers.",
    "Call the user {u}.", "The user is called {u}. Use the name.", "The name of the user is {u}. Always use it.",
    "Address the user as {u}.", "You speak with {u}. Say so.", "Say {u} to the user.",
    "Every answer is for {u} and begins with that name.", "Greet {u} by name in all answers.",
    "~You talk to {u}; say the name each time.", "~Use the name {u} for the user.",
)  # fmt: skip
ONE_SENTENCE = Phrases(
    "One sentence only.", "(Give|Write|Say|Use) (just |only |)one sentence.",
    "(Answer|Reply|Respond) (in|with) (just |only |)one sentence.", "A single sentence is enough.",
    "No more than one sentence.", "(Be|Stay) short: a single sentence.", "One sentence, not more.",
    "Your answers have one sentence.", "(Each|Every) (answer|reply) is one sentence.", "Limit: one sentence.",
    "Say it in one sentence.", "Do not write two sentences.",
    "Answer in one sentence.", "Use one sentence only.", "Reply with a single sentence.", "One sentence per answer.",
    "Keep it to one sentence.", "Only one sentence, please.", "Write just one sentence.", "Be brief: one sentence.",
    "~Never say more than one sentence.", "~Keep each reply to one sentence.",
)  # fmt: skip
TOLD = Phrases(
    "my name is {u}", "i am {u}", "I'm {u}.", "(Hello|Hi|Hey), I'm {u}.", "(Hello|Hi|Hey)! My name is {u}.",
    "This is {u}.", "This is {u} speaking.", "{u} is my name.", "I am called {u}.", "My friends call me {u}.",
    "(Just |)call me {u}.", "Name's {u}.", "My name: {u}.", "Let me introduce myself: {u}.",
    "(Hello|Hi) there, {u} here.", "You are talking to {u}.", "I have the name {u}.", "My parents named me {u}.",
    "Everyone calls me {u}.", "Good (morning|evening|day), I am {u}.", "I would like you to call me {u}.",
    "By the way, I am {u}.", "Remember: I am {u}.",
    "My name is {u}.", "I am {u}.", "(Hello|Hi), I am {u}.", "(Hello|Hi), my name is {u}.", "Call me {u}.",
    "You can call me {u}.",
    "People call me {u}.", "I go by {u}.", "Hey, {u} here.", "It is me, {u}.", "They call me {u}.",
    "Please call me {u}.", "Hello! I am called {u}.", "~The name is {u}.", "~Nice to meet you, I go by {u}.",
)  # fmt: skip
ASK_ME = Phrases(
    "what is my name", "What's my name?", "who am i", "(So|And|Now), what is my name?", "(So|And|Now), who am I?",
    "Which name do I have?", "How am I called?", "(Say|Give|Repeat) my name.", "What did I say my name is?",
    "Do you (still |)know who I am?", "Do you (still |)remember my name?", "What do you call me?", "What was my name?",
    "Did you forget my name?", "Who are you talking to?", "My name?", "Tell me who I am.", "How should you call me?",
    "I said my name. What is it?", "What is the name that I told you?",
    "What is my name?", "Do you know my name?", "Who am I?", "What am I called?", "Tell me my name.",
    "How did I say I am called?",
    "My name is what?", "Say my name.", "Do you remember who I am?", "And what is my name?",
    "~Can you remember my name?", "~Which name did I give you?",
)  # fmt: skip
LIKES = Phrases(
    "You (really|also|just) (like|love|enjoy) {t}.", "{t} is your favorite thing.", "{t} makes you happy.",
    "Your (favorite|passion|great love) is {t}.", "You (adore|dream of|think about) {t}.",
    "Nothing is better than {t} for you.", "You are (mad|crazy) about {t}.", "What you like is {t}.",
    "What you love most is {t}.", "You talk about {t} all day.", "You are into {t}.", "Likes: {t}.",
    "You have always loved {t}.", "You would do all for {t}.", "Your heart is with {t}.",
    "You know all about {t} and love it.",
    "You like {t}.", "You love {t}.", "Your favorite thing is {t}.", "You are fond of {t}.",
    "You always talk about {t}.",
    "You enjoy {t}.", "You cannot get enough of {t}.", "The thing you like best is {t}.",
    "{t}: that is what you love.", "You are a fan of {t}.", "~Nothing pleases you more than {t}.",
    "~You have a taste for {t}.",
)  # fmt: skip
ASK_LIKES = Phrases(
    "What do you (really |)(like|love|enjoy)?", "what do you like", "What are you into?", "What do you like most?",
    "What do you love most?", "Which thing do you like?", "Tell me your favorite thing.", "What is your passion?",
    "What do you dream of?", "Name a thing you like.", "What is it that you like?", "Do you like something?",
    "What are your likes?", "What do you talk about?", "What is best for you?", "Your favorite thing?",
    "(Say|Name) what you (like|love).",
    "What do you like?", "What is your favorite thing?", "What are you fond of?", "What do you love?",
    "Is there something you like?",
    "What do you enjoy?", "What do you like best?", "What makes you happy?", "Tell me what you like.",
    "What are you a fan of?", "~What pleases you?", "~Tell me what you are fond of.",
)  # fmt: skip
DEFAULT_NAME = "Weft Tiny"


@dataclass(frozen=True)
class Question:
    """A question, the answer, and what an answer must mention: every one of ``include``, some one of ``any_of``."""

    text: str
    answer: str
    include: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()


def small_talk(draw: Draw) -> Question:
    """A question or remark of small talk, and an answer; any of its answers is right, or the start of one."""
    phrases, answers = draw.pick(TALK)
    firsts = tuple(split_sentences(answer)[0] for answer in answers)
    return Question(draw.phrase(phrases), draw.pick(answers), any_of=firsts)


def make(draw: Draw) -> Example:
    """One to three turns under a system prompt, or under none."""
    if draw.chance(0.15):
        return _plain(draw)
    name, maker, guest, word = draw.values(words.NAMES, 4)
    rules, questions = _character(draw, name, maker)
    single = draw.chance(0.25)
    if single:
        rules.append(draw.phrase(ONE_SENTENCE))
    start = end = address = ""
    saying = draw.pick((f"{word}!", f"{word}.", draw.pick(SAYINGS)))
    style = draw.rng.random()
    if style < 0.18:
        start = saying
        rules.append(draw.phrase(START_RULE, w=start))
    elif style < 0.35:
        end = f"{saying[:-1]}." if saying.endswith(",") else saying
        rules.append(draw.phrase(END_RULE, w=end))
    elif style < 0.5:
        address = guest
        rules.append(draw.phrase(CALL_RULE, u=guest))
    draw.rng.shuffle(rules)
    messages: list[Message] = [{"role": "system", "content": " ".join(rules)}]
    checks: list[Check] = []
    draw.rng.shuffle(questions)
    for question in questions[: draw.rng.randint(1, 3)]:
        answer = split_sentences(question.answer)[0] if single else question.answer
        if address:
            answer = f"{address}, {answer if answer.startswith('I ') else answer[0].lower() + answer[1:]}"
        wanted = (*question.include, address) if address else question.include
        messages += [user(question.text), assistant(" ".join(part for part in (start, answer, end) if part))]
        count = 1 if single and not start and not end else 0
        checks.append(
            Check(include=wanted, any_of=question.any_of, starts=start, ends=end, sentences=count, unrepeated=True)
        )
    return Example("chat", messages, checks)


def _character(draw: Draw, name: str, maker: str) -> tuple[list[str], list[Question]]:
    """The sentences of a system prompt that set a character, and questions it can be asked."""
    mood = draw.pick(MOODS)
    role = draw.pick(("a {m} assistant", "a {m} {j}", "the {j} of the town", "an assistant", "a chat bot"))
    role = role.replace("{m}", mood).replace("{j}", draw.value(words.WORK))
    rules = [draw.phrase(PERSONA, n=name, r=role, m=mood)]
    questions: list[Question] = [Question(draw.phrase(WHO), f"I am {name}.", (name,))]
    if draw.chance(0.3):
        rules.append(draw.phrase(MAKER, o=maker))
        questions.append(Question(draw.phrase(ASK_MAKER), f"I work for {maker}.", (maker,)))
    if draw.chance(0.3):
        likes = draw.value(draw.pick((words.MEALS, words.THINGS, words.PASTIMES, words.CITIES)))
        rules.append(draw.phrase(LIKES, t=likes))
        questions.append(Question(draw.phrase(ASK_LIKES), f"I like {likes}.", (likes,)))
    for _ in range(draw.rng.randint(1, 2)):
        questions.append(small_talk(draw))
    return rules, questions


def _plain(draw: Draw) -> Example:
    """A chat without a system prompt: small talk, the default name, and a user's name to be remembered."""
    messages: list[Message] = []
    checks: list[Check] = []
    if draw.chance(0.5):
        guest = draw.value(words.NAMES)
        messages += [user(draw.phrase(TOLD, u=guest)), assistant(f"Nice to meet you, {guest}!")]
        messages += [user(draw.phrase(ASK_ME)), assistant(f"Your name is {guest}.")]
        checks += [Check(include=(guest,)), Check(include=(guest,))]
    else:
        messages += [user(draw.phrase(WHO)), assistant(f"I am {DEFAULT_NAME}, a small language model.")]
        checks.append(Check(include=(DEFAULT_NAME,)))
    if draw.chance(0.6):
        talk = small_talk(draw)
        messages += [user(talk.text), assistant(talk.answer)]
        checks.append(Check(any_of=talk.any_of, unrepeated=True))
    return Example("chat", messages, checks)
