"""Questions about a document that is longer than a context: notes on each part, then an answer from the notes.

weft workflow run examples/workflows/long_document.py:by_parts --row document='...' --row question='Who wrote it?'
"""

import weft
from weft import ops


@weft.flow
def by_parts(document, question):
    """Map-reduce: all parts at once."""
    parts = ops.split(document, max_tokens=300, overlap_tokens=20)
    notes = ops.map(lambda part: ops.llm(f"{part}\n\nWhat helps to answer: {question}", max_tokens=40), parts)
    return ops.llm(f"{ops.join(notes)}\n\n{question}", max_tokens=60)


@weft.flow
def in_a_chain(beginning, middle, end, question):
    """A chain: each part is read with the notes on those before it."""
    notes = ""
    for part in (beginning, middle, end):
        notes = ops.llm(f"Notes: {notes}\nText: {part}\nNote what helps to answer: {question}", max_tokens=40)
    return ops.llm(f"{notes}\n\n{question}", max_tokens=60)
