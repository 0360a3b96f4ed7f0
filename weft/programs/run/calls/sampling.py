"""How programs write sampling and grammars in JSON. Owns the reading; traits that sample or follow a grammar use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from weft.abi.errors import InvalidRequest
from weft.core.grammar import Grammar
from weft.core.sampling import SamplingParams
from weft.engine.json_schema import refuse_options
from weft.programs.wire_sizes import check_sizes

MAX_SPEC_BYTES = 1 << 20
"""Of JSON that says how to sample, and of a grammar."""
MAX_REMEMBERED_BYTES = 4096
"""Of JSON that is worth remembering: programs ask the same way again and again."""

_NAMES = frozenset(SamplingParams.__struct_fields__)


class GrammarArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grammar as programs send it."""

    kind: str
    text: str

    def grammar(self) -> Grammar:
        """Raises `InvalidRequest` for a kind that there is not, and for options in a JSON schema."""
        try:
            grammar = msgspec.convert([self.kind, self.text], Grammar)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f"there are no grammars of kind {self.kind!r}; write json_schema, regex or lark", "grammar"
            ) from error
        refuse_options(grammar)
        return grammar


def sampling_of(fields: Mapping[str, Any] | None) -> SamplingParams:
    """Fields of `SamplingParams`. Raises `InvalidRequest`, naming the field."""
    fields = fields or {}
    unknown = sorted(fields.keys() - _NAMES)
    if unknown:
        raise InvalidRequest(f"sampling has no {unknown[0]!r}", unknown[0])
    values = dict(fields)
    bias = values.get("logit_bias")
    try:
        if isinstance(bias, dict):
            # Keys of JSON objects are texts; these are token ids.
            values["logit_bias"] = {int(token): value for token, value in bias.items()}
        sampling = msgspec.convert(values, SamplingParams)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"the sampling cannot be used: {error}", "sampling") from error
    check_sizes(sampling)
    return sampling
