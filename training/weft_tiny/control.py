"""Start, pause, resume, stop and watch a training run in the background."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from training.weft_tiny.state import RunState, default_directory, holder, running_lock


def start(state: RunState, options: list[str]) -> str:
    """Start a trainer at idle priority in a session of its own; it continues from the newest checkpoint."""
    if (owner := holder(state.owner)) is not None:
        return f"process {owner.get('pid')} already trains in {state.directory}"
    # Threads that spin at a barrier would take time that other processes could use.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(state.directory / "compiled"))
    command = [sys.executable, "-m", "training.weft_tiny.train", "--idle", "--state", str(state.directory), *options]
    with (state.directory / "output.txt").open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   start_new_session=True)  # fmt: skip
    return f"process {process.pid} started; errors go to {output.name}, progress to {state.log}"


def pause(state: RunState) -> str:
    """Ask the trainer to pause and wait until it has stopped computing; it stays paused across restarts."""
    state.pause.touch()
    running = holder(running_lock())
    if running is not None and running.get("state") == str(state.directory.resolve()):
        holder(running_lock(), wait=True)
    return "paused"


def resume(state: RunState) -> str:
    """Resume a paused trainer."""
    state.pause.unlink(missing_ok=True)
    return "resumed" if holder(state.owner) is not None else "no trainer runs here: start it with `control start`"


def stop(state: RunState) -> str:
    """Tell the trainer to write a checkpoint and exit."""
    owner = holder(state.owner)
    if owner is None:
        return "no trainer runs here"
    os.kill(owner["pid"], signal.SIGTERM)
    return f"process {owner['pid']} ends after its current step"


def status(state: RunState) -> str:
    """Whether a trainer runs, and its last progress and check lines."""
    owner = holder(state.owner)
    if owner is None:
        line = "not running"
    else:
        line = f"process {owner.get('pid')} {'paused' if state.pause.exists() else 'running'}"
    found = [state.last(event) for event in ("progress", "check")]
    kept = ", ".join(path.name for path in state.checkpoints()) or "none"
    return "\n".join([line, f"checkpoints: {kept}", *(json.dumps(entry) for entry in found if entry)])


COMMANDS = {"pause": pause, "resume": resume, "stop": stop, "status": status}


def main() -> None:
    """Control the training of weft-tiny; further arguments of ``start`` go to the trainer."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("command", choices=("start", *COMMANDS))
    parser.add_argument("--state", type=Path, default=default_directory(), help="state directory of the run")
    args, options = parser.parse_known_args()
    state = RunState(args.state)
    if args.command == "start":
        print(start(state, options))
        return
    if options:
        parser.error(f"{args.command} takes no further arguments: {' '.join(options)}")
    print(COMMANDS[args.command](state))


if __name__ == "__main__":
    main()
