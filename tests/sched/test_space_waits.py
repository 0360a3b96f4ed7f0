"""Explicit pages of programs that wait: lent to the host under pressure, and back before the next command runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.sched.stepping import CLIENT, PageProgram, Stepped
from weft.abi.errors import OutOfPages
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.sched.policies import POLICIES
from weft.sched.sequence import SequenceState

PROMPT = list(range(40))
MonkeyPatch = pytest.MonkeyPatch


def copies_per_step(monkeypatch: MonkeyPatch, num_pages: int) -> None:
    monkeypatch.setattr("weft.sched.interception.UNMEASURED_COPIES", num_pages)
    monkeypatch.setattr("weft.sched.interception.IDLE_COPIES", num_pages)


def waiting(*, num_host_pages: int = 60, policy: str = "lru", programs: int = 1) -> Stepped:
    """Programs with six pages each, the last of which is not full, wait for a response."""
    stepped = Stepped(num_pages=24, num_host_pages=num_host_pages, policy=policy, space_fraction=1.0)
    for number in range(1, programs + 1):
        stepped.program(number, num_pages=6).feed([*PROMPT, 100 + number, 7, 8, 9])
    stepped.run()
    for program in stepped.programs.values():
        program.wait()
    return stepped


def press(stepped: Stepped, num_pages: int = 22) -> None:
    """A request that needs nearly all pages."""
    stepped.open(9, [900] * num_pages * 8)
    stepped.generate(9, 2)


def lent(monkeypatch: MonkeyPatch) -> Stepped:
    """Its pages may be given up, and none was."""
    copies_per_step(monkeypatch, 0)
    stepped = waiting()
    stepped.open(8, [800] * 88)
    stepped.generate(8, 12)
    for _ in range(4):
        stepped.turn()
    assert stepped.programs[1].pages() == (6, 0)
    assert stepped.scheduler.spaces.get(CLIENT, 1).lent is not None
    copies_per_step(monkeypatch, 64)
    return stepped


def going_out(monkeypatch: MonkeyPatch) -> Stepped:
    """The step in flight takes its last pages to the host, and none were copied before."""
    monkeypatch.setattr("weft.sched.interception.HORIZON_STEPS", 0)
    stepped = waiting()
    press(stepped)
    for _ in range(9):
        if len(stepped.turn().swap_outs):
            break
    assert stepped.programs[1].pages()[1] > 0
    return stepped


def copied_ahead(monkeypatch: MonkeyPatch) -> Stepped:
    """The step in flight copies its last pages, which stay on the device."""
    copies_per_step(monkeypatch, 3)
    stepped = waiting(policy="min_waste")
    stepped.open(8, [800] * 80)
    stepped.generate(8, 40)
    for _ in range(9):
        if len(stepped.turn().swap_outs):
            break
    assert stepped.programs[1].pages() == (6, 0)
    return stepped


def on_host(monkeypatch: MonkeyPatch) -> Stepped:
    """The host has its pages; a sequence's step is in flight."""
    stepped = waiting()
    press(stepped, 23)
    stepped.run()
    stepped.release(9)
    stepped.open(8, [800] * 8)
    stepped.generate(8, 40)
    stepped.turn()
    assert stepped.in_flight
    assert stepped.programs[1].pages() == (0, 6)
    return stepped


def coming_back(monkeypatch: MonkeyPatch) -> Stepped:
    """The step in flight brings all its pages back."""
    stepped = on_host(monkeypatch)
    stepped.programs[1].feed([50])
    stepped.turn()
    assert len(stepped.in_flight[-1].step.swap_ins) == 6
    return stepped


def partly_back(monkeypatch: MonkeyPatch) -> Stepped:
    """The step in flight brings two of its pages; two are back, and the host has the rest."""
    stepped = on_host(monkeypatch)
    copies_per_step(monkeypatch, 2)
    stepped.programs[1].feed([50])
    stepped.turn()
    stepped.turn()
    assert stepped.programs[1].pages() == (4, 2)
    return stepped


def just_back(monkeypatch: MonkeyPatch) -> Stepped:
    """The step in flight runs its next command, on pages that came back in the step before."""
    stepped = coming_back(monkeypatch)
    stepped.turn()
    assert len(stepped.in_flight[-1].flight.space_samples) == 1
    return stepped


def without_room(monkeypatch: MonkeyPatch) -> Stepped:
    """It waits for pages, all of which a running sequence uses."""
    stepped = waiting()
    stepped.open(9, [900] * 180)
    stepped.generate(9, 12)
    for _ in range(6):
        stepped.turn()
    stepped.programs[1].feed([50])
    stepped.turn()
    stepped.turn()
    assert stepped.programs[1].pages()[1] > 0
    return stepped


def host_full(monkeypatch: MonkeyPatch) -> Stepped:
    """The host has room for three pages."""
    stepped = waiting(num_host_pages=3)
    press(stepped, 20)
    for _ in range(9):
        stepped.turn()
        if stepped.programs[1].pages()[1]:
            break
    assert 0 < stepped.programs[1].pages()[1] <= 3
    assert stepped.in_flight
    return stepped


def still_running(monkeypatch: MonkeyPatch) -> Stepped:
    """The step in flight runs its last command, and pages run short."""
    stepped = waiting()
    stepped.programs[1].feed([50])
    stepped.programs[1].wait()
    press(stepped, 14)
    stepped.turn()
    assert len(stepped.in_flight[-1].flight.space_samples) == 1
    return stepped


def in_turn(monkeypatch: MonkeyPatch) -> Stepped:
    """Another program, which came before, gets its pages back in the step in flight; this one holds none."""
    stepped = waiting(programs=2)
    press(stepped, 23)
    stepped.run()
    stepped.release(9)
    copies_per_step(monkeypatch, 2)
    stepped.programs[1].feed([50])
    stepped.turn()
    stepped.now -= 1.0
    stepped.programs[2].feed([50])
    stepped.now += 1.0
    stepped.turn()
    first = stepped.scheduler.spaces.get(CLIENT, 1).lent
    assert first is not None
    assert first.run.held is first.run.tree.root
    assert stepped.programs[2].pages() == (2, 4)
    return stepped


STATES = [
    lent,
    going_out,
    copied_ahead,
    on_host,
    coming_back,
    partly_back,
    just_back,
    without_room,
    host_full,
    still_running,
    in_turn,
]


def go_on(program: PageProgram, stepped: Stepped) -> None:
    program.feed([60])
    program.feed([61])


def close(program: PageProgram, stepped: Stepped) -> None:
    program.asked.clear()
    stepped.close(1)


def free_the_last_page(program: PageProgram, stepped: Stepped) -> None:
    program.do(wire.FreePages, queue=1, pages=program.packed[-4:])
    program.do(wire.AllocPages, queue=1, first=6, count=1)
    program.asked.clear()
    stepped.close(1)


def export(program: PageProgram, stepped: Stepped) -> None:
    if 2 in stepped.programs:
        stepped.programs[2].asked.clear()
        stepped.close(2)
    program.do(wire.ExportPages, queue=1, pages=program.packed, name="pages")
    program.wait()
    stepped.run()
    stepped.program(20, 6, like=program).feed([70])
    program.feed([71])


def export_and_close(program: PageProgram, stepped: Stepped) -> None:
    program.do(wire.ExportPages, queue=1, pages=program.packed, name="pages")
    stepped.run()
    stepped.program(20, 6, like=program).feed([70])
    stepped.close(1)


def copy_tokens(program: PageProgram, stepped: Stepped) -> None:
    program.do(wire.AllocPages, queue=1, first=7, count=1)
    program.do(wire.CopyTokens, queue=1, source=1, source_offset=0, target=7, target_offset=2, count=6)
    program.do(wire.MaskPage, queue=1, page=7, hidden=3)


def open_and_close_queues(program: PageProgram, stepped: Stepped) -> None:
    program.do(wire.OpenQueue, queue=2)
    program.do(wire.SetQueuePriority, queue=2, priority=3)
    program.do(wire.Sync, queue=1)
    program.do(wire.CloseQueue, queue=2)


def wait_again(program: PageProgram, stepped: Stepped) -> None:
    program.wait("sleep", 5.0)
    program.wait("message")


def wait_meanwhile(program: PageProgram, stepped: Stepped) -> None:
    program.do(wire.ExportPages, queue=1, pages=program.packed[:4], name="pages")
    stepped.turn()
    program.wait()
    program.feed([60])
    stepped.turn()


def forget_prefixes(program: PageProgram, stepped: Stepped) -> None:
    stepped.say(wire.ResetPrefixCache())


def drop_client(program: PageProgram, stepped: Stepped) -> None:
    for asking in stepped.programs.values():
        asking.asked.clear()
    stepped.scheduler.drop_client(CLIENT, stepped.now)
    stepped.known.clear()
    stepped.generations.clear()
    stepped.programs.clear()
    stepped.check()


COMMANDS = [
    go_on,
    close,
    free_the_last_page,
    export,
    export_and_close,
    copy_tokens,
    open_and_close_queues,
    wait_again,
    wait_meanwhile,
    forget_prefixes,
    drop_client,
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_command_while_pages_move(
    state: Callable[[MonkeyPatch], Stepped], command: Callable[[PageProgram, Stepped], None], monkeypatch: MonkeyPatch
) -> None:
    """Every token afterwards is that of the tokens alone, and nothing is left behind."""
    stepped = state(monkeypatch)
    command(stepped.programs[1], stepped)
    stepped.settle()
    stepped.run()
    for program in stepped.programs.values():
        program.feed([50])
    stepped.finish()


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_what_ends_is_free_once_the_steps_in_flight_are_done(
    state: Callable[[MonkeyPatch], Stepped], monkeypatch: MonkeyPatch
) -> None:
    stepped = state(monkeypatch)
    drop_client(stepped.programs[1], stepped)
    stepped.settle()
    tiers = stepped.cache.tiers
    assert tiers.device.num_fenced == tiers.host.num_fenced == tiers.num_kept == 0
    assert tiers.num_available == tiers.device.num_pages
    assert not stepped.scheduler.has_work


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_discards_explicit_pages(policy: str) -> None:
    stepped = waiting(policy=policy, programs=2)
    press(stepped, 20)
    stepped.run()
    stepped.release(9)
    stats = stepped.scheduler.stats()
    assert sum(sum(program.pages()) for program in stepped.programs.values()) == 12
    assert stats.swapped_out_pages >= 8
    assert stats.space_pages == 12, "they count all the same"
    for program in stepped.programs.values():
        program.feed([50])
    stepped.run()
    assert [program.pages() for program in stepped.programs.values()] == [(6, 0)] * 2
    assert [program.answers for program in stepped.programs.values()] == [2, 2]
    stepped.finish()


def test_pages_stay_where_there_is_room_or_no_host() -> None:
    stepped = waiting()
    stepped.open(3, [1] * 30)
    stepped.generate(3, 3)
    stepped.run()
    assert stepped.programs[1].pages() == (6, 0)
    stepped = waiting(num_host_pages=0)
    press(stepped, 17)
    stepped.run()
    assert stepped.programs[1].pages() == (6, 0)
    stepped.programs[1].feed([50])
    stepped.finish()


def test_pages_that_others_share_stay() -> None:
    stepped = waiting()
    program = stepped.programs[1]
    program.do(wire.ExportPages, queue=1, pages=program.packed[:8], name="pages")
    program.wait()
    press(stepped, 21)
    stepped.run()
    assert program.pages() == (2, 4)
    program.feed([50])
    stepped.finish()


def test_an_import_finds_what_was_exported_before_it(monkeypatch: MonkeyPatch) -> None:
    """The export waits for pages that are on the host, and what names it meanwhile waits for the export."""
    stepped = on_host(monkeypatch)
    copies_per_step(monkeypatch, 2)
    program = stepped.programs[1]
    program.do(wire.ExportPages, queue=1, pages=program.packed, name="pages")
    stepped.program(20, 6, like=program).feed([70])
    stepped.turn()
    assert program.pages() == (2, 4)
    stepped.run()
    assert stepped.programs[20].answers == 1
    stepped.finish()


@pytest.mark.parametrize("num_copies", [2, 64])
def test_an_export_is_made_though_its_program_ends_at_once(num_copies: int, monkeypatch: MonkeyPatch) -> None:
    stepped = on_host(monkeypatch)
    copies_per_step(monkeypatch, num_copies)
    program = stepped.programs[1]
    program.do(wire.FreePages, queue=1, pages=program.packed[-4:])
    program.do(wire.ExportPages, queue=1, pages=program.packed[:-4], name="pages")
    program.feed([50])
    stepped.close(1)
    assert len(stepped.scheduler.spaces) == 1
    program.tokens = PROMPT
    again = stepped.program(20, 5, like=program)
    again.do(wire.AllocPages, queue=1, first=6, count=1)
    again.packed += program.packed[-4:]
    again.feed([70])
    stepped.run()
    assert len(stepped.scheduler.spaces) == again.answers == 1
    stepped.finish()


def test_what_a_program_with_an_export_lent_goes_with_its_client(monkeypatch: MonkeyPatch) -> None:
    stepped = on_host(monkeypatch)
    stepped.programs[1].do(wire.ExportPages, queue=1, pages=stepped.programs[1].packed, name="pages")
    stepped.close(1)
    stepped.scheduler.drop_client(CLIENT, stepped.now)
    stepped.known.clear()
    stepped.generations.clear()
    assert len(stepped.scheduler.spaces) == 0
    stepped.check()
    stepped.finish()


def test_a_program_that_does_not_wait_keeps_its_pages() -> None:
    stepped = waiting()
    stepped.programs[1].feed([50])
    stepped.run()
    press(stepped, 17)
    stepped.run()
    assert stepped.programs[1].pages() == (6, 0)
    stepped.finish()


def test_the_policy_learns_how_long_programs_wait() -> None:
    stepped = waiting(policy="min_waste")
    stepped.now += 7.0
    stepped.programs[1].feed([50])
    assert [wait[:3] for wait in stepped.scheduler._state.interception.waits.past] == [("", "http", pytest.approx(7.0))]
    stepped.programs[1].wait("sleep", 5.0)
    press(stepped, 23)
    stepped.run()
    stepped.programs[1].feed([51])
    stepped.run()
    stats = stepped.scheduler.stats()
    assert stats.wait_returns == {"http": {"kept": 1}, "sleep": {"host": 1}}
    assert stats.pages_given_up["sleep"] == {"host": 6}
    stepped.finish()


def test_pages_count_for_their_tenant_whether_lent_or_not() -> None:
    stepped = waiting()
    held = stepped.cache.tiers.candidates.shares.count_held
    assert held()[""] == 6
    stepped.open(8, [800] * 88)
    for _ in range(4):
        stepped.turn()
    assert stepped.scheduler.spaces.get(CLIENT, 1).lent is not None
    assert held()[""] == 6 + 11
    stepped.programs[1].feed([50])
    stepped.run()
    assert held()[""] == 6 + 11
    stepped.finish()


def test_newcomers_leave_room_for_pages_that_come_back(monkeypatch: MonkeyPatch) -> None:
    stepped = on_host(monkeypatch)
    stepped.open(9, [900] * 128)
    stepped.generate(9, 30)
    for _ in range(5):
        stepped.turn()
    assert len(stepped.scheduler.sequences.running) == 2
    stepped.programs[1].feed([50])
    stepped.open(10, [1] * 16)
    stepped.generate(10, 2)
    for _ in range(5):
        stepped.turn()
    assert 3 < stepped.cache.num_available < 8, "enough for the newcomer alone"
    assert stepped.sequence(10).state is SequenceState.WAITING
    assert stepped.programs[1].pages() == (0, 6)
    stepped.finish()


def test_a_program_that_holds_no_device_page_is_not_taken_for_them() -> None:
    stepped = waiting(programs=2)
    stepped.programs[1].feed([50])
    stepped.run()
    press(stepped)
    stepped.run()
    assert stepped.programs[2].pages()[1] >= 5
    stepped.release(9)
    stepped.programs[2].feed([50])
    stepped.run()
    assert stepped.programs[2].answers == 2
    with pytest.raises(OutOfPages, match="the youngest"):
        stepped.scheduler.spaces.get(CLIENT, 1)


def test_pins_give_way_to_pages_that_come_back_where_nothing_runs() -> None:
    stepped = waiting(programs=3)
    press(stepped, 23)
    stepped.run()
    stepped.truncate(9, 88)
    stepped.release(9)
    stepped.say(wire.Retain(op=77, tokens=pack_tokens([900] * 88), ttl_s=1e9, weight=float("inf")))
    assert stepped.cache.retention.has_pins
    for program in stepped.programs.values():
        program.feed([50])
        stepped.run()
    assert [program.answers for program in stepped.programs.values()] == [2] * 3
    assert not stepped.cache.retention.has_pins
    stepped.finish()


def test_a_wait_that_cannot_be_is_refused() -> None:
    stepped = waiting()
    stepped.say(wire.ExpectSpace(space=1, kind="queue"), wire.ExpectSpace(space=7, kind="http"))
    kinds = [event.error.kind for event in stepped.others if isinstance(event, wire.Failed)]
    assert kinds == ["invalid_request", "unknown_handle"]


def test_explicit_pages_take_the_room_of_a_pin_on_the_host() -> None:
    """They can go nowhere else, and the request that needs their room would wait for ever."""
    stepped = Stepped(num_pages=24, num_host_pages=6, space_fraction=1.0)
    pinned = [3] * 48
    stepped.open(7, pinned)
    stepped.generate(7, 1)
    stepped.run()
    stepped.release(7)
    stepped.say(wire.Demote(op=900, tokens=pack_tokens(pinned)))
    stepped.run()
    stepped.say(wire.Retain(op=901, tokens=pack_tokens(pinned), weight=math.inf, ttl_s=1e9))
    stepped.program(1, num_pages=6).feed([*PROMPT, 101, 7, 8, 9])
    stepped.run()
    stepped.programs[1].wait()
    press(stepped)
    stepped.run()
    assert stepped.programs[1].pages()[1] > 0
    stepped.finish()
