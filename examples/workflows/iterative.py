"""A summary that is refined with one chunk of reviews after the other.

weft workflow run examples/workflows/iterative.py --row first="Good." --row second="Too loud." --row third="Fine."
"""

import weft
from weft import ops


@weft.flow
def iterative(first, second, third):
    """Each call needs the summary before it."""
    summary = ops.llm(f"Summarise these reviews:\n{first}", max_tokens=60, temperature=0)
    for chunk in (second, third):
        more = f"Summary so far: {summary}\nRefine it with these reviews:\n{chunk}"
        summary = ops.llm(more, max_tokens=60, temperature=0)
    return summary
