"""`SchedulerState`: everything that scheduling knows between two calls.

Owns the parts and how they are joined. `commands.py`, `operations.py`, `outcome.py` and `planner.py` are the
transitions on it; `Scheduler` alone calls them from outside.
"""

from __future__ import annotations

from weft.cache.manager import KVCache
from weft.core.cost.model import CostModel
from weft.core.place_forecast import PlaceForecast
from weft.sched.config import SchedulerConfig, prompt_budget
from weft.sched.event_log import EventLog
from weft.sched.interception import Interception
from weft.sched.order import FairOrder
from weft.sched.policies import InterceptPolicy
from weft.sched.reclaim import Reclaimer
from weft.sched.residency import Residency
from weft.sched.sequence_table import SequenceTable
from weft.sched.service_classes import ServiceClasses
from weft.sched.spaces.place import Placer, PlacerSizes
from weft.sched.spaces.pool import SpacePool
from weft.sched.spaces.spaces import Spaces
from weft.sched.spaces.waits import SpaceWaits
from weft.sched.step_share import StepShare


class SchedulerState:
    """The sequences, the spaces, their pages, and what has happened since the last call."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, policy: InterceptPolicy, costs: CostModel | None):
        self.config = config
        self.cache = cache
        self.sequences = SequenceTable(
            cache,
            FairOrder(config.aging_s, config.max_context),
            max_running=config.max_running,
            max_context=config.max_context,
        )
        self.services = ServiceClasses(self.sequences, StepShare(costs, config.latency_factor, config.min_share))
        self.log = EventLog(traces=config.trace)
        self.interception = Interception(cache, self.sequences, config, policy, costs)
        self.residency = Residency(cache, self.sequences, self.interception, self.log)
        most_prompts = prompt_budget(config, config.max_running, cache.page_size)
        self.reclaimer = Reclaimer(cache, self.sequences, self.interception, self.log, most_prompts, config.aging_s)
        self.spaces = _spaces(config, cache, self.log, self.reclaimer, self.interception)
        self.interception.explicit = self.spaces.waits
        self.reclaimer.last_resort = self.spaces.end_youngest
        self.places = PlaceForecast()
        """When a generation that finds the queue full can expect a place: each end of a generation frees one."""
        self.last_step_id = 0
        """The last step that was launched."""


def _spaces(
    config: SchedulerConfig, cache: KVCache, log: EventLog, reclaimer: Reclaimer, interception: Interception
) -> Spaces:
    num_slots = config.max_running if config.num_device_slots is None else config.num_device_slots
    pool = SpacePool(
        cache, int(cache.tiers.device.num_pages * config.space_fraction), config.num_embeds, reclaimer.make_free
    )
    sizes = PlacerSizes(
        page_size=cache.page_size,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        max_inputs=max(config.max_step_tokens - config.max_running, config.max_step_tokens // 2, 1),
    )
    refusal = "explicit pages are not supported for models with sliding windows; use sequences" * config.has_windows
    placer = Placer(pool, sizes=sizes, slots=range(config.max_running, num_slots))
    waits = SpaceWaits(cache, pool, interception, reclaimer.make_back)
    return Spaces(pool, placer, waits, log, aging_s=config.aging_s, alloc_wait_s=config.alloc_wait_s, refusal=refusal)
