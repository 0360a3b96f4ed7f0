"""A session on a server of ours: nodes go there as they are made, and values come when they are asked for.

Owns the order in which nodes are submitted, and the calls of Python functions, which run here: the server has a value
from outside in the place of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx
from msgspec.structs import replace

from weft.abi.errors import InvalidRequest, NotSettable, NoValue, Overloaded, Unsupported, WeftError, from_kind
from weft.workflow.actuals import RunCounts
from weft.workflow.backend.openai import CONNECT_S, lost, refused
from weft.workflow.criteria import Criterion
from weft.workflow.graph.builtin_functions import is_client_function
from weft.workflow.graph.json import node_to_dict
from weft.workflow.graph.labels import outer_node
from weft.workflow.graph.names import all_nodes
from weft.workflow.graph.nodes import AnyNode, ExternalNode, FunctionNode, LlmNode, uses
from weft.workflow.graph.templates import Reference
from weft.workflow.graph.values import RowError, fill_values
from weft.workflow.run.frames import RowFailure
from weft.workflow.run.functions import called_function, checked_value
from weft.workflow.run.value_errors import NodeFailed, kind_of, message_of

POLL_S = 30.0
"""Of one request that waits for a value."""
MAX_NODES_AT_ONCE = 500
MAX_TRIES = 5
_ERRORS: Mapping[str, type[InvalidRequest]] = {
    "no_value": NoValue,
    "variable_not_found": NoValue,  # the server began anew
    "not_settable": NotSettable,
}


class RemoteSession:
    """One session. All methods but `value_now`, `has_failed` and `counts` are called on one event loop."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        session_id: str,
        functions: Mapping[str, Callable[..., Any]],
        function_timeout_s: float,
        model: str | None,
    ):
        """`model` is for calls that name none."""
        self._http = http
        self._session_id = session_id
        self._functions = functions
        self._function_timeout_s = function_timeout_s
        self._model = model
        self._unsent: list[AnyNode] = []
        self._has_unsent = asyncio.Event()
        self._ids: dict[str, asyncio.Future[str]] = {}
        """By node, the id of its variable; the error that refused it."""
        self._needs: dict[str, tuple[str, ...]] = {}
        self._values: dict[Reference, Any] = {}
        self._errors: dict[str, NodeFailed] = {}
        """By the path of the node where they began; and of functions that failed here."""
        self._failed: set[str] = set()
        """Nodes in which an error began, in their bodies too, and those that the server has refused."""
        self._called: set[str] = set()
        """Nodes that are functions of this process."""
        self._getting: set[asyncio.Future[None]] = set()
        """One for each that waits for a value."""
        self._over = ""
        self._has_begun = False
        """Whether the server has the session: from then on it must not begin another one of the same name."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._send())

    # ---- nodes and values

    def submit(self, nodes: Iterable[AnyNode]) -> None:
        """Add nodes, whose references are to earlier ones."""
        for node in nodes:
            self._ids[node.id] = asyncio.get_running_loop().create_future()
            self._ids[node.id].add_done_callback(_seen)
            self._needs[node.id] = tuple(use.reference.name for use in uses(node))
            if is_client_function(node):
                self._called.add(node.id)
                self._start(self._call(node))
                node = ExternalNode(id=node.id)
            elif isinstance(node, LlmNode) and self._model is not None:
                node = replace(node, request={"model": self._model, **node.request})
            self._unsent.append(node)
        self._has_unsent.set()

    async def get(
        self, reference: Reference, criterion: Criterion | None = None, timeout_s: float | None = None
    ) -> Any:
        """Wait for a value. Raises `NodeFailed`, `NoValue` and `TimeoutError`."""
        if reference in self._values or self._over:
            return self.value_now(reference)
        getting = asyncio.get_running_loop().create_future()
        self._getting.add(getting)
        try:
            async with asyncio.timeout(timeout_s):
                await self._fetch(reference, criterion)
        except TimeoutError:
            raise TimeoutError(f"{reference.name} has no value after {timeout_s:g} s") from None
        except WeftError:
            if self._over:
                raise self.missing(reference.name) from None
            raise
        finally:
            self._getting.discard(getting)
            getting.set_result(None)
        return self.value_now(reference)

    async def put(self, reference: Reference, value: Any) -> None:
        """Give a value from outside. Raises `NotSettable`, `NoValue`, and `InvalidRequest` for a value that it cannot
        have."""
        if reference.path:
            raise NotSettable(f"{reference} is a part of a value: set {reference.name}", str(reference))
        if reference.name in self._called:
            raise NotSettable(f"{reference} is computed: only a variable of ops.external is set", str(reference))
        try:
            given = checked_value(value)
        except RowError as error:
            raise InvalidRequest(f"{reference}: {error.message}", "value") from None
        await self._put(reference.name, {"value": given})

    async def wait(self) -> None:
        """Wait until all that was submitted by now has a value or has failed."""
        for name in list(self._ids):
            try:
                await self.get(Reference(name))
            except (NodeFailed, NoValue):
                continue

    def value_now(self, reference: Reference) -> Any:
        """A value that was fetched. Raises `NodeFailed`, and `NoValue` where it was not."""
        if reference in self._values:
            value = self._values[reference]
            if isinstance(value, NodeFailed):
                raise value.with_traceback(None)
            return value
        raise self.missing(reference.name)

    def missing(self, name: str) -> NoValue:
        """The error of a variable without a value."""
        return NoValue(f"{name} has no value: {self._over or 'it is not computed yet'}", name)

    def has_failed(self, name: str) -> bool:
        """Whether a node is known to have failed."""
        return name in self._failed or isinstance(self._values.get(Reference(name)), NodeFailed)

    @property
    def counts(self) -> RunCounts:
        """Raises `Unsupported`: the server has them."""
        raise Unsupported("a session on a server does not know its counts of calls and tokens")

    async def close(self) -> None:
        """End the session, here and on the server. Idempotent."""
        if self._over:
            return
        self._over = "the session was closed before it was asked for"
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sent in self._ids.values():
            if not sent.done():
                sent.set_exception(NoValue(self._over))
        with suppress(httpx.HTTPError):  # it expires there
            await self._http.request("DELETE", f"/v1/sessions/{quote(self._session_id, safe='')}")
        # The server answers those who wait; a connection that it does not answer on is closed with the others.
        await asyncio.wait({*self._getting, asyncio.ensure_future(asyncio.sleep(0))}, timeout=CONNECT_S)

    # ---- to the server

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self) -> None:
        """Submit what is to be submitted, in order, many nodes at once while others are on their way."""
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self._unsent:
                some, self._unsent = self._unsent[:MAX_NODES_AT_ONCE], self._unsent[MAX_NODES_AT_ONCE:]
                await self._send_some(some)

    async def _send_some(self, nodes: list[AnyNode]) -> None:
        nodes = [node for node in nodes if not self._is_refused(node)]
        if not nodes:
            return
        body = {
            "session_id": self._session_id,
            "continues": self._has_begun,
            "nodes": [node_to_dict(node) for node in nodes],
        }
        try:
            receipt = await self._json("POST", "/v1/calls", body)
        except NoValue as error:
            for node in nodes:
                self._ids[node.id].set_exception(NoValue(f"{node.id} can have no value: {error.message}", node.id))
        except InvalidRequest as error:
            if len(nodes) > 1:  # one of them is wrong, and the others are not
                for node in nodes:
                    await self._send_some([node])
                return
            self._refuse(nodes, error)
        except Exception as error:
            self._refuse(nodes, error)
        else:
            self._has_begun = True
            for variable in receipt["variables"]:
                if not self._ids[variable["name"]].done():
                    self._ids[variable["name"]].set_result(variable["id"])

    def _is_refused(self, node: AnyNode) -> bool:
        """Whether a node needs one that the server does not have; it then fails as that one does."""
        for need in self._needs[node.id]:
            sent = self._ids[need]
            error = sent.exception() if sent.done() else None
            if error is not None:
                self._ids[node.id].set_exception(error)
                return True
        return False

    def _refuse(self, nodes: list[AnyNode], error: Exception) -> None:
        for node in nodes:
            self._failed.add(node.id)
            self._ids[node.id].set_exception(NodeFailed.of(RowFailure(node.id, error)))

    async def _fetch(self, reference: Reference, criterion: Criterion | None) -> None:
        query: dict[str, Any] = {"timeout_s": POLL_S}
        if criterion is not None:
            query["criterion"] = criterion.name
            if criterion.seconds is not None:
                query["deadline_s"] = criterion.seconds
        try:
            id = await asyncio.shield(self._ids[reference.name])
            path = ".".join((id, *reference.path))
            while (card := await self._json("GET", f"/v1/variables/{path}", query=query))["status"] == "pending":
                query.pop("criterion", None)
                query.pop("deadline_s", None)
        except NodeFailed as error:
            self._values[reference] = error
            return
        self._values[reference] = card["value"] if card["status"] == "ready" else self._error(card["error"])

    def _error(self, told: Mapping[str, Any]) -> NodeFailed:
        """The one exception of a node that failed."""
        node = told["node"]
        self._failed.add(outer_node(node))
        if node not in self._errors:
            made = self._errors[node] = NodeFailed(told["message"], node)
            made.cause_kind = told["code"]
            made.__cause__ = from_kind(told["code"], told["message"].removeprefix(f"{node}: "))
        return self._errors[node]

    async def _put(self, node: str, body: Mapping[str, Any]) -> None:
        id = await asyncio.shield(self._ids[node])
        await self._json("PUT", f"/v1/variables/{id}", body)

    async def _json(self, method: str, path: str, body: Any = None, query: Mapping[str, Any] | None = None) -> Any:
        """Raises `NoValue`, `NotSettable`, and other errors as `OpenAIBackend` does. Tries again after an overload."""
        tries = 0
        while True:
            tries += 1
            try:
                response = await self._http.request(method, path, json=body, params=query)
            except httpx.HTTPError as error:
                raise lost(str(self._http.base_url), error) from error
            if not response.is_error:
                return response.json()
            refusal = _error_of(response)
            if not isinstance(refusal, Overloaded) or tries == MAX_TRIES:
                raise refusal
            await asyncio.sleep(refusal.retry_after_s or 1.0)

    # ---- Python functions

    async def _call(self, node: FunctionNode) -> None:
        """Call a function of this process with values of the server, and give the server what it returns."""
        try:
            args = await self._arguments(node)
        except NodeFailed as error:
            # What depends on the function fails as its inputs do.
            self._errors[node.id] = error
            self._failed.add(node.id)
            await self._tell(node.id, {"error": error.message})
            return
        except (WeftError, ValueError) as error:  # a text that is too long, an answer that is not JSON
            await self._tell(node.id, {"error": message_of(error)})
            return
        for tries in range(node.retries + 1):
            try:
                value = await called_function(self._functions, node.name or "", args, self._function_timeout_s)
            except Exception as error:
                if tries == node.retries:
                    self._errors[node.id] = NodeFailed.of(RowFailure(node.id, error))
                    self._failed.add(node.id)
                    await self._tell(node.id, {"error": message_of(error) or kind_of(error)})
            else:
                await self._tell(node.id, {"value": value})
                return

    async def _arguments(self, node: FunctionNode) -> dict[str, Any]:
        known = {use.reference: await self.get(use.reference) for use in uses(node)}
        found: dict[str, Any] = fill_values(node.args, known.__getitem__)
        return found

    async def _tell(self, node: str, body: Mapping[str, Any]) -> None:
        try:
            await self._put(node, body)
        except WeftError as error:
            self._values[Reference(node)] = self._errors.setdefault(node, NodeFailed.of(RowFailure(node, error)))
            if "value" in body:  # what depends on it there would wait for ever
                await self._tell(node, {"error": message_of(error)})


def check_remote(node: AnyNode) -> None:
    """Raise `Unsupported` for what a session on a server cannot run."""
    for inner in all_nodes((node,)):
        if is_client_function(inner) and inner is not node:
            raise Unsupported(f"{inner.id}: a session on a server cannot call a Python function in a body", inner.id)


async def has_sessions(http: httpx.AsyncClient) -> bool:
    """Whether a server is one of ours that has sessions. Raises `EngineDead` where it does not answer."""
    try:
        response = await http.get("/v1/variables/none")
        return bool(response.json()["error"]["code"] == "variable_not_found")
    except httpx.HTTPError as error:
        raise lost(str(http.base_url), error) from error
    except (ValueError, LookupError, TypeError):
        return False


def _error_of(response: httpx.Response) -> WeftError:
    error = refused(response)
    try:
        told = response.json()["error"]
        kind = _ERRORS.get(told["code"])
    except (ValueError, LookupError, TypeError):
        return error
    return error if kind is None else kind(told["message"], told.get("param"))


def _seen(sent: asyncio.Future[str]) -> None:
    """An error that nobody asks for is none to complain of."""
    if not sent.cancelled():
        sent.exception()
