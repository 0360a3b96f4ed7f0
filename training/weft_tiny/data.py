"""The mixture of all kinds: an endless, seeded stream of training examples, and held-out cases."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace

from training.weft_tiny.curriculum import Curriculum
from training.weft_tiny.examples import Example
from training.weft_tiny.grammar import TOP, Draw
from training.weft_tiny.kinds import chat, copying, extract, lists, opening, passage, raw, recall, story, tool

MAKERS: dict[str, Callable[[Draw], Example]] = {
    "chat": chat.make,
    "story": story.make,
    "passage": passage.make,
    "list": lists.make,
    "json": extract.make,
    "tool": tool.make,
    "copying": copying.make,
    "recall": recall.make,
    "opening": opening.make,
    "raw": raw.make,
}
KINDS = ("chat", "story", "passage", "list", "json", "tool", "opening", "raw")
"""The kinds that have held-out cases."""
FREE = ("story", "raw")
"""The kinds whose answers are of free form: many texts are right."""
WEIGHTS: dict[str, float] = {
    "chat": 0.12, "story": 0.03, "passage": 0.20, "list": 0.11, "json": 0.15, "tool": 0.18, "copying": 0.06,
    "recall": 0.05, "opening": 0.07, "raw": 0.03,
}  # fmt: skip


def stream(
    seed: int, weights: Mapping[str, float] = WEIGHTS, curriculum: Curriculum | None = None
) -> Iterator[Example]:
    """Training examples without end; equal seeds give equal streams.

    Without a curriculum, examples have the hardest level and the kinds their given shares.
    """
    rng = random.Random(seed)
    while True:
        shares = weights if curriculum is None else curriculum.mixture(weights)
        kind = rng.choices(list(shares), list(shares.values()))[0]
        level = TOP if curriculum is None else curriculum.level(kind, rng)
        yield replace(MAKERS[kind](Draw(random.Random(rng.getrandbits(64)), level=level)), kind=kind, level=level)


def held_out(kind: str, count: int, templates: bool, seed: int = 0) -> list[Example]:
    """Cases with held-out values, and with held-out templates too if asked for."""
    cases = []
    for index in range(count):
        rng = random.Random(f"held-out {kind} {templates} {seed} {index}")
        cases.append(MAKERS[kind](Draw(rng, held_values=True, held_templates=templates)))
    return cases


def main() -> None:
    """Print examples as JSON lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the stream")
    parser.add_argument("--count", type=int, default=10, help="examples, or cases per kind")
    parser.add_argument("--kind", choices=list(MAKERS), help="only this kind")
    parser.add_argument("--held", choices=("values", "templates"), help="held-out cases instead of training examples")
    args = parser.parse_args()
    weights = {args.kind: 1.0} if args.kind else WEIGHTS
    if args.held:
        examples = [case for kind in weights if kind in KINDS
                    for case in held_out(kind, args.count, args.held == "templates", args.seed)]  # fmt: skip
    else:
        source = stream(args.seed, weights)
        examples = [next(source) for _ in range(args.count)]
    for example in examples:
        print(json.dumps(asdict(example), ensure_ascii=False))


if __name__ == "__main__":
    main()
