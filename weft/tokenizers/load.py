"""From a model's name to its `Tokenizer`: the embedded model, a directory, a GGUF file, or a hub id.

Owns the file formats (tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json,
chat_template.jinja), interpreted as in transformers. GGUF files are the matter of `gguf.py`. Never runs code that comes
with a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from weft.abi.errors import ModelLoadError
from weft.hub import find_model
from weft.tokenizers.generation_config import sampling_defaults
from weft.tokenizers.gguf import load_gguf
from weft.tokenizers.tokenizer import Tokenizer

_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]

MAX_TOKENIZER_BYTES = 256 << 20
"""Of tokenizer.json; those of the largest vocabularies have some ten million."""
MAX_CONFIG_BYTES = 32 << 20
"""Of tokenizer_config.json and its like: those that list all tokens of a codec for speech have some ten million."""
MAX_TEMPLATE_BYTES = 4 << 20


def load_tokenizer(
    model: str, revision: str | None = None, offline: bool = False, *, generation_config: bool = False
) -> Tokenizer:
    """The tokenizer of `weft-tiny`, of a local directory or GGUF file, or of a hub id (at `revision`).

    `generation_config`: with the sampling defaults of the checkpoint (`sampling_defaults`). `offline` uses only what
    the hub's cache already has. Raises `ModelLoadError`, saying which file and why. May download; call it before
    serving, not on an event loop.
    """
    path = find_model(model, revision, files=_FILES, offline=offline)
    load = load_gguf if path.is_file() else load_directory
    return load(path, name=model, generation_config=generation_config)


def load_directory(path: Path, name: str = "", *, generation_config: bool = False) -> Tokenizer:
    """The tokenizer of a model directory. Raises `ModelLoadError`."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{path} has no tokenizer.json; save the model's tokenizer there with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...). A model of GGUF files is given by "
            "one of them: org/name/file.gguf"
        )
    _check_size(file, MAX_TOKENIZER_BYTES)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    config_file = path / "tokenizer_config.json"
    config = _read_json(config_file)
    if "added_tokens_decoder" not in config:
        # The older layout, in which this file lists the special tokens.
        config = config | _read_json(path / "special_tokens_map.json")
    special = _special_tokens(config)
    try:
        _add_tokens(backend, config, special)
    except ValueError as error:
        raise ModelLoadError(
            f"{config_file} has an entry of added_tokens_decoder that is not under a token id: {error}; correct it"
        ) from error
    return Tokenizer(
        backend,
        special_tokens={key: token.content for key, token in special.items()},
        eos_token_ids=_eos_token_ids(path),
        chat_templates=_chat_templates(path, config),
        sampling_defaults=_sampling_defaults(path) if generation_config else None,
        name=name,
    )


def _check_size(file: Path, most: int) -> None:
    """Raise `ModelLoadError` for a file of too many bytes."""
    try:
        size = file.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if size > most:
        raise ModelLoadError(f"{file} has {size} bytes; there may be {most}")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    _check_size(file, MAX_CONFIG_BYTES)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


def _token(value: object) -> tokenizers.AddedToken | None:
    """A token as these files write it: a string, or its text with flags."""
    match value:
        case str():
            return tokenizers.AddedToken(value, special=True)
        case {"content": str(content), **rest}:
            flags = {key: bool(rest[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in rest}
            return tokenizers.AddedToken(content, special=bool(rest.get("special", True)), **flags)
        case _:
            return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """Special tokens by the name that templates use: all fields named `…_token`, and named extra tokens."""
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        values |= extra
    tokens = {name: _token(value) for name, value in values.items()}
    return {name: token for name, token in tokens.items() if token is not None}


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, tokenizers.AddedToken]
) -> None:
    """Tokens that the config adds or redefines: listed ones in the order of their ids, then special ones.

    Only tokenizer.json determines the tokens around a text (such as a beginning of sequence); `add_bos_token` is
    ignored, as in transformers.
    """
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        for _, value in sorted(listed.items(), key=lambda item: int(item[0])):
            token = _token(value)
            if token is not None and repr(token) not in known:
                backend.add_tokens([token])
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    more = [_token(value) for value in extra] if isinstance(extra, list) else []
    for token in (*special.values(), *more):
        if token is not None and token.content not in contents:
            backend.add_special_tokens([token])


def _eos_token_ids(path: Path) -> list[int] | None:
    """End-of-sequence tokens of generation_config.json; None if it has none."""
    value = _read_json(path / "generation_config.json").get("eos_token_id")
    if isinstance(value, int):
        return [value]
    if isinstance(value, list) and value and all(isinstance(token, int) for token in value):
        return value
    return None


def _sampling_defaults(path: Path) -> dict[str, float]:
    file = path / "generation_config.json"
    return sampling_defaults(_read_json(file), str(file))


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Separate files take precedence over the config."""
    templates: dict[str, str] = {}
    match config.get("chat_template"):
        case str(text):
            templates["default"] = text
        case list(entries):
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(text)}:
                        templates[name] = text
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            _check_size(file, MAX_TEMPLATE_BYTES)
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"{file} cannot be read: {error}") from error
    return templates
