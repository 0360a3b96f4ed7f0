"""Experts with different roles read every chunk of a document, and a writer makes a report of what they found.

weft workflow run examples/workflows/parallel_chains.py --row document='Good value. Arrived late.'
"""

import weft
from weft import ops

ROLES = ("price", "quality", "delivery")


@weft.flow
def parallel_chains(document):
    """How many chunks there are is known when the workflow runs."""
    chunks = ops.split(document, max_tokens=200)

    def read(role):
        def one(chunk):
            return ops.llm(f"What does this say about {role}?\n{chunk}", max_tokens=30, temperature=0)

        return ops.llm(f"Findings on {role}:\n{ops.join(ops.map(one, chunks))}\nSum up.", max_tokens=40, temperature=0)

    return ops.llm(f"Write a report.\n{ops.join([read(role) for role in ROLES])}", max_tokens=80, temperature=0)
