"""Where tokens' KV came from: each token has one source, whatever happens to it in whichever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.sched.token_sources import TokenSources


def counts(sources: TokenSources, num_tokens: int) -> tuple[int, int, int, int]:
    """(cached, host, recomputed, new)."""
    found = sources.counts(num_tokens)
    return (found.cached, found.host, found.recomputed, num_tokens - found.cached - found.recomputed)


def test_a_prompt_that_is_found_in_part() -> None:
    sources = TokenSources()
    sources.found(0, 50, 20)
    sources.computed(50, 60, 55)
    sources.computed(60, 70, 55)
    assert counts(sources, 68) == (50, 20, 5, 13)


def test_what_is_computed_again_counts_once_and_generated_tokens_do_not_count() -> None:
    sources = TokenSources()
    sources.found(0, 10, 0)
    sources.computed(10, 40, 0)
    # Preempted after 25 generated tokens: 20 of the prompt's tokens are still there, 4 of them on the host.
    sources.found(0, 20, 4)
    sources.computed(20, 65, 64)
    assert counts(sources, 40) == (10, 0, 20, 10), "found again is still computed"


def test_the_next_operation_finds_what_the_one_before_it_has_computed() -> None:
    sources = TokenSources()
    sources.computed(0, 30, 0)
    sources.settle(39)
    sources.computed(39, 45, 39)
    assert counts(sources, 45) == (39, 0, 0, 6)
    sources.settle(44)
    # It waited: 16 tokens are on the device, 16 on the host, and the rest is gone.
    sources.found(0, 32, 16)
    sources.computed(32, 50, 44)
    assert counts(sources, 50) == (32, 16, 12, 6)


def test_tokens_that_nothing_is_known_of_are_new() -> None:
    assert counts(TokenSources(), 5) == (0, 0, 0, 5)
    assert counts(TokenSources(3), 5) == (3, 0, 0, 2)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60)), max_size=20))
def test_random_histories_add_up(steps: list[tuple[int, int, int]]) -> None:
    sources, model, known = TokenSources(), dict[int, str](), 0
    for found, host, end in steps:
        # The KV is given up, a part of it is found, and the rest is computed up to `end`.
        found = min(found, known)
        sources.found(0, found, min(host, found))
        for token in range(found):
            if token not in model or (model[token] == "cached" and token >= found - host):
                model[token] = "host" if token >= found - host else "cached"
        if end > found:
            sources.computed(found, end, known)
            for token in range(found, end):
                model[token] = "again" if token < known else "new"
            known = max(known, end)
        for num_tokens in (known, known // 2):
            values = [model[token] for token in range(num_tokens) if token in model]
            host_tokens = values.count("host")
            expected = (values.count("cached") + host_tokens, host_tokens, values.count("again"))
            assert counts(sources, num_tokens)[:3] == expected
            sources.continued = known // 3
            continued = sum(model.get(token) in ("cached", "host") for token in range(min(num_tokens, known // 3)))
            assert sources.counts(num_tokens).continued == continued
