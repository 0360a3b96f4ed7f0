"""The offline API: `weft.LLM`, what it takes and what it gives back."""

from weft.llm.api import LLM
from weft.llm.chats import ChatOptions, TemplateOptions
from weft.llm.options import Conversation, Options, Prompt
from weft.llm.results import AnswerChunk, CompletionOutput, Result

__all__ = [
    "LLM",
    "AnswerChunk",
    "ChatOptions",
    "CompletionOutput",
    "Conversation",
    "Options",
    "Prompt",
    "Result",
    "TemplateOptions",
]
