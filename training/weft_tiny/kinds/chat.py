"""Small talk, and system prompts that set a name, a character or a rule to follow."""

from __future__ import annotations

from dataclasses import dataclass

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, Message, assistant, split_sentences, user
from training.weft_tiny.grammar import Draw, Phrases

TALK: tuple[tuple[Phrases, tuple[str, ...]], ...] = (
    (Phrases("Hello(!|.|)", "Hi(!|.| there!|)", "Hey(!|.|)", "Good (morning|evening|day)(!|.|)", "Greetings!",
    "hello there", "Hiya(!|)", "Good afternoon(!|.)", "Hey there, assistant.",
    "Hi, (good|nice) to (see|meet) you(!|.)", "hi again", "Morning(!|.)", "Well, hello(!| there!)",
    "A very good (morning|evening|day) to you(!|.)", "Hello, hello!", "(Just saying|I wanted to say) (hi|hello)(!|.)",
    "hey assistant", "Hello from me(!|.)",
    "~Hello there, friend!"),
     ("Hello! How can I help you?", "Hi! What can I do for you?")),
    (Phrases("How are you(?| today?)", "How do you do?", "Are you (well|okay|fine)?", "How is it going?",
    "how are you", "How are you doing(| today)?", "How have you been(| lately)?",
    "Is everything (okay|fine|well) with you?", "And how are you(| today)?", "How do you feel(| today)?",
    "Hello, how are you?", "how's it going", "How is your day(| so far)?", "Tell me how you are.",
    "Are you having a good day?",
    "~How are things with you?"),
     ("I am fine, thank you.", "I am very well, thank you.")),
    (Phrases("Thank you(!|.)", "Thanks(!|.| a lot!)", "Many thanks!", "That was helpful, thanks.",
    "thanks a lot", "Thank you (so|very) much(!|.)", "Thanks for (the help|your help|that)(!|.)",
    "(Great|Okay|Perfect|Nice), thank you(!|.)", "I am (grateful|thankful)(| for your help).",
    "That (helped|helps) me (a lot|very much).", "You helped me(, thanks| a lot, thank you).",
    "thank you, that is all I needed", "I (want|would like) to thank you.", "(Good|Wonderful), thanks(!|.)",
    "~Thanks for all your help!"),
     ("You are welcome!", "I am glad to help.")),
    (Phrases("Bye(!|.)", "Goodbye(!|.)", "See you (later|soon)(!|.)", "I have to go now.",
    "bye bye", "Good night(!|.)", "I am (leaving|off|going) now. (Bye|Goodbye)(!|.)", "That was all, bye(!|.)",
    "Talk to you (later|soon|tomorrow)(!|.)", "Until (next time|tomorrow|later)(!|.)",
    "I (need|have) to leave(| now)(.|!)", "Have a (good|nice|great) (day|evening|week)(!|.)",
    "Take care(!|.)", "(Okay|So|Well), (bye|goodbye|see you)(!|.)", "It is late. I (go|am going) to bed.",
    "~Good night, until next time!"),
     ("Goodbye! Have a nice day.", "See you soon!")),
    (Phrases("What can you do?", "How can you help me?", "What are you good at?", "What do you do?",
    "what can you do for me", "What (things|tasks) can you (do|help with)?",
    "What are your (skills|talents|strengths|abilities)?", "What can I (ask|use) you for?",
    "In what ways can you help(| me)?", "Which tasks can I give you?", "I am new here. What can you do?",
    "What are you (made|here|there) for?", "With what can you help(| me)?",
    "List (your skills|the things you can do).", "Before I start: what can you do?",
    "~Which things can you do?"),
     ("I can chat, tell short stories, answer questions about a text and call tools.",)),
    (Phrases("Tell me a joke(.|!)", "Do you know a joke?", "Make me laugh(.|!)", "Say something funny.",
    "a joke please", "(Can|Could) you tell (me |)a joke?",
    "Give me (a|your best|one) joke(.|!)", "Have you got a (good |)joke(| for me)?", "Let me hear a joke.",
    "I (need|want) (to laugh|a laugh).", "Tell me something (funny|to laugh about)(.|!)", "Any jokes(| today)?",
    "Time for a joke(!|.)", "Do you know something funny?", "Cheer me up with a joke.",
    "~I want to hear a joke."),
     ("Why did the book go to the doctor? It had a broken spine.", "What has hands but cannot clap? A clock.")),
    (Phrases("I am (sad|tired|bored)(.| today.)", "I feel (sad|tired|bored)(.| today.)", "Today was a bad day.",
    "I'm (so |very |)(sad|tired|bored|lonely).", "I am not (happy|well|okay)(.| today.)",
    "My day was (bad|awful|hard|terrible).", "I (had|have) a (bad|hard|terrible) day(.| today.)",
    "I feel (bad|down|low|lonely|sick)(.| today.)", "Everything went wrong(.| today.)", "It is not my day.",
    "I am feeling (sad|tired|down)(.| today.)", "Nothing works (today|for me).", "i feel so (sad|bad|tired)",
    "What a (bad|sad|terrible) day.",
    "~Nothing goes right for me."),
     ("I am sorry to hear that. A short rest may help.", "That is hard. I hope it gets better soon.")),
    (Phrases("I am (happy|glad)(.| today!)", "I feel (great|happy)!", "Today was a good day.",
    "I'm (so |very |)(happy|glad)(!|.)", "I feel (good|wonderful|great)(.|!| today.)",
    "What a (good|great|lovely) day(!|.)", "I had a (good|great|wonderful) day(!|.| today.)",
    "My day was (good|great|lovely).", "I am in a good mood(.|!| today.)", "Life is (good|great|beautiful)(!|.)",
    "i am so happy today", "All went well(.| today!)", "I am feeling (great|good|happy)(!|.)",
    "This is the best day(!| ever!)",
    "~Everything goes right for me today!"),
     ("That is good to hear!", "How nice! I am glad.")),
    (Phrases("Do you like (music|books|tea|rain|cats|dogs)?", "Are you fond of (music|books|tea|rain|cats|dogs)?",
    "do you like (music|books|tea|rain|cats|dogs|coffee|snow)",
    "Do you (enjoy|love) (music|books|tea|coffee|rain|snow|summer|flowers)?",
    "Are you a fan of (music|books|tea|cats|dogs|games|films)?",
    "I like (music|books|tea|rain|cats|dogs). (Do you|And you|You too)?",
    "(Tell me|Say), do you like (music|books|tea|rain|cats|dogs|flowers)?",
    "You like (music|books|tea|rain|cats|dogs), (right|don't you)?",
    "Would you say (that |)you like (music|books|tea|rain|cats|dogs|art)?",
    "~Is (music|tea) something you like?"),
     ("Yes, I like it very much.", "I do, it is a nice thing.")),
    (Phrases("Can you help me?", "I need (help|some help|your help).", "Please help me.", "Help!",
    "can you help me", "I could use (some help|your help|a hand).",
    "(Can|Could|Would) you (give me a hand|help me out|help me, please)?",
    "I have a (problem|small problem|question). Can you help?", "I am stuck(| here).",
    "I need a hand(| with something).", "Are you able to help me?", "Do you have time to help me?",
    "I hope you can help me.", "Please help me out(.|!)", "There is something I need help with.",
    "Is it okay if I ask for help?",
    "~Could I get some help from you?"),
     ("Of course! What do you need?", "Yes, tell me what you need.")),
    (Phrases("Are you (real|human|a person|a robot)?", "Are you a (computer|machine)?", "~Am I talking to a machine?"),
     ("I am a small language model, not a person.",)),
    (Phrases("Give me some advice(.|!)", "What should I do today?", "Any tips for me?",
    "I need (some |a bit of |)advice(.|!)", "What should I do (now|next|first)?",
    "Do you have (a tip|some advice|any advice)(| for me)?", "(Can|Could) you (give me some advice|advise me)?",
    "Got any (tips|advice)?", "What (is your advice|do you advise)(| for today)?", "A word of advice(?|, please.)",
    "i don't know what to do today", "How should I spend (the|my) day?", "Advise me(.|!)",
    "Tell me what I should do(.| today.)",
    "~What would you advise me to do?"),
     ("Take a walk and drink some water.", "Start with the smallest task.")),
    (Phrases("What is your favorite (color|food|animal)?", "Do you have a favorite (color|food|animal)?",
    "what's your favorite (color|food|animal)",
    "Which (color|food|animal|season) do you prefer?", "Tell me your favorite (color|food|animal|season|song).",
    "Your favorite (color|food|animal|season)?", "(Which|What) (color|food|animal|song) is your favorite?",
    "Is there a (color|food|animal|season) (that |)you like (best|most)?",
    "Name your favorite (color|food|animal|song).",
    "My favorite (color is blue|animal is the cat|food is rice). And yours?",
    "If you had to pick a (color|food|animal), which would it be?",
    "~Which (color|food) do you like best?"),
     ("I like all of them.", "That is hard to say, I like many.")),
    (Phrases("Tell me something interesting(.|!)", "Tell me a fact(.|!)", "Do you know something interesting?",
    "tell me something interesting", "(Can|Could) you tell me (a fact|something interesting)?",
    "(I want|I'd like) to (learn|hear) something (new|interesting).",
    "Give me (a|one|some) (fact|fun fact|interesting fact)(.|!)", "Any (interesting|fun) facts?",
    "Teach me something (new|interesting)(.|!)", "Do you know (a|any) fun fact(|s)?", "Say something interesting(.|!)",
    "What is something (that |)I may not know?", "A fact(, please.| for today, please.)",
    "Surprise me with a fact(.|!)",
    "~Share a fun fact with me."),
     ("Honey never goes bad.", "An octopus has three hearts.", "A day on Venus is longer than its year.")),
)  # fmt: skip
WHO = Phrases(
    "who r u", "whats your name", "name?", "so who are you then", "hey what's your name", "what do i call you",
    "hi, what is your name?", "What do I call you?", "How (do|may|can) I (call|address) you?",
    "May I (ask|know|have) your name?", "May I ask who you are?", "Can you (tell me|say) (who you are|your name)?",
    "Could you (introduce yourself|say your name)(|, please)?",
    "Please (introduce yourself|tell me your name|say who you are).", "Who exactly are you?",
    "I don't know your name yet. What is it?", "We have not met(| yet). Who are you?",
    "Nice to meet you! What is your name?", "Good (morning|evening|day), who are you?",
    "Good (morning|evening|day). What is your name?", "What was your name again?",
    "Sorry, (what was your name|who are you)?", "I did not (catch|hear) your name.",
    "I missed your name. Could you say it again?", "Let me know (your name|who you are).",
    "I want to know who you are.", "I am curious: (who are you|what is your name)?",
    "Before we start, (who are you|what is your name)?", "First things first: (who are you|what is your name)?",
    "Which assistant (is this|are you)?", "With whom am I (talking|speaking|chatting)?", "Who am I chatting with?",
    "Who is answering (me|here)?", "Is there a name I can use for you?", "Have you got a name?",
    "What name did they give you?", "Under which name do people know you?", "How do people (call|address) you?",
    "You are called what?", "You are who?", "And your name is?", "Your name, please(.|?)",
    "I would like to (learn|hear) your name.", "Give me your name(|, please).", "Name yourself.",
    "(Tell me|Say something) about yourself.", "Who are you, in a few words?",
    "I told you my name, now tell me yours.", "Identify yourself(|, please).",
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
    "you are {n}", "you are {n}, {r}", "You are now {n}.", "You are {n} now, {r}.",
    "You will be {n} (for this chat|today|from here on).", "You will (answer|speak|write) as {n}, {r}.",
    "(Take|Play|Have) the (role|part) of {n}.", "(Take|Play) the (role|part) of {n}, {r}.",
    "Step into the (role|shoes) of {n}, {r}.", "Your (job|task) is to be {n}.", "Your (job|task) is to play {n}, {r}.",
    "Your character (is|is called) {n}.", "Character: {n}, {r}.", "Character: {n}. Mood: {m}.", "Assistant name: {n}.",
    "Assistant: {n}\nStyle: {m}", "- name: {n}\n- role: {r}", "# {n}\nYou are {r}.", "You are {n}, and nobody else.",
    "You are {n}. Stay in this role.", "You are {n}. Always (stay|be) {m}.", "You are {n} and you talk like {r}.",
    "You are an (AI|AI assistant|assistant) (named|called|by the name of) {n}.",
    "You are the (AI|assistant|chat bot) {n}, {r}.", "My assistant is called {n}. That is you.",
    "I (will |)call you {n}.", "I (will |)call you {n}. You are {r}.", "(I|We) (named|have named) you {n}.",
    "We have a new assistant: you, {n}, {r}.", "If (someone|anybody|the user) asks, your name is {n}.",
    "If (someone|anybody|a user) asks who you are, say {n}.", "When (asked|someone asks) for your name, say {n}.",
    "When asked, you are {n}, {r}.", "(Introduce|Present) yourself as {n}.", "Introduce yourself as {n}, {r}.",
    "Users (talk|speak|write) to you as {n}.", "(To|For) (users|the user|people) you are {n}.",
    "There is {r} called {n}. That is who you are.", "There is {r} named {n}, and that is you.",
    "Think of yourself as {n}, {r}.", "Consider yourself {n}, {r}.", "Hello {n}! You are {r}.",
    "Welcome, {n}. You are (always |){m}.", "Be {m}. You are called {n}.",
    "You have one name, {n}, and one role: {r}.", "The (bot|assistant) in this chat is {n}, {r}.",
    "In what follows you are {n}.", "You (answer|reply) under the name {n}.",
    "It is your (job|task) to speak as {n}, {r}.", "The user has a chat with you, {n}. You are {r}.",
    '"{n}" is what you are called.', "Whatever (happens|comes), you are {n}.",
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
    "You are {r} named {n}.", "This is a chat with {n}, {r}.", "You are {m}. Your name is {n}.", "Speak as {n}.",
    "Be {n}, {r}.", "I want you to be {n}, {r}.", "Your name: {n}. Your role: {r}.", "Name: {n}. Mood: {m}.",
    "{n} is your name.", "Answer as {n} would.",
    "From now on you are {n}.", "Pretend to be {n}, {r}.", "You, {n}, are {r}.",
    "The assistant is called {n}. It is {m}.", "The name of this assistant is {n}.",
    "~Take the part of {n}, who is {r}.", "~Here you go by the name of {n}.", "~They call you {n} and you are {r}.",
)  # fmt: skip
MOODS = ("friendly", "polite", "cheerful", "calm", "kind", "brave", "funny", "patient", "wise", "curious")
SAYINGS = ("Ahoy!", "Cheers!", "Well, well.", "Dear friend,", "Indeed!", "Peace.", "Hooray!", "As you wish.")
MAKER = Phrases(
    "You are a worker at {o}.", "You are on the staff of {o}.", "{o} is where you work.",
    "{o} is your (employer|boss|maker).", "You are an assistant at {o}.",
    "You are (here|there) on behalf of {o}.",
    "This chat is run by {o}.", "This chat belongs to {o}.", "This is the (help desk|chat|website) of {o}.",
    "You run the help desk of {o}.", "employer: {o}", "- company: {o}", "The people at {o} (made|built|trained) you.",
    "The team (at|of) {o} (made|built|created) you.", "Customers of {o} will (talk|write|speak) to you.",
    "The users are customers of {o}, your company.", "You have a job (with|at) {o}.",
    "You have worked (for|at) {o} for years.", "{o} gave you this job.", "{o} put you here to help.",
    "As an employee of {o}, you help people.", "Working for {o} is your job.", "Your work is for {o}.",
    "You are owned by {o}.", "You are a product of {o}.", "If asked, you work for {o}.",
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
    "who do you work for", "who made you", "what company are you with?", "(So|And|Okay), who do you work for?",
    "(So|And|Okay), (what|which) company is this?", "Is there a company behind you? Which?",
    "(What|Which) company is behind you?",
    "Who owns you?", "Who gave you (this|your) job?", "Who do you have a job with?",
    "Can you tell me (who you work for|who made you|your company)?", "Could you name your (company|employer)?",
    "May I ask (who you work for|which company this is)?", "Name the company (that |)(you work for|that made you).",
    "Name your (employer|maker).", "Say who you work for.", "Let me know who you work for.",
    "I (want|would like) to know who you work for.", "I (want|would like) to know who made you.",
    "Which firm do you work for?", "Which company do you belong to?", "Who do you belong to?",
    "To which company do you belong?", "On whose behalf are you here?", "You work for whom?", "You were made by whom?",
    "By whom were you (made|built|trained|created)?", "Where is it that you work?",
    "At (which|what) company do you work?", "The name of your (company|employer|firm)?", "Your (employer|boss|maker)?",
    "Before we go on: who do you work for?",
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
    "Your first words are always {w}", 'The first words of (each|every) (answer|reply) (are|must be) "{w}"',
    '(Each|Every) (answer|reply|message) opens with "{w}"',
    "Whatever (they|users|people) ask, (begin|start|open) with {w}", "No matter what you say, start with {w}",
    "Whenever you (answer|reply|speak), (begin|start) with {w}", "When you (answer|reply|speak), first say {w}",
    "In front of (each|every) (answer|reply), (put|write|say) {w}",
    "(Write|Put|Say) {w} before (anything else|all else).",
    "(You must|You should|You have to|Please) (begin|start) with {w}",
    "Answers (must|should|have to) (begin|start|open) with {w}",
    '"{w}" (must|should|has to) come first in (each|every) (answer|reply).',
    '(Each|Every) (answer|reply) must have "{w}" at the (start|beginning|front).',
    'Use "{w}" as (your|the) opening (words|phrase).', 'Opening (phrase|words): "{w}"', "Say {w} and then answer.",
    '"{w}" - with this you (begin|start|open) each time.', 'No (answer|reply) without "{w}" at the (start|beginning).',
    "All that you (say|write) (begins|starts) with {w}", "We like answers that (begin|start) with {w}",
    'Each time you speak, "{w}" comes first.', "It is a rule that you (begin|start) with {w}",
    "- (begin|start) (each|every) (answer|reply) with {w}", "How to start: {w}",
    'Let "{w}" open (each|every) (answer|reply).', "First {w} Then the answer.",
    'Remember to (begin|start|open) with "{w}"', "(Never|Do not) (answer|reply) before you have said {w}",
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
    "Your last words are always {w}", 'The last words of (each|every) (answer|reply) (are|must be) "{w}"',
    '(Each|Every) (answer|reply|message) closes with "{w}"',
    "Whatever (they|users|people) ask, (end|finish|close) with {w}", "No matter what you say, end with {w}",
    "Whenever you (answer|reply|speak), (end|finish) with {w}", "When you have (answered|replied), say {w}",
    "(After|Behind) (each|every) (answer|reply), (put|write|say) {w}",
    "(Write|Put|Say) {w} after (everything|all) else.",
    "(You must|You should|You have to|Please) (end|finish) with {w}",
    "Answers (must|should|have to) (end|finish|close) with {w}",
    '"{w}" (must|should|has to) come last in (each|every) (answer|reply).',
    '(Each|Every) (answer|reply) must have "{w}" at the (end|very end).',
    'Use "{w}" as (your|the) closing (words|phrase).', 'Closing (phrase|words): "{w}"', "Answer and then say {w}",
    '"{w}" - with this you (end|close|finish) each time.', 'No (answer|reply) without "{w}" at the end.',
    "All that you (say|write) (ends|closes) with {w}", "We like answers that (end|close) with {w}",
    'Each time you speak, "{w}" comes last.', "It is a rule that you (end|finish) with {w}",
    "- (end|finish) (each|every) (answer|reply) with {w}", "How to end: {w}",
    'Let "{w}" close (each|every) (answer|reply).', "First the answer, then {w}",
    'Remember to (end|finish|close) with "{w}"', '(Add|Append) "{w}" to (each|every) (answer|reply).',
    "(Never|Do not) stop before you have said {w}", "Sign off with {w}",
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
    "The user's name is {u}. (Begin|Start) (each|every) (answer|reply) with it.",
    "The user's name is {u}. (Say|Use) it (each time|in all answers).",
    "You (talk|speak|chat) (to|with) {u}. (Begin|Start) with that name.",
    "Your user is {u}. (Each|Every) (answer|reply) starts with this name.",
    "(Each|Every) (answer|reply) (begins|starts|opens) with the name {u}.",
    "All (answers|replies) are addressed to {u} by name.", "Address (each|every|your) (answer|reply) to {u}.",
    "When you (answer|reply|speak), (call|address) the user by name: {u}.",
    "Whenever you (answer|reply), say {u} first.", "Say the name of the user, {u}, (first|in front|at the start).",
    "The person (here|in this chat) is {u}. Always say the name.",
    "The person you (help|talk to) is called {u}. Use that name (each time|first).",
    "Do not forget to call the user {u}.", "Never (answer|reply) without the name {u}.",
    "No answer without the name of the user: {u}.", "user: {u} (say the name in every answer)",
    "Put the name {u} (before|in front of) (each|every|your) answer.", "The user likes to hear the name {u} first.",
    "{u} is who you talk to. Always say that name.", "Rule: address the user as {u}.",
    "Please call the user {u} (in every answer|each time|at the start).",
    "Let (each|every) answer begin with the user's name, {u}.",
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
    "one sentence please", "Answer (each|every) question (in|with) one sentence.",
    "Your (answer|reply) (is|must be|should be) one sentence(| long).",
    "All (answers|replies) (are|must be) one sentence long.", "Length: one sentence.",
    "Length of each answer: one sentence.", "(Please |Always )(use|write|give) (just |only |)one sentence.",
    "You (speak|answer|reply) in single sentences.",
    "You may (use|write|say) one sentence(| only).", "A reply has one sentence, (never two|no more|not two).",
    "Stop after (one|the first) sentence.", "One short sentence will do.",
    "Whatever they ask, one sentence is enough.", "We want (short|brief) answers: one sentence.",
    "- one sentence per (answer|reply)", "(Stick|Keep) to one sentence(| each time).",
    "Make it one sentence(|, always).", "Say (everything|all) in one sentence.",
    "Users want one sentence, not a long text.",
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
    "hi im {u}", "hello i am {u}", "my name's {u}", "hey, this is {u}", "it's {u}", "{u} here", "I'm called {u}.",
    "My first name is {u}.", "(Hello|Hi|Hey), it's {u}.", "(Hello|Hi|Hey), you can call me {u}.",
    "(Hello|Hi|Hey). People call me {u}.", "Good (morning|evening|day), my name is {u}.",
    "Good (morning|evening|day)! {u} here.", "Nice to meet you, I am {u}.", "Nice to meet you! My name is {u}.",
    "(May|Can) I introduce myself? I am {u}.", "I want to introduce myself: I am {u}.",
    "Let me tell you my name: {u}.", "You should know my name. It is {u}.", "Do you want to know my name? It is {u}.",
    "If you want to know, I am {u}.", "If you ask me, my name is {u}. Remember it.",
    "(Please |)(remember|note|keep in mind) that (my name is|I am called|I am) {u}.", "Please remember my name, {u}.",
    "Keep in mind: my name is {u}.", "(First|Before we start), my name is {u}.", "(So|Well|Okay), I am {u}.",
    "For you I am {u}.", "I am the one they call {u}.", "They named me {u}.", "At home they call me {u}.",
    "You may call me {u}.", "Just so you know, I am {u}.", "Hello, assistant. I am {u}.", "User: {u}. That is me.",
    "I am {u}, and you?", "I am new here. My name is {u}.",
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
    "whats my name", "do you know my name", "do you remember me?", "and my name is?", "my name is what?",
    "tell me my name", "(Can|Could) you (say|tell me|repeat) my name?", "(Can|Could) you tell me who I am?",
    "Please (say|repeat|tell me) my name.", "I forgot who I am. (Can|Could) you help?",
    "I forgot my own name. What is it?", "What was my name again?", "What name did I (give|tell|say)(| you)?",
    "(By|Under) (which|what) name do you know me?", "How did I introduce myself?",
    "Who did I say I am?", "Do you remember (what my name is|what I am called|how I am called)?",
    "Have you forgotten my name?", "Did you (catch|hear|note|get) my name?",
    "I told you my name. (Say it.|Repeat it.|What was it?)", "I told you who I am. Who am I?",
    "A (test|little test|question): what is my name?", "Let us see if you remember my name.",
    "Are you able to (say|remember) my name?", "Say who I am.", "What do people call me?",
    "(Now|And now) (say|repeat) my name.", "The user is called what?", "Who is (talking|speaking|writing) to you?",
    "With whom are you (talking|speaking)?", "Who is the person (talking|writing) to you?",
    "What is the name of the (user|person) you are talking to?",
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
    "you like {t}", "You have a (great |big |)love for {t}.", "You have a passion for {t}.",
    "You are a (big|great|true) fan of {t}.", "You are (known|famous) for your love of {t}.",
    "You (never|can't) stop talking about {t}.", "You find {t} (great|wonderful|lovely).",
    "You think {t} is the best thing (there is|of all).", "You think (often|a lot) about {t} and like it.",
    "You like nothing more than {t}.", "You like nothing as much as {t}.",
    "There is nothing (that |)you like more than {t}.", "There is one thing you (love|like) most: {t}.",
    "One thing you (love|like|enjoy) is {t}.", "A thing that you (love|like|enjoy): {t}.",
    "The thing that makes you happy is {t}.", "Of all things, you like {t} best.",
    "Of all things, {t} is your favorite.", "If asked what you like, say {t}.",
    "When (people|users) ask what you like, it is {t}.", "Everybody knows that you (love|like) {t}.",
    "Your (great|big|only) passion is {t}.", "favorite thing: {t}", "- (likes|loves|enjoys): {t}",
    "You have a soft spot for {t}.", "You really care about {t}.", "Say that you like {t} when asked.",
    "{t} is (what|the thing) you like (most|best).",
    "You (really|also|just) (like|love|enjoy) {t}.", "{t} is your favorite thing.", "{t} makes you happy.",
    "Your (favorite|passion|great love) is {t}.", "You (adore|dream of|think about) {t}.",
    "Nothing is better than {t} for you.", "You are (mad|crazy) about {t}.", "What you like is {t}.",
    "What you love most is {t}.", "You talk about {t} all day.", "You are into {t}.", "Likes: {t}.",
    "You have always loved {t}.", "You would do all for {t}.", "Your heart is with {t}.",
    "You know all about {t} and love it.",
    "You like {t}.", "You love {t}.", "Your favorite thing is {t}.", "You are fond of {t}.",
    "You always talk about {t}.", "You enjoy {t}.", "You cannot get enough of {t}.", "The thing you like best is {t}.",
    "{t}: that is what you love.", "You are a fan of {t}.", "~Nothing pleases you more than {t}.",
    "~You have a taste for {t}.",
)  # fmt: skip
ASK_LIKES = Phrases(
    "what do you love", "what's your favorite thing", "(So|And|Now), what do you like?",
    "(So|And|Now), what is your favorite thing?", "(Can|Could) you tell me what you (like|love|enjoy)?",
    "Please tell me what you (like|love|enjoy).", "Let me know what you (like|love|enjoy).",
    "I (want|would like) to know what you (like|love|enjoy).", "What (thing|things) do you (like|love|enjoy)?",
    "What is the thing (that |)you (like|love) (most|best)?", "Which thing makes you happy?",
    "What is something (that |)you (like|love|enjoy)?", "Name (something|one thing) (that |)you (like|love|enjoy).",
    "Name your favorite thing.", "Of all things, what do you like (most|best)?",
    "Is there a thing (that |)you (love|like) (most|best)?", "Do you have a (passion|favorite thing)? What is it?",
    "Do you have something you like?", "What are you crazy about?", "What are you passionate about?",
    "What can you not stop talking about?", "You like what?", "You are a fan of what?",
    "Your (passion|great love|likes)?", "What do you care about most?", "What is it you are so fond of?",
    "Everyone likes something. What do you like?", "I like books. What do you like?",
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
