"""The offline comparison with engines that compute nothing: figures, refusals, files that are continued."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from bench import offline
from bench.peers import CLASSES, INSTALL, PEERS, levels
from bench.peers.openvino_genai import OpenVino
from tests.models.test_gguf import LARGE, logits
from weft.cli.bench.record import surroundings
from weft.gguf.file import read_gguf
from weft.models.random_checkpoints import write_tiny
from weft.tokenizers.load import load_tokenizer


class Engine:
    """It takes `step` seconds longer in every run."""

    def __init__(self, name: str, step: float = 1.0, notes: tuple[str, ...] = (), words: tuple[str, ...] = ()):
        self.name, self.version, self.notes, self.words, self.step = name, "1.2", list(notes), list(words), step
        self.calls = 0
        self.closed = False
        self.seconds_inside: float | None = None

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        self.calls += 1
        self.seconds_inside = self.calls * self.step
        return [[0] * output_tokens for _ in prompts]

    def instructions(self) -> list[str]:
        return self.words

    def close(self) -> None:
        self.closed = True


class Failing(Engine):
    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        if self.calls == 1:
            raise RuntimeError("bf16 KV\nis not supported")
        return super().generate(prompts, output_tokens)


def test_every_peer_can_be_installed_and_started() -> None:
    assert set(PEERS) == set(INSTALL) == {*CLASSES, "vllm"} - {"weft"}


def test_ratios_are_of_neighbouring_runs_and_the_warm_up_is_not_counted() -> None:
    found = offline.compare(Engine("weft"), Engine("a peer", 3.0, ("it uses f16",)), [[1, 2]], 3, runs=3)
    assert found == {
        "median_s": 9.0,
        "all_s": [6.0, 9.0, 12.0],
        "weft_median_s": 3.0,
        "weft_all_s": [2.0, 3.0, 4.0],
        "ratio_to_weft": 3.0,
        "ratio_pairs": [3.0, 3.0],
        "version": "1.2",
        "notes": ["it uses f16"],
        "instructions": {},
    }


def test_a_peer_that_fails_has_no_figure_and_our_own_failure_ends_the_run() -> None:
    with pytest.raises(offline.Unmeasured, match="bf16 KV is not supported"):
        offline.compare(Engine("weft"), Failing("a peer"), [[1]], 3, runs=3)
    with pytest.raises(RuntimeError, match="not supported"):
        offline.compare(Failing("weft"), Engine("a peer"), [[1]], 3, runs=3)


def test_the_wrong_number_of_tokens_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Engine("a peer")
    monkeypatch.setattr(peer, "generate", lambda prompts, output_tokens: [[0]])
    with pytest.raises(offline.Unmeasured, match="a peer did not generate 3 tokens for each prompt"):
        offline.compare(Engine("weft"), peer, [[1, 2]], 3, runs=1)


def test_an_engine_that_does_not_show_its_level_has_no_figure() -> None:
    ours = Engine("weft", words=("kernels: avx2",))
    held = Engine("a peer", words=("CPU : AVX2 = 1 | AVX512 = 0 | FMA = 1",))
    found = offline.compare(ours, held, [[1]], 2, runs=1, level="avx2")
    assert found["instructions"] == {"weft": ours.words, "a peer": held.words}
    for words, why in (((), "nothing that it says shows avx2"), (("AVX2 = 1 | AVX512 = 1",), "it uses more than avx2")):
        with pytest.raises(offline.Unmeasured, match=f"a peer: {why}"):
            offline.compare(ours, Engine("a peer", words=words), [[1]], 2, runs=1, level="avx2")
    with pytest.raises(offline.Unmeasured, match="weft: it uses more"):
        offline.compare(Engine("weft", words=("kernels: avx512",)), held, [[1]], 2, runs=1, level="avx2")


LOG = """a library's greeting
onednn_verbose,v1,info,oneDNN v3.7.1 (commit 8d26)
onednn_verbose,v1,info,cpu,isa:Intel AVX2
onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,brg_matmul:avx2,undef,src:f32::blocked:ab::f0,,,4x8:8x4,0.1
onednn_verbose,v1,primitive,create:cache_miss,cpu,reorder,jit:uni,undef,src:f32::blocked:ab::f0,,,4x8,0.1
"""


def test_what_onednn_writes_of_instructions_is_found() -> None:
    found = levels.in_log(LOG)
    assert found == ["oneDNN brg_matmul:avx2", "oneDNN isa:Intel AVX2", "oneDNN jit:uni"]
    assert levels.refusal("avx2", found) is None
    assert levels.refusal("avx2", levels.in_log(LOG.replace("matmul:avx2", "matmul:avx512_core"))) == (
        "it uses more than avx2: onednn brg_matmul:avx512_core"
    )


def test_every_variable_of_a_level_is_set() -> None:
    assert levels.environment(None) == {}
    for level in levels.LEVELS:
        variables = levels.environment(level)
        assert variables["WEFT_CPU_KERNELS"] == level
        assert {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"} < set(variables)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Every engine that was started, in order. llama.cpp is not installed and transformers fails."""
    made: list[Engine] = []

    def start(name: str, checkpoint: Path, args: Namespace) -> Engine:
        if name == "llama.cpp":
            raise ImportError("No module named 'llama_cpp'")
        loaded = [engine.name for engine in made if not engine.closed]
        assert loaded == ([] if name == "weft" else ["weft"])  # one peer at a time
        made.append((Failing if name == "transformers" else Engine)(name))
        return made[-1]

    monkeypatch.setattr(offline, "start", start)
    return made


def compare_all(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> dict[str, dict[str, dict[str, object]]]:
    arguments = ["--requests", "2", "1", "--runs", "3", "--checkpoint", str(folder), "--json", str(folder / "out.json")]
    monkeypatch.setattr(sys, "argv", ["offline", *arguments, *more])
    offline.main()
    found: dict[str, dict[str, dict[str, object]]] = json.loads((folder / "out.json").read_text())["results"]
    return found


def test_a_peer_without_a_figure_loses_none_of_the_others(
    started: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = compare_all(monkeypatch, tmp_path, "--peers", "transformers,llama.cpp,openvino")
    for count in ("1", "2"):
        assert results[count]["llama.cpp"] == {"error": "No module named 'llama_cpp'"}
        assert results[count]["openvino"]["ratio_to_weft"]
    assert results["2"]["transformers"] == {"error": "bf16 KV is not supported"}
    assert INSTALL["llama.cpp"] in capsys.readouterr().out
    assert all(engine.closed for engine in started)


def test_a_file_that_is_continued_measures_what_it_lacks(
    started: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compare_all(monkeypatch, tmp_path, "--peers", "transformers,openvino")
    started.clear()
    monkeypatch.setattr(Failing, "generate", Engine.generate)  # what failed is tried again
    second = compare_all(monkeypatch, tmp_path, "--peers", "transformers,openvino", "--resume")
    assert Counter(engine.name for engine in started) == {"weft": 1, "transformers": 1}
    assert second["1"]["openvino"] == first["1"]["openvino"]
    assert "error" not in second["2"]["transformers"]
    started.clear()
    assert compare_all(monkeypatch, tmp_path, "--peers", "transformers,openvino", "--resume") == second
    assert not started
    with pytest.raises(SystemExit, match="other settings"):
        compare_all(monkeypatch, tmp_path, "--level", "avx2", "--resume")


def test_a_comparison_that_was_interrupted_gets_the_pairs_that_it_lacks(
    started: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    def interrupted(self: Engine, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        if self.name == "openvino" and self.calls == 3:  # after a warm-up and two runs
            raise KeyboardInterrupt
        return generate(self, prompts, output_tokens)

    monkeypatch.setattr(Engine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare_all(monkeypatch, tmp_path, "--peers", "openvino")
    kept = json.loads((tmp_path / "out.json").read_text())["results"]
    assert kept["2"]["openvino"]["all_s"] == kept["2"]["openvino"]["weft_all_s"] == [2.0, 3.0]
    started.clear()
    monkeypatch.setattr(Engine, "generate", generate)
    results = compare_all(monkeypatch, tmp_path, "--peers", "openvino", "--resume")
    assert results["2"]["openvino"]["all_s"] == [2.0, 3.0, 2.0]  # a warm-up and one run of another process
    assert results["2"]["openvino"]["weft_median_s"] == 2.0
    assert results["1"]["openvino"]["all_s"] == [4.0, 5.0, 6.0]


def test_pairs_of_another_version_do_not_count() -> None:
    before = offline.compare(Engine("weft"), Engine("a peer"), [[1]], 3, runs=1)
    for version, expected in (("1.2", [2.0, 2.0]), ("1.3", [2.0, 3.0])):
        found = offline.compare(
            Engine("weft"), Engine("a peer"), [[1]], 3, runs=2, before={**before, "version": version}
        )
        assert found["all_s"] == found["weft_all_s"] == expected


def test_pairs_measured_before_a_failure_are_kept(
    started: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    def fails(self: Engine, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        if self.name == "openvino" and self.calls == 3:
            raise RuntimeError("out of memory")
        return generate(self, prompts, output_tokens)

    monkeypatch.setattr(Engine, "generate", fails)
    failed = compare_all(monkeypatch, tmp_path, "--peers", "openvino")["2"]["openvino"]
    assert (failed["error"], failed["all_s"]) == ("out of memory", [2.0, 3.0])
    started.clear()
    monkeypatch.setattr(Engine, "generate", generate)
    continued = compare_all(monkeypatch, tmp_path, "--peers", "openvino", "--resume")["2"]["openvino"]
    assert "error" not in continued
    assert continued["all_s"] == [2.0, 3.0, 2.0]


def test_numbers_carry_the_machine_and_the_versions() -> None:
    where = json.loads(json.dumps(surroundings(threads=2, ran={"a peer": "1.2"})))
    assert {"cpu", "cores", "usable_cores", "cpu_features", "threads"} <= set(where["machine"])
    assert where["machine"]["threads"] == 2
    assert {"weft", "python", "torch"} <= set(where["versions"])
    assert where["versions"]["a peer"] == "1.2"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--peers", "transformers,vlm"], "no such peer: vlm"),
        (["--requests", "33"], "room for 32 requests of 512 tokens"),
        (["--input-tokens", "500", "--output-tokens", "13"], "room for 32 requests of 512 tokens"),
        (["--packages", "/nowhere"], "--packages /nowhere is not a directory"),
        (["--resume"], "--resume needs --json"),
        (
            ["--gguf", "q8_0", "--peers", "llama.cpp,vllm"],
            "no such peer with --gguf: vllm; there are llama.cpp, openvino",
        ),
        (["--gguf", "q8_0", "--quantization", "int8"], "--gguf and --quantization exclude each other"),
        (["--gguf", "nowhere.gguf"], "nowhere.gguf is neither a file nor one of q8_0, q4_0, q4_k, q4_k_m"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        offline.parse_arguments(arguments)
    assert why in capsys.readouterr().err


def test_a_file_of_q4_k_m_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_tiny(tmp_path, **LARGE, tie_word_embeddings=True, dtype=torch.bfloat16)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SystemExit, match=r"llama\.cpp, which makes this file, is missing"):
        offline.gguf_of("q4_k_m", checkpoint)
    made: list[Path] = []

    def quantized(source: Path, kind: str, file: Path, packages: Path | None) -> Path:
        assert (source.name, kind) == ("model-bf16.gguf", "MOSTLY_Q4_K_M")
        file.write_bytes(b"half")
        made.append(file)
        if len(made) == 1:
            raise RuntimeError("the disk is full")
        return file

    monkeypatch.setattr(offline, "quantized", quantized)
    with pytest.raises(RuntimeError):
        offline.gguf_of("q4_k_m", checkpoint)
    file = checkpoint / "model-q4_k_m.gguf"
    assert not file.exists()
    assert offline.gguf_of("q4_k_m", checkpoint) == offline.gguf_of("q4_k_m", checkpoint) == file
    assert file.exists()
    assert len(made) == 2


@pytest.mark.parametrize("precision", ["bf16", *offline.GGUF_PRECISIONS])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_gguf_file_is_made_of_the_checkpoint(precision: str, family: str, tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path, family, **LARGE, tie_word_embeddings=True, dtype=torch.bfloat16)
    file = offline.gguf_of(precision, checkpoint)
    file = offline.gguf_file(checkpoint, precision) if precision == "bf16" else file
    assert offline.gguf_of(str(file), checkpoint) == file
    if precision != "bf16":
        assert load_tokenizer(str(file), None, offline=True).vocab_size == 320
    types = {tensor.type.name for tensor in read_gguf(file).tensors.values()}
    assert types == {"F32", precision.upper()}
    expected = logits(checkpoint, dtype="float32")
    error = (logits(file, dtype="float32") - expected).square().mean().sqrt() / expected.std()
    assert error < {"bf16": 1e-4, "q8_0": 0.05}.get(precision, 0.5)


class Pipeline:
    """OpenVINO's, on a processor that takes some precisions of KV only."""

    takes = ("f16", "f32")
    late = False
    tried: ClassVar[list[str]] = []

    def __init__(self, file: str, scheduler: object, device: str, properties: dict[str, object]):
        self.precision = str(properties["KV_CACHE_PRECISION"])
        self.tried.append(self.precision)
        if not self.late:
            self._check()

    def _check(self) -> None:
        if self.precision not in self.takes:
            raise RuntimeError(f"KV cache precision {self.precision} is not supported")

    def generate(self, inputs: list[object], configs: list[object]) -> list[object]:
        self._check()
        return [SimpleNamespace(m_generation_ids=[[0]]) for _ in inputs]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> type[Pipeline]:
    made = {
        "__version__": "1",
        "SchedulerConfig": SimpleNamespace,
        "GenerationConfig": dict,
        "ContinuousBatchingPipeline": Pipeline,
    }
    monkeypatch.setitem(sys.modules, "openvino_genai", SimpleNamespace(**made))
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=list))
    monkeypatch.setattr("bench.peers.openvino_genai.gguf_file", lambda *args, **options: Path("model.gguf"))
    monkeypatch.setattr(Pipeline, "tried", [])
    return Pipeline


@pytest.mark.parametrize("late", [False, True])
def test_openvino_falls_back_to_a_precision_that_it_takes(
    pipeline: type[Pipeline], late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "late", late)
    assert OpenVino(tmp_path, 2).notes == [
        "KV pages are not in bf16, which is refused: KV cache precision bf16 is not supported",
        "KV pages are in f16",
    ]
    monkeypatch.setattr(pipeline, "takes", ("bf16",))
    assert OpenVino(tmp_path, 2).notes == []
    monkeypatch.setattr(pipeline, "takes", ())
    with pytest.raises(RuntimeError, match="KV cache precision f32 is not supported"):
        OpenVino(tmp_path, 2)
    assert pipeline.tried == ["bf16", "f16", "bf16", "bf16", "f16", "f32"]
