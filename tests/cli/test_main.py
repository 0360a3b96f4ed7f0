"""Help, versions, exit codes, and what is not imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from tests.models.runner import with_kernels
from weft.abi.errors import ConfigError
from weft.cli.serve import per_model
from weft.cli.settings import load
from weft.version import __version__

COMMANDS = [
    ("serve",),
    ("chat",),
    ("generate",),
    ("bench",),
    ("bench", "throughput"),
    ("bench", "latency"),
    ("bench", "serve"),
    ("models",),
    ("doctor",),
    ("version",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(weft, command):
    result = weft(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: weft " + " ".join(command) in result.output


def test_examples_are_in_the_help(weft):
    for command in ("serve", "chat", "generate", "doctor"):
        assert "Examples:" in weft(command, "--help").output


def test_version(weft):
    assert weft("--version").output == f"weft {__version__}\n"
    assert weft("version").output.startswith(f"weft {__version__}\npython ")
    assert json.loads(weft("version", "--json").output)["weft"] == __version__


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["version"], ["models"], ["serve", "--print-config"]])
def test_light_commands_import_nothing_heavy(arguments):
    program = (
        "import sys\n"
        "from weft.cli.main import app\n"
        f"try:\n    app({arguments!r})\nexcept SystemExit as exit:\n    assert not exit.code, exit.code\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_a_users_mistake_is_one_line(weft):
    result = weft("generate", "--model", "./nowhere", "hi")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("weft: ")
    assert "./nowhere" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_output_may_be_closed():
    command = [sys.executable, "-m", "weft.cli.main", "version"]
    ended = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_debug_shows_the_traceback(weft, monkeypatch):
    monkeypatch.setenv("WEFT_DEBUG", "1")
    result = weft("serve", "--print-config", "--memory-fraction", "7")
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--no-such-flag"],
        ["nosuchcommand"],
        ["serve", "--port", "http"],
        ["generate", "a", "b", "c"],
        ["generate", "hi", "--system", "x"],
        ["generate", "hi", "--logprobs", "2"],
        ["generate", "hi", "--jsonl"],
        ["bench", "throughput", "weft-tiny", "--random-weights", "tiny"],
        ["bench", "throughput", "--runs", "0"],
    ],
)
def test_a_wrong_usage_is_status_2(weft, arguments):
    assert weft(*arguments).exit_code == 2


def test_print_config_is_toml_with_sources(weft, monkeypatch, tmp_path):
    file = tmp_path / "weft.toml"
    file.write_text("[engine]\ndtype = 'float32'\n")
    monkeypatch.setenv("WEFT_SERVER_PORT", "9000")
    monkeypatch.setenv("WEFT_CONFIG", str(file))
    result = weft(
        *["serve", "some/model", "--max-model-len", "64", "--kv-cache-size", "1MiB", "--no-trace", "--print-config"],
        *["--api-key", "hidden", "--cors-origin", "http://a", "--cors-origin", "*", "--cors-origin", "null"],
    )
    assert result.exit_code == 0, result.stderr
    values = tomllib.loads(result.output)
    assert values["engine"]["model"] == "some/model"
    assert (values["engine"]["dtype"], values["engine"]["max_context"]) == ("float32", 64)
    assert (values["server"]["port"], values["server"]["cors_origins"]) == (9000, ["http://a", "*", "null"])
    assert 'model = "some/model"  # argument MODEL' in result.output
    assert "max_context = 64  # flag --max-context" in result.output
    assert "trace = false  # flag --no-trace" in result.output
    assert "hidden" not in result.output


def test_several_models_share_the_machine():
    settings = load(flags={"engine.device": ("--device", "cpu"), "server.served_model_name": ("--n", ["one", "two"])})
    first, second = per_model(settings, ["weft-tiny", "./other"])
    assert (first.config.engine.model, second.config.engine.model) == ("weft-tiny", "./other")
    assert first.config.engine.memory_fraction == second.config.engine.memory_fraction == 0.15
    assert first.config.server.served_model_name == ["one"]
    assert first.given["engine.memory_fraction"].source == "divided among 2 engines"
    with pytest.raises(ConfigError, match="3 models and 2 served model names"):
        per_model(settings, ["a", "b", "c"])
    with pytest.raises(ConfigError, match="given twice"):
        per_model(settings, ["a", "a"])


def test_replicas_share_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.worker.memory.usable_cores", lambda: 8)
    flags = {"engine.device": ("--device", "cpu"), "server.replicas": ("--replicas", 2)}
    [one] = per_model(load(flags=flags), [])
    assert (one.config.engine.memory_fraction, one.config.engine.threads) == (0.15, 3)
    [named] = per_model(load(flags=flags), ["./other"])
    assert (named.config.engine.model, named.config.engine.memory_fraction) == ("./other", 0.15)
    assert named.config.server.served_model_name == []
    several = per_model(load(flags=flags), ["weft-tiny", "./other"])
    assert [each.config.engine.memory_fraction for each in several] == [0.075, 0.075]
    [own] = per_model(load(flags=flags | {"engine.num_pages": ("--num-pages", 64)}), [])
    assert own.config.engine.memory_fraction is None
    monkeypatch.setattr("weft.worker.build.choose_device", lambda engine: SimpleNamespace(type="cuda"))
    with pytest.raises(ConfigError, match="replicas share no CUDA device"):
        per_model(load(flags=flags), [])
    with pytest.raises(ConfigError, match="replicas must be at least 1"):
        load(flags={"server.replicas": ("--replicas", 0)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "99999"), "port must be between 0 and 65535, got 99999"),
        (("--host", "nowhere.invalid"), "cannot listen on nowhere.invalid port 8000"),
    ],
)
def test_an_address_that_cannot_be_is_refused(weft, arguments, message):
    result = weft("serve", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_models_and_architectures(weft, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert "weft-tiny" in weft("models").output
    found = json.loads(weft("models", "--json", "--architectures").output)
    assert "LlamaForCausalLM" in found["architectures"]
    embedded = found["models"][0]
    assert (embedded["name"], embedded["supported"], embedded["max_context"]) == ("weft-tiny", True, 2048)


def test_models_lists_the_hub_cache(weft, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    for repo, config in {
        "models--org--good": '{"architectures": ["Qwen3ForCausalLM"]}',
        "models--org--odd": "[1",
    }.items():
        snapshot = tmp_path / repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(config)
        (tmp_path / repo / "refs").mkdir()
        (tmp_path / repo / "refs" / "main").write_text(commit)
    program = "from weft.cli.main import app\napp(['models', '--json'])\n"
    # The hub's client reads where its cache is when it is imported.
    listed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    found = {one["name"]: one for one in json.loads(listed.stdout)["models"]}
    assert found["org/good"]["architecture"] == "Qwen3ForCausalLM"
    assert found["org/good"]["where"] == "hub cache, main"
    assert found["org/odd"]["architecture"] is None


def test_doctor_says_what_will_be_used(weft):
    result = weft("doctor", "--json", "--num-pages", "128", "--device", "cpu", "--dtype", "float32", "--threads", "1")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["ok"]
    assert found["problems"] == []
    used = found["will_use"]
    assert used["cuda_graphs"] == "only CUDA devices have them"
    assert (used["device"], used["dtype"], used["threads"]) == ("cpu", "float32", 1)
    assert (used["kv_pages"], used["kv_tokens"]) == (128, 2048)
    assert found["machine"]["usable_cores"] >= 1


def test_doctor_fails_where_something_is_broken(weft, monkeypatch):
    result = weft("doctor", "./nowhere")
    assert result.exit_code == 1
    assert "PROBLEM: ./nowhere" in result.output
    monkeypatch.setitem(sys.modules, "httptools", None)
    result = weft("doctor")
    assert result.exit_code == 1
    assert "PROBLEM: httptools cannot be imported" in result.output


def test_doctor_does_not_claim_a_setting_that_was_not_given(weft, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    plain = weft("doctor", "nowhere-org/nothing").output
    assert "is not in the hub cache and this command downloads nothing" in plain
    assert "offline is set" in weft("doctor", "nowhere-org/nothing", "--offline").output


def test_doctor_plans_the_pages_that_an_engine_gets(weft):
    from weft.llm import LLM

    options = ["--kv-cache-size", "16MiB", "--dtype", "float32", "--device", "cpu"]
    planned = json.loads(weft("doctor", "--json", *options).output)["will_use"]
    with LLM(kv_cache_bytes=16 << 20, dtype="float32", device="cpu") as llm:
        assert planned["kv_pages"] == llm.info.num_device_pages
        assert planned["max_context"] == llm.info.max_context
        assert (
            planned["max_step_tokens"] == 512 < llm.info.max_step_tokens == 2048
        )  # the server's, and the offline API's


@with_kernels
def test_doctor_says_what_computes_with_quantized_weights(weft):
    plain, *quantized = (
        json.loads(weft("doctor", "--json", "--num-pages", "128", "--device", "cpu", *more).output)
        for more in ((), ("--quantization", "int8"), ("--quantization", "int4"))
    )
    assert plain["will_use"]["quantization"] == "none"
    for name, report in zip(("int8", "int4"), quantized, strict=True):
        assert report["will_use"]["quantization"] == f"{name}: C++, activations in 8 bits"
    assert "int8 needs the kernels" in str(weft("doctor", "--quantization", "int8", "--dtype", "float64").output)
    refused = weft("doctor", "--quantization", "int3")
    assert refused.exit_code != 0
    assert "there are int8, int4" in refused.output
