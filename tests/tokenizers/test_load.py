"""Files that are missing, broken or unknown end in errors that say what to do."""

import json
import re
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub import errors
from tokenizers import decoders, models

from tests.tokenizers.conftest import byte_level_backend, save
from weft.abi.errors import ModelLoadError, Unsupported
from weft.tokenizers import load
from weft.tokenizers.load import load_directory, load_tokenizer
from weft.tokenizers.token_bytes import MAX_TOKENS


def test_no_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json.*save_pretrained"):
        load_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": 1}', "[]"])
def test_broken_tokenizer_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        load_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
def test_broken_config(name: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    (tmp_path / name).write_text("{not json")
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        load_directory(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": "\xff"}',
        b'{"added_tokens_decoder": {"one": "a"}}',
        b'{"added_tokens_decoder": {"' + b"1" * 5000 + b'": "a"}}',
    ],
)
def test_errors_of_a_config_name_the_file(content: bytes, tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("tokenizer.json", load.MAX_TOKENIZER_BYTES),
        ("tokenizer_config.json", load.MAX_CONFIG_BYTES),
        ("generation_config.json", load.MAX_CONFIG_BYTES),
        ("chat_template.jinja", load.MAX_TEMPLATE_BYTES),
    ],
)
def test_files_that_are_too_large_are_not_read(name: str, most: int, tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    with (tmp_path / name).open("wb") as file:
        file.truncate(most + 1)  # takes no room on the disk
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)} has {most + 1} bytes"):
        load_directory(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Fuse()])
def test_token_ids_that_are_too_large_are_refused(decoder: object, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": MAX_TOKENS}, unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(ModelLoadError, match=f"token id {MAX_TOKENS}, at most"):
        load_directory(save(tmp_path, backend))


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_other_families_are_refused_by_name(decoder: object, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="decoder"):
        load_directory(save(tmp_path, backend))


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/model", "a/b/c", "nowhere"])
def test_no_such_directory(model: str) -> None:
    with pytest.raises(ModelLoadError, match="no directory"):
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.LocalEntryNotFoundError("not cached"), "not in the hub cache and offline is set"),
        (errors.HFValidationError("bad name"), "valid hub id"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_hub_errors(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=says):
        load_tokenizer("some/model", "main", True)


def test_hub_snapshot_is_loaded(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(model: str, **options: object) -> str:
        asked.update(options, model=model)
        return str(folders["plain"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_tokenizer("some/model", "v1", True).name == "some/model"
    assert asked["model"] == "some/model"
    assert asked["revision"] == "v1"
    assert asked["local_files_only"] is True
    assert not any(".py" in pattern or "safetensors" in pattern for pattern in asked["allow_patterns"])


def test_end_of_sequence_from_generation_config(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), eos_token="<|eot|>")
    assert load_directory(tmp_path).eos_token_ids == [1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    assert load_directory(tmp_path).eos_token_ids == [3, 1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert load_directory(tmp_path).eos_token_ids == [3]


def test_chat_templates_by_name(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = load_directory(save(tmp_path, byte_level_backend(), chat_template=listed))
    assert tokenizer.chat_template().source == "plain"
    assert tokenizer.chat_template(with_tools=True).source == "with tools"
    (tmp_path / "chat_template.jinja").write_text("file wins")
    assert load_directory(tmp_path).chat_template().source == "file wins"


def test_no_chat_template_points_elsewhere(folders: dict[str, Path]) -> None:
    tokenizer = load_directory(folders["plain"])
    assert not tokenizer.has_chat_template
    with pytest.raises(Unsupported, match=r"no chat template.*/v1/completions.*chat_template\.jinja"):
        tokenizer.chat_template()
