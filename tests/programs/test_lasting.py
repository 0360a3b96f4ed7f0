"""Sequences of programs outlive their engine: what they give is what they would have given without its death."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.programs.help import CALLER, settle
from tests.programs.killable_engine import KillableEngine
from tests.programs.virtual_time import run_virtually
from weft.abi.errors import EngineDead, InvalidRequest
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import Open, PromptOutputs, Token
from weft.programs.lasting import LastingSequence
from weft.programs.operations import TokenStream
from weft.programs.runtime import Runtime
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_worker import expected_tokens, most_likely

VOCAB = 264
WAIT_S = 60.0
Test = Callable[[Runtime, KillableEngine], Coroutine[Any, Any, Any]]


def run(test: Test, engine: KillableEngine | None = None, wait_s: float = WAIT_S, **spec: object) -> Any:
    """Afterwards nothing is left in the runtime or on the engine."""

    async def body() -> Any:
        made = engine or KillableEngine(**spec)
        rt = Runtime(made, byte_tokenizer(), engine_wait_s=wait_s)
        result = await test(rt, made)
        await settle()
        assert (rt.num_sequences, rt.num_operations) == (0, 0)
        await made.drained()
        made.check_empty()
        return result

    return asyncio.run(body())


def ranges(*pairs: tuple[int, int]) -> bytes:
    return pack_tokens([number for pair in pairs for number in pair])


def generate(sequence: LastingSequence, count: int, seed: int, **sampling: Any) -> TokenStream:
    return sequence.generate(SamplingParams(seed=seed, **sampling), StopParams(max_tokens=count, ignore_eos=True))


async def read(stream: TokenStream) -> list[Token]:
    return [token async for part in stream for token in part]


def ids(tokens: list[Token]) -> list[int]:
    return [token.token for token in tokens]


async def everything(rt: Runtime, engine: KillableEngine) -> list[object]:
    """All kinds of operations, on sequences that depend on each other."""
    told: list[object] = []
    root = rt.open_lasting(CALLER)
    root.append(pack_tokens([*range(40)]))
    told.append((await root.append(pack_tokens([50, 51]), PromptOutputs(dist=4))).dists)
    branch = root.fork()
    root.mask(ranges((3, 9), (20, 30)))
    root.append(pack_tokens([60] * 20))
    stream = generate(root, 12, 7, logprobs=2)
    early = root.fork()  # of what the generation will have made
    early.append(pack_tokens([70, 71]))
    of_early = generate(early, 5, 8)
    of_branch = generate(branch, 9, 9, presence_penalty=0.5)
    told += [ids(tokens) for tokens in await asyncio.gather(read(stream), read(of_early), read(of_branch))]
    scores = await branch.append(pack_tokens([5, 6, 7]), PromptOutputs(logprobs=1))
    told.append([None if score is None else score.logprob for score in scores.prompt_logprobs or ()])
    root.truncate(50)
    root.mask(b"")
    root.append(pack_tokens([80, 81]))
    told.append(ids(await read(generate(root, 12, 3, logit_bias={5: 1.0}))))
    root.cancel()
    last = await read(generate(early, 6, 4))
    told.append(ids(last))
    for sequence in (root, branch, early):
        told.append(sequence._history.tokens().tolist())
        sequence.release()
    return told


def test_a_sequence_goes_on_wherever_its_engine_dies() -> None:
    undisturbed = KillableEngine()
    expected = run(everything, undisturbed)
    assert undisturbed.num_messages > 30
    for death in range(1, undisturbed.num_messages + 1):
        engine = KillableEngine([death])
        assert run(everything, engine) == expected, death
        assert engine.num_deaths == 1


def test_nothing_is_computed_for_sequences_that_wait() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        waiting = [rt.open_lasting(CALLER) for _ in range(50)]
        for number, sequence in enumerate(waiting):
            sequence.append(pack_tokens([number] * 10))
            await read(generate(sequence, 2, number))
        engine.die()
        engine.restart()
        await settle()
        assert len(engine.engine.scheduler.sequences) == 0
        assert engine.engine.stats().prefill_tokens == 0
        tokens = waiting[3]._history.tokens().tolist()
        assert ids(await read(generate(waiting[3], 3, 1))) == expected_tokens(tokens, 1, 3, VOCAB)
        assert len(engine.engine.scheduler.sequences) == 1
        for sequence in waiting:
            sequence.release()

    run(test)


def test_tokens_are_computed_ahead_again_once_some_are_added() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        sequence = rt.open_lasting(CALLER)
        sequence.append(pack_tokens([1] * 30))
        await engine.drained()
        engine.die()
        sequence.append(pack_tokens([2] * 30))
        engine.restart()
        sequence.append(pack_tokens([3] * 30))
        await settle()
        await engine.drained()
        assert engine.engine.stats().prefill_tokens == 89
        sequence.release()

    run(test)


def test_an_operation_that_is_on_board_twice_fails_and_its_sequence_goes_on() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        sequence, beside = rt.open_lasting(CALLER), rt.open_lasting(CALLER)
        sequence.append(pack_tokens([1, 2, 3]))
        beside.append(pack_tokens([4]))
        stream = generate(sequence, 40, 5)
        tokens = ids(await anext(stream))
        for _ in range(2):
            engine.die()
            engine.restart()
            if engine.num_deaths == 1:
                tokens += ids(await anext(stream))
        with pytest.raises(EngineDead):
            await read(stream)
        assert tokens == expected_tokens([1, 2, 3], 5, len(tokens), VOCAB)
        assert ids(await read(generate(sequence, 4, 6))) == expected_tokens([1, 2, 3, *tokens], 6, 4, VOCAB)
        assert ids(await read(generate(beside, 4, 6))) == expected_tokens([4], 6, 4, VOCAB)
        sequence.release()
        beside.release()

    run(test)


def test_operations_wait_for_a_restart_as_long_as_they_may() -> None:
    async def test() -> None:
        engine = KillableEngine()
        rt = Runtime(engine, byte_tokenizer(), engine_wait_s=10.0)
        sequence = rt.open_lasting(CALLER)
        sequence.append(pack_tokens([1, 2]))
        engine.die()
        loop = asyncio.get_running_loop()
        loop.call_later(9.0, engine.restart)
        assert ids(await read(generate(sequence, 3, 1))) == expected_tokens([1, 2], 1, 3, VOCAB)
        engine.die()
        began_s = loop.time()
        with pytest.raises(EngineDead, match="not back within 10 s"):
            await read(generate(sequence, 3, 1))
        assert loop.time() - began_s == pytest.approx(10.0)
        engine.restart()
        tokens = [1, 2, *expected_tokens([1, 2], 1, 3, VOCAB)]
        assert ids(await read(generate(sequence, 3, 1))) == expected_tokens(tokens, 1, 3, VOCAB)
        sequence.release()

    run_virtually(test())


def test_without_patience_operations_fail_with_their_engine_and_the_sequence_stays() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        sequence = rt.open_lasting(CALLER)
        sequence.append(pack_tokens([1, 2]))
        stream = generate(sequence, 30, 1)
        tokens = ids(await anext(stream))
        engine.die()
        with pytest.raises(EngineDead):
            await read(stream)
        with pytest.raises(EngineDead):
            await read(generate(sequence, 3, 1))
        engine.restart()
        assert ids(await read(generate(sequence, 3, 1))) == expected_tokens([1, 2, *tokens], 1, 3, VOCAB)
        sequence.release()

    run(test, wait_s=0.0)


def test_what_was_cancelled_ends_with_the_tokens_that_came() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        sequence = rt.open_lasting(CALLER)
        sequence.append(pack_tokens([1, 2]))
        stream = generate(sequence, 30, 1)
        tokens = ids(await anext(stream))
        sequence.append(pack_tokens([9]))  # never begun
        child = sequence.fork()
        sequence.cancel()
        engine.die()
        assert ids(await read(stream)) == []
        assert sequence._history.tokens().tolist() == [1, 2, *tokens]
        with pytest.raises(InvalidRequest, match="fork again"):
            child.append(pack_tokens([1]))
        engine.restart()
        assert ids(await read(generate(sequence, 3, 1))) == expected_tokens([1, 2, *tokens], 1, 3, VOCAB)
        sequence.release()
        child.release()

    run(test)


CHAIN = 2_000
"""Forks of forks, more than Python's stack has frames."""


async def waiting_chain(rt: Runtime, count: int) -> tuple[list[LastingSequence], TokenStream, list[int], TokenStream]:
    """Forks, each of the one before it, behind an operation of the first that generates `count` tokens; that operation,
    its first tokens, and one of the last fork."""
    chain = [rt.open_lasting(CALLER)]
    chain[0].append(pack_tokens([1, 2]))
    stream = generate(chain[0], count, 1)
    tokens = ids(await anext(stream))
    for _ in range(CHAIN):
        chain.append(chain[-1].fork())
    return chain, stream, tokens, generate(chain[-1], 3, 5)


@pytest.mark.parametrize("dies", [False, True])
def test_a_long_chain_of_forks_waits_for_an_operation_and_goes_on_behind_it(dies: bool) -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        chain, stream, tokens, of_last = await waiting_chain(rt, 20)
        if dies:
            await settle()
            engine.die()
            engine.restart()
        tokens += ids(await read(stream))
        assert ids(await read(of_last)) == expected_tokens([1, 2, *tokens], 5, 3, VOCAB)
        for one in reversed(chain):
            one.release()

    run(test)


@pytest.mark.parametrize("is_absent", [False, True])
def test_a_long_chain_of_forks_fails_with_the_operation_that_it_waits_for(is_absent: bool) -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        chain, _, _, of_last = await waiting_chain(rt, 200)
        await settle()
        if is_absent:
            engine.die()
        chain[0].cancel()
        with pytest.raises(InvalidRequest, match="fork again"):
            await read(of_last)
        if is_absent:
            engine.restart()
        for one in reversed(chain):
            one.release()

    run(test)


def test_a_lease_that_ended_is_no_loss() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        parent = rt.open_lasting(CALLER)
        parent.append(pack_tokens([1, 2, 3]))
        await read(generate(parent, 2, 1))
        engine.end_lease()
        child = parent.fork()
        tokens = parent._history.tokens().tolist()
        parent.truncate(2)
        of_parent, of_child = generate(parent, 3, 5), generate(child, 3, 6)
        assert ids(await read(of_parent)) == expected_tokens([1, 2], 5, 3, VOCAB)
        assert ids(await read(of_child)) == expected_tokens(tokens, 6, 3, VOCAB)
        parent.release()
        child.release()

    run(test)


def test_a_lease_that_ended_under_an_operation_is_no_loss() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        sequence = rt.open_lasting(CALLER)
        sequence.append(pack_tokens([1, 2, 3]))
        tokens = generate(sequence, 30, 5)
        first = ids(await anext(tokens))
        engine.end_lease()
        assert first + ids(await read(tokens)) == expected_tokens([1, 2, 3], 5, 30, VOCAB)
        sequence.release()

    run(test)


def test_what_is_released_while_the_engine_is_down_comes_not_back() -> None:
    async def test(rt: Runtime, engine: KillableEngine) -> None:
        sequences = [rt.open_lasting(CALLER) for _ in range(4)]
        for sequence in sequences:
            sequence.append(pack_tokens([1, 2, 3]))
        streams = [generate(sequence, 30, 1) for sequence in sequences]
        await anext(streams[0])
        engine.die()
        for sequence in sequences[:2]:
            sequence.release()
        held = sequences[2].hold(5.0)
        with pytest.raises(EngineDead, match="KV that was to be held"):
            await held
        engine.restart()
        assert len(ids(await read(streams[3]))) in (29, 30)
        opened = [c for c in engine.delivered if isinstance(c, Open)]
        assert [command.seq for command in opened] == [sequences[3].id]
        held = sequences[3].hold(5.0)
        engine.die()
        with pytest.raises(EngineDead):
            await held
        engine.restart()

    run(test)


class Client:
    """One random program: a family of sequences, whose tokens it knows."""

    def __init__(self, rt: Runtime, seed: int):
        self._rt = rt
        self._random = random.Random(seed)
        self._known: dict[LastingSequence, list[int]] = {}

    async def run(self, num_acts: int) -> None:
        for _ in range(num_acts):
            await self._act()
        for sequence in self._known:
            sequence.release()

    async def _act(self) -> None:
        chance, known = self._random, self._known
        if not known or (len(known) < 4 and chance.random() < 0.1):
            known[self._rt.open_lasting(CALLER)] = []
        sequence = chance.choice(list(known))
        tokens = known[sequence]
        what = chance.random()
        if what < 0.3 or not tokens:
            more = [chance.randrange(250) for _ in range(chance.randrange(1, 30))]
            if len(tokens) + len(more) < 250:
                tokens += more
                sequence.append(pack_tokens(more))
        elif what < 0.6 and len(tokens) < 250:
            await self._generate(sequence, tokens)
        elif what < 0.7:
            tokens_of = await self._tried(lambda: sequence.append(b"", PromptOutputs(dist=1)))
            assert tokens_of.dists is not None
            assert list(tokens_of.dists.ids) == [most_likely(tokens, VOCAB)]
        elif what < 0.8:
            del tokens[chance.randrange(1, len(tokens) + 1) :]
            sequence.truncate(len(tokens))
        elif what < 0.9:
            known[sequence.fork()] = list(tokens)
        elif what < 0.95:
            sequence.release()
            del known[sequence]
        else:
            await asyncio.sleep(0)

    async def _tried(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                return await ask()
            except EngineDead:
                await self._rt.engine.wait_ready()

    async def _generate(self, sequence: LastingSequence, tokens: list[int]) -> None:
        count, seed = self._random.randrange(1, 12), self._random.randrange(1 << 40)
        expected = expected_tokens(tokens, seed, count, VOCAB)
        stop_at = self._random.randrange(1, 12) if self._random.random() < 0.2 else count
        stream = generate(sequence, count, seed)
        found: list[int] = []
        try:
            async for part in stream:
                found += ids(part)
                if stop_at <= len(found) < count:
                    sequence.cancel()
        except EngineDead:
            pass
        else:
            assert len(found) == count or stop_at < count
        assert found == expected[: len(found)]
        tokens += found


def random_programs(seed: int, num_acts: int) -> int:
    chance = random.Random(seed)

    async def test(rt: Runtime, engine: KillableEngine) -> int:
        clients = [asyncio.create_task(Client(rt, 100 * seed + number).run(num_acts)) for number in range(6)]
        while not all(client.done() for client in clients):
            await settle(chance.randrange(1, 120))
            if chance.random() < 0.2:
                engine.end_lease()
            else:
                engine.die()
                await settle(chance.randrange(3))
                engine.restart()
        await asyncio.gather(*clients)
        return engine.num_deaths + engine.num_lease_ends

    found = run(test)
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_on_an_engine_that_dies_again_and_again(seed: int) -> None:
    assert random_programs(seed, 60) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_at_length(seed: int) -> None:
    assert random_programs(1000 + seed, 400) > 10
