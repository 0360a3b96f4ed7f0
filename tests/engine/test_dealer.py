"""Messages between two processes: whole, in order, none forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from weft.engine.dealer import Dealer


def run(scenario: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_messages_come_in_order_both_ways_and_before_the_other_end_listens(tmp_path: Path) -> None:
    async def scenario() -> None:
        address = f"ipc://{tmp_path}/dealer"
        front, back = asyncio.Queue[bytes](), asyncio.Queue[bytes]()
        sent = [b"%d" % number for number in range(200)]
        early = Dealer(address, front.put_nowait, reconnect_ms=10)
        for data in sent:
            early.send(data)
        late = Dealer(address, back.put_nowait, bind=True)
        assert [await back.get() for _ in sent] == sent
        for data in sent:
            late.send(data)
        assert [await front.get() for _ in sent] == sent
        early.close()
        early.close()
        early.send(b"to nobody")
        late.close()

    run(scenario())


def test_what_fails_on_one_message_hears_the_next_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(str(context["exception"])))
        heard = asyncio.Queue[bytes]()

        def on_data(data: bytes) -> None:
            heard.put_nowait(data)
            if data == b"bad":
                raise ValueError("this one cannot be read")

        address = f"ipc://{tmp_path}/dealer"
        sender = Dealer(address, heard.put_nowait, reconnect_ms=10)
        sent = [b"good", b"bad", b"bad", b"good"]
        for data in sent:
            sender.send(data)
        receiver = Dealer(address, on_data, bind=True)
        assert [await heard.get() for _ in sent] == sent
        assert said == ["this one cannot be read"] * 2
        sender.close()
        receiver.close()

    run(scenario())


def test_an_end_that_binds_drops_what_nobody_can_hear(tmp_path: Path) -> None:
    async def scenario() -> None:
        heard = asyncio.Queue[bytes]()
        alone = Dealer(f"ipc://{tmp_path}/dealer", heard.put_nowait, bind=True)
        alone.send(b"to nobody")
        late = Dealer(f"ipc://{tmp_path}/dealer", heard.put_nowait)
        late.send(b"hello")
        assert await heard.get() == b"hello"
        late.close()
        alone.close()

    run(scenario())
