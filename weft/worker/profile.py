"""Measures what steps cost, on a worker itself: no scheduler, no engine, no HTTP.

Owns what is measured (`make_plan`) and how (`Profiler`). Steps are those that an engine would launch: chunks of prompts
at several depths of context, batches of decoding rows with contexts of different lengths, several prompts at once, and
mixtures; some of these with pages that move to the host tier and back meanwhile; then such movements alone. Times are
those that steps report. What is fitted to them is in `core.cost`.

The pages hold KV as a serving engine's would. One long sequence (the *long lane*) is computed by forwards; further
lanes are copies of its first pages, laid out anew for each length of context. Every row writes the tokens that its
lane has at those places, so that a measurement leaves the lane as it was. Pages that move beside a forward are those
that it does not touch: they go out before the measurement, so that what comes in is what was there.

A plan is carried out in rounds, in another order each, and a sample is the least time over all rounds: what else the
machine does can only add to a step's time, and is another thing in every round. A shape whose two least times do not
agree is visited again in further rounds. Whether a sample will be fitted or held out plays no part in this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from weft.core.cost.fit import MoveSample, Sample, SwapSample
from weft.core.cost.model import StepShape
from weft.core.cost.profile import Measurements
from weft.core.protocols import Worker, WorkerSpec
from weft.core.sampling import SamplingParams
from weft.core.step import I32, ForwardBatch, LateInputs, SamplingBatch, SlotSet, Step

HOST_KV_BYTES, DEVICE_KV_BYTES = 2 << 30, 24 << 30
"""Memory that lanes may take: on a CPU, which other programs share, and on a device of its own."""
SHORTEST_CONTEXT = 64
SWAP_BYTES = 256 << 20
"""Of the largest swap."""
SHORT_STEP_S = 0.02
"""A step that is shorter is run again at once: the first one pays for caches that others filled."""
MOVE_COUNTS = 4
"""Numbers of pages that move beside a forward: the most that are measured, a quarter of it, and so on."""
REPEATS = 3
AGREEMENT = 1.03
"""Two least times agree when they differ by less than this factor."""

Progress = Callable[[int, int], None]
"""Called with (visits done, visits in all); the second grows where times do not agree."""
Fields = Mapping[str, Any]
"""Of a step, but for its id."""


class Effort(NamedTuple):
    """How many shapes and repetitions are measured."""

    rounds: int
    most_rounds: int
    """Of a shape whose times do not agree."""
    fine: bool
    """Sizes between the powers of two as well, and every depth of context."""
    num_mixed: int
    """Mixtures per length of context."""
    longest_context: int


FULL, QUICK = Effort(3, 15, True, 16, 4096), Effort(2, 8, False, 5, 2048)


class ProfileRow(NamedTuple):
    """Query tokens `kv_before` to `kv_before + num_tokens` of a lane."""

    lane: int
    """0: the long one."""
    num_tokens: int
    kv_before: int
    has_output: bool = True


class Scenario(NamedTuple):
    """One batch shape that is measured."""

    kind: str
    rows: tuple[ProfileRow, ...]


class MovingScenario(NamedTuple):
    """A batch shape beside which pages move."""

    scenario: Scenario
    num_out: int
    num_in: int


class ProfileGroup(NamedTuple):
    """Scenarios that share a layout of pages."""

    lane_tokens: int
    """Of each lane but the long one; 0: there are no others."""
    num_lanes: int
    scenarios: tuple[Scenario, ...]
    moving: tuple[MovingScenario, ...] = ()


class ProfilePlan(NamedTuple):
    """Everything that is to be measured."""

    long_tokens: int
    groups: tuple[ProfileGroup, ...]
    swap_pages: tuple[int, ...]
    rounds: int
    most_rounds: int

    @property
    def num_visits(self) -> int:
        """How often something is measured if all times agree."""
        shapes = sum(len(group.scenarios) + len(group.moving) for group in self.groups)
        return self.rounds * (shapes + len(self.swap_pages))


def make_plan(spec: WorkerSpec, max_step_tokens: int, effort: Effort = FULL) -> ProfilePlan:
    """What is measured on a worker of these sizes. Deterministic."""
    room = DEVICE_KV_BYTES if spec.device == "cuda" else HOST_KV_BYTES
    num_pages = max(2, min(spec.num_device_pages, room // spec.bytes_per_page))
    size = spec.page_size
    long_pages = max(1, min(num_pages // 2, -(-min(spec.max_context, effort.longest_context) // size)))
    long_tokens = min(long_pages * size, spec.max_context)
    random = np.random.default_rng(0)
    most = min(spec.num_host_pages, long_pages, SWAP_BYTES // spec.bytes_per_page)
    half = max(1, min(long_tokens // 2, max_step_tokens))
    # Its pages are the first ones of the long lane; at least one page is left to move.
    chunk = Scenario("chunk", (ProfileRow(0, half, 0),))
    moving = tuple(_moving(chunk, min(most, long_pages - -(-half // size))))
    groups = [ProfileGroup(0, 0, tuple(_chunks(max_step_tokens, long_tokens, effort)), moving)]
    context = SHORTEST_CONTEXT
    while context <= long_tokens:
        lanes = min(spec.num_slots, max_step_tokens, (num_pages - long_pages) // -(-context // size))
        if lanes > 0:
            sizes = _Sizes(context, lanes, spec.num_slots, long_tokens, max_step_tokens)
            scenarios = tuple(_batches(sizes, effort, random))
            decodes = [one for one in scenarios if one.kind == "decode"]
            # All pages of the long lane are left to move.
            chosen = decodes[:: max(1, len(decodes) - 1)] if effort.fine else decodes[-1:]
            moving = tuple(itertools.chain.from_iterable(_moving(one, most) for one in chosen))
            groups.append(ProfileGroup(context, lanes, scenarios, moving))
        context *= 4
    swap_pages = tuple(_powers(most, effort.fine))
    return ProfilePlan(long_tokens, tuple(groups), swap_pages, effort.rounds, effort.most_rounds)


class _Sizes(NamedTuple):
    context: int
    lanes: int
    num_slots: int
    long_tokens: int
    max_step_tokens: int


def _chunks(max_step_tokens: int, long_tokens: int, effort: Effort) -> Iterator[Scenario]:
    """One row each; every second one is the end of its prompt."""
    for index, tokens in enumerate(_powers(min(max_step_tokens, long_tokens), effort.fine)):
        depths = sorted({0, long_tokens // 8, long_tokens // 2, long_tokens - tokens})
        fitting = [depth for depth in depths if depth + tokens <= long_tokens]
        for place, depth in enumerate(fitting if effort.fine else fitting[:: max(1, len(fitting) - 1)]):
            yield Scenario("chunk", (ProfileRow(0, tokens, depth, (index + place) % 2 == 0),))


def _batches(sizes: _Sizes, effort: Effort, random: np.random.Generator) -> Iterator[Scenario]:
    for count in _powers(sizes.lanes, effort.fine):
        yield Scenario("decode", _decoding(sizes, count, random))
    for count in _powers(sizes.lanes, fine=False)[1:]:
        tokens = min(sizes.context, sizes.max_step_tokens // count)
        if tokens > 1:
            yield Scenario("prompts", tuple(ProfileRow(1 + lane, tokens, 0) for lane in range(count)))
    most = min(sizes.max_step_tokens, sizes.long_tokens)
    for _ in range(effort.num_mixed if most > 2 else 0):
        count = int(_log_uniform(random, 1, min(sizes.lanes, most - 2)))
        tokens = int(_log_uniform(random, 2, most - count))
        depth = int(random.integers(0, sizes.long_tokens - tokens + 1))
        chunk = ProfileRow(0, tokens, depth, count < sizes.num_slots and bool(random.integers(0, 2)))
        yield Scenario("mixed", (*_decoding(sizes, count, random), chunk))


def _moving(scenario: Scenario, most: int) -> Iterator[MovingScenario]:
    """Up to `most` pages: out, in, and both."""
    for count in _powers(most, fine=False)[::-2][:MOVE_COUNTS]:
        yield MovingScenario(scenario, count, 0)
        yield MovingScenario(scenario, 0, count)
        if count > 1:
            yield MovingScenario(scenario, count // 2, count - count // 2)


def _decoding(sizes: _Sizes, count: int, random: np.random.Generator) -> tuple[ProfileRow, ...]:
    depths = random.integers(sizes.context // 2, sizes.context, count).tolist()
    return tuple(ProfileRow(1 + lane, 1, depth) for lane, depth in enumerate(depths))


def _powers(most: int, fine: bool) -> list[int]:
    """1, 2, 4 … up to `most`, which is one of them; with 3, 6, 12 … between them where `fine`."""
    powers = [2**e for e in range(most.bit_length()) if 2**e <= most]
    between = [3 * power // 2 for power in powers[1:] if fine and 3 * power // 2 <= most]
    return sorted({*powers, *between, *([most] if most > 0 else [])})


def _log_uniform(random: np.random.Generator, low: int, high: int) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(max(low, high) + 1 - 1e-9))))


class Profiler:
    """Carries out a plan on a worker that takes no other steps meanwhile. The caller closes the worker."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._spec = worker.spec
        self._ids = itertools.count(1)
        self._long_pages: I32 = np.empty(0, np.int32)
        self._lane_pages = 0

    def measure(self, plan: ProfilePlan, progress: Progress | None = None) -> Measurements:
        """The least time of every scenario. Raises what the worker raises."""
        tell = progress or (lambda done, total: None)
        tell(0, plan.num_visits)
        self._begin(plan)
        seconds: dict[Scenario, list[float]] = {one: [] for group in plan.groups for one in group.scenarios}
        outs: dict[int, list[float]] = {count: [] for count in plan.swap_pages}
        ins: dict[int, list[float]] = {count: [] for count in plan.swap_pages}
        moving: dict[MovingScenario, list[float]] = {one: [] for group in plan.groups for one in group.moving}
        beside: dict[MovingScenario, list[float]] = {one: [] for one in moving}
        done = 0
        for number in range(plan.most_rounds):
            random = np.random.default_rng(number)
            groups = [[one for one in g.scenarios if not _settled(seconds[one], plan)] for g in plan.groups]
            counts = [n for n in plan.swap_pages if not (_settled(outs[n], plan) and _settled(ins[n], plan))]
            moves = [[one for one in g.moving if not _settled(moving[one], plan)] for g in plan.groups]
            total = max(plan.num_visits, done + sum(map(len, groups)) + sum(map(len, moves)) + len(counts))
            for group, scenarios, moved in zip(plan.groups, groups, moves, strict=True):
                if scenarios or moved:
                    self._lay_out(group)
                for index in random.permutation(len(scenarios)):
                    seconds[scenarios[index]].append(self._visit(self._forward(scenarios[index])))
                    done += 1
                    tell(done, total)
                for index in random.permutation(len(moved)):
                    one = moved[index]
                    without_s, with_s = self._visit_moving(one, random)
                    beside[one].append(without_s)
                    moving[one].append(with_s)
                    done += 1
                    tell(done, total)
            for count in counts:
                device = random.permutation(len(self._long_pages))[:count].astype(np.int32)
                host = np.arange(count, dtype=np.int32)
                outs[count].append(self._visit({"swap_outs": np.stack([device, host], axis=1)}))
                ins[count].append(self._visit({"swap_ins": np.stack([host, device], axis=1)}))
                done += 1
                tell(done, total)
        return Measurements(
            [Sample(one.kind, shape_of(one), min(times)) for one, times in seconds.items()],
            [SwapSample(count, min(times)) for count, times in outs.items()],
            [SwapSample(count, min(times)) for count, times in ins.items()],
            [
                MoveSample(shape_of(one.scenario), one.num_out, one.num_in, min(beside[one]), min(times))
                for one, times in moving.items()
            ],
        )

    def _begin(self, plan: ProfilePlan) -> None:
        """Give every slot a sampling state, greedy and random in turn, and compute the long lane."""
        params = (SamplingParams(temperature=0.0), SamplingParams())
        self._run({"slot_sets": [SlotSet(slot, params[slot % 2]) for slot in range(self._spec.num_slots)]})
        self._long_pages = np.arange(-(-plan.long_tokens // self._spec.page_size), dtype=np.int32)
        widest = max(scenario.rows[0].num_tokens for scenario in plan.groups[0].scenarios)
        for start in range(0, plan.long_tokens, widest):
            row = ProfileRow(0, min(widest, plan.long_tokens - start), start, has_output=False)
            self._run(self._forward(Scenario("", (row,))))

    def _lay_out(self, group: ProfileGroup) -> None:
        """Make the group's lanes copies of the beginning of the long one."""
        self._lane_pages = -(-group.lane_tokens // self._spec.page_size)
        count = self._lane_pages * group.num_lanes
        if count:
            first = len(self._long_pages)
            source = np.tile(np.arange(self._lane_pages, dtype=np.int32), group.num_lanes)
            self._run({"page_copies": np.stack([source, np.arange(first, first + count, dtype=np.int32)], axis=1)})

    def _forward(self, scenario: Scenario) -> Fields:
        """The fields of a step."""
        size = self._spec.page_size
        positions, pages, write_slots = [], [], []
        for row in scenario.rows:
            after = row.kv_before + row.num_tokens
            first = 0 if row.lane == 0 else len(self._long_pages) + (row.lane - 1) * self._lane_pages
            own = np.arange(row.kv_before, after, dtype=np.int32)
            positions.append(own)
            write_slots.append(first * size + own)
            pages.append(np.arange(first, first - (-after // size), dtype=np.int32))
        q_indptr = _indptr([row.num_tokens for row in scenario.rows])
        flat = np.concatenate(positions)
        ends = q_indptr[1:] - 1
        outputs = ends[np.array([row.has_output for row in scenario.rows])]
        forward = ForwardBatch(
            token_ids=((flat.astype(np.int64) * 31 + 7) % self._spec.vocab_size).astype(np.int32),
            positions=flat,
            write_slots=np.concatenate(write_slots),
            q_indptr=q_indptr,
            kv_indptr=_indptr([len(one) for one in pages]),
            kv_page_ids=np.concatenate(pages),
            kv_lens=np.array([row.kv_before + row.num_tokens for row in scenario.rows], np.int32),
            output_tokens=outputs,
        )
        return {"forward": forward, "sampling": _sampling(len(outputs)) if len(outputs) else None}

    def _visit_moving(self, one: MovingScenario, random: np.random.Generator) -> tuple[float, float]:
        """Seconds of a forward without and with the pages that move."""
        fields = self._forward(one.scenario)
        others = np.setdiff1d(np.arange(len(self._long_pages), dtype=np.int32), fields["forward"].kv_page_ids)
        device = random.permutation(others)[: one.num_out + one.num_in]
        pairs = np.stack([device, np.arange(len(device), dtype=np.int32)], axis=1)
        self._run({"swap_outs": pairs})
        outs, ins = pairs[: one.num_out], pairs[one.num_out :, ::-1]
        return self._visit(fields), self._visit({**fields, "swap_outs": outs, "swap_ins": ins})

    def _visit(self, fields: Fields) -> float:
        """Seconds of this step, again if it is short."""
        first = self._run(fields)
        if first > SHORT_STEP_S:
            return first
        return min(self._run(fields) for _ in range(REPEATS))

    def _run(self, fields: Fields) -> float:
        step = Step(next(self._ids), **fields)
        handle = self._worker.launch(step)
        self._worker.bind(handle, LateInputs())
        return handle.wait().device_s


def _settled(times: list[float], plan: ProfilePlan) -> bool:
    """Whether a shape was measured often enough."""
    if len(times) < plan.rounds:
        return False
    least = sorted(times)[:2]
    return len(least) < 2 or least[1] <= AGREEMENT * least[0]


def shape_of(scenario: Scenario) -> StepShape:
    """What the time of a scenario depends on."""
    shape = StepShape(0, 0, 0, 0, 0, 0)
    for row in scenario.rows:
        shape = shape.plus(StepShape.chunk(row.num_tokens, row.kv_before, int(row.has_output)))
    return shape


def _sampling(count: int) -> SamplingBatch:
    """A sampler for each output row, in as many slots."""
    numbers = np.arange(count, dtype=np.int32)
    return SamplingBatch(
        rows=numbers,
        slots=numbers,
        uniforms=np.full(count, 0.5),
        num_logprobs=np.full(count, -1, np.int32),
        suppress_stop=np.zeros(count, np.bool_),
        late_mask=np.zeros(count, np.bool_),
    )


def _indptr(lengths: list[int]) -> I32:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
