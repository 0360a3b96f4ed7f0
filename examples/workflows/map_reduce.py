"""Several experts answer a question on their own, and a summariser joins their answers.

weft workflow run examples/workflows/map_reduce.py --row question='Why is the sky blue?'
"""

import weft
from weft import ops

EXPERTS = ("a physicist", "a painter", "a sailor", "a teacher")


@weft.flow
def map_reduce(question):
    """The experts share the question; the summary comes last."""
    opinions = [
        ops.llm(
            [ops.system(f"You are {expert}."), ops.user(question)], max_tokens=60, temperature=0, name=f"expert_{n}"
        )
        for n, expert in enumerate(EXPERTS)
    ]
    return ops.llm(f"Question: {question}\nOpinions:\n{ops.join(opinions)}\nSum up.", max_tokens=80, temperature=0)
