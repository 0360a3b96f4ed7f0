"""A text is revised until a judge, whose answer has a form, says that it is good.

weft workflow run examples/workflows/verdict_loop.py --row topic='a lighthouse'
"""

import dataclasses

import weft
from weft import ops


@dataclasses.dataclass
class Verdict:
    """What the judge answers."""

    good: bool


@weft.flow
def verdict_loop(topic):
    """The loop ends on a field of the verdict, or after three rounds."""
    draft = ops.llm(f"Write a sentence about {topic}.", max_tokens=40, temperature=0)

    def better(text):
        return ops.llm(f"Improve this sentence: {text}", max_tokens=40, temperature=0)

    def is_good(text):
        return ops.llm(f"Is this sentence good? {text}", schema=Verdict, max_tokens=20, temperature=0).good

    return ops.loop(better, draft, until=is_good, max_rounds=3, at_limit="stop")
