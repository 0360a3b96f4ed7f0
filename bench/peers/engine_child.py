"""One engine that lives in this Python environment, in a process of its own: `bench.peers.child` speaks to it.

    python -m bench.peers.engine_child NAME [PACKAGES]

PACKAGES is a directory with further packages; it is searched last, so it replaces no package of Weft's environment.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.peers import CLASSES
from bench.peers.child_loop import serve


def main() -> None:
    name, *packages = sys.argv[1:]
    sys.path += packages

    def load(checkpoint: str, threads: int, **options: Any) -> tuple[Any, dict[str, Any]]:
        torch.set_num_threads(threads)
        module, kind = CLASSES[name].split(":")
        engine = getattr(import_module(module), kind)(Path(checkpoint), threads, **options)
        return engine, {
            "version": f"{engine.version}",
            "notes": list(engine.notes),
            "instructions": list(engine.instructions),
        }

    serve(load, lambda engine, prompts, output_tokens: engine.generate(prompts, output_tokens))


if __name__ == "__main__":
    main()
