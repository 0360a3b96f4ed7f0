"""Chat renders, encodes and completes; embedding pools and scales."""

import asyncio

import pytest

from tests.programs.help import CALLER, collect, run, settle, text_of, tokenizer_with
from tests.tokenizers.templates import HEADERS
from weft.abi.errors import InvalidRequest, Unsupported
from weft.core.ids import TOKEN_BYTES, unpack_tokens
from weft.core.sampling import StopParams
from weft.core.wire import Append
from weft.programs.builtin import chat, embedding
from weft.programs.runtime import Runtime
from weft.programs.types import ChatArgs, CompletionArgs, EmbeddingArgs
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import FakeEngine

TALK = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def appended(engine: FakeEngine) -> str:
    tokens = [
        token for command in engine.sent if isinstance(command, Append) for token in unpack_tokens(command.tokens)
    ]
    return byte_tokenizer().decode(tokens, skip_special=False)


def test_a_chat() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        engine.script(b"hello")
        options = CompletionArgs(prompt=b"", stop=StopParams(stop=[b"lo"]))
        chunks = await collect(chat.main(ChatArgs(messages=TALK, completion=options), CALLER, rt))
        assert text_of(chunks) == "hel"
        assert appended(engine) == RENDERED

    run(test)


def test_special_tokens_of_the_template_are_tokens() -> None:
    tokens = unpack_tokens(asyncio.run(chat.render(ChatArgs(messages=TALK), byte_tokenizer())))
    assert (tokens[0], tokens.count(257), tokens.count(258)) == (257, 2, 1)


def test_no_doubled_beginning_of_sequence() -> None:
    tokenizer = tokenizer_with(HEADERS)
    tokens = unpack_tokens(asyncio.run(chat.render(ChatArgs(messages=TALK), tokenizer)))
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("keep", [1, 5, 10**6])
def test_truncation_keeps_the_end(keep: int) -> None:
    tokenizer = byte_tokenizer()
    whole = asyncio.run(chat.render(ChatArgs(messages=TALK), tokenizer))
    kept = asyncio.run(chat.render(ChatArgs(messages=TALK, truncate_prompt_tokens=keep), tokenizer))
    assert len(kept) == min(keep * TOKEN_BYTES, len(whole))
    assert whole.endswith(kept)


def test_truncation_to_nothing_is_a_mistake() -> None:
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
        asyncio.run(chat.render(ChatArgs(messages=TALK, truncate_prompt_tokens=0), byte_tokenizer()))


def test_long_chats_leave_the_loop_free() -> None:
    long = [{"role": "user", "content": "some words of a long message " * 20_000}]

    async def test() -> None:
        task = asyncio.create_task(chat.render(ChatArgs(messages=long), byte_tokenizer()))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(task.result()) > TOKEN_BYTES * 500_000
        assert turns > 10

    asyncio.run(test())


def test_a_template_of_the_request() -> None:
    args = ChatArgs(messages=TALK, chat_template="{{ messages[0].content }}{{ x }}", template_kwargs={"x": 3})
    assert chat.render_text(args, byte_tokenizer(None)) == "hi3"


def test_a_model_without_template() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        rt.tokenizer = byte_tokenizer(None)
        with pytest.raises(Unsupported, match="/v1/completions"):
            await collect(chat.main(ChatArgs(messages=TALK), CALLER, rt))
        assert engine.sent == []

    run(test)


def test_a_chat_that_is_closed_early() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        chunks = chat.main(ChatArgs(messages=TALK), CALLER, rt)
        await anext(chunks)
        await chunks.aclose()
        await settle()
        assert engine.sequences == {}

    run(test)


def test_embedding() -> None:
    async def test(engine: FakeEngine, rt: Runtime) -> None:
        prompt = rt.tokenizer.encode("text")
        whole = await embedding.main(EmbeddingArgs(prompt=prompt, normalize=False), CALLER, rt)
        assert whole.embedding == [float(i + 1) for i in range(8)]
        assert whole.usage.num_prompt_tokens == 4
        unit = await embedding.main(EmbeddingArgs(prompt=prompt, dimensions=2, pooling="last"), CALLER, rt)
        assert unit.embedding == pytest.approx([1 / 5**0.5, 2 / 5**0.5])
        for dimensions in (0, 9):
            with pytest.raises(InvalidRequest, match="dimensions"):
                await embedding.main(EmbeddingArgs(prompt=prompt, dimensions=dimensions), CALLER, rt)
        with pytest.raises(InvalidRequest, match="prompt"):
            await embedding.main(EmbeddingArgs(prompt=b""), CALLER, rt)

    run(test)
