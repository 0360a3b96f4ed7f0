"""What the engine promises a client, one promise a test, on the fake worker."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.step import MAX_SCORE_ROWS
from weft.sched.sequence import GenerateOp
from weft.testing.fake_worker import expected_tokens


def failures(driver: Driver) -> list[wire.Failed]:
    driver.engine.publish(0)
    return [event for event in driver.others if isinstance(event, wire.Failed)]


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
    driver = Driver(num_device_pages=1200, num_slots=64, max_step_tokens=512)
    shared = [i % 900 for i in range(2005)]  # not a whole number of pages
    prompts = [[*shared, 900 + i, 950 + i % 7, 3] for i in range(64)]
    for prompt in prompts:
        driver.generate(driver.open(prompt, namespace=""), 4)
    driver.run()
    stats = driver.engine.stats()
    distinct = len(shared) + 64 * 3
    assert stats.prefill_tokens <= 1.02 * distinct
    driver.finish()


def test_forks_before_the_first_token_sample_from_one_row() -> None:
    driver = Driver()
    number = driver.open([5] * 100)
    children = [driver.fork(number) for _ in range(7)]
    for each in (number, *children):
        driver.generate(each, 10)
    driver.run()
    assert driver.engine.stats().prefill_tokens == 100
    driver.finish()


@pytest.mark.parametrize("scored", [[9], [9, 8]])
def test_scores_on_a_fork_of_a_prompt_that_is_not_computed_yet_have_the_first_one(scored: list[int]) -> None:
    """The score of the first token comes from the row of the prompt's last token, which the parent's step computes."""
    driver = Driver()
    number = driver.open([5] * 40)
    child = driver.fork(number)
    driver.generate(number, 3)
    op = next(driver.numbers)
    outputs = wire.PromptOutputs(logprobs=1)
    driver.send(wire.Append(seq=child, op=op, tokens=pack_tokens(scored), outputs=outputs))
    driver.run()
    [end] = [event for event in driver.others if isinstance(event, wire.Finished) and event.op == op]
    assert end.prompt_logprobs is not None
    assert [score is not None for score in end.prompt_logprobs] == [True] * len(scored)
    driver.sequences[child].tokens += scored
    driver.generate(child, 3)
    driver.run()


def test_a_prefix_is_computed_once_though_its_sequence_is_told_to_generate_meanwhile() -> None:
    driver = Driver(num_device_pages=200, max_context=1024)
    prompt = [i % 900 for i in range(800)]
    first = driver.open(prompt, namespace="")
    driver.step()
    second = driver.open([*prompt, 3], namespace="")
    driver.generate(second, 2)
    driver.step()
    driver.generate(first, 2)
    driver.run()
    assert driver.engine.stats().prefill_tokens <= 800 + 2
    driver.finish()


class BrokenGuide:
    """A grammar that allows no token."""

    error = ""

    def push(self, token: int) -> bool:
        self.error = "no token is left"
        return True


def test_the_token_of_a_grammar_that_allows_none_is_not_of_the_sequence() -> None:
    driver = Driver()
    number = driver.open([5] * 20)
    driver.generate(number, 4)
    [sequence] = driver.engine.scheduler.sequences
    operation = sequence.ops[-1]
    assert isinstance(operation, GenerateOp)
    operation.guide, operation.is_plain = BrokenGuide(), False
    asked, driver.operations = driver.operations, {}
    driver.run()
    [failed] = failures(driver)
    assert (failed.op, failed.error.message) == (next(iter(asked)), "no token is left")
    assert list(sequence.tokens) == [5] * 20
    driver.generate(number, 4)
    driver.run()


def test_a_hit_leaves_one_token_to_compute() -> None:
    driver = Driver()
    prompt = list(range(64))
    for _ in range(2):
        number = next(driver.numbers)
        op = next(driver.numbers)
        driver.send(wire.Open(seq=number), wire.Append(seq=number, op=op, tokens=pack_tokens(prompt)))
        driver.send(wire.Generate(seq=number, op=op + 1_000_000, stop=StopParams(max_tokens=1)))
        driver.run()
        driver.send(wire.Release(seq=number))
    ends = [event for event in driver.others if isinstance(event, wire.Finished)]
    assert [end.usage.num_cached_tokens for end in ends] == [0, 63]
    assert driver.engine.stats().prefill_tokens == 65


def test_a_next_turn_continues_from_the_kv_of_the_last() -> None:
    driver = Driver()
    number = driver.open(list(range(100)))
    driver.generate(number, 20, eos=False)
    driver.run()
    before = driver.engine.stats().prefill_tokens
    more = [7, 8, 9]
    driver.sequences[number].tokens += more
    driver.send(wire.Append(seq=number, op=next(driver.numbers), tokens=pack_tokens(more)))
    driver.generate(number, 5)
    driver.run()
    assert driver.engine.stats().prefill_tokens - before == len(more) + 1  # the last sampled token has no KV yet
    driver.finish()


def test_a_held_sequence_is_found_again_partial_page_included() -> None:
    driver = Driver()
    number = driver.open(list(range(40)))
    op = driver.generate(number, 10, eos=False)
    driver.run()
    tokens = driver.operations[op].prompt + driver.operations[op].tokens
    namespace = driver.sequences.pop(number).namespace
    driver.send(wire.Hold(seq=number, ttl_s=60))
    again = next(driver.numbers)
    driver.send(
        wire.Open(seq=again, namespace=namespace),
        wire.Append(seq=again, op=1_000_000, tokens=pack_tokens([*tokens, 1, 2])),
        wire.Generate(seq=again, op=1_000_001, stop=StopParams(max_tokens=1)),
    )
    driver.run()
    [end] = [event for event in driver.others if isinstance(event, wire.Finished)]
    assert end.usage.num_cached_tokens == len(tokens) - 1
    driver.send(wire.Release(seq=again))
    driver.finish()


def test_a_higher_priority_overtakes_and_takes_the_room_of_lower_ones() -> None:
    driver = Driver(num_device_pages=40, num_slots=2, max_context=320)
    low = [driver.generate(driver.open([i] * 30, priority=5), 200, eos=False) for i in range(4)]
    for _ in range(10):
        driver.step()
    high = driver.generate(driver.open([9] * 30, priority=-5), 5, eos=False)
    while driver.operations[high].ending is None:
        driver.step()
    assert all(driver.operations[op].ending is None for op in low)
    assert driver.engine.stats().preemptions >= 1
    driver.finish()


def test_no_stream_of_urgent_requests_starves_one() -> None:
    driver = Driver(num_device_pages=40, num_slots=1, max_context=320, aging_s=0.5)
    driver.generate(driver.open([3] * 20), 3)
    patient = driver.generate(driver.open([1] * 20, priority=1), 3)
    for _ in range(2000):
        if driver.operations[patient].ending is not None:
            break
        if len(driver.engine.scheduler.sequences.queue) < 3:
            driver.generate(driver.open([2] * 20, priority=0), 3)
        driver.step()
    assert driver.operations[patient].ending is not None
    driver.finish()


def test_prompt_logprobs_come_in_chunks_and_name_every_token_but_the_first() -> None:
    driver = Driver(max_step_tokens=32)
    prompt = list(range(1, 301))
    outputs = wire.PromptOutputs(logprobs=0)
    driver.send(wire.Open(seq=1), wire.Append(seq=1, op=5, tokens=pack_tokens(prompt), outputs=outputs))
    driver.send(wire.Generate(seq=1, op=6, stop=StopParams(max_tokens=2)))
    driver.run()
    scores = next(
        event for event in driver.others if isinstance(event, wire.Finished) and event.op == 5
    ).prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [score.logprob for score in scores[1:] if score] == [-float(token) for token in prompt[1:]]
    assert any(isinstance(event, wire.Finished) and event.op == 6 for event in driver.others)
    driver.send(wire.Release(seq=1))
    driver.finish()


def test_rows_of_log_probabilities_are_bounded_in_each_step() -> None:
    driver = Driver(max_step_tokens=2048, num_device_pages=512, max_context=1024)
    outputs = wire.PromptOutputs(logprobs=0)
    for seq in (1, 2, 3):
        tokens = pack_tokens([seq] * 400)
        driver.send(wire.Open(seq=seq), wire.Append(seq=seq, op=seq + 5, tokens=tokens, outputs=outputs))
    rows = []
    launch = driver.worker.launch
    driver.worker.launch = lambda step: rows.append(len(step.sampling.score_rows)) or launch(step)  # type: ignore
    driver.run()
    assert max(rows) <= MAX_SCORE_ROWS < sum(rows) == 3 * 399
    ends = [event for event in driver.others if isinstance(event, wire.Finished)]
    assert sorted(len(end.prompt_logprobs or ()) for end in ends) == [400] * 3
    driver.send(*(wire.Release(seq=seq) for seq in (1, 2, 3)))
    driver.finish()


def test_pooled_hidden_states_survive_chunks_and_preemption() -> None:
    driver = Driver(max_step_tokens=16, num_device_pages=24, num_slots=2, max_context=320)
    driver.generate(driver.open([1] * 10, priority=-1), 150, eos=False)
    outputs = wire.PromptOutputs(hidden="mean")
    driver.send(
        wire.Open(seq=10**6, priority=3),
        wire.Append(seq=10**6, op=10**6, tokens=pack_tokens([4] * 200), outputs=outputs),
    )
    driver.run()
    [end] = [event for event in driver.others if isinstance(event, wire.Finished)]
    assert end.hidden == pytest.approx([1.0] * 4)
    driver.send(wire.Release(seq=10**6))
    driver.finish()


def test_bad_commands_fail_alone() -> None:
    driver = Driver(max_context=100)
    good = driver.generate(driver.open([1, 2, 3]), 5)
    driver.send(wire.Generate(seq=999, op=1000))
    driver.send(wire.Open(seq=50), wire.Generate(seq=50, op=1001))
    driver.send(
        wire.Open(seq=51), wire.Append(seq=51, op=1002, tokens=pack_tokens([5000])), wire.Generate(seq=51, op=1003)
    )
    driver.send(wire.Open(seq=52), wire.Append(seq=52, op=1004, tokens=b"abc"))
    driver.send(
        wire.Open(seq=53), wire.Append(seq=53, op=1005, tokens=pack_tokens([1] * 101)), wire.Generate(seq=53, op=1006)
    )
    driver.send(wire.Open(seq=54), wire.Append(seq=54, op=1007, tokens=pack_tokens([1])))
    driver.send(wire.Generate(seq=54, op=1008, sampling=SamplingParams(temperature=-1.0)))
    driver.send(wire.Open(seq=54))
    driver.send(wire.Truncate(seq=54, num_tokens=9))
    by_op = {failure.op: failure for failure in failures(driver)}
    assert by_op[1000].error.kind == "unknown_handle"
    assert "no tokens" in by_op[1001].error.message
    assert "5000" in by_op[1002].error.message
    assert by_op[1003].error.message == by_op[1002].error.message
    assert by_op[1004].error.kind == "invalid_request"
    assert by_op[1005].error.kind == by_op[1006].error.kind == "context_too_long"
    assert by_op[1008].error.param == "temperature"
    driver.run()
    assert isinstance(driver.operations[good].ending, wire.Finished)
    driver.send(*[wire.Release(seq=seq) for seq in (50, 51, 52, 53, 54)])
    driver.finish()


def test_a_full_queue_refuses_with_a_reason() -> None:
    driver = Driver(num_slots=1, max_waiting=2)
    ops = [driver.generate(driver.open([i + 1] * 8), 5) for i in range(2)]
    driver.send(wire.Open(seq=70), wire.Append(seq=70, op=1_000_000, tokens=pack_tokens([1, 2])))
    driver.send(wire.Generate(seq=70, op=1_000_001))
    [failure] = failures(driver)
    assert failure.error.kind == "overloaded"
    assert failure.error.retry_after_s == 1.0
    driver.run()
    assert all(isinstance(driver.operations[op].ending, wire.Finished) for op in ops)
    driver.send(wire.Release(seq=70))
    driver.finish()


def test_a_tenant_that_fills_the_queue_leaves_the_others_their_shares() -> None:
    driver = Driver(num_slots=1, max_waiting=8)
    numbers = itertools.count(1)

    def refused(tenant: str, count: int) -> int:
        """Refusals of so many generations of a tenant; nothing runs meanwhile."""
        num_refused = 0
        for _ in range(count):
            driver.others.clear()
            seq = next(numbers)
            driver.send(
                wire.Open(seq=seq, tenant=tenant),
                wire.Append(seq=seq, op=1000 + seq, tokens=pack_tokens([seq] * 8)),
                wire.Generate(seq=seq, op=2000 + seq, stop=StopParams(max_tokens=1)),
            )
            if any(failure.op == 2000 + seq for failure in failures(driver)):
                num_refused += 1
                driver.send(wire.Release(seq=seq))
        return num_refused

    assert refused("flood", 20) == 12
    assert refused("second", 5) == 1, "two tenants wait: half of 8 each"
    assert refused("third", 5) == 2, "a third of 8, rounded up"
    assert refused("flood", 1) == refused("second", 1) == 1
    driver.run()
    assert refused("flood", 1) == 0


def test_a_full_queue_says_when_a_place_is_expected() -> None:
    driver = Driver(num_slots=1, max_waiting=1, eos=-1)
    for _ in range(2):  # a place every two seconds
        driver.clock.advance(2.0)
        driver.generate(driver.open([1] * 8), 1)
        driver.run()
    driver.clock.advance(2.0)
    running = driver.generate(driver.open([1] * 8), 100)
    for _ in range(3):
        driver.step()
    waiting = driver.open([2] * 8)
    driver.generate(waiting, 100)
    driver.send(wire.Open(seq=70))

    def told(op: int) -> int:
        driver.others.clear()
        driver.send(wire.Generate(seq=70, op=op))
        [failure] = failures(driver)
        seconds = failure.error.retry_after_s
        assert f"try again in {math.ceil(seconds)} s" in failure.error.message
        return round(seconds)  # steps take a hundredth of a second each

    assert [told(1_000_001 + number) for number in range(3)] == [2, 4, 6]
    # The client gives one up: its place is free, and one of those that were refused may take it.
    driver.send(wire.Release(seq=waiting))
    driver.generate(driver.open([3] * 8), 1)
    assert told(1_000_004) == round(3 * 4 / 3)
    assert driver.operations[running].ending is None
    driver.send(wire.Release(seq=70))
    driver.run()
    driver.finish()


def test_a_client_that_vanishes_leaves_nothing() -> None:
    driver = Driver()
    for _ in range(10):
        driver.generate(driver.open(), 50)
    for _ in range(5):
        driver.step()
    driver.engine.drop_client(1)
    driver.operations.clear()
    driver.sequences.clear()
    driver.finish()


def test_stop_strings_and_tokens_end_a_generation() -> None:
    driver = Driver(eos=-1)
    tokens = expected_tokens([1, 2, 3], 4, 10, driver.vocab)
    driver.send(wire.Open(seq=1), wire.Append(seq=1, op=1, tokens=pack_tokens([1, 2, 3])))
    driver.send(wire.Generate(seq=1, op=2, sampling=SamplingParams(seed=4), stop=StopParams(stop=[b"xxx"])))
    driver.run()
    driver.send(wire.Open(seq=2), wire.Append(seq=2, op=3, tokens=pack_tokens([1, 2, 3])))
    stop = StopParams(stop_token_ids=[tokens[4]])
    driver.send(wire.Generate(seq=2, op=4, sampling=SamplingParams(seed=4), stop=stop))
    driver.run()
    ends = {event.op: event for event in driver.others if isinstance(event, wire.Finished)}
    assert (ends[2].stop, ends[2].cut_bytes, ends[2].usage.num_output_tokens) == ("xxx", 3, 3)
    assert (ends[4].stop, ends[4].usage.num_output_tokens) == (tokens[4], 5)
    held = [event.hold_bytes for event in driver.others if isinstance(event, wire.Token) and event.op == 2]
    assert held == [1, 2, 0]
    driver.send(wire.Release(seq=1), wire.Release(seq=2))
    driver.finish()


def test_traces_tell_a_requests_life() -> None:
    driver = Driver(trace=True, max_step_tokens=32)
    driver.send(wire.Open(seq=1, request_id="r1"), wire.Append(seq=1, op=1, tokens=pack_tokens([1] * 50)))
    driver.send(wire.Generate(seq=1, op=2, stop=StopParams(max_tokens=2, ignore_eos=True)))
    driver.run()
    spans = [event.what for event in driver.others if isinstance(event, wire.TraceSpan)]
    assert spans == ["queued", "scheduled", "chunk", "chunk", "first_token", "length"]
    driver.send(wire.Release(seq=1))
    driver.finish()


def starts(driver: Driver, request_id: str) -> list[tuple[str, int]]:
    spans = [event for event in driver.others if isinstance(event, wire.TraceSpan) and event.request_id == request_id]
    return [(span.what, span.detail) for span in spans if span.what in ("scheduled", "continued")]


def test_traces_tell_what_a_start_found_and_what_it_goes_on_from() -> None:
    driver = Driver(trace=True, num_device_pages=64, page_size=16)
    short = StopParams(max_tokens=3, ignore_eos=True)

    def request(seq: int, name: str, tokens: list[int]) -> None:
        driver.send(wire.Open(seq=seq, request_id=name), wire.Append(seq=seq, op=seq, tokens=pack_tokens(tokens)))
        driver.send(wire.Generate(seq=seq, op=100 + seq, stop=short))

    request(1, "parent", list(range(50)))
    driver.send(wire.Fork(seq=1, child=2, request_id="later fork"))
    driver.run()
    driver.send(wire.Generate(seq=2, op=102, stop=short), wire.Generate(seq=1, op=201, stop=short))
    driver.run()
    assert starts(driver, "parent") == [("scheduled", 0), ("scheduled", 52), ("continued", 52)]
    assert starts(driver, "later fork") == [("scheduled", 52), ("continued", 52)]

    driver.send(wire.Open(seq=3, request_id="same row"), wire.Append(seq=3, op=3, tokens=pack_tokens([60] * 40)))
    driver.send(wire.Fork(seq=3, child=4, request_id="fork of it"))
    driver.send(*[wire.Generate(seq=seq, op=100 + seq, stop=short) for seq in (3, 4)])
    driver.run()
    assert starts(driver, "fork of it") == [("scheduled", 40), ("continued", 40)]

    request(5, "shares a prefix", [*range(40), 61])
    driver.run()
    assert starts(driver, "shares a prefix") == [("scheduled", 40)], "found, but not gone on from"
    driver.send(*[wire.Release(seq=seq, kind="chat") for seq in (1, 2, 3, 4)])
    turn = [event.token for event in driver.others if isinstance(event, wire.Token) and event.op == 105]
    driver.send(wire.Release(seq=5, kind="chat"))
    request(6, "next turn", [*range(40), 61, *turn, 62])
    driver.run()
    assert starts(driver, "next turn") == [("scheduled", 43), ("continued", 43)]
    driver.send(wire.Release(seq=6))
    driver.finish()


def test_a_failing_device_surfaces() -> None:
    driver = Driver()
    driver.worker.fail_at_step = 3
    driver.generate(driver.open(), 50)
    with pytest.raises(RuntimeError, match="the device failed"):
        driver.run()


def test_a_command_that_nobody_foresaw_fails_alone() -> None:
    """A bug in carrying one out is its client's trouble; the engine goes on."""
    driver = Driver()
    number, other = driver.open([5] * 10), driver.open([6] * 10)
    driver.generate(other, 5)
    driver.send(wire.Append(seq=number, op=10**9, tokens=7))  # type: ignore[arg-type]
    [failed] = failures(driver)
    assert (failed.op, failed.error.kind) == (10**9, "internal")
    assert "could not carry this out" in failed.error.message
    driver.run()
    assert all(operation.ending is not None for operation in driver.operations.values())
