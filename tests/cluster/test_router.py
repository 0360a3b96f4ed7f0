"""Which engine a request goes to, decided by the router alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from weft.cluster.route_costs import EngineView, Work
from weft.cluster.router import RoutedRequest, Router
from weft.core.ids import pack_tokens
from weft.sim.devices import linear_forward

VIEW = EngineView(
    is_ready=True, incarnation=1, max_running=8, num_pages=1000, page_size=16, forward=linear_forward(0.010, 0.001)
)
"""10 ms of every step, 1 ms of each of its tokens."""


class Front:
    """A router and its engines."""

    def __init__(self, num_engines: int = 2, **changes: object):
        self.views = [VIEW._replace(incarnation=10 + index, **changes) for index in range(num_engines)]
        self.router = Router(num_engines)

    def route(self, prompt: list[int], namespace: str = "", **more: object) -> RoutedRequest:
        more = {"max_output": 4, **more}
        return self.router.route(self.views, pack_tokens(prompt), namespace, **more)  # type: ignore[arg-type]

    def end(self, routed: RoutedRequest, answer: list[int] | None = None) -> None:
        self.router.ended(routed, self.views[routed.engine], pack_tokens(answer or []))

    def serve(self, prompt: list[int], answer: list[int] | None = None, **more: object) -> int:
        """Route a request that ends at once; its engine."""
        routed = self.route(prompt, **more)
        self.end(routed, answer or [1] * 20)
        return routed.engine


def prompt(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100) for _ in range(count)]


def test_new_prompts_are_spread_and_known_ones_go_where_their_prefix_lies() -> None:
    front = Front(3)
    first = [front.serve(prompt(seed, 200)) for seed in range(6)]
    assert Counter(first) == {0: 2, 1: 2, 2: 2}
    for seed in (5, 0, 3, 1, 4, 2):
        again = front.route([*prompt(seed, 200), 7, 8])
        assert again.engine == first[seed]
        assert again.num_found == 192
        front.end(again)


def test_a_turn_goes_where_the_turn_that_it_continues_was_answered() -> None:
    front = Front(2)
    answer = prompt(9, 50)
    where = front.serve(prompt(1, 40), answer)
    front.serve(prompt(2, 40))
    routed = front.route([*prompt(1, 40), *answer, 5, 6])
    assert (routed.engine, routed.num_found) == (where, 80)


def test_a_prompt_that_is_known_whole_leaves_a_token_to_compute() -> None:
    front = Front(1)
    front.serve(prompt(1, 64))
    assert front.route(prompt(1, 64)).num_found == 48
    assert front.route(prompt(1, 65)).num_found == 64


def test_a_long_wait_costs_more_than_computing_the_prefix_elsewhere() -> None:
    front = Front(2)
    known = prompt(1, 160)
    where = front.serve(known)
    waiting = []
    for seed in range(2, 9):
        routed = front.route([*known, *prompt(seed, 40)])
        waiting.append(routed.engine)
        if routed.engine != where:
            front.router.answered(routed)
            break
    assert waiting[:3] == [where] * 3, "40 tokens wait less than 160 take"
    assert waiting[-1] != where
    assert len(waiting) < 7
    assert front.route([*known, 5]).engine == 1 - where, "the prefix lies there too now, and less waits"


def test_prompts_that_have_their_first_token_do_not_wait() -> None:
    front = Front(2, forward=None)
    routed = front.route(prompt(1, 4000))
    assert front.route(prompt(2, 4000)).engine == 1 - routed.engine
    front.router.answered(routed)
    front.router.answered(routed)
    assert front.route(prompt(3, 4000)).engine == routed.engine


def test_a_full_engine_is_left() -> None:
    front = Front(2, max_running=2, forward=None)
    known = prompt(1, 400)
    front.serve(known)
    for seed in range(2):
        routed = front.route([*known, seed], max_output=128)
        front.router.answered(routed)
        assert routed.engine == 0
    assert front.route([*known, 9], max_output=128).engine == 1


def test_sessions_stay_together_though_their_prompts_differ() -> None:
    front = Front(3)
    for seed in range(3):
        front.serve(prompt(seed, 50))
    homes = {name: front.serve(prompt(ord(name), 300), session=name) for name in "abc"}
    assert sorted(homes.values()) == [0, 1, 2]
    for turn in range(3):
        for name, home in homes.items():
            assert front.serve(prompt(100 * turn + ord(name), 300), session=name) == home
    assert front.route(prompt(7, 300), namespace="other", session="a").num_found == 0
    for _ in range(3):
        front.route(prompt(random.randrange(1000), 1000), session="a")
    busy = {front.route(prompt(500 + seed, 1000), session="a").engine for seed in range(4)}
    assert len(busy) > 1, "a session leaves when the wait costs more than it has there"


def test_namespaces_share_nothing() -> None:
    front = Front(2)
    front.serve(prompt(1, 200), namespace="a")
    assert front.route(prompt(1, 200), namespace="b").num_found == 0
    assert front.route(prompt(1, 200), namespace="a").num_found == 192


def test_an_engine_that_does_not_answer_gets_nothing_while_another_does() -> None:
    front = Front(2)
    known = prompt(1, 200)
    where = front.serve(known)
    front.views[where] = front.views[where]._replace(is_ready=False)
    assert front.route(known).engine == 1 - where
    front.views[1 - where] = front.views[1 - where]._replace(is_ready=False)
    assert front.route(known).engine in (0, 1)


def test_a_replaced_engine_has_no_prefixes_and_no_requests() -> None:
    front = Front(2)
    known = prompt(1, 400)
    lost = front.route(known)
    where = lost.engine
    front.views[where] = front.views[where]._replace(incarnation=99)
    again = front.route(known)
    assert (again.engine, again.num_found) == (where, 0), "nothing waits there any more"
    front.end(lost, prompt(2, 100))
    front.end(again, prompt(3, 100))
    front.end(lost)
    assert front.route([*known, *prompt(2, 99)]).num_found == 400, "the answer of the lost one lies nowhere"
    assert front.route([*known, *prompt(3, 99)]).num_found == 496


def test_as_many_prefixes_are_known_as_the_engine_has_pages() -> None:
    front = Front(1, num_pages=20)
    front.serve(prompt(1, 160), [1])
    front.serve(prompt(2, 160), [1])
    assert front.route([*prompt(1, 160), 3]).num_found == 160
    front.serve(prompt(3, 160), [1])
    assert front.route([*prompt(2, 160), 3]).num_found == 0
    front.serve(prompt(4, 80), [1])
    assert 0 < front.route([*prompt(3, 160), 3]).num_found < 160, "the last pages of a prompt go first"


@pytest.mark.parametrize("seed", range(3))
def test_routes_are_a_function_of_the_calls(seed: int) -> None:
    def routes() -> list[tuple[int, int]]:
        source, front = random.Random(seed), Front(4, forward=None)
        found, under_way = [], []
        for _ in range(150):
            text = [*prompt(source.randrange(8), source.randrange(300)), source.randrange(100)]
            session = source.choice(["", "", "x", "y"])
            routed = front.route(text, session=session, num_choices=source.choice([1, 1, 3]))
            found.append((routed.engine, routed.num_found))
            under_way.append(routed)
            while under_way and source.random() < 0.55:
                front.end(under_way.pop(source.randrange(len(under_way))), prompt(source.randrange(8), 60))
        for routed in under_way:
            front.end(routed)
        loads = front.router._loads
        assert all(load.foreground == load.background == Work() for load in loads), "nothing is left"
        return found

    assert routes() == routes()


def test_a_plan_has_its_engine_unless_that_is_dead_or_far_behind() -> None:
    front = Front(2)
    for seed in range(6):
        assert front.serve(prompt(seed, 100), preferred=seed % 2) == seed % 2
    # Where the prefix lies does not matter as long as the time does not double.
    assert front.serve(prompt(0, 100), preferred=0) == 0
    front.views[1] = front.views[1]._replace(is_ready=False)
    assert front.serve(prompt(7, 100), preferred=1) == 0
    front.views[1] = front.views[1]._replace(is_ready=True)
    engines = [front.route(prompt(seed, 400), preferred=1).engine for seed in range(10, 14)]
    assert engines[0] == 1
    assert 0 in engines, "the prompts that wait there take more than twice as long"


def test_an_engine_that_a_plan_names_and_there_is_not_is_no_choice() -> None:
    assert Front(1).serve(prompt(1, 10), preferred=3) == 0
