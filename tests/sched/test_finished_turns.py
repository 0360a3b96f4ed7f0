"""Which finished turn a request continues, and where it differs from it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.cache.given_up import namespace_number, prefix_numbers
from weft.cache.nodes import Wait
from weft.cache.radix import common_tokens
from weft.core.ids import pack_tokens
from weft.core.step import U64
from weft.sched.finished_turns import MAX_TAIL, MAX_TURNS, FinishedTurns, _common_end, _num_opening

SYSTEM = list(range(100, 140))
END = [3]
"""Ends a message."""
OPEN = [*END, 1, 2]
"""Begins an answer."""


def numbers(tokens: list[int], namespace: str = "") -> U64:
    base = namespace_number(namespace)
    return np.concatenate((np.array([base], np.uint64), prefix_numbers(pack_tokens(tokens), 0, base)))


def add(turns: FinishedTurns, prompt: list[int], answer: list[int], namespace: str = "", seq: int = 0) -> list[int]:
    """A turn in a namespace, which is that of the tenant of its name."""
    tokens = prompt + answer
    wait = Wait(seq, namespace, "chat", 0.0, is_open=False, num_tokens=len(tokens))
    turns.add(wait, pack_tokens(tokens), len(prompt), numbers(prompt, namespace), END)
    return tokens


def ask(turns: FinishedTurns, tokens: list[int], namespace: str = "") -> int | None:
    """Where a request differs from the turn that it continues."""
    found = turns.find(pack_tokens(tokens), numbers(tokens, namespace))
    return None if found is None else found.first_different


def test_a_next_turn_that_has_the_whole_turn_differs_nowhere() -> None:
    turns = FinishedTurns()
    assert not turns
    turn = add(turns, SYSTEM + OPEN, [7, 8, 9])
    assert turns
    assert ask(turns, [*turn, *END, 50, *OPEN]) is None
    assert ask(turns, turn) is None
    assert ask(turns, SYSTEM + OPEN) is None, "the same request again"
    assert ask(turns, [*SYSTEM, *OPEN, 7, 8]) is None, "a prefix of it"


def test_the_first_token_of_an_answer_that_differs_is_named() -> None:
    turns = FinishedTurns()
    add(turns, SYSTEM + OPEN, [60, 61, 62, 7, 8, 9])
    assert ask(turns, [*SYSTEM, *OPEN, 7, 8, 9, *END, 50, *OPEN]) == 43, "its reasoning was removed"
    assert ask(turns, [*SYSTEM, *OPEN, 60, 61, 62, 7, 99, 9, 50]) == 47, "its arguments were rewritten"


def test_tokens_that_open_an_answer_may_differ_too() -> None:
    turns = FinishedTurns()
    think = [*OPEN, 20, 21]
    add(turns, SYSTEM + think, [60, 61, 22, 7, 8])
    assert ask(turns, [*SYSTEM, *OPEN, 7, 8, *END, 50, *think]) == 43, "the opened reasoning is gone as well"


def test_an_edit_before_the_answer_continues_nothing() -> None:
    turns = FinishedTurns()
    add(turns, [*SYSTEM, 50, 51, 52, *OPEN], [7, 8, 9])
    assert ask(turns, [*SYSTEM, 50, 51, 99, *OPEN]) is None
    assert ask(turns, [*SYSTEM, 50, 51, 99, *OPEN, 7, 8, 9]) is None
    assert ask(turns, [*SYSTEM, 50, 51, 52, 60, 52, *OPEN]) is None, "more text in the last message, with the same end"
    assert ask(turns, [*SYSTEM, 50, 51, 52]) is None
    assert ask(turns, SYSTEM) is None
    assert ask(turns, [5, 6]) is None


def test_without_a_token_that_ends_messages_the_whole_prompt_is_the_same() -> None:
    turns = FinishedTurns()
    add(turns, [1, 20, 21, 2], [7, 8])
    assert ask(turns, [1, 20, 21, 22, 2]) is None
    assert ask(turns, [5, 6, 20, 21, 2]) is None, "a short prompt needs a common beginning too"
    assert ask(turns, [1, 20, 21, 2, 9]) == 4


def test_of_several_turns_the_one_with_most_tokens_in_common_counts() -> None:
    turns = FinishedTurns()
    first = add(turns, SYSTEM + OPEN, [7, 8, 9])
    add(turns, SYSTEM + OPEN, [7, 8])
    add(turns, SYSTEM + OPEN, [7, 30])
    assert ask(turns, [*first, *END, 50]) is None
    second = add(turns, [*first, *END, 50, *OPEN], [60, 40, 41])
    assert ask(turns, [*second, *END]) is None
    assert ask(turns, [*first, *END, 50, *OPEN, 40, 41, *END]) == len(first) + 5
    assert ask(turns, [*first, *END, 77, *OPEN]) is None, "the first turn is whole, and an edit is no difference"
    assert ask(turns, [*SYSTEM, *OPEN, 7, 31]) == 44


@pytest.mark.parametrize("shorter_first", [True, False])
def test_a_choice_that_ended_earlier_is_whole_beside_one_that_went_on(shorter_first: bool) -> None:
    turns = FinishedTurns()
    for answer in sorted([[7, 8], [7, 8, 9, 9]], reverse=not shorter_first):
        add(turns, SYSTEM + OPEN, answer)
    assert ask(turns, [*SYSTEM, *OPEN, 7, 8, *END, 50]) is None


def test_namespaces_and_the_shortest_prompts_are_kept_apart() -> None:
    turns = FinishedTurns()
    add(turns, [4], [7, 8])
    assert ask(turns, [4, 9]) == 1
    assert ask(turns, [4, 9], "other") is None
    assert ask(turns, [5, 7, 8]) is None


def test_only_the_last_turns_and_the_first_tokens_of_an_answer_are_remembered() -> None:
    turns = FinishedTurns()
    for number in range(MAX_TURNS + 10):
        add(turns, [number, *SYSTEM], [7, 8])
    assert ask(turns, [9, *SYSTEM, 1]) is None, "forgotten"
    assert ask(turns, [10, *SYSTEM, 1]) == 41
    assert ask(turns, [MAX_TURNS + 9, *SYSTEM, 7, 1]) == 42
    long = add(turns, [*SYSTEM, 999], [7] * (MAX_TAIL + 50))
    assert ask(turns, [*long[:2000], 1]) == 2000
    assert ask(turns, [*long[:-2], 1]) is None, "past what is remembered of it"


def test_a_continued_turn_says_what_waited_and_how_much_of_it_is_left() -> None:
    turns = FinishedTurns()
    turn = add(turns, SYSTEM + OPEN, [7, 8, 9])
    for tokens, expected in (
        (SYSTEM + OPEN, None),
        ([*SYSTEM[:-1], 99, *OPEN, 7, 8, 9], None),
        ([*turn, *END], ("chat", None, 46)),
        ([*turn[:-1], 55], ("chat", 45, 45)),
    ):
        found = turns.find(pack_tokens(tokens), numbers(tokens))
        assert (None if found is None else (found.wait.kind, *found[1:])) == expected


def test_of_all_turns_with_the_same_prompt_the_one_that_is_continued_is_found() -> None:
    turns = FinishedTurns()
    choices = [add(turns, SYSTEM + OPEN, [7, number, 9, 9], seq=number) for number in range(128)]
    for number, choice in enumerate(choices):
        found = turns.find(pack_tokens([*choice, *END]), numbers([*choice, *END]))
        assert found is not None
        assert (found.wait.seq, found.first_different) == (number, None)
        assert ask(turns, [*choice[:-1], 50]) == len(choice) - 1
    found = turns.find(pack_tokens([*SYSTEM, *OPEN, 7, 999]), numbers([*SYSTEM, *OPEN, 7, 999]))
    assert found is not None
    assert (found.wait.seq, found.first_different) == (127, 44), "of several that differ there, the newest"


def test_turns_of_one_tenant_do_not_push_out_those_of_another() -> None:
    turns = FinishedTurns()
    turn = add(turns, SYSTEM + OPEN, [7, 8, 9], "quiet")
    for number in range(MAX_TURNS + 10):
        add(turns, [number // 3, 5], [7, 8], "loud")
    assert ask(turns, [*turn[:-1], 1], "quiet") == len(turn) - 1
    assert ask(turns, [2, 5, 7, 1], "loud") is None, "its oldest are forgotten"
    assert ask(turns, [4, 5, 7, 1], "loud") == 3
    for number in range(MAX_TURNS + 10):
        add(turns, [5], [7], str(number))
    assert ask(turns, [*turn[:-1], 1], "quiet") is None, "many tenants with one turn each"
    assert len(turns._by_prompt) == len(turns._slots) == MAX_TURNS, "nothing is left of those that were forgotten"


def plain_find(turns: list[tuple[list[int], list[int]]], tokens: list[int]) -> tuple[int, int | None] | None:
    """(turn, first token that differs from it) for a request, by comparison with every turn."""
    found = [(-1, False, False, 0)]
    for number, (prompt, answer) in enumerate(turns):
        start = len(prompt) - _num_opening(pack_tokens(prompt), END)
        if tokens[:start] == prompt[:start]:
            tail, opening = (prompt + answer)[start:], prompt[start:]
            common = common_tokens(pack_tokens(tail), pack_tokens(tokens[start:]))
            least = len(opening) - _common_end(pack_tokens(opening), pack_tokens(tokens))
            found.append((start + common, common == len(tail), common >= least, number))
    end, is_whole, is_continued, number = max(found)
    if not is_continued or end == len(tokens):
        return None
    return number, None if is_whole else end


def test_a_turn_is_found_as_by_comparison_with_every_one() -> None:
    rng = random.Random(1)
    count = 0
    for _ in range(200):
        turns, known = FinishedTurns(), list[tuple[list[int], list[int]]]()
        texts: list[list[int]] = [[]]
        for _ in range(rng.randrange(1, 60)):
            prompt = [*rng.choice(texts), *(rng.randrange(1, 5) for _ in range(rng.randrange(1, 6)))]
            prompt += OPEN if rng.random() < 0.6 else []
            answer = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 5))]
            texts += [prompt, add(turns, prompt, answer, seq=len(known))]
            known.append((prompt, answer))
        for _ in range(10):
            tokens = [*rng.choice(texts[1:]), *(rng.randrange(1, 5) for _ in range(rng.randrange(6)))]
            found = turns.find(pack_tokens(tokens), numbers(tokens))
            assert (None if found is None else (found.wait.seq, found.first_different)) == plain_find(known, tokens)
            count += found is not None
    assert count > 1000
