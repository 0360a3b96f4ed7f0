"""The order in which a workflow's calls run, on which engines, and which prefixes are kept for them. Pure.

What is decided is a function of the arguments: no clock, no randomness, no order of sets.
"""
