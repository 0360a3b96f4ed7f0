"""What is remembered of KV that was given up: every prefix of it, to the token, and no other."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from weft.cache.given_up import MIN_CAPACITY, GivenUpPrefixes, namespace_number, prefix_numbers
from weft.cache.manager import KVCache
from weft.cache.nodes import Wait
from weft.core.ids import pack_tokens

PAGE = 4


def fill(cache: KVCache, tokens: list[int], seq: int = 1, namespace: str = "", *, tail: bool = False) -> None:
    """Have the prefix index keep the KV of these tokens. A namespace is that of the tenant of its name."""
    table = cache.open_table(seq, namespace, namespace)
    match = cache.lookup(table, pack_tokens(tokens), len(tokens))
    cache.acquire(table, match, pack_tokens(tokens), match.num_pages * PAGE, 0.0)
    assert cache.prepare_write(table, match.num_pages * PAGE, len(tokens), 0.0)
    wait = Wait(seq, "", "chat", 0.0, is_open=False) if tail else None
    cache.free(table, array("i", tokens), len(tokens), 0.0, wait=wait)
    cache.close(table, 0.0)


def known(cache: KVCache, tokens: list[int], found: int = 0, namespace: str = "") -> int:
    """How much of these tokens had KV, of which the first `found` have it."""
    table = cache.open_table(999, namespace, namespace)
    numbers = cache.prefix_numbers(table, pack_tokens(tokens))
    cache.close(table, 0.0)
    return cache.tiers.given_up.extent(table.tree.root.owner, numbers, found)


def found(cache: KVCache, tokens: list[int], namespace: str = "") -> int:
    """How much of these tokens has KV, in whole pages."""
    table = cache.open_table(998, namespace)
    match = cache.lookup(table, pack_tokens(tokens), len(tokens))
    cache.close(table, 0.0)
    return match.num_pages * PAGE


def check_numbers(cache: KVCache) -> int:
    """Compare the numbers that runs have with those of the tokens before their ends. Returns how many have some."""
    count = 0
    for namespace, tree in cache.trees().items():
        for node in tree.nodes():
            if node.page_numbers is None:
                continue
            count += 1
            path, current = b"", node
            while current.parent is not None:
                path, current = current.tokens + path, current.parent
            numbers = prefix_numbers(path, 0, namespace_number(namespace)).tolist()
            size = len(path) // 4
            ends = [
                min(size, (node.depth_pages - node.num_pages + index) * PAGE) for index in range(1, node.num_pages + 1)
            ]
            assert node.page_numbers.tolist() == [numbers[end - 1] for end in ends]
    return count


def test_numbers_of_prefixes_do_not_depend_on_where_a_run_begins() -> None:
    tokens = [5, 5, 5, 9, 0, 3, 5, 5]
    whole = prefix_numbers(pack_tokens(tokens), 0, 77)
    head = prefix_numbers(pack_tokens(tokens[:3]), 0, 77)
    rest = prefix_numbers(pack_tokens(tokens[3:]), 3, int(head[-1]))
    assert whole.tolist() == [*head.tolist(), *rest.tolist()]
    assert len(set(whole.tolist())) == len(tokens)
    swapped = prefix_numbers(pack_tokens([5, 5, 9, 5]), 0, 77)
    assert swapped[-1] != whole[3], "the order counts"
    assert namespace_number("a") != namespace_number("b")
    assert len(prefix_numbers(b"", 0, 1)) == 0


def test_a_run_that_was_cut_and_forgotten_is_known_to_its_last_page() -> None:
    cache = KVCache(8, page_size=PAGE)
    tokens = list(range(20))
    fill(cache, tokens)
    assert known(cache, tokens) == 0, "nothing was given up"
    pages = cache.allocate(5, 0.0)
    assert pages is not None
    assert found(cache, tokens) == 12, "two of five pages went"
    assert known(cache, tokens, 12) == 20
    assert known(cache, [*tokens, 20, 21], 12) == 20
    assert known(cache, [*tokens[:16], 99, 17, 18, 19], 12) == 16, "the last page began with another token"
    assert known(cache, [*tokens[:15], 99], 12) == 12
    assert known(cache, tokens, 12, "other") == 12
    assert check_numbers(cache) == 1
    table = cache.open_table(2, "")
    match = cache.lookup(table, pack_tokens(tokens), 8)
    cache.acquire(table, match, pack_tokens(tokens), 8, 0.0)
    assert check_numbers(cache) == 2, "the run was split, and both parts have their own"
    cache.free(table, array("i", tokens[:8]), 8, 0.0)
    cache.close(table, 0.0)
    for page in pages:
        cache.tiers.drop_ref(page, 0.0)
    fill(cache, list(range(100, 132)))
    assert found(cache, tokens) == 0
    assert known(cache, tokens) == 20
    assert known(cache, tokens, 6) == 20, "a part of a page is there"


def test_a_tail_is_known_to_the_token() -> None:
    cache = KVCache(8, page_size=PAGE)
    tokens = list(range(10))
    fill(cache, tokens, tail=True)
    cache.reset(9.0)
    assert known(cache, [*tokens, 50, 51]) == 10
    assert known(cache, [*tokens[:9], 99]) == 8, "one token of the tail: it was given up as a whole"
    assert known(cache, tokens[:9]) == 8


def test_runs_are_known_however_the_index_was_cut_and_joined() -> None:
    rng = random.Random(5)
    for _ in range(40):
        cache = KVCache(24, page_size=PAGE)
        texts: list[list[int]] = []
        for seq in range(1, 9):
            base = rng.choice(texts)[: rng.randrange(1, 40)] if texts and rng.random() < 0.7 else []
            text = [*base, *(rng.randrange(3) for _ in range(rng.randrange(1, 30)))][:80]
            fill(cache, text, seq, tail=rng.random() < 0.5)
            texts.append(text)
            if rng.random() < 0.5:
                # A fork that writes on below another sequence's run.
                fill(cache, [*text[: len(text) // 2], 7, 8, 9, 7, 8], 100 + seq)
        check_numbers(cache)
        for text in texts:
            whole = len(text) // PAGE * PAGE
            assert known(cache, text, found(cache, text)) >= whole, "computed once, so there or given up"
        never = [9, 9, 9, 9, 9]
        assert known(cache, never) == 0


def test_what_the_host_has_was_not_given_up_until_it_goes_there_too() -> None:
    cache = KVCache(8, 8, page_size=PAGE)
    tokens = list(range(20))
    fill(cache, tokens)
    cache.tiers.copies.launched = 1
    cache.tiers.step_completed(1)
    cache.allocate(5, 0.0)
    assert found(cache, tokens) == 20
    assert known(cache, tokens) == 0
    cache.reset(9.0)
    assert known(cache, tokens) == 20


@pytest.mark.parametrize("per_run", [1, 16])
def test_memory_is_bounded_and_the_last_ones_are_kept(per_run: int) -> None:
    given_up = GivenUpPrefixes(PAGE, 0)
    cache = KVCache(64, page_size=PAGE)
    most = 0
    for number in range(4 * MIN_CAPACITY // per_run):
        tokens = [number, *[1] * (PAGE * per_run - 1)]
        fill(cache, tokens)
        [node] = [node for tree in cache.trees().values() for node in tree.nodes()]
        given_up.add(node, 0)
        cache.reset(9.0)
        most = max(most, len(given_up))
    assert most == MIN_CAPACITY
    numbers = np.concatenate(
        ([np.uint64(namespace_number(""))], prefix_numbers(pack_tokens(tokens), 0, namespace_number("")))
    )
    assert given_up.extent("", numbers, 0) == len(tokens)
    first = [0, *[1] * (PAGE * per_run - 1)]
    numbers = np.concatenate(
        ([np.uint64(namespace_number(""))], prefix_numbers(pack_tokens(first), 0, namespace_number("")))
    )
    assert given_up.extent("", numbers, 0) == 0, "the first is forgotten"


def test_what_one_tenant_gives_up_does_not_push_out_what_another_one_did() -> None:
    cache = KVCache(64, page_size=PAGE)
    tokens = list(range(200))
    fill(cache, tokens, namespace="quiet")
    cache.reset(0.0)
    for number in range(2 * MIN_CAPACITY // 60):
        fill(cache, [number] * (PAGE * 60), namespace="loud")
        cache.reset(0.0)
    assert len(cache.tiers.given_up) == MIN_CAPACITY
    assert known(cache, tokens, namespace="quiet") == 200
    assert known(cache, [0] * (PAGE * 60), namespace="loud") == 0
    assert known(cache, [number] * (PAGE * 60), namespace="loud") == PAGE * 60
