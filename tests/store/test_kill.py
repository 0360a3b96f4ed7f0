"""A process that is killed in the middle of its writes loses none that it was told of, and leaves none in part."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from weft.store.database import FILE, Database
from weft.store.values import INLINE_BYTES, DatabaseValueStore

NUM_WRITERS = 6
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.store.test_kill import write_forever
asyncio.run(write_forever(Path(sys.argv[1]), int(sys.argv[2])))
"""


def value_of(writer: int, number: int) -> bytes | None:
    """What a name has after a writer's write of this number: nothing, a value in its row, or one in a file."""
    if number < 0 or number % 5 == 4:
        return None
    content = b"%d:%d;" % (writer, number)
    return content * (INLINE_BYTES // len(content) + 2) if number % 3 == 0 else content


async def write_forever(folder: Path, first: int) -> None:
    """Says which write was awaited, a line each."""
    store = DatabaseValueStore(Database(folder), 1 << 30)

    async def write(writer: int) -> None:
        number = first
        while True:
            value = value_of(writer, number)
            tenant = f"t{writer % 2}"
            if value is None:
                await store.delete(tenant, f"{writer}")
            else:
                await store.put(tenant, f"{writer}", value)
            print(writer, number, flush=True)
            number += 1

    await asyncio.gather(*map(write, range(NUM_WRITERS)))


def killed(folder: Path, first: int, after: int) -> dict[int, int]:
    """By writer, the last write that a process was told of, which was killed after so many of all."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    told: dict[int, int] = {}
    for count, line in enumerate(process.stdout):
        if line.endswith("\n"):
            writer, number = map(int, line.split())
            told[writer] = number
        if count == after:
            process.kill()
    assert process.wait(60) == -signal.SIGKILL
    return told


def check(folder: Path, told: dict[int, int]) -> None:
    async def read() -> None:
        store = DatabaseValueStore(Database(folder))
        for writer, number in told.items():
            found = await store.get(f"t{writer % 2}", f"{writer}")
            assert found in (value_of(writer, number), value_of(writer, number + 1)), (writer, number)
        await store.close()

    asyncio.run(read())
    with closing(sqlite3.connect(folder / FILE)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        named = {name for (name,) in database.execute("SELECT blob FROM program_values WHERE blob IS NOT NULL")}
        sizes = "SELECT tenant, SUM(size_bytes) FROM program_values GROUP BY tenant ORDER BY tenant"
        used = "SELECT tenant, size_bytes FROM value_usage WHERE size_bytes > 0 ORDER BY tenant"
        assert database.execute(sizes).fetchall() == database.execute(used).fetchall()
    assert {path.name for path in (folder / "blobs").iterdir()} == named


def test_a_process_that_is_killed_in_the_middle_of_its_writes(tmp_path: Path) -> None:
    check(tmp_path, killed(tmp_path, 0, 100))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    first = 0
    for _ in range(25):
        told = killed(tmp_path, first, chance.randrange(400))
        check(tmp_path, told)
        first = max(told.values(), default=first) + 2
