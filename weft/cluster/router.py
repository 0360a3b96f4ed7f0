"""`Router`: which of several engines of one model serves a request.

For each engine that answers it predicts, by the cost model, the seconds until the request would be done there, and
takes the least (`weft.cluster.route_costs`). So a request goes where its prefix lies, unless the wait there costs more
than computing the prefix elsewhere. Requests of one session stay together in the same way: leaving an engine costs
computing the session's tokens again, also where their prefix is not known. Requests whose latency matters gather on
engines of their own, as far as the load allows, because background work is slow beside them (Parrot, section 5.4, with
predicted times in place of its order of rules). Equal costs: the engine with the longer prefix, with fewer requests,
with fewer known prefixes, the first.

The router knows what it has sent to each engine and what came back, no more. A prefix is known by a number for each of
its pages (`weft.cache.given_up`), the most recent ones as many as the engine has pages: about what its own index keeps.
A wrong guess costs time and never a token. An engine that was replaced has no prefixes and no requests.

Pure: the same calls give the same routes. Used from one event loop; `ReplicaSet` asks for requests of a server.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.cache.given_up import namespace_number, prefix_numbers
from weft.cluster.route_costs import EngineView, RoutedWork, Work, background_s, foreground_s
from weft.core.cost.model import StepShape
from weft.core.ids import TOKEN_BYTES
from weft.core.objectives import BACKGROUND, Objective
from weft.core.step import U64

FIRST_OUTPUT = 128
"""Tokens that a request without a limit is expected to generate, before any has ended."""
OUTPUT_GAIN = 0.05
"""How much of each output's length that expectation takes over."""
BACKGROUND_GAIN = 0.01
"""How much of each request the part of the background takes over."""
PREFERRED_FACTOR = 2.0
"""How much longer a request may take on the engine that a plan has for it than on another one."""
MAX_SESSIONS = 10_000
"""Sessions whose engine is remembered: the last ones."""


@dataclass(slots=True)
class RoutedRequest:
    """A request on its way: where it went, and what of it is still to come."""

    engine: int
    """Index of the engine."""
    num_found: int
    """Tokens of its prompt whose KV is expected there."""
    num_tokens: int
    """Of its prompt."""
    num_choices: int
    incarnation: int
    last_number: int
    """Of the whole prompt, as a prefix."""
    is_background: bool
    is_prompt: bool = True
    """Its first token has not come."""
    is_open: bool = True


class _Load:
    """What one engine has, and has to do, as far as this router sent it."""

    def __init__(self, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self.pages: OrderedDict[int, None] = OrderedDict()
        """Numbers of prefixes that end with a page, least recently used first."""
        self.foreground, self.background = Work(), Work()

    def of(self, routed: RoutedRequest) -> Work:
        """The work that a request is part of."""
        return self.background if routed.is_background else self.foreground

    def add(self, routed: RoutedRequest) -> None:
        """A request is sent to it."""
        work = self.of(routed)
        work.prompt_tokens += routed.num_tokens - routed.num_found
        work.rows += routed.num_choices
        work.kv_tokens += routed.num_choices * routed.num_tokens

    @property
    def num_rows(self) -> int:
        """Choices of requests that have not ended."""
        return self.foreground.rows + self.background.rows

    def find(self, numbers: Sequence[int]) -> int:
        """How many pages of a prompt it has, from the first on."""
        return next((count for count, number in enumerate(numbers) if number not in self.pages), len(numbers))

    def keep(self, numbers: Sequence[int], most: int) -> None:
        """It has these pages of one prompt now. The last ones of a prompt are forgotten first."""
        for number in reversed(numbers):
            self.pages[number] = None
            self.pages.move_to_end(number)
        while len(self.pages) > most:
            self.pages.popitem(last=False)


class _Session(NamedTuple):
    engine: int
    incarnation: int
    num_tokens: int
    """Of its last prompt."""


class _Choice(NamedTuple):
    """An engine that a request may go to. The least one is the best."""

    cost_s: float
    less_found: int
    """Tokens of its prompt whose KV is expected there, below zero."""
    num_rows: int
    num_pages: int
    engine: int


class Router:
    """Routes the requests of one model."""

    def __init__(self, num_engines: int):
        self._loads = [_Load() for _ in range(num_engines)]
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        """By namespace and label, least recently used first."""
        self._output = float(FIRST_OUTPUT)
        """Tokens that a choice is expected to generate."""
        self._background = 0.0
        """The part of the requests that is background, lately."""

    def route(
        self,
        engines: Sequence[EngineView],
        prompt: bytes,
        namespace: str,
        *,
        session: str = "",
        max_output: int | None = None,
        num_choices: int = 1,
        preferred: int | None = None,
        objective: Objective = "latency",
    ) -> RoutedRequest:
        """The engine for a request with these packed tokens. Where no engine answers, the request goes where it would
        if all did, and waits there. A plan's engine is `preferred`: the request goes there unless that engine does not
        answer, or the request would be done elsewhere in less than a `PREFERRED_FACTOR`-th of the time. Call `answered`
        and `ended` with what is returned."""
        numbers = prefix_numbers(prompt, 0, namespace_number(namespace))
        num_tokens = len(prompt) // TOKEN_BYTES
        output = self._output if max_output is None else min(float(max_output), self._output)
        is_background = objective in BACKGROUND
        self._background += BACKGROUND_GAIN * (is_background - self._background)
        home = self._sessions.get((namespace, session)) if session else None
        is_any_ready = any(view.is_ready for view in engines)
        choices = []
        for index, (view, load) in enumerate(zip(engines, self._loads, strict=True)):
            if view.incarnation != load.incarnation:
                self._loads[index] = load = _Load(view.incarnation)
            if is_any_ready and not view.is_ready:
                continue
            # One token at least is computed, so the last page counts only where the prompt goes on behind it.
            found = load.find(_page_ends(numbers[:-1], 0, view.page_size)) * view.page_size
            request = RoutedWork(num_tokens, found, output, num_choices)
            cost_s = self._cost_s(view, load, request, is_background=is_background)
            if home is not None and (home.engine, home.incarnation) == (index, view.incarnation):
                cost_s -= _kept_s(view, home, request)
            choices.append(_Choice(cost_s, -found, load.num_rows, len(load.pages), index))
        chosen = _best(choices, preferred)
        index, view = chosen.engine, engines[chosen.engine]
        routed = RoutedRequest(
            index, -chosen.less_found, num_tokens, num_choices, view.incarnation, int(numbers[-1]), is_background
        )
        self._loads[index].add(routed)
        self._loads[index].keep(_page_ends(numbers, 0, view.page_size), view.num_pages)
        if session:
            self._sessions[namespace, session] = _Session(index, view.incarnation, num_tokens)
            self._sessions.move_to_end((namespace, session))
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return routed

    def _cost_s(self, view: EngineView, load: _Load, request: RoutedWork, *, is_background: bool) -> float:
        """What a request costs on an engine, without what its session has there."""
        if is_background:
            return background_s(view, load.foreground, load.background, request)
        return foreground_s(view, load.foreground, load.background, request, self._background)

    def answered(self, routed: RoutedRequest) -> None:
        """The first token of a request has come. Idempotent."""
        if routed.is_prompt:
            routed.is_prompt = False
            load = self._loads[routed.engine]
            if load.incarnation == routed.incarnation:
                load.of(routed).prompt_tokens -= routed.num_tokens - routed.num_found

    def ended(self, routed: RoutedRequest, view: EngineView, answer: bytes) -> None:
        """A request has ended in any way; `answer` are the packed tokens of its first choice, which `view`, its engine,
        has KV of but for the last. Idempotent."""
        if not routed.is_open:
            return
        self.answered(routed)
        routed.is_open = False
        load = self._loads[routed.engine]
        num_output = len(answer) // TOKEN_BYTES
        if num_output:
            self._output += OUTPUT_GAIN * (num_output - self._output)
        if load.incarnation != routed.incarnation:
            return
        work = load.of(routed)
        work.rows -= routed.num_choices
        work.kv_tokens -= routed.num_choices * routed.num_tokens
        numbers = prefix_numbers(answer[:-TOKEN_BYTES], routed.num_tokens, routed.last_number)
        load.keep(_page_ends(numbers, routed.num_tokens, view.page_size), view.num_pages)


def _kept_s(view: EngineView, home: _Session, request: RoutedWork) -> float:
    """What leaving the engine of its session costs: computing tokens of the session again that no known prefix has."""
    found, known = request.num_found, min(home.num_tokens, request.num_tokens)
    return view.times.predict_s(StepShape.chunk(known - found, found)) if known > found else 0.0


def _best(choices: Sequence[_Choice], preferred: int | None) -> _Choice:
    """The least choice, or the preferred engine, if that one may be chosen and is not much slower."""
    best = min(choices)
    wanted = next((choice for choice in choices if choice.engine == preferred), best)
    return wanted if wanted.cost_s <= PREFERRED_FACTOR * best.cost_s else best


def _page_ends(numbers: U64, start: int, page_size: int) -> list[int]:
    """Of the numbers of prefixes that end with the tokens from `start` on, those that fill a page."""
    ends: list[int] = numbers[(page_size - 1 - start) % page_size :: page_size].tolist()
    return ends
