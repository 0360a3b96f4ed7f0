"""Usage of operations: where the KV of a prompt came from adds up, and is what the engine did."""

from __future__ import annotations

import itertools

import pytest

from tests.engine.driver import Driver
from tests.engine.test_interception import SIZES, Clients, park, turn
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched.planner import StepPlanner
from weft.sched.policies import POLICIES, make_policy
from weft.sched.sequence import Sequence

Counts = tuple[int, int, int, int]


def counts(usage: wire.OperationUsage) -> Counts:
    """(found on the device, brought from the host, computed again, new)."""
    device = usage.num_cached_tokens - usage.num_host_tokens
    found = device, usage.num_host_tokens, usage.num_recomputed_tokens, usage.num_new_tokens
    assert min(found) >= 0
    assert sum(found) == usage.num_prompt_tokens
    return found


def last_usage(driver: Driver, op: int) -> wire.OperationUsage:
    ending = driver.operations[op].ending
    assert isinstance(ending, wire.Finished)
    return ending.usage


def press(driver: Driver, tokens: int, mark: int) -> None:
    """Another tenant's request with so many tokens, whose KV nobody wants afterwards."""
    turn(driver, [mark] * tokens, 1, f"pressure{mark}")


def test_a_plain_client_is_told_what_was_found_and_what_was_computed_again() -> None:
    driver = Driver(num_device_pages=24, page_size=16, intercept=make_policy("lru"), max_context=400)
    tokens, usage = turn(driver, list(range(200)), 4)
    assert counts(usage) == (0, 0, 0, 200)
    more = [*tokens, 3, 4]
    press(driver, 250, 60)
    kept = sum(node.num_pages for tree in driver.engine.cache.trees().values() for node in tree.nodes())
    assert kept, "the run was cut, not forgotten"
    tokens, usage = turn(driver, more, 2)
    device, host, again, new = counts(usage)
    assert host == 0
    assert device % 16 == 0
    assert 0 < device < 203
    assert (again, new) == (203 - device, 3), "203 tokens had KV, the last one sampled had not"
    press(driver, 383, 61)
    _, usage = turn(driver, [*tokens, 9], 1)
    assert counts(usage) == (0, 0, 207, 2), "nothing is left, and everything is remembered"
    driver.finish()


def test_tokens_from_the_host_are_told_apart() -> None:
    driver = Driver(num_device_pages=24, num_host_pages=40, page_size=16, max_context=400)
    tokens, _ = turn(driver, list(range(200)), 4)
    press(driver, 383, 61)
    _, usage = turn(driver, [*tokens, 3], 1)
    assert counts(usage) == (0, 203, 0, 2)
    driver.finish()


def test_a_program_s_next_operation_finds_what_it_had() -> None:
    driver = Driver(num_device_pages=24, page_size=16, intercept=make_policy("lru"), max_context=600)
    number = driver.open(list(range(300)), namespace="")
    first = driver.generate(number, 4, eos=False)
    driver.run()
    assert counts(last_usage(driver, first)) == (0, 0, 0, 300)
    second = driver.generate(number, 4, eos=False)
    driver.run()
    assert counts(last_usage(driver, second)) == (303, 0, 0, 1)
    park(driver, number)
    third = driver.generate(number, 4, eos=False)
    driver.run()
    device, host, again, new = counts(last_usage(driver, third))
    assert (host, new) == (0, 1)
    assert device % 16 == 0
    assert again == 307 - device > 0
    driver.finish()


def test_a_preempted_generation_counts_its_prompt_alone() -> None:
    driver = Driver(num_device_pages=16, page_size=8, num_slots=4, max_context=120, prefix_cache=True)
    ops = [driver.generate(driver.open([30 + i] * 40, namespace=""), 40, eos=False, seed=i) for i in range(3)]
    driver.run()
    usages = [last_usage(driver, op) for op in ops]
    assert sum(usage.num_preemptions for usage in usages) > 0
    for usage in usages:
        device, host, again, new = counts(usage)
        assert device == host == 0
        assert (again > 0) == (usage.num_preemptions > 0 and new < 40)
    assert any(counts(usage)[2] for usage in usages)
    driver.finish()


def test_forks_before_the_first_token_find_the_prompt() -> None:
    driver = Driver(num_device_pages=64, page_size=16)
    number = driver.open(list(range(50)), namespace="")
    children = [driver.fork(number) for _ in range(3)]
    ops = [driver.generate(n, 5, eos=False) for n in (number, *children)]
    driver.run()
    assert [counts(last_usage(driver, op)) for op in ops] == [(0, 0, 0, 50), *[(50, 0, 0, 0)] * 3]
    driver.finish()


def test_a_prefix_in_flight_is_found() -> None:
    driver = Driver(num_device_pages=64, page_size=16, max_step_tokens=32)
    ops = [driver.generate(driver.open([*range(100), 200 + i], namespace=""), 2, eos=False) for i in range(3)]
    driver.run()
    found = [counts(last_usage(driver, op)) for op in ops]
    assert found[0] == (0, 0, 0, 101)
    assert all(cached >= 96 for cached, *_ in found[1:])
    driver.finish()


def test_a_generation_that_goes_on_from_another_engine_counts_the_prompt_alone() -> None:
    driver = Driver(num_device_pages=64, page_size=16, max_context=1024)
    seq, op = 900, 901
    driver.send(
        wire.Open(seq=seq),
        wire.Append(seq=seq, op=op, tokens=pack_tokens(range(60))),
        wire.Generate(seq=seq, op=op + 1, num_generated=20),
    )
    driver.run()
    [usage] = [event.usage for event in driver.others if isinstance(event, wire.Finished)]
    assert counts(usage) == (0, 0, 0, 40)


def test_usage_names_the_token_at_which_a_rendered_turn_differs() -> None:
    driver = Driver(num_device_pages=24, page_size=16, intercept=make_policy("lru"), max_context=400)
    prompt = list(range(100, 170))
    tokens, usage = turn(driver, prompt, 12)
    assert usage.first_different_token is None
    _, usage = turn(driver, [*tokens, 5], 1)
    assert usage.first_different_token is None
    rendered = [*tokens[:74], 99, *tokens[78:], 6]
    _, usage = turn(driver, rendered, 1)
    assert (usage.first_different_token, usage.num_cached_tokens) == (74, 74)
    press(driver, 383, 61)
    _, usage = turn(driver, [*rendered[:74], 98, 7], 1)
    assert usage.first_different_token == 74, "wherever the KV is by then"
    _, usage = turn(driver, [*prompt[:60], 98, 7], 1)
    assert usage.first_different_token is None, "an edit of the prompt"
    driver.finish()


class Watched:
    """Compares every usage with what was computed, token by token."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch):
        self.driver = driver
        self.written: set[tuple[str, tuple[int, ...]]] = set()
        """(namespace, prefix) that some chunk or decode has computed up to its last token."""
        self.computed: dict[int, dict[int, bool]] = {}
        """By sequence number: token -> whether its prefix had been computed before, since the last operation ended."""
        self.num_checked = self.num_again = self.num_cached = 0
        count_chunk, finished = StepPlanner._count_chunk, driver.ended

        def watch(planner: StepPlanner, sequence: Sequence, start: int, end: int, now: float) -> None:
            tokens, known = tuple(sequence.tokens), self.computed.setdefault(sequence.handle, {})
            for token in range(start, end):
                known[token] = (sequence.namespace, tokens[: token + 1]) in self.written
            for token in range(start, end):
                self.written.add((sequence.namespace, tokens[: token + 1]))
            count_chunk(planner, sequence, start, end, now)

        monkeypatch.setattr(StepPlanner, "_count_chunk", watch)

        def ended(operation: object) -> None:
            finished(operation)  # type: ignore[arg-type]
            self.check(operation)

        monkeypatch.setattr(driver, "ended", ended)
        send = driver.send

        def sent(*commands: wire.Command) -> None:
            send(*commands)
            for command in commands:
                if isinstance(command, wire.Truncate):  # ends what is under way, also where no operation is
                    self.computed.pop(command.seq, None)

        monkeypatch.setattr(driver, "send", sent)

    def check(self, operation: object) -> None:
        ending, seq = operation.ending, operation.seq  # type: ignore[attr-defined]
        tokens = operation.prompt + operation.tokens  # type: ignore[attr-defined]
        namespace = self.driver.sequences[seq].namespace if seq in self.driver.sequences else None
        if namespace is not None:
            # Of the last token too: the step after the one that samples it may be on the device when that is known.
            self.written |= {(namespace, tuple(tokens[:n])) for n in range(1, len(tokens) + 1)}
        computed = self.computed.pop(seq, {})
        if not isinstance(ending, wire.Finished):
            return
        usage = ending.usage
        device, host, again, new = counts(usage)
        in_prompt = {token: known for token, known in computed.items() if token < usage.num_prompt_tokens}
        assert again + new == len(in_prompt), "each token of the prompt that was computed, once"
        assert again <= sum(in_prompt.values()), "no token is computed again that never was before"
        self.num_checked += 1
        self.num_again += again
        self.num_cached += device + host


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("size", sorted(SIZES))
def test_usage_adds_up_whatever_random_clients_do(policy: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(7, page_size=8, max_context=256, num_slots=6, intercept=make_policy(policy), **SIZES[size])
    watched = Watched(driver, monkeypatch)
    clients = Clients(driver, len(policy) + len(size))
    for _ in range(250):
        clients.act()
    driver.run()
    assert watched.num_checked > 50
    assert watched.num_cached > 100 * (policy != "discard")
    assert watched.num_again > 0
    driver.finish()


def test_counters_of_the_engine_agree_with_the_usages(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(3, num_device_pages=24, page_size=8, max_context=150, num_slots=4)
    usages = []
    for number in itertools.count():
        _, usage = turn(driver, [number % 3] * (50 + number), 3)
        usages.append(usage)
        if number > 30:
            break
    stats = driver.engine.scheduler.stats()
    assert sum(usage.num_recomputed_tokens for usage in usages) == stats.recomputed_tokens > 100
    assert sum(usage.num_cached_tokens for usage in usages) == stats.prefix_hits
    driver.finish()


def test_without_a_prefix_cache_no_turn_is_remembered() -> None:
    driver = Driver(num_device_pages=64, page_size=16, prefix_cache=False)
    tokens, _ = turn(driver, list(range(40)), 4)
    _, usage = turn(driver, [*tokens[:-2], 9, 9], 1)
    assert counts(usage) == (0, 0, 0, 44)
    assert usage.first_different_token is None
    assert not driver.engine.scheduler._state.interception.closed._turns
    driver.finish()
