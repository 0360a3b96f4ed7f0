"""The offline API, over a fake engine for what engines do and over the embedded model for what a user sees."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

import weft
from weft.abi.errors import ConfigError, ContextTooLong, InvalidRequest, ModelLoadError, WeftError
from weft.core.grammar import Grammar, Trigger
from weft.core.ids import unpack_tokens
from weft.core.wire import Generate, Open
from weft.llm import LLM
from weft.testing.byte_tokenizer import byte_tokenizer
from weft.testing.fake_engine import DEFAULT_INFO, FakeEngine


class Fake:
    """An LLM over a fake engine, and the engine."""

    def __init__(self, **info):
        self.made: list[FakeEngine] = []
        self.llm = LLM.over(lambda: self._make(info), byte_tokenizer())
        self.engine = self.made[0]

    def _make(self, info) -> FakeEngine:
        self.made.append(FakeEngine(msgspec.structs.replace(DEFAULT_INFO, **info)))
        return self.made[0]

    def assert_nothing_left(self) -> None:
        # Each question is a turn of the loop, in which cancelled work ends.
        for _ in range(1000):
            if self.llm.stats().num_sequences == 0:
                return
        raise AssertionError("sequences are still open")


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("weft-tiny", num_pages=256, max_running=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def exact() -> Iterator[LLM]:
    """In float32, in which a prompt of which a part is cached gives the tokens of the whole one."""
    with LLM("weft-tiny", dtype="float32", num_pages=64, max_running=4) as llm:
        yield llm


def test_results_come_in_the_order_of_prompts(fake: Fake):
    lengths = [9, 1, 5, 3, 7]
    fake.engine.script(*(b"x" * length for length in lengths))
    results = fake.llm.generate([f"prompt {length}" for length in lengths])
    assert [result.index for result in results] == [0, 1, 2, 3, 4]
    assert [result.prompt for result in results] == [f"prompt {length}" for length in lengths]
    assert sorted(len(result.text) for result in results) == sorted(lengths)
    assert all(result.finish_reason == "stop" for result in results)


def test_text_and_token_ids_mix(fake: Fake):
    text, ids = fake.llm.generate(["ab", [97, 98]], temperature=0, max_tokens=4)
    assert text.prompt_token_ids == ids.prompt_token_ids == [97, 98]
    assert text.text == ids.text
    assert text.token_ids == ids.token_ids


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"]])
def test_one_prompt_alone_is_one_prompt(fake: Fake, prompt):
    [result] = fake.llm.generate(prompt, max_tokens=2)
    assert result.prompt_token_ids == [97, 98]


def test_parameters_reach_the_engine(fake: Fake):
    fake.llm.generate(
        "ab",
        weft.SamplingParams(top_k=5, temperature=0.3),
        weft.StopParams(max_tokens=9, ignore_eos=True),
        temperature=0.5,
        stop="end",
        seed=3,
        priority=-2,
        namespace="mine",
    )
    [command] = [c for c in fake.engine.sent if isinstance(c, Generate)]
    assert (command.sampling.top_k, command.sampling.temperature, command.sampling.seed) == (5, 0.5, 3)
    assert (command.stop.max_tokens, command.stop.ignore_eos, command.stop.stop) == (9, True, [b"end"])
    [opened] = [c for c in fake.engine.sent if isinstance(c, Open)]
    assert (opened.priority, opened.namespace) == (-2, "mine")


def test_n_outputs(fake: Fake):
    [result] = fake.llm.generate("ab", n=3, max_tokens=4, seed=1)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert result.num_output_tokens == sum(len(output.token_ids) for output in result.outputs)
    assert fake.engine.appended_tokens == 2


def test_at_most_a_window_of_prompts_is_under_way():
    fake = Fake(max_running=4)
    pulled = 0

    def prompts() -> Iterator[str]:
        nonlocal pulled
        for number in range(100):
            pulled += 1
            yield f"prompt {number}"

    with fake.llm as llm:
        for taken, _ in enumerate(llm.generate_iter(prompts(), max_tokens=2)):
            assert pulled - taken <= 8
    assert pulled == 100


def test_endless_prompts_can_be_left(fake: Fake):
    def prompts() -> Iterator[str]:
        while True:
            yield "ab"

    results = fake.llm.generate_iter(prompts(), max_tokens=2)
    assert next(results).num_output_tokens == 2
    results.close()
    fake.assert_nothing_left()


def test_the_first_error_is_raised_and_names_its_prompt(fake: Fake):
    with pytest.raises(ContextTooLong, match=r"^prompt 1: the prompt has 5000 tokens"):
        fake.llm.generate(["ab", "x" * 5000, "cd"], max_tokens=2)
    fake.assert_nothing_left()


def test_errors_are_returned_where_asked_for(fake: Fake):
    good, long, empty = fake.llm.generate(["ab", "x" * 5000, ""], max_tokens=2, return_errors=True)
    assert good.error is None
    assert isinstance(long.error, ContextTooLong)
    assert isinstance(empty.error, InvalidRequest)
    with pytest.raises(ContextTooLong, match="prompt 1"):
        _ = long.text


def test_an_engine_failure_is_one_prompts_error(fake: Fake):
    fake.engine.fail_next("out_of_pages", "none left")
    results = fake.llm.generate(["ab", "cd"], max_tokens=2, return_errors=True)
    assert sorted(result.error is None for result in results) == [False, True]
    assert [r.error.kind for r in results if r.error] == ["out_of_pages"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 3}, "did you mean max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 99.0}, "temperature must be in"),
        ({"n": 0}, "n must be between"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens 5 exceeds max_tokens 2"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 10**5}, "allowed_token_ids has 100000 entries, at most"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs cannot be used: Expected `int"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs cannot be used: Expected `int"),
        ({"n": True}, "n cannot be used"),
        ({"n": 1.5}, "n cannot be used"),
        ({"include_stop": "yes"}, "include_stop cannot be used"),
        ({"skip_special_tokens": 1}, "skip_special_tokens cannot be used"),
        ({"add_special_tokens": "no"}, "add_special_tokens cannot be used"),
        ({"priority": "low"}, "priority cannot be used"),
        ({"namespace": 3}, "namespace cannot be used"),
        ({"grammar": ["a"]}, "grammar must be a Grammar, got list"),
        ({"grammar": ["regex", "a"]}, "grammar must be a Grammar, got list"),
        ({"grammar": Grammar("regex", ["a"])}, "grammar cannot be used: Expected `str`"),
        ({"grammar": Grammar("regex", {1j})}, "grammar cannot be used"),
        ({"grammar": Grammar.lark('start: "a"', Trigger("m", reasoning=["a", "b"]))}, "must be a tuple of two str"),
    ],
)
def test_a_wrong_option_is_raised_before_anything_is_computed(fake: Fake, options, message):
    with pytest.raises(InvalidRequest, match=message):
        fake.llm.generate_iter(["ab"], **options)
    assert fake.engine.sent == []


@pytest.mark.parametrize("prompt", [b"bytes", [[1, "x"]], [[2**40]], [[-1]], [[]], [3.5]])
def test_what_is_no_prompt_is_refused(fake: Fake, prompt):
    with pytest.raises(InvalidRequest):
        fake.llm.generate(prompt)


def test_it_works_inside_a_running_loop(fake: Fake):
    async def notebook() -> str:
        return fake.llm.generate("ab", max_tokens=3)[0].text

    assert len(asyncio.run(notebook())) == 3


def test_several_threads_may_use_it(fake: Fake):
    texts: dict[int, list[str]] = {}

    def work(number: int) -> None:
        prompts = [f"{number} {i}" for i in range(20)]
        texts[number] = [result.text for result in fake.llm.generate(prompts, temperature=0, max_tokens=4)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        alone = fake.llm.generate([f"{number} {i}" for i in range(20)], temperature=0, max_tokens=4)
        assert texts[number] == [result.text for result in alone]


def test_a_stream_gives_the_text_in_pieces(fake: Fake):
    fake.engine.script(b"hello")
    assert "".join(chunk.text for chunk in fake.llm.stream("ab")) == "hello"


def test_leaving_a_stream_cancels_it(fake: Fake):
    stream = fake.llm.stream("ab", ignore_eos=True)
    next(stream)
    stream.close()
    fake.assert_nothing_left()


def test_closing_is_final_and_may_be_repeated(fake: Fake):
    fake.llm.close()
    fake.llm.close()
    assert fake.engine.closed
    with pytest.raises(RuntimeError, match="closed"):
        fake.llm.generate("ab")


def test_one_that_nobody_holds_is_closed():
    fake = Fake()
    engine = fake.engine
    del fake.llm
    gc.collect()
    assert engine.closed


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "llm.stream('ab', ignore_eos=True).__next__()"])
def test_a_script_may_end_without_closing(end: str):
    program = f"import weft\nllm = weft.LLM(num_pages=128)\nllm.generate('ab', max_tokens=2)\n{end}\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_progress_is_drawn_on_standard_error(fake: Fake, capsys: pytest.CaptureFixture[str]):
    fake.llm.generate(["ab", "cd"], max_tokens=2, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2/2" in err
    fake.llm.generate(["ab"], max_tokens=2)
    assert capsys.readouterr().err == ""


def test_engine_options_are_checked():
    with pytest.raises(ConfigError, match="did you mean num_pages"):
        LLM(num_page=3)
    with pytest.raises(ConfigError, match="dtype"):
        LLM(dtype="int3")
    with pytest.raises(ConfigError, match="memory_fraction"):
        LLM(memory_fraction=2.0)
    with pytest.raises(ModelLoadError, match="no directory"):
        LLM("./nowhere")


def test_greedy_results_do_not_depend_on_the_batch(tiny: LLM):
    prompts = ["The cat", "Once upon a time", [5, 6, 7], "A"]
    together = tiny.generate(prompts, temperature=0, max_tokens=8)
    for prompt, result in zip(prompts, together, strict=True):
        [alone] = tiny.generate([prompt], temperature=0, max_tokens=8)
        assert alone.token_ids == result.token_ids
        assert alone.text == result.text


def test_a_real_result_is_complete(tiny: LLM):
    [result] = tiny.generate("Once upon a time", temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=0)
    assert result.prompt_token_ids == unpack_tokens(tiny.tokenizer.encode("Once upon a time")).tolist()
    assert len(result.token_ids) == 6
    assert result.finish_reason == "length"
    [output] = result.outputs
    assert len(output.logprobs) == 6
    assert all(one.rank == 1 and len(one.top_ids) == 2 for one in output.logprobs)
    assert output.usage.num_output_tokens == 6
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_a_repeated_prompt_is_found_in_the_cache(tiny: LLM):
    prompt = [token % 100 + 10 for token in range(64)]
    options = {"temperature": 0, "max_tokens": 2, "namespace": "repeated"}
    [first] = tiny.generate([prompt], **options)
    [second] = tiny.generate([prompt], **options)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 48
    assert (first.num_recomputed_tokens, first.num_new_tokens, first.first_different_token) == (0, 64, None)
    assert second.num_cached_tokens + second.num_recomputed_tokens + second.num_new_tokens == 64
    assert second.num_host_tokens == 0
    edited = [*prompt, first.token_ids[0], 5, 6]
    [third] = tiny.generate([edited], **options)
    assert third.first_different_token == third.num_cached_tokens == 65
    assert second.token_ids == first.token_ids


def test_chat_renders_the_template(tiny: LLM):
    messages = [{"role": "user", "content": "Hello"}]
    [alone] = tiny.chat(messages, temperature=0, max_tokens=4)
    first, second = tiny.chat([messages, messages], temperature=0, max_tokens=4)
    assert alone.token_ids == first.token_ids == second.token_ids
    rendered = tiny.tokenizer.decode(alone.prompt_token_ids, skip_special=False)
    assert "Hello" in rendered
    assert rendered != "Hello"
    streamed = "".join(chunk.text for chunk in tiny.stream_chat(messages, temperature=0, max_tokens=4))
    assert streamed == alone.text
    with pytest.raises(WeftError, match="prompt 0: "):
        tiny.chat([[{"role": "nobody"}]])


def test_a_stop_string_ends_the_text(tiny: LLM):
    [whole] = tiny.generate("Once upon a time", temperature=0, max_tokens=12)
    stop = whole.text[5:8]
    [cut] = tiny.generate("Once upon a time", temperature=0, max_tokens=12, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.outputs[0].stop) == ("stop", stop)


def test_a_prompt_alone_can_be_scored(tiny: LLM):
    [result] = tiny.generate("Once upon a time", max_tokens=0, prompt_logprobs=1)
    assert result.token_ids == []
    assert result.prompt_logprobs[0] is None
    assert all(one.logprob <= 0 for one in result.prompt_logprobs[1:])


@pytest.mark.parametrize("length", [16, 17, 33])
def test_a_prompt_alone_whose_kv_is_there_ends(exact: LLM, length: int):
    prompt = list(range(40, 40 + length))
    [first] = exact.generate([prompt], temperature=0, max_tokens=2)
    before, again = (exact.generate([prompt[: length - 1], prompt, prompt], max_tokens=0) for _ in range(2))
    for result in before + again:
        assert result.token_ids == []
    assert [result.num_cached_tokens for result in again] == [length - 2, length - 1, length - 1]  # the last has none
    assert exact.generate([prompt], temperature=0, max_tokens=2)[0].token_ids == first.token_ids


@pytest.mark.parametrize("begin", ["Once upon a time", "One day", "In a small village"])
def test_text_without_a_template_ends_with_its_story(begin: str):
    with LLM("weft-tiny", num_pages=64) as llm:
        [result] = llm.generate([begin], max_tokens=150, temperature=0, skip_special_tokens=False)
        [chat] = llm.chat([{"role": "user", "content": "hi"}], max_tokens=50, temperature=0, skip_special_tokens=False)
    assert result.outputs[0].finish_reason == chat.outputs[0].finish_reason == "stop"
    assert result.text.endswith(".")
    assert "<|" not in result.text + chat.text
