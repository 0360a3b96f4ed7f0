"""What runs may use: limits within limits, and a tree of budgets that adds up whatever is done to it."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.abi.errors import InvalidRequest, LimitExceeded, OutOfPages, Overloaded
from weft.config import ProgramsConfig
from weft.core.clock import ManualClock
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.limits import LIMITS, Limits, Spent, limits_from_json


def test_a_child_gets_what_is_left() -> None:
    clock = ManualClock()
    run = Accounts(clock=clock).open("t", Limits(tokens=100, pages=10, cpu_s=5, wall_s=60, host_calls=50, depth=3))
    run.spend("tokens", 30)
    run.take_pages(4)
    run.spend("cpu_s", 1.5)
    run.spend("host_calls", 10)
    clock.advance(20)
    left = run.remaining()
    assert (left.tokens, left.pages, left.cpu_s, left.wall_s, left.host_calls) == (70, 6, 3.5, 40, 40)
    child = run.child(Limits(tokens=1000, cpu_s=1, pages=None))
    assert (child.limits.tokens, child.limits.cpu_s, child.limits.pages) == (70, 1, 6)
    assert child.limits.depth == 2
    assert (run.wall_left_s, child.wall_left_s) == (40, 40)
    assert (run.wall_limit_s, child.wall_limit_s, run.child(Limits(wall_s=1)).wall_limit_s) == (60, 60, 1)
    child.spend("tokens", 50)
    assert run.remaining().tokens == 20
    # Two children share what is left: the second's own limit does not help it.
    other = run.child(Limits(tokens=20))
    child.spend("tokens", 15)
    assert other.remaining().tokens == 5
    with pytest.raises(LimitExceeded) as raised:
        other.spend("tokens", 6)
    assert raised.value.param == "tokens"


@pytest.mark.parametrize("name", ["cpu_s", "host_calls", "tokens", "log_bytes"])
def test_what_is_used_up_names_its_limit(name: Spent) -> None:
    root = Accounts().open("t", Limits(**{name: 3}))
    for run in (root, root.child(Limits())):
        spend = functools.partial(run.spend, name)
        if run is root:
            spend(3)
        with pytest.raises(LimitExceeded, match=f"{name} of 3") as raised:
            spend(1)
        assert raised.value.param == name


def test_every_limit_of_a_run_is_in_the_table() -> None:
    assert LIMITS.keys() == set(Limits.__struct_fields__) - {"network"}


def test_refused_pages_are_not_taken() -> None:
    accounts = Accounts(ProgramsConfig(max_pages=6, max_pages_per_tenant=5))
    run = accounts.open("t", Limits(pages=4))
    run.take_pages(4)
    with pytest.raises(LimitExceeded, match="4"):
        run.take_pages(1)
    same = accounts.open("t", Limits())
    with pytest.raises(OutOfPages, match="tenant"):
        same.take_pages(2)
    other = accounts.open("u", Limits())
    with pytest.raises(OutOfPages, match="server"):
        other.take_pages(3)
    other.take_pages(2)
    assert accounts.num_pages == 6
    for budget in (run, same, other, run):
        budget.close()
    assert (accounts.num_pages, accounts.num_programs) == (0, 0)


def test_programs_of_a_tenant_count_with_their_children() -> None:
    accounts = Accounts(ProgramsConfig(max_runs_per_tenant=3))
    run = accounts.open("t", Limits())
    child = run.child(Limits())
    child.child(Limits())
    with pytest.raises(Overloaded):
        run.child(Limits())
    with pytest.raises(Overloaded):
        accounts.open("t", Limits())
    accounts.open("u", Limits())
    child.close()
    child.close()
    run.child(Limits())
    assert accounts.num_programs == 4


def test_limits_from_json() -> None:
    left = Limits(tokens=10, network=["a.com"])
    assert limits_from_json(b"{}", left) == left
    assert limits_from_json(b'{"tokens": 5, "cpu_s": 100}', left).tokens == 5
    assert limits_from_json(b'{"tokens": null}', left).tokens == 10
    assert limits_from_json(b'{"network": ["b.com"]}', left).network == []
    for wrong in (
        b"[]",
        b'{"x": 1}',
        b'{"tokens": -1}',
        b'{"tokens": "5"}',
        b'{"cpu_s": 1e999}',
        b"{",
        b'{"network": ["*x"]}',
    ):
        with pytest.raises(InvalidRequest):
            limits_from_json(wrong, left)
    with pytest.raises(InvalidRequest):
        Limits(cpu_s=math.nan)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["child", "take", "give", "spend", "close"]), st.integers(0, 7)), max_size=60)
)
def test_budgets_add_up(steps: list[tuple[str, int]]) -> None:
    accounts = Accounts(ProgramsConfig(max_pages=40))
    tree: list[tuple[RunBudget, int | None]] = [(accounts.open("t", Limits(pages=30, tokens=50, children=5)), None)]
    own_pages, own_tokens, closed = [0], [0], [False]
    for what, which in steps:
        index = which % len(tree)
        budget, _ = tree[index]
        if closed[index]:
            continue
        try:
            if what == "child":
                tree.append((budget.child(Limits(pages=20)), index))
                own_pages.append(0)
                own_tokens.append(0)
                closed.append(False)
            elif what == "take":
                budget.take_pages(which)
                own_pages[index] += which
            elif what == "give":
                count = min(which, own_pages[index])
                budget.give_pages(count)
                own_pages[index] -= count
            elif what == "spend":
                own_tokens[index] += which
                budget.spend("tokens", which)
            elif not any(above == index and not closed[i] for i, (_, above) in enumerate(tree)) and index:
                budget.close()
                closed[index], own_pages[index] = True, 0
        except (LimitExceeded, OutOfPages):
            pass

        def below(index: int) -> list[int]:
            return [index, *(n for i, (_, above) in enumerate(tree) if above == index for n in below(i))]

        for i, (each, _) in enumerate(tree):
            family = below(i)
            assert each.used.pages == sum(own_pages[n] for n in family)
            assert each.used.tokens == sum(own_tokens[n] for n in family)
            assert each.used.children == sum(not closed[n] for n in family[1:])
        assert accounts.num_pages == sum(own_pages)
        assert accounts.num_programs == closed.count(False)
