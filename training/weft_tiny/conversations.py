"""Conversations whose wording no training text has, as the model answers them: greedy, without a grammar, unedited.

What the user and the tools say is fixed in `conversations.json`. A tool's answer is left out where the model has not
called a tool.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from training.weft_tiny.evaluate import complete
from training.weft_tiny.examples import assistant, parse_call, user
from training.weft_tiny.render import render
from training.weft_tiny.tokenizer import IM_END

CONVERSATIONS = Path(__file__).parent / "conversations.json"
LIMIT = 120
"""Most tokens of an answer."""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in tool["parameters"]}
    parameters = {"type": "object", "properties": properties, "required": tool["parameters"]}
    return {"type": "function", "function": {**tool, "parameters": parameters}}


def _played(model: LlamaForCausalLM, tokenizer: Tokenizer, conversation: dict[str, Any]) -> list[tuple[str, str]]:
    """Who said what, in order."""
    system, tools = conversation.get("system"), conversation.get("tools", [])
    lines = [("system", system)] if system else []
    lines += [("tool", f"{tool['name']}({', '.join(tool['parameters'])}): {tool['description']}") for tool in tools]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    offered = [_tool(tool) for tool in tools]
    for turn in conversation["turns"]:
        if isinstance(turn, str):
            messages.append(user(turn))
            lines.append(("user", turn))
        elif parse_call(messages[-1]["content"]) is None:
            continue
        else:
            messages.append({"role": "tool", "content": turn["answer"]})
            lines.append(("tool answers", turn["answer"]))
        prompt = tokenizer.encode(render(messages, offered, generate=True), add_special_tokens=False).ids
        [(answer, ended)] = complete(model, tokenizer, [prompt], tokenizer.token_to_id(IM_END), LIMIT)
        messages.append(assistant(answer))
        lines.append(("weft-tiny", answer if ended else f"{answer} [cut after {LIMIT} tokens]"))
    return lines


def transcripts(model: LlamaForCausalLM, tokenizer: Tokenizer) -> str:
    """All conversations as Markdown."""
    parts = []
    for number, conversation in enumerate(json.loads(CONVERSATIONS.read_text(encoding="utf-8")), 1):
        said = [f"{who + ':':<14}{what}" for who, what in _played(model, tokenizer, conversation)]
        text = "\n".join(indent(line, " " * 14).lstrip() for line in said)
        parts.append(f"{number}. {conversation['title']}\n\n```\n{text}\n```")
    return "\n\n".join(parts)
