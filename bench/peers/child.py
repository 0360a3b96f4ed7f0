"""A peer in a separate process with its own Python, for engines that cannot share ours.

The child is a script that reads a JSON object per line from its standard input and answers each with one on its
standard output, in order:

    {"call": "load", "checkpoint": DIR, "threads": N, "max_sequences": N, "context": N}
        {"version": TEXT, "notes": [TEXT, ...], "instructions": [TEXT, ...]}   (both lists may be left out)
    {"call": "generate", "prompts": [[ID, ...], ...], "output_tokens": N}
        {"outputs": [[ID, ...], ...], "seconds": S}
    {"call": "quit"}
        nothing: the process ends

`seconds` is what generating took in the child, without pipes and JSON. `{"error": TEXT}` instead of an answer ends it.
What else the child writes goes to a file, whose end is shown where it fails.

Only one process computes at a time: between calls the child and its own children are stopped (SIGSTOP), so that no
thread of theirs that still spins takes a core from the engine that is measured next.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.peers import levels

_SHOWN_CHARS = 2000
_STOP_S = 30


class ChildError(RuntimeError):
    """The child could not do what it was asked, or has ended."""


class ChildPeer:
    """An engine behind a pipe.

    `seconds_inside` is the time of the last `generate`, as the child measured it; `notes` are settings that the engine
    refused, and what it uses instead.
    """

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], **load: Any):
        """Load the engine. Raises `ChildError`."""
        self.name = name
        self.seconds_inside: float | None = None
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by close
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            answer = self._call("load", **load)
        except BaseException:
            self.close()
            raise
        self.version = str(answer["version"])
        self.notes: list[str] = answer.get("notes", [])
        self._instructions: list[str] = answer.get("instructions", [])

    def instructions(self) -> list[str]:
        """What the engine and its libraries have said of the instructions that they use."""
        self._log.seek(0)
        return [*self._instructions, *levels.in_log(self._log.read())]

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """Generate exactly `output_tokens` greedy tokens for each prompt. Raises `ChildError`."""
        answer = self._call("generate", prompts=prompts, output_tokens=output_tokens)
        self.seconds_inside = float(answer["seconds"])
        outputs: list[list[int]] = answer["outputs"]
        return outputs

    def close(self) -> None:
        """End the child and its own children. Idempotent."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError, ValueError):
            self._write({"call": "quit"})
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _call(self, name: str, **fields: Any) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._write({"call": name, **fields})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            raise ChildError(
                f"{self.name} did not answer {name!r} ({line[:80]!r}); it wrote:\n{self._said()}"
            ) from None
        if "error" in answer:
            raise ChildError(f"{self.name} could not {name}: {answer['error']}")
        self._signal(signal.SIGSTOP)
        # Sent is not stopped yet: wait for that, or for its end, which is left for `Popen` to see.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return dict(answer)

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _signal(self, number: signal.Signals) -> None:
        """To the child and those that it started: it leads a group of its own."""
        if self._process.poll() is None:  # once it was waited for, its number may be another's
            os.killpg(self._process.pid, number)

    def _said(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._log.seek(0)
        return self._log.read()[-_SHOWN_CHARS:]


def script(name: str) -> str:
    """The path of a child's script beside this file."""
    return str(Path(__file__).with_name(name))
