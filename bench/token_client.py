"""An engine's only client, for benchmarks: prompts as token ids in, the events of their tokens out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.client import EngineClient

GREEDY = SamplingParams(temperature=0.0)


class TokenRequest(NamedTuple):
    """A prompt, and what is generated after it: exactly `output_tokens`, the end of sequence ignored."""

    prompt: list[int]
    output_tokens: int
    sampling: SamplingParams = GREEDY


class TokenClient:
    """Generates on an engine in this process. One call of `generate` at a time."""

    def __init__(self, engine: EngineClient):
        self._engine = engine
        self._ids = itertools.count(1)

    async def generate(self, requests: Sequence[TokenRequest]) -> list[list[wire.Token]]:
        """The tokens of each request; all requests are sent at once. Raises `RuntimeError` if the engine fails one or
        does not generate as many tokens as it was asked for."""
        found: dict[int, list[wire.Token]] = {}
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(requests)

        def receive(envelope: wire.Envelope) -> None:
            nonlocal left
            for event in envelope.events:
                if isinstance(event, wire.Token):
                    found[event.op].append(event)
                elif isinstance(event, wire.Finished):
                    left -= 1
                elif not done.done():
                    done.set_exception(RuntimeError(f"unexpected {event}"))
            if left == 0 and not done.done():
                done.set_result(None)

        self._engine.subscribe(receive)
        commands: list[wire.Command] = []
        for prompt, output_tokens, sampling in requests:
            seq = next(self._ids)
            found[seq] = []
            stop = StopParams(max_tokens=output_tokens, ignore_eos=True)
            commands += [
                wire.Open(seq=seq),
                wire.Append(seq=seq, op=seq, tokens=pack_tokens(prompt)),
                wire.Generate(seq=seq, op=seq, sampling=sampling, stop=stop),
            ]
        self._engine.send(commands)
        await done
        self._engine.send([wire.Release(seq=seq) for seq in found])
        if [len(tokens) for tokens in found.values()] != [request.output_tokens for request in requests]:
            raise RuntimeError("the engine did not generate as many tokens as it was asked for")
        return list(found.values())
