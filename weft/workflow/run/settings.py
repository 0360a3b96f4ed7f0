"""How a run uses its plans: one object for Python, HTTP and benchmarks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.abi.errors import InvalidRequest
from weft.config import MAX_PINNED_PART, PINNED_PART
from weft.workflow.analysis.objectives import WantedOutputs


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run does with its plans. Results are the same with every setting."""

    order: Annotated[bool, Meta(description="Calls leave in the order of the plan; else row by row.")] = True
    pins: Annotated[bool, Meta(description="Prefixes of prompts are kept in the KV cache from call to call.")] = True
    turns: Annotated[
        bool, Meta(description="Engines are told which conversations go on, and when; else as of any client.")
    ] = True
    engines: Annotated[bool, Meta(description="With several engines of a model: calls go to those of the plan.")] = True
    pinned_part: Annotated[
        float, Meta(ge=0, le=MAX_PINNED_PART, description="Part of each engine's pages that pins of one user may hold.")
    ] = PINNED_PART

    @property
    def planned_part(self) -> float:
        """What plans may pin: nothing, without pins."""
        return self.pinned_part if self.pins else 0.0

    @property
    def needs_plans(self) -> bool:
        """Whether any plan has to be made."""
        return self.order or self.pins or self.turns or self.engines


NO_PLANS = PlanSettings(order=False, pins=False, turns=False, engines=False)


def plan_settings(given: PlanSettings | Mapping[str, Any] | bool, pinned_part: float = PINNED_PART) -> PlanSettings:
    """The settings that a user means; False: nothing is planned. `pinned_part` holds where the user says none. Raises
    `InvalidRequest`."""
    if isinstance(given, bool):
        return PlanSettings(pinned_part=pinned_part) if given else NO_PLANS
    if isinstance(given, PlanSettings):
        return given
    try:
        return msgspec.convert({"pinned_part": pinned_part, **given}, PlanSettings)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidRequest(f"planning: {error}", "planning") from None


def check_wanted(wanted: WantedOutputs, outputs: Collection[str]) -> None:
    """Raise `InvalidRequest` for an objective or an output that does not exist, and for a deadline without its seconds
    or the other way round."""
    try:
        wanted.by_output(outputs)
    except ValueError as error:
        raise InvalidRequest(f"objective: {error}", "objective") from None
