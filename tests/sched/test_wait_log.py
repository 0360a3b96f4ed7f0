"""What is counted of waits: where the KV was at their end, where it went, and how long they were expected to take."""

from __future__ import annotations

import math

import pytest

from tests.engine.driver import Driver
from tests.engine.test_interception import Clients, turn
from weft.cache.candidates import MAX_KINDS, Candidates
from weft.cache.nodes import Node, Wait
from weft.cache.runs import PageRuns, Ranking, least_recently_used
from weft.core import wire
from weft.core.waits import MAX_KIND_CHARS, OTHER, WaitKind, label_of, tool_wait
from weft.sched.policies import POLICIES, make_policy
from weft.sched.policies.lru import LruPolicy
from weft.sched.policies.wait_samples import ENOUGH
from weft.sched.wait_log import PastWait, WaitLog


def test_every_kind_that_weft_announces_has_a_label() -> None:
    assert [label_of(kind) for kind in WaitKind] == [kind.value for kind in WaitKind]
    assert OTHER not in set(WaitKind)
    assert label_of("calculator") == label_of("calculator:tools") == OTHER


def test_a_tool_has_a_kind_of_its_own_and_is_counted_with_the_others() -> None:
    assert tool_wait(["read", "read"]) == "tools:read"
    assert tool_wait(["read", "edit"]) == tool_wait([]) == WaitKind.TOOLS
    assert len(tool_wait(["x" * 64])) == MAX_KIND_CHARS
    assert label_of(tool_wait(["read"])) == WaitKind.TOOLS


def test_waits_are_compared_with_what_was_expected_when_they_began() -> None:
    policy, log = make_policy("min_waste", "learned"), WaitLog()
    for _ in range(ENOUGH):
        log.past.append(PastWait("t", "chat", 10.0, math.nan))
    log.tell(policy)
    assert not log.ratios, "nothing was expected before anything was learned"
    assert not log.past
    waits = (
        ("t", "chat", 20.0, math.nan),
        ("t", "chat", 5.0, math.nan),
        ("t", "sleep", 3.0, 1.5),
        ("u", "own", 4.0, 40.0),
    )
    log.past.extend(PastWait(*wait) for wait in waits)
    log.past.append(PastWait("t", "chat", 1.0, math.nan, has_ended=False))
    log.tell(policy)
    assert {label: (ratios.count, ratios.total) for label, ratios in log.ratios.items()} == {
        "chat": (2, pytest.approx(2.0 + 0.5)),
        "sleep": (1, pytest.approx(2.0)),
        "other": (1, pytest.approx(0.1)),
    }


def test_a_policy_that_expects_nothing_is_told_of_waits_all_the_same() -> None:
    told = []

    class Noting(LruPolicy):
        def observe(
            self, tenant: str, kind: str, wait_s: float, *, ended: bool = True, since_s: float = math.nan
        ) -> None:
            told.append((tenant, kind, wait_s))

    log = WaitLog()
    log.past.append(PastWait("t", "chat", 2.0, 1.0))
    log.tell(Noting())
    log.tell(Noting())
    assert told == [("t", "chat", 2.0)]
    assert not log.ratios


def test_labels_are_few_however_many_kinds_a_client_invents() -> None:
    driver = Driver(num_device_pages=24, page_size=16, max_context=300)
    for index in range(300):
        turn(driver, [index % 500, *range(60)], 1)
        number = driver.open([index % 500] * 40, namespace="")
        driver.generate(number, 1, eos=False)
        driver.run()
        driver.end_turn(number, f"kind{index}")
    stats = driver.engine.stats()
    for counts in (stats.wait_returns, stats.pages_given_up, stats.wait_ratio):
        assert counts.keys() <= {*WaitKind, OTHER}
    assert stats.pages_given_up[OTHER]["nowhere"] > 100
    candidates = driver.engine.cache.tiers.candidates
    assert len(candidates._kinds.names) <= MAX_KINDS
    driver.finish()


def test_candidates_count_kinds_past_the_limit_as_one() -> None:
    seen: list[PageRuns] = []

    def rank(runs: PageRuns, now: float) -> Ranking:
        seen.append(runs)
        return least_recently_used(runs, now)

    candidates, root = Candidates(rank, 4, 1000), Node(0, None, b"", 0, 16, 0.0)
    for number in range(1, MAX_KINDS + 50):
        node = Node(number, root, bytes(16), 1, 16, 0.0)
        Wait(number, "", f"kind{number}", 0.0, is_open=False).attach(node)
        candidates.add(node)
    candidates.first(0.0)
    [runs] = seen
    assert len(runs.kinds) == MAX_KINDS
    found = [runs.kinds[kind] for kind in runs.kind]
    assert found.count(OTHER) == 49 + 4, "beside prefixes, runs of no use, the queue and itself"
    assert {"kind1", "kind252"} < set(found)
    assert "kind253" not in found
    assert candidates.awaited_pages(MAX_KINDS + 49) == MAX_KINDS + 49


def test_returns_are_counted_by_where_their_kv_was() -> None:
    driver = Driver(num_device_pages=24, page_size=16, intercept=make_policy("lru"), max_context=600)
    tokens, _ = turn(driver, list(range(100)), 4)
    more, _ = turn(driver, [*tokens, 3], 1)
    turn(driver, [*tokens, 4], 1)  # a retry: the turn has been continued already
    assert driver.engine.stats().wait_returns == {"chat": {"kept": 1}}
    turn(driver, [60] * 383, 1, "pressure")
    turn(driver, [*more, 9], 1)
    assert driver.engine.stats().wait_returns == {"chat": {"kept": 1, "recomputed": 1}}
    number = driver.open(list(range(300)), namespace="program")
    driver.generate(number, 4, eos=False)
    driver.run()
    driver.generate(number, 1, eos=False)
    driver.run()
    turn(driver, [61] * 383, 1, "pressure")
    driver.generate(number, 1, eos=False)
    driver.run()
    stats = driver.engine.stats()
    assert stats.wait_returns["program"] == {"kept": 1, "recomputed": 1}
    assert {"chat", "program"} <= stats.pages_given_up.keys()
    assert all(counts.keys() == {"nowhere"} for counts in stats.pages_given_up.values())
    driver.finish()


def test_returns_from_the_host_are_counted_apart() -> None:
    driver = Driver(num_device_pages=24, num_host_pages=64, page_size=16, max_context=600)
    tokens, _ = turn(driver, list(range(200)), 4)
    turn(driver, [60] * 383, 1, "pressure")
    turn(driver, [*tokens, 3], 1)
    number = driver.open(list(range(300)), namespace="program")
    driver.send(wire.Expect(seq=number, kind="http"))
    driver.generate(number, 4, eos=False)
    driver.run()
    driver.send(wire.Expect(seq=number, kind="http"))
    turn(driver, [60] * 383, 1, "pressure")
    driver.generate(number, 1, eos=False)
    driver.run()
    stats = driver.engine.stats()
    assert stats.wait_returns == {"chat": {"host": 1}, "http": {"host": 1}}
    assert stats.pages_given_up["http"]["host"] > 10
    driver.finish()


def test_numbers_of_kinds_that_no_candidate_has_are_used_again() -> None:
    seen: list[PageRuns] = []

    def rank(runs: PageRuns, now: float) -> Ranking:
        seen.append(runs)
        return least_recently_used(runs, now)

    candidates, root = Candidates(rank, 4, 1000), Node(0, None, b"", 0, 16, 0.0)
    staying: Node | None = None
    for number in range(1, 3 * MAX_KINDS):
        node = Node(number, root, bytes(16), 1, 16, 0.0)
        Wait(number, "", f"kind{number}", 0.0, is_open=False).attach(node)
        candidates.add(node)
        if staying is None:
            staying = node
        elif number < 3 * MAX_KINDS - 1:
            candidates.discard(node)
    candidates.first(0.0)
    runs = seen[-1]
    assert sorted(runs.kinds[kind] for kind in runs.kind) == ["kind1", f"kind{3 * MAX_KINDS - 1}"]
    assert runs.kinds[:4] == ("prefix", "unused", "queue", OTHER)
    assert len(runs.kinds) <= MAX_KINDS


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_counts_of_random_clients_agree_with_the_pages(policy: str) -> None:
    driver = Driver(
        5,
        page_size=8,
        max_context=256,
        num_slots=6,
        intercept=make_policy(policy),
        num_device_pages=24,
        num_host_pages=7,
    )
    clients = Clients(driver, len(policy))
    for _ in range(200):
        clients.act()
    driver.run()
    stats = driver.engine.stats()
    given_up = [sum(counts.get(to, 0) for counts in stats.pages_given_up.values()) for to in ("host", "nowhere")]
    assert given_up[0] <= stats.evictions
    assert sum(given_up) > 20
    returns = {found for counts in stats.wait_returns.values() for found in counts}
    assert returns <= {"kept", "host", "recomputed"}
    assert "recomputed" in returns
    driver.finish()
