"""What commands on spaces add to a step ends where the results are looked for."""

from __future__ import annotations

import numpy as np

from weft.core.sampling import SamplingParams
from weft.sched.slots import uniforms
from weft.sched.spaces.parts import SpaceParts, SpaceRow
from weft.sched.spaces.rows import ExplicitRow


def test_the_last_states_of_a_row_are_stored() -> None:
    parts = SpaceParts()
    parts.store(SpaceRow(4, 5), [9, 8])
    tokens, slots = parts.stores()
    assert (tokens.tolist(), slots.tolist()) == ([7, 8], [9, 8])


def test_distributions_come_after_the_outputs_of_forwards_in_their_order() -> None:
    parts = SpaceParts()
    parts.distribute([3, 4], 5, [])
    parts.distribute([6], 0, [11, 12])
    parts.distribute([7, 8], 2, [21, 22, 23, 24])
    head = parts.head_batch()
    assert head is not None
    assert head.embed_slots.tolist() == [3, 4, 6, 7, 8]
    assert parts.dist_rows(10) == [10, 11, 13, 14]
    assert parts.scores(10) == ([12, 12, 13, 13, 14, 14], [11, 12, 21, 22, 23, 24])
    assert parts.dist_top == 5


def test_a_draw_is_that_of_its_seed_and_number() -> None:
    parts = SpaceParts()
    parts.sample(0, 30, SamplingParams(seed=5), 3, 77)
    parts.sample(1, 31, SamplingParams(), 0, 77)
    expected = uniforms(np.array([5, 77], np.uint64), np.array([3, 0], np.int64))
    assert parts.uniforms().tolist() == expected.tolist()
    assert [slot.slot for slot in parts.slot_sets] == [30, 31]


def test_masks_and_visibility_are_of_their_rows() -> None:
    parts = SpaceParts()
    parts.add_row(1, 2, ExplicitRow([5, 6], 20, [0xF, 0xFFFFFFFF], True, b""))
    parts.add_row(3, 6, ExplicitRow([7], 9, None, False, b"abc"))
    causal, visible = parts.causal(5), parts.visibility(8)
    assert causal is not None
    assert visible is not None
    assert causal.tolist() == [True, True, True, False, True]
    assert visible.tolist() == [0xFFFFFFFF] * 2 + [0xF] + [0xFFFFFFFF] * 5
    bits, indptr = parts.masks(5)
    assert bits is not None
    assert indptr is not None
    assert (bits.tobytes(), indptr.tolist()) == (b"abc", [0, 0, 0, 0, 3, 3])


def test_inputs_stand_at_their_tokens() -> None:
    parts = SpaceParts()
    assert parts.embed_slots(4) is None
    parts.take_inputs(1, [8, 6])
    slots = parts.embed_slots(5)
    assert slots is not None
    assert slots.tolist() == [-1, 8, 6, -1, -1]
