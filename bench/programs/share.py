"""Share of the time that programs add on a real model: a loop over distributions, `generate`, and the device alone."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from bench.programs import sources
from bench.programs.rig import Rig, rig_over
from weft.cli.bench.measure import Spread
from weft.config import EngineConfig
from weft.engine.supervisor import ProcessEngine
from weft.models.random_checkpoints import FAMILIES, write_checkpoint

LLAMA_1B: Mapping[str, Any] = MappingProxyType(
    {
        **FAMILIES["llama"],
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
KINDS = {"generate": sources.GENERATE, "loop": sources.LOOP, "pages": sources.PAGES}


class Share(NamedTuple):
    """Milliseconds per token of every program, and the part of them in which the device was busy."""

    ms: Spread
    device_ms: Spread

    @property
    def added(self) -> float:
        """Share of the time in which the device is idle."""
        return 1 - self.device_ms.median / self.ms.median


@contextlib.asynccontextmanager
async def model_rig(checkpoint: Path) -> AsyncIterator[Rig]:
    """A rig with an engine process and a real model."""
    engine = ProcessEngine(EngineConfig(model=str(checkpoint), dtype="bfloat16", num_pages=4096, max_context=2048))
    try:
        await engine.wait_ready()
        async with rig_over(engine, "model") as rig:
            yield rig
    finally:
        await engine.close()


async def shares(counts: list[int], tokens: int, runs: int) -> dict[tuple[str, int], Share]:
    """(kind, programs) -> shares. Kinds are measured in alternation; the first run is a warm-up."""
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "model", LLAMA_1B, dtype=torch.bfloat16, tokenizer=True)
        async with model_rig(checkpoint) as rig:
            for count in counts:
                for run in range(runs + 1):
                    for kind, source in KINDS.items():
                        before = await rig.runtime.engine.stats()
                        began = time.perf_counter()
                        await rig.all(source, {"tokens": tokens}, count)
                        ms = (time.perf_counter() - began) * 1000 / tokens
                        after = await rig.runtime.engine.stats()
                        if run:
                            device_ms = (after.step_device_s - before.step_device_s) * 1000 / tokens
                            times.setdefault((kind, count), []).append((ms, device_ms))
    return {
        key: Share(*(Spread.of(list(values)) for values in zip(*found, strict=True))) for key, found in times.items()
    }


async def report_share(runs: int, counts: list[int], tokens: int) -> dict[str, Any]:
    """Measure the device's share and print it."""
    print(f"on random weights in the shape of Llama 3.2 1B, bfloat16: ms per token of every program; {tokens} tokens")
    table = await shares(counts, tokens, runs)
    for (kind, count), share in table.items():
        against = table["generate", count].ms.median
        rest = f"device {share.device_ms.median:8.2f}, the rest {share.added:6.1%}"
        print(f"  {kind:9} {count:4} programs {share.ms}   {rest}; {share.ms.median / against:.3f} x generate")
    return {
        f"{kind} x {count}": {"ms": list(share.ms), "device_ms": list(share.device_ms)}
        for (kind, count), share in table.items()
    }
