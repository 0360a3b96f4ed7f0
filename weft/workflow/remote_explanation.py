"""What a run on a server of ours would do, as the server explains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from weft.abi.errors import Unsupported
from weft.workflow.frontend.rows import Rows
from weft.workflow.graph.json import graph_to_dict
from weft.workflow.graph.nodes import WorkflowGraph
from weft.workflow.remote import WorkflowServer

_TAKEN = {"model", "optimise", "statistics"}
"""Options of explanations that a server takes."""


class ServedExplanation:
    """The forms of an `Explanation`. The server makes each one when it is asked for."""

    def __init__(self, ask: Callable[[str], Any]):
        """`ask` gives the explanation in the form of this name."""
        self._ask = ask

    @classmethod
    def before(cls, graph: WorkflowGraph, rows: Any, server: WorkflowServer, options: Mapping[str, Any]) -> Self:
        """Of a run that has not begun; its graph is stored there. Raises `InvalidRows`, `InvalidGraph`, and
        `Unsupported` for options that have no effect there."""
        for name in options.keys() - _TAKEN:
            raise Unsupported(f"{name} is not for an explanation by a server, which takes {', '.join(sorted(_TAKEN))}")
        given = rows if isinstance(rows, int) else [*Rows(rows).check(graph)]
        stored = server.create(graph_to_dict(graph)).id
        return cls(lambda form: server.explain(stored, given, form, **options))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON."""
        made: dict[str, Any] = self._ask("json")
        return made

    def mermaid(self) -> str:
        """The calls as a diagram in Mermaid's language."""
        return str(self._ask("mermaid"))

    def svg(self) -> str:
        """The schedule as a picture."""
        return str(self._ask("svg"))

    def __str__(self) -> str:
        return str(self._ask("text"))
