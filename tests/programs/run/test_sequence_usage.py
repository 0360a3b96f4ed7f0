"""What the sequences of a run used: each appended token counts once, waits and forks add no cached tokens."""

from __future__ import annotations

import asyncio
import dataclasses

from tests.programs.run.sequence_calls import opened
from tests.programs.sessions import Host, obj
from weft.abi.operations import Op
from weft.config import EngineConfig, ProgramsConfig
from weft.core.ids import pack_tokens
from weft.core.wire import OperationUsage, ResetPrefixCache
from weft.engine.inline import InlineEngine
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.limits import Limits
from weft.programs.quota.page_quota import PageQuota
from weft.programs.run.calls.open_sequence import OpenSequence, SequenceUsage
from weft.programs.run.model import ProgramModel
from weft.programs.runtime import Runtime
from weft.testing.fake_engine import FakeEngine
from weft.tokenizers.load import load_tokenizer


def known(num_settled: int = 0) -> OpenSequence:
    return OpenSequence(None, PageQuota(Accounts(ProgramsConfig()).open("t", Limits()), 16), num_settled)  # type: ignore[arg-type]


def test_only_what_was_found_beyond_a_sequence_s_own_tokens_was_found_for_a_prompt() -> None:
    usage, sequence = SequenceUsage(), known()
    usage.note(sequence, OperationUsage(num_prompt_tokens=100, num_cached_tokens=64, num_output_tokens=10))
    assert usage.cached_tokens == 64
    usage.note(sequence, OperationUsage(num_prompt_tokens=120, num_cached_tokens=109, num_output_tokens=5))
    assert usage.cached_tokens == 64, "its own KV"
    # It waited, and the end of its KV went to the host, or was given up.
    usage.note(sequence, OperationUsage(num_prompt_tokens=130, num_cached_tokens=124, num_host_tokens=60))
    usage.note(sequence, OperationUsage(num_prompt_tokens=130, num_cached_tokens=64, num_recomputed_tokens=66))
    assert (usage.cached_tokens, usage.host_tokens, usage.recomputed_tokens) == (64, 60, 66)
    usage.note(sequence, OperationUsage())
    usage.note(sequence, OperationUsage(num_prompt_tokens=140, num_cached_tokens=135))
    assert usage.cached_tokens == 69, "five of the ten tokens that were appended since"
    usage.note(known(140), OperationUsage(num_prompt_tokens=150, num_cached_tokens=140))
    assert usage.cached_tokens == 69, "a fork finds what its parent had"


def test_a_cut_sequence_finds_for_a_prompt_what_it_lost() -> None:
    usage, sequence = SequenceUsage(), known()
    sequence.quota.grow(100)
    usage.note(sequence, OperationUsage(num_prompt_tokens=100, num_output_tokens=0))
    sequence.truncate(40)
    usage.note(sequence, OperationUsage(num_prompt_tokens=100, num_cached_tokens=80))
    assert usage.cached_tokens == 40


def test_a_run_on_an_engine_counts_what_it_found_and_what_it_computed_again() -> None:
    async def main() -> None:
        engine = InlineEngine.from_config(EngineConfig(device="cpu", threads=1, num_pages=200, max_context=256))
        await engine.wait_ready()
        host = Host(FakeEngine())
        host.model = ProgramModel("weft-tiny", Runtime(engine, load_tokenizer("weft-tiny")))
        host.services = dataclasses.replace(host.services, model=host.model, models=lambda: [host.model])
        program = host.program()
        prompt = pack_tokens([7 + index % 50 for index in range(100)])

        async def generate(number: int) -> None:
            about = obj({"sampling": {"temperature": 0}, "stop": {"max_tokens": 4, "ignore_eos": True}})
            await program.end_of(program.ask(Op.SEQ_GENERATE, number, 0, about))

        def counts() -> tuple[int, int, int]:
            usage = program.session.usage()
            return usage.prompt_tokens, usage.cached_tokens, usage.recomputed_tokens

        try:
            opened(program, 1, prompt)
            await generate(1)
            assert counts() == (100, 0, 0)
            program.say(Op.SEQ_FORK, 1, 2)
            await generate(2)
            assert counts() == (100, 0, 0), "a fork appends nothing"
            program.say(Op.SEQ_RELEASE, 1)
            program.say(Op.SEQ_RELEASE, 2)
            opened(program, 3, prompt)
            await generate(3)
            assert counts() == (200, 96, 0)
            program.say(Op.SEQ_RELEASE, 3)
            await asyncio.sleep(0)
            engine.send([ResetPrefixCache()])
            opened(program, 4, prompt)
            await generate(4)
            assert counts() == (300, 96, 96), "whole pages had stayed, and were given up"
        finally:
            program.close()
            host.model.close()
            await engine.close()

    asyncio.run(main())
