"""The offline benchmark without its peers: what is missing is said, with what would install it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import offline
from bench.peers import INSTALL, PEERS, PYTHON_VARIABLE

MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp", "openvino": "openvino_genai"}


class Peer:
    name, version = "a peer", "1.2"
    seconds_inside = None

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
    assert offline.load_peers(tmp_path, [name], threads=1) == []
    said = capsys.readouterr().out
    assert f"{name} is left out: " in said
    assert INSTALL[name] in said


def test_others_still_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, MODULES["llama.cpp"], None)
    monkeypatch.setitem(offline.PEERS, "a peer", Peer)
    peers = offline.load_peers(tmp_path, ["llama.cpp", "a peer"], threads=3)
    assert [peer.name for peer in peers] == ["a peer"]
    assert "llama.cpp is left out" in capsys.readouterr().out


def test_a_peer_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline", "--peers", "transformers,vlm"])
    with pytest.raises(SystemExit):
        offline.main()
    assert "no such peer: vlm" in capsys.readouterr().err


def test_numbers_carry_the_machine_and_the_versions(tmp_path: Path) -> None:
    where = json.loads(json.dumps(offline.environment([Peer(tmp_path, 1)], threads=2)))
    assert {"cpu", "cores", "usable_cores", "cpu_features", "threads"} <= set(where["machine"])
    assert where["machine"]["threads"] == 2
    assert {"weft", "python", "torch"} <= set(where["versions"])
    assert where["versions"]["a peer"] == "1.2"


def test_the_wrong_number_of_tokens_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(tmp_path, 1)
    monkeypatch.setattr(peer, "generate", lambda prompts, output_tokens: [[0]])
    with pytest.raises(RuntimeError, match="a peer did not generate"):
        offline.measure([peer], [[1, 2]], 3, runs=1)


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
