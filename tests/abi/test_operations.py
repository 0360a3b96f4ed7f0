"""The table of operations, and everything that derives from it or must agree with it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import weft.sdk
from weft.abi.frames import commands, pack
from weft.abi.operations import Op
from weft.programs.run.context import DISPATCH

SDK = Path(weft.sdk.__file__).parent
SAMPLES = {"I": 7, "i": -7, "B": 1, "d": 0.5}


def test_every_operation_travels_as_the_table_says() -> None:
    for op in Op:
        numbers = tuple(SAMPLES[kind] for kind in op.numbers)
        blobs = [b"x" * at for at in range(op.num_blobs)]
        assert list(commands(pack(op, 3, *numbers, *blobs))) == [(op, 3, numbers, blobs)]


def test_every_operation_is_carried_out_by_a_method_that_takes_its_numbers_and_blobs() -> None:
    assert set(DISPATCH) == set(Op)
    for op, (_, carry_out) in DISPATCH.items():
        carried = [0.0] * len(op.numbers) + [b""] * op.num_blobs
        inspect.signature(carry_out).bind(None, 0, *carried)
        # What becomes a command of the engine is held to the command's fields (`test_page_operations`).
        assert op.command or len(inspect.signature(carry_out).parameters) == 2 + len(carried), op


def test_the_library_calls_every_operation_and_asks_only_those_that_answer() -> None:
    posted, asked = set(), set()
    for path in SDK.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and _is_op(node.value):
                # A class names the operation that `OwnedResource.release` posts.
                assert [getattr(target, "id", "") for target in node.targets] == ["release_op"]
                posted.add(Op[node.value.attr])
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = [arg.attr for arg in node.args if isinstance(arg, ast.Attribute) and _is_op(arg)]
            (posted if called == "post" else asked).update(Op[name] for name in named)
    assert posted | asked == set(Op)
    # Both are handed to `_free`, which posts them.
    assert not {op for op in asked if not op.answers} - {
        Op.PAGES_FREE,
        Op.EMBEDS_FREE,
    }
    assert not {op for op in posted if op.answers}


def _is_op(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "Op"
