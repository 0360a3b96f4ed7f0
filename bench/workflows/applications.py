"""Parrot's applications on simulated engines: chains and map-reduce over long documents, applications with long shared
prompts, chat beside map-reduce.

Lengths are those of `papers/parrot.txt`, section 8, and of its artefact. What the paper has in figures only is assumed
here and said so: lengths of chat are log-normal, with the means that are commonly found in ShareGPT.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.workflows.played import engine_settings, sources_of
from weft.core.ids import pack_tokens
from weft.core.objectives import Objective
from weft.sim.clock import VirtualClock
from weft.sim.cluster import EngineChoice, LeastQueue, RouterChoice, SimulatedCall, SimulatedCluster, SimulatedTimes
from weft.sim.devices import Device, find_device
from weft.sim.run import SimulationSettings, simulated_engine
from weft.sim.workflow_run import WorkflowPlayer, letters_of
from weft.workflow.analysis.objectives import WantedOutputs
from weft.workflow.graph import WorkflowGraph, canonical, graph_from_dict
from weft.workflow.run.order import CallHints, CallSite, no_hints, row_by_row
from weft.workflow.run.plan_rounds import PlanRounds
from weft.workflow.run.planned_order import PlannedOrder
from weft.workflow.run.settings import NO_PLANS, PlanSettings
from weft.workflow.run.state import RunState

DOCUMENT_TOKENS = 20_000
TASK_TOKENS = 60
"""The instruction before a chunk; assumed."""
NETWORK_S = (0.2, 0.3)
"""Between a client and the service, of one request."""
APPLICATIONS = {
    "productivity": (7437, 7, 704),
    "image_generation": (1116, 8, 89),
    "programming": (1694, 4, 631),
    "data_analysis": (2031, 4, 416),
}
"""Name -> tokens of the shared prompt, of the query, of the output."""
CHAT_PROMPT, CHAT_OUTPUT = (200.0, 1.0), (200.0, 0.7)
"""Mean and deviation of the logarithm; assumed."""
URGENT = -10
"""`priority` of calls that somebody waits for the end of, as sessions have it."""
MAX_CHAT_TOKENS = 1500


class Service(NamedTuple):
    """How calls are served."""

    device: str
    engines: int = 1
    kv_tokens: int | None = None
    """That an engine holds at once; None: what the device has."""
    routes: bool = False
    """Whether the router of `weft serve` chooses the engine, else the fewest calls do."""
    shares: bool = True
    """Whether prefixes are found."""

    @property
    def known_device(self) -> Device:
        """The device with this service's KV."""
        return find_device(self.device, kv_tokens=self.kv_tokens)


class Client(NamedTuple):
    """How applications are run."""

    is_near: bool = False
    """Whether a graph is given to the service as a whole, so that only its beginning travels."""
    objective: Objective = "latency"
    """Of all calls; with plans, of the output, from which those of the calls are deduced."""
    priority: int = 0
    """Of all calls, without plans."""
    planning: PlanSettings = NO_PLANS


def cluster_of(service: Service, settings: SimulationSettings | None = None) -> SimulatedCluster:
    """The engines of a service."""
    settings = settings or engine_settings()
    device = service.known_device
    clock = VirtualClock()
    engines = [simulated_engine(device, settings, clock, prefix_cache=service.shares) for _ in range(service.engines)]
    choice: EngineChoice = LeastQueue(service.engines)
    if service.routes:
        choice = RouterChoice.of(device, settings, service.engines)
    return SimulatedCluster(engines, clock, choice)


class Texts:
    """Texts and times of a seed."""

    def __init__(self, seed: int):
        self._source = np.random.default_rng([seed, 7])

    def text(self, tokens: int) -> str:
        """Letters."""
        return self._source.integers(97, 123, tokens, np.uint8).tobytes().decode()

    def network_s(self) -> float:
        """Of one request."""
        return float(self._source.uniform(*NETWORK_S))

    def lengths(self, mean: float, deviation: float) -> int:
        """Log-normal."""
        return int(np.clip(self._source.lognormal(np.log(mean) - deviation**2 / 2, deviation), 4, MAX_CHAT_TOKENS))

    def arrivals(self, rate: float, count: int) -> Iterator[float]:
        """Times of a Poisson process."""
        at_s = 0.0
        for _ in range(count):
            at_s += float(self._source.exponential(1 / rate))
            yield at_s


def chain(chunks: int, output: int, texts: Texts) -> WorkflowGraph:
    """A summary that one chunk after the other refines."""
    task, before, nodes = texts.text(TASK_TOKENS), "", []
    for number in range(chunks):
        nodes.append(_call(f"summary{number}", f"{task}{{{{chunk{number}}}}}{before}", output))
        before = f"{{{{summary{number}}}}}"
    return _graph(chunks, nodes)


def map_reduce(chunks: int, output: int, texts: Texts) -> WorkflowGraph:
    """A summary of each chunk, and one of all."""
    task = texts.text(TASK_TOKENS)
    nodes = [_call(f"part{number}", f"{task}{{{{chunk{number}}}}}", output) for number in range(chunks)]
    parts = "".join(f"{{{{part{number}}}}}" for number in range(chunks))
    return _graph(chunks, [*nodes, _call("whole", f"{texts.text(TASK_TOKENS)}{parts}", output)])


def document(chunks: int, tokens: int, texts: Texts) -> dict[str, str]:
    """A document in chunks."""
    return {f"chunk{number}": texts.text(tokens) for number in range(chunks)}


def _call(name: str, prompt: str, output: int) -> dict[str, Any]:
    return {"id": name, "op": "llm", "prompt": prompt, "max_tokens": output}


def _graph(chunks: int, nodes: list[dict[str, Any]]) -> WorkflowGraph:
    inputs = [f"chunk{number}" for number in range(chunks)]
    return graph_from_dict({"version": 1, "inputs": inputs, "nodes": nodes, "outputs": {"last": nodes[-1]["id"]}})


class Tried(NamedTuple):
    """How applications are served and run."""

    service: Service
    client: Client = Client()


class Application(NamedTuple):
    """A graph with its document, and when somebody asks for it."""

    graph: WorkflowGraph
    row: dict[str, str]
    at_s: float = 0.0


def run_applications(
    cluster: SimulatedCluster, applications: Sequence[Application], tried: Tried, texts: Texts
) -> list[float]:
    """Have applications begin when they are asked for. Returns a list that is filled with the seconds that each takes,
    as its user sees them."""
    taken: list[float] = []
    for one in applications:
        network_s = [texts.network_s() for _ in one.graph.nodes]
        _begin(cluster, one, tried, network_s, taken.append)
    return taken


def _begin(
    cluster: SimulatedCluster, one: Application, tried: Tried, network_s: Sequence[float],
    on_done: Callable[[float], None],
) -> None:  # fmt: skip
    graph, client = canonical(one.graph), tried.client
    delays = {node.id: seconds for node, seconds in zip(graph.nodes, network_s, strict=True)}
    hints, rounds = no_hints, None
    order = PlannedOrder(row_by_row(graph), client.planning, WantedOutputs(client.objective))

    def urgent(site: CallSite) -> CallHints:
        return CallHints({"priority": client.priority, "objective": client.objective})

    if client.planning.needs_plans:
        sources = sources_of(tried.service.known_device, engine_settings(), tried.service.engines)
        rounds = PlanRounds(graph, order, sources, settings=client.planning, wanted=WantedOutputs(client.objective))
        hints = order.hints
    elif client.is_near:
        hints = urgent
    player = WorkflowPlayer(
        cluster,
        RunState(graph, order, hints=hints),
        [one.row],
        rounds=rounds,
        round_trip_s=(lambda path: 0.0) if client.is_near else (lambda path: delays[path]),
        on_done=lambda now: on_done(now - one.at_s),
    )
    cluster.at(one.at_s + (network_s[0] if client.is_near else 0.0), lambda now: player.begin())


class ChatTimes:
    """What single requests experience."""

    def __init__(self) -> None:
        self.per_token_s: list[float] = []
        """Normalized latency: whole time over output tokens."""
        self.tpot_s: list[float] = []
        """Time between output tokens, of requests with several."""

    def note(self, call: SimulatedCall, times: SimulatedTimes) -> None:
        """A request has ended."""
        self.per_token_s.append((times.end_s - times.asked_s) / call.num_output)
        if call.num_output > 1:
            self.tpot_s.append((times.end_s - times.first_s) / (call.num_output - 1))

    def figures(self) -> dict[str, float]:
        """Means in seconds."""
        return {
            "per_token_s": statistics.fmean(self.per_token_s),
            "tpot_s": statistics.fmean(self.tpot_s),
            "requests": len(self.per_token_s),
        }


def add_chat(cluster: SimulatedCluster, rate: float, count: int, texts: Texts) -> ChatTimes:
    """Have requests of chat arrive."""
    times = ChatTimes()
    for at_s in texts.arrivals(rate, count):
        prompt = texts.text(texts.lengths(*CHAT_PROMPT))
        _add(cluster, at_s, prompt, texts.lengths(*CHAT_OUTPUT), times)
    return times


def add_application_users(cluster: SimulatedCluster, rate: float, count: int, texts: Texts) -> ChatTimes:
    """Have requests of applications arrive, each as often as the others."""
    times = ChatTimes()
    prompts = {name: texts.text(tokens) for name, (tokens, _, _) in APPLICATIONS.items()}
    names = list(APPLICATIONS)
    for number, at_s in enumerate(texts.arrivals(rate, count)):
        name = names[(number * 7 + number // 4) % len(names)]
        _, query, output = APPLICATIONS[name]
        _add(cluster, at_s, prompts[name] + texts.text(query), output, times)
    return times


def _add(cluster: SimulatedCluster, at_s: float, prompt: str, output: int, times: ChatTimes) -> None:
    packed = pack_tokens(list(prompt.encode()))
    call = SimulatedCall(packed, pack_tokens(list(letters_of(packed, output).encode())))
    cluster.at(at_s, lambda now: cluster.call(call, lambda done: times.note(call, done)) and None)


# Measurements

A100, A6000 = "llama-13b-a100", "llama-7b-a6000"
HELD_TOKENS = 4096
"""That an engine holds at once where each request is to be fast."""
BUSY_TOKENS = 6144
"""The same where a service takes more load."""
APART_S = 60.0
"""Between chains beside chat."""
WARM_S = 30.0
MIXED_CHUNK, MIXED_OUTPUT = 1024, 50
ENGINES = 4


def summaries(
    shape: Callable[[int, int, Texts], WorkflowGraph], chunk: int, output: int, tried: Tried, documents: int
) -> dict[str, float]:
    """Mean seconds of documents, each alone on the engines."""
    taken: list[float] = []
    for number in range(documents):
        texts = Texts(number)
        cluster = cluster_of(tried.service)
        chunks = -(-DOCUMENT_TOKENS // chunk)
        one = Application(shape(chunks, output, texts), document(chunks, chunk, texts))
        seconds = run_applications(cluster, [one], tried, texts)
        cluster.run()
        taken += seconds
    return {"seconds": statistics.fmean(taken)}


def chains_beside_chat(chunk: int, output: int, tried: Tried, documents: int, rate: float) -> dict[str, float]:
    """Mean seconds of chains that begin one after the other while requests of chat arrive, so many per second."""
    texts = Texts(0)
    cluster = cluster_of(tried.service)
    chunks = -(-DOCUMENT_TOKENS // chunk)
    ones = [
        Application(chain(chunks, output, texts), document(chunks, chunk, texts), WARM_S + number * APART_S)
        for number in range(documents)
    ]
    chat = add_chat(cluster, rate, round(rate * (WARM_S + documents * APART_S)), Texts(1))
    taken = run_applications(cluster, ones, tried, texts)
    cluster.run()
    return {"seconds": statistics.fmean(taken), **chat.figures()}


def chat_beside_map_reduce(tried: Tried, rate: float, documents: int, every_s: float) -> dict[str, float]:
    """Requests of chat, so many per second, and a document for map-reduce every so many seconds on average."""
    texts = Texts(0)
    cluster = cluster_of(tried.service)
    chunks = -(-DOCUMENT_TOKENS // MIXED_CHUNK)
    ones = [
        Application(map_reduce(chunks, MIXED_OUTPUT, texts), document(chunks, MIXED_CHUNK, texts), at_s)
        for at_s in texts.arrivals(1 / every_s, documents)
    ]
    chat = add_chat(cluster, rate, round(rate * documents * every_s), Texts(1))
    taken = run_applications(cluster, ones, tried, texts)
    cluster.run()
    return {"seconds": statistics.fmean(taken), **chat.figures()}


def users(service: Service, rate: float, seconds: float) -> dict[str, float]:
    """Requests of the four applications at a rate, for some time."""
    cluster = cluster_of(service)
    times = add_application_users(cluster, rate, round(rate * seconds), Texts(0))
    cluster.run()
    return times.figures()
