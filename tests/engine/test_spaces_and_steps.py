"""What one step may do with pages that change hands while it is built."""

from __future__ import annotations

import struct

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.testing.fake_worker import most_likely


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def open_space(driver: Driver, space: int, pages: int, reserve: int = 0) -> None:
    driver.send(
        wire.OpenSpace(space=space, op=next(driver.numbers), reserve_pages=reserve),
        wire.OpenQueue(space=space, queue=1, op=next(driver.numbers)),
        wire.AllocPages(space=space, queue=1, op=next(driver.numbers), first=1, count=pages),
        wire.AllocEmbeds(space=space, queue=1, op=next(driver.numbers), first=1, count=4),
    )


def feed(driver: Driver, space: int, tokens: list[int], page: int, embeds: bytes, output: int) -> list[wire.Command]:
    common = {"space": space, "queue": 1}
    positions = struct.pack(f"<{len(tokens)}i", *range(len(tokens)))
    return [
        wire.EmbedText(
            **common, op=next(driver.numbers), tokens=pack_tokens(tokens), positions=positions, embeds=embeds
        ),
        wire.Forward(**common, op=next(driver.numbers), read=b"", inputs=embeds, write=u32(page), outputs=u32(output)),
    ]


def answers(driver: Driver, *ops: int) -> list[wire.Event]:
    driver.engine.publish(0)
    found = {event.op: event for event in driver.others if isinstance(event, wire.Finished | wire.Failed)}
    return [found[op] for op in ops]


def test_a_page_freed_and_given_out_again_in_one_step_is_not_written_while_it_is_read() -> None:
    """All of it comes at once, so all could ride in one step; the reservation has a single page."""
    driver = Driver(lenient=True, num_embed_slots=8, num_device_pages=8, max_context=128, space_fraction=0.125)
    open_space(driver, 1, 1, reserve=1)
    first, second = next(driver.numbers), next(driver.numbers)
    common = {"space": 1, "queue": 1}
    driver.send(
        *feed(driver, 1, [5, 6], 1, u32(1, 2), 1),
        wire.NextDist(**common, op=first, k=1, embeds=u32(1)),
        wire.FreePages(**common, op=next(driver.numbers), pages=u32(1)),
        wire.AllocPages(**common, op=next(driver.numbers), first=2, count=1),
        *feed(driver, 1, [7, 8], 2, u32(3, 4), 3),
        wire.NextDist(**common, op=second, k=1, embeds=u32(3)),
    )
    for _ in range(6):
        driver.step()
        driver.clock.advance(0.01)
    one, two = answers(driver, first, second)
    assert isinstance(one, wire.Finished)
    assert isinstance(two, wire.Finished)
    assert one.dists is not None
    assert two.dists is not None
    assert one.dists.ids == [most_likely([5, 6], driver.vocab)]
    assert two.dists.ids == [most_likely([7, 8], driver.vocab)]


def test_a_request_that_cannot_go_on_otherwise_takes_the_youngest_program_s_pages() -> None:
    """It needs more than half of all pages, which programs hold; one of them is in the very step that needs room."""
    driver = Driver(lenient=True, num_embed_slots=8, num_device_pages=20, max_context=320, max_step_tokens=128)
    open_space(driver, 1, 5)
    driver.clock.advance(1)
    open_space(driver, 2, 5)
    old, young = next(driver.numbers), next(driver.numbers)
    number = driver.open([i % 900 for i in range(200)])
    driver.generate(number, 5)
    for count in range(40):
        driver.send(*feed(driver, 2, [5], 1 + count // 16, u32(1), 1))
        driver.step()
    driver.run()
    driver.send(
        wire.Sync(space=1, queue=1, op=old),
        wire.Sync(space=2, queue=1, op=young),
    )
    kept, lost = answers(driver, old, young)
    assert isinstance(kept, wire.Finished)
    assert isinstance(lost, wire.Failed)
    assert lost.error.kind == "out_of_pages"
    assert all(operation.ending is not None for operation in driver.operations.values())
    driver.send(wire.CloseSpace(space=1), wire.CloseSpace(space=2))
    driver.finish()
