"""What tenants and the server let programs hold and use: nothing beyond a cap, and nothing kept after any ending."""

import functools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.abi.errors import InvalidRequest, LimitExceeded, OutOfPages, Overloaded
from weft.config import ProgramsConfig
from weft.core.clock import ManualClock
from weft.programs.quota.account import NoPlace
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import Limits
from weft.programs.quota.machine_memory import machine_memory_bytes
from weft.programs.quota.rates import TokenBucket

MB = 1 << 20
SMALL = Limits(memory_bytes=10 * MB)


def test_a_sandbox_reserves_what_it_may_grow_to() -> None:
    accounts = Accounts(ProgramsConfig(max_sandbox_bytes=50 * MB, max_sandbox_bytes_per_tenant=30 * MB))
    runs = [accounts.open("t", SMALL) for _ in range(3)]
    with pytest.raises(NoPlace, match=r"this tenant.*max_sandbox_bytes_per_tenant") as raised:
        accounts.open("t", SMALL)
    assert isinstance(raised.value, Overloaded)
    assert not raised.value.everybody
    others = [accounts.open("u", SMALL) for _ in range(2)]
    with pytest.raises(NoPlace, match=r"this server.*max_sandbox_bytes\)") as raised:
        accounts.open("v", Limits(memory_bytes=1))
    assert raised.value.everybody
    accounts.open("v", SMALL, sandboxed=False).close()
    runs[0].close()
    runs[0].close()
    accounts.open("t", SMALL).close()
    for budget in (*runs, *others):
        budget.close()
    assert (accounts._server.sandbox_bytes, accounts.num_programs, len(accounts._tenants)) == (0, 0, 0)


def test_children_have_sandboxes_of_their_own() -> None:
    accounts = Accounts(ProgramsConfig(max_sandbox_bytes_per_tenant=25 * MB))
    run = accounts.open("t", SMALL)
    child = run.child(Limits(memory_bytes=100 * MB))
    assert child.limits.memory_bytes == 10 * MB
    with pytest.raises(Overloaded, match="max_sandbox_bytes_per_tenant"):
        child.child(SMALL)
    assert run.used.children == 1
    child.without_sandbox()
    grandchild = child.child(SMALL)
    assert accounts._server.sandbox_bytes == 20 * MB
    for budget in (grandchild, child, run):
        budget.close()
    assert accounts._server.sandbox_bytes == 0


def test_a_sandbox_that_never_has_a_place_is_the_callers_mistake() -> None:
    accounts = Accounts(ProgramsConfig(max_sandbox_bytes=50 * MB, max_sandbox_bytes_per_tenant=30 * MB))
    accounts.check_possible("t", Limits(memory_bytes=30 * MB))
    with pytest.raises(InvalidRequest, match="this tenant") as raised:
        accounts.check_possible("t", Limits(memory_bytes=30 * MB + 1))
    assert raised.value.param == "limits.memory_bytes"


def test_a_bucket_owes_what_was_used_beyond_it() -> None:
    bucket = TokenBucket(60, now=0)
    bucket.spend(60, 0)
    assert bucket.wait_s(0) == 0
    bucket.spend(30, 0)
    assert bucket.wait_s(0) == 30
    assert bucket.wait_s(20) == 10
    assert bucket.wait_s(30) == 0
    assert not bucket.is_full(89)
    assert bucket.is_full(90)
    bucket.spend(0, 1000)
    assert bucket.level(1000) == 60


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 200)), max_size=50))
def test_over_any_time_no_more_than_the_rate_and_one_minute(steps: list[tuple[float, float]]) -> None:
    bucket, now, used, last = TokenBucket(100, now=0), 0.0, 0.0, 0.0
    for pause_s, amount in steps:
        now += pause_s
        if bucket.wait_s(now) == 0:
            bucket.spend(amount, now)
            used, last = used + amount, amount
        assert used - last <= 100 + now * 100 / 60 + 1e-6


@pytest.mark.parametrize("name", ["cpu_s", "host_calls", "tokens"])
def test_a_rate_is_of_the_tenant_and_of_children_too(name: str) -> None:
    clock = ManualClock()
    accounts = Accounts(ProgramsConfig(**{f"tenant_{name}_per_minute": 60}), clock)
    run, other = accounts.open("t", Limits(cpu_s=1000)), accounts.open("u", Limits())
    child = run.child(Limits(cpu_s=1000))
    for budget in (run, child):
        spend = functools.partial(budget.spend, name)
        assert run.wait() is None
        spend(3)
        spend(30)
    assert run.wait() == child.wait() == (name, 60, 6)
    assert f"programs.tenant_{name}_per_minute" in str(run.wait())
    assert other.wait() is None
    with pytest.raises(NoPlace, match=name) as raised:
        accounts.open("t", Limits())
    assert (raised.value.in_time, raised.value.everybody, raised.value.retry_after_s) == (True, False, 6)
    # It is not forgotten with the tenant's last program, but it is once it makes no difference.
    for budget in (child, run, other):
        budget.close()
    assert len(accounts._tenants) == 1
    with pytest.raises(NoPlace):
        accounts.open("t", Limits())
    clock.advance(6)
    accounts.open("t", Limits()).close()
    clock.advance(60)
    accounts.open("v", Limits()).close()
    assert len(accounts._tenants) == 0


def test_time_spent_outside_of_runs_is_of_the_rate_too() -> None:
    clock = ManualClock()
    accounts = Accounts(ProgramsConfig(tenant_cpu_s_per_minute=60), clock)
    accounts.charge("t", 63)
    with pytest.raises(NoPlace, match="tenant_cpu_s_per_minute") as raised:
        accounts.open("t", Limits())
    assert raised.value.retry_after_s == 3
    clock.advance(100)
    accounts.open("u", Limits()).close()
    assert len(accounts._tenants) == 0
    Accounts().charge("t", 10**9)  # without a rate, nothing is kept


def test_without_rates_nothing_is_asked() -> None:
    run = Accounts().open("t", Limits())
    assert not run.is_rated
    run.spend("tokens", 10**9)
    assert run.wait() is None


def test_a_tenant_has_a_share_of_explicit_pages() -> None:
    config = ProgramsConfig(
        tenant_pages_fraction=0.5, tenants=["u.tenant_pages_fraction=0.25", "v.tenant_pages_fraction=1"]
    )
    shares = [Accounts(config).open(tenant, Limits()).explicit_pages(90) for tenant in ("t", "u", "v")]
    assert shares == [45, 22, None]


STEP = st.tuples(
    st.sampled_from(["open", "child", "trust", "take", "give", "pages", "tokens", "close", "pass"]),
    st.integers(0, 9),
    st.sampled_from(["t", "u"]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_accounts_add_up(steps: list[tuple[str, int, str]]) -> None:
    """Whatever is opened, refused and closed: what is counted is what is held, and within the caps."""
    config = ProgramsConfig(
        max_runs=8,
        max_runs_per_tenant=6,
        max_sandbox_bytes=30,
        max_sandbox_bytes_per_tenant=20,
        max_pages_per_tenant=12,
        tenant_tokens_per_minute=600,
    )
    clock = ManualClock()
    accounts = Accounts(config, clock)
    alive: list[tuple[RunBudget, str]] = []
    bytes_of: dict[RunBudget, int] = {}
    held: Counter[RunBudget] = Counter()
    tokens: Counter[str] = Counter()
    for what, amount, tenant in steps:
        budget, owner = alive[amount % len(alive)] if alive else (None, "")
        try:
            if what == "open":
                made = accounts.open(tenant, Limits(memory_bytes=amount))
                alive.append((made, tenant))
                bytes_of[made] = amount
            elif budget is None:
                continue
            elif what == "child":
                made = budget.child(Limits(memory_bytes=amount))
                alive.append((made, owner))
                bytes_of[made] = made.limits.memory_bytes
            elif what == "trust":
                budget.without_sandbox()
                bytes_of[budget] = 0
            elif what == "take":
                budget.take_pages(amount)
                held[budget] += amount
            elif what == "give":
                count = min(amount, held[budget])
                budget.give_pages(count)
                held[budget] -= count
            elif what == "tokens":
                budget.spend("tokens", 100 * amount)
                tokens[owner] += 100 * amount
            elif what == "pass":
                clock.advance(1)
                tokens.subtract({name: min(10, tokens[name]) for name in ("t", "u")})
            elif what == "close" and not budget.used.children:
                for _ in range(1 + amount % 2):
                    budget.close()
                alive.remove((budget, owner))
                bytes_of.pop(budget)
                held.pop(budget, None)
        except (Overloaded, LimitExceeded, OutOfPages):
            pass
        assert accounts.num_programs == len(alive) <= 8
        assert accounts._server.sandbox_bytes == sum(bytes_of.values()) <= 30
        assert accounts.num_pages == held.total()
        for name in ("t", "u"):
            mine = [budget for budget, owner in alive if owner == name]
            assert len(mine) <= 6
            assert sum(bytes_of[budget] for budget in mine) <= 20
            assert sum(held[budget] for budget in mine) <= 12
            for budget in mine:
                wait = budget.wait()
                assert (0 if wait is None else wait.seconds) == pytest.approx(max(0, tokens[name] - 600) / 10)
    for budget, _ in reversed(alive):
        budget.close()
    clock.advance(10**6)
    accounts.open("v", Limits(memory_bytes=0)).close()
    assert (accounts.num_programs, accounts._server.sandbox_bytes, accounts.num_pages, len(accounts._tenants)) == (
        0,
        0,
        0,
        0,
    )


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (cgroups / "a" / "b").mkdir(parents=True)
    whole = machine_memory_bytes(proc, cgroups)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    (cgroups / "a" / "b" / "memory.max").write_text("max\n")
    assert machine_memory_bytes(proc, cgroups) == whole
    (cgroups / "a" / "memory.max").write_text("1000\n")
    assert machine_memory_bytes(proc, cgroups) == 1000
    (cgroups / "memory.max").write_text("900\n")
    (proc / "self" / "cgroup").write_text("0::/outside\n")
    assert machine_memory_bytes(proc, cgroups) == 900


def test_a_tenant_that_is_forgotten_is_so_everywhere() -> None:
    """It rested with a rate that was not full, and is charged when it is."""
    clock = ManualClock()
    accounts = Accounts(ProgramsConfig(tenant_tokens_per_minute=60), clock)
    budget = accounts.open("a", SMALL)
    budget.spend("tokens", 61)
    budget.close()
    assert set(accounts._idle) == {"a"}
    clock.advance(120)
    accounts.charge("a", 1.0)
    accounts.check_possible("b", SMALL)
    assert not accounts._idle
    assert not accounts._tenants
