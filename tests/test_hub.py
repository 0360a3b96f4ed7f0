"""Hub ids, without a network: the hub's answers are played by a function."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest

from weft.abi.errors import ModelLoadError
from weft.hub import find_model
from weft.models.loader import MODEL_FILES, load_model
from weft.models.random_checkpoints import write_tiny
from weft.tokenizers.load import load_tokenizer

hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")


@pytest.fixture
def download(monkeypatch):
    """Replaces the hub's download; returns the calls it got. Set `answer` to a path or an error."""

    class Download:
        def __init__(self):
            self.answer, self.calls = None, []

        def __call__(self, name, **options):
            self.calls.append((name, options))
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    played = Download()
    monkeypatch.setattr(hub, "snapshot_download", played)
    return played


def failing(kind):
    """An error of huggingface_hub, made without the response that its constructor may want."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the hub's own words")
    return error


def test_an_id_is_downloaded_without_pickles_or_code(download, tmp_path):
    download.answer = tmp_path
    assert find_model("org/name", "v1", files=MODEL_FILES, offline=True) == tmp_path
    ((name, options),) = download.calls
    assert name == "org/name"
    assert options["revision"] == "v1"
    assert options["local_files_only"] is True
    assert not any(p.endswith((".bin", ".py", ".pt", "*")) for p in options["allow_patterns"])


def test_a_directory_wins_over_an_id(download, tmp_path, monkeypatch):
    write_tiny(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name", files=MODEL_FILES).joinpath("config.json").is_file()
    assert not download.calls


@pytest.mark.parametrize("name", ["./org/name", "/org/name", "~/name", "a/b/c", "name", "org/../name", ""])
def test_what_can_only_be_a_path_is_not_looked_up(download, name):
    with pytest.raises(ModelLoadError, match="no directory"):
        find_model(name, files=MODEL_FILES)
    assert not download.calls


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "HF_TOKEN"),
        (errors.RepositoryNotFoundError, "neither a directory"),
        (errors.RevisionNotFoundError, "no revision 'v1'"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (errors.HfHubHTTPError, "could not be downloaded"),
        (ConnectionError, "could not be downloaded"),
    ],
)
def test_the_hubs_errors_say_what_to_do(download, kind, words):
    download.answer = failing(kind)
    with pytest.raises(ModelLoadError, match=words):
        find_model("org/name", "v1", files=MODEL_FILES)


def test_offline_is_named(download):
    download.answer = failing(errors.LocalEntryNotFoundError)
    with pytest.raises(ModelLoadError, match="offline is set"):
        find_model("org/name", files=MODEL_FILES, offline=True)


def test_a_file_is_named_as_what_it_is(download, tmp_path):
    (tmp_path / "model.safetensors").touch()
    for load in (load_tokenizer, lambda model: load_model(model, device="cpu")):
        with pytest.raises(ModelLoadError, match="is a file; give a GGUF file"):
            load(str(tmp_path / "model.safetensors"))
    assert not download.calls


def test_a_gguf_file_wins_over_one_of_an_id(download, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org/name/model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name/model.gguf", files=MODEL_FILES) == Path("org/name/model.gguf")
    assert not download.calls


@pytest.mark.parametrize(
    ("name", "pattern", "other"),
    [
        ("model.gguf", "model.gguf", "model2.gguf"),
        ("Q4_K_M/big-00001-of-00003.gguf", "Q4_K_M/big-*-of-00003.gguf", "Q4_K_M/big-00001-of-00004.gguf"),
        ("odd[1].gguf", "odd[[]1].gguf", "odd1.gguf"),
    ],
)
def test_a_gguf_file_of_an_id_is_downloaded_with_its_parts(download, tmp_path, name, pattern, other):
    download.answer = tmp_path
    with pytest.raises(ModelLoadError, match="org/name has no file"):
        find_model(f"org/name/{name}", "v1", files=MODEL_FILES, offline=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert find_model(f"org/name/{name}", "v1", files=MODEL_FILES, offline=True) == tmp_path / name
    (repository, options) = download.calls[-1]
    assert (repository, options["revision"], options["local_files_only"]) == ("org/name", "v1", True)
    assert options["allow_patterns"] == [pattern]
    assert fnmatch.fnmatch(name, pattern)
    assert not fnmatch.fnmatch(other, pattern)


@pytest.mark.parametrize(
    "name", ["./org/name/m.gguf", "/org/name/m.gguf", "org/name/../m.gguf", "org//m.gguf", "m.gguf"]
)
def test_what_can_only_be_a_path_of_a_file_is_not_looked_up(download, name):
    with pytest.raises(ModelLoadError, match="no directory or GGUF file"):
        find_model(name, files=MODEL_FILES)
    assert not download.calls


def test_a_directory_of_gguf_files_names_them(tmp_path):
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    for load in (load_tokenizer, load_model):
        with pytest.raises(ModelLoadError, match=r"give one of them by name: a\.gguf, b\.gguf"):
            load(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert find_model(str(tmp_path), files=MODEL_FILES) == tmp_path
