"""Two sides argue until one agrees, and a judge decides.

weft workflow run examples/workflows/debate.py --row question='Should cities ban cars?'
"""

import weft
from weft import ops

FOR = "Argue for the proposal. If the other side convinces you, say: I agree."
AGAINST = "Argue against the proposal. If the other side convinces you, say: I agree."


@weft.flow
def debate(question):
    """Each side goes on with its own conversation; the judge sees the last words of both."""
    pro = ops.llm([ops.system(FOR), ops.user(question)], max_tokens=60, temperature=0)
    con = ops.llm([ops.system(AGAINST), ops.user(question)], max_tokens=60, temperature=0)

    def turn(pro, con):
        return (
            ops.llm([pro.chat, ops.user(f"They say: {con}")], max_tokens=60, temperature=0),
            ops.llm([con.chat, ops.user(f"They say: {pro}")], max_tokens=60, temperature=0),
        )

    pro, con = ops.loop(
        turn, (pro, con), until=lambda pro, con: ops.matches(con, "I agree"), max_rounds=2, at_limit="stop"
    )
    verdict = ops.llm(f"For: {pro}\nAgainst: {con}\nWho is right?", max_tokens=40, temperature=0)
    return {"verdict": verdict, "pro": pro, "con": con}
