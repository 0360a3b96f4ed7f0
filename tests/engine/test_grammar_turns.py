"""Commands that wait for a grammar, and the turns in which tenants' grammars are compiled."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from functools import partial

import pytest
from llguidance import LLMatcher, LLTokenizer

from weft import Grammar
from weft.abi.errors import Unsupported
from weft.cache.manager import KVCache
from weft.core import wire
from weft.core.ids import pack_tokens
from weft.engine.grammar import (
    MAX_COMPILED,
    MAX_TENANT_COMPILED,
    TENANT_COMPILING_THREADS,
    Compiling,
    Grammars,
)
from weft.sched.scheduler import Scheduler, SchedulerConfig
from weft.sched.sequence import TokenGuide
from weft.tokenizers.load import load_tokenizer


def one_tenant(client: int, seq: int) -> str:
    return "a"


class Late(Grammars):
    """Grammars that are ready when the test says so."""

    def __init__(self) -> None:
        super().__init__([], (), [], None)
        self.ready: set[Grammar] = set()
        self.asked: list[tuple[Grammar, str]] = []

    def is_ready(self, grammar: Grammar, tenant: str = "") -> bool:
        self.asked.append((grammar, tenant))
        return grammar in self.ready


def test_commands_behind_a_grammar_keep_their_order_and_nobody_else_waits() -> None:
    grammars, done = Late(), []
    compiling = Compiling(
        grammars, lambda client, commands: done.extend((client, each) for each in commands), one_tenant
    )
    one, two = Grammar.regex("a"), Grammar.regex("b")
    mine: list[wire.Command] = [
        wire.Generate(seq=1, op=2, grammar=one),
        wire.Append(seq=1, op=3, tokens=pack_tokens([1])),
        wire.Fork(seq=1, child=4),
        wire.Generate(seq=4, op=5, grammar=two),
        wire.SetPriority(seq=1, priority=1),
        wire.SetPriority(seq=4, priority=1),
    ]
    theirs: list[wire.Command] = [wire.Open(seq=9), wire.Generate(seq=9, op=10), wire.ResetPrefixCache()]
    compiling.take(1, mine)
    compiling.take(1, theirs)
    same_number = wire.Append(seq=1, op=3, tokens=pack_tokens([2]))
    compiling.take(2, [same_number])
    assert done == [(1, command) for command in theirs] + [(2, same_number)]
    done.clear()
    grammars.ready.add(one)
    compiling.advance()
    assert [command for _, command in done] == mine[:3]
    assert compiling
    grammars.ready.add(two)
    compiling.advance()
    assert [command for _, command in done] == mine
    assert not compiling


@pytest.mark.parametrize("ending", [wire.Cancel(seq=1), wire.Release(seq=1), wire.Truncate(seq=1, num_tokens=0)])
def test_what_ends_a_generation_does_not_wait_for_its_grammar(ending: wire.Command) -> None:
    grammars, done = Late(), []
    compiling = Compiling(grammars, lambda client, commands: done.extend(commands), one_tenant)
    compiling.take(1, [wire.Generate(seq=1, op=2, grammar=Grammar.regex("a"))])
    assert not done
    compiling.take(1, [ending])
    compiling.advance()
    assert done == [wire.Generate(seq=1, op=2), ending]
    assert not compiling
    assert not grammars._held


def test_a_fork_drops_nothing_that_waits_with_its_number() -> None:
    grammars, done = Late(), []
    compiling = Compiling(grammars, lambda client, commands: done.extend(commands), one_tenant)
    one, two = Grammar.regex("a"), Grammar.regex("b")
    said: list[wire.Command] = [
        wire.Generate(seq=4, op=1, grammar=one),
        wire.Fork(seq=4, child=5),
        wire.Generate(seq=1, op=2, grammar=two),
        wire.Fork(seq=1, child=4),
        wire.Append(seq=5, op=3, tokens=pack_tokens([1])),
    ]
    compiling.take(1, said)
    grammars.ready = {one, two}
    compiling.advance()
    assert done == [said[2], said[0], said[1], said[3], said[4]], "each once, and what was said of a number in order"
    assert not compiling


def test_a_client_that_is_gone_waits_for_nothing() -> None:
    grammars, done = Late(), []
    compiling = Compiling(grammars, lambda client, commands: done.extend(commands), one_tenant)
    compiling.take(1, [wire.Generate(seq=1, op=2, grammar=Grammar.regex("a"))])
    compiling.drop_client(1)
    assert not compiling
    grammars.ready.add(Grammar.regex("a"))
    compiling.advance()
    assert not done


def test_grammars_are_compiled_for_the_tenant_of_their_sequence() -> None:
    """Also where its sequence is opened by the same message, and for forks of sequences that wait."""
    grammars, tenants = Late(), {}

    def apply(client: int, commands: list[wire.Command]) -> None:
        tenants.update({(client, each.seq): each.tenant for each in commands if isinstance(each, wire.Open)})

    compiling = Compiling(grammars, apply, lambda client, seq: tenants.get((client, seq), ""))
    one, two, three = Grammar.regex("a"), Grammar.regex("b"), Grammar.regex("c")
    compiling.take(
        1,
        [
            wire.Open(seq=1, tenant="a"),
            wire.Generate(seq=1, op=2, grammar=one),
            wire.Fork(seq=1, child=4),
            wire.Generate(seq=4, op=5, grammar=two),
            wire.Open(seq=6, tenant="b"),
            wire.Generate(seq=6, op=7, grammar=three),
        ],
    )
    grammars.ready.add(one)
    compiling.advance()
    assert dict.fromkeys(grammars.asked) == dict.fromkeys([(one, "a"), (three, "b"), (two, "a")])
    grammars.close()


class Gated(Grammars):
    """Grammars that are noted down instead of compiled; those of tenant a wait for a gate."""

    def __init__(self) -> None:
        super().__init__([], (), [], None)
        self.gate = threading.Event()
        self.begun: list[str] = []
        self.has_begun = threading.Semaphore(0)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        self.begun.append(grammar.text)
        self.has_begun.release()
        if grammar.text.startswith("a"):
            self.gate.wait()
        return grammar.text


def test_a_tenants_grammar_passes_the_hundred_of_another() -> None:
    grammars = Gated()
    flood = [grammars.compiled(Grammar.regex(f"a{number}"), "a") for number in range(100)]
    assert grammars.compiled(Grammar.regex("b"), "b").result() == "b"
    assert not any(grammar.done() for grammar in flood)
    grammars.gate.set()
    wait(flood)
    assert grammars.begun.index("b") <= TENANT_COMPILING_THREADS
    grammars.close()


def test_a_tenant_has_its_own_grammars_and_does_not_wait_for_those_of_another() -> None:
    grammars = Gated()
    flood = [grammars.compiled(Grammar.regex(f"a{number}"), "a") for number in range(TENANT_COMPILING_THREADS)]
    same = Grammar.regex("the same")
    waiting = grammars.compiled(same, "a")
    assert grammars.compiled(same, "b").result() == same.text
    assert not any(grammar.done() for grammar in flood)
    grammars.gate.set()
    wait([*flood, waiting])
    assert grammars.begun.count(same.text) == 2, "once for each tenant"
    assert grammars.compiled(same, "a") is waiting
    assert grammars.begun.count(same.text) == 2
    grammars.close()


def test_a_tenant_with_many_grammars_evicts_its_own() -> None:
    grammars = Gated()
    grammars.gate.set()
    few = grammars.compiled(Grammar.regex("few"), "b")
    wait([grammars.compiled(Grammar.regex(f"{number}"), "many") for number in range(MAX_COMPILED + 1)])
    assert grammars.compiled(Grammar.regex("few"), "b") is few
    assert len(grammars._compiled) == MAX_TENANT_COMPILED + 1
    grammars.close()


def test_a_guide_is_made_for_the_tenant_of_its_sequence() -> None:
    asked: list[tuple[Grammar, str]] = []

    def make_guide(grammar: Grammar, tenant: str) -> TokenGuide:
        asked.append((grammar, tenant))
        raise Unsupported("no guide")

    config = SchedulerConfig(max_context=64, max_running=4, max_step_tokens=32, vocab_size=100)
    scheduler = Scheduler(config, KVCache(8, page_size=8), make_guide=make_guide)
    grammar = Grammar.regex("a")
    commands: list[wire.Command] = [
        wire.Open(seq=1, tenant="a"),
        wire.Append(seq=1, op=2, tokens=pack_tokens([1])),
        wire.Generate(seq=1, op=3, grammar=grammar),
    ]
    scheduler.handle(1, commands, 0.0)
    assert asked == [(grammar, "a")]


def test_a_grammar_is_ready_for_the_tenant_that_has_the_number_when_its_turn_comes() -> None:
    """A fork's number may be of a sequence of another tenant; carried out before that one's grammar is compiled, the
    command would stop the engine until it is."""
    grammars, tenants, done = Late(), {1: "a"}, list[wire.Command]()
    compiling = Compiling(
        grammars, lambda client, commands: done.extend(commands), lambda client, seq: tenants.get(seq, "")
    )
    one, two = Grammar.regex("a"), Grammar.regex("b")
    said = [
        wire.Generate(seq=1, op=2, grammar=one),
        wire.Fork(seq=1, child=4),
        wire.Generate(seq=4, op=5, grammar=two),
    ]
    compiling.take(1, said)
    tenants[4] = "b"
    grammars.ready.add(one)
    compiling.advance()
    assert grammars.asked[-1] == (two, "b")
    assert set(grammars._held) == {("a", two)}
    grammars.ready.add(two)
    compiling.advance()
    assert done == said
    assert not grammars._held
    grammars.close()


def test_grammars_that_no_command_waits_for_are_not_compiled() -> None:
    grammars = Gated()
    flood = [Grammar.regex(f"a{number}") for number in range(TENANT_COMPILING_THREADS)]
    running = [grammars.hold(grammar, "a") for grammar in flood]
    given_up, wanted = Grammar.regex("given up"), Grammar.regex("wanted")
    matcher = grammars.hold(given_up, "a")
    others = [grammars.hold(wanted, "a") for _ in range(2)]
    for _ in range(TENANT_COMPILING_THREADS):
        grammars.has_begun.acquire()
    for grammar in (*flood, given_up, wanted):
        grammars.let_go(grammar, "a")
    assert matcher.cancelled()
    grammars.gate.set()
    assert others[0].result() == wanted.text, "another command waits for it"
    assert [future.result() for future in running] == [grammar.text for grammar in flood]
    assert grammars.compiled(given_up, "a").result() == given_up.text, "asked for again"
    assert grammars.begun[TENANT_COMPILING_THREADS:] == [wanted.text, given_up.text]
    grammars.close()


def test_grammars_that_wait_when_the_threads_close_are_cancelled() -> None:
    grammars = Gated()
    flood = [grammars.compiled(Grammar.regex(f"a{number}"), "a") for number in range(TENANT_COMPILING_THREADS + 1)]
    for _ in range(TENANT_COMPILING_THREADS):
        grammars.has_begun.acquire()
    grammars.close()
    assert flood[-1].cancelled()
    grammars.gate.set()
    assert [grammar.result() for grammar in flood[:-1]] == ["a0", "a1"]


def test_the_thread_whose_time_is_charged_compiles() -> None:
    threads: list[int] = []

    class Watched(Grammars):
        def _vocabulary(self) -> LLTokenizer:
            threads.append(threading.get_ident())
            return super()._vocabulary()

    tokenizer = load_tokenizer("weft-tiny")
    grammars = Watched(tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_token_ids, tokenizer.encode)
    grammars.compiled(Grammar.regex("x"), "a", lambda seconds: threads.append(threading.get_ident())).result()
    wait([grammars.compiled(Grammar.regex("y"), "a")])
    grammars.close()
    assert len(set(threads[:2])) == 1


def test_more_grammars_are_waited_for_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that a request waits for is not evicted, which would compile it again and again."""
    tokenizer = load_tokenizer("weft-tiny")
    encode = partial(tokenizer.encode, add_special_tokens=False)
    grammars = Grammars(tokenizer.token_bytes, tokenizer.special_ids, tokenizer.eos_token_ids, encode)
    done: list[wire.Command] = []
    compiling = Compiling(grammars, lambda client, commands: done.extend(commands) if client == 1 else None, one_tenant)
    count = 3 * MAX_TENANT_COMPILED
    gate, compile = threading.Event(), grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar: compile(grammar) if gate.wait(60) else None)
    commands = [wire.Generate(seq=n, op=n, grammar=Grammar.regex(f"{n:04}")) for n in range(1, count + 1)]
    compiling.take(1, commands)
    compiling.take(2, commands[: count // 3])  # another client with the same grammars, which goes away
    compiling.drop_client(2)
    gate.set()
    futures = [grammars.compiled(command.grammar, "a") for command in commands if command.grammar is not None]
    wait(futures)
    compiling.advance()
    assert len(done) == count
    assert set(map(id, done)) == set(map(id, commands))
    kept = [grammars.compiled(command.grammar, "a") for command in commands if command.grammar is not None]
    assert all(future is other for future, other in zip(futures, kept, strict=True))
    assert not compiling
    assert not grammars._held
    grammars.is_ready(Grammar.regex("one more"), "a")  # with nobody waiting, what is kept is bounded again
    assert len(grammars._compiled) == MAX_TENANT_COMPILED
    grammars.close()
