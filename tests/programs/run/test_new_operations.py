"""A new operation of programs is a row of the table and what carries it out. Packing, dispatch, limits and the library
take it up from there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.run.new_operations import ADDED, COMMAND, METHOD, TABLE

ROOT = Path(__file__).resolve().parents[3]


def used(*without: str) -> tuple[int, str]:
    """Use two new operations in a process of its own, with some additions left out: its status and its errors."""
    modules = [module for module in ADDED if module not in without]
    command = [sys.executable, "-m", "tests.programs.run.new_operations", *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, done.stderr


def test_a_row_and_its_handler_are_all_that_a_new_operation_needs() -> None:
    status, errors = used()
    assert status == 0, errors


@pytest.mark.parametrize(
    ("without", "error"),
    [
        (TABLE, "KeyError: 'ECHO'"),
        (METHOD, "type object 'StoreCalls' has no attribute 'echo'"),
        (COMMAND, "module 'weft.core.wire.spaces' has no attribute 'CountPages'"),
    ],
    ids=["row", "method", "command"],
)
def test_what_is_missing_of_a_new_operation_is_named_before_a_program_runs(without: str, error: str) -> None:
    # Without the command nothing can carry it out on the engine either.
    missing = ("weft.sched.spaces.immediate",) if without == COMMAND else ()
    status, errors = used(without, *missing)
    assert status == 1
    assert error in errors.splitlines()[-1]
