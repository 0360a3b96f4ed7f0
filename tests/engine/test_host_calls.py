"""How many Python calls the engine makes for a step, a command and an admission.

Calls are counted because they are exact, where times are not. The bounds are what the engine needs now and a little
more: a change that exceeds one makes every step, or every command, slower.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.driver import Driver
from tests.python_calls import count_calls
from weft.core import wire
from weft.core.ids import pack_tokens


def decoding(count: int) -> Driver:
    """Sequences that decode, with steps before the next of their pages is full."""
    driver = Driver(page_size=32, num_slots=64, num_device_pages=512, max_step_tokens=2048)
    for number in range(count):
        driver.generate(driver.open([number + 1] * 40), 30, eos=False)
    for _ in range(5):
        driver.step()
    return driver


def step_calls(driver: Driver) -> int:
    return count_calls(driver.engine.step)


def test_a_step_makes_the_same_calls_however_many_sequences_decode() -> None:
    one, many = step_calls(decoding(1)), step_calls(decoding(64))
    assert one == many
    assert one <= 106


Turn = Callable[[int, int], list[wire.Command]]
"""The commands of a program in a turn, by its number and the turn's."""


def append(number: int, position: int) -> list[wire.Command]:
    """Look at the distribution after one more token of a sequence."""
    outputs = wire.PromptOutputs(dist=4)
    return [wire.Append(seq=number, op=1000 * position + number, tokens=pack_tokens([5]), outputs=outputs)]


def on_pages(number: int, position: int) -> list[wire.Command]:
    """The same over explicit pages: an embedding, a forward, and what it answers."""
    on: dict[str, Any] = {"space": number, "queue": 1, "op": 1000 * position + number}
    one, at = struct.pack("<I", 1), pack_tokens([position])
    return [
        wire.EmbedText(**on, tokens=pack_tokens([5]), positions=at, embeds=one),
        wire.Forward(**on, read=one, inputs=one, write=one, outputs=one),
        wire.NextDist(**on, k=4, embeds=one),
    ]


def turn_calls(programs: int, commands: Turn) -> int:
    """Calls of a turn in which each of so many programs asks for a distribution and is answered."""
    driver = Driver(num_slots=64, num_device_pages=512, num_embed_slots=64, max_step_tokens=2048, page_size=32)
    for number in range(1, programs + 1):
        on: dict[str, Any] = {"space": number, "op": 0}
        driver.send(wire.Open(seq=number), wire.OpenSpace(**on), wire.OpenQueue(**on, queue=1))
        driver.send(wire.AllocPages(**on, queue=1, first=1, count=1))
        driver.send(wire.AllocEmbeds(**on, queue=1, first=1, count=1))

    def turn(position: int) -> None:
        for number in range(1, programs + 1):
            driver.engine.submit(1, commands(number, position))
        while driver.engine.busy:
            driver.engine.step()

    for position in range(7):
        turn(position)
    calls = count_calls(lambda: turn(7))
    ended = [event for event in driver.others if getattr(event, "op", 0)]
    assert sum(isinstance(event, wire.Finished) for event in ended) == len(ended) == 8 * programs
    return calls


@pytest.mark.parametrize(("commands", "most"), [(append, 114), (on_pages, 159)])
def test_a_turn_of_a_program_makes_a_bounded_number_of_calls(commands: Turn, most: int) -> None:
    few, many = turn_calls(8, commands), turn_calls(40, commands)
    assert (many - few) / 32 <= most


def test_admitting_a_cached_prompt_makes_a_bounded_number_of_calls() -> None:
    driver = Driver(num_device_pages=512, max_context=2048, max_step_tokens=2048)
    prompt = [7 + index % 50 for index in range(1000)]
    for last in range(3):
        driver.generate(driver.open([*prompt, last]), 1)
        driver.run()
    number, op = 900, 901

    def admit() -> None:
        driver.engine.submit(
            1,
            [
                wire.Open(seq=number),
                wire.Append(seq=number, op=op, tokens=pack_tokens([*prompt, 99])),
                wire.Generate(seq=number, op=op + 1),
            ],
        )
        driver.engine.step()

    assert count_calls(admit) <= 245


def test_an_admission_makes_the_same_calls_however_many_sequences_wait() -> None:
    def calls(waiting: int) -> int:
        driver = Driver(num_slots=4, num_device_pages=64, max_waiting=10_000, prefix_cache=False)
        for number in range(waiting):
            driver.generate(driver.open([number % 900 + 1] * 40), 1, eos=False)
        for _ in range(6):
            driver.step()
        return step_calls(driver)

    assert calls(40) == calls(1000)


def test_a_continued_turn_is_found_with_a_bounded_number_of_calls_however_many_are_remembered() -> None:
    def calls(turns: int) -> int:
        driver = Driver(num_device_pages=512, max_context=2048, max_step_tokens=2048)
        for number in range(turns):
            seq = driver.open([number % 900, *range(60)], namespace="")
            driver.generate(seq, 1, eos=False)
            driver.run()
            tokens = driver.end_turn(seq)
        driver.engine.scheduler.stats()
        seq = driver.open([*tokens, 5], namespace="")
        driver.generate(seq, 1, eos=False)
        return step_calls(driver)

    few, many = calls(3), calls(30)
    assert few == many
    assert many <= 215


def test_giving_up_a_page_makes_the_same_calls_however_long_its_run_is() -> None:
    def calls(tokens: int) -> int:
        driver = Driver(num_device_pages=128, max_context=2048, max_step_tokens=2048, page_size=16)
        seq = driver.open([3 + index % 90 for index in range(tokens)], namespace="")
        driver.generate(seq, 1, eos=False)
        driver.run()
        driver.end_turn(seq, kind="")
        cache, now = driver.engine.cache, driver.clock.now()
        cache.allocate(cache.tiers.device.num_free + 1, now)
        cache.allocate(1, now)  # the run is ranked once a step, and what was learned of others is told then
        return count_calls(lambda: cache.allocate(1, now))

    short, long = calls(200), calls(1800)
    assert short == long
    assert long <= 36
