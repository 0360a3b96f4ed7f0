"""Merges defaults, a TOML file, the environment and flags into one `Config`; writes it with the source of each value.

Owns the precedence (ascending: defaults, file, `WEFT_…` variables, flags) and the errors about settings, which name the
key, its source and similar names. The only reader of `WEFT_…` settings.

A setting is `section.name`, as in `weft.config`: `engine.dtype` is `dtype` under `[engine]` in the file, and
`WEFT_ENGINE_DTYPE` in the environment, where lists are separated by commas and an empty value counts as not set.
Names that end in `_bytes` take sizes such as `2GiB` too.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weft.abi.errors import ConfigError
from weft.config import Config, EngineConfig, ProgramsConfig, ServerConfig, WorkflowsConfig

SECTIONS: Mapping[str, type[EngineConfig] | type[ServerConfig] | type[ProgramsConfig] | type[WorkflowsConfig]] = {
    "engine": EngineConfig,
    "server": ServerConfig,
    "programs": ProgramsConfig,
    "workflows": WorkflowsConfig,
}
SECRET = frozenset({"server.api_keys"})
"""Never printed, not even in errors."""
PREFIX = "WEFT_"
OTHER_VARIABLES = frozenset(
    {"WEFT_CONFIG", "WEFT_DEBUG", "WEFT_URL", "WEFT_API_KEY", "WEFT_CACHE", "WEFT_DATA", "WEFT_CPU_KERNELS"}
)
"""Variables that are not settings: they stand for `--config`, `--debug`, `--url`, `--api-key`, directories, and the
level of the CPU kernels."""

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")
# For a Service named "weft" or "weft-server", Kubernetes sets such variables in every pod.
_KUBERNETES_NAME = re.compile(r".*_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)\Z")
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://")


class Setting(NamedTuple):
    """A value and the source that gave it."""

    value: Any
    source: str


class Settings(NamedTuple):
    """The merged configuration, and the settings that are not defaults."""

    config: Config
    given: dict[str, Setting]
    """By `section.name`."""


def load(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Settings:
    """Merge everything. `flags` maps `section.name` to (the flag as typed, its value).

    Raises `ConfigError` with the key and its source.
    """
    given: dict[str, Setting] = {}
    for key, setting in (*_from_file(file), *_from_environment(environment or {}), *_from_flags(flags or {})):
        given[key] = Setting(_convert(key, setting), setting.source)
    return _settings(given)


def with_setting(settings: Settings, key: str, value: Any, source: str) -> Settings:
    """Return the settings with one more value, set by a command. Raises `ConfigError`."""
    return _settings({**settings.given, key: Setting(_convert(key, Setting(value, source)), source)})


def keys() -> list[str]:
    """Return the names of all settings, as `section.name`."""
    return [f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.__struct_fields__]


def variable(key: str) -> str:
    """Return the name of the environment variable of a setting."""
    return PREFIX + key.replace(".", "_").upper()


def parse_size(text: str) -> int:
    """Return the bytes of `2GiB`, `500 MB`, `1.5g` or a plain number. Raises `ValueError`."""
    match = _SIZE.match(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, TiB (or KB, MB, GB, TB)"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def as_toml(settings: Settings) -> str:
    """Return the effective configuration as TOML, each line with the source of its value. API keys are left out."""
    lines: list[str] = []
    for section in SECTIONS:
        values = getattr(settings.config, section)
        lines += [*([""] if lines else []), f"[{section}]"]
        for name in values.__struct_fields__:
            key = f"{section}.{name}"
            given = settings.given.get(key)
            value = getattr(values, name)
            source = "default" if given is None else given.source
            if key in SECRET and value:
                lines.append(f"# {name}: {len(value)} given, not shown  # {source}")
            elif value is None:
                lines.append(f"# {name} is not set  # {source}")
            else:
                lines.append(f"{name} = {_toml(value)}  # {source}")
    return "\n".join(lines) + "\n"


def _from_file(path: Path | None) -> Iterator[tuple[str, Setting]]:
    if path is None:
        return
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from error
    source = f"file {path}"
    for section, table in tables.items():
        if section not in SECTIONS:
            owners = [key for key in keys() if key.endswith(f".{section}")]
            near = f"did you mean {section} under [{owners[0].partition('.')[0]}]?" if owners else ""
            hint = near or _near_section(section)
            raise ConfigError(f"{source} has {section!r}, which is not a section; {hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {section!r} must be a section, [{section}], with settings below it")
        for name, value in table.items():
            key = f"{section}.{name}"
            _check_known(key, f"{source} sets {name!r} in [{section}]")
            yield key, Setting(value, source)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    by_variable = {variable(key): key for key in keys()}
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES or not value:
            continue
        if _KUBERNETES_NAME.match(name) or _KUBERNETES_VALUE.match(value):
            continue
        if name not in by_variable:
            near = difflib.get_close_matches(name, [*by_variable, *sorted(OTHER_VARIABLES)], 1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else "variables are named WEFT_SECTION_NAME, such as WEFT_SERVER_PORT"
            )
            raise ConfigError(f"the environment sets {name}, which is not a setting; {hint}")
        key = by_variable[name]
        yield key, Setting(_from_text(key, value, f"environment {name}"), f"environment {name}")


def _from_flags(flags: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, Setting]]:
    for key, (flag, value) in flags.items():
        yield key, Setting(value, f"flag {flag}")


def _from_text(key: str, text: str, source: str) -> Any:
    """A variable's text as the setting's type."""
    kind = _types(key)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind == list[str]:
        return parts
    if key.endswith("_bytes"):
        return text
    value = parts if kind == list[int] | None and text != "null" else text
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_unusable(key, source, error)) from error


def _convert(key: str, setting: Setting) -> Any:
    value = setting.value
    if key.endswith("_bytes") and isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise ConfigError(f"{key} from {setting.source}: {error}") from error
    try:
        return msgspec.convert(value, _types(key))
    except msgspec.ValidationError as error:
        raise ConfigError(_unusable(key, setting.source, error)) from error


def _settings(given: dict[str, Setting]) -> Settings:
    return Settings(Config(**{section: _section(section, given) for section in SECTIONS}), given)


def _section(section: str, given: Mapping[str, Setting]) -> Any:
    values = {key.partition(".")[2]: setting.value for key, setting in given.items() if key.startswith(section + ".")}
    try:
        return SECTIONS[section](**values)
    except ConfigError as error:
        # The config checks combinations; only this module knows the source of each value.
        blame = [f"{name} is from {given[f'{section}.{name}'].source}" for name in values if name in error.message]
        raise ConfigError(f"{error.message} ({'; '.join(blame)})" if blame else error.message) from error


def _check_known(key: str, what: str) -> None:
    if key in keys():
        return
    near = difflib.get_close_matches(key.replace("-", "_"), keys(), 1)
    hint = f"did you mean {near[0]}?" if near else "`weft serve --print-config` lists all settings"
    raise ConfigError(f"{what}, which is not a setting; {hint}")


def _near_section(name: str) -> str:
    near = difflib.get_close_matches(name, [*SECTIONS, *(key.partition(".")[2] for key in keys())], 1)
    known = " and ".join(f"[{section}]" for section in SECTIONS)
    return f"did you mean {near[0]}? sections are {known}" if near else f"sections are {known}"


def _unusable(key: str, source: str, error: Exception) -> str:
    reason = str(error).partition(" - at ")[0]
    parts = typing.get_args(_types(key))  # of a Literal, or of a union that has one
    choices = [choice for part in parts for choice in (part, *typing.get_args(part)) if isinstance(choice, str)]
    if "enum value" in reason and choices:
        reason = ("there is " if len(choices) == 1 else "there are ") + ", ".join(choices)
    return f"{key} from {source} cannot be used: {reason}"


@cache
def _types(key: str) -> Any:
    section, _, name = key.partition(".")
    return typing.get_type_hints(SECTIONS[section])[name]


def _toml(value: Any) -> str:
    """Values of settings are strings, numbers, booleans and lists of strings; JSON writes all as TOML does."""
    return msgspec.json.encode(value).decode()
