"""The protocol with a peer in another process, against a script that computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from bench import offline
from bench.peers import levels
from bench.peers.child import ChildError, ChildPeer
from bench.peers.vllm_cpu import PYTHON_VARIABLE, vllm_cpu, vllm_server
from weft.abi.errors import WeftError
from weft.cli import probe
from weft.cli.settings import load
from weft.models.random_checkpoints import write_tiny

SCRIPT = str(Path(__file__).with_name("child_script.py"))


def start(checkpoint: str = "somewhere") -> ChildPeer:
    return ChildPeer(
        "a peer", [sys.executable, SCRIPT], {}, checkpoint=checkpoint, threads=2, max_sequences=4, context=64
    )


@pytest.fixture
def peer() -> Iterator[ChildPeer]:
    peer = start()
    yield peer
    peer.close()


def test_it_loads_and_generates(peer: ChildPeer) -> None:
    assert peer.version == "1.0 with 2 threads"
    assert peer.seconds_inside is None
    assert peer.generate([[5, 6, 7], [8]], 4) == [[3, 4, 5, 6], [1, 2, 3, 4]]
    assert peer.seconds_inside == 0.25


def test_its_own_time_is_what_counts(peer: ChildPeer) -> None:
    assert offline.compare(peer, peer, [[1], [2]], 3, runs=1)["all_s"] == [0.25]


def test_its_log_is_searched_for_instructions(peer: ChildPeer) -> None:
    assert peer.instructions() == ["in its own words", "oneDNN isa:Intel AVX2"]


def test_it_is_stopped_between_calls(peer: ChildPeer) -> None:
    process = psutil.Process(peer._process.pid)
    assert process.status() == psutil.STATUS_STOPPED
    peer.generate([[1]], 2)
    assert process.status() == psutil.STATUS_STOPPED
    peer.close()
    assert not process.is_running()


def test_closing_twice_is_closing_once(peer: ChildPeer) -> None:
    peer.close()
    peer.close()


def test_an_error_is_told(peer: ChildPeer) -> None:
    with pytest.raises(ChildError, match="could not generate: unlucky"):
        peer.generate([[13]], 2)


def test_a_death_shows_what_was_written(peer: ChildPeer) -> None:
    with pytest.raises(ChildError, match=r"did not answer 'generate'(.|\n)*the child died"):
        peer.generate([[14]], 2)


def test_a_checkpoint_that_cannot_be_loaded_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ChildError, match="there is no such checkpoint"):
        start("broken")
    assert not [child for child in psutil.Process().children() if SCRIPT in child.cmdline()]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("stand_in")))


@pytest.mark.usefixtures("stand_in")
def test_the_child_of_vllm(tmp_path: Path) -> None:
    peer = vllm_cpu(tmp_path, 1, {})
    try:
        assert peer.version == "0.0 of a stand-in"
        assert peer.generate([[1, 2], [3]], 2) == [[2, 2], [3, 3]]
        assert peer.seconds_inside is not None
        assert peer.seconds_inside >= 0
    finally:
        peer.close()


@pytest.mark.usefixtures("stand_in")
def test_what_vllm_raises_is_told() -> None:
    with pytest.raises(ChildError, match="vllm could not load: ValueError: no such checkpoint"):
        vllm_cpu(Path("missing"), 1, {})


@pytest.fixture
def stand_in_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("stand_in_server")))


@pytest.mark.usefixtures("stand_in_server")
def test_the_server_of_vllm_has_as_many_tokens_of_kv_and_a_prefix_cache(tmp_path: Path) -> None:
    with vllm_server(tmp_path, 1, 100, 64) as server:
        told = httpx.get(f"{server.url}/").json()
        [process] = [
            one for one in psutil.Process().children() if "vllm.entrypoints.openai.api_server" in one.cmdline()
        ]
        with server.stopped():
            assert process.status() == psutil.STATUS_STOPPED
        assert httpx.get(f"{server.url}/").json() == told
    assert not process.is_running()
    options = dict(pairwise(told["arguments"]))
    assert options["--model"] == str(tmp_path)
    assert int(options["--block-size"]) * int(options["--num-gpu-blocks-override"]) == 128
    assert options["--max-model-len"] == "64"
    assert "--enable-prefix-caching" in told["arguments"]
    assert "," not in told["variables"]["VLLM_CPU_OMP_THREADS_BIND"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in told["variables"]


@pytest.mark.usefixtures("stand_in_server")
def test_what_the_server_of_vllm_wrote_is_told() -> None:
    with (
        pytest.raises(WeftError, match=r"it wrote:\n(.|\n)*no such checkpoint"),
        vllm_server(Path("missing"), 1, 64, 64),
    ):
        pass


@pytest.mark.parametrize(("python", "why"), [("", "does not name"), ("/nowhere/python", "is not a program")])
def test_vllm_without_its_python_is_not_installed(
    python: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, python)
    with pytest.raises(ImportError, match=why):
        vllm_cpu(tmp_path, 1, {})
    with pytest.raises(ImportError, match=why), vllm_server(tmp_path, 1, 64, 64):
        pass


def test_a_server_of_weft_starts_beside_the_python_of_vllm() -> None:
    assert load(environment={PYTHON_VARIABLE: sys.executable}).config.engine.model == "weft-tiny"


def test_an_engine_of_this_environment_in_a_process_of_its_own(tmp_path: Path) -> None:
    if "avx2" not in probe.machine()["cpu_features"]:
        pytest.skip("the processor has no AVX2")
    checkpoint = write_tiny(tmp_path, "qwen3", dtype=torch.bfloat16, tokenizer=True, max_position_embeddings=4096)
    peer = offline.start("weft", checkpoint, offline.parse_arguments(["--threads", "1", "--level", "avx2"]))
    try:
        assert [len(output) for output in peer.generate([[5, 6, 7], [8]], 4)] == [4, 4]
        assert levels.refusal("avx2", peer.instructions()) is None
    finally:
        peer.close()


def test_an_engine_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('it is not here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(offline.__file__).parents[1]}")
    with pytest.raises(ChildError, match="could not load: ImportError: it is not here"):
        offline.start("llama.cpp", tmp_path, offline.parse_arguments([]))
