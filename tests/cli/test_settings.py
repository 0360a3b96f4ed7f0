"""Precedence, and messages about settings that cannot be used."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest

from weft.abi.errors import ConfigError
from weft.cli.settings import as_toml, keys, load, parse_size, variable, with_setting
from weft.config import Config, EngineConfig


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "weft.toml"
        path.write_text(text)
        return path

    return write


def test_nothing_given_is_the_defaults():
    settings = load()
    assert settings.config == Config()
    assert settings.given == {}


def test_each_source_wins_over_those_before_it(file):
    path = file("[engine]\nmax_running = 1\nmax_waiting = 1\nthreads = 1\n[server]\nport = 1\n")
    environment = {"WEFT_ENGINE_MAX_WAITING": "2", "WEFT_ENGINE_THREADS": "2"}
    flags = {"engine.threads": ("--threads", 3)}
    settings = load(file=path, environment=environment, flags=flags)
    engine = settings.config.engine
    assert (engine.max_running, engine.max_waiting, engine.threads) == (1, 2, 3)
    assert engine.page_size == EngineConfig().page_size
    sources = {key: setting.source for key, setting in settings.given.items()}
    assert sources == {
        "engine.max_running": f"file {path}",
        "engine.max_waiting": "environment WEFT_ENGINE_MAX_WAITING",
        "engine.threads": "flag --threads",
        "server.port": f"file {path}",
    }


def test_the_environment_is_text_of_every_type():
    settings = load(
        environment={
            "WEFT_ENGINE_DTYPE": "float32",
            "WEFT_ENGINE_MEMORY_FRACTION": "0.5",
            "WEFT_ENGINE_KV_CACHE_BYTES": "1.5GiB",
            "WEFT_ENGINE_PREFIX_CACHE": "false",
            "WEFT_ENGINE_NUM_PAGES": "null",
            "WEFT_ENGINE_GRAPH_BATCH_SIZES": "1, 8,16",
            "WEFT_ENGINE_REVISION": "",
            "WEFT_SERVER_API_KEYS": "alice=one, two",
            "HOME": "/home/somebody",
        }
    )
    engine = settings.config.engine
    assert (engine.dtype, engine.memory_fraction, engine.kv_cache_bytes) == ("float32", 0.5, 3 << 29)
    assert (engine.prefix_cache, engine.num_pages, engine.revision) == (False, None, None)
    assert engine.graph_batch_sizes == [1, 8, 16]
    assert settings.config.server.api_keys == ["alice=one", "two"]
    assert "engine.revision" not in settings.given


def test_variables_that_kubernetes_makes_are_not_settings():
    environment = {
        "WEFT_SERVER_PORT": "tcp://10.0.0.1:8000",
        "WEFT_SERVER_SERVICE_HOST": "10.0.0.1",
        "WEFT_SERVER_SERVICE_PORT_HTTP": "8000",
        "WEFT_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WEFT_PORT": "tcp://10.0.0.1:8000",
    }
    assert load(environment=environment).config == Config()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WEFT_SERVER_PRT": "1"}, "WEFT_SERVER_PRT, which is not a setting; did you mean WEFT_SERVER_PORT"),
        ({"WEFT_DTYPE": "x"}, "did you mean WEFT_ENGINE_DTYPE"),
        ({"WEFT_SERVER_PORT": "http"}, "server.port from environment WEFT_SERVER_PORT cannot be used"),
        ({"WEFT_ENGINE_DEVICE": "tpu"}, "there are auto, cpu, cuda"),
        ({"WEFT_ENGINE_KV_CACHE_BYTES": "2 pages"}, "'2 pages' is not a size"),
        ({"WEFT_ENGINE_PAGE_SIZE": "3"}, r"page_size is from environment WEFT_ENGINE_PAGE_SIZE"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(environment, message):
    with pytest.raises(ConfigError, match=message):
        load(environment=environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\ndtyp = 'x'", "did you mean engine.dtype"),
        ("[engine]\nmax-running = 3", "did you mean engine.max_running"),
        ("dtype = 'x'", r"did you mean dtype under \[engine\]"),
        ("[sever]\nport = 1", "did you mean server"),
        ("engine = 3", "must be a section"),
        ("[engine]\nmax_running = '3'", "engine.max_running from file .* Expected `int`, got `str`"),
        ("[engine]\nmax_running = 0", "max_running must be at least 1.*max_running is from file"),
        ("[server]\ncors_origins = ['app.example']", "https://app.example.*cors_origins is from file"),
        ("[server]\nallowed_hosts = ['app.example:80']", "app.example:80.*without a port.*allowed_hosts is from file"),
        ("[server]\nallowed_hosts = ['app.*']", r"'app\.\*'.*\*\.app\.example: all names in it"),
        ("[engine", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(file, text, message):
    with pytest.raises(ConfigError, match=message):
        load(file=file(text))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(file=tmp_path / "none.toml")


def test_keys_are_never_shown(file):
    secret = "kq3-secret-value"
    for text in (f'[server]\napi_keys = ["{secret}"]', f'[server]\napi_keys = "{secret}"'):
        try:
            shown = as_toml(load(file=file(text)))
        except ConfigError as error:
            shown = error.message
        assert "api_keys" in shown
        assert secret not in shown


def test_what_is_printed_can_be_read_again(file):
    flags = {
        "engine.kv_cache_bytes": ("--kv-cache-size", "2GiB"),
        "engine.revision": ("--revision", 'a "quoted" \\ name'),
        "server.served_model_name": ("--served-model-name", ["a", "b"]),
        "server.drain_s": ("--drain", 3),
    }
    printed = load(flags=flags)
    text = as_toml(printed)
    assert load(file=file(text)).config == printed.config
    assert set(tomllib.loads(text)) == {"engine", "server", "programs", "workflows"}
    assert "kv_cache_bytes = 2147483648  # flag --kv-cache-size" in text
    assert "page_size = 16  # default" in text
    assert "# num_pages is not set  # default" in text


def test_every_setting_has_a_variable():
    names = [variable(key) for key in keys()]
    config = Config()
    sections = (config.engine, config.server, config.programs, config.workflows)
    assert len(set(names)) == len(names) == sum(len(section.__struct_fields__) for section in sections)


def test_a_later_setting_is_checked_too():
    settings = with_setting(load(), "engine.threads", 3, "somebody")
    assert settings.config.engine == msgspec.structs.replace(EngineConfig(), threads=3)
    with pytest.raises(ConfigError, match="from somebody"):
        with_setting(settings, "engine.threads", "three", "somebody")


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("2GiB", 2 << 30), ("2 gb", 2 * 10**9), ("1.5k", 1536), ("3TiB", 3 << 40), ("4B", 4)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XB", "1e9", "2GiB more"])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
