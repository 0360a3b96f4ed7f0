"""In float64, forks that go on with the same message, computed once, give the tokens that each gives alone."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tests.identity.test_intercepted import ALONE
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.build import build_engine

CONTEXT = list(range(100, 137))
FORKS = range(1, 5)


def told(messages: list[list[int]], *, prefix_cache: bool) -> tuple[dict[int, list[int]], int]:
    """What forks of one context generate after their messages, by fork, and the tokens that were computed."""
    tokens: dict[int, list[int]] = {}

    def receive(client: int, envelope: wire.Envelope) -> None:
        for event in envelope.events:
            if isinstance(event, wire.Token):
                tokens.setdefault(event.op, []).append(event.token)
            else:
                assert isinstance(event, wire.Finished), event

    engine = build_engine(msgspec.structs.replace(ALONE, prefix_cache=prefix_cache, overlap=True), receive)
    numbers = itertools.count(1000)

    def run(*commands: wire.Command) -> None:
        engine.submit(1, list(commands))
        while engine.busy:
            engine.advance()
            engine.step()

    def add(seq: int, added: list[int]) -> list[wire.Command]:
        sampling, stop = SamplingParams(seed=seq, temperature=1.0), StopParams(max_tokens=12, ignore_eos=True)
        return [
            wire.Append(seq=seq, op=next(numbers), tokens=pack_tokens(added)),
            wire.Generate(seq=seq, op=seq, sampling=sampling, stop=stop),
        ]

    run(wire.Open(seq=9), *add(9, CONTEXT))
    run(*(wire.Fork(seq=9, child=seq) for seq in FORKS))
    known = engine.stats().prefill_tokens
    run(*(command for seq, message in zip(FORKS, messages, strict=True) for command in add(seq, message)))
    computed = engine.stats().prefill_tokens - known
    engine.close()
    return tokens, computed


@pytest.mark.parametrize("own", [0, 5], ids=["the same message", "messages that end apart"])
def test_tokens_are_those_of_each_fork_alone(own: int) -> None:
    common = list(range(200, 241))
    messages = [[*common, *range(10 * seq, 10 * seq + own)] for seq in FORKS]
    alone, num_alone = told(messages, prefix_cache=False)
    together, num_together = told(messages, prefix_cache=True)
    assert together == alone
    assert num_together < num_alone / 2
