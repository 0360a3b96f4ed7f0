"""Errors keep their class, and all they say, across every boundary."""

from __future__ import annotations

import pytest

from weft.abi import errors
from weft.abi.errors import WeftError, from_kind
from weft.core.wire import ErrorRecord
from weft.sdk.calls import error_of
from weft.server.errors import problem_of

CLASSES = sorted(
    {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, WeftError)},
    key=lambda cls: cls.__name__,
)
DRAWN = [line.split() for line in (errors.__doc__ or "").splitlines() if line.startswith(("WeftError", "├", "│", "└"))]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_is_rebuilt_as_it_was(cls: type[WeftError]) -> None:
    error = cls("pages ran out", "pages", retry_after_s=2.0, traceback="line 1")
    for again in (
        from_kind(error.kind, error.message, param="pages", retry_after_s=2.0, traceback="line 1"),
        ErrorRecord.of(error).error(),
    ):
        assert type(again) is cls
        assert (again.message, again.param, again.retry_after_s, again.traceback) == (
            "pages ran out",
            "pages",
            2.0,
            "line 1",
        )
    in_program = error_of([error.kind.encode(), error.message.encode(), b"pages"])
    assert (type(in_program), in_program.message, in_program.param) == (cls, "pages ran out", "pages")


def test_kinds_are_unique() -> None:
    assert len({cls.kind for cls in CLASSES}) == len(CLASSES)


def test_an_unknown_kind_keeps_its_name() -> None:
    error = from_kind("of_tomorrow", "it failed")
    assert (type(error), error.kind, error.message) == (WeftError, "of_tomorrow", "it failed")


def test_the_drawing_of_the_tree_is_the_tree() -> None:
    drawn, path = {}, {-1: "none"}
    for words in DRAWN:
        bars = [word for word in words if word in ("│", "├──", "└──")]
        depth = len(bars)
        path[depth] = words[depth]
        drawn[words[depth]] = path.get(depth - 1)
    assert drawn.keys() == {cls.__name__ for cls in CLASSES}
    for cls in CLASSES:
        if cls is not WeftError:
            assert drawn[cls.__name__] == cls.__mro__[1].__name__


def test_what_a_client_is_told_of_every_error_is_decided() -> None:
    internal = {cls.__name__ for cls in CLASSES if problem_of(cls("secret"), "id").body.code == "internal_error"}
    assert internal == {
        "ConfigError",
        "ModelLoadError",
        "NetworkDenied",
        "NetworkFailed",
        "NoProgram",
        "ProgramFailed",
        "RunCancelled",
        "UnknownHandle",
        "WeftError",
    }
