"""Do tokens depend on the load? The same random requests under different schedules.

    python -m bench.identity [--dtype bfloat16] [--requests 300]

Requests differ in length, sampler, priority, shared prefix, grammar, forks and cancellation. They run one at a time,
all together, all together in a pool so small that they evict and preempt one another (and with a host tier), and on a
new engine. In float64 every token must be the same; the tests say so. In lower precision a batch of another shape
rounds differently, and where two tokens are almost equally likely the choice may flip: this prints how many rows
differ, and how far apart the two tokens were where they first did.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field

from bench import alone
from weft.config import DType, EngineConfig
from weft.core import wire
from weft.core.grammar import Grammar
from weft.core.ids import pack_tokens
from weft.core.objectives import Objective
from weft.core.sampling import SamplingParams, StopParams
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.tokenizers.load import load_tokenizer

MAX_CONTEXT = 192
GRAMMARS = (
    Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}),
    Grammar.json_object(),
    Grammar.regex(r"[A-Z][a-z]+( [a-z]+){3,9}\."),
    Grammar.choice(["yes, of course", "no, never", "yes, sometimes"]),
)
TEXTS = (
    "Once upon a time there was a small lighthouse keeper named Mira who",
    "List three fruits and say which one is the sweetest:",
    "The capital of the island is called Port Alva. Question: what is the capital?",
    "You are a helpful assistant. Answer in one short sentence. What is 12 plus 30?",
)


@dataclass(frozen=True)
class Request:
    """One prompt, with one seeded sampler for each of its forks."""

    prompt: list[int]
    samplers: list[SamplingParams]
    stop: StopParams
    priority: int
    cancel_after: int | None
    """Tokens of the first fork after which the client cancels everything."""
    grammar: Grammar | None = None
    objective: Objective = "latency"


@dataclass
class Outcome:
    """The tokens of each fork, and the log-probabilities of the likeliest two at each place."""

    tokens: list[list[int]]
    tops: list[list[wire.TokenLogprobs | None]]
    endings: list[str] = field(default_factory=list)


Outcomes = list[Outcome]


def random_requests(count: int, seed: int) -> list[Request]:
    """`count` requests on the embedded model."""
    rng, grammars = random.Random(seed), random.Random(-seed)
    tokenizer = load_tokenizer("weft-tiny")
    system = tokenizer.encode("<|im_start|>system\n" + " ".join(TEXTS[:2]) + "<|im_end|>\n")
    requests = []
    for index in range(count):
        text = rng.choice(TEXTS)[: rng.randrange(8, 80)] + f" {rng.randrange(1000)}"
        packed = (system if rng.random() < 0.5 else b"") + tokenizer.encode(text)
        prompt = list(memoryview(packed).cast("i"))[: MAX_CONTEXT - 90]
        forks = rng.choice([1, 1, 1, 1, 2, 3])
        requests.append(
            Request(
                prompt=prompt,
                samplers=[_random_sampler(rng, index * 10 + fork) for fork in range(forks)],
                stop=StopParams(max_tokens=int(2 ** rng.uniform(0, 6.5)), ignore_eos=rng.random() < 0.5),
                priority=rng.choice([0, 0, 0, -1, 2]),
                cancel_after=rng.randrange(1, 10) if rng.random() < 0.1 else None,
                grammar=grammars.choice(GRAMMARS) if grammars.random() < 0.25 else None,
            )
        )
    return requests


def _random_sampler(rng: random.Random, seed: int) -> SamplingParams:
    if rng.random() < 0.3:
        return SamplingParams(temperature=0.0, seed=seed, logprobs=2)
    return SamplingParams(
        temperature=rng.choice([0.5, 1.0, 1.3]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        logit_bias=rng.choice([{}, {}, {40: 2.0, 41: -3.0}]),
        bad_words=rng.choice([[], [], [[100], [101, 102]]]),
        seed=seed,
        logprobs=2,
    )


class Runner:
    """Sends requests to an engine in this thread and collects what comes back."""

    def __init__(self, config: EngineConfig):
        self.engine: Engine = build_engine(config, self._receive)
        self._by_op: dict[int, tuple[Outcome, int, Request, int]] = {}
        self._left = 0
        self._next = 0

    def run(self, requests: list[Request], together: int) -> Outcomes:
        """Run `requests`, at most `together` of them open at once."""
        outcomes = []
        queue = list(reversed(requests))
        opened: list[tuple[Outcome, list[int]]] = []
        while queue or opened:
            while queue and len(opened) < together:
                opened.append(self._open(queue.pop()))
                outcomes.append(opened[-1][0])
            self.engine.advance()
            self.engine.step()
            for entry in [e for e in opened if len(e[0].endings) == len(e[0].tokens)]:
                opened.remove(entry)
                self.engine.submit(1, [wire.Release(seq=seq) for seq in entry[1]])
        while self.engine.busy:
            self.engine.step()
        return outcomes

    def close(self) -> None:
        """Check that nothing is left, and free the model."""
        tiers = self.engine.cache.tiers
        if len(self.engine.scheduler.sequences) or self.engine.scheduler.sequences.running:
            raise RuntimeError("sequences are left over")
        self.engine.submit(1, [wire.ResetPrefixCache()])
        if tiers.device.num_free + tiers.device.num_fenced != tiers.device.num_pages:
            raise RuntimeError("pages are left over")
        self.engine.close()

    def _open(self, request: Request) -> tuple[Outcome, list[int]]:
        outcome = Outcome([[] for _ in request.samplers], [[] for _ in request.samplers])
        seqs = [self._next + 1 + fork for fork in range(len(request.samplers))]
        self._next += len(seqs)
        commands: list[wire.Command] = [
            wire.Open(seq=seqs[0], priority=request.priority, objective=request.objective),
            wire.Append(seq=seqs[0], op=10_000_000 + seqs[0], tokens=pack_tokens(request.prompt)),
            *[wire.Fork(seq=seqs[0], child=child) for child in seqs[1:]],
        ]
        for fork, (seq, sampler) in enumerate(zip(seqs, request.samplers, strict=True)):
            self._by_op[seq] = (outcome, fork, request, seqs[0])
            command = wire.Generate(seq=seq, op=seq, sampling=sampler, stop=request.stop, grammar=request.grammar)
            commands.append(command)
        self.engine.submit(1, commands)
        return outcome, seqs

    def _receive(self, client: int, envelope: wire.Envelope) -> None:
        for event in envelope.events:
            if isinstance(event, wire.Token):
                outcome, fork, request, first = self._by_op[event.op]
                outcome.tokens[fork].append(event.token)
                outcome.tops[fork].append(event.logprobs)
                if fork == 0 and len(outcome.tokens[0]) == request.cancel_after:
                    forks = range(first, first + len(request.samplers))
                    self.engine.submit(1, [wire.Cancel(seq=seq) for seq in forks])
            elif isinstance(event, wire.Finished | wire.Cancelled):
                outcome, _, _, _ = self._by_op.pop(event.op)
                outcome.endings.append(type(event).__name__)
            else:
                raise RuntimeError(f"unexpected {event}")


def schedules(dtype: DType) -> dict[str, tuple[EngineConfig, int]]:
    """Ways to run the same requests: a configuration, and how many requests are open at once."""
    base = EngineConfig(dtype=dtype, max_context=MAX_CONTEXT, max_running=64, num_pages=2000, threads=1, device="cpu")
    tight = {"num_pages": 14, "max_running": 16, "max_step_tokens": 48}
    return {
        "alone": (_with(base, prefix_cache=False, overlap=False), 1),
        "alone, prefixes reused": (base, 1),
        "batched": (base, 1000),
        "batched, on a new engine": (base, 1000),
        "a pool that evicts and preempts": (_with(base, **tight), 1000),
        "the same with a host tier": (_with(base, host_kv_bytes=40 * 1024 * 1024, **tight), 1000),
        "small chunks, no overlap": (_with(base, max_step_tokens=64, overlap=False), 40),
    }


def _with(config: EngineConfig, **changes: object) -> EngineConfig:
    import msgspec

    return msgspec.structs.replace(config, **changes)


def same_as_far_as_both_go(request: Request, left: list[int], right: list[int]) -> bool:
    """Whether two runs agree; a cancelled one may have come less far."""
    if request.cancel_after is None:
        return left == right
    shared = min(len(left), len(right))
    return left[:shared] == right[:shared]


def gap_at_first_difference(left: Outcome, right: Outcome, fork: int) -> float | None:
    """How far apart, in log-probability, the two likeliest tokens were where two runs first differ."""
    pairs = zip(left.tokens[fork], right.tokens[fork], left.tops[fork], strict=False)
    for mine, theirs, top in pairs:
        if mine != theirs:
            return None if top is None or len(top.top_logprobs) < 2 else top.top_logprobs[0] - top.top_logprobs[1]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    requests = random_requests(args.requests, args.seed)
    baseline: Outcomes | None = None
    for name, (config, together) in schedules(args.dtype).items():
        runner = Runner(config)
        outcomes = runner.run(requests, together)
        stats = runner.engine.stats()
        runner.close()
        note = (
            f"{stats.preemptions} preemptions, {stats.evictions} pages evicted, {stats.swapped_in_pages} swapped in, "
            f"{stats.prefix_hits}/{stats.prefix_queries} prompt tokens cached"
        )
        if baseline is None:
            baseline = outcomes
            print(f"{name}: {sum(len(o.tokens) for o in outcomes)} rows in {args.dtype}; {note}")
            continue
        differing = [
            (first, second, fork, request.samplers[fork])
            for request, first, second in zip(requests, baseline, outcomes, strict=True)
            for fork in range(len(first.tokens))
            if not same_as_far_as_both_go(request, first.tokens[fork], second.tokens[fork])
        ]
        greedy = [d[:3] for d in differing if d[3].is_greedy]
        gaps = sorted(g for d in greedy if (g := gap_at_first_difference(*d)) is not None)
        print(f"{name}: {len(differing)} rows differ, {len(greedy)} of them greedy; {note}")
        if gaps:
            print(
                "    log-probability between the two likeliest tokens where greedy rows first differ: "
                f"median {gaps[len(gaps) // 2]:.4f}, max {gaps[-1]:.4f}"
            )


if __name__ == "__main__":
    alone.require()
    main()
