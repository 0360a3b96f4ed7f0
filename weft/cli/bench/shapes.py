"""Published workload shapes: lengths, shares and pauses, to be filled with random tokens.

`SINGLE` shapes are independent requests; `CONVERSATIONS` have several turns with pauses, as `weft sim` draws them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from weft.abi.errors import ConfigError
from weft.cli.bench.lengths import Lengths, fixed
from weft.cli.bench.workload import BenchRequest, filler, joined
from weft.sim.agents import AgentParameters, agent_day
from weft.sim.scripts import SessionScript, scaled, window
from weft.sim.workloads import INTERCEPTIONS, MixtureParameters, mixture


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
    draw: Callable[[int, float, int], list[SessionScript]]
    """Draws so many sessions with this rate of arrivals per second, from a seed. Equal arguments give the same ones,
    and another rate moves only the arrivals."""
    num_sessions: int = 8
    """Sessions of a run, unless another number is asked for."""


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


def _interceptions(*kinds: str) -> Callable[[int, float, int], list[SessionScript]]:
    chosen = {kind: INTERCEPTIONS[kind] for kind in kinds}

    def draw(count: int, rate: float, seed: int) -> list[SessionScript]:
        return mixture(MixtureParameters(rate=rate, requests=count, kinds=chosen), seed)

    return draw


def _agents(count: int, rate: float, seed: int) -> list[SessionScript]:
    return agent_day(AgentParameters(sessions=count, rate=rate), seed)


CONVERSATIONS: Mapping[str, Conversations] = {
    "mixture": Conversations(f"{_APISERVE}; all of its kinds", _interceptions(*INTERCEPTIONS), 120),
    **{name: Conversations(_APISERVE, _interceptions(name)) for name in INTERCEPTIONS},
    "coding-agent": Conversations(
        "coding agents of 2026: 43 turns, contexts from 20,000 tokens that grow by 2,500 a turn (medians), up to "
        "200,000; 44 % use subagents",
        _agents,
    ),
}
"""By name."""


def drawn_sessions(
    shape: str, count: int, rate: float, scales: tuple[float, float], seed: int, span: tuple[float, float] | None
) -> list[SessionScript]:
    """The sessions of a run of a published workload: lengths and pauses times `scales`, and of them what is in the
    window `span`. Raises `ConfigError` for a window that ends after the last arrival."""
    sessions = scaled(CONVERSATIONS[shape].draw(count, rate, seed), *scales)
    if span is None:
        return sessions
    if sessions[-1].arrive_s < span[1]:
        raise ConfigError(
            f"the last of {count} conversations arrives after {sessions[-1].arrive_s:.0f} s, before the end of "
            f"--window ({span[1]:g} s): raise the number of conversations"
        )
    return window(sessions, *span)


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
