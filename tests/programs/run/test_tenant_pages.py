"""A tenant's share of explicit pages, through sessions: allocated, imported, reserved, and given back at every end."""

from tests.programs.run.test_session_pages import started, u32, with_spaces
from tests.programs.sessions import Host
from weft.abi.errors import EngineDead, OutOfPages
from weft.abi.frames import EventKind
from weft.abi.operations import Op
from weft.core.wire import FreePages
from weft.programs.quota.accounts import Accounts, Caps
from weft.programs.quota.limits import Limits
from weft.programs.types import Caller

OTHER = Caller(tenant="u", namespace="u")
REFUSED = ("out_of_pages", "")


def halved(host: Host) -> None:
    """Of the 50 pages there are for programs, a tenant may have 25."""
    host.accounts = Accounts(Caps(tenant_explicit_share=0.5))


def test_of_all_ways_to_hold_pages_a_tenant_has_its_share() -> None:
    async def test(host: Host) -> None:
        halved(host)
        first, space = started(host)
        allocated = first.ask(Op.PAGES_ALLOC, 1, 0, 20)
        second, other_space = started(host, reserve_pages=4)
        assert await first.error(Op.PAGES_ALLOC, 1, 100, 2) == REFUSED
        second.ask(Op.PAGES_ALLOC, 1, 0, 5)
        # What is imported counts too; it is given back where there is no place for it.
        imported = second.ask(Op.PAGES_IMPORT, 1, 50, b"name")
        other_space.end(count=1)
        assert second.error_in(await second.end_of(imported)) == REFUSED
        assert other_space.told[-1] == (FreePages, 1, u32(50))
        stranger, _ = started(host, caller=OTHER, reserve_pages=25)
        stranger.ask(Op.PAGES_ALLOC, 1, 0, 25)
        # An allocation that fails, pages that are freed, an engine that dies: each makes room.
        space.end(error=OutOfPages("none"))
        assert first.error_in(await first.end_of(allocated))[0] == "out_of_pages"
        first.ask(Op.PAGES_ALLOC, 1, 0, 20)
        first.say(Op.PAGES_FREE, 1, u32(*range(20)))
        second.ask(Op.PAGES_ALLOC, 1, 60, 20)
        assert await first.error(Op.PAGES_ALLOC, 1, 100, 1) == REFUSED
        call = second.ask(Op.QUEUE_SYNC, 1)
        other_space.end(error=EngineDead("gone"))
        await second.end_of(call)
        await first.end_of(first.ask(Op.SLEEP, 0.0))
        call = first.ask(Op.PAGES_ALLOC, 1, 100, 21)  # the reservation of the second stays
        space.end()
        assert (await first.end_of(call)).kind == EventKind.RESULT
        for program in (first, second, stranger):
            program.close()
        assert host.accounts.num_pages == host.accounts.num_tenants == 0

    with_spaces(test)


def test_a_reservation_that_has_no_place_opens_no_space() -> None:
    async def test(host: Host) -> None:
        halved(host)
        first, _ = started(host, reserve_pages=20)
        second = host.program(reserve_pages=6)
        assert await second.error(Op.QUEUE_SYNC, 1) == REFUSED
        third = host.program(Limits(pages=5), reserve_pages=6)
        assert await third.error(Op.QUEUE_SYNC, 1) == ("limit_exceeded", "pages")
        assert len(host.spaces) == 1
        first.close()
        second.say(Op.QUEUE_OPEN, 1, 0)
        assert len(host.spaces) == 2

    with_spaces(test)
