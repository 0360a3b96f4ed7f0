"""How many Python calls the engine makes for a step, a command and an admission.

Calls are counted because they are exact, where times are not. The bounds are what the engine needs now and a little
more: a change that exceeds one makes every step, or every command, slower.
"""

from __future__ import annotations

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
    assert one <= 102


def turn_calls(programs: int) -> int:
    """Calls of a turn in which each of so many programs asks for a distribution and is answered."""
    driver = Driver(num_slots=64, num_device_pages=512, max_step_tokens=2048, page_size=32)
    driver.send(*(wire.Open(seq=number) for number in range(1, programs + 1)))

    def turn(position: int) -> None:
        outputs = wire.PromptOutputs(dist=4)
        for number in range(1, programs + 1):
            op = 1000 * position + number
            driver.engine.submit(1, [wire.Append(seq=number, op=op, tokens=pack_tokens([5]), outputs=outputs)])
        while driver.engine.busy:
            driver.engine.step()

    for position in range(1, 8):
        turn(position)
    calls = count_calls(lambda: turn(8))
    assert sum(isinstance(event, wire.Finished) for event in driver.others) == 8 * programs
    return calls


def test_a_single_command_makes_a_bounded_number_of_calls() -> None:
    few, many = turn_calls(8), turn_calls(40)
    assert (many - few) / 32 <= 133


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

    assert count_calls(admit) <= 249


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
