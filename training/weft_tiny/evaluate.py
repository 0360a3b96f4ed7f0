"""Held-out evaluation on the frozen cases: greedy decoding without any grammar, every answer checked by code.

Column ``values`` has unseen names, numbers and keys in trained phrasings; column ``templates`` has unseen phrasings
as well. Each assistant turn of a case is generated after the gold history, so a case gives one or more answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from training.weft_tiny.cases import COLUMNS, TEST, VALIDATION, read
from training.weft_tiny.data import KINDS
from training.weft_tiny.examples import Check, Example, passes
from training.weft_tiny.render import render
from training.weft_tiny.tokenizer import END_OF_TEXT, IM_END
from training.weft_tiny.train import ASSET


@dataclass
class Turn:
    """An assistant turn to generate and check."""

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


def turns_of(cases: Sequence[Example], tokenizer: Tokenizer) -> list[Turn]:
    """All assistant turns of cases of one kind."""
    turns = []
    for case, example in enumerate(cases):
        checks = iter(example.checks)
        for index, message in enumerate(example.messages):
            if message["role"] != "assistant":
                continue
            part = example.kind
            if part == "tool":
                part = "tool call" if message.get("tool_calls") else "tool reply"
                part = "tool not needed" if example.messages[-2]["role"] == "user" else part
            if example.kind == "raw":
                prompt, gold = example.messages[0]["content"], message["content"]
            else:
                prompt = render(example.messages[:index], example.tools, generate=True)
                gold = render(example.messages[: index + 1], example.tools)[len(prompt) :].removesuffix(IM_END + "\n")
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            turns.append(Turn(example.kind, part, case, prompt, gold, next(checks), ids))
    return turns


@torch.inference_mode()
def complete(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Sequence[list[int]], end: int, limit: int
) -> list[tuple[str, bool]]:
    """For each prompt in token ids the greedy answer, and whether the token `end` came within `limit` tokens."""
    pad = tokenizer.token_to_id(END_OF_TEXT)
    width = max(len(prompt) for prompt in prompts)
    padded = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask = torch.tensor(padded, device=model.device), torch.tensor(seen, device=model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False,
                            eos_token_id=end, pad_token_id=pad)  # fmt: skip
    rows = [row[: row.index(end)] if end in row else row for row in output[:, width:].tolist()]
    return [(tokenizer.decode(row), len(row) < output.shape[1] - width) for row in rows]


def generate(model: LlamaForCausalLM, tokenizer: Tokenizer, turns: list[Turn], rows: int, limit: int) -> None:
    """Greedy answers for all turns of one kind, in batches of similar answer length."""
    end = tokenizer.token_to_id(END_OF_TEXT if turns[0].kind == "raw" else IM_END)
    order = sorted(turns, key=lambda turn: (len(turn.gold) // 16, len(turn.tokens)))
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        answers = complete(model, tokenizer, [turn.tokens for turn in batch], end, limit)
        for turn, (answer, ended) in zip(batch, answers, strict=True):
            turn.answer, turn.ended = answer, ended


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


Outcomes = dict[str, list[tuple[int, bool]]]
"""For each row (column and part), its answers: the case, and whether the answer was right."""


@dataclass(frozen=True)
class Difference:
    """How much better a row is than another model's on the same answers: the mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def difference(ours: list[tuple[int, bool]], theirs: list[tuple[int, bool]]) -> Difference:
    """The paired difference of two rows; answers of one case count as one draw, since they share its text.

    Raises:
        ValueError: the rows are not of the same cases.
    """
    if [case for case, _ in ours] != [case for case, _ in theirs]:
        raise ValueError("the rows are of different cases")
    mean = (sum(right for _, right in ours) - sum(right for _, right in theirs)) / len(ours)
    residues: dict[int, float] = defaultdict(float)
    for (case, our), (_, their) in zip(ours, theirs, strict=True):
        residues[case] += our - their - mean
    error = 1.96 * math.sqrt(sum(residue**2 for residue in residues.values())) / len(ours)
    return Difference(mean, mean - error, mean + error)


def may_ship(found: dict[str, Difference]) -> bool:
    """Whether no row is worse by its whole interval, and the sum over all rows is better."""
    return all(row.high >= 0 for row in found.values()) and sum(row.mean for row in found.values()) > 0


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Print the difference of every row; returns whether the first model may be shipped in place of the second.

    Raises:
        ValueError: the outcomes are of different cases or rows.
    """
    if ours["digest"] != theirs["digest"] or set(ours["rows"]) != set(theirs["rows"]):
        raise ValueError("the outcomes are of different cases or rows: evaluate both models with the same options")
    found = {row: difference(ours["rows"][row], theirs["rows"][row]) for row in sorted(ours["rows"])}
    for row, by in found.items():
        print(f"{row}: {by.mean:+.1%} ({by.low:+.1%} to {by.high:+.1%}){'  WORSE' if by.high < 0 else ''}")
    answer = may_ship(found)
    print(f"sum {sum(row.mean for row in found.values()):+.3f}: {'may ship' if answer else 'must not ship'}")
    return answer


def main() -> int:
    """Evaluate a model directory on the frozen cases, write the results as JSON, compare with another model's."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", type=Path, default=ASSET, help="model directory")
    parser.add_argument("--set", choices=("test", "validation"), default="test", help="cases to use")
    parser.add_argument("--cases", type=int, default=500, help="most cases per kind and column")
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=COLUMNS, help="which cases")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="kinds of task")
    parser.add_argument("--rows", type=int, default=128, help="rows per batch")
    parser.add_argument("--limit", type=int, default=200, help="most tokens per answer")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to run on")
    parser.add_argument("--out", type=Path, help="results file; columns not measured now are kept")
    parser.add_argument("--outcomes", type=Path, help="write which answers were right, for a later --against")
    parser.add_argument("--against", type=Path, help="outcomes of another model; fail if this one must not replace it")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per kind and column")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    precision = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=precision).eval().to(args.device)
    path = TEST if args.set == "test" else VALIDATION
    results: dict[str, Any] = {"cases": args.cases, "set": args.set}
    rows: Outcomes = defaultdict(list)
    began = time.monotonic()
    for (column, kind), cases in read(path).items():
        if column not in args.columns or kind not in args.kinds:
            continue
        turns = turns_of(cases[: args.cases], tokenizer)
        generate(model, tokenizer, turns, args.rows, args.limit)
        results.setdefault(column, {})[kind] = summary(turns)
        print(column, kind, json.dumps(results[column][kind]), f"{time.monotonic() - began:.0f} s", flush=True)
        for turn in turns:
            rows[f"{column} {turn.part}"].append((turn.case, turn.right))
        for turn in [turn for turn in turns if not turn.right][: args.show]:
            print(f"--- {turn.prompt}\n>>> {turn.answer}\n=== {turn.gold}\n")
    if args.out:
        if args.out.exists():
            results = {**json.loads(args.out.read_text(encoding="utf-8")), **results}
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    outcomes = {"digest": hashlib.sha256(path.read_bytes()).hexdigest(), "rows": rows}
    if args.outcomes:
        args.outcomes.write_text(json.dumps(outcomes) + "\n")
    if args.against:
        return 0 if compare(outcomes, json.loads(args.against.read_text(encoding="utf-8"))) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
