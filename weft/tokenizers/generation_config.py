"""Sampling defaults of a checkpoint, from generation_config.json, for parameters that a request omits.

Owns the validation of that file's sampling fields. The server and `weft.LLM` apply them, unless
`engine.generation_config` is `none`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.abi.errors import ModelLoadError
from weft.abi.parameters import SAMPLING

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are sampling defaults; the names are those of `weft.abi.parameters`."""


def sampling_defaults(raw: Mapping[str, Any], source: str) -> dict[str, float]:
    """Defaults by parameter, from the content of generation_config.json; `source` is its path, for errors.

    `do_sample: false` means greedy decoding: temperature is 0, and the fields that only affect sampling are omitted;
    the repetition penalty changes logits and is kept. Raises `ModelLoadError` for a value that is not a number or is
    out of range.
    """
    found: dict[str, float] = {}
    for name in NAMES:
        value = raw.get(name)
        if value is None:
            continue
        parameter = SAMPLING[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not parameter.contains(value) or (name == "top_k" and value != int(value)):
            raise ModelLoadError(
                f"{source}: {name} is {value!r}, not a number in {parameter.range}; correct it, or start with "
                "--generation-config none"
            )
        found[name] = int(value) if name == "top_k" else float(value)
    if raw.get("do_sample") is False:
        kept = {name: value for name, value in found.items() if name == "repetition_penalty"}
        return {"temperature": 0.0, **kept}
    return found
