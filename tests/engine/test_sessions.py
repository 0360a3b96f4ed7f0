"""Which sequences wait, for what, and where their KV is, as an engine lists them."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from tests.engine.test_interception import SIZES, Clients, turn
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.core.waits import COHORT_TOKENS, of_cohort
from weft.sched.closed_waits import MIN_PRUNED
from weft.sched.policies import POLICIES, make_policy
from weft.sched.policies.wait_samples import ENOUGH


def listed(driver: Driver, tenant: str = "", limit: int = 1000) -> list[wire.SessionInfo]:
    answer = driver.engine.sessions(wire.ListSessions(query=3, tenant=tenant, limit=limit))
    assert answer.query == 3
    assert len(answer.sessions) == min(limit, answer.total)
    assert [info.waited_s for info in answer.sessions] == sorted((i.waited_s for i in answer.sessions), reverse=True)
    return answer.sessions


def where(info: wire.SessionInfo) -> tuple[int, int, int]:
    return info.device_tokens, info.host_tokens, info.gone_tokens


def test_what_waits_is_listed_with_what_it_waits_for_and_since_when() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    assert listed(driver) == []
    driver.send(
        wire.Open(seq=1, request_id="mine"),
        wire.Append(seq=1, op=2, tokens=pack_tokens(range(40))),
        wire.Generate(seq=1, op=3),
        wire.Open(seq=4, tenant="other", namespace="other"),
        wire.Append(seq=4, op=5, tokens=pack_tokens(range(40))),
    )
    assert [(info.state, info.kind, info.request_id) for info in listed(driver)] == [("queued", "queue", "mine")]
    driver.step()
    assert listed(driver) == [], "it runs"
    driver.run()
    driver.send(wire.Expect(seq=1, kind="http", expected_in_s=5.0))
    driver.clock.advance(2.0)
    [info] = listed(driver)
    length = info.num_tokens
    assert (info.state, info.kind, info.expected_in_s) == ("intercepted", "http", 3.0)
    assert info.waited_s == pytest.approx(2.0, abs=0.05)
    assert where(info) in ((length, 0, 0), (length - 1, 0, 0))
    [other] = listed(driver, "other")
    assert (other.num_tokens, other.kind, where(other)) == (40, "program", (39, 0, 0))
    driver.send(wire.Release(seq=1, kind="chat", expected_in_s=1.0))
    driver.clock.advance(2.0)
    [info] = listed(driver)
    assert (info.state, info.kind, info.request_id) == ("finished", "chat", "mine")
    assert info.waited_s == pytest.approx(2.0)
    driver.send(wire.Release(seq=4))
    assert listed(driver, "other") == [], "it does not come back"


def expected(driver: Driver, tenant: str = "") -> list[tuple[float | None, str | None]]:
    return [
        (None if info.expected_in_s is None else round(info.expected_in_s, 6), info.expected_by)
        for info in listed(driver, tenant)
    ]


def wait_for(driver: Driver, tokens: list[int], count: int, seconds: float) -> list[int]:
    """Continue a turn so many times, each after so many seconds."""
    for _ in range(count):
        tokens, _ = turn(driver, [*tokens, 3], 1)
        driver.clock.advance(seconds)
    return tokens


@pytest.mark.parametrize(
    ("estimator", "unknown", "known"),
    [
        ("learned", (3.0, "elapsed"), (7.0, "learned")),
        ("elapsed", (3.0, "elapsed"), (3.0, "elapsed")),
        ("oracle", (3.0, "elapsed"), (3.0, "elapsed")),
    ],
)
def test_the_policy_predicts_returns_that_nobody_announces(
    estimator: str, unknown: tuple[float, str], known: tuple[float, str]
) -> None:
    driver = Driver(num_device_pages=64, page_size=16, max_context=400, intercept=make_policy("min_waste", estimator))
    tokens, _ = turn(driver, list(range(40)), 1)
    driver.clock.advance(3.0)
    assert expected(driver) == [unknown]
    driver.clock.advance(7.0)
    tokens = wait_for(driver, tokens, ENOUGH, 10.0)
    turn(driver, [*tokens, 3], 1)
    driver.clock.advance(3.0)
    assert expected(driver) == [known]
    driver.clock.advance(17.0)
    assert expected(driver) == [(20.0, "elapsed")], "none of the waits that are known took so long"
    driver.finish()


@pytest.mark.parametrize(
    ("policy", "overdue", "unannounced"),
    [("min_waste", (5.0, "learned"), (5.0, "learned")), ("lru", (0.0, "announced"), (None, None))],
)
def test_an_announced_return_counts_until_it_is_overdue(
    policy: str, overdue: tuple[float, str], unannounced: tuple[float | None, str | None]
) -> None:
    chooser = make_policy(policy)
    for _ in range(ENOUGH):
        chooser.observe("", "chat", 10.0)
    driver = Driver(num_device_pages=64, page_size=16, intercept=chooser)
    for seq in (1, 2):
        driver.send(
            wire.Open(seq=seq),
            wire.Append(seq=seq, op=10 + seq, tokens=pack_tokens([seq] * 40)),
            wire.Generate(seq=seq, op=20 + seq, stop=StopParams(max_tokens=1)),
        )
    driver.run()
    driver.send(wire.Release(seq=1, kind="chat", expected_in_s=4.0), wire.Release(seq=2, kind="chat"))
    driver.clock.advance(2.0)
    assert expected(driver)[0] == (2.0, "announced")
    driver.clock.advance(3.0)
    assert expected(driver) == [overdue, unannounced]


def test_a_turn_is_predicted_from_the_waits_of_its_cohort() -> None:
    chooser, tokens = make_policy("min_waste"), list(range(COHORT_TOKENS))
    for wait in range(ENOUGH):
        chooser.observe("", "chat", 10.0, ended=wait > 0)
    for _ in range(ENOUGH):
        chooser.observe("", of_cohort("chat", pack_tokens(tokens)), 50.0)
    driver = Driver(num_device_pages=64, page_size=16, max_context=400, intercept=chooser)
    turn(driver, tokens, 1)
    driver.clock.advance(3.0)
    assert expected(driver) == [(47.0, "learned")]


@pytest.mark.parametrize(
    ("kind", "told"), [("tools:deploy", (3.0, "elapsed")), ("tools", (7.0, "learned")), ("chat", (7.0, "learned"))]
)
def test_a_tenant_is_not_told_how_long_a_tool_of_the_same_name_takes_others(kind: str, told: tuple[float, str]) -> None:
    def released(learned_from: str) -> list[tuple[float | None, str | None]]:
        chooser = make_policy("min_waste")
        for _ in range(ENOUGH):
            chooser.observe(learned_from, kind, 10.0)
        driver = Driver(num_device_pages=64, page_size=16, intercept=chooser)
        driver.send(
            wire.Open(seq=1, tenant="quiet"),
            wire.Append(seq=1, op=10, tokens=pack_tokens([1] * 40)),
            wire.Generate(seq=1, op=20, stop=StopParams(max_tokens=1)),
        )
        driver.run()
        driver.send(wire.Release(seq=1, kind=kind))
        driver.clock.advance(3.0)
        return expected(driver, "quiet")

    assert released("other") == [told]
    assert released("quiet") == [(7.0, "learned")]


def test_nothing_is_expected_of_what_waits_for_the_device() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    driver.generate(driver.open(list(range(40)), namespace=""), 1)
    assert [info.state for info in listed(driver)] == ["queued"]
    assert expected(driver) == [(None, None)]
    driver.run()
    tokens, _ = turn(driver, list(range(50, 90)), 1)
    driver.generate(driver.open([7] * 40, namespace=""), 50, eos=False)
    driver.step()
    driver.generate(driver.open([*tokens, 3], namespace=""), 1)
    driver.clock.advance(5.0)
    by_state = {info.state: info.expected_by for info in listed(driver)}
    assert by_state == {"queued": None, "finished": None, "intercepted": "elapsed"}


@pytest.mark.parametrize(("pressure", "expected"), [(250, (128, 75, 0)), (300, (80, 0, 123))])
def test_tokens_are_told_by_where_their_kv_is(pressure: int, expected: tuple[int, int, int]) -> None:
    driver = Driver(num_device_pages=24, num_host_pages=6, page_size=16, max_context=400)
    tokens, _ = turn(driver, list(range(200)), 4)
    [info] = listed(driver)
    assert (info.num_tokens, where(info)) == (204, (203, 0, 0))
    turn(driver, [60] * pressure, 1, "pressure")
    [info] = [info for info in listed(driver) if info.num_tokens == 204]
    assert where(info) == expected
    _, usage = turn(driver, [*tokens, 3], 1)
    assert usage.num_cached_tokens - usage.num_host_tokens == info.device_tokens
    assert usage.num_cached_tokens + usage.num_recomputed_tokens == 203
    assert (usage.num_host_tokens > 0) == (info.host_tokens > 0), "on a full host, its last page goes as it returns"
    driver.finish()


def test_a_list_is_bounded_and_says_how_many_there_are() -> None:
    driver = Driver(num_device_pages=256, page_size=16)
    for index in range(12):
        turn(driver, [index] * 20, 1)
        driver.clock.advance(1.0)
    answer = driver.engine.sessions(wire.ListSessions(query=1, tenant="", limit=5))
    assert (len(answer.sessions), answer.total) == (5, 12)
    assert answer.sessions[0].waited_s > answer.sessions[-1].waited_s >= 7.0
    driver.finish()


def test_ended_waits_are_not_kept() -> None:
    driver = Driver(num_device_pages=24, page_size=16, max_context=300)
    for index in range(3 * MIN_PRUNED):
        turn(driver, [index % 900, 7, *[index % 7] * 30], 1)
    assert len(driver.engine.scheduler._state.interception.closed._waits) <= MIN_PRUNED
    assert 0 < len(listed(driver)) <= 24
    driver.finish()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("size", sorted(SIZES))
def test_lists_of_random_clients_agree_with_what_there_is(policy: str, size: str) -> None:
    driver = Driver(9, page_size=8, max_context=256, num_slots=6, intercept=make_policy(policy), **SIZES[size])
    clients = Clients(driver, len(policy) + len(size))
    states, residencies = set(), [0, 0, 0]
    for _ in range(150):
        clients.act()
        sequences = {sequence.seq: sequence for sequence in driver.engine.scheduler.sequences}
        for info in listed(driver):
            states.add(info.state)
            assert min(where(info)) >= 0
            assert sum(where(info)) <= info.num_tokens
            residencies = [a + b for a, b in zip(residencies, where(info), strict=True)]
            assert (info.id in sequences) == (info.state != "finished")
            if info.state == "intercepted" and sequences[info.id].wait is None:
                assert info.device_tokens == min(sequences[info.id].num_computed, info.num_tokens)
    assert states >= {"intercepted", "queued"}
    assert residencies[0] > 0
    assert residencies[2] > 0
    driver.finish()
