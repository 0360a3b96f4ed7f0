"""What a simulation is judged by: waste of KV memory by cause, and figures of sessions.

Waste is what `weft.sched.waste_meter` defines; recomputation is counted with what the simulator knows of its sessions.

Every step counts for as long as it holds the device. It counts once more as *pressed* when some sequence waits for
pages, that is, needs more than are free or cached: only then would the memory have served it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from weft.cache.manager import KVCache
from weft.core.cost.model import CostModel
from weft.core.step import Step
from weft.sched.in_flight import InFlight
from weft.sched.policies.runs import Load
from weft.sched.scheduler import Scheduler
from weft.sched.sequence import GenerateOp, SequenceState
from weft.sched.waste_meter import StepKV, Waste
from weft.sim.records import KnownTokens, SessionRecord
from weft.sim.worker import StepTiming


class WasteTotals(NamedTuple):
    """KV memory x time over steps, in token-seconds: all of it, and what was wasted by cause."""

    capacity: float
    """Token-seconds of the whole pool."""
    causes: dict[str, float]
    """Token-seconds by cause."""

    @property
    def share(self) -> float:
        """Waste of all causes as a part of KV memory x time."""
        return sum(self.causes.values()) / self.capacity if self.capacity else 0.0

    def shares(self) -> dict[str, float]:
        """Each cause as a part of KV memory x time."""
        return {cause: value / self.capacity if self.capacity else 0.0 for cause, value in self.causes.items()}


class WasteLedger:
    """`StepObserver` that adds up waste and recomputed tokens."""

    def __init__(self, scheduler: Scheduler, cache: KVCache, costs: CostModel, known: KnownTokens):
        """`cache` is the scheduler's, and `costs` those of its device."""
        self.prefill_tokens = 0
        """Query tokens of prompts and of what waits returned."""
        self.recomputed_tokens = 0
        self.busy_s = 0.0
        """Time for which steps held the device."""
        self.pressed_s = 0.0
        """Of that, in steps in which some sequence waits for pages."""
        self.pressed: list[tuple[float, float]] = []
        """When these steps held the device, (begin, end); steps that follow each other are one."""
        self.pressed_rows = 0.0
        """Rows of these steps, times their seconds."""
        self.pressed_kv = 0.0
        """KV tokens of their rows, times their seconds."""
        self.swapped_pages = 0
        self._scheduler = scheduler
        self._costs = costs
        self._known = known
        self._cache = cache
        self._page_size = cache.page_size
        self._pool_tokens = cache.tiers.device.num_pages * cache.page_size
        self._all = self._pressed = Waste()

    def observe(self, step: Step, flight: InFlight, timing: StepTiming) -> None:
        """Add the waste and the memory of a step."""
        again, rows = self._recomputed(step, flight) if flight.written else (0, [])
        moved = len(step.swap_outs) + len(step.swap_ins)
        computing = recomputing = 0
        if step.forward is not None and (again or moved):
            computing = step.forward.kv_tokens(self._page_size)
            recomputing = step.forward.kv_tokens(self._page_size, rows)
        recompute_s = 0.0
        if again:
            shape = timing.shape._replace(num_tokens=timing.shape.num_tokens - again)
            recompute_s = timing.forward_s - (self._costs.predict_forward_s(shape) if shape.num_tokens else 0.0)
        kv = StepKV(self._scheduler.intercepted_tokens, computing, recomputing, moved * self._page_size)
        waste = kv.waste(timing.device_s, recompute_s, timing.device_s - timing.forward_s)
        self.busy_s += timing.device_s
        self.swapped_pages += moved
        self._all = self._all.plus(waste)
        if flight.waits_for_pages or self._lacks_pages():
            self.pressed_s += timing.device_s
            self.pressed_rows += timing.shape.num_rows * timing.device_s
            self.pressed_kv += (timing.shape.decode_kv + timing.shape.chunk_kv) * timing.device_s
            self._pressed = self._pressed.plus(waste)
            if self.pressed and self.pressed[-1][1] >= timing.begin_s:
                self.pressed[-1] = self.pressed[-1][0], timing.end_s
            else:
                self.pressed.append((timing.begin_s, timing.end_s))

    @property
    def over_all_steps(self) -> WasteTotals:
        """Waste in token-seconds over all steps, with or without pressure."""
        return WasteTotals(self.busy_s * self._pool_tokens, self._all._asdict())

    @property
    def under_pressure(self) -> WasteTotals:
        """Waste in steps in which some sequence waits for pages."""
        return WasteTotals(self.pressed_s * self._pool_tokens, self._pressed._asdict())

    def pressed_load(self, saturation_tokens: int | None) -> Load:
        """What ran, on average, in steps in which some sequence waits for pages. Transfers count as hidden behind
        forwards."""
        seconds = self.pressed_s or 1.0
        return Load(
            now=0.0,
            running_tokens=round(self.pressed_kv / seconds),
            running_rows=round(self.pressed_rows / seconds),
            saturation_tokens=saturation_tokens,
            page_size=self._page_size,
            host_pages=self._cache.tiers.host.num_pages,
            costs=self._costs,
            swap_hidden=1.0,
        )

    def _recomputed(self, step: Step, flight: InFlight) -> tuple[int, list[int]]:
        """Tokens of the step that are computed again, and the rows that they are in."""
        assert step.forward is not None
        rows = list[int]()
        first = len(flight.decoded)
        bounds = step.forward.q_indptr[first:].tolist()
        again = 0
        for row, (sequence, _, end) in enumerate(flight.written):
            count = bounds[row + 1] - bounds[row]
            self.prefill_tokens += count
            head = sequence.head
            if isinstance(head, GenerateOp) and head.num_output:
                # Preempted while it generated: all but the last token generated so far had KV.
                self._known.expect(sequence.handle, head.num_prompt + head.num_output - 1)
            found = self._known.compute(sequence.handle, end - count, end)
            if found:
                again += found
                rows.append(first + row)
        self.recomputed_tokens += again
        return again, rows

    def _lacks_pages(self) -> bool:
        """Whether a waiting sequence needs more pages than are free or cached. A step whose tokens are used up before
        it comes to such a sequence does not say so itself."""
        if not self._scheduler.sequences.queue:
            return False
        available, size, waiting = self._cache.num_available, self._page_size, SequenceState.WAITING
        for sequence in self._scheduler.sequences.open.values():
            if sequence.state is waiting and -(-sequence.total // size) - len(sequence.table.pages) > available:
                return True
        return False


class Summary(NamedTuple):
    """Figures of one simulation. Times are virtual seconds; a figure without values is None."""

    arrived: int
    completed: int
    """Of those that arrived, how many ended at all."""
    completed_per_s: float
    """Sessions that ended before arrivals did, by the time that arrivals took."""
    latency_per_token_s: float | None
    """Median over sessions of (end to end - time in tools) / output tokens."""
    latency_per_token_p90_s: float | None
    ttft_first_s: float | None
    """Median time to first token of first turns."""
    ttft_first_p99_s: float | None
    ttft_return_s: float | None
    """Of turns after a wait."""
    ttft_return_p99_s: float | None
    output_tokens: int
    prefill_tokens: int
    recomputed_tokens: int
    swapped_pages: int
    steps: int
    simulated_s: float
    pressed_s: float
    waste_share: float
    """Of KV memory x time, over all steps."""
    waste_shares: dict[str, float]
    """The same by cause."""
    pressed_waste_share: float
    """Counted in steps in which some sequence waits for pages."""
    pressed_waste_shares: dict[str, float]
    busy_s: float
    """For which steps held the device."""
    pressed_cheapest_share: float
    """What `cheapest_waste` charges, as a part of KV memory x time of the same steps as `pressed_waste_share`."""


def summarise(
    records: Iterable[SessionRecord],
    ledger: WasteLedger,
    *,
    arrivals_s: float,
    steps: int,
    simulated_s: float,
    cheapest_waste: float,
) -> Summary:
    """Figures of a simulation whose sessions arrived within `arrivals_s` seconds. `cheapest_waste` is in
    token-seconds."""
    records = list(records)
    ended = [record for record in records if record.end_s is not None]
    latencies = [record.latency_per_token_s for record in ended if record.latency_per_token_s is not None]
    firsts = [turn.first_token_s - turn.due_s for record in records for turn in record.turns[:1]]
    returns = [turn.first_token_s - turn.due_s for record in records for turn in record.turns[1:]]
    in_time = sum(1 for record in ended if record.end_s is not None and record.end_s <= arrivals_s)
    whole, pressed = ledger.over_all_steps, ledger.under_pressure
    return Summary(
        arrived=len(records),
        completed=len(ended),
        completed_per_s=in_time / arrivals_s,
        latency_per_token_s=_percentile(latencies, 50),
        latency_per_token_p90_s=_percentile(latencies, 90),
        ttft_first_s=_percentile(firsts, 50),
        ttft_first_p99_s=_percentile(firsts, 99),
        ttft_return_s=_percentile(returns, 50),
        ttft_return_p99_s=_percentile(returns, 99),
        output_tokens=sum(record.output_tokens for record in records),
        prefill_tokens=ledger.prefill_tokens,
        recomputed_tokens=ledger.recomputed_tokens,
        swapped_pages=ledger.swapped_pages,
        steps=steps,
        simulated_s=simulated_s,
        pressed_s=ledger.pressed_s,
        waste_share=whole.share,
        waste_shares=whole.shares(),
        pressed_waste_share=pressed.share,
        pressed_waste_shares=pressed.shares(),
        busy_s=ledger.busy_s,
        pressed_cheapest_share=cheapest_waste / pressed.capacity if pressed.capacity else 0.0,
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
