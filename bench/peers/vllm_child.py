"""vLLM on the CPU, spoken to as `bench.peers.child` says. Runs under vLLM's own Python; imports nothing of Weft."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1


def main() -> None:
    # Answers go to the pipe; the output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A stopped process does not see its pipe close: it must not outlive its parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    engine = None
    for line in sys.stdin:
        message = json.loads(line)
        if message["call"] == "quit":
            break
        try:
            if message["call"] == "load":
                engine, answer = load(**{name: message[name] for name in message if name != "call"})
            else:
                answer = generate(engine, message["prompts"], message["output_tokens"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def load(checkpoint: str, threads: int, max_sequences: int, context: int) -> tuple[object, dict[str, object]]:
    """The engine in this process, without a tokenizer, a prefix cache or statistics; everything else as by default."""
    import vllm

    engine = vllm.LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=context,
        max_num_seqs=max_sequences,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    return engine, {"version": vllm.__version__}


def generate(engine: object, prompts: list[list[int]], output_tokens: int) -> dict[str, object]:
    """Generate `output_tokens` greedy tokens for each prompt; the end of sequence is ignored."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    results = engine.generate(inputs, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"outputs": [list(result.outputs[0].token_ids) for result in results], "seconds": seconds}


if __name__ == "__main__":
    main()
