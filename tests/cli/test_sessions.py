"""`weft sessions`: a table and lines of JSON of what waits on a server."""

from __future__ import annotations

import json

from msgspec.structs import replace

from tests.cli.conftest import Weft
from tests.server.conftest import RunningServer, running
from weft.core.ids import pack_tokens
from weft.core.wire import Append, Open, Sessions


def hold(server: RunningServer, count: int) -> None:
    """Leave sequences open that have nothing to do."""

    def send() -> None:
        for number in range(1, count + 1):
            server.engine.send(
                [
                    Open(seq=-number, request_id=f"request-{number}"),
                    Append(seq=-number, op=-number, tokens=pack_tokens([1] * number)),
                ]
            )

    server.on_loop(send)
    server.wait_until(lambda: all(not seq.operations for seq in server.engine.sequences.values()))


def expect(server: RunningServer, in_s: float) -> None:
    """Have the engine predict when all sessions return."""
    sessions = server.engine.sessions

    async def predicted(tenant: str, limit: int) -> Sessions:
        found = await sessions(tenant, limit)
        expected = [replace(info, expected_in_s=in_s, expected_by="learned") for info in found.sessions]
        return replace(found, sessions=expected)

    server.engine.sessions = predicted


def test_sessions_as_a_table_and_as_json(weft: Weft) -> None:
    with running() as server:
        empty = weft("sessions", "--url", server.url)
        assert (empty.exit_code, len(empty.stdout.splitlines())) == (0, 1), empty.output
        hold(server, 3)
        table = weft("sessions", "--url", server.url)
        head, *rows = table.stdout.splitlines()
        assert head.split()[:3] == ["ID", "REQUEST", "MODEL"]
        assert [row.split()[1] for row in rows] == ["request-1", "request-2", "request-3"]
        assert rows[1].split()[3:9] == ["intercepted", "program", "2", "2", "0", "0"]
        assert rows[1].split()[-2:] == ["-", "-"]
        lines = weft("sessions", "--url", server.url, "--json", "--limit", "2")
        assert [json.loads(line)["tokens"] for line in lines.stdout.splitlines()] == [1, 2]
        assert "1 more are not shown" in lines.stderr
        expect(server, 600.0)
        [row] = weft("sessions", "--url", server.url, "--limit", "1").stdout.splitlines()[1:]
        in_s, by = row.split()[-2:]
        assert (0 < float(in_s) <= 600, by) == (True, "learned")
        unknown = weft("sessions", "--url", server.url, "--model", "none")
        assert unknown.exit_code == 1
        assert "not served" in unknown.output
        server.on_loop(server.engine.sequences.clear)
