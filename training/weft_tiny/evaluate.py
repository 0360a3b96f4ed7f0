"""Held-out evaluation: greedy decoding without any grammar, every answer checked by code.

Column ``values`` has unseen names, numbers and keys in trained phrasings; column ``templates`` has unseen phrasings
as well. Each assistant turn of a case is generated after the gold history, so a case gives one or more answers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from training.weft_tiny.data import KINDS, held_out
from training.weft_tiny.examples import Check, passes
from training.weft_tiny.render import render
from training.weft_tiny.tokenizer import END_OF_TEXT, IM_END
from training.weft_tiny.train import ASSET

COLUMNS = ("values", "templates")


@dataclass
class Turn:
    """One answer to be generated and judged."""

    kind: str
    part: str
    case: int
    prompt: str
    gold: str
    check: Check
    tokens: list[int]
    answer: str = ""
    ended: bool = False

    @property
    def right(self) -> bool:
        """Whether the answer ended by itself and passed its check."""
        return self.ended and passes(self.check, self.answer)


def turns_of(kind: str, count: int, templates: bool, seed: int, tokenizer: Tokenizer) -> list[Turn]:
    """All turns of the held-out cases of a kind."""
    turns = []
    for case, example in enumerate(held_out(kind, count, templates, seed)):
        checks = iter(example.checks)
        for index, message in enumerate(example.messages):
            if message["role"] != "assistant":
                continue
            part = kind
            if kind == "tool":
                part = "tool call" if message.get("tool_calls") else "tool reply"
                part = "tool not needed" if example.messages[-2]["role"] == "user" else part
            prompt = render(example.messages[:index], example.tools, generate=True)
            gold = render(example.messages[: index + 1], example.tools)[len(prompt) :].removesuffix(IM_END + "\n")
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            turns.append(Turn(kind, part, case, prompt, gold, next(checks), ids))
    return turns


@torch.inference_mode()
def generate(model: LlamaForCausalLM, tokenizer: Tokenizer, turns: list[Turn], rows: int, limit: int) -> None:
    """Greedy answers for all turns, in batches of similar answer length."""
    end, pad = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    order = sorted(turns, key=lambda turn: (len(turn.gold) // 16, len(turn.tokens)))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        width = max(len(turn.tokens) for turn in batch)
        padded = [[pad] * (width - len(turn.tokens)) + turn.tokens for turn in batch]
        seen = [[0] * (width - len(turn.tokens)) + [1] * len(turn.tokens) for turn in batch]
        ids, mask = torch.tensor(padded, device=model.device), torch.tensor(seen, device=model.device)
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False,
                                eos_token_id=end, pad_token_id=pad)  # fmt: skip
        for turn, row in zip(batch, output[:, width:].tolist(), strict=True):
            turn.ended = end in row
            turn.answer = tokenizer.decode(row[: row.index(end)] if turn.ended else row)


def summary(turns: list[Turn]) -> dict[str, Any]:
    """Shares of right answers per part, and of cases whose every answer was right."""
    parts: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        parts[turn.part].append(turn)
    result: dict[str, Any] = {
        part: {
            "answers": len(group),
            "right": round(sum(turn.right for turn in group) / len(group), 4),
            "ended": round(sum(turn.ended for turn in group) / len(group), 4),
        }
        for part, group in sorted(parts.items())
    }
    cases: dict[int, bool] = {}
    for turn in turns:
        cases[turn.case] = cases.get(turn.case, True) and turn.right
    result["whole cases"] = {"cases": len(cases), "right": round(sum(cases.values()) / len(cases), 4)}
    return result


def main() -> None:
    """Evaluate a model directory on held-out cases and write the results as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=ASSET)
    parser.add_argument("--cases", type=int, default=500, help="cases per kind and column")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=128, help="rows per batch")
    parser.add_argument("--limit", type=int, default=200, help="most tokens per answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="results file; columns not measured now are kept")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per kind and column")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval().to(args.device)
    results: dict[str, Any] = {"cases": args.cases, "seed": args.seed}
    began = time.monotonic()
    for column in args.columns:
        results[column] = {}
        for kind in args.kinds:
            turns = turns_of(kind, args.cases, column == "templates", args.seed, tokenizer)
            generate(model, tokenizer, turns, args.rows, args.limit)
            results[column][kind] = summary(turns)
            print(column, kind, json.dumps(results[column][kind]), f"{time.monotonic() - began:.0f} s", flush=True)
            for turn in [turn for turn in turns if not turn.right][: args.show]:
                print(f"--- {turn.prompt}\n>>> {turn.answer}\n=== {turn.gold}\n")
    if args.out:
        if args.out.exists():
            results = {**json.loads(args.out.read_text(encoding="utf-8")), **results}
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
