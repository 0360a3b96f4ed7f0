"""Chat over search results: a long system prompt that all rows share, and a query that the model writes first.

weft workflow run examples/workflows/chat_search.py --row question='How tall is the tower?'
"""

import weft
from weft import ops

SYSTEM = "You answer with the search results that you are given, and cite them as [1] or [2]. " * 4
LIBRARY = {"tower": "The tower is 324 metres tall.", "bridge": "The bridge was opened in 1890."}


@weft.native_function(pure=True)
def search(query: str) -> list[str]:
    """Results for a query, from a very small library."""
    return [text for word, text in LIBRARY.items() if word in query.lower()] or ["Nothing was found."]


@weft.flow
def chat_search(question):
    """The answer goes on in the conversation that wrote the query."""
    query = ops.llm(
        [ops.system(SYSTEM), ops.user(f"Write a search query for: {question}")], max_tokens=20, temperature=0
    )
    results = ops.join(search(f"{query} {question}"))
    return ops.llm([query.chat, ops.user(f"Results: {results}\nNow answer: {question}")], max_tokens=60, temperature=0)
