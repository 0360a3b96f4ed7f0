"""A row that waits for a person: an answer is sent when it is approved.

The person's decision comes from outside; a server takes it over HTTP, and Python code gives a coroutine as `external`.
"""

import weft
from weft import ops

APPROVAL = {"type": "object", "properties": {"approved": {"type": "boolean"}, "note": {"type": "string"}}}


@weft.flow
def person(letter):
    """While a person reads, the KV of the draft waits; the revision goes on in its conversation."""
    draft = ops.llm(f"Answer this letter: {letter}", max_tokens=60, temperature=0)
    decision = ops.external(schema=APPROVAL, name="decision")
    return ops.switch(
        decision.approved,
        {True: lambda: draft},
        lambda: ops.llm([draft.chat, ops.user(f"Change it: {decision.note}")], max_tokens=60, temperature=0),
    )
