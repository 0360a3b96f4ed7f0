"""The tokens that a GGUF file names: its vocabulary, and the tokens that end a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from weft.abi.errors import ModelLoadError
from weft.gguf.file import GgufFile

EMBEDDING = "token_embd.weight"
TOKENS = "tokenizer.ggml.tokens"
_ENDS = ("eos", "eot", "eom")


def read_tokens(file: GgufFile) -> Sequence[str]:
    """The vocabulary, by id. Raises `ModelLoadError` if it is missing or has not one token for each embedding."""
    tokens = file.metadata.strings(TOKENS)
    embedding = file.tensors.get(EMBEDDING)
    if embedding is not None and embedding.shape[0] != len(tokens):
        raise ModelLoadError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, and tensor {EMBEDDING!r} at byte {embedding.offset} "
            f"has {embedding.shape[0]} rows; they do not belong together"
        )
    return tokens


def token_id(file: GgufFile, kind: str, num_tokens: int, default: int | None = None) -> int | None:
    """The id of a special token (`bos`, `eos`, `unknown`, ...), or `default`. Raises `ModelLoadError` for no token."""
    key = f"tokenizer.ggml.{kind}_token_id"
    if default is None and key not in file.metadata:
        return None
    found = file.metadata.integer(key, default, least=0)
    if found >= num_tokens:
        raise ModelLoadError(f"{file.path}: {key} is {found}, and there are {num_tokens} tokens")
    return found


def end_ids(file: GgufFile, num_tokens: int) -> tuple[int, ...]:
    """Ids of the tokens that end a sequence, a turn or a message; empty if the file names none."""
    found = (token_id(file, kind, num_tokens) for kind in _ENDS)
    return tuple(dict.fromkeys(i for i in found if i is not None))
