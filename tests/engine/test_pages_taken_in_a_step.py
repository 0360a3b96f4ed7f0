"""Pages that a request takes from a program while a step is built are not given out within that very step."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver
from tests.engine.test_spaces_and_steps import answers, feed, open_space, u32
from weft.core import wire
from weft.core.ids import pack_tokens, unpack_tokens
from weft.core.sampling import SamplingParams
from weft.testing.fake_worker import expected_tokens

PAGES = 10
"""Of the program: half of all there are, which is what programs may hold."""


def crowded(*, overlap: bool) -> Driver:
    """Twice as many pages as the program may hold, and prompts that take two steps."""
    return Driver(
        lenient=True,
        overlap=overlap,
        num_embed_slots=8,
        num_device_pages=2 * PAGES,
        max_context=320,
        max_step_tokens=128,
        max_running=30,
        num_device_slots=32,
    )


def long_prompt(driver: Driver, length: int = 200) -> int:
    """A generation that needs more pages than the program leaves."""
    return driver.generate(driver.open([token % 900 for token in range(length)]), 3, eos=False)


@pytest.mark.parametrize("writes", [False, True])
def test_what_the_step_reads_and_writes_already_stays_as_it_is(writes: bool) -> None:
    """One step after the other, so that nothing but the step being built keeps its pages from being free: the program's
    forward is in it when the prompt's last chunk, which comes later in its order, finds no room."""
    driver = crowded(overlap=False)
    open_space(driver, 1, PAGES - 1)
    common = {"space": 1, "queue": 1}
    # What is given back is taken again from its end: the last page would be the prompt's next.
    driver.send(*feed(driver, 1, [5, 6], PAGES - 1, u32(1, 2), 1))
    driver.run()

    generation = long_prompt(driver)
    driver.step()
    assert driver.engine.scheduler.spaces.device_pages()
    last, sample = u32(PAGES - 1), next(driver.numbers)
    driver.send(
        wire.ForwardSample(
            **common,
            op=sample,
            read=last,
            tokens=pack_tokens([8]),
            positions=(2).to_bytes(4, "little"),
            write=last if writes else b"",
            sampling=SamplingParams(seed=3),
        )
    )
    driver.step()
    assert not driver.engine.scheduler.spaces.device_pages(), "the prompt has taken them while this step was built"
    driver.run()

    [told] = answers(driver, sample)
    assert isinstance(told, wire.Finished)
    assert list(unpack_tokens(told.tokens)) == expected_tokens([5, 6, 8], 3, 1, driver.vocab)
    assert isinstance(driver.operations[generation].ending, wire.Finished)
    late = next(driver.numbers)
    driver.send(wire.Sync(**common, op=late))
    [lost] = answers(driver, late)
    assert isinstance(lost, wire.Failed)
    assert (lost.error.kind, "the youngest" in lost.error.message) == ("out_of_pages", True)
    driver.send(wire.CloseSpace(space=1))
    driver.finish()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_no_step_uses_is_free_at_once(overlap: bool) -> None:
    """The program waits for something, and the prompt is all that could be computed: there is no step to wait for."""
    driver = crowded(overlap=overlap)
    open_space(driver, 1, PAGES)
    generation = long_prompt(driver)
    driver.run()
    assert isinstance(driver.operations[generation].ending, wire.Finished)
    driver.send(wire.CloseSpace(space=1))
    driver.finish()


@pytest.mark.parametrize("overlap", [False, True])
def test_exports_give_way_too(overlap: bool) -> None:
    driver = crowded(overlap=overlap)
    open_space(driver, 1, PAGES // 2)
    exported = next(driver.numbers)
    driver.send(wire.ExportPages(space=1, queue=1, op=exported, pages=u32(*range(1, PAGES // 2 + 1)), name="all"))
    driver.run()
    [kept] = answers(driver, exported)
    assert isinstance(kept, wire.Finished)
    driver.send(wire.CloseSpace(space=1))
    assert len(list(driver.engine.scheduler.spaces.device_pages())) == PAGES // 2
    generation = long_prompt(driver, 270)
    driver.run()
    assert isinstance(driver.operations[generation].ending, wire.Finished)
    assert not driver.engine.scheduler.spaces.device_pages()
    driver.finish()
