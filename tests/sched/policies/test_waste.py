"""The equations of APIServe, number for number, and what they come to for runs of pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.sched.policies.snapshots import line, make_runs
from weft.cache.runs import PageRuns
from weft.core.cost.model import CostModel, ForwardModel
from weft.sched.policies import Load
from weft.sched.policies.waste import (
    RunSizes,
    chunk_tokens,
    least_waste,
    recompute_waste,
    swap_waste,
    waste_chunked_discard,
    waste_discard,
    waste_preserve,
    waste_swap,
)


class Worked(NamedTuple):
    """One row of the table: what is given, and the waste in token-seconds by hand."""

    context: float
    other: float
    wait_s: float
    forward_s: float
    swap_s: float
    num_chunks: float
    chunk_s: float
    discard: float
    preserve: float
    swap: float
    chunked: float
    least: float


TABLE = [
    # C = 1,000 beside 4,000; the tool takes 0.5 s; T_fwd(1,000) = 0.2 s; T_swap(1,000) = 0.1 s; 4 chunks of 0.04 s.
    #   1: 0.2 * 1,000 + 0.2 * 4,000          = 200 + 800   = 1,000
    #   2: 0.5 * 1,000                                       = 500
    #   3: 2 * 0.1 * (1,000 + 4,000)                         = 1,000
    #   4: 0.2 * 1,000 / 2 + 4 * 0.04 * 4,000 = 100 + 640   = 740
    #   5: min(500, 740)                                     = 500, preserve
    Worked(1000, 4000, 0.5, 0.2, 0.1, 4, 0.04, 1000, 500, 1000, 740, 500),
    # The same context, and a person who takes 30 s:
    #   2: 30 * 1,000 = 30,000;  5: min(30,000, 740) = 740, discard
    Worked(1000, 4000, 30.0, 0.2, 0.1, 4, 0.04, 1000, 30_000, 1000, 740, 740),
    # C = 256 beside 0: nobody else waits; one chunk, which is the whole: T_fwd(256) = 0.0625 s, T_swap = 0.03125 s.
    #   1: 0.0625 * 256 + 0 = 16;  2: 0.03125 * 256 = 8;  3: 2 * 0.03125 * 256 = 16;  4: 16 / 2 + 0 = 8
    #   5: min(8, 8) = 8: as good as each other
    Worked(256, 0, 0.03125, 0.0625, 0.03125, 1, 0.0625, 16, 8, 16, 8, 8),
    # C = 8,192 beside 16,384; T_fwd = 2 s; T_swap = 0.5 s; 32 chunks of 0.0625 s, together the same 2 s; 1 s of wait.
    #   1: 2 * 8,192 + 2 * 16,384 = 49,152;  2: 8,192;  3: 2 * 0.5 * 24,576 = 24,576
    #   4: 2 * 8,192 / 2 + 32 * 0.0625 * 16,384 = 8,192 + 32,768 = 40,960;  5: 8,192
    Worked(8192, 16384, 1.0, 2.0, 0.5, 32, 0.0625, 49_152, 8192, 24_576, 40_960, 8192),
]


@pytest.mark.parametrize("row", TABLE)
def test_equations_of_numbers(row: Worked) -> None:
    assert waste_discard(row.forward_s, row.context, row.other) == pytest.approx(row.discard)
    assert waste_preserve(row.wait_s, row.context) == pytest.approx(row.preserve)
    assert waste_swap(row.swap_s, row.context + row.other) == pytest.approx(row.swap)
    chunked = waste_chunked_discard(row.forward_s, row.num_chunks, row.chunk_s, row.context, row.other)
    assert chunked == pytest.approx(row.chunked)


def test_equations_of_arrays() -> None:
    table = np.array(TABLE).T
    given = dict(zip(Worked._fields, table, strict=True))
    preserve = waste_preserve(given["wait_s"], given["context"])
    assert preserve == pytest.approx(given["preserve"])
    for other in set(given["other"]):
        rows = given["other"] == other
        of = {name: values[rows] for name, values in given.items()}
        chunked = waste_chunked_discard(of["forward_s"], of["num_chunks"], of["chunk_s"], of["context"], other)
        assert chunked == pytest.approx(of["chunked"])
        assert least_waste(preserve[rows], chunked) == pytest.approx(of["least"])
        assert waste_discard(of["forward_s"], of["context"], other) == pytest.approx(of["discard"])
        assert waste_swap(of["swap_s"], of["context"] + other) == pytest.approx(of["swap"])


class TestSizes:
    def test_a_run_is_the_last_part_of_its_context(self) -> None:
        sizes = RunSizes.of(make_runs(num_tokens=100 * 16, num_pages=3), Load(0.0))
        assert [value.item() for value in sizes] == [48, 48, 1552, 1552 + 24]

    def test_a_partial_page_takes_the_memory_of_a_whole_one(self) -> None:
        # 1,605 tokens end 5 tokens into a page: two pages hold 16 + 5 of them.
        sizes = RunSizes.of(make_runs(num_tokens=1605, num_pages=2), Load(0.0))
        assert [value.item() for value in sizes] == [32, 21, 1584, 1594.5]

    def test_a_run_is_no_longer_than_its_context(self) -> None:
        sizes = RunSizes.of(make_runs(num_tokens=5, num_pages=1), Load(0.0))
        assert [value.item() for value in sizes] == [16, 5, 0, 2.5]


def waste_of(runs: PageRuns, load: Load) -> list[float]:
    return recompute_waste(RunSizes.of(runs, load), load).tolist()


class TestRecomputing:
    load = Load(0.0, running_tokens=5000, running_rows=24, saturation_tokens=64, costs=line())

    def test_a_whole_context_by_hand(self) -> None:
        # 160 tokens of 1 ms each beside 24 running rows, so that no base of 10 ms is added: T_fwd = 0.16 s.
        # Chunks of 64 - 24 = 40 tokens: 4 of 0.04 s. Equation 4: 0.16 * 160 / 2 + 4 * 0.04 * 5,000 = 12.8 + 800.
        assert waste_of(make_runs(num_tokens=160, num_pages=10), self.load) == pytest.approx([812.8])

    def test_a_tail_by_hand(self) -> None:
        # The last 32 of 160 tokens: 0.032 s while 128 + 16 tokens are held, one chunk: 0.032 * 144 + 0.032 * 5,000.
        assert waste_of(make_runs(num_tokens=160, num_pages=2), self.load) == pytest.approx([4.608 + 160])

    def test_chunks_are_at_least_a_page(self) -> None:
        assert chunk_tokens(self.load) == 40
        assert chunk_tokens(self.load._replace(running_rows=60)) == 16
        assert chunk_tokens(self.load._replace(saturation_tokens=None)) == np.inf

    def test_each_chunk_costs_what_it_adds_to_the_running_step(self) -> None:
        # Tokens up to 50 in a step are free, later ones take 1 ms: beside 24 rows, 14 tokens of a chunk of 40 do, so
        # four chunks take 0.056 s, where one forward would take 0.134: 0.056 * 160 / 2 + 0.056 * 5,000.
        forward = ForwardModel(0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, (50,), (0.0, 0.001))
        load = self.load._replace(costs=CostModel(forward, None, None, 64))
        assert waste_of(make_runs(num_tokens=160, num_pages=10), load) == pytest.approx([284.48])

    def test_a_device_where_nothing_runs_has_the_step_of_the_return(self) -> None:
        # Its base of 10 ms is paid for the new tokens, so recomputing adds 0.16 s: 0.16 * 160 / 2.
        load = Load(0.0, costs=line())
        assert waste_of(make_runs(num_tokens=160, num_pages=10), load) == pytest.approx([12.8])

    @pytest.mark.parametrize("saturation_tokens", [None, 33])
    def test_attention_is_counted_at_its_place(self, saturation_tokens: int | None) -> None:
        # Pairs alone cost: 1e-6 s each. 64 of 256 tokens, in one chunk or in two of 32, have 64 * (193 + 256) / 2
        # = 14,368 pairs; held meanwhile 192 + 32.
        costs = line(0.0, 0.0, pair_s=1e-6)
        load = Load(0.0, running_tokens=1000, running_rows=1, saturation_tokens=saturation_tokens, costs=costs)
        seconds = 14_368e-6
        assert waste_of(make_runs(num_tokens=256, num_pages=4), load) == pytest.approx([seconds * (224 + 1000)])

    def test_a_context_wastes_the_same_whole_or_in_parts(self) -> None:
        # Chunks are whole ones in both: 4 * 40 tokens, or 40 and 120.
        load = self.load._replace(costs=line(page_s=0.002), page_size=8)
        whole = make_runs(num_tokens=160, num_pages=20, has_copy=True)
        parts = make_runs(2, num_tokens=[40, 160], num_pages=[5, 15], has_copy=True)
        assert sum(waste_of(parts, load)) == pytest.approx(sum(waste_of(whole, load)))
        swaps = [swap_waste(runs, RunSizes.of(runs, load), load).sum() for runs in (whole, parts)]
        assert swaps[1] == pytest.approx(swaps[0])

    def test_without_a_profile_waste_is_in_proportion_to_tokens(self) -> None:
        load = self.load._replace(costs=None)
        given = make_runs(3, num_tokens=[160, 160, 32], num_pages=[10, 2, 2])
        measured = waste_of(given, self.load)
        assert waste_of(given, load) == pytest.approx([1000 * value for value in measured])


class TestSwapping:
    load = Load(0.0, running_tokens=5000, costs=line(page_s=0.002))
    whole = make_runs(2, num_tokens=160, num_pages=10, has_copy=[False, True])

    def waste(self, load: Load) -> list[float]:
        return swap_waste(self.whole, RunSizes.of(self.whole, load), load).tolist()

    def test_out_and_in_by_hand(self) -> None:
        # 10 pages of 2 ms: 0.02 s each way. In: 0.02 * (80 + 5,000) = 101.6; out 0.02 * 5,000, where there is no copy.
        assert self.waste(self.load) == pytest.approx([201.6, 101.6])

    def test_equation_3_but_for_pages_that_move_one_by_one(self) -> None:
        # Equation 3 counts the moved context whole: 2 * 0.02 * (160 + 5,000) = 206.4. On average half of it is held on
        # the way in, and nothing on the way out.
        assert waste_swap(0.02, 160.0 + 5000.0) - self.waste(self.load)[0] == pytest.approx(0.02 * 80 + 0.02 * 160)

    def test_what_forwards_hide_stalls_nobody(self) -> None:
        assert self.waste(self.load._replace(swap_hidden=0.75)) == pytest.approx([0.02 * (1330 + 1250), 0.02 * 1330])
        assert self.waste(self.load._replace(swap_hidden=1.0)) == pytest.approx([1.6, 1.6])

    def test_what_was_not_measured_takes_no_time(self) -> None:
        assert self.waste(self.load._replace(costs=line())) == [0.0, 0.0]
        assert self.waste(self.load._replace(costs=None)) == [0.0, 0.0]
