"""Workflows: calls of models, functions and programs that are known in advance, as one graph over many rows.

`graph` is the data model that every way of writing a workflow makes, and its checks; `frontend` is what users write;
`passes` rewrite a graph into a cheaper one with the same results.
"""
