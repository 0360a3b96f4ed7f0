"""Published workload shapes: lengths, shares and pauses, to be filled with random tokens. Pure data.

`single` shapes are independent requests; `conversations` have several turns with pauses.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

from weft.cli.bench.lengths import Lengths, fixed
from weft.cli.bench.workload import BenchRequest, filler, joined


class Application(NamedTuple):
    """Requests with a common prefix."""

    share: float
    """Share of all requests."""
    shared: Lengths
    """Length of the application's common prefix; drawn once per run."""
    own: Lengths
    """Length of the rest of the prompt."""
    outputs: Lengths


class Single(NamedTuple):
    """A mix of applications with independent requests."""

    source: str
    apps: tuple[Application, ...]


class Conversations(NamedTuple):
    """Turns with pauses between them."""

    source: str
    turns: Lengths
    first: Lengths
    """Tokens before the first answer."""
    further: Lengths
    """New tokens of every later turn: a tool's result or a user's message."""
    outputs: Lengths
    pause_s: tuple[float, float]
    """Mean and deviation of the time between an answer and the next turn."""


NONE = fixed(0)
_DIFFER = 100
_CODING_ROUNDS = (
    (1, 182, 706, 0),
    (8, 2991, 418, 186),
    (8, 3717, 318, 57),
    (8, 4176, 380, 152),
    (8, 3418, 265, 22),
    (8, 3755, 413, 145),
    (8, 3679, 289, 49),
    (8, 3973, 430, 116),
)
"""Calls of a round, tokens of each prompt, mean and deviation of the answers' tokens: architect, then code, review and
revise in turns."""

SINGLE: Mapping[str, Single] = {
    "gpt-apps": Single(
        "four applications of one GPT store (Parrot, OSDI 2024, section 8.3)",
        (
            Application(0.19, fixed(7437), fixed(7), fixed(704)),
            Application(0.40, fixed(1116), fixed(8), fixed(89)),
            Application(0.28, fixed(1694), fixed(4), fixed(631)),
            Application(0.13, fixed(2031), fixed(4), fixed(416)),
        ),
    ),
    "chat-search": Single(
        "a search copilot's system prompt; what users write is taken to be 60 tokens (Parrot, OSDI 2024, section 8.3)",
        (Application(1.0, fixed(6148), Lengths("lognormal", 60, 40), Lengths("uniform", 180, 800)),),
    ),
    "multi-agent-coding": Single(
        "calls of a MetaGPT trace over eight files (Parrot's artefact); those of a round are taken to share "
        f"all of their prompt but {_DIFFER} tokens",
        tuple(
            Application(calls / 57, fixed(prompt - _DIFFER), fixed(_DIFFER), Lengths("normal", mean, deviation))
            for calls, prompt, mean, deviation in _CODING_ROUNDS
        ),
    ),
    "gsm8k": Single("GSM8K as in BatchGen, section 6", (Application(1.0, NONE, fixed(512), fixed(256)),)),
    "chat": Single("chats as in BatchGen, section 6", (Application(1.0, NONE, fixed(256), fixed(512)),)),
    "prefill-heavy": Single("BatchGen, section 6, offline", (Application(1.0, NONE, fixed(8192), fixed(2048)),)),
    "decode-heavy": Single("BatchGen, section 6, offline", (Application(1.0, NONE, fixed(2048), fixed(8192)),)),
}
"""By name."""

_APISERVE = "APIServe (InferCept), table 1; what calls return and what is generated between them is not in it"
_SHORT, _LONG = Lengths("lognormal", 30, 20), Lengths("lognormal", 150, 100)
_BETWEEN = Lengths("uniform", 30, 150)

CONVERSATIONS: Mapping[str, Conversations] = {
    "math": Conversations(
        _APISERVE, Lengths("normal", 4.75, 1.3), Lengths("normal", 1422, 738), _SHORT, _BETWEEN, (9e-05, 6e-05)
    ),
    "qa": Conversations(
        _APISERVE, Lengths("normal", 3.52, 1.73), Lengths("normal", 1846, 428), _LONG, _BETWEEN, (0.69, 0.17)
    ),
    "ve": Conversations(
        _APISERVE, Lengths("normal", 29.18, 15.2), Lengths("normal", 2185, 115), _SHORT, _BETWEEN, (0.09, 0.014)
    ),
    "chatbot": Conversations(
        _APISERVE, Lengths("normal", 5.45, 1.96), Lengths("normal", 753, 703), _LONG, _BETWEEN, (28.6, 15.6)
    ),
    "image": Conversations(
        _APISERVE, Lengths("normal", 7.91, 3.93), Lengths("normal", 1247, 792), _SHORT, _BETWEEN, (20.03, 7.8)
    ),
    "tts": Conversations(
        _APISERVE, Lengths("normal", 7.91, 3.93), Lengths("normal", 1251, 792), _SHORT, _BETWEEN, (17.24, 7.6)
    ),
    "coding-agent": Conversations(
        "coding agents of 2026, medians: 43 turns, 142,000 tokens read and 444 written in a session, here in equal "
        "parts; 95 % of pauses are under 10 s",
        fixed(43),
        fixed(3302),
        fixed(3292),
        fixed(10),
        (5.0, 3.0),
    ),
}
"""By name. Turns are one more than calls; `first` is the context length in the table."""


def single_requests(shape: Single, seed: int, count: int, scale: float, as_text: bool) -> list[BenchRequest]:
    """Requests of a shape, with lengths times `scale`; applications in random order, by their shares."""
    draw = random.Random(f"shape {seed}")
    prefixes = [_filled(draw, app.shared, scale, as_text) for app in shape.apps]
    requests = []
    for which in draw.choices(range(len(shape.apps)), [app.share for app in shape.apps], k=count):
        app = shape.apps[which]
        own = filler(draw, app.own.scaled(scale).draw(draw), as_text)
        requests.append(BenchRequest(joined(prefixes[which], own), app.outputs.scaled(scale).draw(draw)))
    return requests


def _filled(draw: random.Random, lengths: Lengths, scale: float, as_text: bool) -> list[int] | str:
    return filler(draw, 0 if lengths == NONE else lengths.scaled(scale).draw(draw), as_text)
