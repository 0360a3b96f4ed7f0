"""Random operations on the cache beside a model of the device's memory: every table must always read its own tokens."""

from __future__ import annotations

import math
import random
from array import array

import numpy as np
import pytest

from weft.cache.integrity import check_integrity
from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.cache.page_table import PageTable
from weft.cache.runs import PageRuns, Ranker, Ranking, least_recently_used
from weft.cache.tiers import UNLIMITED
from weft.core.ids import pack_tokens

PAGE = 8


def longest_first(runs: PageRuns, now: float) -> Ranking:
    """Another order than that of use."""
    kept = np.zeros(len(runs.order), np.bool_)
    values = -runs.num_tokens.astype(float) - runs.weight
    return Ranking(values, runs.order % 2 == 0, kept, runs.order % 3 == 0, values + runs.num_behind)


RANKERS: dict[str, Ranker] = {"lru": least_recently_used, "longest first": longest_first}


class Sequence:
    """Tokens, and how many of them have KV."""

    def __init__(self, table: PageTable, tokens: list[int]):
        self.table = table
        self.tokens = array("i", tokens)
        self.computed = 0


class Bench:
    """A cache, the memory behind it, and steps in flight with a lag of one, as the engine runs them."""

    def __init__(self, seed: int, device_pages: int, host_pages: int, policy: str):
        self.random = random.Random(seed)
        self.cache = KVCache(device_pages, host_pages, PAGE, RANKERS[policy], max_pinned_fraction=0.3)
        self.device = [[-1] * PAGE for _ in range(device_pages)]
        self.host = [[-1] * PAGE for _ in range(host_pages)]
        self.sequences: dict[int, Sequence] = {}
        self.waits: dict[int, Wait] = {}
        self.returning: list[Sequence] = []
        """They have a part of what they match; the rest is on the host."""
        self.next_seq = 1
        self.num_continued = 0
        self.step = 0
        self.now = 0.0
        self.in_flight: list[tuple[int, list[tuple[int, int, int]], object]] = []
        self.pending_commits: dict[int, list[tuple[Sequence, int]]] = {}

    def text(self) -> list[int]:
        length = self.random.randrange(1, 6 * PAGE)
        base = self.random.randrange(3)
        cut = self.random.randrange(0, length + 1)
        return [1000 * base + i for i in range(cut)] + [self.random.randrange(5) for _ in range(length - cut)]

    def open(self) -> None:
        namespace = self.random.choice(["a", "a", "a", "b"])
        sequence = Sequence(self.cache.open_table(self.next_seq, namespace), self.text())
        self.next_seq += 1
        tokens = sequence.tokens.tobytes()
        match = self.cache.lookup(sequence.table, tokens, len(sequence.tokens) - 1)
        acquired = self.cache.acquire(sequence.table, match, tokens, len(sequence.tokens) - 1, self.now)
        sequence.computed = acquired.num_tokens
        if acquired.num_tokens < match.num_pages * PAGE:
            self.returning.append(sequence)
        assert sequence.computed < len(sequence.tokens)
        self.sequences[sequence.table.seq] = sequence
        if self.random.random() < 0.5:
            self.cache.announce(sequence.table, tokens, len(sequence.tokens))

    def go_on_returning(self) -> None:
        """Bring more of what returning sequences match to the device, unless they have begun to compute."""
        for sequence in self.returning:
            is_open = self.sequences.get(sequence.table.seq) is sequence
            if not is_open or len(sequence.table.pages) * PAGE != sequence.computed:
                continue
            if any(s is sequence for commits in self.pending_commits.values() for s, _ in commits):
                continue
            if sequence.table.num_indexed * PAGE != sequence.computed or sequence.computed >= len(sequence.tokens) - 1:
                continue
            tokens = sequence.tokens.tobytes()
            match = self.cache.lookup(sequence.table, tokens, len(sequence.tokens) - 1)
            if match.num_pages < sequence.table.num_indexed:
                continue
            self.cache.withdraw(sequence.table)
            acquired = self.cache.acquire(sequence.table, match, tokens, len(sequence.tokens) - 1, self.now)
            assert acquired.num_tokens >= sequence.computed
            sequence.computed = acquired.num_tokens
            self.num_continued += 1

    def park(self) -> None:
        """Give up the pages of a sequence that stays open, and take what is left of them again."""
        sequence = self.random.choice(list(self.sequences.values()))
        self.cache.free(
            sequence.table, sequence.tokens, self.written(sequence), self.now, wait=self.wait(sequence), fence=self.step
        )
        sequence.computed = 0
        for step, commits in self.pending_commits.items():  # what steps in flight write for it is void
            self.pending_commits[step] = [(s, end) for s, end in commits if s is not sequence]
        if self.random.random() < 0.7:
            tokens = sequence.tokens.tobytes()
            match = self.cache.lookup(sequence.table, tokens, len(sequence.tokens) - 1)
            acquired = self.cache.acquire(sequence.table, match, tokens, len(sequence.tokens) - 1, self.now)
            sequence.computed = acquired.num_tokens
            if acquired.num_tokens < match.num_pages * PAGE:
                self.returning.append(sequence)

    def launch(self) -> None:
        """Compute a chunk of some sequences."""
        self.step += 1
        writes: list[tuple[int, int, int]] = []
        commits: list[tuple[Sequence, int]] = []
        for sequence in self.random.sample(list(self.sequences.values()), min(3, len(self.sequences))):
            if self.random.random() < 0.4:
                sequence.tokens.extend(self.random.randrange(5) for _ in range(self.random.randrange(1, PAGE)))
            end = min(len(sequence.tokens), sequence.computed + self.random.randrange(1, 2 * PAGE))
            if end == sequence.computed:
                continue
            if not self.cache.prepare_write(sequence.table, sequence.computed, end, self.now):
                self.free(sequence)
                continue
            for position in range(sequence.computed, end):
                page = sequence.table.pages[position // PAGE]
                writes.append((page, position % PAGE, sequence.tokens[position]))
            sequence.computed = end
            commits.append((sequence, end))
        self.in_flight.append((self.step, writes, self.cache.take_copies()))
        self.cache.tiers.copies.launched = self.step
        self.cache.tiers.begin_step(self.random.choice([0, 1, 3, UNLIMITED]))
        self.pending_commits[self.step] = commits
        if len(self.in_flight) > 1:
            self.complete()

    def complete(self) -> None:
        step, writes, copies = self.in_flight.pop(0)
        for source, target in copies.swap_outs:  # type: ignore[attr-defined]
            self.host[target] = list(self.device[source])
        for source, target in copies.page_copies:  # type: ignore[attr-defined]
            self.device[target] = list(self.device[source])
        for source, target in copies.swap_ins:  # type: ignore[attr-defined]
            self.device[target] = list(self.host[source])
        for page, offset, token in writes:
            self.device[page][offset] = token
        self.cache.tiers.step_completed(step)
        for sequence, end in self.pending_commits.pop(step):
            if self.sequences.get(sequence.table.seq) is sequence:
                end = min(end, sequence.computed)
                self.cache.commit(sequence.table, sequence.tokens, end, self.now)
                if end == sequence.computed and self.random.random() < 0.5:
                    self.cache.publish_tail(sequence.table, sequence.tokens, end)

    def free(self, sequence: Sequence) -> None:
        del self.sequences[sequence.table.seq]
        written = self.written(sequence)
        if self.random.random() < 0.4:
            self.hold(sequence, written)
        elif self.random.random() < 0.5:
            self.cache.free(sequence.table, sequence.tokens, written, self.now, wait=self.wait(sequence))
        else:
            self.cache.free(sequence.table, sequence.tokens, written, self.now)
        self.cache.close(sequence.table, self.now)

    def hold(self, sequence: Sequence, written: int) -> None:
        wait, table, retention = self.wait(sequence), sequence.table, self.cache.retention
        num_private = len(table.pages) - table.num_indexed
        weight = self.random.choice([1.0, 1.0, math.inf])
        run = retention.add(table.node, num_private, weight, self.now + 20, self.now)
        self.cache.free(table, sequence.tokens, written, self.now, wait=wait)
        if run is not None:
            retention.attach(run, wait)

    def retain_prefix(self) -> None:
        match = self.cache.index.find("a", pack_tokens(self.text()))
        if match is not None and match.num_pages:
            node = self.cache.index.node_for(match)
            weight = self.random.choice([2.0, math.inf])
            self.cache.retention.retain_prefix(node, weight, self.now + 10, self.now)

    def wait(self, sequence: Sequence) -> Wait:
        """A sequence has one wait at a time."""
        seq = sequence.table.seq
        self.end_wait(seq)
        self.waits[seq] = Wait(seq, self.random.choice("ab"), "chat", self.now, is_open=False)
        return self.waits[seq]

    def end_wait(self, seq: int) -> None:
        wait = self.waits.pop(seq, None)
        if wait is not None:
            self.cache.retention.supersede(wait, self.now)

    def written(self, sequence: Sequence) -> int:
        """Tokens whose write is done: nothing of a step in flight."""
        ends = [e for commits in self.pending_commits.values() for s, e in commits if s is sequence]
        starts = [sequence.computed if not ends else 0]
        return min(starts)

    def fork(self) -> None:
        parent = self.random.choice(list(self.sequences.values()))
        child = Sequence(self.cache.fork(parent.table, self.next_seq), list(parent.tokens))
        child.computed = parent.computed
        self.next_seq += 1
        self.sequences[child.table.seq] = child

    def truncate(self) -> None:
        sequence = self.random.choice(list(self.sequences.values()))
        keep = self.random.randrange(0, len(sequence.tokens))
        if any(s is sequence for commits in self.pending_commits.values() for s, _ in commits):
            return
        del sequence.tokens[keep + 1 :]
        sequence.computed = min(sequence.computed, keep)
        self.cache.truncate(sequence.table, sequence.computed, self.now)

    def act(self) -> None:
        self.now += 1
        self.go_on_returning()
        choice = self.random.random()
        if choice < 0.3 or not self.sequences:
            self.open()
        elif choice < 0.65:
            self.launch()
        elif choice < 0.75:
            self.fork()
        elif choice < 0.82:
            self.truncate()
        elif choice < 0.87:
            self.park()
        elif choice < 0.95:
            self.free(self.random.choice(list(self.sequences.values())))
        elif choice < 0.98:
            self.retain_prefix()
        elif choice < 0.985:
            self.cache.retention.break_pin(self.random.randrange(1, 4), self.now)
        else:
            self.cache.retention.expire(self.now)
            if self.waits:
                self.end_wait(self.random.choice(list(self.waits)))

    def check(self) -> None:
        check_integrity(self.cache, [s.table for s in self.sequences.values()])

    def drain(self) -> None:
        """Run everything in flight and compare what every table reads with what its sequence computed."""
        self.in_flight.append((self.step + 1, [], self.cache.take_copies()))
        self.step += 1
        self.pending_commits[self.step] = []
        self.cache.tiers.copies.launched = self.step
        while self.in_flight:
            self.complete()
        for sequence in self.sequences.values():
            for position in range(sequence.computed):
                page = sequence.table.pages[position // PAGE]
                assert self.device[page][position % PAGE] == sequence.tokens[position]


@pytest.mark.parametrize("policy", sorted(RANKERS))
@pytest.mark.parametrize(("device_pages", "host_pages"), [(24, 0), (24, 16), (60, 8), (200, 100)])
@pytest.mark.parametrize("seed", range(12))
def test_every_table_reads_its_own_tokens(seed: int, device_pages: int, host_pages: int, policy: str) -> None:
    bench = Bench(seed, device_pages, host_pages, policy)
    for turn in range(400):
        bench.act()
        bench.check()
        if turn % 20 == 0:
            bench.drain()
            bench.check()
    for sequence in list(bench.sequences.values()):
        bench.free(sequence)
    bench.drain()
    bench.cache.retention.expire(float("inf"))
    bench.cache.reset(bench.now)
    bench.drain()
    bench.check()
    assert bench.cache.tiers.device.num_free == device_pages
    assert bench.cache.tiers.host.num_free == host_pages
    assert not bench.cache.trees()
