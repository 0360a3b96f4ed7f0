"""The commands of clients to an engine and its events: the one wire format, in process and over sockets.

A client opens **sequences** and puts **operations** on them. Operations of one sequence run in order; sequences run
beside each other. The client chooses the numbers of its sequences and operations, so nothing has to be waited for; a
number may be used once. Every `Append` with outputs and every `Generate` ends in exactly one of `Finished`, `Failed`
or `Cancelled`; an operation without outputs is silent unless it fails. All events of one step for one client travel
in one message.

Below sequences there are **spaces**: KV pages and embeddings that the client names and fills itself, by commands on
**queues**. Commands of one queue run in order; those of different queues of a space are ordered by `Sync` alone.

Handles belong to (client, tenant) and die with the client's lease.

The modules of this package own a group of messages each; users import from here. Every public
name of theirs is part of the format.
"""

from __future__ import annotations

# ruff: noqa: F403
from weft.core.wire.base import *
from weft.core.wire.codec import *
from weft.core.wire.control import *
from weft.core.wire.errors import *
from weft.core.wire.events import *
from weft.core.wire.info import *
from weft.core.wire.residency import *
from weft.core.wire.sequences import *
from weft.core.wire.spaces import *
