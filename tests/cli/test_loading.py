"""Progress of loading, where there is no terminal and where there is one."""

from __future__ import annotations

import sys

from weft.cli.loading import MIB, loading_progress


def test_lines_at_every_tenth(capsys):
    progress = loading_progress("some/model")
    for done in range(101):
        progress(done * MIB, 100 * MIB)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 11
    assert (lines[0], lines[-1]) == ("loading some/model: 0 of 100 MiB", "loading some/model: 100 of 100 MiB")


def test_small_models_are_not_reported(capsys):
    loading_progress("small")(10 * MIB, 10 * MIB)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress = loading_progress("some/model")
    for done in (0, 50, 100):
        progress(done * MIB, 100 * MIB)
    err = capsys.readouterr().err
    assert "loading some/model" in err
    assert "\x1b[?25h" in err, "the cursor must come back"
    loading_progress("beside", alone=False)(100 * MIB, 100 * MIB)
    assert capsys.readouterr().err == "loading beside: 100 of 100 MiB\n"
