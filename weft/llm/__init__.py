"""The offline API: `weft.LLM`, what it takes and what it gives back."""

from weft.llm.api import LLM
from weft.llm.chats import ChatOptions, TemplateOptions
from weft.llm.options import Conversation, Options, Prompt
from weft.llm.results import CompletionOutput, Result

__all__ = ["LLM", "ChatOptions", "CompletionOutput", "Conversation", "Options", "Prompt", "Result", "TemplateOptions"]
