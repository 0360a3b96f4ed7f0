"""What a request would cost on an engine: seconds by the cost model, for the router.

The work of an engine is of two kinds, as in `weft.sched.step_share`. Background beside foreground takes `held_factor`
times as long, because each step has room for a part of it only; foreground beside background takes at most as much
longer as a step may be. So background counts the foreground of an engine as slowness. Foreground that would be the
first on an engine counts, in addition to its own time, by how much it delays the background there: beside more
foreground, the background is held back anyway.

Pure functions of counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.core.cost.model import ForwardModel, StepShape

ASSUMED = ForwardModel(
    base_s=0.007,
    head_s=0.0,
    per_row_s=0.0,
    per_output_s=0.0,
    per_decode_kv_s=5e-8,
    per_chunk_kv_s=0.0,
    per_chunk_pair_s=0.0,
    knots=(),
    slopes=(3.9e-5,),
)
"""Times of engines without a cost profile: those of an 8B model on an H100. Only their proportions count."""


class EngineView(NamedTuple):
    """An engine of the model, as it is now."""

    is_ready: bool
    """Whether it answers."""
    incarnation: int
    """Names its process: another one has none of the KV."""
    max_running: int
    num_pages: int
    """Of all tiers."""
    page_size: int
    forward: ForwardModel | None
    """Of its cost profile; None: there is none."""
    held_factor: float = 1.0
    """As `EngineInfo.held_factor`."""

    @property
    def times(self) -> ForwardModel:
        """Times of its steps, or those that are assumed."""
        return self.forward or ASSUMED


@dataclass(slots=True)
class Work:
    """Requests that an engine has and has not ended, of one kind."""

    prompt_tokens: int = 0
    """Without KV, of prompts without a first token."""
    rows: int = 0
    """Choices."""
    kv_tokens: int = 0
    """Of these, without what they generate."""

    def plus(self, request: RoutedWork) -> Work:
        """The work with one more request, at half of its output. Its prompt is not counted."""
        kv_tokens = self.kv_tokens + round(request.num_choices * (request.num_tokens + request.output / 2))
        return Work(self.prompt_tokens, self.rows + request.num_choices, kv_tokens)


class RoutedWork(NamedTuple):
    """A request, as an engine would have it."""

    num_tokens: int
    """Of its prompt."""
    num_found: int
    """Of these, those whose KV is expected on the engine."""
    output: float
    """Tokens that each choice is expected to generate."""
    num_choices: int

    @property
    def prompt(self) -> StepShape:
        """What of its prompt is to be computed: a token at least."""
        return StepShape.chunk(max(self.num_tokens - self.num_found, 1), self.num_found, 1)


def foreground_s(view: EngineView, foreground: Work, background: Work, request: RoutedWork, expected: float) -> float:
    """Predicted seconds until a request whose latency matters would be done, and by how much it delays background."""
    forward = view.times
    with_it = foreground.plus(request)
    step_s = _step_s(view, with_it, background)
    if background.rows and view.held_factor > 1.0:
        most = 1.0 / (1.0 - 1.0 / view.held_factor)
        step_s = min(step_s, most * _step_s(view, with_it, Work()))
    own_s = forward.predict_s(request.prompt) + _outputs(view, with_it.rows, request) * step_s
    # Of outputs that end at independent times, the last of n ends after n / (n + 1) of an output: from then on the
    # engine is foreground because of this request alone.
    alone_s = own_s / (foreground.rows + 1)
    delay_s = (1.0 - 1.0 / view.held_factor) * (1.0 if background.rows else expected) * alone_s
    return _prompts_s(view, foreground) + own_s + delay_s


def background_s(view: EngineView, foreground: Work, background: Work, request: RoutedWork) -> float:
    """Predicted seconds until a request whose latency does not matter would be done."""
    forward = view.times
    with_it = background.plus(request)
    factor = view.held_factor if foreground.rows else 1.0
    step_s = _step_s(view, foreground, with_it)
    if factor > 1.0:
        beside_s = step_s - _step_s(view, foreground, Work())
        if beside_s > 0.0:  # the factor may be infinite
            step_s = max(step_s, factor * beside_s)
    prompts_s = _prompts_s(view, background) + forward.predict_s(request.prompt)
    outputs = _outputs(view, foreground.rows + with_it.rows, request)
    return _prompts_s(view, foreground) + factor * prompts_s + outputs * step_s


def _step_s(view: EngineView, one: Work, other: Work) -> float:
    """Of a step in which as many choices as may run compute a token."""
    rows = one.rows + other.rows
    if not rows:
        return 0.0
    running = min(rows, view.max_running)
    kv_tokens = (one.kv_tokens + other.kv_tokens) / rows * running
    return view.times.predict_s(StepShape.decodes(running, round(kv_tokens)))


def _prompts_s(view: EngineView, work: Work) -> float:
    return view.times.predict_s(StepShape.chunk(work.prompt_tokens)) if work.prompt_tokens else 0.0


def _outputs(view: EngineView, rows: int, request: RoutedWork) -> float:
    """Steps until the outputs of a request are done. Choices that are more than run at once, `rows` in all, wait until
    as many outputs have ended."""
    return (1.0 + max(0, rows - view.max_running) / view.max_running) * request.output
