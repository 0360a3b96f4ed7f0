"""A tenant's share of explicit pages, through sessions. The engine keeps to it (`test_explicit_pages`)."""

import pytest

from tests.programs.help import settle
from tests.programs.run.test_session_pages import started, with_spaces
from tests.programs.sessions import Host
from weft.abi.errors import OutOfPages
from weft.abi.operations import Op
from weft.config import ProgramsConfig
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.limits import Limits


@pytest.mark.parametrize(("fraction", "share"), [(None, None), (1.0, None), (0.5, 25), (0.0, 0)])
def test_a_space_is_opened_with_the_share_of_its_tenant(fraction: float | None, share: int | None) -> None:
    async def test(host: Host) -> None:
        host.accounts = Accounts(ProgramsConfig(tenant_pages_fraction=fraction))
        _, space = started(host)
        assert space.tenant_pages == share  # of the 50 that there are for programs

    with_spaces(test)


def test_a_space_that_could_not_be_opened_is_opened_anew_when_it_is_needed() -> None:
    async def test(host: Host) -> None:
        program, space = started(host, reserve_pages=6)
        space.error, space.is_lost = OutOfPages("the share is full"), True
        assert await program.error(Op.QUEUE_SYNC, 1) == ("out_of_pages", "")
        await settle()
        program.say(Op.QUEUE_OPEN, 1, 0)
        assert [opened.reserve_pages for opened in host.spaces] == [6, 6]
        assert [opened.released for opened in host.spaces] == [1, 0]

    with_spaces(test)


def test_a_reservation_beyond_the_limit_of_the_run_opens_no_space() -> None:
    async def test(host: Host) -> None:
        program = host.program(Limits(pages=5), reserve_pages=6)
        assert await program.error(Op.QUEUE_SYNC, 1) == ("limit_exceeded", "pages")
        assert host.spaces == []

    with_spaces(test)
