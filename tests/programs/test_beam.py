"""Beam search, against transformers' beams on the embedded model in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.programs.help import CALLER, run
from weft import LLM
from weft.abi.errors import ContextTooLong, EngineDead, InvalidRequest
from weft.core.ids import pack_tokens
from weft.programs.builtin import beam
from weft.programs.runtime import Runtime
from weft.programs.sequence import SequenceHandle
from weft.testing.fake_engine import FakeEngine

ASSET = "weft/assets/weft-tiny"
PROMPTS = [
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a story about Ada and a lamp.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a",
]


def unpadded(row: list[int], eos: int = 2) -> list[int]:
    return row[: row.index(eos) + 1] if eos in row else row


@pytest.fixture(scope="module", params=["roomy", "tight"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    tight = {"num_pages": 40, "max_running": 5, "max_step_tokens": 32}
    changes = tight if request.param == "tight" else {"num_pages": 500}
    with LLM("weft-tiny", dtype="float64", device="cpu", threads=2, max_context=256, **changes) as llm:
        yield llm


@pytest.mark.parametrize(
    ("width", "length_penalty", "early"),
    [(1, 1.0, False), (3, 1.0, False), (3, 1.0, "never"), (4, 0.0, False), (4, 0.0, "never"), (3, 1.0, True)],
)
def test_the_beams_are_those_of_transformers(llm: LLM, width: int, length_penalty: float, early: bool | str) -> None:
    model = LlamaForCausalLM.from_pretrained(ASSET, dtype=torch.float64)
    results = llm.beam_search(
        PROMPTS, beam_width=width, max_tokens=14, length_penalty=length_penalty, early_stopping=early
    )
    for text, result in zip(PROMPTS, results, strict=True):
        prompt = torch.tensor([list(memoryview(llm.tokenizer.encode(text)).cast("i"))])
        found = model.generate(
            prompt, num_beams=width, num_return_sequences=width, max_new_tokens=14, do_sample=False, pad_token_id=0,
            length_penalty=length_penalty, early_stopping=early, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        expected = [unpadded(row) for row in found.sequences[:, prompt.shape[1] :].tolist()]
        assert [output.token_ids for output in result.outputs] == expected
        if width > 1:
            scores = [output.score for output in result.outputs]
            assert scores == pytest.approx(found.sequences_scores.tolist(), abs=1e-5)
            assert scores == sorted(scores, reverse=True)


def test_one_beam_is_the_greedy_text(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, temperature=0, max_tokens=10)
    beams = llm.beam_search(PROMPTS, beam_width=1, max_tokens=10)
    assert [result.text for result in beams] == [result.text for result in greedy]


def test_nothing_is_left(llm: LLM) -> None:
    llm.beam_search(PROMPTS * 3, beam_width=5, max_tokens=8)
    stats = llm.stats()
    assert stats.num_sequences == 0
    assert stats.device_pages_free + stats.device_pages_cached == stats.device_pages_total


@pytest.mark.parametrize(
    ("options", "says"),
    [({"beam_width": 0}, "beam_width"), ({"beam_width": 1000}, "beam_width"), ({"max_tokens": 0}, "max_tokens")],
)
def test_what_cannot_be_searched_is_refused(llm: LLM, options: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        llm.beam_search(PROMPTS, **options)


@pytest.mark.parametrize("count", range(7))
def test_an_engine_that_is_lost_between_two_steps_leaves_nothing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Some beams are forked already when the next fork fails."""
    forks, fork = [], SequenceHandle.fork

    def failing(self: SequenceHandle, **fields: str) -> SequenceHandle:
        if len(forks) == count:
            raise EngineDead("gone")
        forks.append(fork(self, **fields))
        return forks[-1]

    monkeypatch.setattr(SequenceHandle, "fork", failing)

    async def test(engine: FakeEngine, rt: Runtime) -> None:
        with pytest.raises(EngineDead):
            await beam.main(beam.BeamArgs(prompt=pack_tokens([97, 98]), width=4), CALLER, rt)
        assert len(forks) == count

    run(test)  # which looks at what is left


def test_a_prompt_that_is_too_long_says_which(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="prompt 1"):
        llm.beam_search(["x", "word " * 300], max_tokens=4)
