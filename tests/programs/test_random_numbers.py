"""Random numbers of generations without a seed."""

from __future__ import annotations

from tests.programs.spaces import Run
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.programs.runtime import Runtime
from weft.programs.types import Caller

STOP = StopParams(max_tokens=12, ignore_eos=True)


def test_generations_of_one_sequence_draw_numbers_of_their_own(run: Run, prompt: list[int]) -> None:
    async def program(rt: Runtime) -> None:
        async with rt.open(Caller()) as seq:
            seq.append(pack_tokens(prompt))
            found = []
            for seed in (None, None, None, 5, 5):
                seq.truncate(len(prompt))
                sampling = SamplingParams(temperature=5.0, seed=seed)
                found.append([token.token async for part in seq.generate(sampling, STOP) for token in part])
        *unseeded, first, again = found
        assert len({tuple(tokens) for tokens in unseeded}) == 3
        assert first == again

    run(program)
