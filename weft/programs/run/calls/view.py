"""`RunView`: what the traits of one run share. Made by `weft.programs.run.context`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from weft.abi.errors import InvalidRequest, LimitExceeded
from weft.programs.quota.budget import RunBudget
from weft.programs.run.calls.pending_calls import PendingCalls
from weft.programs.run.messages import UnreadBytes
from weft.programs.run.model import ProgramModel
from weft.programs.run.services import Outlet, Services
from weft.programs.types import Caller

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What msgspec raises for JSON of a program that cannot be used: also nested too deeply, or not UTF-8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, as its traits see it."""

    calls: PendingCalls
    services: Services
    caller: Caller
    budget: RunBudget
    outlet: Outlet
    waiting: UnreadBytes

    @property
    def model(self) -> ProgramModel:
        """The one it runs beside."""
        return self.services.model

    def check_message(self, message: bytes) -> None:
        """Raise `LimitExceeded` for one that is too long."""
        most = self.budget.limits.message_bytes
        if len(message) > most:
            raise LimitExceeded(f"a message has {len(message)} bytes; the limit is {most}", "message_bytes")


def check_size(blob: bytes, most: int, name: str) -> None:
    """Raise `InvalidRequest`, naming the field, for one that is longer than `most`."""
    if len(blob) > most:
        raise InvalidRequest(f"{name} has {len(blob)} bytes; at most {most} are taken at once", name)


def text_of(blob: bytes, name: str) -> str:
    """UTF-8 to text. Raises `InvalidRequest`, naming the field."""
    try:
        return blob.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8", name) from error
