"""What one step may do with pages that change hands while it is built."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.engine.driver import Driver
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import StopParams
from weft.core.step import Step
from weft.testing.fake_worker import most_likely
from weft.worker.checks import check_step


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


@pytest.mark.parametrize("freed", ["exported", "imported"])
def test_the_copy_for_a_forward_that_fails_keeps_its_page_for_the_step(freed: str) -> None:
    """Otherwise the page is free at once, and another copy of the step goes to it."""
    driver = Driver(lenient=True, num_device_pages=40, max_context=320, num_embed_slots=8, num_slots=8, max_running=4)
    open_space(driver, 1, 2, reserve=8)
    copies: list[list[list[int]]] = []
    launch = driver.worker.launch

    def checked(step: Step) -> Any:
        copies.append(step.page_copies.tolist())
        check_step(step, driver.worker.spec)
        return launch(step)

    driver.worker.launch = checked  # type: ignore[method-assign]
    on: dict[str, Any] = {"space": 1, "queue": 1}

    def sampled(page: int, position: int, mask: bytes = b"") -> wire.ForwardSample:
        at = struct.pack("<i", position)
        named = {"read": u32(page), "write": u32(page), "tokens": pack_tokens([3]), "positions": at, "mask": mask}
        return wire.ForwardSample(**on, op=next(driver.numbers), **named)

    def steps() -> None:
        for _ in range(6):
            driver.step()

    driver.send(sampled(1, 0), sampled(2, 0))
    steps()
    exports = [wire.ExportPages(**on, op=next(driver.numbers), pages=u32(page), name=str(page)) for page in (1, 2)]
    driver.send(*exports)
    if freed == "imported":
        driver.send(
            wire.ImportPages(**on, op=next(driver.numbers), first=11, name="1"),
            wire.ReleaseExport(**on, op=next(driver.numbers), name="1"),
        )
        steps()
    bad, good = sampled(1, 1, mask=b"abc"), sampled(2, 1)
    free = wire.FreePages(**on, op=next(driver.numbers), pages=u32(1 if freed == "exported" else 11))
    driver.send(bad, free, good)
    steps()
    failed, finished = answers(driver, bad.op, good.op)
    assert isinstance(failed, wire.Failed)
    assert isinstance(finished, wire.Finished)
    assert any(copies)


def test_a_client_that_is_gone_is_dropped_though_the_end_of_one_space_makes_room_for_another() -> None:
    """Both spaces have lent their pages; the end of the first lets the second export, which is closing."""
    driver = Driver(lenient=True, num_device_pages=14, num_host_pages=16, num_slots=8, max_running=4, max_context=224)
    for space, priority in ((1, 5), (2, 0)):
        at: dict[str, Any] = {"space": space, "queue": 1}
        driver.send(
            wire.OpenSpace(space=space, op=next(driver.numbers), priority=priority),
            wire.OpenQueue(**at, op=next(driver.numbers)),
            wire.AllocPages(**at, op=next(driver.numbers), first=1, count=3),
            wire.ExpectSpace(space=space, kind="http"),
        )

    def steps(count: int) -> None:
        for _ in range(count):
            driver.clock.advance(0.01)
            driver.engine.step()

    def generates(seq: int, tokens: range, most: int) -> None:
        driver.send(
            wire.Open(seq=seq),
            wire.Append(seq=seq, op=next(driver.numbers), tokens=pack_tokens(tokens)),
            wire.Generate(seq=seq, op=next(driver.numbers), stop=StopParams(max_tokens=most, ignore_eos=True)),
        )

    generates(102, range(100, 178), 100)
    steps(3)
    generates(101, range(110), 5)
    steps(5)
    spaces = {space.number: space for space in driver.engine.scheduler.spaces.spaces()}
    assert all(space.lent is not None for space in spaces.values())
    driver.send(wire.Release(seq=101))
    steps(38)
    for space in (1, 2):
        driver.clock.advance(0.01)
        driver.send(wire.ExportPages(space=space, queue=1, op=next(driver.numbers), pages=u32(1), name="x"))
    driver.send(wire.CloseSpace(space=2))
    while spaces[2].lent is not None:
        steps(1)
    assert spaces[1].lent is not None
    assert spaces[2].num_pending == 1
    driver.engine.drop_client(1)
    assert not list(driver.engine.scheduler.spaces.spaces())


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


def test_given_tokens_of_distributions_count_in_a_step() -> None:
    """Each of them takes about as long as a distribution, and a command may give thousands."""
    driver = Driver(lenient=True, num_embed_slots=8, num_device_pages=8, max_context=128)
    open_space(driver, 1, 1)
    driver.send(*feed(driver, 1, [5, 6], 1, u32(1, 2), 1))
    targets = pack_tokens([7] * 100)
    ops = [next(driver.numbers) for _ in range(5)]
    driver.send(*[wire.NextDist(space=1, queue=1, op=op, k=0, embeds=u32(1), targets=targets) for op in ops])
    rows: list[int] = []
    launch = driver.worker.launch

    def counted(step: Step) -> Any:
        rows.append(0 if step.sampling is None else len(step.sampling.score_rows))
        return launch(step)

    driver.worker.launch = counted  # type: ignore[method-assign]
    for _ in range(8):
        driver.step()
    assert all(isinstance(event, wire.Finished) for event in answers(driver, *ops))
    assert sum(rows) == 500
    assert max(rows) == 200
