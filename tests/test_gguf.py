"""A GGUF file from its path to the text of an answer: the same as of the directory it was made from."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.gguf.writing import add_tokenizer, all_of, write_gguf
from tests.tokenizers.conftest import CORPUS
from weft.abi.errors import ConfigError, ModelLoadError
from weft.config import EngineConfig
from weft.kernels import dispatch
from weft.llm import LLM
from weft.models.random_checkpoints import CHAT_TEMPLATE, write_tiny
from weft.worker import build
from weft.worker.sizing import FreeMemory

ENGINE = {"device": "cpu", "threads": 2, "num_pages": 200, "max_context": 256, "dtype": "float32"}
START, END = "<|im_start|>", "<|im_end|>"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
PROMPTS = ["The weft is", "def main():\n", "naïve 1234"]


def add_files(directory: Path) -> tokenizers.Tokenizer:
    """A tokenizer, a template and sampling defaults for the checkpoint; returns the tokenizer."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([START, END])
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    defaults = {"eos_token_id": backend.token_to_id(END), "temperature": 0.7, "top_k": 20}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    return backend


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory, and a GGUF file of the same weights, tokens and defaults."""
    root = tmp_path_factory.mktemp("gguf")
    source = write_tiny(root / "source", "llama", seed=5, **SHAPE)
    backend = add_files(source)

    def more(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, backend, "gpt2", size=320)
        writer.add_tokenizer_pre("gpt-2")
        writer.add_eos_token_id(backend.token_to_id(END))
        writer.add_chat_template(CHAT_TEMPLATE)
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_int32("general.sampling.top_k", 20)

    path = write_gguf(root / "m.gguf", source, all_of("Q8_0"), extra=more, dequantized=root / "twin")
    add_files(root / "twin")
    return root / "twin", path


def test_answers_are_those_of_the_directory(checkpoints: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    answers = []
    for checkpoint in checkpoints:
        options = {**ENGINE, "quantized_blocks": "expand"}
        with caplog.at_level(logging.INFO, "weft.worker"), LLM(str(checkpoint), **options) as llm:
            chats = [[{"role": "user", "content": text}] for text in PROMPTS]
            greedy = llm.generate(PROMPTS, temperature=0, max_tokens=12, progress=False)
            # Temperature and top_k are those of the checkpoint.
            sampled = llm.chat(chats, seed=3, max_tokens=12, progress=False)
            plain = llm.chat(chats, seed=3, max_tokens=12, temperature=1.0, top_k=0, progress=False)
            ends = llm.tokenizer.eos_token_ids
        answers.append(([[r.token_ids for r in results] for results in (greedy, sampled)], ends))
        assert [r.token_ids for r in plain] != [r.token_ids for r in sampled]
    assert answers[0] == answers[1]
    notices = [record.getMessage() for record in caplog.records if "expanded" in record.getMessage()]
    assert len(notices) == 1
    assert notices[0].startswith(f"{checkpoints[1]}: Q8_0 expanded to float32, as ")


@pytest.mark.skipif(not dispatch.block_types("cpu", torch.float32), reason="without the library blocks are expanded")
def test_answers_of_blocks_are_the_same_alone_and_among_others(
    checkpoints: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    options = {**ENGINE, "prefix_cache": False}
    with caplog.at_level(logging.INFO, "weft.worker"), LLM(str(checkpoints[1]), **options) as llm:
        together = llm.generate(PROMPTS, temperature=0, max_tokens=12, progress=False)
        alone = [llm.generate(prompt, temperature=0, max_tokens=12, progress=False) for prompt in PROMPTS]
    assert [r.token_ids for r in together] == [r.token_ids for (r,) in alone]
    assert f"{checkpoints[1]}: Q8_0 stay in blocks, which activations meet in 8 bits" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_answers_of_blocks_on_a_device_are_those_of_the_expanded_weights(
    checkpoints: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """There activations are not rounded."""
    answers = []
    for checkpoint, device in zip(checkpoints, ("cpu", "cuda"), strict=True):
        options = {**ENGINE, "device": device}
        with caplog.at_level(logging.INFO, "weft.worker"), LLM(str(checkpoint), **options) as llm:
            answers.append(llm.generate(PROMPTS, temperature=0, max_tokens=12, progress=False))
    assert [r.token_ids for r in answers[0]] == [r.token_ids for r in answers[1]]
    assert f"{checkpoints[1]}: Q8_0 stay in blocks, read as they are" in caplog.text


def test_sampling_defaults_can_be_left_out(checkpoints: tuple[Path, Path]) -> None:
    with LLM(str(checkpoints[1]), generation_config="none", **ENGINE) as llm:
        assert not llm.tokenizer.sampling_defaults


def test_what_does_not_fit_is_said_before_loading(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "free_memory", lambda device: FreeMemory(400_000, 400_000))
    config = EngineConfig(model=str(checkpoints[1]), device="cpu", dtype="float32", quantized_blocks="expand")
    remedy = "quantized_blocks to auto" if dispatch.block_types("cpu", torch.float32) else "dtype to bfloat16"
    with pytest.raises(ConfigError, match=rf"GiB as float32 .* are free; as .* they take .*: set {remedy}"):
        build.load(config)


def test_an_answer_of_a_damaged_file_is_none(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(checkpoints[1].read_bytes()[:-1])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf is truncated: tensor '.*' of .* at offset"):
        LLM(str(path), **ENGINE)
