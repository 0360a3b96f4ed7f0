"""Embedding as a program: the pooled hidden state of a text."""

from __future__ import annotations

import numpy as np

from weft.abi.errors import InvalidRequest, Unsupported
from weft.core.wire import Finished, PromptOutputs
from weft.programs.builtin.completion import check_prompt, check_room
from weft.programs.runtime import Runtime
from weft.programs.types import Caller, EmbeddingArgs, EmbeddingResult


async def main(args: EmbeddingArgs, caller: Caller, rt: Runtime) -> EmbeddingResult:
    """The text's vector; of unit length where `normalize` asks for it, after it was cut to `dimensions`.

    Raises `InvalidRequest` before anything is computed, what the engine fails with, and what `Recovery.stream` raises.
    """
    info = rt.engine.info
    check_prompt(args.prompt, info)
    check_room(args.prompt, 0, info)
    size = info.hidden_size if args.dimensions is None else args.dimensions
    if not 1 <= size <= info.hidden_size:
        raise InvalidRequest(f"dimensions must be between 1 and {info.hidden_size}, got {size}", "dimensions")

    async def compute() -> Finished:
        async with rt.open(caller) as seq:
            return await seq.append(args.prompt, PromptOutputs(hidden=args.pooling))

    finished = await rt.recovery.run(compute, caller.request_id)
    if finished.hidden is None:
        raise Unsupported("this engine gives no hidden states, so it cannot embed; use a model that does")
    vector = np.array(finished.hidden[:size], dtype=np.float64)
    length = float(np.linalg.norm(vector))
    if args.normalize and length > 0:
        vector /= length
    return EmbeddingResult(embedding=vector.tolist(), usage=finished.usage)
