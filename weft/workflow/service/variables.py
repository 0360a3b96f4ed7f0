"""The variables of a server: values to come, by tenant and id.

An id is `var-TOKEN.NODE`, where the token is that of the session the node belongs to; `.FIELD` may follow. It cannot be
guessed.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

from weft.abi.errors import NoValue, UnknownVariable
from weft.workflow.criteria import Criterion
from weft.workflow.graph.templates import Reference, parse_reference

_PREFIX = "var-"
MAX_REMEMBERED = 1000
"""Ended owners of a tenant whose variables are still known to have been."""


class VariableOwner(Protocol):
    """What has variables, such as a session."""

    def __contains__(self, node: str) -> bool: ...

    async def get(self, reference: Reference, criterion: Criterion | None, timeout_s: float | None) -> Any:
        """Wait for a value. Raises `NodeFailed`, `NoValue`, `TimeoutError`, and `Overloaded` if too many wait."""
        ...

    async def put(self, reference: Reference, value: Any) -> None:
        """Give a value from outside. Raises `NotSettable`, `NoValue`."""
        ...

    def fail(self, reference: Reference, message: str) -> None:
        """Say that a value from outside will not come. Raises as `put`."""
        ...


class FoundVariable(NamedTuple):
    """A variable, and what has it."""

    owner: VariableOwner
    reference: Reference


class VariableTable:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], VariableOwner] = {}
        """By tenant and token."""
        self._ended: dict[str, OrderedDict[str, str]] = {}
        """By tenant, token -> why its variables have no values any more."""

    def open(self, tenant: str, owner: VariableOwner) -> str:
        """Take in what has variables. Returns its token."""
        token = secrets.token_hex(12)
        self._owners[tenant, token] = owner
        return token

    def close(self, tenant: str, token: str, why: str) -> None:
        """Forget an owner. `why` follows the names of its variables."""
        del self._owners[tenant, token]
        ended = self._ended.setdefault(tenant, OrderedDict())
        ended[token] = why
        if len(ended) > MAX_REMEMBERED:
            ended.popitem(last=False)

    def find(self, tenant: str, variable_id: str) -> FoundVariable:
        """The variable of an id. Raises `UnknownVariable`, and `NoValue` where what had it is over."""
        token, _, name = variable_id.removeprefix(_PREFIX).partition(".")
        reference = parse_reference(name) if variable_id.startswith(_PREFIX) else None
        owner = self._owners.get((tenant, token))
        if reference is not None and owner is not None and reference.name in owner:
            return FoundVariable(owner, reference)
        why = self._ended.get(tenant, OrderedDict[str, str]()).get(token)
        if reference is not None and why is not None:
            raise NoValue(f"{variable_id[:200]} has no value: {why}", variable_id[:200])
        raise UnknownVariable(f"There is no variable {variable_id[:200]!r}.", "variable")


def variable_id(token: str, reference: Reference) -> str:
    """The id of a variable."""
    return f"{_PREFIX}{token}.{reference}"
