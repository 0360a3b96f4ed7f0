"""A process that loads a model file, computes one token and says how long each part took: `bench.start` runs it.

    python -m bench.peers.start_child weft|llama.cpp FILE THREADS BEGAN [PACKAGES]

BEGAN is `time.monotonic()` before the process was started. Prints one line: seconds by part, as JSON, in order.
"""

import sys
import time

PROMPT_TOKENS = 16
PROMPT = list(range(300, 300 + PROMPT_TOKENS))


class Parts:
    """Seconds of the parts of a start. What lies between two parts belongs to the later one."""

    def __init__(self, began: float):
        self.seconds: dict[str, float] = {}
        self._since = began

    def end(self, name: str) -> None:
        """A part has ended now."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def weft(parts: Parts, file: str, threads: int) -> None:
    """`weft.LLM`, as a script uses it."""
    from weft import llm
    from weft.engine import build
    from weft.llm import api

    parts.end("imports")
    for module, function, name in ((api, "load_tokenizer", "tokenizer"), (build, "load", "weights")):
        _timed(parts, module, function, name)
    with llm.LLM(file, threads=threads) as loaded:
        parts.end("engine")
        [result] = loaded.generate([PROMPT], max_tokens=1, temperature=0, ignore_eos=True)
        parts.end("first token")
        assert len(result.outputs[0].token_ids) == 1


def llama_cpp(parts: Parts, file: str, threads: int) -> None:
    """llama.cpp through its Python package. It reads the tokenizer with the weights."""
    from pathlib import Path

    import llama_cpp  # noqa: F401

    from bench.peers.llama_cpp_batch import LlamaCpp

    parts.end("imports")
    loaded = LlamaCpp(Path(file), threads, max_sequences=1)
    parts.end("weights")
    [tokens] = loaded.generate([PROMPT], 1)
    parts.end("first token")
    assert len(tokens) == 1


def _timed(parts: Parts, module: object, function: str, name: str) -> None:
    original = getattr(module, function)

    def timed(*args: object, **options: object) -> object:
        result = original(*args, **options)
        parts.end(name)
        return result

    setattr(module, function, timed)


def main() -> None:
    name, file, threads, began, *packages = sys.argv[1:]
    parts = Parts(float(began))
    parts.end("interpreter")
    sys.path += packages
    {"weft": weft, "llama.cpp": llama_cpp}[name](parts, file, int(threads))
    import json

    print(json.dumps(parts.seconds))


if __name__ == "__main__":
    main()
