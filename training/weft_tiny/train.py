"""Training: resumable, on a processor or a CUDA device.

The learning rate warms up and stays constant. In a run with ``--decay-minutes`` it falls linearly to zero over that
time, and training ends: on a machine shared with other work the end is then known and the tokens are not. The
exported weights are a running average, usable at any time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from training.weft_tiny.batches import Batch, Stream, collate, encode
from training.weft_tiny.data import KINDS, held_out, mixture
from training.weft_tiny.optim import Muon, split_parameters
from training.weft_tiny.tokenizer import CONTEXT, END_OF_TEXT, IM_END

ASSET = Path("weft/assets/weft-tiny")


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


def loss_of(trunk: nn.Module, head: nn.Module, batch: Batch, device: str) -> tuple[Tensor, Tensor]:
    """The weighted loss, and the mean loss of the assistant tokens; logits are made only where a weight is set."""
    tokens, weights = batch.tokens.to(device), batch.weights.to(device)[:, 1:]
    hidden = trunk(input_ids=tokens[:, :-1].contiguous(), use_cache=False).last_hidden_state
    wanted = weights > 0
    logits = head(hidden[wanted]).float()
    losses = nn.functional.cross_entropy(logits, tokens[:, 1:][wanted], reduction="none")
    weights = weights[wanted]
    answers = losses.detach()[weights == 1.0].mean()
    return (losses * weights).sum() / weights.sum(), answers


def rate(seen: int, warmup: int, minutes: float, decay_minutes: float | None) -> float:
    """The learning-rate factor after ``seen`` tokens, ``minutes`` into a run that decays over ``decay_minutes``."""
    factor = min(1.0, (seen + 1) / warmup)
    return factor if decay_minutes is None else factor * max(0.0, 1.0 - minutes / decay_minutes)


def _spans(flags: list[bool]) -> list[tuple[int, int]]:
    """The runs of true flags, as half-open ranges."""
    edges = [index for index in range(len(flags) + 1)
             if (index < len(flags) and flags[index]) != (index > 0 and flags[index - 1])]  # fmt: skip
    return list(zip(edges[::2], edges[1::2], strict=True))


class Trainer:
    """Model, optimizers, running average and counters, which a checkpoint restores."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = Tokenizer.from_file(str(args.asset / "tokenizer.json"))
        torch.manual_seed(args.seed)
        config = make_config(self.tokenizer)
        # On a processor the backward pass of fused attention takes half a step; as matrix products it takes a sixth.
        config._attn_implementation = "eager" if args.device == "cpu" else "sdpa"
        self.model = LlamaForCausalLM(config).to(args.device)
        trunk = self.model.model
        self.trunk: nn.Module = torch.compile(trunk, dynamic=True) if args.compile else trunk
        matrices, rest = split_parameters(self.model)
        self.muon = Muon(matrices, args.muon_lr, decay=0.01)
        self.adam = torch.optim.AdamW(rest, args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.average = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.seen = self.step = self.resumed = 0
        self.seconds = 0.0
        self.path = args.run / "checkpoint.pt"
        if self.path.exists():
            self.load()

    def load(self) -> None:
        """Restore the last checkpoint."""
        state: dict[str, Any] = torch.load(self.path, map_location=self.args.device)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.average, self.seen, self.step = state["average"], state["seen"], state["step"]
        self.resumed, self.seconds = state["resumed"] + 1, state.get("seconds", 0.0)

    def save(self) -> None:
        """Write a checkpoint, and the averaged weights next to it."""
        state = {"model": self.model.state_dict(), "muon": self.muon.state_dict(), "adam": self.adam.state_dict(),
                 "average": self.average, "seen": self.seen, "step": self.step, "resumed": self.resumed,
                 "seconds": self.seconds}  # fmt: skip
        self.args.run.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def update(self, batch: Batch, factor: float) -> Tensor:
        """One optimizer step at a learning-rate factor; returns the assistant tokens' mean loss, on the device."""
        args = self.args
        for optimizer, base in ((self.muon, args.muon_lr), (self.adam, args.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
        with torch.autocast(args.device.split(":")[0], torch.bfloat16):
            loss, answers = loss_of(self.trunk, self.model.lm_head, batch, args.device)
        loss.backward()
        nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += batch.size
        keep = min(0.98, 1 - 1 / (1 + self.step / 10)) if factor >= 1 else 0.9 * min(1.0, factor + 0.5)
        for name, value in self.model.named_parameters():
            self.average[name].lerp_(value.detach(), 1 - keep)
        return answers

    @torch.no_grad()
    def check(self, count: int = 96) -> str:
        """The share of held-out answers whose every token is the likeliest one, given the right tokens before it.

        Of the averaged weights. Quick to compute and close to what a greedy answer would get, where only one answer
        is right; the card's figures come from ``evaluate``.
        """
        shares = []
        current = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self._set(self.average)
        for kind in KINDS:
            right = answers = 0
            rows = [encode(case, self.tokenizer, 0.0) for case in held_out(kind, count, templates=False, seed=1)]
            for first in range(0, count, 16):
                batch = collate(rows[first : first + 16])
                tokens, asked = batch.tokens.to(self.args.device), batch.weights[:, 1:] > 0
                with torch.autocast(self.args.device.split(":")[0], torch.bfloat16):
                    likeliest = self.model(input_ids=tokens[:, :-1]).logits.argmax(-1)
                hits = (likeliest == tokens[:, 1:]).cpu()
                for row in range(len(hits)):
                    spans = _spans(asked[row].tolist())
                    answers += len(spans)
                    right += sum(bool(hits[row, start:end].all()) for start, end in spans)
            shares.append(f"{kind} {100 * right / answers:.1f} %")
        self._set(current)
        return ", ".join(shares)

    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, value in self.model.named_parameters():
            value.copy_(weights[name])

    def run(self) -> None:
        """Train until the wanted number of tokens, with a progress line and regular checkpoints."""
        args = self.args
        stream = Stream(args.asset / "tokenizer.json", args.seed + 1000 * self.resumed, args.batch, args.longest,
                        args.prompt_weight, args.long_share, mixture(args.recall_share))  # fmt: skip
        source = stream.loader(args.workers)
        began = saved = last = time.monotonic()
        first, losses, factor = self.seen, list[Tensor](), 1.0
        while self.seen < args.tokens and factor > 0:
            factor = rate(self.seen, args.warmup, (time.monotonic() - began) / 60, args.decay_minutes)
            losses.append(self.update(next(source), factor))
            now = time.monotonic()
            self.seconds, last = self.seconds + now - last, now
            if self.step % args.report == 0:
                mean, speed = float(torch.stack(losses).mean()), (self.seen - first) / (now - began)
                line = f"step {self.step}  tokens {self.seen / 1e6:.2f}M  loss {mean:.4f}"
                print(f"{line}  rate {factor:.2f}  {speed:.0f} tokens/s", flush=True)
                losses = []
            if self.step % args.check == 0:
                print(f"held out: {self.check()}", flush=True)
            if now - saved > args.save_seconds:
                self.save()
                saved = now
        self.save()


def main() -> None:
    """Train weft-tiny; run again with the same --run to resume."""
    parser = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/weft_tiny"), help="directory of the checkpoint")
    parser.add_argument("--asset", type=Path, default=ASSET, help="directory with tokenizer.json")
    parser.add_argument("--tokens", type=int, default=40_000_000, help="end after this many tokens at the latest")
    parser.add_argument("--decay-minutes", type=float, help="let the rate fall to zero over this time, then end")
    parser.add_argument("--warmup", type=int, default=150_000, help="tokens of warm-up")
    parser.add_argument("--batch", type=int, default=3600, help="tokens per step")
    parser.add_argument("--longest", type=int, default=400, help="longest single conversation in tokens")
    parser.add_argument("--long-share", type=float, default=0.015, help="share of rows that join several conversations")
    parser.add_argument("--prompt-weight", type=float, default=0.1, help="loss weight of tokens outside answers")
    parser.add_argument("--recall-share", type=float, default=0.0, help="share of rows that are look-up tables")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches; 0: the trainer does")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the blocks: a slow start, then faster steps")
    parser.add_argument("--report", type=int, default=20, help="steps between progress lines")
    parser.add_argument("--check", type=int, default=400, help="steps between checks on held-out cases")
    parser.add_argument("--save-seconds", type=float, default=240.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Trainer(args).run()


if __name__ == "__main__":
    main()
