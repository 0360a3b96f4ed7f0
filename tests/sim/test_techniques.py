"""The paper's techniques between `improved_discard` and `min_waste`."""

from __future__ import annotations

import pytest

from tests.sim.small import session, small_device, small_settings
from weft.sim.policies import TECHNIQUES
from weft.sim.run import simulate
from weft.sim.sessions import Driving


def test_techniques_move_away_what_is_intercepted() -> None:
    found = {name: [make().at_start(kind) for kind in ("chat", "math")] for name, make in TECHNIQUES.items()}
    budget = "swap_in_budget"
    assert found == {"budgeted_swap": [budget, budget], "budgeted_heuristic": [budget, "keep"]}
    assert all(make().name == name and make().uses_index and make().keeps_rank for name, make in TECHNIQUES.items())


@pytest.mark.parametrize(("driving", "num_pages"), [("programs", 11), ("clients", 12)])
def test_what_exceeds_the_budget_is_computed_again(driving: Driving, num_pages: int) -> None:
    # The wait of 13 pages begins while another session decodes. A page takes 1 ms beside steps of 11 ms, by 3 % more of
    # which they may be lengthened: 11 pages are moved, and the rest of 204 tokens is discarded. The client's turn is
    # released when its last step, of both sequences and 12 ms, has just ended.
    scripts = [session(1, (200, 5, 1.0), (10, 5, 0.0)), session(2, (10, 150, 0.0))]
    found = {}
    for name in ("budgeted_swap", "swap"):
        settings = small_settings(policy=name, host_tokens=6_400, driving=driving)
        found[name] = simulate(small_device(80), scripts, settings).summary
    assert found["swap"].recomputed_tokens == 0
    assert found["budgeted_swap"].recomputed_tokens == 204 - num_pages * 16
    assert found["budgeted_swap"].swapped_pages == 2 * num_pages


def test_copies_that_the_host_has_need_no_budget() -> None:
    # After the second turn, all but the end of the context has its copy from before.
    scripts = [session(1, (100, 5, 1.0), (100, 5, 1.0), (10, 5, 0.0)), session(2, (10, 300, 0.0))]
    settings = small_settings(policy="budgeted_swap", host_tokens=6_400)
    assert simulate(small_device(80), scripts, settings).summary.recomputed_tokens == 0
