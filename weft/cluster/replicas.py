"""`ReplicaSet`: the engines that serve one model, as one, and the way of each request to one of them.

Owns the clients of the engines and their router. A request that is under way stays on its engine: when that one dies,
`Recovery` continues the request on its successor, and requests elsewhere notice nothing. A new request goes to an
engine that answers. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from weft.abi.errors import EngineDead
from weft.cluster.route_costs import EngineView
from weft.cluster.router import RoutedRequest, Router
from weft.core.objectives import Objective
from weft.core.wire import EngineInfo, Sessions
from weft.engine.client import EngineClient

ANSWER_TIMEOUT_S = 5.0
"""For an engine to list sequences; it answers between two steps."""

_UNKNOWN = EngineView(False, 0, 1, 0, 16, None)
"""An engine that has not answered yet."""


class Placed:
    """A request that has an engine."""

    def __init__(self, router: Router, routed: RoutedRequest):
        self._router, self._routed = router, routed
        self._answer = array("i")

    @property
    def engine(self) -> int:
        """Index of the chosen engine in `ReplicaSet.engines`."""
        return self._routed.engine

    def generated(self, choice: int, tokens: Iterable[int]) -> None:
        """Further tokens of a choice have come, at least one."""
        self._router.answered(self._routed)
        if choice == 0:
            self._answer.extend(tokens)

    def end(self, view: EngineView) -> None:
        """The request has ended, on the engine `view`."""
        self._router.ended(self._routed, view, self._answer.tobytes())


class ReplicaSet:
    """One or more engines of one model."""

    def __init__(self, engines: Sequence[EngineClient]):
        if not engines:
            raise ValueError("a model needs an engine")
        self.engines = tuple(engines)
        self._router = Router(len(engines))

    @property
    def info(self) -> EngineInfo:
        """What the engines serve. Raises `EngineDead` before the first one was ready."""
        for engine in self.engines[:-1]:
            with contextlib.suppress(EngineDead):
                return engine.info
        return self.engines[-1].info

    @property
    def ready(self) -> bool:
        """Whether an engine answers now."""
        return any(engine.ready for engine in self.engines)

    async def wait_ready(self) -> EngineInfo:
        """Return at once where an engine answers. Otherwise start the engines where that has not happened, and wait
        until all answer. Raises what the first one raises that cannot start."""
        if self.ready:
            return self.info
        infos = await asyncio.gather(*(engine.wait_ready() for engine in self.engines))
        return infos[0]

    async def sessions(self, tenant: str, limit: int) -> Sessions:
        """Up to `limit` sequences of a tenant from each engine that answers within `ANSWER_TIMEOUT_S`, which wait
        longest there. Raises `EngineDead` where none answers."""
        answering = [index for index, engine in enumerate(self.engines) if engine.ready] or [0]
        asked = (_asked(self.engines[index], tenant, limit) for index in answering)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [(i, answer) for i, answer in zip(answering, answers, strict=True) if isinstance(answer, Sessions)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        unexpected = [error for error in errors if not isinstance(error, EngineDead)]
        if unexpected or not found:
            raise (unexpected or errors)[0]
        listed = [replace(session, engine=index) for index, part in found for session in part.sessions]
        return Sessions(query=0, sessions=listed, total=sum(part.total for _, part in found))

    async def close(self) -> None:
        """Close the clients of all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    @contextmanager
    def placed(
        self,
        prompt: bytes,
        namespace: str,
        *,
        session: str = "",
        max_output: int | None = None,
        num_choices: int = 1,
        preferred: int | None = None,
        objective: Objective = "latency",
    ) -> Iterator[Placed]:
        """An engine for a request with this prompt (packed tokens), until the end of the block. Arguments are those of
        `Router.route`."""
        views = [_view(engine) for engine in self.engines]
        routed = self._router.route(
            views,
            prompt,
            namespace,
            session=session,
            max_output=max_output,
            num_choices=num_choices,
            preferred=preferred,
            objective=objective,
        )
        placed = Placed(self._router, routed)
        try:
            yield placed
        finally:
            placed.end(views[routed.engine])


def _view(engine: EngineClient) -> EngineView:
    try:
        info = engine.info
    except EngineDead:
        return _UNKNOWN
    num_pages = info.num_device_pages + info.num_host_pages
    return EngineView(
        engine.ready, info.pid, info.max_running, num_pages, info.page_size, info.forward, info.held_factor
    )


async def _asked(engine: EngineClient, tenant: str, limit: int) -> Sessions:
    """The sequences of one engine. Raises `EngineDead`, also where it does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await engine.sessions(tenant, limit)
    except TimeoutError:
        raise EngineDead(f"the engine gave no answer within {ANSWER_TIMEOUT_S:g} s") from None
