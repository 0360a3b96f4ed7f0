"""The sandbox on the real session: the same source trusted and sandboxed, and modules, over a fake engine."""

from __future__ import annotations

import msgspec
import pytest

from tests.programs.host.help import TENANT, Bench, with_host
from tests.programs.sandbox.help import EXAMPLES
from weft.programs.registry import Quota, checked_code
from weft.programs.run.runs import RunSpec

PROGRAM = """
    import asyncio
    from weft.sdk import Context, run

    async def main(args):
        print("begin")
        async with Context() as ctx:
            ctx.fill(args)
            first = await ctx.generate(max_tokens=5)
            fork = ctx.fork()
            texts = await asyncio.gather(*(branch.generate(max_tokens=3) for branch in (ctx, fork)))
            run.send({"n": len(texts)})
            return [first.text, *(text.text for text in texts)]
"""


def test_the_same_source_gives_the_same_trusted_and_sandboxed() -> None:
    results: list[bytes] = []

    async def both(bench: Bench) -> None:
        for trusted in (True, False):
            run = bench.launch(PROGRAM, b'"once upon"', trusted=trusted)
            record = await run.wait()
            assert record.error is None
            results.append(run.result or b"")

    with_host(both)
    assert results[0] == results[1]
    assert len(msgspec.json.decode(results[0])) == 3


@pytest.mark.parametrize("language", ["c", "rust"])
def test_the_examples_in_wasm(language: str) -> None:
    async def one(bench: Bench) -> None:
        code = checked_code((EXAMPLES / language / "complete.wasm").read_bytes(), "wasm", Quota(), "complete")
        run = bench.host.launch(RunSpec(code=code, args=b'"once upon"', trusted=False), TENANT)
        record = await run.wait()
        assert record.error is None
        text = msgspec.json.decode(run.result or b"")
        assert isinstance(text, str)
        assert text

    with_host(one)
