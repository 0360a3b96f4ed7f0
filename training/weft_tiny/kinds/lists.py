"""Summaries of short lists: counts, names, the dearest and the cheapest item."""

from __future__ import annotations

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.grammar import Draw, Phrases, join

SHOW = Phrases(
    "(Can|Could) you (summarize|sum up) (this|the) list(?| for me?)\n{l}", "(Describe|Recap) (this|the) list: {i}",
    "{i} - (summary|sum it up|summarize).", "Summary\n{l}",
    "(This|Here) is what I (have|need|bought): {i}. (Sum it up.|Summarize.|Summary?)",
    "{l}\n(Summary|Recap|Overview), please.", "Overview of: {i}", "(What do I have here|What is all this)?\n{l}",
    "(Read|Take|See) this list: {i}. (Then|Now) sum it up.", "{l}\n\nTell me what is on it.",
    "Report on this list: {i}", "I need a (short |)summary. {i}", "(Put|Say) this list in (short|a sentence): {i}",
    "(Stock|Shopping|Basket|Bill): {i}. Summary.", "To sum up:\n{l}",
    "(Summarize|Summarise|Sum up) this list:\n{l}", "{l}\n\n(Summarize|Summarise|Sum up) the list.",
    "List: {i}\nSummary:",
    "Give me a summary of these (items|things|goods): {i}", "Here is (my|a|the) list: {i}. (Summarize|Sum up) it.",
    "Write a short summary of this list.\n{l}", "What is on this list?\n{l}", "Items:\n{l}\n\nSummary please.",
    "{i}\n\nSummary?", "Summary of this list please: {i}", "I bought these: {l}\nSum it up.",
    "Look at the list and sum it up.\n{l}", "Prices: {i}. Give me a summary.",
    "Short summary of: {i}", "Goods:\n{l}\n\nWrite a summary.", "Make a summary. {i}",
    "~Tell me in short what this list says: {i}", "~I have these on my list:\n{l}\nDescribe it in short.",
)  # fmt: skip
ASK_COUNT = Phrases(
    "How many things are (there|on it|in it)?", "What is the count?", "The number of items?",
    "(Say|Give me) the number of (items|things).", "How many lines does it have?", "How many do I have?",
    "How many are listed?", "Can you count (the items|them)?", "Count (them|the things|the goods).",
    "How many different items are there?",
    "How many items are (there|on the list)?", "Count the items.", "How many things are listed?",
    "How long is the list?",
    "What is the number of items?", "How many goods are there?", "How many items?",
    "Tell me how many items there are.", "How many did I list?", "~How many entries does the list have?",
    "~Give the count of items.",
)  # fmt: skip
ASK_MOST = Phrases(
    "(Which|What) (item|thing) is the dearest?", "(Tell me|Say) the most expensive (item|thing|one).",
    "What has the highest price?", "Which (item|thing) has the highest price?", "(Which|What) is (the |)priciest?",
    "What is the costliest item?", "The dearest?", "Which one is dearest?", "Which (thing|one) costs most?",
    "Highest price?", "Look for the (highest|top) price.", "Which (item|one) would cost me the most?",
    "(Which|What) is the most expensive (item|one)?", "(Which|What) item costs the most?", "What is the dearest item?",
    "Which one has the highest price?", "Name the most expensive item.",
    "What costs the most?", "The most expensive one?", "Which of these is the most expensive?",
    "Where is the price the highest?", "Find the most expensive item.", "~For which item do I pay the most?",
    "~Tell me the item with the highest price.",
)  # fmt: skip
ASK_LEAST = Phrases(
    "(Which|What) (item|thing) is the cheapest?", "(Tell me|Say) the cheapest (item|thing|one).",
    "What has the lowest price?", "Which (item|thing) has the lowest price?", "(Which|What) is cheapest?",
    "What is the least expensive item?", "The cheapest?", "Which one is cheapest?", "Which (thing|one) costs least?",
    "Lowest price?", "Look for the (lowest|smallest) price.", "Which (item|one) would cost me the least?",
    "(Which|What) is the cheapest (item|one)?", "(Which|What) item costs the least?", "Which one has the lowest price?",
    "Name the cheapest item.", "What costs the least?", "The cheapest one?", "Which of these is the cheapest?",
    "Where is the price the lowest?", "Find the cheapest item.", "~For which item do I pay the least?",
    "~Tell me the item with the lowest price.",
)  # fmt: skip
ASK_NAMES = Phrases(
    "(Which|What) (things|goods) are there?", "What is (there|on it|listed)?", "Names only.",
    "(Give|Show|Tell) me all (names|things|items).", "What items do I have?", "Read out the (names|items).",
    "Without prices, what is listed?", "Only the names of the items.", "Which items are (there|these)?",
    "Say what is listed.", "Drop the prices.", "What are (the items|these)?", "(Write|Put) down the names.",
    "All the names, please.",
    "Name all (the |)items.", "(Which|What) items are on the list?", "List the names only.", "Join the names.",
    "Give me (only |)the names.", "Just the names, please.", "What did I list?", "Tell me all items.",
    "Which goods are there?", "Say the names.", "~What are the items called?",
    "~Leave out the prices and tell me the items.",
)  # fmt: skip
ASK_PRICE = Phrases(
    "{n}?", "The {n}?", "What about the {n}?", "What is the {n}?", "The {n} is how much?", "How much for the {n}?",
    "(Give|Show) me the price of the {n}.", "What would the {n} cost?", "What do they want for the {n}?",
    "And how much is the {n}?", "I want the {n}. What does it cost?", "Cost of the {n}?", "Find the price of the {n}.",
    "How much is the {n}?", "What does the {n} cost?", "What is the price of the {n}?", "How much does the {n} cost?",
    "And the {n}?", "Price of the {n}?", "Tell me the price of the {n}.", "How many dollars is the {n}?",
    "~What must I pay for the {n}?", "~At what price is the {n}?",
)  # fmt: skip
QUESTION = Phrases(
    "(This|Here) is what I have: {i}. {q}", "{l}\n\n(Question|Now|So|Q): {q}",
    "(Stock|Basket|Bill|Offer|Menu): {i}. {q}", "{q} (It is about|Look at|See): {i}", "{q}\n\n{l}",
    "(Read|Take|See|Check) this list.\n{l}\n{q}", "{i} {q}", "{i}\n\n{q}", "{q}\nList: {i}",
    "(On|In) my list: {i}. {q}", "{l}\n---\n{q}", "(Please answer|Answer): {q}\n{l}",
    "{l}\n\n{q}", "Here is (my|a|the) list:\n{l}\n{q}", "{q}\n{l}", "List: {i}\n{q}", "{q} {i}", "Items: {i}. {q}",
    "Prices:\n{l}\n\n{q}", "Shop: {i}. {q}", "I have a list. {i}. {q}", "{l}\n{q}", "Goods: {i}\n\nQuestion: {q}",
    "From this list: {i}. {q}", "~Look at these: {i}. {q}", "~My shopping list:\n{l}\n\nNow, {q}",
)  # fmt: skip


def make(draw: Draw) -> Example:
    """A priced list with a summary or with one to three questions."""
    count = draw.rng.randint(2, draw.level + 1)
    names = draw.values(words.GOODS, count)
    top = draw.pick((9, 80, 99, 500)[: draw.level])
    prices: list[int] = []
    while len(prices) < count:
        price = draw.number(1, top)
        if price not in prices:
            prices.append(price)
    style = draw.pick((": {p}", " ${p}", " - {p} dollars", " ({p} dollars)", ": ${p}", ", {p} euros"))
    entries = [name + style.replace("{p}", str(price)) for name, price in zip(names, prices, strict=True)]
    mark = draw.pick(("- ", "* ", "", "{n}. "))
    lines = "\n".join(mark.replace("{n}", str(index)) + entry for index, entry in enumerate(entries, 1))
    inline = ("; " if ", " in style else ", ").join(entries)
    most, least = names[prices.index(max(prices))], names[prices.index(min(prices))]
    if draw.chance(0.4):
        answer = f"{count} items: {join(names)}. The most expensive is {most} at {max(prices)}."
        messages = [user(draw.phrase(SHOW, l=lines, i=inline)), assistant(answer)]
        return Example("list", messages, [Check(exact=answer)])
    some = draw.pick(names)
    options = (
        (draw.phrase(ASK_COUNT), f"There are {count} items."),
        (draw.phrase(ASK_MOST), f"The most expensive is {most} at {max(prices)}."),
        (draw.phrase(ASK_LEAST), f"The cheapest is {least} at {min(prices)}."),
        (draw.phrase(ASK_NAMES), f"The items are {join(names)}."),
        (draw.phrase(ASK_PRICE, n=some), f"The {some} costs {prices[names.index(some)]}."),
    )
    messages, checks = [], []
    for index, (question, answer) in enumerate(draw.some(options, draw.rng.randint(1, 3))):
        prompt = draw.phrase(QUESTION, l=lines, i=inline, q=question) if index == 0 else question
        messages += [user(prompt), assistant(answer)]
        checks.append(Check(exact=answer))
    return Example("list", messages, checks)
