"""A page operation is defined once: a row of the table, a command, what it does on the engine, and the SDK's method.

Everything between derives from the row and the command.
"""

import ast
from functools import cache
from pathlib import Path

import msgspec
import pytest

import weft
from weft.abi.operations import Op, Trait
from weft.core import wire
from weft.sched.spaces.immediate import _CARRIED_OUT_BY
from weft.sched.spaces.place import NEEDS_STEP

PAGE_OPS = [op for op in Op if op.trait in (Trait.ALLOCATE, Trait.FORWARD, Trait.INPUT_TEXT, Trait.OUTPUT_TEXT)]
QUEUES = {wire.OpenQueue, wire.CloseQueue, wire.SetQueuePriority, wire.Sync}
"""Commands that concern a queue alone; `Spaces` has the queues."""
USERS = {"programs/sandbox/runner/warm.py"}
"""Modules that call operations as any program does."""
TYPES = {bytes: "blob", str: "blob", int: "number"}


@cache
def names() -> dict[str, set[str]]:
    """Module -> every identifier in its code, those of `Op` with that name before them."""
    found: dict[str, set[str]] = {}
    root = Path(weft.__file__).parent
    for path in root.rglob("*.py"):
        words = found.setdefault(path.relative_to(root).as_posix(), set())
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="Op"), attr=word):
                    words.add(f"Op.{word}")
                case ast.Name(id=word) | ast.Attribute(attr=word):
                    words.add(word)
                case ast.alias(name=word) | ast.ClassDef(name=word):
                    words.add(word)
    return found


ON_PAGES = [op for op in PAGE_OPS if getattr(wire, op.command) not in QUEUES]


@pytest.mark.parametrize("op", ON_PAGES, ids=lambda op: op.name)
def test_at_most_four_modules_name_a_page_operation(op: Op) -> None:
    modules = {module for module, words in names().items() if words & {f"Op.{op.name}", op.command}} - USERS
    assert "core/wire/spaces.py" in modules
    assert len(modules | {"abi/operations.py"}) <= 4, sorted(modules)


def test_every_command_on_a_queue_is_of_one_operation_and_carried_out_in_one_place() -> None:
    commands = set(wire.concrete(wire.QueueCommand, wire.COMMAND_MODULES))
    assert sorted(op.command for op in PAGE_OPS) == sorted(command.__name__ for command in commands)
    assert commands == QUEUES | _CARRIED_OUT_BY.keys() | NEEDS_STEP
    assert len(commands) == len(QUEUES) + len(_CARRIED_OUT_BY) + len(NEEDS_STEP)


@pytest.mark.parametrize("op", PAGE_OPS, ids=lambda op: op.name)
def test_an_operation_carries_the_fields_of_its_command(op: Op) -> None:
    command = getattr(wire, op.command)
    assert issubclass(command, wire.AnsweredCommand) == op.answers
    queue, *fields = msgspec.structs.fields(command)[1:2] + msgspec.structs.fields(command)[3:]
    assert queue.name == "queue"
    carried = ["number"] * len(op.numbers[1:]) + ["blob"] * op.num_blobs
    expected = [TYPES.get(field.type, "other") for field in fields]
    if op is Op.FORWARD_SAMPLE:  # its last blob is JSON of two fields
        assert expected[-2:] == ["other", "number"]
        expected[-2:] = ["blob"]
    assert carried == expected
