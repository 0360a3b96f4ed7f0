from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

import pytest

from weft.sdk import main
from weft.sdk.errors import InvalidRequest


def run(source: str, args: object = None) -> object:
    return json.loads(asyncio.run(main.run(main.compiled(source, "program.py"), json.dumps(args).encode())))


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("async def main(args): return args['x'] + 1", 2),
        ("async def main(): return 'no arguments'", "no arguments"),
        ("def main(args): return args", {"x": 1}),
        ("def main(*args): return len(args)", 1),
        ("def main(): pass", None),
        ("class Agent:\n  async def __call__(self, args): return args['x']\nmain = Agent()", 1),
        ("from functools import partial\nmain = partial(lambda a, b: [a, b], 'first')", ["first", {"x": 1}]),
    ],
)
def test_main_in_all_its_forms(source: str, result: object) -> None:
    assert run(source, {"x": 1}) == result


def test_dataclasses_with_postponed_annotations() -> None:
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass P:\n  x: int\n  kind: ClassVar[str] = 'point'\n"
        "def main(args): return P(args)"
    )
    assert run(source, 3) == {"x": 3}
    assert not vars(sys.modules[main.MODULE]).get("main")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "has no function main"),
        ("main = 3", "has no function main"),
        ("def main(:\n  pass", "program.py, line 1: .*: def main"),
        ("x = 1\n  y = 2", "program.py, line 2"),
        ("async def main():\n  yield 1", "generator"),
        ("def main(): return object()", "the result of main cannot be written as JSON: a object has no JSON form"),
        ("def main(): return b'x'", "decode them to text"),
        ("def main(): return float('nan')", "cannot be written as JSON"),
        ("def main(): return '\\ud800'", "surrogates"),
        ("def main():\n  x = []\n  x.append(x)\n  return x", "cannot be written as JSON"),
        ("\0", "no Python source|null bytes"),
    ],
)
def test_what_is_wrong_with_a_program_is_said(source: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        run(source)


def test_arguments_that_are_no_json() -> None:
    with pytest.raises(InvalidRequest) as raised:
        main.decode_args(b"{")
    assert raised.value.param == "args"
    assert main.decode_args(b"") is None


def test_what_main_raises_goes_through_and_is_traced_in_the_programs_lines() -> None:
    source = "def inner(x):\n    return 1 / x  # here\n\ndef main(args):\n    return inner(args)\n"
    with pytest.raises(ZeroDivisionError) as raised:
        run(source, 0)
    text = main.trace(raised.value, source, "program.py")
    assert "line 5, in main\n    return inner(args)" in text
    assert "line 2, in inner\n    return 1 / x  # here" in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert main.__file__ not in text


def test_a_deep_traceback_is_cut_in_the_middle() -> None:
    source = "def main(n):\n    return main(n - 1) if n else 1 / 0"
    with pytest.raises(ZeroDivisionError) as raised:
        run(source, 200)
    text = main.trace(raised.value, source, "program.py")
    assert "frames in the middle are left out" in text
    assert len(text.splitlines()) < 70


@dataclass
class Point:
    x: int


def test_results_may_hold_dataclasses() -> None:
    assert main.encode_result([Point(1), {"at": Point(2)}]) == b'[{"x":1},{"at":{"x":2}}]'
