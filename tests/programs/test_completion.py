"""The completion program: text, endings, choices, and that every page comes back."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.programs.help import CALLER, collect, run, settle, text_of
from weft.abi.errors import ContextTooLong, EngineDead, InvalidRequest, OutOfPages
from weft.core.ids import pack_tokens
from weft.core.sampling import SamplingParams, StopParams
from weft.core.wire import FinishReason, Fork, Generate, Open, Release
from weft.programs.builtin import completion
from weft.programs.runtime import Runtime
from weft.programs.types import CompletionArgs
from weft.testing.fake_engine import FakeEngine

PROMPT = pack_tokens(list(b"prompt"))
END, START = 256, 257


def args(**fields: object) -> CompletionArgs:
    fields.setdefault("prompt", PROMPT)
    return CompletionArgs(**fields)


def check_chunks(chunks: list, n: int) -> None:
    """What holds of every completion that ends well."""
    for index in range(n):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.finish_reason is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert [chunk.usage is not None for chunk in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].usage.num_output_tokens == sum(len(chunk.tokens) for chunk in mine)


def complete(output: bytes | list[int], **fields: object) -> list:
    """The chunks for a scripted output."""
    chunks: list = []

    async def test(engine: FakeEngine, rt: Runtime) -> None:
        engine.script(output)
        chunks.extend(await collect(completion.main(args(**fields), CALLER, rt)))

    run(test)
    check_chunks(chunks, 1)
    return chunks


def test_a_completion() -> None:
    chunks = complete("Grüße 😀".encode())
    assert text_of(chunks) == "Grüße 😀"
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].tokens == (END,)
    assert chunks[-1].usage.num_prompt_tokens == 6


def test_length() -> None:
    chunks = complete(b"abcdef", max_tokens=3)
    assert text_of(chunks) == "abc"
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("end", ["b", "é", "abé", "f"])
def test_a_choice_ends_when_its_reader_has_enough(end: str) -> None:
    def until() -> Callable[[str], bool]:
        seen = []
        return lambda text: seen.append(text) or end in "".join(seen)

    output = "abécdef".encode()
    chunks = complete(output + b"x" * 99, until=until)
    assert text_of(chunks) == "abécdef"[: "abécdef".index(end) + len(end)]
    assert (chunks[-1].finish_reason, chunks[-1].stop) == ("stop", None)
    assert chunks[-1].usage.num_prompt_tokens == 6
    assert text_of(complete(b"hello ENDmore", stop=StopParams(stop=[b"END"]), until=until)) == "hello "
    assert text_of(complete([*b"ab", *"é".encode()[:1]], max_tokens=3, until=lambda: lambda text: False)) == "ab\ufffd"


@pytest.mark.parametrize(("chunk_tokens", "sizes"), [(1, [1] * 12), (4, [1, 4, 4, 3]), (100, [1, 11])])
def test_a_chunk_has_as_many_tokens_as_its_reader_wants(chunk_tokens: int, sizes: list[int]) -> None:
    chunks = complete(b"abcdefghijklmn", max_tokens=12, chunk_tokens=chunk_tokens)
    assert [len(chunk.tokens) for chunk in chunks] == sizes
    assert text_of(chunks) == "abcdefghijkl"


def test_what_may_end_a_choice_sees_each_token_as_it_comes() -> None:
    chunks = complete(b"abcdef", until=lambda: lambda text: text == "d", chunk_tokens=100)
    assert [chunk.text for chunk in chunks if chunk.tokens] == ["a", "b", "c", "d"]


def test_max_tokens_of_stop_params() -> None:
    assert text_of(complete(b"abcdef", stop=StopParams(max_tokens=2))) == "ab"


@pytest.mark.parametrize(("include", "text"), [(False, "hello "), (True, "hello END")])
def test_stop_strings_are_cut_and_never_flash_up(include: bool, text: str) -> None:
    chunks = complete(b"hello ENDmore", stop=StopParams(stop=[b"END"]), include_stop=include)
    assert text_of(chunks) == text
    assert chunks[-1].stop == "END"
    assert all("E" not in chunk.text for chunk in chunks[:-1])


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    assert text_of(complete(b"EN EN END", stop=StopParams(stop=[b"ENDE"]))) == "EN EN END"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_tokens_are_not_part_of_the_text(include: bool, text: str) -> None:
    chunks = complete(b"abc", stop=StopParams(stop_token_ids=[ord("b")]), include_stop=include)
    assert text_of(chunks) == text
    assert chunks[-1].stop == ord("b")


@pytest.mark.parametrize(("include", "text"), [(False, "a<|im_start|>"), (True, "a<|im_start|><|end|>")])
def test_special_tokens_kept(include: bool, text: str) -> None:
    assert text_of(complete([97, START, END], skip_special_tokens=False, include_stop=include)) == text


def test_special_tokens_skipped() -> None:
    assert text_of(complete([97, START, 98, END])) == "ab"


def test_ignored_end_of_sequence_is_not_an_end() -> None:
    chunks = complete([97, END, 98, 99], stop=StopParams(ignore_eos=True), max_tokens=4, skip_special_tokens=False)
    assert text_of(chunks) == "a<|end|>bc"


def test_an_unfinished_character_at_the_end() -> None:
    assert text_of(complete("ü".encode()[:1], max_tokens=1)) == "\ufffd"


@given(output=st.text(max_size=30), stops=st.lists(st.text("abü", min_size=1, max_size=3), max_size=2), data=st.data())
@settings(max_examples=80, deadline=None)
def test_text_is_what_was_generated_up_to_the_stop(output: str, stops: list[str], data: st.DataObject) -> None:
    output += data.draw(st.text("abü", max_size=8))
    expected, ended = output, None
    # The first to be complete ends it; of several that end at one byte, the one that began first.
    raw = output.encode()
    for end in range(1, len(raw) + 1):
        hits = [raw[:end].find(s.encode()) for s in stops if s.encode() in raw[:end]]
        if hits:
            expected, ended = raw[: min(hits)].decode(), True
            break
    chunks = complete(raw, stop=StopParams(stop=[s.encode() for s in stops]))
    assert text_of(chunks) == expected
    assert (chunks[-1].stop is not None) == bool(ended)


def test_logprobs_come_with_their_tokens() -> None:
    chunks = complete(b"ab", sampling=SamplingParams(logprobs=2))
    for chunk in chunks:
        assert len(chunk.logprobs) == len(chunk.tokens)
        for token, logprobs in zip(chunk.tokens, chunk.logprobs, strict=True):
            assert logprobs.top_ids[0] == token


def test_choices_share_one_prompt() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        chunks = await collect(
            completion.main(args(n=5, max_tokens=4, sampling=SamplingParams(seed=2**63 - 2)), CALLER, rt)
        )
        check_chunks(chunks, 5)
        assert engine.appended_tokens == 6
        [message] = [m for m in engine.messages if isinstance(m[0], Open)]
        kinds = [type(command) for command in message]
        assert kinds.count(Fork) == 4
        assert max(i for i, kind in enumerate(kinds) if kind is Fork) < kinds.index(Generate)
        seeds = [command.sampling.seed for command in message if isinstance(command, Generate)]
        assert seeds == [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1, -(2**63) + 2]
        assert len({text_of(chunks, index) for index in range(5)}) > 1
        # Each in its turn.
        assert [chunk.index for chunk in chunks] == [0, 1, 2, 3, 4] * 4

    run(test)


def test_a_choice_that_is_done_is_released_before_its_siblings() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        engine.script(b"a", b"abcdefgh")
        async with aclosing(completion.main(args(n=2), CALLER, rt)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None and chunk.index == 0:
                    await settle(2)
                    assert len(engine.sequences) == 1

    run(test)


def test_no_seed_draws_one() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        await collect(completion.main(args(max_tokens=1), CALLER, rt))
        [seed] = [command.sampling.seed for command in engine.sent if isinstance(command, Generate)]
        assert seed is not None

    run(test)


@pytest.mark.parametrize("k", [None, 2])
def test_prompt_alone(k: int | None) -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        chunks = await collect(completion.main(args(n=2, max_tokens=0, prompt_logprobs=k), CALLER, rt))
        assert [(chunk.index, chunk.text, chunk.finish_reason) for chunk in chunks] == [
            (0, "", "length"),
            (1, "", "length"),
        ]
        assert (chunks[0].prompt_logprobs is None) == (k is None)
        assert not any(isinstance(command, Generate) for command in engine.sent)

    run(test)


def test_prompt_logprobs_come_first() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        chunks = await collect(completion.main(args(max_tokens=2, prompt_logprobs=1), CALLER, rt))
        assert len(chunks[0].prompt_logprobs) == 6
        assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
        check_chunks(chunks, 1)

    run(test)


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 9])
def test_a_client_that_goes_away(turns: int) -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        task = asyncio.create_task(collect(completion.main(args(n=3, prompt_logprobs=0), CALLER, rt)))
        await settle(turns)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert rt.num_sequences == 0

    run(test)


def test_a_stream_that_is_closed_early() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        chunks = completion.main(args(n=3), CALLER, rt)
        await anext(chunks)
        await chunks.aclose()
        assert rt.num_sequences == 0

    run(test)


def test_failures_release_everything() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        engine.fail_next("out_of_pages", "no pages")
        with pytest.raises(OutOfPages):
            await collect(completion.main(args(n=3, prompt_logprobs=0), CALLER, rt))
        stream = completion.main(args(n=3), CALLER, rt)
        await anext(stream)
        engine.die()
        with pytest.raises(EngineDead):
            await collect(stream)
        engine.restart()
        assert len(await collect(completion.main(args(max_tokens=2), CALLER, rt))) == 2

    run(test)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": b""}, "prompt"),
        ({"prompt": b"abc"}, "prompt"),
        ({"prompt": pack_tokens([0, 264])}, "prompt"),
        ({"prompt": pack_tokens([-1])}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"sampling": SamplingParams(top_p=2)}, "top_p"),
        ({"stop": StopParams(stop=[b""])}, "stop"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ],
)
def test_mistakes_are_named_before_anything_is_opened(fields: dict, param: str) -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await collect(completion.main(args(**fields), CALLER, rt))
        assert caught.value.param == param
        assert engine.sent == []

    run(test)


def test_too_long_for_the_context() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        longest = engine.info.max_context
        for prompt, max_tokens in [(longest, None), (longest, 1), (longest - 5, 6), (longest + 1, 0)]:
            with pytest.raises(ContextTooLong, match=str(longest)):
                await collect(
                    completion.main(args(prompt=pack_tokens([1] * prompt), max_tokens=max_tokens), CALLER, rt)
                )
        chunks = await collect(completion.main(args(prompt=pack_tokens([1] * (longest - 5))), CALLER, rt))
        assert chunks[-1].finish_reason == "length"
        assert chunks[-1].usage.num_output_tokens == 5

    run(test)


class SeenText:
    """A `ToolReader` that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def push(self, text: str) -> None:
        self.pieces.append(text)

    def wait_kind(self, reason: FinishReason) -> str:
        return f"tools:{reason}"


@pytest.mark.parametrize(
    ("fields", "shown", "read", "kind"),
    [
        ({}, "x" * 3000, "x" * 3000, "tools:stop"),
        ({"stop": StopParams(max_tokens=2000)}, "x" * 2000, "x" * 2000, "tools:length"),
        ({"stop": StopParams(stop=[b"yz"])}, "x" * 3000, "x" * 3000 + "yz", "tools:stop"),
        ({"stop": StopParams(stop=[b"yz"]), "include_stop": True}, "x" * 3000 + "yz", "x" * 3000 + "yz", "tools:stop"),
        ({"stop": StopParams(stop_token_ids=[ord("y")])}, "x" * 3000, "x" * 3000 + "y", "tools:stop"),
    ],
)
def test_the_reader_of_calls_gets_a_long_answer_piece_by_piece(
    fields: dict, shown: str, read: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to be decoded or parsed when the answer ends, before its sequence can be released."""
    reader = SeenText()

    async def test(engine: FakeEngine, rt: Runtime) -> None:
        decoded: list[int] = []
        decode = rt.tokenizer.decode

        def counted(tokens: Sequence[int], **options: bool) -> str:
            decoded.append(len(tokens))
            return decode(tokens, **options)

        monkeypatch.setattr(rt.tokenizer, "decode", counted)
        engine.script(b"x" * 3000 + (b"yz" if "stop" in fields else b""))
        chunks = await collect(completion.main(args(tools_called=lambda: reader, **fields), CALLER, rt))
        assert text_of(chunks) == shown
        await settle()
        assert [command.kind for command in engine.sent if isinstance(command, Release)] == [kind]
        assert max(decoded, default=0) <= 8

    run(test)
    assert "".join(reader.pieces) == read
    assert max(map(len, reader.pieces)) <= 8
