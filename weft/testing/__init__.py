"""Fakes and small tokenizers for tests of Weft and of programs."""
