"""A draft, two critics, and a revision that goes on in the draft's conversation.

weft workflow run examples/workflows/reflection.py --row question='What makes bread rise?'
"""

import weft
from weft import ops


@weft.flow
def reflection(question):
    """The critics work at the same time."""
    draft = ops.llm([ops.system("Answer in two sentences."), ops.user(question)], max_tokens=60, temperature=0)
    critics = [
        ops.llm(f"{role}\nQuestion: {question}\nAnswer: {draft}", max_tokens=40, temperature=0)
        for role in ("Name a factual mistake.", "Name what is unclear.")
    ]
    return ops.llm([draft.chat, ops.user(f"Revise your answer.\n{ops.join(critics)}")], max_tokens=60, temperature=0)
