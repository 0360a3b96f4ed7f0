"""The offline benchmark without its peers: what is missing is said, with what would install it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from bench import offline
from bench.peers import INSTALL, PEERS, PYTHON_VARIABLE
from weft.cli.bench.record import surroundings

MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp", "openvino": "openvino_genai"}


class Peer:
    name, version = "a peer", "1.2"
    seconds_inside = None
    notes = ("it refuses bf16 and uses f16",)

    def __init__(self, checkpoint: Path, threads: int):
        self.threads = threads

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        return [[0] * output_tokens for _ in prompts]

    def close(self) -> None:
        pass


def test_every_peer_can_be_installed() -> None:
    assert set(PEERS) == set(INSTALL) == {*MODULES, "vllm"}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_not_installed_is_named_with_what_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in MODULES:
        monkeypatch.setitem(sys.modules, MODULES[name], None)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    peers, left_out = offline.load_peers(tmp_path, [name], threads=1)
    assert (peers, list(left_out)) == ([], [name])
    said = capsys.readouterr().out
    assert f"{name} is left out: " in said
    assert INSTALL[name] in said


def test_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, MODULES["llama.cpp"], None)
    monkeypatch.setitem(offline.PEERS, "a peer", Peer)
    monkeypatch.setitem(offline.PEERS, "broken", lambda checkpoint, threads: 1 / 0)
    peers, left_out = offline.load_peers(tmp_path, ["llama.cpp", "broken", "a peer"], threads=3)
    assert [peer.name for peer in peers] == ["a peer"]
    assert list(left_out) == ["llama.cpp", "broken"]
    said = capsys.readouterr().out
    assert "llama.cpp is left out" in said
    assert "broken is left out: division by zero" in said
    assert "a peer: it refuses bf16 and uses f16" in said


def test_a_peer_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", "--peers", "transformers,vlm"])
    with pytest.raises(SystemExit):
        offline.main()
    assert "no such peer: vlm" in capsys.readouterr().err


def test_numbers_carry_the_machine_and_the_versions() -> None:
    where = json.loads(json.dumps(surroundings(threads=2, ran={Peer.name: Peer.version})))
    assert {"cpu", "cores", "usable_cores", "cpu_features", "threads"} <= set(where["machine"])
    assert where["machine"]["threads"] == 2
    assert {"weft", "python", "torch"} <= set(where["versions"])
    assert where["versions"]["a peer"] == "1.2"


def test_the_wrong_number_of_tokens_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(tmp_path, 1)
    monkeypatch.setattr(peer, "generate", lambda prompts, output_tokens: [[0]])
    measured = offline.measure([peer], [[1, 2]], 3, runs=1)
    assert measured == ({}, {"a peer": "a peer did not generate 3 tokens for each prompt"})


def test_a_peer_that_fails_loses_no_results_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    class Failing(Peer):
        name, notes = "failing", ()

        def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("bf16 KV\nis not supported")
            return super().generate(prompts, output_tokens)

    class Ours(Peer):
        name, notes = "weft", ()

        def __init__(self, checkpoint: Path, threads: int, quantization: str | None):
            super().__init__(checkpoint, threads)

    monkeypatch.setattr(offline, "Weft", Ours)
    monkeypatch.setattr(offline, "PEERS", {"a peer": Peer, "failing": Failing})
    arguments = ["--peers", "failing,a peer", "--requests", "2", "--runs", "3", "--checkpoint", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["offline", *arguments, "--json", str(tmp_path / "result.json")])
    offline.main()
    found = json.loads((tmp_path / "result.json").read_text())
    assert calls == 2
    assert found["results"]["2"]["failing"] == {"error": "bf16 KV is not supported"}
    assert len(found["results"]["2"]["a peer"]["all_s"]) == len(found["results"]["2"]["weft"]["all_s"]) == 3
    assert found["notes"] == {"a peer": ["it refuses bf16 and uses f16"]}
    assert "failing failed and is left out of these runs: bf16 KV is not supported" in capsys.readouterr().out


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
    assert PEERS["openvino"](tmp_path, 2).notes == [
        "KV pages are not in bf16, which is refused: KV cache precision bf16 is not supported",
        "KV pages are in f16",
    ]
    monkeypatch.setattr(pipeline, "takes", ("bf16",))
    assert PEERS["openvino"](tmp_path, 2).notes == []
    monkeypatch.setattr(pipeline, "takes", ())
    peers, left_out = offline.load_peers(tmp_path, ["openvino"], threads=2)
    assert (peers, left_out) == ([], {"openvino": "KV cache precision f32 is not supported"})
    assert pipeline.tried == ["bf16", "f16", "bf16", "bf16", "f16", "f32"]


def test_more_than_there_is_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--requests", "33"], ["--input-tokens", "500", "--output-tokens", "13"]):
        monkeypatch.setattr(sys, "argv", ["offline", *arguments])
        with pytest.raises(SystemExit):
            offline.parse_arguments()
        assert "room for 32 requests of 512 tokens" in capsys.readouterr().err


def test_ratios_are_of_neighbouring_runs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = offline.report("title", {"weft": [1.0, 2.0, 4.0], "a peer": [2.0, 3.0, 12.0]})
    assert rows["a peer"] == {
        "median_s": 3.0,
        "all_s": [2.0, 3.0, 12.0],
        "ratio_to_weft": 1.5,
        "ratio_pairs": [1.5, 3.0],
    }
    assert "1.50x  (pairs 1.50 to 3.00)" in capsys.readouterr().out
