"""The child's side of the protocol in `bench.peers.child`.

Imports the standard library alone: it also runs under Pythons that have nothing of Weft.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1


def serve(load: Callable[..., tuple[Any, dict[str, Any]]], generate: Callable[..., list[list[int]]]) -> None:
    """Answer calls until the parent says `quit` or closes the pipe.

    `load(**fields)` returns the engine and its answer; `generate(engine, prompts, output_tokens)` returns tokens and is
    timed.
    """
    # Answers go to the pipe; the output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A stopped process does not see its pipe close: it must not outlive its parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    engine = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["call"] == "quit":
            break
        try:
            if message["call"] == "load":
                engine, answer = load(**{name: message[name] for name in message if name != "call"})
            else:
                began = time.perf_counter()
                outputs = generate(engine, message["prompts"], message["output_tokens"])
                answer = {"outputs": outputs, "seconds": time.perf_counter() - began}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
