"""Summaries of short lists: counts, names, the dearest and the cheapest item."""

from __future__ import annotations

from training.weft_tiny import words
from training.weft_tiny.examples import Check, Example, assistant, user
from training.weft_tiny.grammar import Draw, Phrases, join

SHOW = Phrases(
    "summarize: {i}", "summary pls: {i}", "please sum up\n{l}", "{l}\nsum this up for me",
    "{l}\n\nCan you (summarize|sum up|recap) (this|that|it)?",
    "{i}. (Can|Could) you (summarize|sum up) this(| for me)?",
    "(I want|I'd like|We need) a (short |)summary of this list.\n{l}",
    "(Please |)(summarize|sum up) (my|the) (list|items|shopping): {i}",
    "In (short|a few words|one or two sentences), what is on this list? Sum it up.\n{l}",
    "(Make|Give me|Write) a (recap|summary|short summary) of (this|the following).\n{l}",
    "{l}\n\n(Make|Give me|Write) a (recap|summary|short summary).",
    "Below (is|you see) a list. (Summarize|Sum up|Recap) it.\n\n{l}",
    "{l}\n\nAbove is a list. (Summarize|Sum up|Recap) it.",
    "(This|Here) is a list of (items|goods|things) with prices. Sum it up.\n{l}",
    "{i}\n(Task|To do): (summarize|sum up|recap)", "Task: (summarize|sum up) the list.\nList: {i}",
    "Task: summary\n\n{l}", "List:\n{l}\nSummary:", "### List\n{l}\n### Summary",
    "Summary of my (list|basket|order|shopping):\n{l}",
    "My (order|basket|bill|shopping list):\n{l}\n(Summary|Sum it up), please.", "Order: {i}\nSummary?",
    '"{i}" - please sum this up.', "(Tell me|Say) in (short|brief) what this list has: {i}. Just a summary.",
    "How would you (sum up|summarize) this list?\n{l}", "What does this list say, summed up? {i}",
    "A (quick|short|brief) (summary|recap|overview) of these prices: {i}",
    "(Quick|Short|Brief) (recap|overview), please.\n{l}",
    "I went shopping. {i}. (Summarize|Sum up) what I (bought|got).", "The shop has these: {i}. (Summarize|Sum up).",
    "We sell these.\n{l}\nSum it up for (a customer|my boss|me).", "I need this list in short form: {i}",
    "{l}\n---\n(Summary|Summarize|Recap)", "Do me a favor and sum up this list.\n{l}", "Let me have a summary of: {i}",
    "For my (boss|notes|report), I need a summary of this list: {i}",
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
    "how many items", "count", "count please", "How many (entries|products|lines|goods) are (there|on the list)?",
    "(Can|Could) you tell me how many (items|things|entries) there are?",
    "(Please |)count the (entries|lines|products|things on the list).", "Number of (items|entries|things)?",
    "The list has how many (items|entries|things)?", "There are how many (items|things)?",
    "What is the (total |)number of (things|entries|goods)?", "What number of items is (on|in) the list?",
    "I (want|need) to know how many (items|things) (there are|I have).", "Do you know how many items there are?",
    "How many (different |)(things|goods|products) did I (list|write down|name)?",
    "How many (rows|lines|entries) are in this?",
    "Say how many (items|entries|things) (there are|are listed|the list has).", "How big is the list?",
    "Count all (items|entries|things) for me.",
    "How many things are (there|on it|in it)?", "What is the count?", "The number of items?",
    "(Say|Give me) the number of (items|things).", "How many lines does it have?", "How many do I have?",
    "How many are listed?", "Can you count (the items|them)?", "Count (them|the things|the goods).",
    "How many different items are there?",
    "How many items are (there|on the list)?", "Count the items.", "How many things are listed?",
    "How long is the list?", "What is the number of items?", "How many goods are there?", "How many items?",
    "Tell me how many items there are.", "How many did I list?", "~How many entries does the list have?",
    "~Give the count of items.",
)  # fmt: skip
ASK_MOST = Phrases(
    "most expensive?", "what's the most expensive one", "which one is the most expensive",
    "(Can|Could) you tell me (which|what) (item|one) is (the |)most expensive?",
    "What is the (thing|item|product) that costs (the |)most?",
    "(Which|What) do I pay (the |)most for?", "The highest price (is|belongs) to (which|what) (item|thing)?",
    "(Which|What) (item|product) has the (top|biggest|largest) price?", "What is at the top in price?",
    "Item with the highest price?", "The (item|thing|one) with the highest price, please.",
    "I want the (dearest|most expensive) (item|one). Which is it?",
    "Of all (these|items), which is the (dearest|most expensive)?", "Among these, (what|which) costs the most?",
    "Is there one that costs more than all others? Which?",
    "(Which|What) (item|one) costs more than (all|the) others?",
    "What should I not buy if I want to save money? Name the dearest item.",
    "(Say|Tell me) which (item|one) is the (dearest|most expensive).", "Where would I spend the most?",
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
    "cheapest?", "what's the cheapest one", "which one is the cheapest",
    "(Can|Could) you tell me (which|what) (item|one) is (the |)cheapest?",
    "What is the (thing|item|product) that costs (the |)least?",
    "(Which|What) do I pay (the |)least for?", "The lowest price (is|belongs) to (which|what) (item|thing)?",
    "(Which|What) (item|product) has the (lowest|smallest|best) price?", "What is at the bottom in price?",
    "Item with the lowest price?", "The (item|thing|one) with the lowest price, please.",
    "I want the (cheapest|least expensive) (item|one). Which is it?",
    "Of all (these|items), which is the (cheapest|least expensive)?", "Among these, (what|which) costs the least?",
    "Is there one that costs less than all others? Which?",
    "(Which|What) (item|one) costs less than (all|the) others?", "I have little money. Which is the cheapest?",
    "(Say|Tell me) which (item|one) is the (cheapest|least expensive).", "Where would I spend the least?",
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
    "just names", "names please", "what items are there", "(Can|Could) you (name|list|tell me) (all |)the items?",
    "(Please |)(name|list|give me) (all |)the (items|things|products).",
    "List (all |)the (items|things|goods) without (the |)prices.", "(Which|What) (products|items|goods) do you see?",
    "(Which|What) (items|things) (did I|do I) (list|name|have|write down)?",
    "(Give|Show|Tell) me the (items|things|goods) without (the |)prices.",
    "I (only |just )need the names(| of the items).", "I do not need the prices, only the names.",
    "Leave out the prices.", "No prices, (just|only) names.", "The (items|things|goods), please.",
    "The names of (all|the) (items|things)?", "What are the names (of the items|on the list)?",
    "What are the (goods|products|things) called?", "Read me the (names|items).",
    "Write all (items|names) in one line.", "(Say|Tell me) (what|which) (items|things) there are.",
    "Name (everything|all things) on the list.", "Put the names in a sentence.", "(What|Which) names are on the list?",
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
    "how much is the {n}", "price of the {n}", "{n} price?", "what does the {n} cost",
    "(And|So) what does the {n} cost?", "(Can|Could) you tell me (the price of|how much I pay for) the {n}?",
    "(Please |)(tell me|say|give me) what the {n} costs.", "I (want|need) to know the price of the {n}.",
    "I would like (to buy |)the {n}. How much is it?",
    "What do I (pay|have to pay|owe) for the {n}?", "How much do I (pay|need|owe) for the {n}?",
    "For how much can I (get|have|buy) the {n}?", "What is the {n} sold for?", "The {n} (costs|is) what?",
    "The price of the {n}, please.",
    "What price does the {n} have?", "(Which|What) price (belongs to|is given for|is next to) the {n}?",
    "Look (up|for) the {n}. What is the price?", "If I (buy|take) the {n}, how much is it?",
    "{n}?", "The {n}?", "What about the {n}?", "What is the {n}?", "The {n} is how much?", "How much for the {n}?",
    "(Give|Show) me the price of the {n}.", "What would the {n} cost?", "What do they want for the {n}?",
    "And how much is the {n}?", "I want the {n}. What does it cost?", "Cost of the {n}?", "Find the price of the {n}.",
    "How much is the {n}?", "What does the {n} cost?", "What is the price of the {n}?", "How much does the {n} cost?",
    "And the {n}?", "Price of the {n}?", "Tell me the price of the {n}.", "How many dollars is the {n}?",
    "~What must I pay for the {n}?", "~At what price is the {n}?",
)  # fmt: skip
QUESTION = Phrases(
    "please look at this list and answer.\n{l}\n{q}", "i have these: {i}. {q}",
    "Below (is|you see) a list. {q}\n\n{l}", "{l}\n\nAbove is a list. {q}",
    "{l}\n\nAnswer (this question|this) about the list: {q}", "A question (about|on) this list: {q}\n{l}",
    "(Can|Could) you help me with this list?\n{l}\n{q}", "I (went shopping|was at the shop|made a list): {i}. {q}",
    "I bought (this|these).\n{l}\n{q}", "(The shop|The store|My friend) has these: {i}. {q}",
    "We (sell|have|need) these: {i}. {q}", "My (order|basket|shopping|shopping list):\n{l}\n\n{q}",
    "Price list:\n{l}\n\n{q}", "Price list: {i}\n{q}", "Items and prices:\n{l}\n{q}", "Data:\n{l}\n\nQuestion: {q}",
    "Question: {q}\nData:\n{l}", "Q: {q}\nList: {i}\nA:", "List: {i}\nQ: {q}\nA:", "### List\n{l}\n### Question\n{q}",
    "list = {i}\nquestion = {q}", '"{i}" {q}', "{i} - {q}", "{l}\n===\n{q}",
    "(Given|Take|Use|With) this list: {i}. {q}", "{q} (Use|Here is|This is) (my|the) list:\n{l}",
    "{q} These are the (items|prices):\n{l}", "(Today|This week) in the shop:\n{l}\n{q}", "You see a list: {i}. {q}",
    "Here are some (prices|goods|items): {i}. {q}",
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
