"""Parrot's evaluation, simulated: the parts of `bench.simulated_workflows` about its applications."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.simulations import Simulations, gather
from bench.workflows import applications as apps
from bench.workflows.applications import A100, A6000, Client, Service, Tried
from weft.workflow.run.settings import PlanSettings

WEFT, CLIENTS = "weft", "clients"
HELD, THROUGHPUT = "clients, engine held", "clients, full engine"
CHUNKS, OUTPUTS = (512, 1024, 1536, 2048), (25, 50, 75, 100)
CHUNK, OUTPUT = 1024, 50
"""Where the other is varied."""
DOCUMENTS = 5
CHAT_RATES = (1.0, 2.0, 3.0, 3.5)
CHAINS = 4
USER_RATES = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)
USER_SECONDS = 60.0
SLOWEST_S = 0.1
"""Mean seconds per output token up to which applications count as served."""
MIXED = (1.0, 30, 4.0)
"""Requests of chat per second, documents, and seconds between two."""

BY_TASK: Mapping[str, Mapping[str, Tried]] = {
    "chain": {
        WEFT: Tried(Service(A100, routes=True), Client(True, "latency", apps.URGENT)),
        CLIENTS: Tried(Service(A100)),
    },
    "beside": {
        WEFT: Tried(Service(A100, kv_tokens=apps.BUSY_TOKENS, routes=True), Client(True, "latency", apps.URGENT)),
        CLIENTS: Tried(Service(A100, kv_tokens=apps.BUSY_TOKENS)),
    },
    "map_reduce": {
        WEFT: Tried(Service(A100, routes=True), Client(True, "throughput")),
        HELD: Tried(Service(A100, kv_tokens=apps.HELD_TOKENS)),
        THROUGHPUT: Tried(Service(A100)),
    },
    "users": {
        WEFT: Tried(Service(A6000, apps.ENGINES, routes=True)),
        "least queue": Tried(Service(A6000, apps.ENGINES)),
        "no sharing": Tried(Service(A6000, apps.ENGINES, shares=False)),
    },
    "mixed": {
        WEFT: Tried(Service(A6000, apps.ENGINES, routes=True), Client(True, "throughput")),
        "weft, plans": Tried(
            Service(A6000, apps.ENGINES, routes=True), Client(True, "throughput", planning=PlanSettings())
        ),
        "weft, last call for latency": Tried(
            Service(A6000, apps.ENGINES, routes=True), Client(True, "latency", planning=PlanSettings(engines=False))
        ),
        HELD: Tried(Service(A6000, apps.ENGINES, kv_tokens=apps.HELD_TOKENS)),
        THROUGHPUT: Tried(Service(A6000, apps.ENGINES)),
    },
}
"""Task -> contenders."""


class ApplicationCase(NamedTuple):
    """A contender with a task."""

    task: str
    contender: str
    given: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """As `Case`."""
        return f"{self.task} {' '.join(f'{value:g}' for value in self.given)}: {self.contender}"

    def run(self) -> dict[str, Any]:
        """Figures of the task."""
        tried = BY_TASK[self.task][self.contender]
        match self.task:
            case "chain":
                return apps.summaries(apps.chain, *map(int, self.given), tried, DOCUMENTS)
            case "map_reduce":
                return apps.summaries(apps.map_reduce, *map(int, self.given), tried, DOCUMENTS)
            case "beside":
                return apps.chains_beside_chat(CHUNK, OUTPUT, tried, CHAINS, *self.given)
            case "users":
                return apps.users(tried.service, *self.given, USER_SECONDS)
            case _:
                rate, documents, every_s = self.given
                return apps.chat_beside_map_reduce(tried, rate, int(documents), every_s)


Find = Callable[[ApplicationCase], Mapping[str, Any]]


def _rows(find: Simulations, task: str, given: Sequence[tuple[float, ...]]) -> dict[str, dict[str, Any]]:
    """Figures by what is given and by contender."""
    names = list(BY_TASK[task])
    found = gather(find, [ApplicationCase(task, name, each) for each in given for name in names])
    return {
        " ".join(f"{value:g}" for value in each): {
            name: dict(found[ApplicationCase(task, name, each)]) for name in names
        }
        for each in given
    }


def summaries(find: Simulations, task: str) -> dict[str, Any]:
    """Seconds of `chain` or `map_reduce` by chunk size and output length, and what they are over Weft's."""
    given = [(CHUNK, output) for output in OUTPUTS] + [(chunk, OUTPUT) for chunk in CHUNKS]
    given.append((CHUNKS[-1], OUTPUTS[-1]))
    return _with_gains(_rows(find, task, list(dict.fromkeys(given))))


def chains_beside_chat(find: Simulations) -> dict[str, Any]:
    """Seconds of chains by the rate of chat."""
    return _with_gains(_rows(find, "beside", [(rate,) for rate in CHAT_RATES]))


def mixed(find: Simulations) -> dict[str, Any]:
    """Chat and map-reduce on four engines."""
    return _with_gains(_rows(find, "mixed", [MIXED]))


def users(find: Simulations) -> dict[str, Any]:
    """Seconds per output token by rate, and the largest rate of `USER_RATES` that is served."""
    rows = _rows(find, "users", [(rate,) for rate in USER_RATES])
    served = {
        name: {"rate": max((rate for rate in USER_RATES if rows[f"{rate:g}"][name]["per_token_s"] <= SLOWEST_S),
                           default=0.0)}
        for name in BY_TASK["users"]
    }  # fmt: skip
    return {**rows, "served": served}


def _with_gains(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    for row in rows.values():
        for figures in row.values():
            figures["gain"] = figures["seconds"] / row[WEFT]["seconds"]
    return rows


def shown(found: Mapping[str, Any]) -> list[str]:
    """The lines of a part."""
    lines = []
    for given, row in found.items():
        lines.append(f"  {given}")
        lines += [
            f"    {name:22} " + "  ".join(f"{figure} {value:.4g}" for figure, value in figures.items())
            for name, figures in row.items()
        ]
    return lines
