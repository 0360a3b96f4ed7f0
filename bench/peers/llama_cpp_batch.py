"""llama.cpp through `llama-cpp-python`: one context, all prompts as sequences of its batches, greedy.

A checkpoint in a directory is handed over as bfloat16 GGUF, exactly; a GGUF file is read as it is. What llama.cpp says
of repacked weights while it loads is kept (`instructions`), with the instructions that it was compiled for.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.gguf_checkpoint import gguf_file
from weft.core.step import F32

BATCH_TOKENS, UBATCH_TOKENS = 2048, 512
QUANTIZING_THREADS = 2
MOST_LINES = 20
"""Of what is kept of its log."""
GGML_TYPE_BF16 = 30
"""ggml's number for bfloat16, which the Python package does not export."""


@functools.cache
def _no_log() -> Any:
    """Drops what llama.cpp logs. Kept as long as the process, because llama.cpp calls it by address."""
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda level, text, data: None)


def silence() -> None:
    """Drop what llama.cpp logs, until a model hears it."""
    import llama_cpp

    llama_cpp.llama_log_set(_no_log(), None)


def quantized(source: Path, kind: str, file: Path, packages: Path | None = None) -> Path:
    """A GGUF file in another type, one of llama.cpp's `LLAMA_FTYPE_`, written by its own quantizer. `packages` is a
    directory to find llama.cpp in. Raises `ImportError` where it is not installed, and `RuntimeError`."""
    if packages is not None and str(packages.resolve()) not in sys.path:
        sys.path.append(str(packages.resolve()))
    import llama_cpp

    silence()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
    params.nthread, params.allow_requantize = QUANTIZING_THREADS, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {file.name}")
    return file


class LlamaCpp:
    """Prompts of any number up to `max_sequences`; raises `ImportError` where the packages are missing."""

    notes: tuple[str, ...] = ()

    def __init__(
        self, checkpoint: Path, threads: int, max_sequences: int = 32, context: int = 512, *, float32_kv: bool = False
    ):
        """`float32_kv`: KV in float32 and attention in separate products, instead of KV in bfloat16."""
        import llama_cpp

        self._api: Any = llama_cpp
        self.version = str(llama_cpp.__version__)
        llama_cpp.llama_backend_init()
        self.instructions = [llama_cpp.llama_print_system_info().decode()]
        self._log = llama_cpp.llama_log_callback(self._heard)
        llama_cpp.llama_log_set(self._log, None)
        file = checkpoint if checkpoint.is_file() else gguf_file(checkpoint, "bf16")
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_sequences * context
        params.n_batch, params.n_ubatch = BATCH_TOKENS, UBATCH_TOKENS
        params.n_seq_max = max_sequences
        params.n_threads = params.n_threads_batch = threads
        if float32_kv:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        else:
            params.type_k = params.type_v = GGML_TYPE_BF16
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp could not make a context")
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _heard(self, level: int, text: bytes, data: object) -> None:
        line = text.decode(errors="replace").strip()
        if "repack" in line.lower() and len(self.instructions) < MOST_LINES and line not in self.instructions:
            self.instructions.append(line)

    def generate(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        work = [
            (seq, position, token, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(work), BATCH_TOKENS):
            last |= self._decode(work[start : start + BATCH_TOKENS])
        outputs = [[last[seq]] for seq in range(len(prompts))]
        for step in range(output_tokens - 1):
            work = [(seq, len(prompts[seq]) + step, outputs[seq][-1], True) for seq in range(len(prompts))]
            last = self._decode(work)
            for seq, output in enumerate(outputs):
                output.append(last[seq])
        return outputs

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)
        silence()  # the callback goes with this object

    def logits(self, tokens: list[int]) -> F32:
        """[tokens, vocabulary]: logits after each of at most `BATCH_TOKENS` tokens of one sequence."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._compute([(0, position, token, True) for position, token in enumerate(tokens)])
        return np.stack([self._logits_at(index).copy() for index in range(len(tokens))])

    def _decode(self, work: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute (sequence, position, token, wants logits) entries; the likeliest next token of those that want it."""
        self._compute(work)
        return {seq: int(self._logits_at(i).argmax()) for i, (seq, _, _, wanted) in enumerate(work) if wanted}

    def _compute(self, work: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(work)
        for index, (seq, position, token, wanted) in enumerate(work):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = seq
            batch.logits[index] = wanted
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")

    def _logits_at(self, index: int) -> F32:
        logits = self._api.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(logits, (self._vocab_size,))
