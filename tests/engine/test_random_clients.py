"""Random clients of an engine: every token is right, everything ends, nothing leaks."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens


def act(driver: Driver) -> None:
    """One random thing a client may do."""
    random = driver.random
    resting = [n for n, s in driver.sequences.items() if s.active is None]
    active = [n for n, s in driver.sequences.items() if s.active is not None]
    choice = random.random()
    if choice < 0.3 or not driver.sequences:
        number = driver.open(priority=random.choice([0, 0, 0, 1, -1]))
        children = [driver.fork(number) for _ in range(random.choice([0, 0, 0, 1, 3]))]
        for each in (number, *children):
            if random.random() < 0.9:
                driver.generate(each, random.randrange(1, 60))
            else:
                driver.report(each, driver.text(20))
    elif choice < 0.4 and resting:
        number = random.choice(resting)
        tokens = driver.text(40)
        if random.random() < 0.5:
            driver.report(number, tokens)
        else:
            driver.sequences[number].tokens += tokens
            driver.send(wire.Append(seq=number, op=next(driver.numbers), tokens=pack_tokens(tokens)))
    elif choice < 0.55 and resting:
        driver.generate(random.choice(resting), random.randrange(1, 40))
    elif choice < 0.6 and resting:
        driver.fork(random.choice(resting))
    elif choice < 0.65 and resting:
        number = random.choice(resting)
        keep = random.randrange(1, len(driver.sequences[number].tokens) + 1)
        del driver.sequences[number].tokens[keep:]
        driver.send(wire.Truncate(seq=number, num_tokens=keep))
    elif choice < 0.7 and active:
        driver.send(wire.Cancel(seq=random.choice(active)))
    elif choice < 0.74 and active:
        driver.send(wire.SetPriority(seq=random.choice(active), priority=random.randrange(-2, 3)))
    elif choice < 0.9:
        number = random.choice(list(driver.sequences))
        if random.random() < 0.3:
            driver.send(wire.Hold(seq=number, ttl_s=random.random()))
        else:
            driver.send(wire.Release(seq=number))
        driver.engine.publish(0)
        del driver.sequences[number]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_device_pages": 24, "num_slots": 4, "max_context": 320},
        {"num_device_pages": 24, "num_slots": 8, "max_context": 320, "num_host_pages": 16},
        {"num_device_pages": 40, "num_slots": 16, "max_context": 320, "max_step_tokens": 24, "prefix_wait_steps": 2},
        {"num_device_pages": 300, "num_slots": 32},
        {"num_device_pages": 60, "num_slots": 6, "page_size": 8, "max_context": 320, "prefix_cache": False},
    ],
    ids=["tight", "tiers", "small-steps", "roomy", "no-prefix-cache"],
)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))])
def test_random_clients(seed: int, sizes: dict[str, object], overlap: bool) -> None:
    driver = Driver(seed, overlap=overlap, **sizes)
    for _ in range(250):
        act(driver)
        if driver.random.random() < 0.7:
            driver.step()
        else:
            driver.check()
    driver.finish()
