"""Uploaded programs: names, versions, quotas, the folder."""

from __future__ import annotations

import ast
import builtins
import errno
from pathlib import Path

import pytest

from weft.abi.errors import InvalidRequest, QuotaExceeded, StorageFailed, UnknownProgram
from weft.programs.registry import WASM_MAGIC, Quota, Registry
from weft.store import blobs
from weft.store.database import Database

ONE = b"async def main(args):\n    return 1\n"
TWO = b"async def main(args):\n    return 2\n"
MODULE = WASM_MAGIC + b"rest"


def test_a_name_means_its_latest_version():
    registry = Registry()
    first = registry.upload("t", "agent", ONE).latest
    second = registry.upload("t", "agent", TWO).latest
    assert first.hash != second.hash
    assert registry.code("t", "agent").content == TWO
    assert registry.code("t", f"agent@{first.hash[:8]}").content == ONE
    assert registry.code("t", first.hash[:10]).content == ONE
    assert registry.upload("t", "agent", ONE).latest == first  # moved back, nothing stored twice
    assert [len(program.versions) for program in registry.programs("t")] == [2]


def test_the_kind_is_seen():
    registry = Registry()
    assert registry.upload("t", "agent", ONE).latest.kind == "python"
    assert registry.upload("t", "module", MODULE).latest.kind == "wasm"
    with pytest.raises(InvalidRequest, match="no core Wasm module"):
        registry.upload("t", "x", ONE, "wasm")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"\0asm\x02\0\0\0", "no core Wasm module"),
        (b"#" * 2_000_000, "limit of python"),
    ],
)
def test_garbage_is_refused_and_nothing_is_kept(content: bytes, message: str):
    registry = Registry()
    with pytest.raises(InvalidRequest, match=message):
        registry.upload("t", "agent", content)
    assert registry.programs("t") == []


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", "x" * 65, "1a", "deadbeef12", "a b", "ä"])
def test_names_that_cannot_be(name: str):
    with pytest.raises(InvalidRequest) as error:
        Registry().upload("t", name, ONE)
    assert error.value.param == "name"


def test_tenants_do_not_see_each_other():
    registry = Registry()
    version = registry.upload("a", "agent", ONE).latest
    assert registry.programs("b") == []
    for reference in ("agent", version.hash):
        with pytest.raises(UnknownProgram):
            registry.code("b", reference)
        with pytest.raises(UnknownProgram):
            registry.delete("b", reference)
    assert registry.code("a", "agent").content == ONE


def test_hashes_that_mean_nothing():
    registry = Registry()
    version = registry.upload("t", "agent", ONE).latest
    for reference in (version.hash[:7], "f" * 64, "agent@", "agent@ffffffff", "nobody@" + version.hash):
        with pytest.raises(UnknownProgram):
            registry.find("t", reference)


def test_deleting():
    registry = Registry()
    one = registry.upload("t", "agent", ONE).latest.hash
    two = registry.upload("t", "agent", TWO).latest.hash
    registry.upload("t", "other", ONE)
    assert registry.delete("t", f"agent@{two[:12]}") == [two]
    assert registry.code("t", "agent").hash == one
    assert registry.delete("t", "agent") == []  # the other name has it too
    assert registry.delete("t", one) == [one]
    assert registry.programs("t") == []
    with pytest.raises(UnknownProgram):
        registry.delete("t", "agent")


def test_quota():
    registry = Registry(quota=Quota(max_programs=2, max_bytes=1000))
    registry.upload("t", "a", ONE)
    registry.upload("t", "b", ONE)  # the same version
    with pytest.raises(QuotaExceeded, match="bytes"):
        registry.upload("t", "c", ONE + b"#" * 1000)
    registry.upload("t", "c", TWO)
    with pytest.raises(QuotaExceeded, match="delete"):
        registry.upload("t", "d", TWO + b"#")
    registry.upload("u", "d", TWO + b"#")
    registry.delete("t", "c")
    registry.upload("t", "d", TWO + b"#")


def test_a_restart_forgets_nothing(tmp_path: Path):
    registry = Registry(Database(tmp_path))
    for tenant in ("", "a", "../b"):
        registry.upload(tenant, "agent", ONE)
        registry.upload(tenant, "agent", TWO)
    registry.delete("a", "agent")
    again = Registry(Database(tmp_path))
    assert again.code("", "agent").content == again.code("../b", "agent").content == TWO
    assert again.programs("a") == []
    assert len(list((tmp_path / "blobs").iterdir())) == 4


def test_what_an_interrupted_write_leaves_is_removed(tmp_path: Path):
    registry = Registry(Database(tmp_path))
    registry.upload("t", "agent", ONE)
    [named] = (tmp_path / "blobs").iterdir()
    (tmp_path / "blobs" / "0123456789abcdef-0").write_bytes(b"of a server that was killed")
    own = named.with_name(named.name + "0")
    own.write_bytes(b"of a server that lives, about to be named")
    assert len(Registry(Database(tmp_path)).programs("t")) == 1
    assert set((tmp_path / "blobs").iterdir()) == {named, own}
    registry.close()
    assert len(Registry(Database(tmp_path)).programs("t")) == 1
    assert set((tmp_path / "blobs").iterdir()) == {named}


def test_damage_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    registry = Registry(Database(tmp_path))
    registry.upload("t", "agent", ONE)
    registry.upload("t", "agent", TWO)
    registry.upload("u", "agent", TWO)
    for path in (tmp_path / "blobs").iterdir():
        if path.read_bytes() == ONE:
            path.unlink()
        else:
            path.write_bytes(b"something else")
    again = Registry(Database(tmp_path))
    assert [len(program.versions) for program in again.programs("t")] == [1]
    assert "lost its content" in caplog.text
    with pytest.raises(StorageFailed, match="damaged"):
        again.code("t", "agent")
    again.upload("t", "agent", TWO)
    assert again.code("t", "agent").content == TWO
    with pytest.raises(StorageFailed, match="damaged"):
        again.code("u", "agent")


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    registry = Registry(Database(tmp_path))
    registry.upload("t", "agent", ONE)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(blobs.os, "fsync", full)
        with pytest.raises(StorageFailed, match=r"disk is full; free space"):
            registry.upload("t", "agent", TWO)
    assert registry.code("t", "agent").content == ONE
    assert len(list((tmp_path / "blobs").iterdir())) == 1
    assert Registry(Database(tmp_path)).code("t", "agent").content == ONE
    assert registry.upload("t", "agent", TWO).latest == registry.find("t", "agent")[1]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    registry = Registry(Database(tmp_path / "none" / "yet"))
    assert not (tmp_path / "none").exists()
    registry.upload("t", "agent", ONE)
    assert Registry(Database(tmp_path / "none" / "yet")).code("t", "agent").content == ONE
    with pytest.raises(StorageFailed, match=r"programs\.data_dir"):
        Registry(Database(tmp_path / "file"))
    with pytest.raises(StorageFailed, match="cannot be written or read"):
        Registry(Database(tmp_path / "file" / "below")).upload("t", "agent", ONE)


def test_nothing_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("parse", "walk"):
        monkeypatch.setattr(ast, name, None)
    monkeypatch.setattr(builtins, "compile", None)
    registry = Registry()
    registry.upload("t", "agent", b"def main(:")
    assert registry.code("t", "agent").content == b"def main(:"
