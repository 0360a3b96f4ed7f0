"""`ProgramHost`: runs programs in this process, on the event loop it is used from.

Owns the set of runs and the decision when each may start: caps per tenant and server, and a bounded queue in order of
arrival. `weft.programs.host.run_task` executes one run. Used in the program host's process
(`weft.programs.host.process`), and inline by tests, `weft run` and `weft.LLM`.

Children do not wait in the queue: a parent that waits for its child while the child waits for the parent's place is a
deadlock. The limits of the parent's run and the caps bound their number.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from weft.abi.errors import Draining, InvalidRequest, Overloaded, UnknownProgram, Unsupported
from weft.programs.history import History
from weft.programs.host.guest_factory import GuestFactory
from weft.programs.host.run_task import RunTask
from weft.programs.network.client import Network
from weft.programs.quota.account import NoPlace
from weft.programs.quota.accounts import Accounts
from weft.programs.quota.budget import RunBudget
from weft.programs.quota.loop_share import LoopShare
from weft.programs.registry import Code, Quota, checked_code
from weft.programs.run.messages import Hub
from weft.programs.run.model import ProgramModel
from weft.programs.run.runs import Run, RunSpec
from weft.programs.run.services import ChildRun, ChildSpec, Services
from weft.programs.types import Caller
from weft.store.values import ValueStore

CHARGE_EVERY_S = 1.0
Resolve = Callable[[str, str], Awaitable[Code]]
"""(tenant, reference) -> the program. Raises `UnknownProgram`."""


class RunHost(Protocol):
    """A host of programs, in this or another process, as routes, the offline API and the command line use it."""

    @property
    def history(self) -> History:
        """The present runs and those kept after their end."""

    async def start(self, spec: RunSpec, caller: Caller) -> Run:
        """Launch a run. Raises `Overloaded`, `Unsupported`, `HostDead`."""

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Count processor time that was spent for a tenant outside of its runs against its rate."""

    async def close(self) -> None:
        """Cancel all runs and stop the host."""


class HostOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on the runs that a host takes, and whether it runs trusted ones."""

    max_waiting: int = 4096
    """Most runs that wait for a place."""
    tenant_max_waiting: int = 1024
    tenant_max_input_bytes: int = 256 << 20
    """Most bytes of arguments and sources of a tenant's runs that wait or run, and of messages that came before their
    starts."""
    allow_trusted: bool = False
    max_ended: int = 200
    """Number of ended runs of each tenant that are kept."""


async def _nothing_uploaded(tenant: str, reference: str) -> Code:
    raise UnknownProgram(f"There is no program {reference[:80]!r}: nothing is uploaded here.", "program")


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """The parts of a host: models, guests, network and store. `close` closes all of them."""

    models: Sequence[ProgramModel]
    """At least one; the first is the default. Several of one name are engines of one model."""
    store: ValueStore
    network: Network
    guests: GuestFactory
    hub: Hub = field(default_factory=Hub)
    accounts: Accounts = field(default_factory=Accounts)
    resolve: Resolve = _nothing_uploaded
    quota: Quota = field(default_factory=Quota)
    """Bounds the size of sources that programs launch."""

    async def close(self) -> None:
        """Close guests, network, store and models, in this order."""
        await self.guests.close()
        await self.network.close()
        await self.store.close()
        for model in self.models:
            model.close()


class ProgramHost:
    """The runs of one process: waiting, running, and their children."""

    def __init__(self, parts: HostParts, options: HostOptions | None = None, history: History | None = None):
        self.options = options or HostOptions()
        self.history = history or History(max_ended=self.options.max_ended)
        self._parts = parts
        self._by_name: dict[str, list[ProgramModel]] = {}
        for model in parts.models:
            self._by_name.setdefault(model.name, []).append(model)
        self._waiting: dict[str, deque[tuple[int, RunTask]]] = {}
        """Tenant -> (order of arrival, waiting run), in order of arrival; no queue is empty."""
        self._num_waiting = 0
        self._input_bytes: Counter[str] = Counter()
        """Tenant -> the bytes that `tenant_max_input_bytes` bounds, without children."""
        self._arrivals = itertools.count()
        self._loop_share = LoopShare()
        self._active: set[RunTask] = set()
        self._refusals: dict[str, NoPlace] = {}
        """Tenant -> why its runs wait, for tenants that have used up their own share."""
        self._full: NoPlace | None = None
        """Why all runs wait, if the whole server has no place."""
        self._retry: asyncio.TimerHandle | None = None
        self._charging: asyncio.Task[None] | None = None
        self._closed = False
        self.on_run: Callable[[Run], None] | None = None
        """Called with every run, also of children, before its first change."""

    async def start(self, spec: RunSpec, caller: Caller) -> Run:
        """Launch a run. Raises the errors of `launch`."""
        return self.launch(spec, caller)

    def charge(self, tenant: str, cpu_s: float) -> None:
        """Count processor time that was spent for a tenant outside of its runs against its rate."""
        self._parts.accounts.charge(tenant, cpu_s)

    def launch(self, spec: RunSpec, caller: Caller, *, id: str = "") -> Run:
        """Create a run that starts now, or when there is a place for it.

        Raises `Overloaded` if too many wait, `Unsupported` for a trusted program if none is allowed, `InvalidRequest`
        for an unknown model, or for a sandbox that does not fit even alone.
        """
        model = self._model(spec.model, caller.tenant)
        if spec.trusted and not self.options.allow_trusted:
            raise Unsupported("Programs run in the sandbox here; trusted ones are not allowed.", "trusted")
        if not spec.trusted:
            self._parts.accounts.check_possible(caller.tenant, spec.limits)
        self._check_room(caller.tenant, len(spec.args) + len(spec.code.content))
        run = Run(spec, caller.tenant, id=id, model=model.name)
        run_task = RunTask(run, caller, hold=self._hold, on_withdrawn=self._withdrawn, charge_late=self.charge)
        self._add(run)
        self._input_bytes[caller.tenant] += run_task.input_bytes
        self._waiting.setdefault(caller.tenant, deque()).append((next(self._arrivals), run_task))
        self._num_waiting += 1
        self._start_waiting()
        return run

    async def close(self) -> None:
        """End every run, and wait until all have released their resources. Idempotent."""
        self._closed = True
        for waiting in list(self._waiting.values()):
            for _, run_task in list(waiting):
                run_task.run.cancel("the program host was stopped")
        for run_task in list(self._active):
            run_task.run.cancel("the program host was stopped")
        tasks = [run_task.task for run_task in self._active if run_task.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._charging is not None:
            self._charging.cancel()
        if self._retry is not None:
            self._retry.cancel()

    # ---- children

    async def launch_child(self, parent: RunTask, spec: ChildSpec, caller: Caller, budget: RunBudget) -> ChildRun:
        """Start a run within its parent's budget. Raises `InvalidRequest` for an invalid program."""
        try:
            if spec.source is not None:
                code = checked_code(spec.source.encode("utf-8", "surrogatepass"), "python", self._parts.quota)
                await self._parts.guests.checker.check(caller.tenant, code, budget.spend_tenant_cpu)
            else:
                code = await self._parts.resolve(caller.tenant, spec.program or "")
            if self._closed or parent.run.ended:
                raise Draining("the program that launches is over, or the host is stopping")
        except BaseException:
            budget.close()
            raise
        # A source that a program launches runs in the sandbox, also if the program is trusted: often a model wrote it.
        trusted = code.trusted and self.options.allow_trusted
        if trusted:
            budget.without_sandbox()
        own = RunSpec(code=code, args=spec.args, limits=budget.limits, trusted=trusted, model=parent.run.spec.model)
        run = Run(own, caller.tenant, parent=parent.id, model=self._model(own.model, caller.tenant).name)
        child = RunTask(run, caller, hold=self._hold, on_withdrawn=self._withdrawn, charge_late=self.charge)
        self._add(run)
        self._begin(child, budget)
        return child

    # ---- inside

    def _add(self, run: Run) -> None:
        self.history.add(run)
        if self.on_run is not None:
            self.on_run(run)

    def _model(self, name: str, tenant: str) -> ProgramModel:
        """The model of a run. Of several engines it is always the same one for a tenant: its runs share exported
        pages."""
        models = self._by_name.get(name or self._parts.models[0].name)
        if models is None:
            raise InvalidRequest(f"No model {name[:80]!r} is here; there are {', '.join(self._by_name)}.", "model")
        return models[zlib.crc32(tenant.encode()) % len(models)]

    def _check_room(self, tenant: str, input_bytes: int) -> None:
        if self._closed:
            raise Draining("The program host is stopping and takes no new runs.")
        if self._num_waiting >= self.options.max_waiting:
            raise self._too_many(f"{self._num_waiting} runs wait for a place, as many as may", tenant)
        if len(self._waiting.get(tenant, ())) >= self.options.tenant_max_waiting:
            raise self._too_many(f"{self.options.tenant_max_waiting} of your runs wait for a place", tenant)
        self._check_input(tenant, input_bytes)

    def _check_input(self, tenant: str, num_bytes: int) -> None:
        most = self.options.tenant_max_input_bytes
        if self._input_bytes[tenant] + num_bytes > most:
            raise Overloaded(
                f"Your runs hold {most} bytes of arguments, sources and messages, or would; try again shortly."
            )

    def _hold(self, tenant: str, num_bytes: int) -> None:
        """Count more bytes of a run. Raises `Overloaded`."""
        self._check_input(tenant, num_bytes)
        self._input_bytes[tenant] += num_bytes

    def _too_many(self, what: str, tenant: str) -> Overloaded:
        why = self._refusals.get(tenant) or self._full
        if why is None:
            return Overloaded(f"{what}; try again shortly")
        return Overloaded(f"{what}: {why.message}", retry_after_s=why.retry_after_s)

    def _start_waiting(self) -> None:
        """Start the runs that have a place, in order of arrival. A tenant at its cap does not block other tenants. If
        the server has no place for a run, no later run passes it, so that a large sandbox does not starve."""
        refusals: dict[str, NoPlace] = {}
        self._full = None
        while not self._closed:
            heads = [(waiting[0][0], tenant) for tenant, waiting in self._waiting.items() if tenant not in refusals]
            if not heads:
                break
            tenant = min(heads)[1]
            run_task = self._waiting[tenant][0][1]
            spec = run_task.run.spec
            try:
                budget = self._parts.accounts.open(tenant, spec.limits, sandboxed=not spec.trusted)
            except NoPlace as refusal:
                refusal.__traceback__ = None  # its frames hold this run, and would keep it after its end
                if refusal.everybody:
                    self._full = refusal
                    break
                refusals[tenant] = refusal
                continue
            self._withdraw(run_task)
            self._begin(run_task, budget)
        self._refusals = refusals
        self._try_again()

    def _try_again(self) -> None:
        """Start waiting runs again when the first rate has recovered, which needs no end of a run."""
        if self._retry is not None:
            self._retry.cancel()
        self._retry = None
        waits_s = [refusal.retry_after_s or 0.0 for refusal in self._refusals.values() if refusal.in_time]
        if waits_s and not self._closed:
            self._retry = asyncio.get_running_loop().call_later(min(waits_s), self._start_waiting)

    def _withdraw(self, run_task: RunTask) -> None:
        """Remove a run from its tenant's queue."""
        waiting = self._waiting.get(run_task.run.tenant, deque())
        for entry in waiting:
            if entry[1] is run_task:
                waiting.remove(entry)
                self._num_waiting -= 1
                break
        if not waiting:
            self._waiting.pop(run_task.run.tenant, None)

    def _let_go(self, run_task: RunTask) -> None:
        """Stop counting the bytes of a run."""
        tenant = run_task.run.tenant
        if run_task.run.record().parent is None:
            self._input_bytes[tenant] -= run_task.input_bytes
        if not self._input_bytes[tenant]:
            del self._input_bytes[tenant]

    def _withdrawn(self, run_task: RunTask) -> None:
        """Handle the end of a run that waited."""
        self._withdraw(run_task)
        self._let_go(run_task)
        self.history.ended(run_task.run)

    def _begin(self, run_task: RunTask, budget: RunBudget) -> None:
        parts, tenant = self._parts, run_task.run.tenant
        launcher = _ChildLauncher(self, run_task)
        services = Services(
            model=self._model(run_task.run.spec.model, tenant),
            models=lambda: [self._model(name, tenant) for name in self._by_name],
            hub=parts.hub,
            store=parts.store,
            network=parts.network.of(run_task.run.tenant),
            launcher=launcher,
            loop_share=self._loop_share,
        )
        self._active.add(run_task)
        run_task.begin(services, launcher, parts.guests, budget)
        if run_task.task is None:
            self._over(run_task)
            return
        run_task.task.add_done_callback(lambda _: self._over(run_task))
        if self._charging is None or self._charging.done():
            self._charging = asyncio.create_task(self._charge(), name="weft-charge")

    def _over(self, run_task: RunTask) -> None:
        self._active.discard(run_task)
        self._let_go(run_task)
        self.history.ended(run_task.run)
        if not self.options.max_ended:  # whoever keeps ended runs was told; its parent may keep the run for its result
            run_task.run.drop_messages()
        self._start_waiting()

    async def _charge(self) -> None:
        while self._active:
            await asyncio.sleep(CHARGE_EVERY_S)
            for run_task in list(self._active):
                run_task.settle_cpu()


class _ChildLauncher:
    """Launches the children of one run."""

    def __init__(self, host: ProgramHost, parent: RunTask):
        self._host, self._parent = host, parent

    async def launch(self, spec: ChildSpec, caller: Caller, budget: RunBudget) -> ChildRun:
        return await self._host.launch_child(self._parent, spec, caller, budget)
