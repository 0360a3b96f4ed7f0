"""Training in the background: resumable, for days, beside other work.

A run continues from the newest valid checkpoint of its state directory, or else from the weights in the package. The
learning rate warms up and stays constant. In a run with ``--decay-tokens`` or ``--decay-seconds`` it falls linearly to
zero, and training ends. The exported weights are a running average, usable at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from training.weft_tiny.batches import Batch, Stream, collate, encode, reused
from training.weft_tiny.cases import validation
from training.weft_tiny.curriculum import Curriculum
from training.weft_tiny.data import FREE, WEIGHTS
from training.weft_tiny.optim import Muon, multiplies_bfloat16, split_parameters
from training.weft_tiny.state import ProcessLock, RunState, default_directory, running_lock
from training.weft_tiny.tokenizer import CONTEXT, END_OF_TEXT, IM_END

ASSET = Path("weft/assets/weft-tiny")
_PAUSE_POLL_S = 2.0


def make_config(tokenizer: Tokenizer) -> LlamaConfig:
    """The shape of the model."""
    end = tokenizer.token_to_id(IM_END)
    text_end = tokenizer.token_to_id(END_OF_TEXT)
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=text_end,
        eos_token_id=end,
        pad_token_id=text_end,
    )


def autocast(device: str) -> torch.autocast:
    """Matrix products in bfloat16 where `multiplies_bfloat16` holds, else in float32."""
    return torch.autocast(device.split(":")[0], torch.bfloat16, enabled=multiplies_bfloat16(device))


def answer_hits(hits: Tensor, answers: Tensor) -> Tensor:
    """Whether every token of each answer is the likeliest one: (answers,).

    ``hits`` is (rows, targets), where target 0 is token 1 of the row; ``answers`` is that of a `Batch`.
    """
    totals = nn.functional.pad(hits.int().cumsum(1), (2, 0))
    rows, firsts, ends = answers.to(hits.device).unbind(1)
    return totals[rows, ends] - totals[rows, firsts] == ends - firsts


def loss_of(model: LlamaForCausalLM, batch: Batch, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss, the mean loss of the answers' tokens, and which targets (rows, targets) are the likeliest.

    Logits are computed only where a weight is set.
    """
    tokens, weights = batch.tokens.to(device), batch.weights.to(device)[:, 1:]
    hidden = model.model(input_ids=tokens[:, :-1].contiguous(), use_cache=False).last_hidden_state
    wanted = weights > 0
    targets = tokens[:, 1:][wanted]
    logits = model.lm_head(hidden[wanted]).float()
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    hits = torch.zeros_like(wanted)
    hits[wanted] = logits.detach().argmax(-1) == targets
    weights = weights[wanted]
    answers = losses.detach()[weights == 1.0].mean()
    return (losses * weights).sum() / weights.sum(), answers, hits


class Trainer:
    """Model, optimizers, running average, curriculum and counters, which a checkpoint restores."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.state = RunState(args.state)
        self.tokenizer = Tokenizer.from_file(str(args.asset / "tokenizer.json"))
        torch.manual_seed(args.seed)
        config = make_config(self.tokenizer)
        # On a processor the backward pass of fused attention takes 40 % of a step; as matrix products it takes 15 %.
        config._attn_implementation = "eager" if args.device == "cpu" else "sdpa"
        self.model = LlamaForCausalLM(config).to(args.device)
        if args.compile:  # the code of one layer serves all
            for layer in self.model.model.layers:
                layer.compile(dynamic=True)
        matrices, rest = split_parameters(self.model)
        self.muon = Muon(matrices, args.muon_lr, decay=0.01)
        self.adam = torch.optim.AdamW(rest, args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.curriculum = Curriculum(WEIGHTS)
        self.seen = self.step = self.resumed = 0
        self.warm_from, self.began = 0, time.monotonic()
        self.average: dict[str, Tensor] = {}
        self._uncounted: tuple[Batch, Tensor, torch.cuda.Event | None] | None = None
        self.load()

    def load(self) -> None:
        """Restore the newest valid checkpoint, or start from the weights in the package."""
        with self.state.newest() as file:
            if file is not None:
                self._restore(torch.load(file, map_location=self.args.device))
            elif self.args.compact is not None:
                self._restore(torch.load(self.args.compact, map_location=self.args.device))
            else:
                self._begin()
        self.state.note("start", tokens=self.seen, step=self.step, resumed=self.resumed, pid=os.getpid(),
                        options=self.options())  # fmt: skip

    def options(self) -> dict[str, Any]:
        """The options of this run, for the log."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self.args).items()}

    def _begin(self) -> None:
        weights = self.args.asset / "model.safetensors"
        if weights.exists() and not self.args.fresh:
            with safe_open(weights, "pt") as file:
                self._set({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
                self.seen = self.warm_from = int(file.metadata()["tokens"])
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def _restore(self, state: dict[str, Any]) -> None:
        self._set(state["model"])
        average = state.get("average", state["model"])
        self.average = {name: value.detach().float().clone() for name, value in average.items()}
        self.seen, self.step, self.resumed = state["seen"], state["step"], state["resumed"] + 1
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.warm_from = state["warm_from"]
        self.curriculum.load(state["curriculum"])

    def save(self) -> None:
        """Write a checkpoint of the present state."""
        state = {"model": dict(self.model.named_parameters()), "muon": self.muon.state_dict(),
                 "adam": self.adam.state_dict(), "average": self.average, "seen": self.seen, "step": self.step,
                 "resumed": self.resumed, "warm_from": self.warm_from,
                 "curriculum": self.curriculum.dump()}  # fmt: skip
        self.state.save(self.seen, lambda file: torch.save(state, file))

    def update(self, batch: Batch, factor: float) -> Tensor:
        """One optimizer step at a learning-rate factor; returns the answers' mean loss, on the device."""
        args = self.args
        for optimizer, base in ((self.muon, args.muon_lr), (self.adam, args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        with autocast(args.device):
            loss, answers, hits = loss_of(self.model, batch, args.device)
        loss.backward()
        nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += batch.size
        self._count()
        right = answer_hits(hits, batch.answers)
        copied = torch.empty_like(right, device="cpu", pin_memory=right.is_cuda).copy_(right, non_blocking=True)
        self._uncounted = batch, copied, torch.cuda.current_stream().record_event() if right.is_cuda else None
        keep = min(args.average, 1 - 1 / (1 + self.step / 10)) if factor >= 1 else 0.9 * min(1.0, factor + 0.5)
        averages = [self.average[name] for name, _ in self.model.named_parameters()]
        torch._foreach_lerp_(averages, [value.detach() for value in self.model.parameters()], 1 - keep)
        return answers

    def _count(self) -> None:
        """Count the answers of the step before: only that one has to have ended on the device, not the present one."""
        if self._uncounted is None:
            return
        batch, right, ended = self._uncounted
        if ended is not None:
            ended.synchronize()
        for row, whole in zip(batch.answers[:, 0].tolist(), right.tolist(), strict=True):
            self.curriculum.count(*batch.sources[row], whole)

    @torch.no_grad()
    def check(self) -> dict[str, float]:
        """By column and kind, the share of validation answers whose every token is the likeliest one.

        Stories and raw text have no single right answer: there it is the share of such tokens. Each token is given the
        right tokens before it, and the weights are the averaged ones. It is quick to compute and close to what a
        greedy answer gets where only one answer is right; the card's figures come from ``evaluate``.
        """
        shares = {}
        current = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self._set(self.average)
        for (column, kind), cases in validation().items():
            right: list[bool] = []
            rows = [encode(case, self.tokenizer, 0.0) for case in cases[: self.args.check_cases]]
            rows.sort(key=lambda row: len(row.tokens))
            for first in range(0, len(rows), 16):
                batch = collate(rows[first : first + 16])
                with autocast(self.args.device):
                    _, _, hits = loss_of(self.model, batch, self.args.device)
                if kind in FREE:
                    right += hits.cpu()[batch.weights[:, 1:] > 0].tolist()
                else:
                    right += answer_hits(hits, batch.answers).tolist()
            shares[f"{column} {kind}"] = round(sum(right) / len(right), 3)
        self._set(current)
        return shares

    @torch.no_grad()
    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, value in self.model.named_parameters():
            value.copy_(weights[name])

    def rate(self, first: int) -> float:
        """The learning-rate factor; ``first`` is the number of tokens at which this process began."""
        factor = min(1.0, (self.seen - self.warm_from + 1) / self.args.warmup)
        if self.args.decay_tokens is not None:
            factor *= max(0.0, 1.0 - (self.seen - first) / self.args.decay_tokens)
        if self.args.decay_seconds is not None:
            factor *= max(0.0, 1.0 - (time.monotonic() - self.began) / self.args.decay_seconds)
        return factor

    def run(self) -> None:
        """Train until the wanted number of tokens or a signal, with log lines and regular checkpoints."""
        args, lock = self.args, ProcessLock(running_lock(), self.args.state)
        stream = Stream(args.asset / "tokenizer.json", args.seed + 1000 * self.resumed, args.batch, args.longest,
                        args.prompt_weight, args.long_share, {**WEIGHTS, **dict(args.share)},
                        self.curriculum, args.noise)  # fmt: skip
        source = reused(stream.loader(args.workers), args.uses, args.seed)
        stopping = Signals()
        lock.acquire()
        saved = checked = time.monotonic()
        meter, first, factor = Meter(self.seen), self.seen, 1.0
        while self.seen < args.tokens and factor > 0 and not stopping.received:
            if self.state.pause.exists():
                self._wait(lock, stopping)
                continue
            factor = self.rate(first)
            meter.losses.append(self.update(next(source), factor))
            now = time.monotonic()
            if self.step % args.report == 0:
                self.state.note("progress", **meter.read(self.seen), step=self.step, rate=round(factor, 3),
                                training=self.curriculum.shares(), levels=self.curriculum.levels)  # fmt: skip
                meter = Meter(self.seen)
            if now - saved > args.save_seconds:
                self.save()
                saved = now
            if now - checked > args.check_seconds:
                self.state.note("check", tokens=self.seen, **self.check())
                checked = time.monotonic()
        self.save()
        lock.release()
        self.state.note("stop", tokens=self.seen, step=self.step)

    def _wait(self, lock: ProcessLock, stopping: Signals) -> None:
        """Save, release the lock and wait until the pause file is gone or a signal arrives."""
        self.save()
        self.state.note("pause", tokens=self.seen)
        lock.release()
        while self.state.pause.exists() and not stopping.received:
            time.sleep(_PAUSE_POLL_S)
        lock.acquire(wait=True)
        self.state.note("resume", tokens=self.seen)


class Signals:
    """SIGTERM and SIGINT ask for a checkpoint and the end, after the current step."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received = True


class Meter:
    """Tokens, seconds and losses since it was made."""

    def __init__(self, seen: int) -> None:
        self.seen, self.wall, self.cpu = seen, time.monotonic(), time.process_time()
        self.losses: list[Tensor] = []

    def read(self, seen: int) -> dict[str, float]:
        """Tokens seen, tokens per second of wall time and of processor time, mean loss of the answers' tokens."""
        tokens = seen - self.seen
        return {"tokens": seen, "per_s": round(tokens / (time.monotonic() - self.wall), 1),
                "per_cpu_s": round(tokens / (time.process_time() - self.cpu), 1),
                "loss": round(float(torch.stack(self.losses).mean()), 4)}  # fmt: skip


def parse_share(text: str) -> tuple[str, float]:
    """`KIND=SHARE`. Raises `ArgumentTypeError` or `ValueError`, which `argparse` tells."""
    kind, _, share = text.partition("=")
    if kind not in WEIGHTS:
        raise argparse.ArgumentTypeError(f"no kind {kind!r}: there are {', '.join(WEIGHTS)}")
    value = float(share)
    if not 0 <= value < math.inf:
        raise ValueError(f"{share!r} is no share")
    return kind, value


def main() -> None:
    """Train weft-tiny; run again with the same --state to continue."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--state", type=Path, default=default_directory(), help="directory of checkpoints and log")
    parser.add_argument("--asset", type=Path, default=ASSET, help="directory with tokenizer.json and first weights")
    parser.add_argument("--compact", type=Path, help="compact state to continue from if there is no checkpoint")
    parser.add_argument("--fresh", action="store_true", help="begin with random weights if there is no checkpoint")
    parser.add_argument("--idle", action="store_true", help="use only processor time that no other process wants")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="end after this many tokens at the latest")
    parser.add_argument("--decay-tokens", type=int, help="let the rate fall to zero over this many tokens, then end")
    parser.add_argument("--decay-seconds", type=float, help="the same over this time")
    parser.add_argument("--warmup", type=int, default=300_000, help="tokens of warm-up")
    parser.add_argument("--batch", type=int, default=8000, help="tokens per step")
    parser.add_argument("--longest", type=int, default=450, help="longest single conversation in tokens")
    parser.add_argument("--long-share", type=float, default=0.01, help="share of rows that join several conversations")
    parser.add_argument("--prompt-weight", type=float, default=0.02, help="loss weight of tokens outside answers")
    parser.add_argument("--noise", type=float, default=0.0,
                        help="share of the conversations whose prompts lose words or have foreign ones")  # fmt: skip
    parser.add_argument("--share", action="append", default=[], type=parse_share, metavar="KIND=SHARE",
                        help="of this kind among the examples, instead of its usual one")  # fmt: skip
    parser.add_argument("--average", type=float, default=0.995, help="share of the running average kept at a step")
    parser.add_argument("--muon-lr", type=float, default=0.005, help="learning rate of the matrices (Muon)")
    parser.add_argument("--adam-lr", type=float, default=0.001, help="learning rate of all other weights (AdamW)")
    parser.add_argument("--seed", type=int, default=1, help="seed of examples and first weights")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches; 0: the trainer")
    parser.add_argument("--uses", type=int, default=1,
                        help="times to train on a batch, if the workers are slower than the device")  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to train on")
    parser.add_argument("--compile", action="store_true", help="compile the blocks: a slow start, then faster steps")
    parser.add_argument("--report", type=int, default=20, help="steps between progress lines")
    parser.add_argument("--check-cases", type=int, default=50, help="cases of a check, by kind and column")
    parser.add_argument("--check-seconds", type=float, default=3600.0, help="seconds between checks")
    parser.add_argument("--save-seconds", type=float, default=900.0, help="seconds between checkpoints")
    args = parser.parse_args()
    for name in ("decay_tokens", "decay_seconds"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.uses < 1:
        parser.error("--uses must be at least 1")
    owner = ProcessLock(args.state / "trainer.lock", args.state)
    try:
        owner.acquire()
    except BlockingIOError:
        parser.error(f"another trainer uses {args.state}: stop it first, or give another --state")
    if args.idle:
        _use_idle_time()
    torch.set_num_threads(args.threads)
    Trainer(args).run()


def _use_idle_time() -> None:
    """Take only processor time that no other process wants. Where Linux shares it among sessions first (autogroup), the
    policy of a process counts within its session alone, so a session of the trainer's own gets the least weight too."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")


if __name__ == "__main__":
    main()
