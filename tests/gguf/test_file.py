"""Headers of GGUF files: those of the `gguf` package are read, and nothing else is believed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.gguf.forging import ARRAY, BOOL, F32, STRING, U8, U64, Forged, entry, forge, string, texts, u32
from weft.abi.errors import ModelLoadError, Unsupported
from weft.gguf.file import MAX_COUNT, read_gguf
from weft.gguf.types import REFUSED, TYPES

FOUR = bytes(range(16))


def fuzz(max_examples: int) -> settings:
    # A directory per example is not needed: each overwrites its file.
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_a_file_of_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.negative", -(2**40))
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.texts", ["", "ä", "b" * 1000])
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("m", matrix)
    writer.add_tensor("q", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(path)
    meta = found.metadata
    assert meta.text("general.architecture") == "llama"
    assert meta.integer("llama.block_count") == 3
    assert meta.number("a.float") == 0.5
    assert meta.flag("a.flag", False) is True
    assert meta["a.negative"] == -(2**40)
    assert meta.numbers("a.numbers", 3).tolist() == [1, 2, 3]
    assert list(meta.strings("a.texts")) == ["", "ä", "b" * 1000]
    assert meta.strings("a.texts")[-2:] == ["ä", "b" * 1000]
    m, q = found.tensors["m"], found.tensors["q"]
    assert (m.type.name, m.shape, m.num_bytes) == ("F32", (3, 4), 48)
    assert path.read_bytes()[m.offset : m.offset + 48] == matrix.tobytes()
    assert (q.type.name, q.shape, q.num_bytes) == ("Q8_0", (2, 32), 68)


def test_types_are_those_of_the_format() -> None:
    for number, kind in TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (known.name, gguf.GGML_QUANT_SIZES[known]) == (kind.name, (kind.numbers, kind.num_bytes))
    others = {kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.value not in TYPES}
    assert others == REFUSED


ONE = [Forged()]
LONG = b"x" * 2000
REFUSALS: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["not a GGUF file"]),
    "another file": (b"PK\3\4" + FOUR, ["begins with b'PK"]),
    "cut in the version": (forge()[:6], ["truncated", "version", "at byte 4"]),
    "version 1": (forge(version=1), ["version 1"]),
    "big-endian": (forge(version=3 << 24), ["big-endian"]),
    "more tensors than bytes": (forge(num_tensors=1000), ["states 1000 tensors"]),
    "too many tensors": (forge(num_tensors=MAX_COUNT + 1), [f"there may be {MAX_COUNT}"]),
    "more entries than bytes": (forge(num_entries=2**16), ["states 65536 entries"]),
    "endless entries": (forge(num_entries=2**63), [f"there may be {MAX_COUNT}"]),
    "key beyond the file": (forge([struct.pack("<Q", 2000) + LONG[:100]]), ["key of the metadata", "2000 bytes"]),
    "key too long": (forge([u32(LONG.decode(), 1)]), ["2000 bytes", "at most 1024"]),
    "key not text": (forge([entry(b"\xff", U8, b"\1")]), ["not UTF-8"]),
    "key twice": (forge([u32("k", 1), u32("k", 2)]), ["'k' twice"]),
    "value of no type": (forge([entry("k", 13, FOUR)]), ["'k'", "type 13"]),
    "boolean of 2": (forge([entry("k", BOOL, b"\2")]), ["'k'", "value 2"]),
    "string beyond the file": (forge([entry("k", STRING, struct.pack("<Q", 2**62))]), ["at most"]),
    "string not text": (forge([entry("k", STRING, string(b"\xff"))]), ["'k'", "not UTF-8"]),
    "array beyond the file": (forge([entry("k", ARRAY, struct.pack("<IQ", F32, 2**61))]), ["'k'", "there may be"]),
    "array a little beyond": (forge([entry("k", ARRAY, struct.pack("<IQ", F32, 99))]), ["states 99 entries"]),
    "array of strings cut": (forge([texts("k", "a", "b")[:-1]], alignment=1), ["'k'", "truncated"]),
    "array in an array": (forge([entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + FOUR)]), ["'k'", "type 9"]),
    "alignment of 0": (forge([u32("general.alignment", 0)]), ["general.alignment"]),
    "alignment of 24": (forge([u32("general.alignment", 24)]), ["power of two", "24"]),
    "alignment of 2**31": (forge([u32("general.alignment", 2**31)]), ["power of two"]),
    "alignment as text": (forge([entry("general.alignment", STRING, string("32"))]), ["must be an integer"]),
    "tensor's name not text": (forge(tensors=[Forged(b"\xff")], data=FOUR), ["name of a tensor", "not UTF-8"]),
    "no dimension": (forge(tensors=[Forged(shape=())], data=FOUR * 4), ["'a'", "0 dimensions"]),
    "five dimensions": (forge(tensors=[Forged(shape=(1,) * 5)], data=FOUR), ["'a'", "5 dimensions"]),
    "empty tensor": (forge(tensors=[Forged(shape=(0, 4))], data=FOUR), ["'a'", "offset 0", "is empty"]),
    "endless tensor": (forge(tensors=[Forged(shape=(2**63, 2**63))], data=FOUR), ["'a'", "truncated"]),
    "refused type": (forge(tensors=[Forged(kind=10)], data=FOUR), ["'a'", "offset 0", "Q2_K (10)"]),
    "removed type": (forge(tensors=[Forged(kind=5)], data=FOUR), ["Q4_3 (5)", "ggml has removed", "of another"]),
    "removed order of Q4_0": (
        forge(tensors=[Forged(kind=33)], data=FOUR),
        ["Q4_0_8_8 (33)", "of the quantization Q4_0"],
    ),
    "unknown type": (forge(tensors=[Forged(kind=99)], data=FOUR), ["'a'", "unknown (99)"]),
    "tensor twice": (forge(tensors=ONE * 2, data=FOUR), ["'a' twice"]),
    "part of a block": (forge(tensors=[Forged(shape=(48,), kind=8)], data=FOUR * 9), ["blocks of 32"]),
    "data cut": (forge(tensors=ONE, data=FOUR[:-1]), ["'a'", "offset 0", "takes 16 bytes", "have 15"]),
    "no data": (forge(tensors=ONE), ["'a'", "have 0"]),
    "offset beyond the file": (forge(tensors=[Forged(offset=2**63)], data=FOUR), ["'a'", "truncated"]),
    "offset not aligned": (forge(tensors=[Forged(offset=8)], data=FOUR * 4), ["'a'", "offset 8", "not aligned"]),
    "overlap": (
        forge(tensors=[Forged("b", (9,)), Forged(offset=32)], data=FOUR * 4),
        ["'b' at byte", "overlaps tensor 'a'"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_forged_files_are_refused_by_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, words = REFUSALS[name]
    with pytest.raises((ModelLoadError, Unsupported)) as caught:
        read_gguf(write(tmp_path / "forged.gguf", content))
    for word in ["forged.gguf", *words]:
        assert word in caught.value.message


def test_what_is_close_to_wrong_is_read(tmp_path: Path) -> None:
    content = forge([u32("general.alignment", 8)], [Forged(), Forged("b", (1, 4), 0, 16)], FOUR * 2, alignment=8)
    found = read_gguf(write(tmp_path / "a.gguf", content)).tensors
    assert [found["b"].shape, found["b"].offset - found["a"].offset] == [(4, 1), 16]
    assert not read_gguf(write(tmp_path / "b.gguf", forge())).tensors


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(tmp_path)


# Values of another type than asked for


def test_values_of_another_type(tmp_path: Path) -> None:
    content = forge([u32("n", 0), texts("t", "a", b"\xff"), entry("f", F32, struct.pack("<f", float("nan")))])
    meta = read_gguf(write(tmp_path / "a.gguf", content)).metadata
    for get, words in [
        (lambda: meta.integer("n"), "n must be at least 1, got 0"),
        (lambda: meta.integer("absent"), "no absent"),
        (lambda: meta.integer("t"), "t must be an integer, it is an array"),
        (lambda: meta.text("n"), "n must be a string, it is 0"),
        (lambda: meta.flag("n", True), "n must be a boolean"),
        (lambda: meta.number("f"), "f is nan"),
        (lambda: meta.strings("n"), "n must be an array of strings"),
        (lambda: meta.numbers("t", 2), "t must be an array of numbers"),
        (lambda: list(meta.strings("t")), "string 1 of t, at byte .* is not UTF-8"),
    ]:
        with pytest.raises(ModelLoadError, match=words):
            get()


def test_one_value_per_layer_counts_if_all_are_equal(tmp_path: Path) -> None:
    values = [entry(key, ARRAY, struct.pack("<IQ2Q", U64, 2, 3, last)) for key, last in (("same", 3), ("other", 4))]
    meta = read_gguf(write(tmp_path / "a.gguf", forge(values))).metadata
    assert meta.integer("same") == 3
    with pytest.raises(Unsupported, match="other differs from layer to layer"):
        meta.integer("other")
    with pytest.raises(ModelLoadError, match="same has 2 entries, there should be 3"):
        meta.numbers("same", 3)


# Split files


@pytest.mark.parametrize("count", [0, 1])
def test_one_file_of_any_name_is_a_whole_model(count: int, tmp_path: Path) -> None:
    assert list(read_gguf(write(tmp_path / "merged.gguf", part(0, count, total=1))).tensors) == ["t0"]


def split(folder: Path, *, count: int = 3, **changes: bytes) -> list[Path]:
    """Three files with a tensor each; `changes`: other contents by number."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_bytes(changes.get(f"part_{i}", part(i, count)))
    return paths


def part(number: int, count: int = 3, name: str | None = None, total: int = 3) -> bytes:
    entries = [u32("split.no", number), u32("split.count", count), u32("split.tensors.count", total)]
    return forge(entries, [Forged(name or f"t{number}")], FOUR)


@pytest.mark.parametrize("given_part", [0, 1, 2])
def test_split_files_are_one_model(given_part: int, tmp_path: Path) -> None:
    paths = split(tmp_path)
    found = read_gguf(paths[given_part])
    assert found.path == paths[0]
    assert {name: tensor.file for name, tensor in found.tensors.items()} == {f"t{i}": paths[i] for i in range(3)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"part_1": part(2)}, "says that it is file 2 of 3, its name says 1 of 3"),
        ({"part_1": part(1, 4)}, "says that it is file 1 of 4"),
        ({"part_2": part(2, name="t1")}, "has tensor t1, which .*m-00002"),
        ({"part_0": part(0, total=4)}, "have 3 tensors, split.tensors.count is 4"),
        ({"part_1": forge()}, "says that it is file -1 of -1"),
        ({"part_2": part(2)[:-1]}, "m-00003-of-00003.gguf is truncated"),
    ],
)
def test_split_files_that_contradict_each_other(changes: dict[str, bytes], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_gguf(split(tmp_path, **changes)[0])


def test_incomplete_and_renamed_split_files(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[2].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00003\.gguf is missing"):
        read_gguf(paths[0])
    with pytest.raises(ModelLoadError, match="names must end in -00001-of-00003"):
        read_gguf(paths[1].rename(tmp_path / "m.gguf"))


# Fuzzing

VALID = forge(
    [u32("general.alignment", 32), texts("k", "a", "bc", "def"), entry("s", STRING, string("text")), u32("n", 7)],
    [Forged("w", (32, 2), 8), Forged("b", (4,), 0, 96)],
    bytes(68 + 28 + 16),
)


def check_bounded(path: Path, content: bytes) -> None:
    """Reading ends, with a file or a named error, and takes little memory whatever the file states."""
    path.write_bytes(content)
    refusal, found = None, None
    tracemalloc.start()
    try:
        found = read_gguf(path)
    except (ModelLoadError, Unsupported) as error:
        refusal = error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 512 * 1024
    if found is None:
        assert path.name in refusal
        assert len(refusal) < 4000
        return
    assert all(len(value) <= len(content) for value in found.metadata.values() if hasattr(value, "__len__"))
    assert all(t.offset + t.num_bytes <= len(content) for t in found.tensors.values())


def check_random(path: Path, content: bytes) -> None:
    for prefix in (b"", b"GGUF\3\0\0\0", VALID[:24], VALID[: len(VALID) // 2]):
        check_bounded(path, prefix + content)


def check_mutated(path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    content = bytearray(VALID)
    for at, byte in edits:
        content[at % len(content)] = byte
    check_bounded(path, bytes(content[: len(content) - cut]))


RANDOM = st.binary(max_size=200)
EDITS = st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4)


@fuzz(40)
@given(RANDOM)
@example(b"")
def test_random_bytes(tmp_path: Path, content: bytes) -> None:
    check_random(tmp_path / "a.gguf", content)


@fuzz(150)
@given(EDITS, st.integers(0, 40))
@example([], 0)
def test_mutated_files(tmp_path: Path, edits: list[tuple[int, int]], cut: int) -> None:
    check_mutated(tmp_path / "a.gguf", edits, cut)


@pytest.mark.soak
@fuzz(2_000)
@given(RANDOM, EDITS, st.integers(0, len(VALID)))
def test_many_bytes_and_mutations(tmp_path: Path, content: bytes, edits: list[tuple[int, int]], cut: int) -> None:
    check_random(tmp_path / "a.gguf", content)
    check_mutated(tmp_path / "a.gguf", edits, cut)


def test_every_other_byte_changed_to_the_largest(tmp_path: Path) -> None:
    for at in range(0, len(VALID), 2):
        check_mutated(tmp_path / "a.gguf", [(at, 255)], 0)
