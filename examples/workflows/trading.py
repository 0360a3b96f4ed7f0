"""A trading desk of nineteen agents: analysts, a debate of researchers, traders with risk managers, a fund manager.

    weft workflow run examples/workflows/trading.py --rows stocks.jsonl

with the columns prices, posts, news, fundamentals. After the workflow that Helium (2026) is measured with.
"""

import weft
from weft import ops

ANALYSTS = ("prices", "posts", "news", "fundamentals")
TRADERS = ("value", "growth", "momentum", "news", "income", "contrarian", "index", "event")
RISKS = ("aggressive", "neutral", "conservative")
DEBATE_ROUNDS, RISK_ROUNDS = 2, 2
LIMIT = {"max_tokens": 40, "temperature": 0}


def ask(role: str, text: str):
    """One call of an agent."""
    return ops.llm([ops.system(f"You are {role} of a trading firm."), ops.user(text)], **LIMIT)


def research(findings):
    """Two researchers debate the findings, and their manager decides."""
    bull, bear = (ask(f"the {side} researcher", f"{findings}\nMake your case.") for side in ("bullish", "bearish"))
    for _ in range(DEBATE_ROUNDS - 1):
        bull, bear = (
            ops.llm([bull.chat, ops.user(f"The bearish researcher says: {bear}")], **LIMIT),
            ops.llm([bear.chat, ops.user(f"The bullish researcher says: {bull}")], **LIMIT),
        )
    return ask("the research manager", f"{findings}\nFor: {bull}\nAgainst: {bear}\nDecide.")


def trade(style: str, findings, thesis):
    """A trader proposes, risk managers comment in rounds, and the trader decides."""
    proposal = ask(f"the {style} trader", f"{findings}\nThesis: {thesis}\nPropose a trade.")
    comments = [ask(f"the {risk} risk manager", f"Thesis: {thesis}\nProposal: {proposal}") for risk in RISKS]
    for _ in range(RISK_ROUNDS - 1):
        said = ops.join(comments)
        comments = [ops.llm([comment.chat, ops.user(f"The others say:\n{said}")], **LIMIT) for comment in comments]
    return ops.llm([proposal.chat, ops.user(f"Risk managers say:\n{ops.join(comments)}\nDecide.")], **LIMIT)


@weft.flow
def trading(prices, posts, news, fundamentals):
    """A recommendation for one stock."""
    data = dict(zip(ANALYSTS, (prices, posts, news, fundamentals), strict=True))
    findings = ops.join([ask(f"the analyst of {name}", f"{text}\nSum up.") for name, text in data.items()])
    thesis = research(findings)
    decisions = ops.join([trade(style, findings, thesis) for style in TRADERS])
    return ask("the fund manager", f"Decisions:\n{decisions}\nGive one recommendation.")
