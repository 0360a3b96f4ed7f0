"""The model card, written from the results of the evaluation so that both cannot disagree."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from training.weft_tiny.conversations import transcripts
from training.weft_tiny.train import ASSET

RESULTS = Path("training/weft_tiny/results.json")
ROWS = (
    ("tool", "tool call", "Tool calls: right tool, right arguments, valid form"),
    ("tool", "tool reply", "Replies after a tool's answer that use it"),
    ("tool", "tool not needed", "Small talk answered without a call although tools are offered"),
    ("tool", "whole cases", "Tool conversations with every turn right"),
    ("json", "json", "JSON extraction: the exact record"),
    ("passage", "passage", "Questions about a passage"),
    ("list", "list", "Summaries of lists and questions about them: the exact text"),
    ("chat", "chat", "Chat: the persona's name, rules and facts of the system prompt followed"),
    ("opening", "opening", "What people type first: greetings, jokes, verses, sums, questions about the world"),
    ("raw", "raw", "Text without a template that goes on as a story: the right names, no sentence twice"),
    ("story", "story", "Stories: every requested name and object occurs, no sentence twice"),
)


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = ["| Task | Unseen values | Unseen values and phrasings | Answers |", "| --- | --- | --- | --- |"]
    for kind, part, title in ROWS:
        found = [results[column].get(kind, {}).get(part) for column in ("values", "templates")]
        shares = " | ".join(f"{cell['right']:.1%}" if cell else "not measured" for cell in found)
        counts = " / ".join(str(cell.get("answers", cell.get("cases"))) if cell else "0" for cell in found)
        lines.append(f"| {title} | {shares} | {counts} |")
    return "\n".join(lines)


def played(directory: Path) -> str:
    """The conversations of the model in a directory, as Markdown."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return transcripts(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), tokenizer)


def main() -> None:
    """Write the model card from a template and the results of the evaluation."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="results of the evaluation")
    parser.add_argument("--out", type=Path, default=ASSET / "README.md", help="the card to write")
    args = parser.parse_args()
    results = json.loads(args.results.read_text(encoding="utf-8"))
    with safe_open(args.out.parent / "model.safetensors", "pt") as weights:
        tokens = int(weights.metadata()["tokens"])
    template = (Path(__file__).parent / "card_template.md").read_text(encoding="utf-8")
    card = template.replace("{{table}}", table(results)).replace("{{cases}}", str(results["cases"]))
    card = card.replace("{{tokens}}", f"{tokens / 1e6:.1f}").replace("{{conversations}}", played(args.out.parent))
    args.out.write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
