"""Fakes and tiny tokenizers for tests: of Weft itself, and of programs that run on it."""
