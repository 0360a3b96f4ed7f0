"""Workflows: calls of models, functions and programs that are known in advance, as one graph over many rows.

`graph` is the data model that every way of writing a workflow makes, and its checks; `frontend` is what users write;
`passes` rewrite a graph into a cheaper one with the same results. `plan` decides the order of its calls.

Like `weft`, this module imports nothing until it is asked for: writing workflows does not load the planner.
"""

from typing import Any

__all__ = ["plan"]


def __getattr__(name: str) -> Any:
    if name == "plan":
        from weft.workflow.planning import plan

        return plan
    raise AttributeError(f"module 'weft.workflow' has no attribute {name!r}")
